"""The buffers of a rank on its device: allocated once, numbered by the program's slots.

A slot is as large as its largest user. Weight slots are seen as leaves of autograd, layer by layer; gradient slabs have
the same order of elements, so that a parameter's gradient lies where its weight does.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from spipe.ops import Kind
from spipe.plan import Plan
from spipe.program import Program
from spipe.runtime.devices import Device
from spipe.runtime.region import DTYPES, bytes_of, private_memory
from spipe.runtime.store import ParameterTable, Store

LayerViews = list[dict[str, torch.Tensor]]


@dataclass(frozen=True)
class TokenSlot:
    """Inputs and labels of one microbatch on the device (token ids: (b, s) int64 each), and where they are put
    together."""

    inputs: torch.Tensor
    labels: torch.Tensor
    staging: tuple[torch.Tensor, ...]

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from (self.inputs, self.labels)


class Buffers:
    """Everything a rank's ops write on the device, except the temporaries of compute ops."""

    def __init__(self, plan: Plan, program: Program, rank: int, store: Store, device: Device) -> None:
        self.plan, self.program, self.device = plan, program, device
        self.table, self.trained = store.table, store.trained
        self.dtype, self.gradient_dtype = DTYPES[plan.precision], DTYPES[plan.gradient_dtype]
        num_bytes = plan.model.boundary_bytes(plan.microbatch_size, plan.sequence, self.dtype.itemsize)
        self.boundary_elements = num_bytes // self.dtype.itemsize
        weight_elements: dict[int, int] = defaultdict(int)
        slab_elements: dict[int, int] = defaultdict(int)
        self.residency_slot: dict[int, int] = {}
        self.inbox: dict[tuple[int, ...], torch.Tensor] = {}
        self.tokens: dict[tuple[int, int], TokenSlot] = {}
        mine = program.of_rank(rank)
        for i in mine:
            kind, slot = program.kind[i], program.slot[i]
            if kind == Kind.FETCH:
                self.residency_slot[program.visit[i]] = slot
                weight_elements[slot] = max(weight_elements[slot], self.num_elements(program.stage[i]))
            elif kind == Kind.OFFLOAD_GRAD:
                slab_elements[slot] = max(slab_elements[slot], self.num_gradients(program.stage[i]))
            elif kind == Kind.LOAD_TOKENS and (program.stage[i], slot) not in self.tokens:
                self.tokens[program.stage[i], slot] = self._token_slot()
            elif self.inbox_key(i) is not None and self.inbox_key(i) not in self.inbox:
                key = self.inbox_key(i)
                assert key is not None
                self.inbox[key] = self._flat(self.boundary_elements, self.dtype)
        self.weight_slots = {slot: self._flat(count, self.dtype) for slot, count in weight_elements.items()}
        self.slabs = {slot: self._flat(count, self.gradient_dtype) for slot, count in slab_elements.items()}
        self._leaves: dict[tuple[int, range], LayerViews] = {}
        self._gradients: dict[tuple[int, range], LayerViews] = {}

    def table_of_bytes(self) -> dict[str, int]:
        """What is allocated here, itemised."""
        tokens = [tensor for slot in self.tokens.values() for tensor in slot.tensors()]
        parts = {
            "weights": self.weight_slots.values(),
            "gradients": self.slabs.values(),
            "messages and stage inputs": self.inbox.values(),
            "tokens": tokens,
        }
        return {name: sum(map(bytes_of, tensors)) for name, tensors in parts.items()}

    def num_elements(self, stage: int) -> int:
        """Elements of a stage's parameters, with padding."""
        first, stop = self.table.span(self.program.layers(stage))
        return stop - first

    def num_gradients(self, stage: int) -> int:
        """Elements of a stage's gradients, with padding."""
        first, stop = self.trained.span(self.program.layers(stage))
        return stop - first

    def inbox_key(self, i: int) -> tuple[int, ...] | None:
        """Which buffer op ``i`` receives or loads into; None for ops that do neither."""
        program, kind = self.program, self.program.kind[i]
        if kind in (Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT):
            return kind, program.lane[i], program.slot[i]
        if kind == Kind.RECV_STAGE_INPUT:  # sized for everything in flight
            return kind, program.stage[i], program.index[i]
        if kind == Kind.LOAD_STAGE_INPUT:
            return kind, program.slot[i]
        return None

    def leaves(self, slot: int, layers: range) -> LayerViews:
        """Weights of neighbouring layers in a weight slot: per layer, name -> leaf of autograd.

        Those that are trained require gradients, in the order of ``gradients``.
        """
        if (slot, layers) not in self._leaves:
            views = self._views(self.weight_slots[slot], self.table, layers)
            trained = [{p.name for p in self.trained.layers[layer]} for layer in layers]
            self._leaves[slot, layers] = [
                {name: view.detach().requires_grad_(name in names) for name, view in layer.items()}
                for layer, names in zip(views, trained, strict=True)
            ]
        return self._leaves[slot, layers]

    def gradients(self, slot: int, layers: range) -> LayerViews:
        """Gradients of neighbouring layers in a slab, shaped like their weights."""
        if (slot, layers) not in self._gradients:
            self._gradients[slot, layers] = self._views(self.slabs[slot], self.trained, layers)
        return self._gradients[slot, layers]

    @staticmethod
    def _views(flat: torch.Tensor, table: ParameterTable, layers: range) -> LayerViews:
        origin = table.bounds[layers.start]
        return [
            {p.name: flat[p.first - origin : p.first - origin + p.count].view(p.shape) for p in table.layers[layer]}
            for layer in layers
        ]

    def _flat(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        # zeros, not empty: what lies between aligned parameters is copied along and has to be defined.
        if self.device.device.type == "cpu":
            num_floats = -(-num_elements * dtype.itemsize // 4)
            return private_memory(num_floats).view(torch.uint8)[: num_elements * dtype.itemsize].view(dtype)
        return torch.zeros(num_elements, dtype=dtype, device=self.device.device)

    def _token_slot(self) -> TokenSlot:
        plan, on_gpu = self.plan, self.device.device.type != "cpu"
        specs = plan.model.input_tensors(plan.microbatch_size, plan.sequence)
        kinds = [
            (spec.shape_of(plan.microbatch_size), self.dtype if spec.dtype == "float" else getattr(torch, spec.dtype))
            for spec in specs
        ]
        inputs, labels = (torch.zeros(shape, dtype=dtype, device=self.device.device) for shape, dtype in kinds)
        staging = tuple(torch.zeros(shape, dtype=dtype, pin_memory=on_gpu) for shape, dtype in kinds)
        return TokenSlot(inputs, labels, staging)
