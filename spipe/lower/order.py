"""The one global order that makes a draft a program: a topological sort by logical time, in which only compute takes
time; ties go by class (what frees or feeds others first), then by creation.

Both halves of a message, and all ops of a collective, are one node of the sort: their first op stands for them.
"""

from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import TypeVar

from spipe.errors import SpipeError
from spipe.lower.draft import Draft
from spipe.ops import Kind
from spipe.program import Lane, Program

T = TypeVar("T")

_CLASS = [4] * len(Kind)  # ties in logical time: FREE, activation and gradient, stage input, FETCH, the rest
_CLASS[Kind.FREE] = 0
for _kind in (Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION, Kind.SEND_GRADIENT, Kind.RECV_GRADIENT):
    _CLASS[_kind] = 1
for _kind in (Kind.SEND_STAGE_INPUT, Kind.RECV_STAGE_INPUT, Kind.STORE_STAGE_INPUT, Kind.LOAD_STAGE_INPUT):
    _CLASS[_kind] = 2
_CLASS[Kind.FETCH] = 3

_ENDS = frozenset({int(Kind.STEP), int(Kind.COMMIT)})
_COST = {int(Kind.FORWARD): 1.0, int(Kind.RECOMPUTE): 1.0, int(Kind.BACKWARD): 2.0, int(Kind.WEIGHT_GRADIENT): 1.0}


