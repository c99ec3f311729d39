"""What each kind of op does: one method a kind, called by the executor in the thread of the op's lane.

The program says when; a handler only does. What travels between ops of one rank is kept under the name of its
consumer: ("activation" | "stage input" | "gradient", stage number, microbatch).
"""

import math
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import torch

from spipe.model import ModelSpec
from spipe.ops import COMPUTE, Kind
from spipe.plan import Plan
from spipe.program import Program
from spipe.runtime.buffers import Buffers
from spipe.runtime.data import Feed
from spipe.runtime.devices import Device
from spipe.runtime.hooks import TestHooks
from spipe.runtime.network import Network, draw_seed
from spipe.runtime.recorded import RecordedStages
from spipe.runtime.region import DTYPES
from spipe.runtime.settlement import LayerState, Settlement
from spipe.runtime.store import Store
from spipe.runtime.system import own_resident_bytes
from spipe.runtime.transports import Transport

Handler = Callable[[int, int], str | None]

_CLASS = {
    Kind.SEND_ACTIVATION: "activation",
    Kind.RECV_ACTIVATION: "activation",
    Kind.SEND_GRADIENT: "gradient",
    Kind.RECV_GRADIENT: "gradient",
    Kind.SEND_STAGE_INPUT: "stage input",
    Kind.RECV_STAGE_INPUT: "stage input",
    Kind.STORE_STAGE_INPUT: "stage input",
    Kind.LOAD_STAGE_INPUT: "stage input",
}


