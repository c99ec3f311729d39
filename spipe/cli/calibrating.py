"""Commands that correct a prediction with runs, and that hold a run against its prediction."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spipe.cli.common import (
    Force,
    HardwareOverride,
    JsonFile,
    Output,
    PlanFile,
    load_override,
    load_plan,
    progress,
    replacing,
)
from spipe.errors import SpipeError

if TYPE_CHECKING:
    from rich.console import Console

    from spipe.plan import Plan
    from spipe.trace import Trace

RunFolder = Annotated[Path, typer.Argument(metavar="RUNDIR", help="A folder made by `spipe run`.")]


def load_run(folder: Path) -> "tuple[Plan, Trace]":
    """Plan and trace of a finished run."""
    from spipe.trace import Trace

    if not folder.is_dir():
        raise SpipeError(f"{folder}: there is no such folder; give one that `spipe run -o` made")
    if not (folder / "trace.json").exists():
        raise SpipeError(
            f"{folder} holds no finished run (no trace.json); run a plan with `spipe run PLAN -o {folder}`"
        )
    plan, trace = load_plan(folder), Trace.load(folder / "trace.json")
    trace.check_matches(plan.program(), str(folder / "trace.json"))
    return plan, trace


def run_summary(folder: Path) -> dict[str, Any]:
    """What a run's ``result.json`` holds; nothing where it is missing or damaged, for it is not needed."""
    try:
        found = json.loads((folder / "result.json").read_text())
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        progress(f"note: {folder / 'result.json'} cannot be read; its memory is left out")
        return {}
    return found


def calibrate(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNDIR...", help="Folders made by `spipe run`.")],
    output_file: Annotated[Path, typer.Option("-o", "--output", metavar="HARDWARE.toml", help="Write it here.")],
    judge: Annotated[
        list[Path] | None,
        typer.Option("--judge", metavar="RUNDIR", help="A run to predict only; may be repeated."),
    ] = None,
    hardware: HardwareOverride = None,
    json_file: JsonFile = None,
    force: Force = False,
) -> None:
    """Improve a hardware description with measured runs.

    Several runs of different plans tell more, and how wrong a prediction is: each is predicted from the others.

    \b
    Examples:
      spipe calibrate run -o hardware.toml
      spipe calibrate run1 run2 --hardware profile.toml -o hardware.toml
      spipe calibrate run1 run2 --judge run3 -o hardware.toml
    """
    output = Output(json_file, force, (output_file,))
    _require_different([*runs, *(judge or [])])
    measured, judged = ([load_run(folder) for folder in folders] for folders in (runs, judge or []))
    start = load_override(hardware) or measured[0][0].hardware

    from spipe import show_measured, sim

    result = sim.calibrate(
        measured,
        start,
        names=[str(folder) for folder in runs],
        judged=judged,
        judged_names=[str(folder) for folder in judge or []],
    )
    with replacing(output_file) as new:
        result.hardware.save(new)
    progress(f"wrote {output_file}")
    for warning in result.warnings:
        progress(f"warning: {warning}")
    output.show(result.to_json(), lambda console: show_measured.calibration(console, result.to_json()))


def _require_different(folders: Sequence[Path]) -> None:
    seen: set[Path] = set()
    for folder in folders:
        if folder.resolve() in seen:
            raise SpipeError(f"{folder} is given twice; a run is fitted to or judged, and counts once")
        seen.add(folder.resolve())


def compare(
    plan: PlanFile,
    run_folder: RunFolder,
    hardware: HardwareOverride = None,
    trace_file: Annotated[
        Path | None, typer.Option("--trace", metavar="T", help="Write both steps, one below the other, for Perfetto.")
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(metavar="FIGURE", help="Draw both steps: a .png, .svg or .pdf.")
    ] = None,
    json_file: JsonFile = None,
    force: Force = False,
) -> None:
    """Hold a run against the prediction: step time, ops, lanes, idle time by cause, memory.

    \b
    Examples:
      spipe compare plan.json run
      spipe compare plan.json run --hardware hardware.toml --figure compare.png --trace compare-trace.json
    """
    from spipe import plots
    from spipe.timelines import save_together

    output = Output(json_file, force, (trace_file, figure))
    if figure is not None:
        plots.check_figure(figure)
    chosen = load_plan(plan)
    override = load_override(hardware) or chosen.hardware
    run_plan, trace = load_run(run_folder)
    trace.check_matches(chosen.program(), str(run_folder / "trace.json"))
    if run_plan.digest() != chosen.digest():
        raise SpipeError(
            f"{plan} has the ops of the plan in {run_folder}, but is not that plan (model, batch, precision or seed "
            f"differ); give {run_folder / 'plan.json'}"
        )

    from spipe import show, show_measured, sim

    result = sim.compare(chosen, trace, override, summary=run_summary(run_folder))
    if trace_file is not None:
        with replacing(trace_file) as new:
            save_together(result.windows, new)
        progress(f"wrote {trace_file}")
    if figure is not None:
        with replacing(figure) as new:
            plots.save(plots.timelines(chosen.program(), result.windows), new)
        progress(f"wrote {figure}")

    def render(console: "Console") -> None:
        show_measured.comparison(console, result.to_json())
        show.notes(console, result.simulation.notes)

    output.show(result.to_json(), render)


COMMANDS = (calibrate, compare)
