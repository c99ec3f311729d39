"""The optimizer's side of a step: speculative steps, the verdict of all ranks, commit or rollback, the loss scale.

A bucket may step before it is known whether every gradient of the model is finite. VALIDATE gives that verdict; COMMIT
accepts the step or undoes it to the last bit. A step whose verdict is known when it starts is final (or left out).
After an overflow nothing has changed but the loss scale: not the weights, moments, nor the number of updates.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from spipe import _native
from spipe.memory import memory
from spipe.ops import Kind
from spipe.plan import Plan
from spipe.program import Program
from spipe.runtime.adam_device import adamw_step_on_device
from spipe.runtime.adam_reference import AdamScalars
from spipe.runtime.hooks import TestHooks
from spipe.runtime.layers import initialize
from spipe.runtime.region import DTYPES, fill_bytes, private_memory
from spipe.runtime.store import Parameter, Store


@dataclass(frozen=True)
class Scaling:
    """What a step starts with: loss scale, updates done before it, good steps since the scale last changed."""

    loss_scale: float
    num_updates: int = 0
    good_steps: int = 0


@dataclass(frozen=True)
class Verdict:
    """What all ranks agree on at the end of a step; ``gradient_norm`` is NaN where it is not known."""

    overflow: bool
    gradient_norm: float


def first_scaling(plan: Plan) -> Scaling:
    """The loss scale is 1 unless weights are fp16."""
    return Scaling(plan.loss_scale.initial if plan.precision == "fp16" else 1.0)


def next_scaling(plan: Plan, scaling: Scaling, overflow: bool) -> Scaling:
    """Halve the scale on overflow, double it after a window of good steps; fp16 only."""
    if overflow:
        scale = scaling.loss_scale
        if plan.precision == "fp16":
            scale = max(scale * 0.5, min(scale, plan.loss_scale.minimum))
        return Scaling(scale, scaling.num_updates, 0)
    good = scaling.good_steps + 1
    if plan.precision == "fp16" and good >= plan.loss_scale.window:
        return Scaling(scaling.loss_scale * 2, scaling.num_updates + 1, 0)
    return Scaling(scaling.loss_scale, scaling.num_updates + 1, good)


@dataclass(frozen=True)
class LayerState:
    """What belongs to one layer, each flat in natural order.

    ``state`` is master, first and second moment (fp32): in private memory of this process, or on the device if the
    device holds the layer. Then ``weight`` and ``gradient`` (in the plan's types) are there, too.
    """

    first: int
    state: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    weight: torch.Tensor | None = None
    gradient: torch.Tensor | None = None

    def part(self, tensor: torch.Tensor, parameter: Parameter) -> torch.Tensor:
        """One parameter's part of one of the tensors, flat."""
        first = parameter.first - self.first
        return tensor[first : first + parameter.count]


class MasterState:
    """Masters and moments of the layers whose backward this rank runs."""

    def __init__(self, plan: Plan, rank: int, store: Store, device: torch.device) -> None:
        program, table = plan.program(), store.table
        self.layers: dict[int, LayerState] = {}
        for layer in (i for stage in program.layout.backward if stage.rank == rank for i in stage.layers):
            first, stop = table.span(range(layer, layer + 1))
            if program.is_held(layer):
                weight, gradient = (
                    _on_device(stop - first, DTYPES[name], device) for name in (plan.precision, plan.gradient_dtype)
                )
                master, m, v = (_on_device(stop - first, torch.float32, device) for _ in range(3))
                self.layers[layer] = LayerState(first, (master, m, v), weight, gradient)
            else:
                master, m, v = (private_memory(stop - first) for _ in range(3))
                self.layers[layer] = LayerState(first, (master, m, v))
        self.parameters = [p for p in table.of(self.layers) if table.owns_state(p)]

    def of(self, parameter: Parameter) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Master, first and second moment, in the parameter's shape."""
        layer = self.layers[parameter.layer]
        master, m, v = (layer.part(tensor, parameter).view(parameter.shape) for tensor in layer.state)
        return master, m, v

    def initialize(self, plan: Plan, store: Store, num_threads: int) -> None:
        """Initial masters, and the weights rounded from them, for this rank's parameters."""
        torch.set_num_threads(num_threads)
        for parameter in self.parameters:
            layer, master = self.layers[parameter.layer], self.of(parameter)[0]
            value = master if master.device.type == "cpu" else torch.empty(master.shape)
            initialize(plan.model, plan.seed, parameter.layer, parameter.name, value, num_threads)
            weight = store.weights[parameter.first : parameter.first + parameter.count]
            weight.copy_(value.view(-1))
            if layer.weight is not None:
                master.copy_(value)
                layer.part(layer.weight, parameter).copy_(weight)


def _on_device(num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(num_elements, dtype=dtype, device=device)
    size = num_elements * dtype.itemsize
    return private_memory(-(-size // 4)).view(torch.uint8)[:size].view(dtype)


def undo_budget_bytes(plan: Plan, store: Store, masters: MasterState) -> int:
    """Memory that the plan has for undoing this rank's steps: of its host's, the share of its parameters."""
    is_held = plan.program().is_held
    mine = sum(p.count for p in masters.parameters if not is_held(p.layer))
    everyones = sum(p.count for i, row in enumerate(store.table.layers) for p in row
                    if store.table.owns_state(p) and not is_held(i))  # fmt: skip
    if not mine:
        return 0
    return memory(plan).hosts[0]["undo data"] * mine // everyones


class Settlement:
    """VALIDATE, STEP and COMMIT of one rank."""

    def __init__(
        self, plan: Plan, program: Program, rank: int, store: Store, masters: MasterState, num_threads: int,
        hooks: TestHooks,
    ) -> None:  # fmt: skip
        self.plan, self.program, self.rank, self.store, self.hooks = plan, program, rank, store, hooks
        self.masters = masters
        self.pool = _native.WorkerPool(num_threads)
        adam = plan.optimizer
        self.optimizer = _native.Optimizer(
            self.pool, adam.beta1, adam.beta2, adam.epsilon,
            rollback="auto", undo_budget_bytes=undo_budget_bytes(plan, store, masters),
        )  # fmt: skip
        self.scaling: dict[int, Scaling] = {0: first_scaling(plan)}
        self.verdicts: dict[int, Verdict] = {}
        self.pending: list[tuple[int, Callable[[], tuple[bool, float]]]] = []
        """Statistics of this step's gradients, by parameter number, to be read at VALIDATE."""
        self.overflowed = -1
        """The last step of which this rank has seen a non-finite gradient."""
        self.cpu_seconds = 0.0
        flat = [p for row in store.table.layers for p in row]
        self.number = {(p.layer, p.name): n for n, p in enumerate(flat)}
        self.validate_op = next(i for i in program.of_rank(rank) if program.kind[i] == Kind.VALIDATE)
        self.buckets: dict[tuple[int, int], int] = {}
        num_forward = len(program.layout.forward)
        for k, stage in enumerate(program.layout.backward):
            if stage.rank == rank:
                for b, layers in enumerate(program.buckets[num_forward + k]):
                    if masters.layers[layers.start].state[0].device.type != "cpu":
                        continue
                    parameters = [self._native_parameter(p, masters) for p in masters.parameters if p.layer in layers]
                    self.buckets[num_forward + k, b] = self.optimizer.add_bucket(parameters)
        self.speculative = program.options.optimizer == "async"
        self.optimizer.prepare(speculative=self.speculative)

    @property
    def rollback_kind(self) -> str:
        """How a step is undone: ``delta``, ``snapshot``, ``defer``; ``none`` where every verdict comes first."""
        return self.optimizer.rollback_kind if self.speculative else "none"

    def _native_parameter(self, parameter: Parameter, masters: MasterState) -> _native.Parameter:
        store = self.store
        master, first_moment, second_moment = masters.of(parameter)
        layer = masters.layers[parameter.layer]
        gradient, weight = (
            shared[parameter.first :] if held is None else layer.part(held, parameter)
            for shared, held in ((store.gradients, layer.gradient), (store.weights, layer.weight))
        )
        tied = store.table.tied
        second = tied[1].first if tied and parameter == tied[0] else -1
        return _native.Parameter(
            gradient=gradient.data_ptr(),
            gradient2=store.gradients[second:].data_ptr() if second >= 0 else 0,
            gradient_dtype=self.plan.gradient_dtype,
            master=master.data_ptr(),
            first_moment=first_moment.data_ptr(),
            second_moment=second_moment.data_ptr(),
            weight=weight.data_ptr(),
            weight_dtype=self.plan.precision,
            count=parameter.count,
            weight_decay=self.plan.optimizer.weight_decay,
        )

    def validate(self, step: int) -> None:
        """Agree with all ranks on whether any gradient of the step is non-finite; set the next step's scaling.

        Statistics alternate between two places: nobody writes a step's place again before every rank has been through
        the VALIDATE of the step after it.
        """
        place = self.store.statistics[step % 2]
        for number, ask in self.pending:
            nonfinite, sum_of_squares = ask()
            place[number] = float(nonfinite), sum_of_squares
            if nonfinite:
                self.overflowed = step
        self.pending.clear()
        self.meet("validate", step)
        overflow = bool(place[:, 0].any())
        norm = math.nan
        if self.store.table.tied is None and not overflow:
            norm = math.sqrt(math.fsum(place[:, 1])) / self.scaling[step].loss_scale
        self.verdicts[step] = Verdict(overflow, norm)
        self.scaling[step + 1] = next_scaling(self.plan, self.scaling[step], overflow)

    def meet(self, name: str, step: int) -> None:
        """Wait until every rank is here, in this step."""
        first, num_ranks = self.store.layout.arrivals[name], self.store.layout.num_ranks
        flags = self.store.flags
        flags.set(first + self.rank, step + 1)
        everyone = list(range(first, first + num_ranks))
        flags.wait_many(everyone, [step + 1] * num_ranks, math.inf, self.store.layout.abort)

    def _knows_overflow(self, stage: int, bucket: int, step: int) -> bool:
        """Whether it is certain that the step will be undone: this rank saw a non-finite gradient before this STEP.

        On a CPU the statistics are there once they are listed; on a GPU only those of the bucket whose gradient the
        STEP has waited for. VALIDATE will read the same ones.
        """
        mine = {self.number[p.layer, p.name] for p in self.store.table.of(self.program.buckets[stage][bucket])}
        on_gpu = self.plan.hardware.device != "cpu"
        if any(ask()[0] for number, ask in list(self.pending) if number in mine or not on_gpu):
            self.overflowed = step
        return self.overflowed == step

    def step(self, stage: int, bucket: int, step: int) -> str:
        """Step a bucket; returns what came of it: ``bypass`` if the step is known to be undone."""
        known = self.store.flags.get(self.validate_op) > step
        if self.verdicts[step].overflow if known else self._knows_overflow(stage, bucket, step):
            return "bypass"
        scaling, layers = self.scaling[step], self.program.buckets[stage][bucket]
        if (stage, bucket) not in self.buckets:
            self._step_on_device(layers, scaling)
            return ""
        number = self.buckets[stage, bucket]
        self.optimizer.submit(
            number,
            step=scaling.num_updates + 1,
            learning_rate=self.plan.optimizer.learning_rate,
            gradient_scale=1.0 / scaling.loss_scale,
            speculative=not known,
        )
        self.cpu_seconds = self.optimizer.join(number).cpu_seconds
        return ""

    def _step_on_device(self, layers: range, scaling: Scaling) -> None:
        """Step layers that the device holds, in the order of the lane's stream; the verdict was good."""
        adam = self.plan.optimizer
        scalars = AdamScalars.of(
            step=scaling.num_updates + 1,
            learning_rate=adam.learning_rate,
            beta1=adam.beta1,
            beta2=adam.beta2,
            epsilon=adam.epsilon,
            weight_decay=adam.weight_decay,
            gradient_scale=1.0 / scaling.loss_scale,
        )
        for parameter in self.store.table.of(layers):
            layer = self.masters.layers[parameter.layer]
            assert layer.gradient is not None
            assert layer.weight is not None
            tensors = (layer.gradient, *layer.state, layer.weight)
            gradient, master, m, v, weight = (layer.part(tensor, parameter) for tensor in tensors)
            adamw_step_on_device(gradient, master, m, v, weight, scalars)

    def commit(self, stage: int, bucket: int, step: int) -> str:
        """Accept or undo a bucket's step; returns ``rollback`` if it was undone."""
        number = self.buckets.get((stage, bucket), -1)
        note = ""
        if number >= 0 and self.optimizer.state(number) == "stepped":
            if self.verdicts[step].overflow:
                self.optimizer.rollback(number)
                note = "rollback"
            else:
                self.optimizer.commit(number)
        if self.hooks.poison:
            self._poison_gradients(stage, bucket)
        return note

    def _poison_gradients(self, stage: int, bucket: int) -> None:
        tied = self.store.table.tied
        for parameter in self.store.table.of(self.program.buckets[stage][bucket]):
            held = self.masters.layers[parameter.layer].gradient
            if held is not None and held.device.type == "cpu":
                fill_bytes(self.masters.layers[parameter.layer].part(held, parameter), 0xFF)
            if not tied or parameter != tied[1]:
                fill_bytes(self.store.gradients[parameter.first : parameter.first + parameter.count], 0xFF)
            if tied and parameter == tied[0]:
                fill_bytes(self.store.gradients[tied[1].first : tied[1].first + tied[1].count], 0xFF)
