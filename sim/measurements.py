"""Measurements: what a trace says about the ops of a plan, one entry per group of equal ops."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from spipe.errors import SpipeError
from spipe.hardware import HardwareSpec
from spipe.metrics import median_step_s
from spipe.ops import COLLECTIVES, COMPUTE, RECVS, Kind
from spipe.plan import Plan
from spipe.program import Program
from spipe.sim.cost import CostModel
from spipe.sim.fitting import Samples
from spipe.sim.pricing import Pricing
from spipe.topology import Place
from spipe.trace import ROUNDING_S, Trace

MIN_STEPS = 2
_CLOCKS_S = 0.01  # by so much the ranks' clocks may differ
_JUMP = 100.0  # no step takes so many times the median
_BUCKETED = {Kind.FETCH, Kind.OFFLOAD_GRAD, Kind.STEP, Kind.COMMIT, Kind.STORE_WEIGHTS}

Group = tuple[int, int, int]
"""Kind, stage and bucket (0 where there are none): ops that take the same time."""
ByStep = defaultdict[Group, defaultdict[int, list[float]]]
"""What each op of a group has, by step."""


@dataclass(frozen=True)
class Measurement:
    """Equal ops of a run: a pass of a stage, a bucket's copy, the messages to a stage.

    Attributes:
        costs: the cost model of the run: shapes, precision, threads.
        group: which ops.
        seconds: how long the op took; on device ``cpu`` the processor time it used, where the trace has it. On GPUs
            compute ops count with their mean over a step, median over steps: some come late in every step.
        issue_s: how long the host took to issue it, in the same way; 0 where the trace does not tell.
        is_replayed: a compute op that was recorded: the host issues all of its layers at once.
        gap_s: what its lane took to get to it, on average but for the worst tenth; on device ``cuda`` of compute ops.
        layer_counts: layers by kind, for compute ops.
        computed: the same, less what a recompute leaves out.
        num_bytes, source, target: for copies and messages.
        num_parameters: for STEP.
    """

    costs: CostModel
    group: Group
    kind: Kind
    seconds: Samples
    issue_s: float
    is_replayed: bool
    gap_s: float
    layer_counts: Counter[str]
    computed: Mapping[str, float]
    num_bytes: float
    source: Place
    target: Place
    is_remote: bool
    num_parameters: int


def check_run(plan: Plan, trace: Trace, hardware: HardwareSpec, where: str) -> None:
    """Raises SpipeError unless the trace is a complete one of the plan, on a device such as the hardware's."""
    trace.check_matches(plan.program(), where)
    trace.check_complete(where)
    check_clocks(plan, trace, where)
    if plan.hardware.device != hardware.device:
        raise SpipeError(
            f"{where}: the run was on device {plan.hardware.device} ({plan.hardware.name}), but hardware "
            f"{hardware.name} has device {hardware.device}; give a {plan.hardware.device} machine, or a run on "
            f"{hardware.device}"
        )


def measured_step_s(program: Program, trace: Trace, warmup: int, where: str) -> float:
    """Median of the measured step times. Raises SpipeError if there is none, or none that can be."""
    try:
        seconds = median_step_s(program, trace, warmup)
    except SpipeError as error:
        raise SpipeError(f"{where}: {error}") from None
    if not seconds > 0:
        raise SpipeError(f"{where}: the steps took {seconds} s in the median: the trace is damaged")
    return seconds


def check_steps(times: Sequence[float], where: str) -> None:
    """Raises SpipeError for a step time that cannot be: the clock went back, or jumped."""
    middle = median(times)
    for seconds in times:
        if seconds <= 0 or seconds > _JUMP * middle:
            raise SpipeError(
                f"{where}: one step took {seconds:.6g} s, the median is {middle:.6g} s: the clock jumped, or the "
                "machine slept; run again, or trace fewer steps (--trace-steps)"
            )


