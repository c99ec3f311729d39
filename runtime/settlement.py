"""The optimizer's side of a step: speculative steps, the verdict of all ranks, commit or rollback, the loss scale.

A bucket may step before it is known whether every gradient of the model is finite, and whether their norm calls for
clipping. VALIDATE gives that verdict; COMMIT accepts the step, undoes it to the last bit, or undoes it and does it
again with clipped gradients. A step whose verdict is known when it starts is final (or left out); where clipping is
frequent, steps wait for it. So the result is that of the synchronous order, to the bit.
After an overflow nothing has changed but the loss scale: not the weights, moments, nor the number of updates.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from spipe import _native
from spipe.errors import SpipeError
from spipe.memory import memory
from spipe.model import ModelSpec
from spipe.ops import Kind
from spipe.plan import Plan
from spipe.program import Program
from spipe.runtime.adam import parameter_of
from spipe.runtime.adam_device import adamw_step_on_device
from spipe.runtime.adam_reference import AdamScalars
from spipe.runtime.checkpoint import START, Position
from spipe.runtime.hooks import TestHooks
from spipe.runtime.layers import initialize
from spipe.runtime.region import DTYPES, fill_bytes, private_memory
from spipe.runtime.store import Parameter, Store

if TYPE_CHECKING:
    from spipe.runtime.session import Session


@dataclass(frozen=True)
class Scaling:
    """What a step starts with: loss scale, updates done before it, good steps since the scale last changed."""

    loss_scale: float
    num_updates: int = 0
    good_steps: int = 0


@dataclass(frozen=True)
class Verdict:
    """What all ranks agree on at the end of a step.

    Attributes:
        overflow: whether a gradient is not finite.
        gradient_norm: of the whole model, without the loss scale, before clipping; NaN where it is not known: after
            an overflow, or with tied embeddings and no ``max_norm``.
        clipping: what gradients are multiplied by; 1 where the norm is not above ``max_norm``.
    """

    overflow: bool
    gradient_norm: float
    clipping: float = 1.0


CLIPPED_WINDOW = 16
"""Steps that speculation looks back on; it pays while fewer than half of them were clipped."""


MOST_SKIPPED = 20
"""Steps in a row with non-finite gradients after which a run gives up."""


def first_scaling(plan: Plan, position: Position = START) -> Scaling:
    """What the first step after ``position`` starts with; the loss scale is 1 unless weights are fp16."""
    scale = position.loss_scale if position.loss_scale is not None else plan.loss_scale.initial
    return Scaling(scale if plan.precision == "fp16" else 1.0, position.num_updates, position.good_steps)


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
        program, table = plan.program(), store.trained
        self.layers: dict[int, LayerState] = {}
        mine = [i for stage in program.layout.backward if stage.rank == rank for i in stage.layers]
        for layer in mine:
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
        self.parameters = [p for p in table.of(mine) if table.owns_state(p)]
        trained = {(p.layer, p.name) for p in table.of(mine)}
        self.frozen = [p for p in store.table.of(mine) if (p.layer, p.name) not in trained]
        """Parameters of those layers that are never stepped; they have a weight and nothing else."""

    def of(self, parameter: Parameter) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Master, first and second moment, in the parameter's shape."""
        layer = self.layers[parameter.layer]
        master, m, v = (layer.part(tensor, parameter).view(parameter.shape) for tensor in layer.state)
        return master, m, v

    def initialize(self, plan: Plan, store: Store, num_threads: int) -> None:
        """Initial masters, and the weights rounded from them, for this rank's parameters; for built-in models."""
        assert isinstance(plan.model, ModelSpec)
        torch.set_num_threads(num_threads)
        for parameter in self.parameters:
            with self.filling(parameter, store) as (master, _, _):
                initialize(plan.model, plan.seed, parameter.layer, parameter.name, master, num_threads)

    @contextmanager
    def filling(self, parameter: Parameter, store: Store) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Master and moments to be filled in on the CPU; after that they, and the weight, are where they belong."""
        layer, state = self.layers[parameter.layer], self.of(parameter)
        on_cpu = state[0].device.type == "cpu"
        master, m, v = state if on_cpu else (torch.zeros(tensor.shape) for tensor in state)
        yield master, m, v
        weight = store.weight(parameter)
        weight.copy_(master.view(-1))
        if not on_cpu:
            for tensor, value in zip(state, (master, m, v), strict=True):
                tensor.copy_(value)
        if layer.weight is not None:
            layer.part(layer.weight, parameter).copy_(weight)

    def weight_of(self, parameter: Parameter, store: Store) -> torch.Tensor:
        """The parameter's weight where it is stepped, flat."""
        layer = self.layers[parameter.layer]
        if layer.weight is not None:
            return layer.part(layer.weight, parameter)
        return store.weight(parameter)


