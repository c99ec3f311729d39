"""The command that plans, runs, calibrates and plans again."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spipe.cli.common import (
    Count,
    Force,
    JsonFile,
    Output,
    load_plan,
    parse_options,
    positive,
    processes,
    progress,
    step_log,
    whole_number,
    writing,
)
from spipe.cli.names import OnlySchedules, hardware_names, model_names
from spipe.errors import SpipeError

if TYPE_CHECKING:
    from spipe.hardware import HardwareSpec
    from spipe.plan import Plan
    from spipe.trace import Trace

LEAST_STEPS = 8


def tune(
    folder: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="New folder for plans and runs.")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="M", autocompletion=model_names, help="Name, config.json, its folder, or .toml file."
        ),
    ] = None,
    hardware: Annotated[
        str | None, typer.Option("--hardware", metavar="H", autocompletion=hardware_names, help="Name or .toml file.")
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option("--global-batch", parser=Count, metavar="N", help="Sequences per training step.")
    ] = None,
    sequence: Annotated[
        int | None, typer.Option("--sequence", "--seq", parser=Count, metavar="N", help="Tokens per sequence.")
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option("--plan", metavar="PLAN", help="Begin with this plan; it also says what is not given here."),
    ] = None,
    ranks: Annotated[int | None, typer.Option(parser=Count, metavar="N", help="Use exactly so many ranks.")] = None,
    schedule: OnlySchedules = None,
    microbatch_size: Annotated[
        int | None, typer.Option(parser=Count, metavar="N", help="Sequences per microbatch.")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; default by hardware.")] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Fix an option of the plan; may be repeated.")
    ] = None,
    steps: Annotated[
        int, typer.Option(parser=whole_number(LEAST_STEPS), metavar="K", help="Steps of each run; three do not count.")
    ] = 15,
    rounds: Annotated[int, typer.Option(parser=Count, metavar="N", help="Plans to run at most.")] = 5,
    budget: Annotated[
        float | None, typer.Option(parser=positive, metavar="MINUTES", help="Start no run that would end later.")
    ] = None,
    effort: Annotated[
        float, typer.Option(parser=positive, metavar="X", help="Candidates looked at in a search, against the usual.")
    ] = 1.0,
    workers: Annotated[
        int, typer.Option(parser=whole_number(0), metavar="N", help="Processes of a search; 0 for all cores.")
    ] = 0,
    data: Annotated[Path | None, typer.Option(metavar="PATH", help="Text or tokens; default: a text of ours.")] = None,
    json_file: JsonFile = None,
    force: Force = False,
) -> None:
    """Plan, run for some steps, calibrate, plan again: until the plan stays the same. Keeps the best measured plan.

    The folder gets plan.json (the best plan), hardware.toml (fitted to all runs), tune.json, and every run.

    \b
    Examples:
      spipe tune --model tiny --hardware laptop --global-batch 16 --sequence 128 -o tuned
      spipe tune --plan plan.json --hardware hardware.toml --budget 10 -o tuned
    """
    output = Output(json_file, force, folder=folder)
    if folder.exists():
        raise SpipeError(f"{folder} exists; every tuning makes a folder of its own: give another name")
    began = None if start is None else load_plan(start)
    if began is None:
        given = {"--model": model, "--hardware": hardware, "--global-batch": global_batch, "--sequence": sequence}
        missing = [name for name, value in given.items() if value is None]
        if missing:
            raise SpipeError(f"give {', '.join(missing)}, or with --plan a plan that says it")

    from spipe import runtime, sim
    from spipe.hardware import load_hardware
    from spipe.model import load_model
    from spipe.runtime.job import Job
    from spipe.show import console
    from spipe.trace import WARM_UP_STEPS, Trace
    from spipe.tune import TRAINED
    from spipe.tune import tune as tuned

    spec = load_hardware(hardware) if hardware is not None else _of(began).hardware
    chosen_model = load_model(model) if model is not None else _of(began).model
    wanted: dict[str, Any] = {
        "global_batch": global_batch or _of(began).global_batch,
        "sequence": sequence or _of(began).sequence,
        "num_ranks": ranks,
        "schedules": schedule or None,
        "microbatch_size": microbatch_size,
        "precision": precision or (began.precision if began else None),
        "options": parse_options(option or []),
        "effort": effort,
    }
    if began is not None:
        wanted |= {name: getattr(began, name) for name in TRAINED}

    def search(on: "HardwareSpec") -> "Plan":
        with processes(workers) as executor:
            return sim.search(chosen_model, on, executor=executor, **wanted).plan

    def run(plan: "Plan", name: str) -> "tuple[Trace, list[float]]":
        done = runtime.run(
            plan, steps=steps, output=folder / name, data=data, trace_steps=steps, log=step_log(steps, progress)
        )
        return Trace.load(done.output / "trace.json"), done.step_s[WARM_UP_STEPS:]

    first = began.replace(hardware=spec) if began is not None else search(spec)
    Job(first, steps, folder / "plan-0", data).check()
    folder.mkdir(parents=True)
    minutes = float("inf") if budget is None else budget
    result = tuned(first, spec, search, run, rounds=rounds, budget_s=60 * minutes, say=progress)
    with writing(folder):
        result.plan.save(folder / "plan.json")
        result.hardware.save(folder / "hardware.toml")
        (folder / "tune.json").write_text(json.dumps(result.to_json(), indent=1) + "\n")
    progress(f"wrote {folder / 'plan.json'} and {folder / 'hardware.toml'}")
    output.write(result.to_json())
    if not output.to_stdout:
        from spipe import show_measured

        show_measured.tuning(console(), result.to_json())


def _of(plan: "Plan | None") -> "Plan":
    assert plan is not None
    return plan


COMMANDS = (tune,)