def check_clocks(plan: Plan, trace: Trace, where: str) -> None:
    """Raises SpipeError if ops began long before what they wait for on another rank had ended, or if both halves of a
    message are not of one time: two clocks."""
    program = plan.program()
    apart = [
        (i, d)
        for i in range(len(program))
        for d in program.dependencies[i]
        if program.rank[d] != program.rank[i] and program.partner[i] != d
    ]
    halves = [(i, partner) for i, partner in enumerate(program.partner) if partner > i]
    for step in trace.steps():
        rows = trace.rows(step)
        late = [(trace.end_s[rows[d]] - trace.start_s[rows[i]], i, d) for i, d in apart if i in rows and d in rows]
        late += [(abs(trace.end_s[rows[d]] - trace.end_s[rows[i]]), i, d) for i, d in halves if i in rows and d in rows]
        seconds, i, d = max(late, default=(0.0, 0, 0))
        if seconds > _CLOCKS_S:
            raise SpipeError(
                f"{where}: step {step} has {program.op(i)} of rank {program.rank[i]} and {program.op(d)} of rank "
                f"{program.rank[d]} {seconds:.3g} s apart in a way that cannot be: the ranks' clocks differ, or one "
                "jumped; run again"
            )


def measurements(
    plan: Plan, trace: Trace, hardware: HardwareSpec, warmup: int, where: str = "calibrate"
) -> list[Measurement]:
    """All measurements of one run, which messages call ``where``.

    Raises:
        SpipeError: if the trace is of another plan or device, is not complete, has too few steps after ``warmup``, or
            impossible times.
    """
    program = plan.program()
    check_run(plan, trace, hardware, where)
    steps = {step for step in trace.steps() if step >= warmup}
    if len(steps) < MIN_STEPS:
        raise SpipeError(
            f"{where}: the trace has {len(steps)} steps after {warmup} warm-up steps; it takes at least {MIN_STEPS}: "
            "run longer, or trace more steps"
        )
    costs = CostModel.of(plan, hardware)
    pricing = Pricing(costs, program)
    durations, gaps, issues = _Reading(program, trace, costs, steps, where).groups()
    found = []
    for (kind_number, stage, bucket), values in durations.items():
        kind, i = Kind(kind_number), _example(program, kind_number, stage, bucket)
        samples = Samples.of([seconds for of_step in values.values() for seconds in of_step])
        if hardware.device != "cpu" and kind in COMPUTE:
            samples = replace(samples, median=_typical(values))
        if samples.median <= 0 and kind in COMPUTE:
            raise SpipeError(f"{where}: {program.op(i)} took {samples.median} s in the median: the trace is damaged")
        if samples.median <= 0:
            continue
        parts = pricing.parts(i)
        source, target = pricing.ends(i)
        layers = program.layers(stage)
        counts = Counter(plan.model.layer_kind(layer) for layer in layers)
        computed: dict[str, float] = dict(counts)
        if kind is Kind.RECOMPUTE:
            computed[plan.model.layer_kind(layers.stop - 1)] -= costs.unseen(layers)
        found.append(
            Measurement(
                costs=costs,
                group=(kind_number, stage, bucket),
                kind=kind,
                seconds=samples,
                issue_s=_typical(issues[kind_number, stage, bucket]),
                is_replayed=kind in COMPUTE and plan.records(program.layers(stage)),
                gap_s=_usual_mean(gaps[kind_number, stage, bucket])
                if hardware.device == "cpu" or kind in COMPUTE
                else 0.0,
                layer_counts=counts,
                computed=computed,
                num_bytes=sum(size for _, size in parts),
                source=source,
                target=target,
                is_remote=any(route.is_remote for route, _ in parts),
                num_parameters=costs.num_stepped_parameters(pricing.bucket(i))
                if kind is Kind.STEP and not pricing.is_local(i)
                else 0,
            )
        )
    return found


def _usual_mean(values: list[float]) -> float:
    kept = sorted(values)[: math.ceil(0.9 * len(values))]
    return sum(kept) / len(kept) if kept else 0.0


def _typical(by_step: dict[int, list[float]]) -> float:
    """The mean over a step's ops, median over steps."""
    return median(map(fmean, by_step.values())) if by_step else 0.0