def _on_device(num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(num_elements, dtype=dtype, device=device)
    size = num_elements * dtype.itemsize
    return private_memory(-(-size // 4)).view(torch.uint8)[:size].view(dtype)


def undo_budget_bytes(plan: Plan, store: Store, masters: MasterState) -> int:
    """Memory that the plan has for undoing this rank's steps: of its host's, the share of its parameters."""
    is_held = plan.program().is_held
    mine = sum(p.count for p in masters.parameters if not is_held(p.layer))
    everyones = sum(p.count for i, row in enumerate(store.trained.layers) for p in row
                    if store.trained.owns_state(p) and not is_held(i))  # fmt: skip
    if not mine:
        return 0
    return -(-memory(plan).hosts[0]["undo data"] * mine // everyones)  # rounded up


class Settlement:
    """VALIDATE, STEP and COMMIT of one rank."""

    def __init__(
        self, plan: Plan, program: Program, rank: int, store: Store, masters: MasterState, num_threads: int,
        hooks: TestHooks, session: "Session",
    ) -> None:  # fmt: skip
        self.plan, self.program, self.rank, self.store, self.hooks = plan, program, rank, store, hooks
        self.masters = masters
        self.pool = _native.WorkerPool(num_threads)
        adam = plan.optimizer
        self.optimizer = _native.Optimizer(
            self.pool, adam.beta1, adam.beta2, adam.epsilon,
            rollback="auto", undo_budget_bytes=undo_budget_bytes(plan, store, masters),
        )  # fmt: skip
        self.scaling: dict[int, Scaling] = {0: first_scaling(plan, session.start)}
        self.verdicts: dict[int, Verdict] = {}
        self.session = session
        self.pending: list[tuple[int, Callable[[], tuple[bool, float]]]] = []
        """Statistics of this step's gradients, by parameter number, to be read at VALIDATE."""
        self.overflowed = -1
        """The last step of which this rank has seen a non-finite gradient."""
        self.cpu_seconds = 0.0
        flat = [p for row in store.trained.layers for p in row]
        self.number = {(p.layer, p.name): n for n, p in enumerate(flat)}
        self.counted = np.array([float(store.trained.owns_state(p)) for p in flat])
        """Per parameter number: 1 if it counts in the norm, 0 for a tied head."""
        self.clipped: tuple[bool, ...] = ()
        """Whether each of the last steps was clipped."""
        self.skipped_in_a_row = 0
        """Steps up to now with non-finite gradients that a smaller loss scale cannot help."""
        self.validate_op = next(i for i in program.of_rank(rank) if program.kind[i] == Kind.VALIDATE)
        self.buckets: dict[tuple[int, int], int] = {}
        self.parameters: dict[tuple[int, int], list[Parameter]] = {}
        """By (stage number, bucket): what is stepped there."""
        num_forward = len(program.layout.forward)
        for k, stage in enumerate(program.layout.backward):
            if stage.rank == rank:
                for b, layers in enumerate(program.buckets[num_forward + k]):
                    if not program.trains(num_forward + k, b):
                        continue
                    key, owned = (num_forward + k, b), [p for p in masters.parameters if p.layer in layers]
                    self.parameters[key] = owned
                    if masters.layers[layers.start].state[0].device.type == "cpu":
                        native = [self._native_parameter(p, masters) for p in owned]
                        self.buckets[key] = self.optimizer.add_bucket(native)
        self.speculative = program.options.optimizer == "async"
        self.optimizer.prepare(speculative=self.speculative)
        tied = store.trained.tied
        self.tied_gradient = -1
        """Where this rank steps a tied embedding: the op that brings the head's gradient."""
        if tied and tied[0] in masters.parameters:
            self.tied_gradient = next(
                i
                for i in range(len(program))
                if program.kind[i] == Kind.OFFLOAD_GRAD
                and tied[1].layer in program.buckets[program.stage[i]][program.index[i]]
            )

    @property
    def rollback_kind(self) -> str:
        """How a step is undone: ``delta``, ``snapshot``, ``defer``; ``none`` where every verdict comes first."""
        return self.optimizer.rollback_kind if self.speculative else "none"

    def _native_parameter(self, parameter: Parameter, masters: MasterState) -> _native.Parameter:
        def part(flat: torch.Tensor, of: Parameter) -> torch.Tensor:
            return flat[of.first : of.first + of.count].view(of.shape)

        store, tied = self.store, self.store.trained.tied
        layer = masters.layers[parameter.layer]
        held = layer.gradient
        return parameter_of(
            part(store.gradients, parameter) if held is None else layer.part(held, parameter).view(parameter.shape),
            *masters.of(parameter),
            masters.weight_of(parameter, store).view(parameter.shape),
            gradient2=part(store.gradients, tied[1]) if tied and parameter == tied[0] else None,
            weight_decay=self.plan.optimizer.weight_decay_of(parameter.shape),
        )

    def validate(self, step: int) -> None:
        """Agree with all ranks on the gradients' finiteness and norm, and on stopping; set the next step's scaling.

        Statistics alternate between two places: nobody writes a step's place again before every rank has been through
        the VALIDATE of the step after it.
        """
        place, max_norm = self.store.statistics[step % 2], self.plan.optimizer.max_norm
        for number, ask in self.pending:
            nonfinite, sum_of_squares = ask()
            place[number] = float(nonfinite), sum_of_squares
            if nonfinite:
                self.overflowed = step
        self.pending.clear()
        if self.tied_gradient >= 0:
            self._tied_statistics(step)
        self.store.stops[step % 2, self.rank] = self.session.stop_asked()
        self.meet("validate", step)
        overflow = bool(place[:, 0].any())
        norm, clipping = math.nan, 1.0
        if not overflow:
            norm = math.sqrt(math.fsum(place[:, 1] * self.counted)) / self.scaling[step].loss_scale
            if max_norm is not None and norm > max_norm:
                clipping = max_norm / norm
        self.verdicts[step] = Verdict(overflow, norm, clipping)
        self._require_progress(overflow, step)
        self.clipped = (*self.clipped, clipping != 1.0)[-CLIPPED_WINDOW:]
        self.scaling[step + 1] = next_scaling(self.plan, self.scaling[step], overflow)
        self.session.validated(step, bool(self.store.stops[step % 2].any()), self.scaling[step + 1], self.parameters)

    def _require_progress(self, overflow: bool, step: int) -> None:
        """Raises SpipeError after many steps in a row that a smaller loss scale cannot help."""
        scaling = self.scaling[step]
        helpless = self.plan.precision != "fp16" or scaling.loss_scale <= self.plan.loss_scale.minimum
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if overflow and helpless else 0
        if self.skipped_in_a_row >= MOST_SKIPPED:
            raise SpipeError(
                f"{MOST_SKIPPED} steps in a row had gradients that are not finite, and changed nothing: are there such "
                "values in the weights that training started from? Else use a smaller learning rate or bf16"
            )

    def _tied_statistics(self, step: int) -> None:
        """A tied weight counts once, with the sum of both gradients, which may overflow where neither does."""
        assert self.store.trained.tied is not None
        low, high = self.store.trained.tied
        self.store.flags.wait(self.tied_gradient, step + 1, math.inf, self.store.layout.abort)
        nonfinite, sum_of_squares = _native.gradient_statistics(
            self.pool,
            self.store.gradients[low.first :].data_ptr(),
            self.plan.gradient_dtype,
            low.count,
            gradient2=self.store.gradients[high.first :].data_ptr(),
        )
        self.store.statistics[step % 2][self.number[low.layer, low.name]] = float(nonfinite), sum_of_squares

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
        mine = {self.number[p.layer, p.name] for p in self.store.trained.of(self.program.buckets[stage][bucket])}
        on_gpu = self.plan.hardware.device != "cpu"
        if any(ask()[0] for number, ask in list(self.pending) if number in mine or not on_gpu):
            self.overflowed = step
        return self.overflowed == step

    def step(self, stage: int, bucket: int, step: int) -> str:
        """Step a bucket; returns what came of it: ``bypass`` if the step is known to be undone."""
        self.session.wait_written((stage, bucket))
        if 2 * sum(self.clipped) > len(self.clipped):
            self.store.flags.wait(self.validate_op, step + 1, math.inf, self.store.layout.abort)
        known = self.store.flags.get(self.validate_op) > step
        if self.verdicts[step].overflow if known else self._knows_overflow(stage, bucket, step):
            return "bypass"
        clipping = self.verdicts[step].clipping if known else 1.0
        if (stage, bucket) in self.buckets:
            self._perform(self.buckets[stage, bucket], step, clipping, speculative=not known)
        else:
            self._step_on_device(self.program.buckets[stage][bucket], self.scaling[step], clipping)
        return ""

    def _perform(self, number: int, step: int, clipping: float, *, speculative: bool) -> None:
        scaling = self.scaling[step]
        self.optimizer.submit(
            number,
            step=scaling.num_updates + 1,
            learning_rate=self.plan.optimizer.learning_rate_of(scaling.num_updates),
            gradient_scale=clipping / scaling.loss_scale,
            speculative=speculative,
        )
        self.cpu_seconds = self.optimizer.join(number).cpu_seconds

    def _step_on_device(self, layers: range, scaling: Scaling, clipping: float) -> None:
        """Step layers that the device holds, in the order of the lane's stream; the verdict was good."""
        adam = self.plan.optimizer
        for parameter in self.store.trained.of(layers):
            scalars = AdamScalars.of(
                step=scaling.num_updates + 1,
                learning_rate=adam.learning_rate_of(scaling.num_updates),
                beta1=adam.beta1,
                beta2=adam.beta2,
                epsilon=adam.epsilon,
                weight_decay=adam.weight_decay_of(parameter.shape),
                gradient_scale=clipping / scaling.loss_scale,
            )
            layer = self.masters.layers[parameter.layer]
            assert layer.gradient is not None
            assert layer.weight is not None
            tensors = (layer.gradient, *layer.state, layer.weight)
            gradient, master, m, v, weight = (layer.part(tensor, parameter) for tensor in tensors)
            adamw_step_on_device(gradient, master, m, v, weight, scalars)

    def commit(self, stage: int, bucket: int, step: int) -> str:
        """Accept or undo a bucket's step; returns ``rollback`` if it was undone, ``redo`` if it was done again."""
        number, verdict = self.buckets.get((stage, bucket), -1), self.verdicts[step]
        note = ""
        if number >= 0 and self.optimizer.state(number) == "stepped":
            if verdict.overflow:
                self.optimizer.rollback(number)
                note = "rollback"
            elif verdict.clipping != 1.0:
                self.optimizer.rollback(number)
                self._perform(number, step, verdict.clipping, speculative=False)
                note = "redo"
            else:
                self.optimizer.commit(number)
        self.session.committed((stage, bucket), step)
        if self.hooks.poison:
            self._poison_gradients(stage, bucket)
        return note

    def _poison_gradients(self, stage: int, bucket: int) -> None:
        tied = self.store.trained.tied
        for parameter in self.store.trained.of(self.program.buckets[stage][bucket]):
            held = self.masters.layers[parameter.layer].gradient
            if held is not None and held.device.type == "cpu":
                fill_bytes(self.masters.layers[parameter.layer].part(held, parameter), 0xFF)
            if not tied or parameter != tied[1]:
                fill_bytes(self.store.gradients[parameter.first : parameter.first + parameter.count], 0xFF)
            if tied and parameter == tied[0]:
                fill_bytes(self.store.gradients[tied[1].first : tied[1].first + tied[1].count], 0xFF)
