"""Engine: plays a program on a clock, with SimPy.

One process per lane: a rank's own queue, a pair of ranks' message queue (a SEND and its RECV are one transfer, which
starts when both sides are there), and one for the collectives of all ranks. An op starts when its lane has come to it
and its counter of unmet dependencies is down to zero; whoever makes the last of the two true starts it, and schedules
one event: its end. Ops that take no time need no event.

Ops are numbered ``step * len(program) + op``. The first op of a message or collective stands for all of it.
"""

import math
from array import array
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

import simpy

from spipe.errors import SpipeError
from spipe.ops import COLLECTIVES, COMPUTE
from spipe.program import Program
from spipe.sim.pricing import OpCosts
from spipe.sim.resources import Completion, Flow, FlowSpec, Fluid
from spipe.trace import Trace

_BUSY, _IDLE = -1, -2


@dataclass(frozen=True)
class Timeline:
    """Times of every op of every step, by ``step * len(program) + op``, in seconds; see ``spipe.trace``."""

    program: Program
    num_steps: int
    ready_s: "array[float]"
    start_s: "array[float]"
    end_s: "array[float]"

    def trace(self, **metadata: object) -> Trace:
        """As a trace, ops of a step in global order."""
        count = len(self.program)
        trace = Trace.empty(self.program, "simulated", **metadata)
        trace.step = array("l", [step for step in range(self.num_steps) for _ in range(count)])
        trace.op = array("l", range(count)) * self.num_steps
        trace.ready_s, trace.start_s, trace.end_s = self.ready_s[:], self.start_s[:], self.end_s[:]
        trace.cpu_s = array("d", [math.nan]) * len(trace.op)
        return trace


def play(program: Program, costs: OpCosts, num_steps: int = 1, *, contention: bool = True) -> Timeline:
    """The times of ``num_steps`` consecutive steps.

    Args:
        program, costs: the ops and what they cost.
        contention: whether ops share links, memory bandwidth and cores; without, every op takes its own seconds.

    Raises:
        SpipeError: if ops can never start, naming some.
    """
    return _Engine(program, costs, num_steps, contention).timeline()