def _example(program: Program, kind: int, stage: int, bucket: int) -> int:
    """Any op of a group."""
    return next(
        i
        for i, (k, s, index) in enumerate(zip(program.kind, program.stage, program.index, strict=True))
        if (k, s) == (kind, stage) and (k not in _BUCKETED or index == bucket)
    )


class _Reading:
    """Reads the rows of a trace, grouped by equal ops."""

    def __init__(self, program: Program, trace: Trace, costs: CostModel, steps: set[int], where: str) -> None:
        self.program, self.trace, self.costs, self.steps, self.where = program, trace, costs, steps, where
        self.on_cpu = costs.hardware.device == "cpu"
        self.row = {(step, op): row for row, (step, op) in enumerate(zip(trace.step, trace.op, strict=True))}

    def groups(self) -> tuple[ByStep, dict[Group, list[float]], ByStep]:
        """Durations, gaps and issue times of the ops of each group; the first and last by step."""
        program, trace = self.program, self.trace
        durations: ByStep = defaultdict(lambda: defaultdict(list))
        gaps: dict[Group, list[float]] = defaultdict(list)
        issues: ByStep = defaultdict(lambda: defaultdict(list))
        could_start = self.could_start()
        for row, (i, step) in enumerate(zip(trace.op, trace.step, strict=True)):
            kind = Kind(program.kind[i])
            if step not in self.steps or kind in RECVS or kind in COLLECTIVES:
                continue
            group = (int(kind), program.stage[i], program.index[i] if kind in _BUCKETED else 0)
            durations[group][step].append(self.seconds(row))
            if not self.on_cpu and trace.cpu_s[row] > 0:
                issues[group][step].append(trace.cpu_s[row])
            before = could_start[row]
            if program.partner[i] >= 0:  # the wait for the other side is not what the lane takes
                other = self.row.get((step, program.partner[i]))
                before = max(before, math.inf if other is None else could_start[other])
            if before <= trace.start_s[row]:
                gaps[group].append(trace.start_s[row] - before)
        for members in program.collectives():
            group = (program.kind[members[0]], program.stage[members[0]], 0)
            for step in self.steps:
                rows = [self.row[step, i] for i in members if (step, i) in self.row]
                durations[group][step].append(
                    max(trace.end_s[row] for row in rows) - max(trace.start_s[row] for row in rows)
                )
        return durations, gaps, issues

    def could_start(self) -> list[float]:
        """For every row the time at which its op was ready and its lane free; infinite for the first op of a lane."""
        program, trace = self.program, self.trace
        free: dict[tuple[int, int], float] = {}
        times = [math.inf] * len(trace)
        for row in sorted(range(len(trace)), key=lambda row: (trace.start_s[row], trace.end_s[row])):
            lane = (program.rank[trace.op[row]], program.lane[trace.op[row]])
            times[row] = max(free.get(lane, math.inf), trace.ready_s[row])
            free[lane] = trace.end_s[row]
        return times

    def seconds(self, row: int) -> float:
        """How long an op took, or the processor time it used on device ``cpu``."""
        program, trace, i = self.program, self.trace, self.trace.op[row]
        seconds = trace.end_s[row] - trace.start_s[row]
        if not seconds >= -ROUNDING_S or math.isinf(seconds):
            raise SpipeError(
                f"{self.where}: {program.op(i)} of step {trace.step[row]} starts at {trace.start_s[row]} s and ends at "
                f"{trace.end_s[row]} s; durations cannot be negative or unknown: the trace is damaged"
            )
        used = trace.cpu_s[row]
        if not self.on_cpu or not used > 0:
            return max(seconds, 0.0)
        if program.kind[i] == Kind.STEP:
            return used / self.costs.adam_threads
        if program.partner[i] >= 0:
            other = self.row.get((trace.step[row], program.partner[i]))
            return used + (trace.cpu_s[other] if other is not None and trace.cpu_s[other] > 0 else 0.0)
        return used
