"""Cost model: seconds of layers and stages, bytes, and the optimizer's rate, for a model on a hardware.

A layer takes the measured time where the hardware spec has one for that (layer, pass, shape, dtype), scaled if only
another microbatch was measured, else an estimate from peak rates; what is not measured is said in ``notes``.
``spipe.sim.pricing`` turns this into the costs of ops.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from spipe.hardware import HardwareSpec, MeasuredLayer
from spipe.layer_list import Model
from spipe.model import BLOCK_PARTS, PASS_FACTOR, ModelSpec, PassName
from spipe.ops import COMPUTE, RECVS, Kind
from spipe.plan import ELEMENT_BYTES, Plan

_OPTIMIZER_STATE_BYTES = 24  # read and written per parameter and step: fp32 master weight and two moments
_FUSED_HEAD_DIM = 256  # widest head of fused attention kernels; wider heads need the whole score matrix in memory
_ACTIVATION_PASSES = 1  # how often what autograd saves is written and read in a pass, without fused kernels
_SCORE_PASSES = 4  # scores written, read and written by the softmax, read by the product with the values
_REPLAY_COPIES = {Kind.FORWARD: 3, Kind.RECOMPUTE: 1, Kind.BACKWARD: 3}  # of a boundary, around a recorded op
_IN_TURNS: tuple[PassName, PassName] = ("recompute", "backward")
LAUNCHES: dict[str, float] = {"embedding": 0.0, "attention": 0.7, "mlp": 0.3}
"""Kernels of a layer kind in units of a block's; others have as many as a block."""


