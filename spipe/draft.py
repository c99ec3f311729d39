"""Draft: the ops of a step while they are collected, and the one global order that makes them a program.

The order is a topological sort by logical time, in which only compute takes time; ties go by class (what frees or feeds
others first), then by creation. Both halves of a message, and all ops of a collective, are one node of the sort.
"""

from heapq import heapify, heappop, heappush
from itertools import pairwise

from spipe.errors import SpipeError
from spipe.layout import Layout
from spipe.ops import Kind
from spipe.options import Options
from spipe.program import Lane, Program

_CLASS = [4] * len(Kind)  # ties in logical time: FREE, activation and gradient, stage input, FETCH, the rest
_CLASS[Kind.FREE] = 0
for _kind in (Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION, Kind.SEND_GRADIENT, Kind.RECV_GRADIENT):
    _CLASS[_kind] = 1
for _kind in (Kind.SEND_STAGE_INPUT, Kind.RECV_STAGE_INPUT, Kind.STORE_STAGE_INPUT, Kind.LOAD_STAGE_INPUT):
    _CLASS[_kind] = 2
_CLASS[Kind.FETCH] = 3

_COST = {int(Kind.FORWARD): 1.0, int(Kind.RECOMPUTE): 1.0, int(Kind.BACKWARD): 2.0, int(Kind.WEIGHT_GRADIENT): 1.0}


