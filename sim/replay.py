"""Replay: the times of a program whose ops share nothing, without a clock. Many sets of costs at a time.

Without contention an op starts when the last of its dependencies and the op before it in its lane are done: a max-plus
recurrence over the program's graph. Ops are grouped into levels, ops of a level need only ops of levels below, and a
level is a handful of array operations for all ops and all sets of costs together. The result is what
``spipe.sim.engine.play(..., contention=False)`` gives, to the last bit.

Lanes in deadline order are not max-plus: which op goes first depends on what is ready. But all ops of such a lane get
ready without help from the lane itself, so that the lane is played, op by op, once it is known when each is ready. Only
where an op gets ready at the very instant at which the lane ends another may the engine decide otherwise: it takes
events of one instant one by one. And with stale weights (``optimizer`` ``stale``) the steps overlap in these lanes,
each of which is played step by step here: then the replay is an estimate.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray

from spipe.errors import SpipeError
from spipe.ops import COLLECTIVES, COMPUTE, Kind
from spipe.program import Program
from spipe.sim.engine import Timeline
from spipe.sim.pricing import OpCosts

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]


@dataclass(frozen=True)
class _Level:
    """Nodes that may run in any order. ``needs[first[k]: first[k + 1]]`` are the times that node k waits for."""

    nodes: Ints
    needs: Ints
    first: Ints
    issued: Ints  # positions in ``nodes`` of the ops that the host issues one after the other
    issued_before: Ints  # the op that was issued before each of them


@dataclass(frozen=True)
class _Urgent:
    """Deadline lanes, one a row, each lane's ops by priority; rows are padded with -1."""

    nodes: Ints
    needs: Ints
    first: Ints