@dataclass(frozen=True)
class CostModel:
    """What ops cost. Build it with ``of`` from a plan, or from its parts before there is one.

    Attributes:
        compute_threads: device ``cpu``: cores of a rank's compute lane.
        optimizer_threads: cores of a rank's optimizer; 0: the host's cores shared out over ``ranks_per_host``.
        ranks_per_host: ranks in use on a host.
        skips_outputs: a recompute leaves out what only its stage's output needs.
        keeps_undo: the optimizer steps before it knows that the step counts.
        cuda_graphs: stages of nothing but blocks are replayed, which takes the host one launch.
    """

    model: Model
    hardware: HardwareSpec
    precision: str
    sequence: int
    microbatch_size: int
    gradient_precision: str | None = None
    compute_threads: int = 1
    optimizer_threads: int = 0
    ranks_per_host: int = 1
    cuda_graphs: bool = False
    keeps_undo: bool = True
    skips_outputs: bool = False
    _notes: dict[str, None] = field(default_factory=dict, repr=False, compare=False)
    _uncalibrated: dict[str, None] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, plan: Plan, hardware: HardwareSpec | None = None) -> "CostModel":
        """The cost model of a plan, on its own hardware or another one."""
        hardware = hardware or plan.hardware
        return cls(
            model=plan.model,
            hardware=hardware,
            precision=plan.precision,
            sequence=plan.sequence,
            microbatch_size=plan.microbatch_size,
            gradient_precision=plan.gradient_dtype,
            compute_threads=plan.compute_threads,
            optimizer_threads=plan.optimizer_threads,
            ranks_per_host=min(plan.layout.num_ranks, hardware.ranks_per_host),
            cuda_graphs=plan.cuda_graphs,
            keeps_undo=plan.options.optimizer == "async",
            skips_outputs=not (plan.options.recompute_output or plan.compile_layers or plan.dropout),
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What the costs asked for so far rest on, other than measurements."""
        if not self._uncalibrated:
            return tuple(self._notes)
        what = "any layer" if len(self._uncalibrated) == len(self._layer_seconds) else ", ".join(self._uncalibrated)
        return (
            f"not calibrated for {what} ({self.precision}, {self.microbatch_size} x {self.sequence} tokens) on "
            f"{self.hardware.name}: estimated from peak rates",
            *self._notes,
        )

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch."""
        return self.microbatch_size * self.sequence

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.precision]

    @property
    def gradient_element_bytes(self) -> int:
        return ELEMENT_BYTES[self.gradient_precision or self.precision]

    # ------------------------------------------------------------------ layers and stages

    def layer_s(self, kind: str, pass_name: PassName) -> float:
        """Seconds of one pass of one layer for one microbatch, without the overhead of the op."""
        return self._no_less(
            pass_name,
            lambda name: self.device_s(kind, name),
            lambda name: self._issue_s(kind, name),
            self.cuda_graphs and kind in ("block", *BLOCK_PARTS),
        )

    def device_s(self, kind: str, pass_name: PassName) -> float:
        """Seconds that the device needs for a pass of a layer; the host may need longer to issue it."""
        found = self._layer_seconds.get((kind, pass_name))
        return self._layer_s(kind, pass_name) if found is None else found

    @cached_property
    def _layer_seconds(self) -> dict[tuple[str, PassName], float]:
        kinds = dict.fromkeys(map(self.model.layer_kind, range(self.model.num_total_layers)))
        return {(kind, name): self._layer_s(kind, name) for kind in kinds for name in PASS_FACTOR}

    def _no_less(
        self,
        pass_name: PassName,
        device_s: Callable[[PassName], float],
        issue_s: Callable[[PassName], float],
        replayed: bool,
    ) -> float:
        """What the device needs, or the host if that is more; of recompute and backward, which take turns, together."""
        if not self.hardware.accelerator.layer_issue_s or replayed:
            return device_s(pass_name)
        if pass_name == "forward":
            return max(device_s(pass_name), issue_s(pass_name))
        recompute, backward = (issue_s(name) - device_s(name) for name in _IN_TURNS)
        late_s = max(recompute + backward, 0.0)
        in_recompute_s = min(late_s, max(recompute, 0.0))
        return device_s(pass_name) + (in_recompute_s if pass_name == "recompute" else late_s - in_recompute_s)

    def _issue_s(self, kind: str, pass_name: PassName) -> float:
        """Least seconds of a pass of a layer, however few its operations: what the host needs to issue its kernels."""
        return LAUNCHES.get(kind, 1.0) * self.hardware.accelerator.layer_issue_s.get(pass_name, 0.0)

    def _layer_s(self, kind: str, pass_name: PassName) -> float:
        hardware = self.hardware
        if hardware.unit_cost is not None:
            return hardware.unit_cost.layer_s(kind, pass_name)
        measured = self._measured_s(kind, pass_name)
        if measured is None and kind in BLOCK_PARTS:
            block = self._measured_s("block", pass_name)
            if block is not None:
                self._note(f"{kind} {pass_name}: a share of the measured block, by operations and bytes")
                measured = block * self._share_of_block(kind, pass_name)
        if measured is None and kind == "block":
            parts = [self._measured_s(part, pass_name) for part in BLOCK_PARTS]
            if None not in parts:
                self._note(f"block {pass_name}: the sum of its measured parts")
                measured = sum(part for part in parts if part is not None)
        if measured is not None:
            return measured
        self._uncalibrated[f"{kind} {pass_name}"] = None
        return self._roofline_s(kind, pass_name) * self._thread_factor

    @property
    def _thread_factor(self) -> float:
        """By how much longer than with the threads of the measurements, and of the peak rates, a layer takes."""
        if self.hardware.device != "cpu":
            return 1.0
        return self.hardware.accelerator.compute_threads / self.compute_threads

    def _share_of_block(self, part: str, pass_name: PassName) -> float:
        whole_s = math.fsum(self._roofline_s(each, pass_name) for each in BLOCK_PARTS)
        return self._roofline_s(part, pass_name) / whole_s

    def _measured_s(self, kind: str, pass_name: PassName) -> float | None:
        """From a measurement of this layer with this microbatch, or with another one."""
        hardware, threads = self.hardware, self._thread_factor
        exact = hardware.find_measured(self.model, kind, pass_name, self.microbatch_size, self.sequence, self.precision)
        if exact is not None:
            if threads != 1.0:
                self._note(
                    f"{kind} {pass_name}: measured with {hardware.accelerator.compute_threads} threads, scaled to "
                    f"{self.compute_threads}"
                )
            return exact.seconds * threads
        near = self._nearest_measured(kind, pass_name)
        if near is not None:
            self._note(
                f"{kind} {pass_name}: measured for microbatches of {near.microbatch_size} x {near.sequence} tokens, "
                f"scaled to {self.microbatch_size} x {self.sequence}"
            )
            return near.seconds * self._roofline_s(kind, pass_name) / self._roofline_s(kind, pass_name, near) * threads
        return None

    def measured_entries(self) -> list[MeasuredLayer]:
        """The measurements that the layers' times rest on."""
        if self.hardware.unit_cost is not None or not isinstance(self.model, ModelSpec):
            return []
        found = [
            self.hardware.find_measured(self.model, kind, name, self.microbatch_size, self.sequence, self.precision)
            or self._nearest_measured(kind, name)
            for kind in dict.fromkeys((*self.model.layer_kinds, "block"))
            for name in PASS_FACTOR
        ]
        return [entry for entry in found if entry is not None]

    def _nearest_measured(self, kind: str, pass_name: PassName) -> MeasuredLayer | None:
        if not isinstance(self.model, ModelSpec):
            return None
        shape = MeasuredLayer.shape_of(self.model, kind)
        fits = [
            entry
            for entry in self.hardware.measured
            if (entry.layer_kind, entry.pass_name, entry.dtype) == (kind, pass_name, self.precision)
            and all(getattr(entry, name) == value for name, value in shape.items())
        ]
        return min(
            fits,
            key=lambda entry: abs(math.log(entry.microbatch_size * entry.sequence / self.tokens)),
            default=None,
        )

    def _roofline_s(self, kind: str, pass_name: PassName, shape: MeasuredLayer | None = None) -> float:
        """Operations / reachable rate, and bytes / memory bandwidth beside it.

        The sum, not the larger of the two: a layer alternates between matrix products and ops that only move data.
        Bytes: weights and activations once for a forward pass, twice (and gradients read and written) for a backward.
        """
        size, sequence = (shape.microbatch_size, shape.sequence) if shape else (self.microbatch_size, self.sequence)
        accelerator = self.hardware.accelerator
        fused = self.model.head_dim <= _FUSED_HEAD_DIM
        flops = self.model.layer_flops(kind, pass_name, size, sequence, causal=fused)
        rate = accelerator.peak(self.precision) * accelerator.efficiency(size * sequence, self.model.hidden_size)
        parameters = self.model.layer_num_parameters(kind)
        if kind == "embedding":
            boundary = self.model.boundary_bytes(size, sequence, self.element_bytes)
            num_bytes = (2 if pass_name != "backward" else 4) * boundary
        else:
            activations = self.model.layer_activation_bytes(kind, size, sequence, self.element_bytes)
            if kind in ("block", "mlp") and isinstance(self.model, ModelSpec):  # and silu(gate), which is not kept
                activations += size * sequence * self.model.ffn_size * self.element_bytes
            moved = parameters * self.element_bytes + _ACTIVATION_PASSES * activations
            if kind in ("block", "attention") and not fused:
                moved += _SCORE_PASSES * size * self.model.num_heads * sequence**2 * self.element_bytes
            num_bytes = moved if pass_name != "backward" else 2 * (moved + parameters * self.gradient_element_bytes)
        return flops / rate + num_bytes / accelerator.memory_bandwidth_bytes_per_s

    def roofline_ratio(self, kind: str, unit: str, pass_name: PassName) -> float:
        """Time of a layer in units of that of another kind, by peak rates; 0 where those are unlimited."""
        unit_s = self._roofline_s(unit, pass_name)
        return self._roofline_s(kind, pass_name) / unit_s if unit_s > 0 else 0.0

    def ratio(self, kind: str, unit: str, pass_name: PassName) -> float:
        """Time of a layer in units of that of another kind: as measured where both were, else by peak rates."""
        found = [
            self.hardware.find_measured(
                self.model, each, pass_name, self.microbatch_size, self.sequence, self.precision
            )
            for each in (kind, unit)
        ]
        if all(found) and self.layer_s(unit, pass_name) > 0:
            return self.layer_s(kind, pass_name) / self.layer_s(unit, pass_name)
        return self.roofline_ratio(kind, unit, pass_name)

    def block_s(self, pass_name: PassName) -> float:
        """Seconds of one pass of a whole block."""
        assert isinstance(self.model, ModelSpec)
        return math.fsum(self.layer_s(kind, pass_name) for kind in self.model.layer_kinds[1:-1])

    def stage_s(self, layers: range, pass_name: PassName) -> float:
        """Seconds of one pass of a stage for one microbatch, without the overhead of the op."""
        kinds = [self.model.layer_kind(layer) for layer in layers]
        return self._no_less(
            pass_name,
            lambda name: (
                math.fsum(self.device_s(kind, name) for kind in kinds)
                - (self.unseen_s(layers) if name == "recompute" else 0.0)
            ),
            lambda name: (
                self.hardware.accelerator.op_issue_s.get(name, 0.0)
                + math.fsum(self._issue_s(kind, name) for kind in kinds)
            ),
            self.records(layers),
        )

    def unseen(self, layers: range) -> float:
        """Share of the last layer of a stage that its recompute leaves out, as it only makes the stage's output."""
        model = self.model
        if not self.skips_outputs or not isinstance(model, ModelSpec) or self.hardware.unit_cost is not None:
            return 0.0
        return model.output_share(model.layer_kind(layers.stop - 1), self.sequence)

    def unseen_s(self, layers: range) -> float:
        """Seconds that the recompute of a stage is shorter than those of its layers."""
        return self.unseen(layers) * self.device_s(self.model.layer_kind(layers.stop - 1), "recompute")

    def records(self, layers: range) -> bool:
        """Whether ops of a stage are recorded and replayed."""
        return self.cuda_graphs and layers.start > 0 and layers.stop < self.model.num_total_layers

    def replay_s(self, kind: int) -> float:
        """Seconds beside its layers of an op that is replayed: what goes in and comes out is copied."""
        moved = 2 * _REPLAY_COPIES[Kind(kind)] * self.boundary_bytes()
        return moved / self.hardware.accelerator.memory_bandwidth_bytes_per_s

    def weight_gradient_s(self, layers: range) -> float:
        """Seconds of the second half of a backward that is split in two: the gradients of the weights."""
        kinds = [self.model.layer_kind(layer) for layer in layers]
        return math.fsum(self._weight_gradient_share(kind) * self.layer_s(kind, "backward") for kind in kinds)

    def _weight_gradient_share(self, kind: str) -> float:
        """As many operations as the forward has outside attention scores, which have no weights."""
        if kind == "embedding":
            return 1.0
        if kind in ("head", "mlp") or self.hardware.unit_cost is not None or not self.model.attention_size:
            return 0.5
        scores = 4.0 * self.tokens * self.sequence * self.model.attention_size / 2  # causal
        return 0.5 * (
            1 - scores / self.model.layer_forward_flops(kind, self.microbatch_size, self.sequence, causal=True)
        )

    def layer_costs(self) -> list[float]:
        """Forward seconds of every layer, head and embedding included: what balances the cuts of a layout."""
        model = self.model
        return [self.layer_s(model.layer_kind(i), "forward") for i in range(model.num_total_layers)]

    # ------------------------------------------------------------------ bytes and parameters

    def num_parameters(self, layers: range) -> int:
        """Parameters that the layers read; a tied one counts wherever it is read."""
        return sum(self.model.layer_num_parameters(self.model.layer_kind(layer)) for layer in layers)

    def num_stepped_parameters(self, layers: range) -> int:
        """Parameters that are stepped with these layers: a tied one in the embedding's bucket only."""
        model = self.model
        if isinstance(model, ModelSpec) and model.tied_embeddings and model.num_total_layers - 1 in layers:
            return self.num_parameters(layers) - model.vocab_size * model.hidden_size
        return self.num_trained_parameters(layers)

    def num_trained_parameters(self, layers: range) -> int:
        """Parameters that have gradients; a tied one counts wherever it is read."""
        return sum(self.model.layer_num_trained(self.model.layer_kind(layer)) for layer in layers)

    def saved_bytes(self, layers: range) -> int:
        """Bytes that a forward of the layers saves for their backward, for one microbatch."""
        model, size, sequence, element = self.model, self.microbatch_size, self.sequence, self.element_bytes
        return sum(model.layer_activation_bytes(model.layer_kind(i), size, sequence, element) for i in layers)

    def boundary_bytes(self) -> int:
        """Bytes of an activation, gradient or stage input of one microbatch."""
        return self.model.boundary_bytes(self.microbatch_size, self.sequence, self.element_bytes)

    # ------------------------------------------------------------------ optimizer

    @property
    def adam_threads(self) -> int:
        """Cores of a rank's optimizer."""
        return self.optimizer_threads or max(1, self.hardware.cpu.cores // self.ranks_per_host)

    @property
    def adam_bytes(self) -> int:
        """Bytes of host memory moved per parameter and step."""
        return _OPTIMIZER_STATE_BYTES + self.element_bytes + self.gradient_element_bytes

    @property
    def adam_rate(self) -> float:
        """Parameters per second of one rank's optimizer while nothing else runs."""
        return self.host_adam_rate * self.adam_share

    @property
    def host_adam_rate(self) -> float:
        """That of all cores of a host; never above what its memory gives, for a faster one would only take what copies
        need."""
        cpu = self.hardware.cpu
        return min(cpu.adam_parameters_per_s * self.undo_factor, cpu.memory_bandwidth_bytes_per_s / self.adam_bytes)

    @property
    def undo_factor(self) -> float:
        """By what the optimizer is faster than with an undo log."""
        return 1.0 if self.keeps_undo else self.hardware.cpu.undo_slowdown

    @property
    def adam_share(self) -> float:
        """A rank's part of it. Cores that do not divide among the ranks are not lost, unless threads were given."""
        share = self.adam_threads / self.hardware.cpu.cores
        return min(1.0, share if self.optimizer_threads else max(share, 1 / self.ranks_per_host))

    # ------------------------------------------------------------------ ops

    def overhead_s(self, kind: int) -> float:
        """Fixed part of an op, beside layers and bytes; a message's is that of its SEND."""
        hardware = self.hardware
        name = Kind(kind - 1 if kind in RECVS else kind).name
        if name in hardware.measured_op_overhead_s:
            return hardware.measured_op_overhead_s[name]
        if kind in COMPUTE and hardware.device == "cpu":
            return hardware.accelerator.launch_overhead_s
        return hardware.cpu.adam_s_per_op if kind == Kind.STEP else 0.0

    def _note(self, text: str) -> None:
        self._notes[text] = None
