"""Commands that run a plan, and that hold a run against its prediction."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spipe.cli.common import (
    Count,
    Force,
    HardwareOverride,
    JsonFile,
    Output,
    PlanFile,
    load_override,
    load_plan,
    positive,
    progress,
    step_log,
    writing,
)
from spipe.errors import SpipeError

if TYPE_CHECKING:
    from rich.console import Console

    from spipe.plan import Plan
    from spipe.trace import Trace

RunFolder = Annotated[Path, typer.Argument(metavar="RUNDIR", help="A folder made by `spipe run`.")]


def run(
    plan: PlanFile,
    steps: Annotated[int, typer.Option("--steps", parser=Count, metavar="K", help="Training steps.")],
    output_folder: Annotated[Path, typer.Option("-o", "--output", metavar="RUNDIR", help="New folder for the run.")],
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="A file, whose bytes are used as they are, or a folder, whose text files (UTF-8) are used; default: "
            "Python's documentation.",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="cpu|cuda", help="Refuse to run unless the plan is for this device.")
    ] = None,
    transport: Annotated[str, typer.Option(metavar="NAME", help="auto, host, gloo (CPU) or nccl (CUDA).")] = "auto",
    trace_steps: Annotated[
        int, typer.Option(parser=Count, metavar="N", help="How many of the last steps go into trace.json.")
    ] = 25,
    host_memory_gib: Annotated[
        float | None,
        typer.Option(parser=positive, metavar="GIB", help="Memory of this machine, if it shows less than it has."),
    ] = None,
    json_file: JsonFile = None,
    force: Force = False,
) -> None:
    """Train a plan on this machine: one process per rank.

    The folder gets plan.json, metrics.jsonl (a line per step, as they come), trace.json and result.json.

    \b
    Examples:
      spipe run plan.json --steps 30 -o run
      spipe run plan.json --steps 1000 --data books/ -o run --force
      torchrun --nproc-per-node 2 -m spipe.runtime plan.json --steps 30 -o run
    """
    output = Output(json_file, force, folder=output_folder)
    chosen = load_plan(plan)
    if device is not None and device not in ("cpu", "cuda"):
        raise SpipeError(f"--device {device!r} should be cpu or cuda, as the plan's hardware says")
    if device is not None and device != chosen.hardware.device:
        raise SpipeError(
            f"--device {device}: the plan is for {chosen.hardware.name}, whose device is {chosen.hardware.device}; "
            f"make a plan with `spipe search --hardware` of a {device} machine"
        )

    from spipe import runtime, show
    from spipe.runtime.job import RUN_FILES

    for name in RUN_FILES:
        if (output_folder / name).exists() and not force:
            raise SpipeError(
                f"{output_folder} already holds a run, finished or not ({name}); give another folder, or --force to "
                "replace the run"
            )
    try:
        result = runtime.run(
            chosen,
            steps=steps,
            output=output_folder,
            data=data,
            transport=transport,
            trace_steps=trace_steps,
            host_memory_bytes=None if host_memory_gib is None else max(1, int(host_memory_gib * 2**30)),
            overwrite=force,
            log=step_log(steps),
        )
    except runtime.RunFailedError as error:
        progress(f"spipe: {error}")
        raise typer.Exit(1) from None
    predicted = (chosen.predicted or {}).get("step_s")
    data_shown = result.summary | {"predicted_step_s": predicted}
    output.show(data_shown, lambda console: show.run(console, result.summary, predicted))


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


COMMANDS = (run, calibrate, compare, demo)
