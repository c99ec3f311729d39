"""Layout: layers into stages into ranks.

Forward stages and backward stages are two independent partitions of the layers, with arbitrary cuts and their own
ranks. Backward covers every layer once. Forward covers a prefix that reaches at least the start of the top backward
stage: what lies above is dead work, because the top backward stage recomputes it (loss included).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from spipe.errors import SpipeError


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers ``first`` (inclusive) to ``stop`` (exclusive), run as one unit by ``rank``."""

    first: int
    stop: int
    rank: int

    @property
    def layers(self) -> range:
        return range(self.first, self.stop)


@dataclass(frozen=True, slots=True)
class StageInput:
    """The source of a backward stage's input: the activation at the boundary where the stage starts.

    Attributes:
        origin: ``tokens`` for the bottom stage; ``output`` if forward stage ``forward`` computes the boundary
            (inside it or at its end); ``input`` if that stage receives the boundary as its own input and keeps it.
        rank: the rank that holds it after the forward pass.
    """

    origin: Literal["tokens", "output", "input"]
    forward: int
    rank: int


@dataclass(frozen=True)
class Layout:
    """Which rank runs which layers in which pass.

    Attributes:
        num_layers: all layers of the model, embedding and head included.
        num_ranks: ranks of the job; one that has no stage still joins the collectives.
        forward, backward: stages from the bottom of the model to the top.
        layer_costs: relative forward cost of each layer (any unit); orders ops, never a prediction.

    Raises:
        SpipeError: on gaps, overlaps, empty stages, ranks out of range, a forward prefix that is too short.
    """

    num_layers: int
    num_ranks: int
    forward: tuple[Stage, ...]
    backward: tuple[Stage, ...]
    layer_costs: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise SpipeError(f"a layout needs at least one layer, got num_layers={self.num_layers}")
        if self.num_ranks < 1:
            raise SpipeError(f"a layout needs at least one rank, got num_ranks={self.num_ranks}")
        if not self.layer_costs:
            object.__setattr__(self, "layer_costs", (1.0,) * self.num_layers)
        if len(self.layer_costs) != self.num_layers or not all(0 <= cost < float("inf") for cost in self.layer_costs):
            raise SpipeError(
                f"layer_costs needs {self.num_layers} finite numbers >= 0, one a layer, got {self.layer_costs}"
            )
        self._check_partition("backward", self.backward)
        self._check_partition("forward", self.forward)
        covered = self.backward[-1].stop if self.backward else 0
        if covered != self.num_layers:
            raise SpipeError(f"backward stages cover {covered} of {self.num_layers} layers; every layer is needed")
        if self.forward_stop > self.num_layers:
            raise SpipeError(f"forward stages end at layer {self.forward_stop} of {self.num_layers}")
        if self.forward_stop < self.backward[-1].first:
            raise SpipeError(
                f"forward stages cover layers 0..{self.forward_stop - 1}, but the top backward stage starts at layer "
                f"{self.backward[-1].first}: forward has to reach it"
            )

    def _check_partition(self, name: str, stages: Sequence[Stage]) -> None:
        expected = 0
        for k, stage in enumerate(stages):
            label = f"{name} stage {k} (layers {stage.first}..{stage.stop - 1}, rank {stage.rank})"
            if stage.first != expected:
                problem = "overlaps the one below" if stage.first < expected else "leaves a gap"
                raise SpipeError(f"{label} {problem}: it has to start at layer {expected}")
            if stage.stop <= stage.first:
                raise SpipeError(f"{label} is empty; give it at least one layer or leave it out")
            if not 0 <= stage.rank < self.num_ranks:
                raise SpipeError(f"{label}: rank is not one of 0..{self.num_ranks - 1}")
            expected = stage.stop

    @property
    def forward_stop(self) -> int:
        """The first layer that no forward stage runs."""
        return self.forward[-1].stop if self.forward else 0

    @property
    def ranks_used(self) -> frozenset[int]:
        return frozenset(stage.rank for stage in (*self.forward, *self.backward))

    def stage_input(self, k: int) -> "StageInput":
        """Where backward stage ``k`` gets its input from: nothing travels if its own rank computes or receives it."""
        return self._stage_inputs[k]

    @cached_property
    def _stage_inputs(self) -> tuple["StageInput", ...]:
        return tuple(self._stage_input(k) for k in range(len(self.backward)))

    def _stage_input(self, k: int) -> "StageInput":
        stage = self.backward[k]
        if stage.first == 0:
            return StageInput("tokens", -1, stage.rank)
        j = next(j for j, forward in enumerate(self.forward) if forward.stop >= stage.first)
        source = self.forward[j]
        if source.stop == stage.first and source.rank != stage.rank and j + 1 < len(self.forward):
            above = self.forward[j + 1]
            if above.rank == stage.rank:
                return StageInput("input", j + 1, above.rank)
        return StageInput("output", j, source.rank)

    def mapped(self, ranks: Sequence[int]) -> "Layout":
        """The same stages with rank r renamed to ``ranks[r]``."""
        if sorted(ranks) != list(range(self.num_ranks)):
            raise SpipeError(f"ranks = {list(ranks)} should name each of 0..{self.num_ranks - 1} once")

        def renamed(stages: Sequence[Stage]) -> tuple[Stage, ...]:
            return tuple(Stage(stage.first, stage.stop, ranks[stage.rank]) for stage in stages)

        return replace(self, forward=renamed(self.forward), backward=renamed(self.backward))

    def cross_mapped(self, ranks_per_host: int) -> "Layout":
        """The same stages with the ranks of the pipeline in the order of ``cross_mapping``."""
        return self.mapped(cross_mapping(self.num_ranks, ranks_per_host))

    def cost(self, stage: Stage) -> float:
        """Relative forward cost of a stage for one microbatch."""
        return sum(self.layer_costs[stage.first : stage.stop])


