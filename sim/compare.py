"""Compare: where a prediction and a measured run differ, by kind of op, by cause of idleness, and in the step time."""

from dataclasses import dataclass
from statistics import median
from typing import Any

from spipe.hardware import HardwareSpec
from spipe.metrics import CAUSES, StepMetrics, analyse, step_times
from spipe.ops import Kind
from spipe.plan import Plan
from spipe.program import Program
from spipe.sim.measurements import check_run, measured_step_s
from spipe.sim.simulation import Simulation, simulate
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
    """

    simulation: Simulation
    step_time: dict[str, float]
    ops: list[dict[str, Any]]
    bubbles: list[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """For files and other tools."""
        return {
            "hardware": self.simulation.hardware.name,
            "step_time": self.step_time,
            "ops": self.ops,
            "bubbles": self.bubbles,
            "notes": list(self.simulation.notes),
        }


def compare(
    plan: Plan, trace: Trace, hardware: HardwareSpec | None = None, *, warmup: int = WARM_UP_STEPS
) -> Comparison:
    """Compare the simulation of a plan with the trace of running it.

    Args:
        plan, trace: what was run.
        hardware: what to predict with, for instance a calibrated spec; None: the plan's own.
        warmup: steps of the job that do not count.

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
    return Comparison(
        simulation,
        {"predicted_s": predicted_s, "measured_s": measured_s, "error": predicted_s / measured_s - 1},
        _ops(program, simulation.trace, [last], trace, timed),
        _bubbles(simulation.bubbles, _median_step(program, trace, timed, measured_s)),
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
