"""Compare: where a prediction and a measured run differ: step time, kinds of ops, lanes, causes of idleness, memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from spipe.hardware import HardwareSpec
from spipe.memory import MemoryReport
from spipe.metrics import CAUSES, StepMetrics, analyse, step_times
from spipe.ops import Kind
from spipe.plan import Plan
from spipe.program import Program
from spipe.sim.interval import interval
from spipe.sim.measurements import check_run, measured_step_s
from spipe.sim.simulation import Simulation, simulate
from spipe.timelines import Window
from spipe.trace import WARM_UP_STEPS, Trace


@dataclass(frozen=True)
class Comparison:
    """A prediction beside a measurement, in seconds.

    Attributes:
        simulation: the prediction.
        step_time: ``predicted_s``, ``measured_s``, ``error`` (predicted / measured - 1).
        ops: for each kind of op ``kind``, ``count`` a step, predicted and measured median and total a step, and the
            ``ratio`` of the totals, predicted / measured (None where nothing was measured).
        bubbles: for each cause, and for ``busy``, predicted and measured seconds a step of all ranks together.
        lanes: for each rank and lane the seconds a step in which an op runs there.
        memory: for each rank and host, item by item, planned and measured bytes (None where nothing was measured).
        windows: the predicted step and the measured one that is nearest to the median.
        disagreements: the three largest, in words.
    """

    simulation: Simulation
    step_time: dict[str, Any]
    ops: list[dict[str, Any]]
    bubbles: list[dict[str, Any]]
    lanes: list[dict[str, Any]] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)
    windows: dict[str, Window] = field(default_factory=dict)

    @property
    def disagreements(self) -> list[str]:
        return disagreements(self.step_time, self.ops, self.bubbles, self.simulation.plan.layout.num_ranks)

    def to_json(self) -> dict[str, Any]:
        """For files and other tools."""
        return {
            "hardware": self.simulation.hardware.name,
            "step_time": self.step_time,
            "ops": self.ops,
            "bubbles": self.bubbles,
            "lanes": self.lanes,
            "memory": self.memory,
            "disagreements": self.disagreements,
            "notes": list(self.simulation.notes),
        }


def compare(
    plan: Plan,
    trace: Trace,
    hardware: HardwareSpec | None = None,
    *,
    warmup: int = WARM_UP_STEPS,
    summary: Mapping[str, Any] | None = None,
) -> Comparison:
    """Compare the simulation of a plan with the trace of running it.

    Args:
        plan, trace: what was run.
        hardware: what to predict with, for instance a calibrated spec; None: the plan's own.
        warmup: steps of the job that do not count.
        summary: what the run's ``result.json`` holds, for its memory.

    Raises:
        SpipeError: if the trace is of another plan or device, is not complete, or has no two consecutive steps after
            the warm-up.
    """
    program = plan.program()
    check_run(plan, trace, hardware or plan.hardware, "compare")
    measured_s = measured_step_s(program, trace, warmup, "compare")
    simulation = simulate(plan, hardware=hardware)
    timed = [step for step in step_times(program, trace) if step >= warmup]
    last = simulation.timeline.num_steps - 1
    predicted_s = simulation.step_s
    found = interval(simulation)
    measured_step = _median_step(program, trace, timed, measured_s)
    return Comparison(
        simulation,
        {
            "predicted_s": predicted_s,
            "measured_s": measured_s,
            "error": predicted_s / measured_s - 1,
            "interval_s": None if found is None else list(found.seconds),
        },
        _ops(program, simulation.trace, [last], trace, timed),
        _bubbles(simulation.bubbles, measured_step),
        _lanes(simulation.trace, [last], trace, timed),
        memory_rows(simulation.memory, plan.hardware.device, summary or {}),
        {
            "predicted": Window.of(simulation.trace, simulation.bubbles),
            "measured": Window.of(trace, measured_step),
        },
    )


def _ops(
    program: Program, predicted: Trace, predicted_steps: list[int], measured: Trace, measured_steps: list[int]
) -> list[dict[str, Any]]:
    rows = []
    before = _durations(program, predicted, predicted_steps)
    after = _durations(program, measured, measured_steps)
    for kind in Kind:
        if kind not in before:
            continue
        predicted_s, measured_s = before[kind], after.get(kind, [0.0])
        predicted_total = sum(predicted_s) / len(predicted_steps)
        measured_total = sum(measured_s) / len(measured_steps)
        rows.append(
            {
                "kind": kind.name,
                "count": len(predicted_s) // len(predicted_steps),
                "predicted_median_s": median(predicted_s),
                "measured_median_s": median(measured_s),
                "predicted_total_s": predicted_total,
                "measured_total_s": measured_total,
                "ratio": predicted_total / measured_total if measured_total > 0 else None,
            }
        )
    return rows


def _durations(program: Program, trace: Trace, steps: list[int]) -> dict[Kind, list[float]]:
    """Durations by kind. Both halves of a message count, and so does every rank of a collective."""
    wanted = set(steps)
    found: dict[Kind, list[float]] = {}
    for step, i, start, end in zip(trace.step, trace.op, trace.start_s, trace.end_s, strict=True):
        if step in wanted:
            found.setdefault(Kind(program.kind[i]), []).append(end - start)
    return found


def _median_step(program: Program, trace: Trace, steps: list[int], median_s: float) -> StepMetrics:
    """The step whose time is nearest to the median."""
    times = step_times(program, trace)
    return analyse(program, trace, min(steps, key=lambda step: (abs(times[step] - median_s), step)))


def _bubbles(predicted: StepMetrics, measured: StepMetrics) -> list[dict[str, Any]]:
    before = {"busy": sum(predicted.busy_s), **predicted.total()}
    after = {"busy": sum(measured.busy_s), **measured.total()}
    return [{"cause": cause, "predicted_s": before[cause], "measured_s": after[cause]} for cause in ("busy", *CAUSES)]


def _lanes(
    predicted: Trace, predicted_steps: list[int], measured: Trace, measured_steps: list[int]
) -> list[dict[str, Any]]:
    """Seconds a step in which each lane of each rank runs ops."""
    totals: list[dict[tuple[int, str], float]] = []
    for trace, steps in ((predicted, predicted_steps), (measured, measured_steps)):
        wanted, busy = set(steps), dict.fromkeys(zip(trace.ranks, trace.lanes, strict=True), 0.0)
        for step, i, start, end in zip(trace.step, trace.op, trace.start_s, trace.end_s, strict=True):
            if step in wanted:
                busy[trace.ranks[i], trace.lanes[i]] += (end - start) / len(steps)
        totals.append(busy)
    before, after = totals
    return [
        {"rank": rank, "lane": lane, "predicted_s": before[rank, lane], "measured_s": after[rank, lane]}
        for rank, lane in sorted(before)
    ]


_TOGETHER = {"stage inputs": "messages and stage inputs", "received messages": "messages and stage inputs"}
"""Items that a run allocates, and reports, as one."""


def memory_rows(planned: MemoryReport, device: str, summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Planned and measured bytes by place and item; ``all`` is the most that was in use at a time."""
    rows = []
    peaks = summary.get("peak_device_bytes", [])
    for rank, items in enumerate(planned.ranks):
        joined: dict[str, int] = {}
        for name, size in items.items():
            joined[_TOGETHER.get(name, name)] = joined.get(_TOGETHER.get(name, name), 0) + size
        seen = summary.get("device_items_bytes", [])
        measured = seen[rank] if rank < len(seen) else {}
        peak = peaks[rank] if device == "cuda" and rank < len(peaks) else None
        rows += _items(f"rank {rank}", joined, measured, peak)
    # What several ranks map counts in each of them: only one alone says what all need.
    resident = summary.get("peak_resident_bytes", [])
    host = summary.get("host_planned_bytes") or planned.hosts[0]
    alone = resident[0] if len(resident) == 1 else None
    return rows + _items("host 0", host, summary.get("host_items_bytes", {}), alone)


