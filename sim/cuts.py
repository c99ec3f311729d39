"""Cuts: where the stages of a pass begin and end, and how to improve them.

Cuts start balanced (``spipe.layout.balanced_cuts``) and are improved by moving layers between stages. Neighbours are
judged many at a time by a replay of one program with their costs (``Retiming``): as long as the number of stages stays
the same, cuts change what ops cost and hardly which ops there are. What has changed in between (a stage input comes
from another stage, a weight slot can be reused) is put right by lowering the new cuts before the next round.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import combinations
from random import Random

import numpy as np
from numpy.typing import NDArray

from spipe.layout import Layout, stages_from_cuts
from spipe.model import PassName
from spipe.ops import COMPUTE, Kind
from spipe.program import Program
from spipe.sim.cost import CostModel
from spipe.sim.pricing import OpCosts
from spipe.sim.replay import Floats, Ints, Replay

Bounds = tuple[int, ...]
_PASSES: tuple[tuple[Kind, PassName], ...] = (
    (Kind.FORWARD, "forward"),
    (Kind.RECOMPUTE, "recompute"),
    (Kind.BACKWARD, "backward"),
)
PAIRS = 256
_TIMES = 1_000_000  # nodes times columns of one replay
_WEIGHT_OPS = (Kind.FETCH, Kind.OFFLOAD_GRAD, Kind.STEP)


@dataclass(frozen=True)
class Cuts:
    """Bounds of the forward and of the backward stages: stage k has the layers ``bounds[k]`` to ``bounds[k + 1]``."""

    forward: Bounds
    backward: Bounds

    @classmethod
    def of(cls, layout: Layout) -> "Cuts":
        forward = (0, *(stage.stop for stage in layout.forward)) if layout.forward else (0,)
        return cls(forward, (0, *(stage.stop for stage in layout.backward)))

    def applied_to(self, layout: Layout) -> Layout:
        """The same stages on the same ranks, cut here."""
        return Layout(
            num_layers=layout.num_layers,
            num_ranks=layout.num_ranks,
            forward=stages_from_cuts(self.forward, [stage.rank for stage in layout.forward]),
            backward=stages_from_cuts(self.backward, [stage.rank for stage in layout.backward]),
            layer_costs=layout.layer_costs,
        )


@dataclass(frozen=True)
class Freedom:
    """What ties the cuts of a schedule together.

    Attributes:
        coupled: forward stages are the lowest backward stages.
        full_forward: forward covers all layers; otherwise it stops where the top backward stage begins.
    """

    coupled: bool
    full_forward: bool

    def neighbours(self, cuts: Cuts) -> Iterator[Cuts]:
        """All cuts that differ by one layer, moved from one stage to another through those between."""
        for bounds in _shifted(cuts.backward):
            if self.coupled:
                yield Cuts(bounds[: len(cuts.forward)], bounds)
            elif self.full_forward:
                yield Cuts(cuts.forward, bounds)
            elif len(cuts.forward) < 2:
                yield Cuts((0,), bounds)
            elif bounds[-2] > cuts.forward[-2]:
                yield Cuts((*cuts.forward[:-1], bounds[-2]), bounds)
        if not self.coupled:
            for bounds in _shifted(cuts.forward):
                yield Cuts(bounds, cuts.backward)

    def every(self, cuts: Cuts) -> Iterator[Cuts]:
        """All cuts with as many stages."""
        layers = cuts.backward[-1]
        for inner in combinations(range(1, layers), len(cuts.backward) - 2):
            backward = (0, *inner, layers)
            if self.coupled:
                yield Cuts(backward[: len(cuts.forward)], backward)
                continue
            stop = layers if self.full_forward else backward[-2]
            if len(cuts.forward) < 2 or stop == 0:
                if len(cuts.forward) < 2 and (stop == 0 or not self.full_forward):
                    yield Cuts((0,), backward)
                continue
            for forward in combinations(range(1, stop), len(cuts.forward) - 2):
                yield Cuts((0, *forward, stop), backward)


def _shifted(bounds: Bounds) -> Iterator[Bounds]:
    """Bounds with a run of neighbouring inner ones moved by one layer."""
    last = len(bounds) - 1
    for begin in range(1, last):
        for end in range(begin + 1, last + 1):
            if bounds[end - 1] + 1 < bounds[end]:
                yield (*bounds[:begin], *(x + 1 for x in bounds[begin:end]), *bounds[end:])
            if bounds[begin] - 1 > bounds[begin - 1]:
                yield (*bounds[:begin], *(x - 1 for x in bounds[begin:end]), *bounds[end:])


class Retiming:
    """The step time that a program's graph would have with other cuts.

    Exact for the program's own cuts; for others an estimate as good as their programs are alike. Needs as many stages.
    """

    def __init__(self, program: Program, costs: OpCosts, model: CostModel) -> None:
        self.replay = Replay(program, costs)
        leaders = self.replay.leaders
        kinds = np.array([program.kind[i] for i in leaders])
        self.stage = np.array([program.stage[i] for i in leaders], dtype=np.intp)
        self.own = np.array([costs.seconds[i] for i in leaders])
        self.num_forward = len(program.layout.forward)
        layers = program.layout.num_layers
        self.compute = [(np.flatnonzero(kinds == kind), _sums(model, layers, name)) for kind, name in _PASSES]
        moved = (model.num_parameters, model.num_trained_parameters, model.num_stepped_parameters)
        self.weights = [
            (np.flatnonzero(kinds == kind), _prefix([count(range(i, i + 1)) for i in range(layers)]))
            for kind, count in zip(_WEIGHT_OPS, moved, strict=True)
        ]
        self.first, self.stop = self._bounds([Cuts.of(program.layout)])
        last: dict[int, int] = {}
        for node, i in enumerate(leaders):
            if program.kind[i] in COMPUTE:
                last[program.rank[i]] = node
        self.last_compute: Ints = np.array(list(last.values()), dtype=np.intp)

    def _bounds(self, cuts: Sequence[Cuts]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """First and stop layer of every stage, [stages, columns]."""
        forward = np.array([c.forward for c in cuts], dtype=np.intp).T
        backward = np.array([c.backward for c in cuts], dtype=np.intp).T
        return np.concatenate([forward[:-1], backward[:-1]]), np.concatenate([forward[1:], backward[1:]])

    def seconds(self, cuts: Sequence[Cuts]) -> Floats:
        """Seconds of every node for each of the cuts, [nodes, columns]."""
        first, stop = self._bounds(cuts)
        seconds = np.repeat(self.own[:, None], len(cuts), axis=1)
        for nodes, sums in self.compute:
            change = (sums[stop] - sums[first]) - (sums[self.stop] - sums[self.first])
            seconds[nodes] += change[self.stage[nodes]]
        for nodes, sums in self.weights:
            ratio = (sums[stop] - sums[first]) / (sums[self.stop] - sums[self.first])
            seconds[nodes] *= ratio[self.stage[nodes]]
        return seconds

    @property
    def width(self) -> int:
        """How many cuts are judged at a time: as many as keep the times of all nodes in some tens of megabytes."""
        return max(8, min(64, _TIMES // self.replay.num_nodes))

    def scores(self, cuts: Sequence[Cuts], num_steps: int = 2) -> Floats:
        """Estimated step time of each of the cuts, and a little of the time when the ranks stop to compute.

        The second part, too small to outweigh a step time, leads over plateaus where one rank alone decides.
        """
        parts = []
        for begin in range(0, len(cuts), self.width):
            seconds = self.seconds(cuts[begin : begin + self.width])
            step_s, idle_s = self.replay.step_and_ends(seconds, num_steps, self.last_compute)
            parts.append(step_s + 1e-3 * idle_s)
        return np.concatenate(parts) if parts else np.zeros(0)


def _prefix(values: Sequence[float]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.array(values, dtype=np.float64))])


def _sums(model: CostModel, layers: int, name: PassName) -> Floats:
    return _prefix([model.layer_s(model.model.layer_kind(i), name) for i in range(layers)])


def descend(
    retiming: Retiming, freedom: Freedom, cuts: Cuts, *, budget: int, seed: int = 0, finalists: int = 1
) -> tuple[list[Cuts], int]:
    """Hill-climbing over neighbouring cuts: (where it ends and the best others, neighbours judged).

    ``finalists`` cuts are returned. Neighbours are judged some at a time, in an order drawn with ``seed``; the best of
    them is taken as soon as it is better. Where none is, two layers are moved at a time, for ``PAIRS`` tries. Ends
    where that does not help either, or after ``budget`` neighbours.
    """
    random = Random(seed)
    scores = {cuts: float(retiming.scores([cuts])[0])}
    judged = 0
    while judged < budget:
        for moves in (_single_moves, _pairs):
            around = moves(freedom, cuts, random)[: budget - judged]
            better, count = _first_better(retiming, around, scores, scores[cuts])
            judged += count
            if better is not None:
                cuts = better
                break
        else:
            break
    others = nsmallest(finalists - 1, (each for each in scores if each != cuts), key=scores.__getitem__)
    return [cuts, *others], judged


def _first_better(
    retiming: Retiming, around: Sequence[Cuts], scores: dict[Cuts, float], best: float
) -> tuple[Cuts | None, int]:
    """The best of the first few that have a better one among them, and how many were judged, into ``scores``."""
    for begin in range(0, len(around), retiming.width):
        some = around[begin : begin + retiming.width]
        scores |= zip(some, map(float, retiming.scores(some)), strict=True)
        pick = min(some, key=lambda cuts: scores[cuts])
        if scores[pick] < best * (1 - 1e-9):
            return pick, begin + len(some)
    return None, len(around)


def _single_moves(freedom: Freedom, cuts: Cuts, random: Random) -> list[Cuts]:
    """All neighbours, in any order."""
    around = list(freedom.neighbours(cuts))
    random.shuffle(around)
    return around


def _pairs(freedom: Freedom, cuts: Cuts, random: Random) -> list[Cuts]:
    """Neighbours of neighbours, at most ``PAIRS``."""
    found: dict[Cuts, None] = {}
    for near in _single_moves(freedom, cuts, random):
        some = _single_moves(freedom, near, random)[: PAIRS // 8]
        found |= dict.fromkeys(far for far in some if far != cuts)
        if len(found) >= PAIRS:
            break
    return list(found)[:PAIRS]
