"""Commands that hold a run against its prediction, and the whole loop."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    writing,
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


def calibrate(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNDIR...", help="Folders made by `spipe run`.")],
    output_file: Annotated[Path, typer.Option("-o", "--output", metavar="HARDWARE.toml", help="Write it here.")],
    hardware: HardwareOverride = None,
    json_file: JsonFile = None,
    force: Force = False,
) -> None:
    """Improve a hardware description with measured runs.

    \b
    Examples:
      spipe calibrate run -o hardware.toml
      spipe calibrate run1 run2 --hardware laptop -o hardware.toml
    """
    output = Output(json_file, force, (output_file,))
    measured = [load_run(folder) for folder in runs]
    start = load_override(hardware) or measured[0][0].hardware

    from spipe import show, sim

    result = sim.calibrate(measured, start, names=[str(folder) for folder in runs])
    with writing(output_file):
        result.hardware.save(output_file)
    progress(f"wrote {output_file}")
    output.show(result.to_json(), lambda console: show.calibration(console, result.report, result.runs))


def compare(
    plan: PlanFile,
    run_folder: RunFolder,
    hardware: HardwareOverride = None,
    json_file: JsonFile = None,
    force: Force = False,
) -> None:
    """Hold a run against the prediction: step time, kinds of ops, idle time by cause.

    \b
    Examples:
      spipe compare plan.json run
      spipe compare plan.json run --hardware hardware.toml
    """
    output = Output(json_file, force)
    chosen = load_plan(plan)
    override = load_override(hardware) or chosen.hardware
    run_plan, trace = load_run(run_folder)
    trace.check_matches(chosen.program(), str(run_folder / "trace.json"))
    if run_plan.digest() != chosen.digest():
        raise SpipeError(
            f"{plan} has the ops of the plan in {run_folder}, but is not that plan (model, batch, precision or seed "
            f"differ); give {run_folder / 'plan.json'}"
        )

    from spipe import show, sim

    result = sim.compare(chosen, trace, override)

    def render(console: "Console") -> None:
        show.comparison(console, result.step_time, result.ops, result.bubbles)
        show.notes(console, result.simulation.notes)

    output.show(result.to_json(), render)


def demo(
    folder: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FOLDER", help="New folder; default: demo-1, demo-2, ...")
    ] = None,
    json_file: JsonFile = None,
    force: Force = False,
) -> None:
    """The whole loop on two CPU ranks of this machine: search, train, calibrate, predict, check.

    Takes about three minutes. Everything it makes is kept in a new folder.

    \b
    Examples:
      spipe demo
      spipe demo -o my-demo --json demo.json
    """
    output = Output(json_file, force, folder=folder)

    from spipe import demo as demonstration
    from spipe.show import console

    result = demonstration.run(folder, console(stderr=output.to_stdout), progress)
    output.write(result)


COMMANDS = (calibrate, compare, demo)