def _items(
    place: str, planned: Mapping[str, int], measured: Mapping[str, int], peak: int | None
) -> list[dict[str, Any]]:
    rows = [
        {"place": place, "item": name, "predicted_bytes": size, "measured_bytes": measured.get(name)}
        for name, size in planned.items()
        if size or measured.get(name)
    ]
    return [*rows, {"place": place, "item": "all", "predicted_bytes": sum(planned.values()), "measured_bytes": peak}]


def disagreements(
    step_time: Mapping[str, Any],
    ops: list[dict[str, Any]],
    bubbles: list[dict[str, Any]],
    num_ranks: int,
    most: int = 3,
) -> list[str]:
    """The largest differences between prediction and measurement, per rank, in words."""
    step_s = step_time["measured_s"]
    found: list[tuple[float, str]] = []
    for row in ops:
        before, after = row["predicted_total_s"] / num_ranks, row["measured_total_s"] / num_ranks
        text = f"{row['kind']} ops last {_than(before, after)}: "
        found.append((after - before, text + f"{_seconds(after)} a step and rank, {_seconds(before)} predicted"))
    for row in bubbles:
        before, after = row["predicted_s"] / num_ranks, row["measured_s"] / num_ranks
        if row["cause"] != "busy":
            text = f"the compute lanes wait {_than(before, after)} for reasons of {row['cause']!r}: "
            found.append((after - before, text + f"{_seconds(after)} a step and rank, {_seconds(before)} predicted"))
    found.sort(key=lambda pair: -abs(pair[0]))
    return [f"{text} ({100 * seconds / step_s:+.1f} % of the step)" for seconds, text in found[:most] if seconds]


def _than(before: float, after: float) -> str:
    return "longer than predicted" if after > before else "shorter than predicted"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 0.1 else f"{1e3 * value:.3g} ms"