class Draft:
    """Columns of ops in order of creation (see ``Program`` for their meaning), and each rank's compute order."""

    def __init__(
        self, layout: Layout, num_microbatches: int, options: Options, tied: bool, frozen: frozenset[int]
    ) -> None:
        self.layout, self.microbatches, self.options, self.tied = layout, num_microbatches, options, tied
        self.frozen = frozen
        self.num_forward, self.num_backward = len(layout.forward), len(layout.backward)
        self.stages = (*layout.forward, *layout.backward)
        self.buckets = tuple(_buckets(stage.layers, options.bucket_layers) for stage in self.stages)
        self.kind: list[int] = []
        self.stage: list[int] = []
        self.index: list[int] = []
        self.visit: list[int] = []
        self.rank: list[int] = []
        self.lane: list[int] = []
        self.deps: list[list[int]] = []
        self.carried: list[list[int]] = []
        self.partner: list[int] = []
        self.slot: list[int] = []
        self.weights: list[int] = []
        self.compute: list[list[int]] = [[] for _ in range(layout.num_ranks)]
        self.lanes: dict[tuple[str, int, int], int] = {}

    def add(
        self, kind: Kind, stage: int, index: int, rank: int, lane: str, deps: list[int],
        peer: int = -1, visit: int = 0, slot: int = -1,
    ) -> int:  # fmt: skip
        key = (lane, min(rank, peer), max(rank, peer)) if peer >= 0 else (lane, rank, -1)
        self.kind.append(int(kind))
        self.stage.append(stage)
        self.index.append(index)
        self.visit.append(visit)
        self.rank.append(rank)
        self.lane.append(self.lanes.setdefault(key, len(self.lanes)))
        self.deps.append(deps)
        self.carried.append([])
        self.partner.append(-1)
        self.slot.append(slot)
        self.weights.append(-1)
        return len(self.kind) - 1

    def earliest_ends(self) -> list[float]:
        """Logical end of every op if it starts as early as its dependencies allow."""
        leader, _ = self._nodes()
        start, _ = self._traverse(leader, [0] * len(leader))
        return [s + c for s, c in zip(start, self._costs(), strict=True)]

    def sorted_program(self) -> Program:
        """The program in its global order. Raises SpipeError if the dependencies are cyclic."""
        leader, members = self._nodes()
        start, order = self._traverse(leader, [_CLASS[kind] for kind in self.kind])
        if len(order) < sum(i == first for i, first in enumerate(leader)):
            self._refuse_cycle(set(range(len(self.kind))) - {i for node in order for i in members[node]})
        return self._renumbered(
            [i for node in order for i in members[node]], [start[leader[i]] for i in range(len(leader))]
        )

    def _nodes(self) -> tuple[list[int], list[list[int]]]:
        """Ops that happen together (halves of a message, a collective): (first op of each op's node, ops of a node)."""
        leader = [i if partner < 0 else min(i, partner) for i, partner in enumerate(self.partner)]
        for kind in (Kind.VALIDATE, Kind.BARRIER):
            together = [i for i, k in enumerate(self.kind) if k == kind]
            for i in together:
                leader[i] = together[0]
        members: list[list[int]] = [[] for _ in leader]
        for i, first in enumerate(leader):
            members[first].append(i)
        return leader, members

    def _traverse(self, leader: list[int], rank_ready: list[int]) -> tuple[list[float], list[int]]:
        """Earliest logical start of every node, and the nodes in order of (start, ``rank_ready``, number)."""
        count = len(leader)
        successors: list[list[int]] = [[] for _ in range(count)]
        unmet = [0] * count
        for i, deps in enumerate(self.deps):
            first = leader[i]
            unmet[first] += len(deps)
            for d in deps:
                successors[leader[d]].append(first)
        for mine in self.compute:
            for d, i in pairwise(mine):
                successors[d].append(i)
                unmet[i] += 1
        cost = self._costs()
        start = [0.0] * count
        heap = [(0.0, rank_ready[i], i) for i in range(count) if leader[i] == i and not unmet[i]]
        heapify(heap)
        order: list[int] = []
        while heap:
            begin, _, node = heappop(heap)
            order.append(node)
            end = begin + cost[node]
            for successor in successors[node]:
                if start[successor] < end:
                    start[successor] = end
                unmet[successor] -= 1
                if not unmet[successor]:
                    heappush(heap, (start[successor], rank_ready[successor], successor))
        return start, order

    def _costs(self) -> list[float]:
        """Logical seconds: one forward cost for FORWARD, RECOMPUTE and each half of BACKWARD, nothing for the rest."""
        stage_costs = [self.layout.cost(stage) for stage in self.stages]
        costs = [_COST[k] * stage_costs[s] if k in _COST else 0.0 for k, s in zip(self.kind, self.stage, strict=True)]
        split = Kind.WEIGHT_GRADIENT in self.kind
        for mine in self.compute if split or self.options.recompute == "never" else ():
            for i in mine:
                if split and self.kind[i] == Kind.BACKWARD:
                    costs[i] /= 2
                elif self.kind[i] == Kind.RECOMPUTE and self.keeps(self.stage[i] - self.num_forward):
                    costs[i] = 0.0
        return costs

    def keeps(self, k: int) -> bool:
        """Whether backward stage ``k`` finds what its forward saved and recomputes nothing."""
        return self.options.recompute == "never" and k < self.num_forward

    def _refuse_cycle(self, stuck: set[int]) -> None:
        names = [f"{Kind(self.kind[i]).name} of stage {self.stage[i]} index {self.index[i]}" for i in sorted(stuck)[:4]]
        options = self.options
        raise SpipeError(
            f"the dependencies are cyclic: {len(stuck)} ops can never start, among them {'; '.join(names)}. With "
            f"receive_slots={options.receive_slots}, send_slots={options.send_slots}, "
            f"weight_slots={options.weight_slots}, gradient_slots={options.gradient_slots} and {self.microbatches} "
            f"microbatches on {self.layout.num_ranks} ranks this order needs more slots"
        )

    def _renumbered(self, order: list[int], start: list[float]) -> Program:
        number = [0] * len(order)
        for position, i in enumerate(order):
            number[i] = position
        needed = [float("inf")] * self.layout.num_layers  # logical time at which a layer is first read in a step
        for i in (i for mine in self.compute for i in mine if self.kind[i] != Kind.FREE):
            for layer in self.stages[self.stage[i]].layers:
                needed[layer] = min(needed[layer], start[i])
        deadline = self.options.step_order == "deadline"
        priority = list(start)
        if deadline:  # the earlier a layer is read in the next step, the earlier it is stepped; lower layers first
            ends = [i for i, kind in enumerate(self.kind) if kind in (Kind.STEP, Kind.COMMIT)]
            layers = {i: self.buckets[self.stage[i]][self.index[i]] for i in ends}
            for place, i in enumerate(sorted(ends, key=lambda i: (min(needed[x] for x in layers[i]), layers[i].start))):
                priority[i] = float(place)

        def renumber(lists: list[list[int]]) -> list[tuple[int, ...]]:
            return [tuple(sorted({number[d] for d in lists[i]})) for i in order]

        lanes = tuple(
            Lane(name, rank, peer, "deadline" if deadline and name.startswith(("cpu", "settle")) else "in order")
            for name, rank, peer in self.lanes
        )
        return Program(
            layout=self.layout,
            num_microbatches=self.microbatches,
            options=self.options,
            tied=self.tied,
            frozen=self.frozen,
            lanes=lanes,
            kind=[self.kind[i] for i in order],
            stage=[self.stage[i] for i in order],
            index=[self.index[i] for i in order],
            visit=[self.visit[i] for i in order],
            rank=[self.rank[i] for i in order],
            lane=[self.lane[i] for i in order],
            dependencies=renumber(self.deps),
            carried=renumber(self.carried),
            partner=[number[self.partner[i]] if self.partner[i] >= 0 else -1 for i in order],
            priority=[priority[i] for i in order],
            slot=[self.slot[i] for i in order],
            weights=[self.weights[i] for i in order],
            buckets=self.buckets,
        )


def _buckets(layers: range, bucket_layers: int) -> tuple[range, ...]:
    size = bucket_layers or len(layers)
    return tuple(range(first, min(first + size, layers.stop)) for first in range(layers.start, layers.stop, size))
