"""Calibrate: a better hardware spec from measured traces.

Fitted are, by robust least squares on medians over microbatches and steps: seconds of every layer kind and pass
(the time of a stage is the sum of its layers and a fixed cost of the op), bandwidth and fixed cost of copies and
messages, the optimizer's rate, and the latency of a collective. On device ``cpu`` an op counts with the processor time
it used, because its wall time holds the contention for cores that the simulator adds itself; what the steps of the runs
take beyond that is then added to the layers, all by one factor, as far as the ops' own wall time explains it. On device
``cuda`` rates are changed until simulated ops, which share links and memory, last as long as measured ones; what the
steps take beyond that is added to the layers as far as it is time between ops that nothing but the host explains.

How good a fit is shows on runs that it has not seen: those given to judge, or each run in turn left out.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from spipe.errors import SpipeError
from spipe.hardware import HardwareSpec
from spipe.metrics import analyse, step_times
from spipe.model import ModelSpec
from spipe.plan import Plan
from spipe.program import Program
from spipe.sim.calibration_fit import Fit
from spipe.sim.fitting import Samples
from spipe.sim.measurements import Measurement, check_steps, measured_step_s, measurements
from spipe.sim.simulation import simulate
from spipe.sim.stability import processor_share, warnings_of
from spipe.trace import WARM_UP_STEPS, Trace

_FOLDS = 5  # fits at most for cross-validation
_DEVIATION = 1.4826  # standard deviations in half the width of the middle half
_LEAST_HELD_OUT = 2  # runs whose errors tell how wrong a prediction is


@dataclass(frozen=True)
class Calibration:
    """What was learnt.

    Attributes:
        hardware: the fitted spec.
        report: a row for every fitted value: ``what``, ``value``, ``unit``, ``spread`` (relative), ``samples``.
        runs: for every run its median step time (seconds): measured, as the spec to start from predicts it, and as the
            fitted spec does.
        held_out: the same for runs that the fit had not seen: ``used_for`` ``judge``, or ``left out`` in their turn.
        entries: where every value of the fitted spec comes from.
        warnings: what makes a run doubtful, with the evidence.
    """

    hardware: HardwareSpec
    report: list[dict[str, Any]]
    runs: list[dict[str, Any]] = field(default_factory=list)
    held_out: list[dict[str, Any]] = field(default_factory=list)
    entries: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """For files and other tools."""
        return {
            "hardware": self.hardware.name,
            "fits": self.report,
            "runs": self.runs,
            "held_out": self.held_out,
            "entries": self.entries,
            "warnings": self.warnings,
        }


@dataclass(frozen=True)
class _Run:
    """A run, as far as a fit needs it."""

    name: str
    plan: Plan
    ops: list[Measurement]
    step_s: float
    stretch: float
    """How long compute ops last in units of the processor time they use, or of the time that kernels run."""
    variation: float
    """Relative standard deviation of its steps, outliers left out."""


def calibrate(
    runs: Sequence[tuple[Plan, Trace]],
    hardware: HardwareSpec | None = None,
    *,
    warmup: int = WARM_UP_STEPS,
    names: Sequence[str] = (),
    judged: Sequence[tuple[Plan, Trace]] = (),
    judged_names: Sequence[str] = (),
) -> Calibration:
    """Fit a hardware spec to measured runs.

    Args:
        runs: plans with the traces of running them; several different ones tell more.
        hardware: what to start from; None: the hardware of the first plan.
        warmup: steps of the job that do not count (by step number; a trace may start later).
        names: what messages call the runs; default: by number, from 0.
        judged: runs that are only predicted. Without any, and with several runs, each is left out in its turn.
        judged_names: what messages call those.

    Raises:
        SpipeError: if a trace is of another plan or device, is not complete, has too few steps, or holds durations
            that cannot be.
    """
    if not runs:
        raise SpipeError("calibration needs at least one run: a plan and its trace")
    for plan, _ in (*runs, *judged):
        if not isinstance(plan.model, ModelSpec):
            raise SpipeError(
                f"calibration measures built-in layers; {plan.model.name} is a list of layers: leave that run out"
            )
    start = _with_cores(hardware or runs[0][0].hardware, [trace for _, trace in runs])
    names = names or [f"run {number}" for number in range(len(runs))]
    judged_names = judged_names or [f"judged run {number}" for number in range(len(judged))]
    warnings: list[str] = []
    read = list(_read(runs, names, start, warmup, warnings))
    others = list(_read(judged, judged_names, start, warmup, warnings))
    fit, doubts = _fit(start, read)
    warnings += doubts
    rows = [
        {"run": number, **_row(run, fit.hardware, before_s=simulate(run.plan, hardware=start).step_s)}
        for number, run in enumerate(read)
    ]
    if others:
        held_out = [{**_row(run, fit.hardware), "used_for": "judge"} for run in others]
    else:
        held_out = list(_left_out(start, read))
    fitted = fit.hardware.replace(prediction_error=_prediction_error(start, read, rows, held_out))
    return Calibration(fitted, fit.report, rows, held_out, entries_of(fitted), warnings)


def _prediction_error(
    start: HardwareSpec, runs: Sequence[_Run], rows: Sequence[dict[str, Any]], held_out: Sequence[dict[str, Any]]
) -> float:
    """How wrong a prediction is: as for the runs left out, and no less than what the fit leaves of its own.

    With no run left out, what was known before stays, unless the steps of a run vary by more.
    """
    own = _mean_square([row["error"] for row in rows]) + _mean_square([run.variation for run in runs])
    seen = _mean_square([row["error"] for row in held_out])
    enough = len(held_out) >= _LEAST_HELD_OUT
    return math.sqrt(max(own, seen if enough else start.prediction_error**2))


def _mean_square(values: Sequence[float]) -> float:
    return math.fsum(value**2 for value in values) / max(len(values), 1)


def _read(
    runs: Sequence[tuple[Plan, Trace]], names: Sequence[str], hardware: HardwareSpec, warmup: int, warnings: list[str]
) -> Iterator[_Run]:
    for name, (plan, trace) in zip(names, runs, strict=True):
        where, program = f"calibrate: {name}", plan.program()
        ops = measurements(plan, trace, hardware, warmup, where)
        step_s = measured_step_s(program, trace, warmup, where)
        times = [seconds for step, seconds in step_times(program, trace).items() if step >= warmup]
        check_steps(times, where)
        warnings += [f"{name}: {text}" for text in warnings_of(program, trace, times, warmup)]
        stretch = _stretch(program, trace, hardware.device, step_s, warmup)
        yield _Run(name, plan, ops, step_s, stretch, _DEVIATION * Samples.of(times).spread / step_s)


def _stretch(program: Program, trace: Trace, device: str, step_s: float, warmup: int) -> float:
    if device == "cpu":
        share = processor_share(program, trace, warmup)
        return 1 / share if share else 1.0
    times = {step: seconds for step, seconds in step_times(program, trace).items() if step >= warmup}
    found = analyse(program, trace, min(times, key=lambda step: abs(times[step] - step_s)))
    return 1 + found.total()["host issue"] / sum(found.busy_s)


def _fit(hardware: HardwareSpec, runs: Sequence[_Run]) -> tuple[Fit, list[str]]:
    """The fit to some runs, and doubts about it."""
    plans = [run.plan for run in runs]
    fit = Fit(hardware, [run.ops for run in runs])
    fit.layers()
    fit.copies()
    fit.messages()
    fit.optimizer()
    fit.fixed_costs()
    fit.settle_contention(plans)
    doubt = fit.unseen_time(plans, [run.step_s for run in runs], [run.stretch for run in runs])
    fit.carry_over()
    return fit, [] if doubt is None else [doubt]


def _row(run: _Run, hardware: HardwareSpec, **more: float) -> dict[str, Any]:
    predicted_s = simulate(run.plan, hardware=hardware).step_s
    return {
        "name": run.name,
        "plan": run.plan.digest(),
        "measured_s": run.step_s,
        **more,
        "predicted_s": predicted_s,
        "error": predicted_s / run.step_s - 1,
    }


def _left_out(hardware: HardwareSpec, runs: Sequence[_Run]) -> Iterator[dict[str, Any]]:
    """Every run as the fit to the others predicts it; runs of one plan are left out together."""
    digests = list(dict.fromkeys(run.plan.digest() for run in runs))
    if len(digests) < 2:
        return
    number = min(len(digests), _FOLDS)
    for fold in range(number):
        out = set(digests[fold::number])
        fit, _ = _fit(hardware, [run for run in runs if run.plan.digest() not in out])
        for run in runs:
            if run.plan.digest() in out:
                yield {**_row(run, fit.hardware), "used_for": "left out"}


def _with_cores(hardware: HardwareSpec, traces: Sequence[Trace]) -> HardwareSpec:
    """Device ``cpu``: the spec with the cores that the runs had, where all traces say the same."""
    cores = {trace.metadata.get("usable_cores") for trace in traces}
    if hardware.device != "cpu" or len(cores) != 1 or not isinstance(number := cores.pop(), int) or number < 1:
        return hardware
    cpu = hardware.cpu.replace(cores=number, num_domains=min(hardware.cpu.num_domains, number))
    threads = min(hardware.accelerator.compute_threads, number)
    return hardware.replace(
        cpu=cpu,
        accelerator=hardware.accelerator.replace(compute_threads=threads),
        provenance={**hardware.provenance, "cpu.cores": "measured"},
    )


def entries_of(hardware: HardwareSpec) -> list[dict[str, Any]]:
    """Where every value comes from: ``what``, ``provenance``, relative standard ``error`` (None: not known)."""
    rows = []
    links = [f"links[{number}]" for number in range(len(hardware.links))]
    sections: list[tuple[str, Any]] = [("accelerator", hardware.accelerator), ("cpu", hardware.cpu)]
    sections += list(zip(links, hardware.links, strict=True))
    for section, spec in sections:
        for name, value in spec:
            if isinstance(value, str) or value is None:
                continue
            path = f"{section}.{name}"
            whole = "links" if section in links else section
            origin = hardware.provenance.get(path, hardware.provenance.get(whole, "assumed"))
            rows.append({"what": path, "provenance": origin, "error": hardware.uncertainty.get(path)})
    for entry in hardware.measured:
        shape = f"{entry.microbatch_size} x {entry.sequence} {entry.dtype}, hidden {entry.hidden_size}"
        rows.append(
            {
                "what": f"{entry.layer_kind} {entry.pass_name}, {shape}",
                "provenance": "measured in a run" if entry.source == "run" else "measured on its own",
                "error": entry.standard_error_s / entry.seconds if entry.seconds > 0 else None,
            }
        )
    origin = hardware.provenance.get("measured_op_overhead_s", "assumed")
    rows += [
        {"what": f"fixed cost of {kind}", "provenance": origin, "error": None}
        for kind in hardware.measured_op_overhead_s
    ]
    return rows