class Replay:
    """The graph of a program, to be replayed with its own costs or with others.

    Args:
        program: the ops; both halves of a message, and the ops of a collective, are one node.
        costs: tell which ops take no time, and what the host needs to issue an op.

    Raises:
        SpipeError: if a lane in deadline order waits for itself.
    """

    def __init__(self, program: Program, costs: OpCosts) -> None:
        self.program, self.costs = program, costs
        count = len(program)
        leader = [i if p < 0 or p > i else p for i, p in enumerate(program.partner)]
        for together in program.collectives():
            for i in together:
                leader[i] = together[0]
        self.leaders = [i for i, first in enumerate(leader) if i == first]
        place = [-1] * count
        for node, i in enumerate(self.leaders):
            place[i] = node
        self.node = np.array([place[first] for first in leader], dtype=np.intp)
        """Op -> node."""
        self.num_nodes = len(self.leaders)
        # Times are looked up in one array: this step's nodes, those of the two steps before, and the beginning of time.
        self.origin = 3 * self.num_nodes
        self._build(place, leader)

    def _build(self, place: Sequence[int], leader: Sequence[int]) -> None:
        program, num_nodes = self.program, self.num_nodes
        control = len(program.lanes)
        urgent_lane = [lane.discipline == "deadline" for lane in program.lanes] + [False]
        needs: list[list[int]] = [[] for _ in range(num_nodes)]
        for i, (deps, carried) in enumerate(zip(program.dependencies, program.carried, strict=True)):
            mine = needs[place[leader[i]]]
            mine += [place[leader[d]] for d in deps]
            mine += [place[leader[d]] + program.lag(i, d) * num_nodes for d in carried]
        lanes = [control if program.kind[i] in COLLECTIVES else program.lane[i] for i in self.leaders]
        queues: list[list[int]] = [[] for _ in range(control + 1)]
        for node, lane in enumerate(lanes):
            queues[lane].append(node)
        issued_before: dict[int, int] = {}
        seconds = self.costs.seconds
        for lane, queue in enumerate(queues):
            if not queue or urgent_lane[lane]:
                continue
            for before, node in zip([queue[-1] + num_nodes, *queue], queue, strict=False):
                needs[node].append(before)
            if program.kind[self.leaders[queue[0]]] in COMPUTE and self.costs.issue_s > 0:
                issued = [node for node in queue if seconds[self.leaders[node]] > 0]
                issued_before.update(zip(issued, [issued[-1] + num_nodes, *issued] if issued else [], strict=False))
        urgent = [urgent_lane[lane] for lane in lanes]
        rounds = self._rounds(needs, lanes, urgent)
        level = [0] * num_nodes
        for node in range(num_nodes):
            if not urgent[node]:
                turn = rounds[node]
                level[node] = 1 + max((level[d] for d in needs[node] if d < num_nodes and rounds[d] == turn), default=0)
        self.phases: list[tuple[list[_Level], _Urgent | None]] = []
        for turn in range(max(rounds, default=0) + 1):
            groups: dict[int, list[int]] = {}
            for node in range(num_nodes):
                if rounds[node] == turn and not urgent[node]:
                    groups.setdefault(level[node], []).append(node)
            levels = [self._level(groups[key], needs, issued_before) for key in sorted(groups)]
            rows: dict[int, list[int]] = {}
            for node in range(num_nodes):
                if urgent[node] and rounds[node] == turn:
                    rows.setdefault(lanes[node], []).append(node)
            self.phases.append((levels, self._urgent(list(rows.values()), needs) if rows else None))

    def _rounds(self, needs: list[list[int]], lanes: list[int], urgent: list[bool]) -> list[int]:
        """Round in which each node is played: after the rounds of all deadline lanes it waits for.

        A deadline lane is played at the end of its round, when all its ops have their times to be ready.
        """
        num_nodes = self.num_nodes
        rounds = [0] * num_nodes
        late = list(urgent)
        for node in range(num_nodes):
            if not late[node]:
                late[node] = any(late[d] for d in needs[node] if d < num_nodes)
        nodes = [node for node in range(num_nodes) if late[node]]
        of_lane: dict[int, int] = {}
        for _ in range(2 * len(self.program.lanes) + 4):
            changed = False
            for node in nodes:
                turn = max((rounds[d] + urgent[d] for d in needs[node] if d < num_nodes), default=0)
                if urgent[node]:
                    turn = max(turn, of_lane.get(lanes[node], 0))
                    of_lane[lanes[node]] = turn
                if turn != rounds[node]:
                    rounds[node], changed = turn, True
            if not changed:
                return rounds
        raise SpipeError("the program cannot be replayed: a lane in deadline order waits for its own ops")

    def _level(self, nodes: list[int], needs: list[list[int]], issued_before: dict[int, int]) -> _Level:
        lists = [needs[node] or [self.origin] for node in nodes]
        issued = [k for k, node in enumerate(nodes) if node in issued_before]
        before = [issued_before[nodes[k]] for k in issued]
        return _Level(_ints(nodes), *_joined(lists), _ints(issued), _ints(before))

    def _urgent(self, rows: list[list[int]], needs: list[list[int]]) -> _Urgent:
        priority = self.program.priority
        longest = max(map(len, rows))
        ordered = [sorted(row, key=lambda node: (priority[self.leaders[node]], node)) for row in rows]
        padded = [row + [-1] * (longest - len(row)) for row in ordered]
        return _Urgent(
            np.array(padded, dtype=np.intp), *_joined([needs[x] or [self.origin] for r in ordered for x in r])
        )

    # ------------------------------------------------------------------ play

    def steps(self, seconds: Floats | None = None, num_steps: int = 1) -> Iterator[tuple[Floats, Floats]]:
        """Start and end of every node, step by step.

        Args:
            seconds: of every node, a column for each set of costs, [nodes, columns]; None: the program's own costs.
            num_steps: steps in a row.

        Yields:
            For each step two arrays [nodes, columns], in seconds from the start of the first step. The next step
            overwrites them.
        """
        if seconds is None:
            seconds = np.array([[self.costs.seconds[i]] for i in self.leaders])
        num_nodes, columns = seconds.shape
        start, end = np.zeros((2, 3 * num_nodes + 1, columns))
        start[num_nodes:] = -np.inf
        for step in range(num_steps):
            if step:
                start[num_nodes:-1], end[num_nodes:-1] = start[: 2 * num_nodes].copy(), end[: 2 * num_nodes].copy()
            for levels, urgent in self.phases:
                for level in levels:
                    self._play_level(level, seconds, start, end)
                if urgent is not None:
                    self._play_urgent(urgent, seconds, start, end)
            yield start[:num_nodes], end[:num_nodes]

    def _play_level(self, level: _Level, seconds: Floats, start: Floats, end: Floats) -> None:
        nodes = level.nodes
        now = np.maximum.reduceat(end[level.needs], level.first, axis=0)
        took = seconds[nodes]
        if level.issued.size:
            begin = now.copy()
            begin[level.issued] = np.maximum(now[level.issued], start[level.issued_before] + self.costs.issue_s)
            start[nodes] = begin
            end[nodes] = now + ((begin - now) + took)
        else:
            start[nodes] = now
            end[nodes] = now + took

    def _play_urgent(self, urgent: _Urgent, seconds: Floats, start: Floats, end: Floats) -> None:
        """Every lane takes, whenever it is free, the first of its row that is ready."""
        nodes, columns = urgent.nodes, seconds.shape[1]
        real = nodes >= 0
        waiting = np.full((*nodes.shape, columns), np.inf)
        waiting[real] = np.maximum.reduceat(end[urgent.needs], urgent.first, axis=0)
        took = np.where(real[:, :, None], seconds[nodes], 0.0)
        if not took.any():
            start[nodes[real]] = end[nodes[real]] = waiting[real]
            return
        free = np.zeros((len(nodes), columns))
        lanes, column = np.ogrid[: len(nodes), :columns]
        begin = np.zeros_like(waiting)
        for _ in range(nodes.shape[1]):
            free = np.maximum(free, waiting.min(axis=1))
            left = np.isfinite(free)  # shorter rows are done
            pick = np.argmax(waiting <= free[:, None, :], axis=1)
            begin[lanes, pick, column] = np.where(left, free, begin[lanes, pick, column])
            free = free + took[lanes, pick, column]
            waiting[lanes, pick, column] = np.inf
        start[nodes[real]] = begin[real]
        end[nodes[real]] = begin[real] + took[real]

    # ------------------------------------------------------------------ results

    def timeline(self, num_steps: int = 1) -> Timeline:
        """The same timeline as ``play`` gives without contention."""
        program, count = self.program, len(self.program)
        start, end = np.empty((2, num_steps, count))
        for step, (begun, done) in enumerate(self.steps(num_steps=num_steps)):
            start[step], end[step] = begun[self.node, 0], done[self.node, 0]
        ready = np.zeros_like(end)
        for shift in range(3):
            needs = [
                [d for d in program.carried[i] if program.lag(i, d) == shift] if shift else deps
                for i, deps in enumerate(program.dependencies)
            ]
            waiting = [i for i, deps in enumerate(needs) if deps]
            flat, first = _joined([needs[i] for i in waiting])
            if not waiting:
                continue
            for step in range(shift, num_steps):
                latest = np.maximum.reduceat(end[step - shift][flat], first)
                ready[step][waiting] = np.maximum(ready[step][waiting], latest)
        return Timeline(program, num_steps, *(array("d", x.tobytes()) for x in (ready, start, end)))

    def step_s(self, seconds: Floats | None = None, num_steps: int = 3) -> Floats:
        """Step time in steady state for every column: distance of the VALIDATEs of the last two steps.

        With a barrier all steps are alike, and one is played: it ends with its barrier.
        """
        return self.step_and_ends(seconds, num_steps, _ints([]))[0]

    def step_and_ends(self, seconds: Floats | None, num_steps: int, nodes: Ints) -> tuple[Floats, Floats]:
        """``step_s``, and the mean time from the start of the last step at which the given nodes end."""
        kind, barrier = self.program.kind, self.program.options.barrier
        wanted = Kind.BARRIER if barrier else Kind.VALIDATE
        node = next(node for node, i in enumerate(self.leaders) if kind[i] == wanted)
        before: Floats | float = 0.0
        step: Floats
        mean: Floats
        for _, end in self.steps(seconds, 1 if barrier else num_steps):
            step, mean = end[node] - before, end[nodes].mean(axis=0) - before if nodes.size else end[node]
            before = end[node].copy()
        return step, mean


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.intp)


def _joined(lists: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """All lists one after the other, and where each begins."""
    total = sum(map(len, lists))
    flat = np.fromiter(chain.from_iterable(lists), np.intp, total)
    return flat, _ints([0, *accumulate(map(len, lists[:-1]))] if lists else [])


__all__ = ["Replay"]
