"""The command that writes a report about a run or a plan."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spipe.cli.common import Force, HardwareOverride, load_override, new_file, progress, replacing
from spipe.cli.inputs import expect, plan_of
from spipe.errors import SpipeError

if TYPE_CHECKING:
    from spipe.report import Facts
    from spipe.timed import TimedStep

_NOT_ENVIRONMENT = {
    "losses", "step_s", "ops_per_step", "median_step_s", "median_tokens_per_s", "validation_losses", "clipped_steps",
    "skipped_steps", "stopped", "measured_steps", "num_ranks", "first_step", "host",
}  # fmt: skip


def report(
    source: Annotated[
        Path, typer.Argument(metavar="RUNDIR|PLAN", help="A run's folder, or a plan, which is simulated.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="HTML", help="Write it here.")],
    hardware: HardwareOverride = None,
    force: Force = False,
) -> None:
    """Write a report: one HTML file that opens in a browser without a network.

    Summary, the plan in words, a timeline to zoom and search, idle time and memory as figures, prediction against
    measurement (of a run), and the environment.

    \b
    Examples:
      spipe report run -o report.html
      spipe report run --hardware hardware.toml -o report.html
      spipe report plan.json -o plan.html
    """
    if output.suffix != ".html":
        raise SpipeError(f"{output}: a report's name should end in .html")
    new_file(output, force)
    from spipe.plots.style import need_matplotlib
    from spipe.report import report as page

    need_matplotlib()
    is_run = expect(source, ("run", "plan", "search"), "a report") == "run"
    timed, facts = _of_run(source, hardware) if is_run else _of_plan(source, hardware)
    text = page(timed, facts)
    with replacing(output) as new:
        new.write_text(text, encoding="utf-8", errors="replace")  # a command line may hold bytes that are no text
    progress(f"wrote {output} ({len(text) / 1e6:.1f} MB)")


def _of_plan(path: Path, hardware: str | None) -> "tuple[TimedStep, Facts]":
    from spipe import show, sim
    from spipe.report import Facts
    from spipe.timed import TimedStep, name_of

    simulation = sim.simulate(plan_of(path), hardware=load_override(hardware))
    timed = TimedStep.of(name_of(path), simulation.plan, simulation.trace, simulation.last_step)
    numbers = {
        "step (simulated)": show.seconds(simulation.step_s),
        "tokens / s": show.count(simulation.tokens_per_s),
        "compute lanes busy": show.percent(sum(simulation.bubbles.busy_s), _lane_time(timed)),
        "of the peak (model FLOPs)": show.percent(simulation.model_flops_utilisation, 1.0),
    }
    title = f"{simulation.plan.model.name} on {simulation.hardware.name}: simulated"
    return timed, Facts(title, numbers, [*simulation.notes, *simulation.memory.problems], environment=_environment({}))


def _of_run(folder: Path, hardware: str | None) -> "tuple[TimedStep, Facts]":
    from spipe import show, sim
    from spipe.report import Facts
    from spipe.timed import TimedStep

    timed = TimedStep.of_run(folder)
    plan = timed.plan
    assert plan is not None
    result, metrics = _result(folder), _metrics(folder)
    notes: list[str] = []
    comparison, predicted = None, None
    try:
        comparison = sim.compare(plan, timed.trace, load_override(hardware))
        simulation = comparison.simulation
        predicted = TimedStep.of("prediction", plan, simulation.trace, simulation.last_step)
        notes += simulation.notes
    except SpipeError as error:  # too short, or from another kind of machine: the rest can be shown
        if hardware is not None:
            raise
        notes.append(f"not held against a prediction: {error}")
    step_s = timed.metrics().duration_s if comparison is None else comparison.step_time["measured_s"]
    losses = [row["loss"] for row in metrics if row["loss"] is not None]
    numbers = {"step (median)": show.seconds(step_s), "tokens / s": show.count(plan.tokens_per_step / step_s)}
    if losses:
        numbers["loss"] = f"{losses[0]:.3f} → {losses[-1]:.3f}"
    numbers["compute lanes busy"] = show.percent(sum(timed.metrics().busy_s), _lane_time(timed))
    if comparison is not None:
        off = show.error(comparison.step_time["predicted_s"], comparison.step_time["measured_s"])
        numbers["step (predicted)"] = f"{show.seconds(comparison.step_time['predicted_s'])} ({off})"
    title = f"{plan.model.name} on {plan.hardware.name}: {timed.name}"
    environment = _environment({**result, **_start(folder)})
    return timed, Facts(title, numbers, notes, metrics, comparison, predicted, environment, _doubts(timed))


def _doubts(timed: "TimedStep") -> list[str]:
    """What makes the run doubtful, as `spipe calibrate` says it."""
    from spipe.metrics import step_times
    from spipe.sim.stability import warnings_of
    from spipe.trace import WARM_UP_STEPS

    times = [seconds for step, seconds in step_times(timed.program, timed.trace).items() if step >= WARM_UP_STEPS]
    return warnings_of(timed.program, timed.trace, times, WARM_UP_STEPS) if times else []


def _lane_time(timed: "TimedStep") -> float:
    metrics = timed.metrics()
    return metrics.duration_s * len(metrics.busy_s)


def _result(folder: Path) -> Mapping[str, Any]:
    from spipe.cli.inputs import read_json

    path = folder / "result.json"
    if not path.exists():
        return {}
    data = read_json(path)
    return {key: value for key, value in data.items() if key not in _NOT_ENVIRONMENT} if isinstance(data, dict) else {}


def _start(folder: Path) -> Mapping[str, Any]:
    """What ``environment.jsonl`` says of the run's last start."""
    path = folder / "environment.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    try:
        row = json.loads(lines[-1]) if lines else {}
    except ValueError as error:
        raise SpipeError(f"{path}:{len(lines)}: not a line of JSON ({error}); remove it to go without") from None
    if not isinstance(row, dict):
        raise SpipeError(f"{path}:{len(lines)}: holds {type(row).__name__}, not an object; remove it to go without")
    if isinstance(command := row.get("command"), list):
        row["command"] = shlex.join(map(str, command))
    return row


def _metrics(folder: Path) -> list[Mapping[str, Any]]:
    path = folder / "metrics.jsonl"
    rows: list[Mapping[str, Any]] = []
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], 1):
        try:
            row = json.loads(line)
            rows.append({**row, "loss": row["loss"], "step": row["step"], "tokens_per_s": row["tokens_per_s"]})
        except (ValueError, KeyError, TypeError) as error:
            raise SpipeError(f"{path}:{number}: not a row of metrics ({type(error).__name__}: {error})") from None
    return rows


def _environment(result: Mapping[str, Any]) -> dict[str, Any]:
    import platform

    from spipe import __version__

    return {
        **{name: _words(name, value) for name, value in result.items()},
        "report made with": f"spipe {__version__}, Python {platform.python_version()}",
    }


def _words(name: str, value: Any) -> Any:
    """Bytes and seconds with units, lists and tables in one line."""
    from spipe import show

    if isinstance(value, dict):
        unit = name if name.endswith(("_bytes", "_s")) else ""
        return ", ".join(f"{key} {_words(unit, each)}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(str(_words(name, each)) for each in value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return show.size(value) if name.endswith("_bytes") else show.seconds(value) if name.endswith("_s") else value
    return value


COMMANDS = (report,)