class _Engine:
    def __init__(self, program: Program, costs: OpCosts, num_steps: int, contention: bool) -> None:
        self.program, self.num_steps = program, num_steps
        self.env = simpy.Environment()
        self.fluid = Fluid(self.env, costs.capacities)
        self.count = len(program)
        self.total = self.count * num_steps
        self.seconds = costs.seconds
        self.flows: list[FlowSpec | None] = costs.flows if contention else [None] * self.count
        self.issue_s = costs.issue_s
        self._number_nodes()
        self._link_nodes()
        self._queue_nodes()
        self.ready = [0.0] * self.total
        self.start = [0.0] * self.total
        self.end = [0.0] * self.total

    # ------------------------------------------------------------------ preparation

    def _number_nodes(self) -> None:
        """The first op of every message and collective is its node; other ops are their own."""
        self.node = [i if p < 0 or p > i else p for i, p in enumerate(self.program.partner)]
        self.members: dict[int, tuple[int, ...]] = {i: (i, p) for i, p in enumerate(self.program.partner) if p > i}
        for together in self.program.collectives():
            for i in together:
                self.node[i] = together[0]
            self.members[together[0]] = together

    def _link_nodes(self) -> None:
        """Ops that wait for a node, in its step and in the next two, and how many ops a node waits for."""
        node, count = self.node, self.count
        self.waiters: list[list[int]] = [[] for _ in range(count)]  # ops that wait, steps ahead * count added
        self.target = [step * count + i for step in range(3) for i in node]  # their nodes, numbered alike
        first, later, stale = [0] * count, [0] * count, [0] * count
        for i, needs in enumerate(self.program.dependencies):
            first[node[i]] += len(needs)
            for d in needs:
                self.waiters[node[d]].append(i)
        for i, needs in enumerate(self.program.carried):
            if needs:
                for d in needs:
                    lag = self.program.lag(i, d)
                    (later if lag == 1 else stale)[node[i]] += 1
                    self.waiters[node[d]].append(lag * count + i)
        for ahead in self.waiters:
            ahead.sort()
        second = [a + b for a, b in zip(first, later, strict=True)]
        self.unmet = first + second * min(self.num_steps - 1, 1)
        self.unmet += [a + b for a, b in zip(second, stale, strict=True)] * (self.num_steps - 2)

    def _queue_nodes(self) -> None:
        """The order of every lane; the collectives of all ranks share one."""
        program, node = self.program, self.node
        control = len(program.lanes)
        self.lane = [control if k in COLLECTIVES else x for k, x in zip(program.kind, program.lane, strict=True)]
        queues: list[list[int]] = [[] for _ in range(control + 1)]
        for i, lane in enumerate(self.lane):
            if node[i] == i:
                queues[lane].append(i)
        self.by_deadline = [lane.discipline == "deadline" for lane in program.lanes] + [False]
        self.queue: list[Iterator[int]] = [
            iter([step * self.count + i for step in range(self.num_steps) for i in queue]) for queue in queues
        ]
        self.head = [_BUSY] * (control + 1)
        self.urgent: list[list[tuple[int, float, int]]] = [[] for _ in range(control + 1)]
        self.not_before = [0.0] * (control + 1)
        self.issues = [bool(queue) and program.kind[queue[0]] in COMPUTE and self.issue_s > 0 for queue in queues]
        self.completion: list[Completion] = [Completion(self.env) for _ in queues]
        self.current = [-1] * (control + 1)
        self.flow: list[Flow | None] = [None] * (control + 1)
        self.used_lanes = [lane for lane, queue in enumerate(queues) if queue]
        for lane in self.used_lanes:
            if self.by_deadline[lane]:
                for i in queues[lane]:
                    for k in range(i, self.total, self.count):
                        if not self.unmet[k]:
                            self._offer(lane, k)

    # ------------------------------------------------------------------ play

    def timeline(self) -> Timeline:
        for lane in self.used_lanes:
            self.env.process(self._run(lane))
        self.env.run()
        if sum(self.unmet) or any(head >= 0 for head in self.head):
            self._refuse()
        start, end, count = self.start, self.end, self.count
        for first, members in self.members.items():
            for i in members[1:]:
                start[i::count], end[i::count] = start[first::count], end[first::count]
        return Timeline(self.program, self.num_steps, *(array("d", x) for x in (self.ready, self.start, self.end)))

    def _run(self, lane: int) -> Generator[simpy.Event, None, None]:
        """A lane: start what can start, wait for the end of its current op, release what waits for it, go on."""
        env, resume, advance, release = self.env, self.fluid.resume, self._advance, self._release
        completions, flows, current = self.completion, self.flow, self.current
        now, woken = env.now, [lane]
        while True:
            completions[lane] = completion = Completion(env)
            while woken:  # lanes that can go on, and those that they wake by ops that take no time
                advance(woken.pop(), now, woken)
            yield completion
            flow = flows[lane]
            while flow is not None and (again := resume(flow)) is not None:
                yield again
            now = env.now
            release(current[lane], now, woken)
            woken.append(lane)

    def _advance(self, lane: int, now: float, woken: list[int]) -> None:
        """Start the lane's next op if it can; go on over ops that take no time."""
        while True:
            if self.by_deadline[lane]:
                if not self.urgent[lane]:
                    self.head[lane] = _IDLE
                    return
                k = heappop(self.urgent[lane])[2]
                self.head[lane] = _BUSY
            else:
                k = self.head[lane]
                if k < 0:
                    k = next(self.queue[lane], -1)
                    if k < 0:
                        return
                if self.unmet[k]:
                    self.head[lane] = k
                    return
                self.head[lane] = _BUSY
            i = k % self.count
            seconds = self.seconds[i]
            if seconds:
                break
            self.start[k] = now
            self._release(k, now, woken)
        self.current[lane] = k
        flow = self.flows[i]
        if flow is not None:
            self.start[k] = now
            self.flow[lane] = self.fluid.start(flow, self.completion[lane])
            return
        self.flow[lane] = None
        start = now
        if self.issues[lane]:
            start = max(now, self.not_before[lane])
            self.not_before[lane] = start + self.issue_s
        self.start[k] = start
        self.completion[lane].begin(start - now + seconds)

    def _release(self, k: int, now: float, woken: list[int]) -> None:
        """Op ``k`` is done: count down what waits for it; lanes that can go on now are appended to ``woken``."""
        count, total = self.count, self.total
        self.end[k] = now
        ready, unmet, target = self.ready, self.unmet, self.target
        i = k % count
        base = k - i
        for j in self.waiters[i]:
            if base + j >= total:
                break  # beyond the last step; these stand at the end
            ready[base + j] = now
            waiting = base + target[j]
            left = unmet[waiting] - 1
            unmet[waiting] = left
            if not left:
                lane = self.lane[j % count]
                if self.by_deadline[lane]:
                    self._offer(lane, waiting)
                    if self.head[lane] == _IDLE:
                        self.head[lane] = _BUSY
                        woken.insert(0, lane)  # last, when all that is ready now has been offered
                elif self.head[lane] == waiting:
                    woken.append(lane)

    def _offer(self, lane: int, k: int) -> None:
        i = k % self.count
        heappush(self.urgent[lane], (k // self.count, self.program.priority[i], k))

    def _refuse(self) -> None:
        stuck = [k % self.count for k in self.head if k >= 0]
        heads = [f"{self.program.op(i)} of rank {self.program.rank[i]}" for i in stuck]
        raise SpipeError(
            f"the program cannot go on: {sum(1 for unmet in self.unmet if unmet)} ops wait for ever, among them "
            f"{'; '.join(heads[:4])}; check the plan with `spipe check`"
        )
