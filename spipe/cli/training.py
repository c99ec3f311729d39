"""Commands that train, and that use what was trained."""

import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from spipe.cli.common import Count, Force, JsonFile, Output, load_plan, progress, whole_number
from spipe.cli.progress import training_log
from spipe.errors import unknown
from spipe.train_options import TRAIN_OPTIONS, TrainOption


def run(json_file: str | None, force: bool, config: Path | None, dump_config: bool, **given: Any) -> None:
    """Train a plan on this machine: one process per rank.

    The folder gets plan.json, train.toml, environment.jsonl, metrics.jsonl (a line per step, as they come), trace.json
    and result.json, and checkpoints if asked for.

    \b
    Examples:
      spipe run plan.json --steps 30 -o run
      spipe run plan.json --steps 1000 --data books/ --checkpoint-every 100 --keep 2 --resume auto -o run
      spipe run plan.json --from Qwen3-1.7B --data text/ --tokenizer Qwen3-1.7B/tokenizer.json --steps 500 \\
          --learning-rate 2e-5 --learning-rate-schedule cosine --warmup-steps 20 --max-norm 1 -o run
      spipe run --config train.toml --steps 2000
      torchrun --nproc-per-node 2 -m spipe.runtime plan.json --steps 30 -o run
    """
    from spipe.train_config import TrainConfig

    settings = TrainConfig.load(config, given)
    if dump_config:
        sys.stdout.write(settings.text())
        return
    folder = Path(settings.output)
    output = Output(json_file, force, folder=folder)
    plan = settings.apply(load_plan(Path(settings.plan)))

    from spipe import runtime, show
    from spipe.runtime.training import execute, is_done, job_of

    job = job_of(plan, **settings.run_arguments(), overwrite=force)
    if is_done(settings.resume, job):
        progress(f"{job.output} has made its {job.start.step} steps: nothing to do; give more --steps to go on")
        return
    job.check_output()  # before anything that the log makes there
    try:
        with training_log(settings, plan) as log:
            result = execute(job, log=log, files=settings.files())
    except runtime.RunFailedError as error:
        progress(f"spipe: {error}")
        raise typer.Exit(1) from None
    predicted = (plan.predicted or {}).get("step_s")
    shown = result.summary | {"predicted_step_s": predicted}
    output.show(shown, lambda console: show.run(console, result.summary, predicted))


def _parser(option: TrainOption) -> Callable[[object], object]:
    def parse(text: object) -> object:
        try:
            return option.parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parse


def _annotation(option: TrainOption) -> Any:
    """What typer needs to know of an option."""
    if option.kind == "flag":
        flags = f"{option.spelling}/--no-{option.spelling.removeprefix('--')}"
        return Annotated[bool | None, typer.Option(flags, help=option.help)]
    names = [name for name in (option.short, option.spelling) if name]
    return Annotated[str | None, typer.Option(*names, parser=_parser(option), metavar=option.metavar, help=option.help)]


def _declare(parameters: Mapping[str, Any]) -> None:
    """Give `run` a signature with these parameters, as if it were written out."""
    defaults = {"force": False, "dump_config": False}
    run.__dict__["__signature__"] = inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=annotation)
            for name, annotation in parameters.items()
        ]
    )
    run.__annotations__ = dict(parameters)


_declare(
    {
        "plan": Annotated[
            str | None, typer.Argument(metavar="PLAN", help="A plan.json made by `spipe search`.", show_default=False)
        ],
        "config": Annotated[
            Path | None,
            typer.Option("--config", metavar="TOML", help="Options from a file, by the names they have here."),
        ],
        "dump_config": Annotated[
            bool, typer.Option("--dump-config", help="Print the file that says what was given here, and end.")
        ],
        **{option.name: _annotation(option) for option in TRAIN_OPTIONS},
        "json_file": JsonFile,
        "force": Force,
    }
)


def export(
    source: Annotated[Path, typer.Argument(metavar="RUNDIR", help="A run folder, or one of its checkpoints.")],
    target: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="New folder for the model.")],
    precision: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; default: as it was trained.")] = None,
) -> None:
    """Write a checkpoint's model as a folder that transformers loads.

    \b
    Examples:
      spipe export run -o model
      spipe export run/checkpoints/step-00000100 -o model --precision bf16
    """
    from spipe.plan import ELEMENT_BYTES

    if precision is not None and precision not in ELEMENT_BYTES:
        raise unknown("precision", precision, ELEMENT_BYTES)

    from spipe.runtime.checkpoint import export as write

    write(source, target, precision)
    progress(f"wrote {target}")


def sample(
    source: Annotated[
        Path, typer.Argument(metavar="RUNDIR", help="A run folder, one of its checkpoints, or a model folder.")
    ],
    prompt: Annotated[str, typer.Option(help="Text to go on from.")],
    max_tokens: Annotated[int, typer.Option(parser=Count, metavar="N", help="Tokens to add at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(parser=Count, metavar="K", help="Only among the K likeliest.")] = None,
    seed: Annotated[int, typer.Option(parser=whole_number(0), metavar="N")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Let a trained model go on from a text; weights are read layer by layer, so that any size fits.

    \b
    Examples:
      spipe sample run --prompt "The import statement"
      spipe sample model --prompt "Once upon a time" --temperature 0 --max-tokens 20
    """
    from spipe.runtime.sample import generate

    pieces = generate(source, prompt, max_tokens, temperature=temperature, top_k=top_k, seed=seed, device=device)
    sys.stdout.write(prompt)
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


COMMANDS = (run, export, sample)
