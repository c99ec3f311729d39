"""Shortage: candidates that are short of memory whatever their options, found without lowering them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Any

from spipe.errors import SpipeError
from spipe.layout import Layout, Stage
from spipe.memory import WORKSPACE_BYTES, layer_bytes
from spipe.plan import ELEMENT_BYTES
from spipe.sim.candidates import Candidate
from spipe.sim.judge import Job, fitting
from spipe.sim.space import make_space

TRIES = 6
_STATE = 12  # bytes of master weight and moments of a parameter


class LeastMemory:
    """What a layout needs at least, of the items of ``spipe.memory``.

    No undo data, no stage inputs, and as many layers held on accelerators as there is room for.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        model, fields = job.model, job.plan_fields
        self.element_bytes = ELEMENT_BYTES[fields["precision"]]
        gradient_bytes = ELEMENT_BYTES[fields.get("gradient_precision") or fields["precision"]]
        layers = range(model.num_total_layers)
        self.weights = _sums([layer_bytes(model, i, self.element_bytes) for i in layers])
        self.gradients = _sums([layer_bytes(model, i, gradient_bytes, trained=True) for i in layers])
        trained = [layer_bytes(model, i, self.element_bytes, trained=True) for i in layers]
        self.state = _sums([_STATE * size // self.element_bytes for size in trained])
        if tied := model.tied_parameters():
            (layer, name), _ = tied
            shared = math.prod(model.parameter_shapes(model.layer_kind(layer))[name])
            self.tied_bytes = (self.element_bytes + _STATE) * shared
        else:
            self.tied_bytes = 0
        self.held_part = _STATE / (_STATE + self.element_bytes + gradient_bytes)
        self.activations = cache(self._activations)

    def may_fit(self, candidate: Candidate) -> bool:
        """False only if no options make the candidate fit."""
        job, layout = self.job, candidate.layout
        hardware = job.hardware
        ranks = self.rank_bytes(layout, candidate.microbatch_size)
        hosts: dict[int, float] = {}
        room = min(hardware.accelerator.usable_memory_bytes, job.max_rank_bytes)
        if max(ranks) > room:
            return False
        for rank, used in enumerate(ranks):
            stages = [stage for stage in layout.backward if stage.rank == rank]
            state = float(sum(_of(self.state, stage) for stage in stages))
            if hardware.device == "cuda" and job.options.get("bucket_layers", 1) == 1:
                state = max(0.0, state - self.held_part * (room - used))
            own = state + sum(_of(self.weights, stage) + _of(self.gradients, stage) for stage in stages)
            host = hardware.host_of(rank)
            hosts[host] = hosts.get(host, 0.0) + own + (used if hardware.device == "cpu" else 0)
        return max(hosts.values()) - self.tied_bytes <= min(hardware.cpu.usable_memory_bytes, job.max_host_bytes)

    def rank_bytes(self, layout: Layout, microbatch_size: int) -> list[float]:
        """Of every rank: its largest stage's weights and gradients, and what the backward of a stage works with."""
        saved, in_backward = self.activations(microbatch_size)
        weights, gradients, working = ([0.0] * layout.num_ranks for _ in range(3))
        for stage in layout.backward:
            rank = stage.rank
            weights[rank] = max(weights[rank], _of(self.weights, stage))
            gradients[rank] = max(gradients[rank], _of(self.gradients, stage))
            if self.job.options.get("recompute") != "never":
                own = _of(saved, stage) + max(in_backward[stage.first : stage.stop])
                working[rank] = max(working[rank], own)
        workspaces = 2 * WORKSPACE_BYTES if self.job.hardware.device == "cuda" else 0
        return [sum(items) + workspaces for items in zip(weights, gradients, working, strict=True)]

    def _activations(self, microbatch_size: int) -> tuple[list[int], list[int]]:
        """Sums over layers of what autograd saves, and what the backward of each layer has beyond that."""
        model, sequence = self.job.model, self.job.sequence
        kinds = [model.layer_kind(i) for i in range(model.num_total_layers)]
        size = microbatch_size, sequence, self.element_bytes
        saved = {kind: model.layer_activation_bytes(kind, *size) for kind in set(kinds)}
        in_backward = {kind: model.layer_backward_bytes(kind, *size) for kind in set(kinds)}
        return _sums([saved[kind] for kind in kinds]), [in_backward[kind] for kind in kinds]


def some_plan_fits(arguments: dict[str, Any], first: Sequence[Candidate] = (), tries: int = TRIES) -> bool:
    """Whether memory is enough for some plan, by the account of the leanest ones; nothing is simulated.

    Args:
        arguments: of ``make_space``.
        first: candidates to look at before the leanest.
        tries: how many of the leanest are looked at.
    """
    try:
        space = make_space(**arguments)
        space = replace(space, microbatch_sizes=space.microbatch_sizes[:1])  # larger ones need no less
        candidates = space.candidates({})
    except SpipeError:
        return False
    least = LeastMemory(space.job)
    for candidate in [*first, *leanest(filter(least.may_fit, candidates))[:tries]]:
        try:
            if fitting(space.job, candidate)[1].fits:
                return True
        except SpipeError:
            continue
    return False


def leanest(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Those that are likely to need least memory first."""
    return sorted(candidates, key=lambda c: (c.microbatch_size, -c.num_ranks, -len(c.layout.backward), c.key))


def _sums(values: list[int]) -> list[int]:
    return [0, *accumulate(values)]


def _of(sums: list[int], stage: Stage) -> int:
    return sums[stage.stop] - sums[stage.first]
