"""Commands that run a plan, and that hold a run against its prediction."""

import sys
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
    whole_number,
    writing,
)
from spipe.cli.progress import training_log
from spipe.errors import SpipeError, unknown

if TYPE_CHECKING:
    from rich.console import Console

    from spipe.plan import Plan
    from spipe.trace import Trace

RunFolder = Annotated[Path, typer.Argument(metavar="RUNDIR", help="A folder made by `spipe run`.")]


def run(
    plan: Annotated[
        Path | None, typer.Argument(metavar="PLAN", help="A plan.json made by `spipe search`.", show_default=False)
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", parser=Count, metavar="K", help="Training steps, those before a checkpoint included."),
    ] = None,
    output_folder: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="RUNDIR", help="New folder for the run.")
    ] = None,
    config_file: Annotated[
        Path | None,
        typer.Option("--config", metavar="TOML", help="Options from a file, by the names they have here."),
    ] = None,
    dump_config: Annotated[
        bool, typer.Option("--dump-config", help="Print the file that says what was given here, and end.")
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Token file (.bin, .npy); any other file, whose bytes are used as they are; or a folder, whose text "
            "files (UTF-8) are used; default: Python's documentation.",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Hugging Face tokenizer.json for text; default: bytes.")
    ] = None,
    token_bytes: Annotated[
        int | None,
        typer.Option(parser=Count, metavar="2|4", help="Bytes of a token in a .bin file; default: by the vocabulary."),
    ] = None,
    validation_fraction: Annotated[
        float | None, typer.Option(metavar="X", help="Part of the data, at its end, for evaluation only.")
    ] = None,
    evaluate_every: Annotated[
        int | None, typer.Option(parser=Count, metavar="K", help="Evaluate every K steps, and after the last.")
    ] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(
            parser=Count,
            metavar="K",
            help="Save every K steps, after the last one, and on SIGTERM, SIGINT and SIGUSR1, which then end the run.",
        ),
    ] = None,
    keep: Annotated[
        int | None, typer.Option(parser=Count, metavar="N", help="Keep the newest N checkpoints; default: all.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|auto",
            help="Go on from a checkpoint, or from the newest one of a run folder; auto: of RUNDIR, if it has one.",
        ),
    ] = None,
    model_folder: Annotated[
        Path | None,
        typer.Option("--from", metavar="FOLDER", help="Hugging Face model folder to start from; default: random."),
    ] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Instead of the plan's, as all below.")] = None,
    learning_rate_schedule: Annotated[
        str | None, typer.Option(metavar="NAME", help="constant, linear, cosine or wsd, after the warm-up.")
    ] = None,
    warmup_steps: Annotated[int | None, typer.Option(parser=whole_number(0), metavar="K")] = None,
    total_steps: Annotated[
        int | None, typer.Option(parser=Count, metavar="K", help="Where the schedule ends; default: --steps.")
    ] = None,
    decay_steps: Annotated[
        int | None, typer.Option(parser=Count, metavar="K", help="Of wsd; default: a tenth of all.")
    ] = None,
    minimum_learning_rate: Annotated[float | None, typer.Option()] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Of matrices; norms and biases have none.")] = None,
    max_norm: Annotated[float | None, typer.Option(help="Clip the gradients' global norm to this.")] = None,
    device: Annotated[
        str | None, typer.Option(metavar="cpu|cuda", help="Refuse to run unless the plan is for this device.")
    ] = None,
    transport: Annotated[
        str | None, typer.Option(metavar="NAME", help="auto, host, peer or nccl (CUDA), gloo (CPU).")
    ] = None,
    trace_steps: Annotated[
        int | None,
        typer.Option(parser=Count, metavar="N", help="How many of the last steps go into trace.json; default: 25."),
    ] = None,
    host_memory_gib: Annotated[
        float | None,
        typer.Option(parser=positive, metavar="GIB", help="Memory of this machine, if it shows less than it has."),
    ] = None,
    gpu_memory_limit_gib: Annotated[
        float | None,
        typer.Option(
            "--gpu-memory-limit", parser=positive, metavar="GIB", help="Of each GPU; refused if the plan needs more."
        ),
    ] = None,
    deterministic: Annotated[
        bool | None,
        typer.Option("--deterministic/--no-deterministic", help="On GPUs, only kernels that repeat their result."),
    ] = None,
    compile_layers: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="On GPUs, blocks go through torch.compile.")
    ] = None,
    tensorboard: Annotated[
        bool | None, typer.Option("--tensorboard/--no-tensorboard", help="Also write RUNDIR/tensorboard.")
    ] = None,
    json_file: JsonFile = None,
    force: Force = False,
) -> None:
    """Train a plan on this machine: one process per rank.

    The folder gets plan.json, train.toml, metrics.jsonl (a line per step, as they come), trace.json and result.json,
    and checkpoints if asked for.

    \b
    Examples:
      spipe run plan.json --steps 30 -o run
      spipe run plan.json --steps 1000 --data books/ --checkpoint-every 100 --keep 2 --resume auto -o run
      spipe run plan.json --from Qwen3-1.7B --data text/ --tokenizer Qwen3-1.7B/tokenizer.json --steps 500 \\
          --learning-rate 2e-5 --learning-rate-schedule cosine --warmup-steps 20 --max-norm 1 -o run
      spipe run --config train.toml --steps 2000
      torchrun --nproc-per-node 2 -m spipe.runtime plan.json --steps 30 -o run
    """
    from spipe.train_config import CONFIG_FILE, TrainConfig

    given = dict(locals())
    paths = {"plan": plan, "output": output_folder, "data": data, "tokenizer": tokenizer, "model_folder": model_folder}
    names = TrainConfig.model_fields.keys() - paths.keys()
    options = {name: given[name] for name in names & given.keys()} | {
        name: None if path is None else str(path) for name, path in paths.items()
    }
    if device is not None and device not in ("cpu", "cuda"):
        raise SpipeError(f"--device {device!r} should be cpu or cuda, as the plan's hardware says")
    config = TrainConfig.load(config_file, options)
    if dump_config:
        sys.stdout.write(config.text())
        return
    folder = Path(config.output)
    output = Output(json_file, force, folder=folder)
    chosen = config.apply(load_plan(Path(config.plan)))
    if config.device is not None and config.device != chosen.hardware.device:
        raise SpipeError(
            f"--device {config.device}: the plan is for {chosen.hardware.name}, whose device is "
            f"{chosen.hardware.device}; make a plan with `spipe search --hardware` of a {config.device} machine"
        )

    from spipe import runtime, show
    from spipe.runtime.job import RUN_FILES
    from spipe.runtime.training import resolve_resume, starts_over

    start = resolve_resume(config.resume, folder)
    goes_on = start is not None and start.resolve().is_relative_to(folder.resolve())
    for name in RUN_FILES:
        if (folder / name).exists() and not (force or goes_on or starts_over(config.resume, folder)):
            raise SpipeError(
                f"{folder} already holds a run, finished or not ({name}); give another folder, --force to "
                "replace the run, or --resume to go on from its checkpoint"
            )
    gib = config.host_memory_gib
    try:
        with training_log(config, chosen) as log:
            result = runtime.run(
                chosen,
                steps=config.steps,
                output=folder,
                data=config.data,
                tokenizer=config.tokenizer,
                token_bytes=config.token_bytes,
                validation_fraction=config.validation_fraction,
                evaluate_every=config.evaluate_every,
                checkpoint_every=config.checkpoint_every,
                keep=config.keep,
                resume=start,
                model_folder=config.model_folder,
                transport=config.transport,
                trace_steps=config.trace_steps,
                host_memory_bytes=None if gib is None else max(1, int(gib * 2**30)),
                overwrite=force,
                log=log,
                files={CONFIG_FILE: config.text()},
            )
    except runtime.RunFailedError as error:
        progress(f"spipe: {error}")
        raise typer.Exit(1) from None
    predicted = (chosen.predicted or {}).get("step_s")
    data_shown = result.summary | {"predicted_step_s": predicted}
    output.show(data_shown, lambda console: show.run(console, result.summary, predicted))


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
) -> None:
    """Let a trained model go on from a text, on the CPU; weights are read layer by layer.

    \b
    Examples:
      spipe sample run --prompt "The import statement"
      spipe sample model --prompt "Once upon a time" --temperature 0 --max-tokens 20
    """
    from spipe.runtime.sample import generate

    pieces = generate(source, prompt, max_tokens, temperature=temperature, top_k=top_k, seed=seed)
    sys.stdout.write(prompt)
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


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


COMMANDS = (run, export, sample, calibrate, compare, demo)