class Graph:
    """Nodes and what they wait for: dependencies, and the order of the compute lanes."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.count = len(draft.kind)
        self.cost = _logical_costs(draft)
        self.node = node = list(range(self.count))
        for sent, received in draft.partner.items():
            node[received] = sent
        for members in draft.collectives:
            node[members.start : members.stop] = [members.start] * len(members)
        self.successors: list[list[int]] = [[] for _ in range(self.count)]
        self.num_needed = [0] * self.count
        for i, needs in enumerate(draft.deps):
            if needs:
                mine = node[i]
                self.num_needed[mine] += len(needs)
                for d in needs:
                    self.successors[node[d]].append(mine)
        for lane in draft.compute:
            self._connect((i, before) for before, i in pairwise(lane))

    def wait(self, pairs: Iterable[tuple[int, int]]) -> None:
        """The first op of each pair waits for the second, here and in the draft."""
        pairs = list(pairs)
        self.draft.wait(pairs)
        self._connect(pairs)

    def _connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        node, successors, num_needed = self.node, self.successors, self.num_needed
        for i, d in pairs:
            successors[node[d]].append(node[i])
            num_needed[node[i]] += 1

    def earliest_ends(self) -> list[float]:
        """Logical end of every op if it starts as early as its dependencies allow."""
        start, unmet, cost = [0.0] * self.count, self.num_needed.copy(), self.cost
        ready = [i for i, first in enumerate(self.node) if i == first and not unmet[i]]
        for i in ready:  # grows while it is walked
            end = start[i] + cost[i]
            for successor in self.successors[i]:
                if start[successor] < end:
                    start[successor] = end
                unmet[successor] -= 1
                if not unmet[successor]:
                    ready.append(successor)
        return [start[first] + cost[i] for i, first in enumerate(self.node)]

    def _sorted(self) -> tuple[list[int], list[float]]:
        """Nodes in order of (earliest logical start, class, number), and the start of every node."""
        start, unmet, cost, successors = [0.0] * self.count, self.num_needed.copy(), self.cost, self.successors
        rank = [_CLASS[kind] for kind in self.draft.kind]
        heap = [(0.0, rank[i], i) for i, first in enumerate(self.node) if i == first and not unmet[i]]
        heapify(heap)
        order: list[int] = []
        while heap:
            begin, _, i = heappop(heap)
            order.append(i)
            end = begin + cost[i]
            for successor in successors[i]:
                if start[successor] < end:
                    start[successor] = end
                unmet[successor] -= 1
                if not unmet[successor]:
                    heappush(heap, (start[successor], rank[successor], successor))
        return order, start

    def program(self) -> Program:
        """The program in its global order. Raises SpipeError if the dependencies are cyclic."""
        nodes, start = self._sorted()
        members: dict[int, Sequence[int]] = {ops.start: ops for ops in self.draft.collectives}
        members |= {sent: (sent, received) for sent, received in self.draft.partner.items()}
        order: list[int] = []
        for i in nodes:
            if i in members:
                order += members[i]
            else:
                order.append(i)
        if len(order) < self.count:
            raise _cyclic(self.draft, sorted(set(range(self.count)).difference(order)))
        return _program(self.draft, order, [start[first] for first in self.node])


def _logical_costs(draft: Draft) -> list[float]:
    """Logical seconds: one forward cost for FORWARD, RECOMPUTE and each half of BACKWARD, nothing for the rest."""
    stage_costs = [draft.layout.cost(stage) for stage in draft.stages]
    costs = [_COST[k] * stage_costs[s] if k in _COST else 0.0 for k, s in zip(draft.kind, draft.stage, strict=True)]
    split = Kind.WEIGHT_GRADIENT in draft.kind
    for mine in draft.compute if split or draft.options.recompute == "never" else ():
        for i in mine:
            if split and draft.kind[i] == Kind.BACKWARD:
                costs[i] /= 2
            elif draft.kind[i] == Kind.RECOMPUTE and draft.keeps(draft.stage[i] - draft.num_forward):
                costs[i] = 0.0
    return costs


def _cyclic(draft: Draft, stuck: list[int]) -> SpipeError:
    names = [f"{Kind(draft.kind[i]).name} of stage {draft.stage[i]} index {draft.index[i]}" for i in stuck[:4]]
    options = draft.options
    return SpipeError(
        f"the dependencies are cyclic: {len(stuck)} ops can never start, among them {'; '.join(names)}. With "
        f"receive_slots={options.receive_slots}, send_slots={options.send_slots}, "
        f"weight_slots={options.weight_slots}, gradient_slots={options.gradient_slots} and {draft.microbatches} "
        f"microbatches on {draft.layout.num_ranks} ranks this order needs more slots"
    )


def _priorities(draft: Draft, start: list[float]) -> list[float]:
    """Logical starts; for STEP and COMMIT in deadline order, the earlier a layer is read in a step the less.

    Of layers that are read at the same time, the lower ones go first.
    """
    if draft.options.step_order != "deadline":
        return start
    read = [float("inf")] * len(draft.stages)  # when a stage first reads its layers
    for table, first in ((draft.forward, 0), (draft.recompute, draft.num_forward)):
        for k, row in enumerate(table):
            read[first + k] = min(start[i] for i in row)
    needed = [float("inf")] * draft.layout.num_layers
    for stage, when in zip(draft.stages, read, strict=True):
        for layer in stage.layers:
            needed[layer] = min(needed[layer], when)
    ends = []
    for i in (i for i, kind in enumerate(draft.kind) if kind in _ENDS):
        layers = draft.buckets[draft.stage[i]][draft.index[i]]
        ends.append((min(needed[layers.start : layers.stop]), layers.start, i))
    priority = start.copy()
    for place, (_, _, i) in enumerate(sorted(ends)):
        priority[i] = float(place)
    return priority


def _program(draft: Draft, order: list[int], start: list[float]) -> Program:
    """The draft with its ops renumbered by their position in ``order``."""
    number = [0] * len(order)
    for position, i in enumerate(order):
        number[i] = position

    def in_order(column: list[T]) -> list[T]:
        return [column[i] for i in order]

    def filled(column: Mapping[int, int], default: int) -> list[int]:
        result = [default] * len(order)
        for i, value in column.items():
            result[number[i]] = value
        return result

    def renumbered(needs: Iterable[tuple[int, list[int]]]) -> list[tuple[int, ...]]:
        result: list[tuple[int, ...]] = [()] * len(order)
        for i, ops in needs:
            if len(ops) == 1:
                result[number[i]] = (number[ops[0]],)
            elif ops:
                result[number[i]] = tuple(sorted({number[d] for d in ops}))
        return result

    partner = {sent: number[received] for sent, received in draft.partner.items()}
    partner |= {received: number[sent] for sent, received in draft.partner.items()}
    deadline = draft.options.step_order == "deadline"
    return Program(
        layout=draft.layout,
        num_microbatches=draft.microbatches,
        options=draft.options,
        tied=draft.tied,
        frozen=draft.frozen,
        lanes=tuple(
            Lane(name, rank, peer, "deadline" if deadline and name.startswith(("cpu", "settle")) else "in order")
            for name, rank, peer in draft.lanes
        ),
        kind=in_order(draft.kind),
        stage=in_order(draft.stage),
        index=in_order(draft.index),
        visit=filled(draft.visit, 0),
        rank=in_order(draft.rank),
        lane=in_order(draft.lane),
        dependencies=renumbered(enumerate(draft.deps)),
        carried=renumbered(draft.carried.items()),
        partner=filled(partner, -1),
        priority=in_order(_priorities(draft, start)),
        slot=filled(draft.slot, -1),
        weights=filled(draft.weights, -1),
        buckets=draft.buckets,
    )
