"""Metrics of a step, from a trace: times, and every idle interval of every compute lane with one cause.

One code for simulated and measured traces. A step's window reaches from the VALIDATE of the step before to its own; a
step that stands alone has the window from its first op to its last. No compute of two steps can lie in one window,
because weights are fetched only after their COMMIT; with stale weights a window also holds the start of the next step,
and every wait is one for a dependency.

An idle interval belongs to the dependency of the next compute op that finished last; its parts are attributed as
follows and always sum to the interval.

========================================  ==================================================================
before the first compute anywhere         what that first op waited for (below)
then, before a rank's first compute       ``fill``
activation or gradient received           ``upstream`` until it was produced, then ``transfer``
stage input received or loaded            ``upstream`` until it was produced, then ``stage input``
weights                                   ``optimizer`` (or ``memory``) until their step was settled (or a slot was
                                          free), then ``weight fetch``
gradient slab still on its way            ``gradient push``
tokens                                    ``optimizer`` until the barrier was passed, then ``host issue``
send slot                                 ``memory`` until the peer had room, then ``transfer``
nothing was late                          ``host issue``
after a rank's last compute               ``drain`` until the last compute anywhere, then ``gradient push`` until the
                                          last OFFLOAD_GRAD, ``transfer`` until the verdict is known everywhere, then
                                          ``optimizer``
========================================  ==================================================================
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median

from spipe.errors import SpipeError
from spipe.ops import COMPUTE, RECVS, SENDS, Kind
from spipe.program import Program
from spipe.trace import WARM_UP_STEPS, Trace

CAUSES = (
    "fill",
    "drain",
    "upstream",
    "transfer",
    "weight fetch",
    "stage input",
    "gradient push",
    "optimizer",
    "memory",
    "host issue",
)


@dataclass(frozen=True)
class StepMetrics:
    """What one step's window holds. Times in seconds.

    Attributes:
        window_s: start and end of the window.
        busy_s: per rank, time its compute lane computed.
        bubbles: per rank, cause -> idle seconds; they sum to the window less ``busy_s``.
        gpu_time_s: first FETCH to last OFFLOAD_GRAD.
        idle: per rank, the idle intervals as (start, end, cause), in order.
    """

    window_s: tuple[float, float]
    busy_s: tuple[float, ...]
    bubbles: tuple[dict[str, float], ...]
    gpu_time_s: float
    idle: tuple[tuple[tuple[float, float, str], ...], ...] = ()

    @property
    def duration_s(self) -> float:
        return self.window_s[1] - self.window_s[0]

    @property
    def idle_s(self) -> float:
        """Idle time of all compute lanes together."""
        return sum(self.duration_s - busy for busy in self.busy_s)

    def total(self) -> dict[str, float]:
        """Cause -> idle seconds of all ranks together, every cause listed."""
        return {cause: math.fsum(rank[cause] for rank in self.bubbles) for cause in CAUSES}


def validate_ends(program: Program, trace: Trace) -> dict[int, float]:
    """Step -> the time its VALIDATE was done on all ranks."""
    ends: dict[int, float] = {}
    for row, i in enumerate(trace.op):
        if program.kind[i] == Kind.VALIDATE:
            ends[trace.step[row]] = max(ends.get(trace.step[row], -math.inf), trace.end_s[row])
    return ends


def step_times(program: Program, trace: Trace) -> dict[int, float]:
    """Step -> distance of its VALIDATE from that of the step before, where both are traced."""
    ends = validate_ends(program, trace)
    return {step: end - ends[step - 1] for step, end in sorted(ends.items()) if step - 1 in ends}


def median_step_s(program: Program, trace: Trace, warmup: int = WARM_UP_STEPS) -> float:
    """Median of the step times after ``warmup`` steps. Raises SpipeError if none is left."""
    times = [seconds for step, seconds in step_times(program, trace).items() if step >= warmup]
    if not times:
        raise SpipeError(
            f"the trace has {len(trace.steps())} steps; a step time needs two consecutive ones after {warmup} "
            "warm-up steps"
        )
    return median(times)


def typical_step(program: Program, trace: Trace, warmup: int = WARM_UP_STEPS) -> int:
    """The complete step whose time is nearest to the median: after the warm-up, if the trace has such steps.

    Raises:
        SpipeError: if no step has all ops of the program.
    """
    counts = Counter(trace.step)
    whole = [step for step in sorted(counts) if counts[step] == len(program)]
    if not whole:
        raise SpipeError(
            f"no step of the trace is complete: it has {len(trace)} timed ops, and a step {len(program)}; run or "
            "simulate the plan again to make a new one"
        )
    if program.options.optimizer == "stale" and len(whole) > 1:
        whole = whole[:-1]  # what overlaps its end is not there
    times = {step: seconds for step, seconds in step_times(program, trace).items() if step in whole}
    settled = {step: seconds for step, seconds in times.items() if step >= warmup} or times
    if not settled:
        return whole[-1]
    middle = median(settled.values())
    return min(settled, key=lambda step: (abs(settled[step] - middle), step))


def analyse(program: Program, trace: Trace, step: int) -> StepMetrics:
    """Times and attributed idleness of one step.

    Args:
        program: the program that was simulated or run.
        trace: has every op of ``step``; if it has the step before, too, the window starts at its VALIDATE.

    Raises:
        SpipeError: if the trace lacks ops of the step.
    """
    return _Analysis(program, trace, step).metrics()


class _Analysis:
    def __init__(self, program: Program, trace: Trace, step: int) -> None:
        self.program, self.trace = program, trace
        rows = trace.rows(step)
        if len(rows) < len(program):
            raise SpipeError(f"the trace has {len(rows)} of {len(program)} ops of step {step}; it is not complete")
        self.start = [trace.start_s[rows[i]] for i in range(len(program))]
        self.end = [trace.end_s[rows[i]] for i in range(len(program))]
        before = trace.rows(step - 1)
        self.stale = program.options.optimizer == "stale"
        earlier_rows = {1: before, 2: trace.rows(step - 2) if self.stale else {}}
        self.carried_end = [-math.inf] * len(program)
        for i, deps in enumerate(program.carried):
            for d in deps:
                row = earlier_rows[program.lag(i, d)].get(d) if self.stale else before.get(d)
                if row is not None:
                    self.carried_end[i] = max(self.carried_end[i], trace.end_s[row])
        # A lane in order also waits for what the ops before waited for: running maxima over the ops of a lane, apart
        # for the sending and the receiving side of a peer lane.
        self.lane_ready = [-math.inf] * len(program)
        self.lane_carried = [-math.inf] * len(program)
        latest: dict[tuple[int, bool], tuple[float, float]] = {}
        for i, kind in enumerate(program.kind):
            side = (program.lane[i], kind in SENDS)
            ready, carried = latest.get(side, (-math.inf, -math.inf))
            ready = max([ready, *(self.end[d] for d in program.dependencies[i])])
            carried = max(carried, self.carried_end[i])
            self.lane_ready[i], self.lane_carried[i] = latest[side] = (ready, carried)
        validates = [i for i, kind in enumerate(program.kind) if kind == Kind.VALIDATE]
        earlier = [trace.end_s[before[i]] for i in validates if i in before]
        if earlier:
            self.window = (max(earlier), max(self.end[i] for i in validates))
        else:
            self.window = (min(self.start), max(self.end))
        self.overlapping = self.stale and bool(earlier)
        complete = self.overlapping and len(trace.rows(step + 1)) == len(program)
        self.next = _Analysis(program, trace, step + 1) if complete else None
        self.lanes: list[list[int]] = [[] for _ in range(program.layout.num_ranks)]
        for i, kind in enumerate(program.kind):
            if kind in COMPUTE:
                self.lanes[program.rank[i]].append(i)

    def metrics(self) -> StepMetrics:
        begin, finish = self.window
        computing = [lane for lane in self.lanes if lane]
        first = min((lane[0] for lane in computing), key=lambda i: self.start[i])
        first_compute = min(max(self.start[first], begin), finish)
        last_compute = max(self.end[lane[-1]] for lane in computing)
        offloads = [i for i, kind in enumerate(self.program.kind) if kind == Kind.OFFLOAD_GRAD]
        last_offload = max(self.end[i] for i in offloads)
        if self.overlapping:
            first_compute = begin
        lead_in = list(self._causes(first, begin, first_compute))
        verdict = max(self.end[i] for i, kind in enumerate(self.program.kind) if kind == Kind.VALIDATE)
        ends = (("drain", last_compute), ("gradient push", last_offload), ("transfer", verdict), ("optimizer", finish))
        busy, bubbles, idle = [], [], []
        for rank, lane in enumerate(self.lanes):
            parts: dict[str, list[float]] = {cause: [] for cause in CAUSES}
            for cause, seconds in lead_in:
                parts[cause].append(seconds)
            idle.append(list(_intervals(begin, lead_in)))
            at = first_compute
            total = 0.0
            ops = [(self, i) for i in lane] + ([(self.next, i) for i in self.next.lanes[rank]] if self.next else [])
            for position, (of_step, i) in enumerate(ops):
                start, end = (min(max(time, at), finish) for time in (of_step.start[i], of_step.end[i]))
                if start > at:
                    fill = position == 0 and not self.overlapping
                    pieces = [("fill", start - at)] if fill else list(of_step._causes(i, at, start))
                    idle[rank].extend(_intervals(at, pieces))
                    for cause, seconds in pieces:
                        parts[cause].append(seconds)
                total += end - start
                at = end
            for cause, until in ends:
                until = min(until, finish)
                if until > at:
                    parts[cause].append(until - at)
                    idle[rank].append((at, until, cause))
                    at = until
            busy.append(total)
            bubbles.append({cause: math.fsum(seconds) for cause, seconds in parts.items()})
        fetches = [self.start[i] for i, kind in enumerate(self.program.kind) if kind == Kind.FETCH]
        return StepMetrics(
            self.window, tuple(busy), tuple(bubbles), last_offload - min(fetches), tuple(map(tuple, idle))
        )

    def _causes(self, i: int, begin: float, end: float) -> Iterator[tuple[str, float]]:
        """Pieces (cause, seconds) of the idle interval before compute op ``i``; they sum to its length."""
        if end <= begin:
            return
        late = [(self.end[d], d) for d in self.program.dependencies[i] if self.end[d] > begin]
        if not late:
            yield from _pieces(begin, end, [(self._carried_cause(i), self.carried_end[i])])
            return
        _, d = max(late)
        yield from _pieces(begin, end, [*self._chain(d), (self._own_cause(d), self.end[d])])

    def _carried_cause(self, i: int) -> str:
        """What a compute op waits for in the step before: a gradient slab, or a send slot."""
        kinds = {self.program.kind[d] for d in self.program.carried[i]}
        return "gradient push" if Kind.OFFLOAD_GRAD in kinds else "memory"

    def _own_cause(self, d: int) -> str:
        kind = Kind(self.program.kind[d])
        if kind in (Kind.RECV_STAGE_INPUT, Kind.STORE_STAGE_INPUT, Kind.LOAD_STAGE_INPUT):
            return "stage input"
        if kind in RECVS or kind in SENDS:
            return "transfer"
        if kind is Kind.FETCH:
            return "weight fetch"
        if kind is Kind.OFFLOAD_GRAD:
            return "gradient push"
        return "host issue"

    def _chain(self, d: int) -> list[tuple[str, float]]:
        """(cause, until) of the time before dependency ``d`` itself could start, in order."""
        kind, partner = Kind(self.program.kind[d]), self.program.partner[d]
        if kind in RECVS:
            return [("upstream", self.lane_ready[partner]), ("memory", self._settled(d))]
        if kind in SENDS:
            return [("memory", self._settled(partner))]
        if kind is Kind.LOAD_STAGE_INPUT:
            stores = [e for e in self.program.dependencies[d] if self.program.kind[e] == Kind.STORE_STAGE_INPUT]
            return [("upstream", max((self.lane_ready[e] for e in stores), default=-math.inf))]
        if kind in (Kind.FETCH, Kind.LOAD_TOKENS):  # tokens wait for a barrier, and stand behind weights in the queue
            return [("optimizer", self.lane_carried[d]), ("memory", self.lane_ready[d])]
        return []

    def _settled(self, i: int) -> float:
        return max(self.lane_ready[i], self.lane_carried[i])


def _intervals(at: float, pieces: Iterable[tuple[str, float]]) -> Iterator[tuple[float, float, str]]:
    for cause, seconds in pieces:
        yield at, at + seconds, cause
        at += seconds


def _pieces(begin: float, end: float, chain: list[tuple[str, float]]) -> Iterator[tuple[str, float]]:
    at = begin
    for cause, until in [*chain, ("host issue", end)]:
        until = min(until, end)
        if until > at:
            yield cause, until - at
            at = until