def balanced_cuts(costs: Sequence[float], num_stages: int) -> list[int]:
    """Cut layers into contiguous stages so that the costliest stage is as cheap as possible.

    Args:
        costs: relative cost of each layer, >= 0.
        num_stages: number of non-empty stages.

    Returns:
        ``num_stages + 1`` bounds, from 0 to ``len(costs)``; among optimal cuts the one with the smallest sum of squared
        stage costs (so that equal layers are spread evenly).

    Raises:
        SpipeError: if there are fewer layers than stages.
    """
    return list(_balanced_cuts(tuple(costs), num_stages))


@lru_cache(maxsize=4096)
def _balanced_cuts(costs: tuple[float, ...], num_stages: int) -> tuple[int, ...]:
    num_layers = len(costs)
    if not 1 <= num_stages <= num_layers:
        raise SpipeError(
            f"cannot cut {num_layers} layers into {num_stages} stages; use 1 to {num_layers} stages "
            "(fewer stages per rank, fewer ranks, or a deeper model)"
        )
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    limit, _ = _cut(prefix, num_stages, float("inf"), max)
    _, bounds = _cut(prefix, num_stages, limit * (1 + 1e-12), lambda total, width: total + width * width)
    return tuple(bounds)


def _cut(
    prefix: Sequence[float], num_stages: int, limit: float, combine: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """Cuts with no stage above ``limit`` that minimise stage costs folded with ``combine``: (that minimum, bounds)."""
    num_layers = len(prefix) - 1
    best = [0.0] + [float("inf")] * num_layers
    choices = []
    for stage in range(1, num_stages + 1):
        row = [float("inf")] * (num_layers + 1)
        choice = [0] * (num_layers + 1)
        for stop in range(stage, num_layers - (num_stages - stage) + 1):
            for first in range(stop - 1, stage - 2, -1):
                width = prefix[stop] - prefix[first]
                if width > limit or (combine is max and width > row[stop]):
                    break
                value = combine(best[first], width)
                if value < row[stop]:
                    row[stop], choice[stop] = value, first
                if combine is max and best[first] <= width:
                    break
        best = row
        choices.append(choice)
    bounds = [num_layers]
    for choice in reversed(choices):
        bounds.append(choice[bounds[-1]])
    return best[num_layers], bounds[::-1]


def stages_from_cuts(bounds: Sequence[int], ranks: Sequence[int]) -> tuple[Stage, ...]:
    """Stages between consecutive bounds, the k-th on ``ranks[k]``."""
    return tuple(Stage(first, stop, rank) for first, stop, rank in zip(bounds, bounds[1:], ranks, strict=False))


def decoupled_layout(
    num_ranks: int,
    costs: Sequence[float],
    num_forward: int,
    num_backward: int,
    *,
    full_forward: bool = False,
) -> Layout:
    """SPipe's layout: forward ranks count up, backward ranks count down from rank 0 at the top.

    Activations and gradients then both travel from rank r to r+1, and the rank that finishes its forward work first
    holds the top of the model, so the turn costs no bubble (SPipe, PACT 2025, section 3).

    Args:
        num_ranks: ranks N.
        costs: relative forward cost of every layer, embedding and head included.
        num_forward, num_backward: total number of stages; for F and B stages per rank, N*F and N*B.
        full_forward: also run forward what the top backward stage recomputes anyway (the published schedule).
    """
    backward = balanced_cuts(costs, num_backward)
    forward = _forward_cuts(costs, num_forward, len(costs) if full_forward else backward[-2])
    return Layout(
        num_layers=len(costs),
        num_ranks=num_ranks,
        forward=stages_from_cuts(forward, [k % num_ranks for k in range(len(forward) - 1)]),
        backward=stages_from_cuts(backward, [(num_backward - 1 - k) % num_ranks for k in range(num_backward)]),
        layer_costs=tuple(costs),
    )


def cross_mapping(num_ranks: int, ranks_per_host: int) -> list[int]:
    """Ranks in pipeline order such that the c-th and the (N-1-c)-th share a host.

    In SPipe's layout with as many forward as backward stages those two hold the same layers in the two passes, so that
    every fetch comes from the rank's own host; with finer backward stages some do.

    Raises:
        SpipeError: if the ranks do not fill hosts of an even number of ranks.
    """
    if num_ranks <= ranks_per_host:
        return list(range(num_ranks))
    if num_ranks % ranks_per_host or ranks_per_host % 2:
        raise SpipeError(
            f"cross mapping pairs the ranks of a host: {num_ranks} ranks do not fill hosts of {ranks_per_host} by two; "
            "use whole hosts with an even number of ranks each, or leave cross mapping out"
        )
    half = ranks_per_host // 2
    first = [host * ranks_per_host + i for host in range(num_ranks // ranks_per_host) for i in range(half)]
    second = [
        host * ranks_per_host + half + i for host in reversed(range(num_ranks // ranks_per_host)) for i in range(half)
    ]
    return first + second


def coupled_layout(num_ranks: int, costs: Sequence[float], num_stages: int, *, full_forward: bool = False) -> Layout:
    """Mobius, GPipe and 1F1B: a stage's forward and backward run on the same rank, round-robin over the ranks."""
    bounds = balanced_cuts(costs, num_stages)
    stages = stages_from_cuts(bounds, [k % num_ranks for k in range(num_stages)])
    return Layout(
        num_layers=len(costs),
        num_ranks=num_ranks,
        forward=stages if full_forward else stages[:-1],
        backward=stages,
        layer_costs=tuple(costs),
    )


def _forward_cuts(costs: Sequence[float], num_stages: int, stop: int) -> list[int]:
    return balanced_cuts(costs[:stop], min(num_stages, stop)) if stop else [0]