class Handlers:
    """The ops of one rank. Each handler takes (op number, step) and may return a note for the trace."""

    def __init__(
        self, plan: Plan, program: Program, rank: int, store: Store, device: Device, transport: Transport,
        settlement: Settlement, feed: Feed, network: Network, hooks: TestHooks,
    ) -> None:  # fmt: skip
        self.plan, self.program, self.rank, self.model = plan, program, rank, plan.model
        self.store, self.device, self.transport, self.settlement = store, device, transport, settlement
        self.feed, self.network, self.hooks = feed, network, hooks
        self.buffers = Buffers(plan, program, rank, store, device)
        self.first_step = settlement.session.start.step
        self.num_forward = len(program.layout.forward)
        self.top = self.num_forward + len(program.layout.backward) - 1
        self.same_dtype = plan.gradient_dtype == plan.precision
        self.held: dict[tuple[str, int, int], torch.Tensor] = {}
        self.graphs: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        self.replayed: dict[tuple[int, int], tuple[object, ...]] = {}
        """Recomputes that were replayed, by (stage number, microbatch): the key of their backward."""
        self.losses: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.accumulate_into: dict[torch.Tensor, torch.Tensor] = {}
        self.first_backward: dict[int, int] = {}
        for i in program.of_rank(rank):
            if program.kind[i] == Kind.BACKWARD:
                self.first_backward.setdefault(program.stage[i], i)
        self.kept = self._find_kept()
        self.recorded = self._recorded() if plan.cuda_graphs else None
        self.by_kind: dict[int, Handler] = {
            Kind.FORWARD: self.forward,
            Kind.RECOMPUTE: self.recompute,
            Kind.BACKWARD: self.backward,
            Kind.FREE: self.free,
            Kind.FETCH: self.fetch,
            Kind.OFFLOAD_GRAD: self.offload_grad,
            Kind.STORE_WEIGHTS: self.store_weights,
            Kind.LOAD_TOKENS: self.load_tokens,
            Kind.STORE_STAGE_INPUT: self.store_stage_input,
            Kind.LOAD_STAGE_INPUT: self.load_stage_input,
            Kind.STEP: lambda op, step: settlement.step(program.stage[op], program.index[op], step),
            Kind.COMMIT: lambda op, step: settlement.commit(program.stage[op], program.index[op], step),
            Kind.VALIDATE: self.validate,
            Kind.BARRIER: lambda op, step: settlement.meet("barrier", step),
        }
        for kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT, Kind.SEND_STAGE_INPUT):
            self.by_kind[kind] = self.send
            self.by_kind[kind + 1] = self.recv

    def _find_kept(self) -> dict[int, list[tuple[int, int]]]:
        """Per forward stage: (boundary, stage number of the backward stage whose input it is)."""
        kept: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for k, stage in enumerate(self.program.layout.backward):
            source = self.program.layout.stage_input(k)
            if source.origin != "tokens":
                kept[source.forward].append((stage.first, self.num_forward + k))
        return kept

    def _recorded(self) -> RecordedStages:
        program, kinds = self.program, self.program.kind
        computed = [i for i in program.of_rank(self.rank) if kinds[i] in COMPUTE]
        self.backward_of: dict[int, int] = {
            i: j
            for i, j in pairwise(computed)
            if kinds[i] == Kind.RECOMPUTE
            and (program.stage[i], program.index[i]) == (program.stage[j], program.index[j])
        }
        b, s = self.plan.microbatch_size, self.plan.sequence
        assert isinstance(self.model, ModelSpec)
        like = torch.empty((b, s, self.model.hidden_size), dtype=DTYPES[self.plan.precision], device=self.device.device)
        most = 1 + max((len(kept) for kept in self.kept.values()), default=0)
        return RecordedStages(like, most, self.device.recording)

    def _replays(self, op: int, step: int) -> RecordedStages | None:
        """What records an op, if anything does. The first step is as ever, so that libraries are ready."""
        return self.recorded if step > 0 and self.plan.records(self.program.layers(self.program.stage[op])) else None

    @cache  # noqa: B019  # handlers live as long as the process
    def _alike(self, stage: int) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """What stages that run the same kernels have in common: kinds of layers, and what of them is trained."""
        layers = self.program.layers(stage)
        names = (tuple(p.name for p in self.store.trained.layers[layer]) for layer in layers)
        return tuple(zip(map(self.model.layer_kind, layers), names, strict=True))

    def _weight_slot(self, op: int) -> int:
        return self.buffers.residency_slot[self.program.weights[op]]

    # Compute

    def _weights(self, op: int) -> list[dict[str, torch.Tensor]]:
        return self.buffers.leaves(self._weight_slot(op), self.program.layers(self.program.stage[op]))

    def _token_slot(self, stage: int, m: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self.buffers.tokens[stage, m % self.program.options.token_slots]
        return tokens.inputs, tokens.labels

    def _run(
        self, op: int, step: int, x: torch.Tensor | None, keep: dict[int, list[torch.Tensor]] | None = None,
        output: bool = True,
    ) -> torch.Tensor:  # fmt: skip
        """The layers of a compute op: activations, or the loss if it is of the top stage; ``keep`` takes boundaries.
        Without ``output``, what is returned may be a graph without values.

        A forward stage that reaches the head does its work for nothing, as the published schedules do: the loss that
        counts is the recomputed one.
        """
        stage, m = self.program.stage[op], self.program.index[op]
        labels = self._token_slot(stage, m)[1] if stage == self.top else None
        y = self._token_slot(stage, m)[0] if x is None else x
        layers = self.program.layers(stage)
        for layer, parameters in zip(layers, self._weights(op), strict=True):
            if keep is not None and layer in keep:
                keep[layer].append(y)
            seed = draw_seed(self.plan.seed, self.first_step + step, m, layer)
            y = self.network(layer, parameters, y, labels, seed, output or layer + 1 < layers.stop)
        return y

    def forward(self, op: int, step: int) -> None:
        stage, m = self.program.stage[op], self.program.index[op]
        first, stop = self.program.layers(stage).start, self.program.layers(stage).stop
        x = self.held.pop(("activation", stage, m)) if first else None
        inside = [boundary for boundary, _ in self.kept[stage] if first < boundary < stop]

        def run(x: torch.Tensor | None) -> list[torch.Tensor]:
            keep: dict[int, list[torch.Tensor]] = {boundary: [] for boundary in inside}
            y = self._run(op, step, x, keep)
            return [y, *(keep[boundary][0] for boundary in inside)]

        with torch.no_grad():
            if x is not None and (recorded := self._replays(op, step)):
                key = self._weight_slot(op), self._alike(stage), tuple(boundary - first for boundary in inside)
                y, *found = recorded.forward(key, x, run)
            else:
                y, *found = run(x)
            values = dict(zip([stop, *inside], [y, *found], strict=True))
            for boundary, consumer in self.kept[stage]:
                # A received input lies in a slot that the next message takes over.
                kept = x.clone() if boundary == first and x is not None else values[boundary]
                self.held["stage input", consumer, m] = kept
        if stage + 1 < self.num_forward:
            self.held["activation", stage + 1, m] = y
        if self.hooks.poison and x is not None:
            self._poison_inbox(x)

    def recompute(self, op: int, step: int) -> None:
        stage, m = self.program.stage[op], self.program.index[op]
        output = stage == self.top or self.program.options.recompute_output
        x = None
        if self.program.layers(stage).start:
            x = self.held.pop(("stage input", stage, m)).detach().requires_grad_()
        if x is not None and (recorded := self._replays(op, step)) and op in self.backward_of:
            backward = self.backward_of[op]
            leaves, targets = self._gradients(backward)
            key = self._weight_slot(op), self.program.slot[backward], self._alike(stage)
            recorded.recompute(
                key,
                x.detach(),
                lambda x: self._run(op, step, x, output=output),
                lambda y, dy: self._accumulate(leaves, targets, y, dy),
            )
            self.replayed[stage, m] = key
            return
        with torch.enable_grad():
            y = self._run(op, step, x, output=output)
        self.graphs[stage, m] = x, y
        if stage == self.top:
            self.losses[step].append(y.detach())

    def backward(self, op: int, step: int) -> None:
        stage, m = self.program.stage[op], self.program.index[op]
        leaves, targets = self._gradients(op)
        if leaves and op == self.first_backward[stage]:
            self.buffers.slabs[self.program.slot[op]][: self.buffers.num_gradients(stage)].zero_()
        key = self.replayed.pop((stage, m), None)
        if key is not None:
            assert self.recorded is not None
            gradient = self.held.pop(("gradient", stage, m))
            self.held["gradient", stage - 1, m] = self.recorded.backward(key, gradient)
            return
        x, y = self.graphs.pop((stage, m))
        if stage == self.top:
            scale = self.settlement.scaling[step].loss_scale / self.program.num_microbatches
            gradient = torch.full((), scale, dtype=y.dtype, device=y.device)
        else:
            gradient = self.held.pop(("gradient", stage, m))
        if y.requires_grad:  # not so where nothing is trained at the bottom
            self._accumulate(leaves, targets, y, gradient)
        if x is not None:
            assert x.grad is not None
            self.held["gradient", stage - 1, m] = x.grad
            if self.hooks.poison:
                self._poison_inbox(x.detach())
        if self.hooks.poison and stage != self.top:
            self._poison_inbox(gradient)

    def _gradients(self, op: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Weights of a BACKWARD that are trained, and where their gradients add up."""
        leaves = [leaf for layer in self._weights(op) for leaf in layer.values() if leaf.requires_grad]
        if not leaves:
            return [], []
        slabs = self.buffers.gradients(self.program.slot[op], self.program.layers(self.program.stage[op]))
        return leaves, [target for layer in slabs for target in layer.values()]

    def _accumulate(
        self, leaves: list[torch.Tensor], targets: list[torch.Tensor], y: torch.Tensor, gradient: torch.Tensor
    ) -> None:
        """Back-propagate, adding each weight's gradient to its place in the slab."""
        if self.same_dtype:
            for leaf, target in zip(leaves, targets, strict=True):
                leaf.grad = target
            torch.autograd.backward(y, gradient)
            for leaf in leaves:
                leaf.grad = None
            return
        handles = []
        for leaf, target in zip(leaves, targets, strict=True):

            def add(leaf: torch.Tensor, target: torch.Tensor = target) -> None:
                assert leaf.grad is not None
                target.add_(leaf.grad)
                leaf.grad = None

            handles.append(leaf.register_post_accumulate_grad_hook(add))  # type: ignore[no-untyped-call]  # torch's
        torch.autograd.backward(y, gradient)
        for handle in handles:
            handle.remove()

    def free(self, op: int, step: int) -> None:
        if self.hooks.poison:
            self.buffers.weight_slots[self.program.slot[op]].fill_(float("nan"))

    # Weights and gradients

    def fetch(self, op: int, step: int) -> None:
        stage, table = self.program.stage[op], self.store.table
        origin = table.bounds[self.program.layers(stage).start]
        first, stop = table.span(self.program.buckets[stage][self.program.index[op]])
        slot, shared = self.buffers.weight_slots[self.program.slot[op]], self.store.weights
        if self.program.reads_held(op):
            weight = self._held(op).weight
            assert weight is not None
            self.device.copy(slot[first - origin : stop - origin], weight)
            return
        if table.tied and stop == table.num_elements:
            low, high = table.tied
            self.device.copy(
                slot[high.first - origin : high.first - origin + high.count], shared[low.first : low.first + low.count]
            )
            stop = table.num_weights
        self.device.copy(slot[first - origin : stop - origin], shared[first:stop])

    def offload_grad(self, op: int, step: int) -> None:
        stage, table = self.program.stage[op], self.store.trained
        bucket = self.program.buckets[stage][self.program.index[op]]
        origin = table.bounds[self.program.layers(stage).start]
        first, stop = table.span(bucket)
        slab = self.buffers.slabs[self.program.slot[op]]
        if (step, stage - self.num_forward) in self.hooks.overflow and first == origin:
            slab[:1].fill_(float("inf"))
        for use in table.tied or ():
            if step in self.hooks.huge and first <= use.first < stop:
                slab[use.first - origin] = 3e38
        target = self.store.gradients[first:stop]
        if self.program.reads_held(op):
            held = self._held(op).gradient
            assert held is not None
            target = held
        self.device.copy(target, slab[first - origin : stop - origin])
        on_gpu = self.device.device.type != "cpu"
        for parameter in table.of(bucket):
            begin, end = parameter.first, parameter.first + parameter.count
            values = slab[begin - origin : end - origin] if on_gpu else target[begin - first : end - first]
            number = self.settlement.number[parameter.layer, parameter.name]
            self.settlement.pending.append((number, self.device.statistics(values, self.plan.gradient_dtype)))
        if self.hooks.poison:
            slab[first - origin : stop - origin].fill_(float("nan"))

    def store_weights(self, op: int, step: int) -> None:
        first, stop = self.store.table.span(self.program.buckets[self.program.stage[op]][self.program.index[op]])
        weight = self._held(op).weight
        assert weight is not None
        self.device.copy(self.store.weights[first:stop], weight)

    def _held(self, op: int) -> LayerState:
        return self.settlement.masters.layers[
            self.program.buckets[self.program.stage[op]][self.program.index[op]].start
        ]

    def validate(self, op: int, step: int) -> None:
        losses = self.losses.pop(step, None)
        if losses:
            self.store.losses[step] = sum(float(loss) for loss in losses) / len(losses)
        device_bytes = self.device.peak_bytes()[0] + self.transport.device_bytes
        self.store.in_use[self.rank] = device_bytes, own_resident_bytes()
        self.settlement.validate(step)

    # Tokens, stage inputs, messages

    def load_tokens(self, op: int, step: int) -> None:
        stage, m = self.program.stage[op], self.program.index[op]
        tokens = self.buffers.tokens[stage, self.program.slot[op]]
        batch = self.feed.tensors(step, m)
        # The copies of this lane so far may still read the staging memory.
        self.device.finish_lane()
        for place, staging, tensor in zip(tokens.tensors(), tokens.staging, batch, strict=True):
            staging.copy_(tensor)
            self.device.copy(place, staging)

    def store_stage_input(self, op: int, step: int) -> None:
        stage, m = self.program.stage[op], self.program.index[op]
        tensor = self.held.pop(("stage input", stage, m)).view(-1)
        self.device.keep(tensor)
        target = self.store.boundary(self.store.layout.stage_inputs[stage, m])
        self.device.copy(target[: tensor.numel()], tensor)

    def load_stage_input(self, op: int, step: int) -> None:
        stage, m = self.program.stage[op], self.program.index[op]
        buffer = self._inbox(op)
        source = self.store.boundary(self.store.layout.stage_inputs[stage, m])
        self.device.copy(buffer.view(-1), source[: buffer.numel()])
        self.held["stage input", stage, m] = buffer

    def send(self, op: int, step: int) -> None:
        key = _CLASS[Kind(self.program.kind[op])], self.program.stage[op], self.program.index[op]
        tensor = self.held.pop(key).contiguous().view(-1)
        self.device.keep(tensor)
        self.transport.send(op, step, tensor)

    def recv(self, op: int, step: int) -> None:
        key = _CLASS[Kind(self.program.kind[op])], self.program.stage[op], self.program.index[op]
        buffer = self._inbox(op)
        self.transport.recv(op, step, buffer.view(-1))
        self.held[key] = buffer

    def _inbox(self, op: int) -> torch.Tensor:
        """Where an op receives or loads a boundary: above the stage if it is a gradient, else below."""
        key, layers = self.buffers.inbox_key(op), self.program.layers(self.program.stage[op])
        assert key is not None
        boundary = layers.stop if self.program.kind[op] == Kind.RECV_GRADIENT else layers.start
        shape = self.model.boundary_shape(boundary, self.plan.microbatch_size, self.plan.sequence)
        return self.buffers.inbox[key][: math.prod(shape)].view(shape)

    def _poison_inbox(self, tensor: torch.Tensor) -> None:
        """Fill a receive buffer whose content was used up; other tensors are left alone."""
        pointers = {buffer.data_ptr() for buffer in self.buffers.inbox.values()}
        if tensor.data_ptr() in pointers:
            tensor.fill_(float("nan"))
