"""The command that measures this machine."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from spipe.cli.common import Count, Force, JsonFile, Output, positive, progress, replacing
from spipe.cli.names import hardware_names, model_names
from spipe.errors import SpipeError, unknown

_DEFAULT_MODELS = {"cuda": ("qwen3-1.7b", "llama2-7b"), "cpu": ("tiny",)}
_DEFAULT_SEQUENCE = {"cuda": 2048, "cpu": 128}
_DEFAULT_SIZES = (1, 2, 4)


def profile(
    output_file: Annotated[Path, typer.Option("-o", "--output", metavar="HARDWARE.toml", help="Write it here.")],
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="M",
            autocompletion=model_names,
            help="Measure this model's layers; may be repeated; default: some usual.",
        ),
    ] = None,
    microbatch_size: Annotated[
        list[int] | None,
        typer.Option(parser=Count, metavar="N", help="Sequences per microbatch; may be repeated; default: 1, 2, 4."),
    ] = None,
    sequence: Annotated[
        list[int] | None,
        typer.Option("--sequence", "--seq", parser=Count, metavar="N", help="Tokens per sequence; may be repeated."),
    ] = None,
    precision: Annotated[
        list[str] | None, typer.Option(help="fp32, bf16 or fp16; may be repeated; default: bf16 on GPUs, fp32 on CPUs.")
    ] = None,
    device: Annotated[str | None, typer.Option(metavar="cpu|cuda", help="Default: cuda where there is one.")] = None,
    threads: Annotated[
        int, typer.Option(parser=Count, metavar="N", help="Device cpu: cores that a rank computes with.")
    ] = 1,
    effort: Annotated[float, typer.Option(parser=positive, metavar="X", help="Time spent, against the usual.")] = 1.0,
    json_file: JsonFile = None,
    force: Force = False,
) -> None:
    """Measure this machine: connections, copies, host memory, optimizer, and layers of some shapes. About a minute.

    Leave the machine alone meanwhile. The result is a hardware description for search and simulate; --json keeps every
    sample.

    \b
    Examples:
      spipe profile -o hardware.toml
      spipe profile --model llama2-7b --microbatch-size 2 --sequence 2048 -o hardware.toml --json profile.json
    """
    output = Output(json_file, force, (output_file,))
    if device is not None and device not in ("cpu", "cuda"):
        raise SpipeError(f"--device {device!r} should be cpu or cuda")

    import torch

    from spipe import show_measured
    from spipe.model import load_model
    from spipe.plan import ELEMENT_BYTES
    from spipe.runtime import profiling
    from spipe.sim.profiled import hardware_of, warnings_of

    for name in precision or ():
        if name not in ELEMENT_BYTES:
            raise unknown("precision", name, ELEMENT_BYTES)
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    cores = profiling.host.cores()
    if threads > cores:
        raise SpipeError(f"--threads {threads} should not exceed the {cores} cores of this machine")
    models = [load_model(name) for name in model or _DEFAULT_MODELS[chosen]]
    lengths = sequence or [_DEFAULT_SEQUENCE[chosen]]
    shapes = profiling.shapes_of(
        models, microbatch_size or _DEFAULT_SIZES, lengths, precision or ["bf16" if chosen == "cuda" else "fp32"]
    )
    with _progress() as report:
        found = profiling.profile(shapes, device=chosen, threads=threads, effort=effort, progress=report)
    hardware = hardware_of(found, output_file.stem)
    with replacing(output_file) as new:
        hardware.save(new)
    progress(f"wrote {output_file}")
    for warning in warnings_of(found):
        progress(f"warning: {warning}")
    output.show(found.to_json(), lambda console: show_measured.profile(console, found, hardware))


def kineto(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="What torch.profiler's export_chrome_trace wrote.")],
    output_file: Annotated[Path, typer.Option("-o", "--output", metavar="HARDWARE.toml", help="Write it here.")],
    model: Annotated[
        str,
        typer.Option(
            "--model", metavar="M", autocompletion=model_names, help="What was trained: name, config.json or .toml."
        ),
    ],
    hardware: Annotated[
        str,
        typer.Option(
            "--hardware", metavar="H", autocompletion=hardware_names, help="The machine, whose layers are replaced."
        ),
    ],
    microbatch_size: Annotated[int, typer.Option(parser=Count, metavar="N", help="Sequences per microbatch.")],
    sequence: Annotated[int, typer.Option("--sequence", "--seq", parser=Count, metavar="N", help="Their tokens.")],
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "bf16",
    embedding: Annotated[list[str] | None, typer.Option(metavar="NAME*", help="Ranges that are embeddings.")] = None,
    block: Annotated[list[str] | None, typer.Option(metavar="NAME*", help="Ranges that are blocks.")] = None,
    head: Annotated[list[str] | None, typer.Option(metavar="NAME*", help="Ranges that are heads.")] = None,
    json_file: JsonFile = None,
    force: Force = False,
) -> None:
    """Take layer times from a trace of PyTorch's profiler: a training step of your own program.

    Layers are ranges of the trace: torch.profiler.record_function("block 0"), or modules of a trace made with
    with_stack=True.

    \b
    Example:
      spipe kineto trace.json --model llama3-8b --microbatch-size 1 --sequence 4096 --hardware a100x8 \\
          --block "nn.Module: LlamaDecoderLayer_*" -o hardware.toml
    """
    from spipe import show_measured
    from spipe.hardware import load_hardware
    from spipe.model import load_model
    from spipe.plan import ELEMENT_BYTES
    from spipe.sim.fitting import Samples
    from spipe.sim.kineto import PATTERNS, layer_times, read, with_layers

    output = Output(json_file, force, (output_file,))
    if precision not in ELEMENT_BYTES:
        raise unknown("precision", precision, ELEMENT_BYTES)
    chosen, spec = load_model(model), load_hardware(hardware)
    chosen.check_sequence(sequence)
    given = {"embedding": embedding, "block": block, "head": head}
    patterns = {kind: tuple(given[kind] or names) for kind, names in PATTERNS.items()}
    times = layer_times(read(trace), patterns)
    made = with_layers(spec, times, chosen, microbatch_size, sequence, precision)  # type: ignore[arg-type]
    blocks = len(times.get(("block", "forward"), ()))
    if blocks % chosen.num_layers:
        progress(f"warning: the trace has {blocks} forwards of blocks, {chosen.name} has {chosen.num_layers} blocks")
    with replacing(output_file) as new:
        made.save(new)
    progress(f"wrote {output_file}")
    rows = []
    for (kind, name), seconds in sorted(times.items()):
        samples = Samples.of(seconds)
        rows.append(
            {"layer_kind": kind, "pass_name": name, "seconds": samples.median, "spread_s": samples.spread,
             "num_samples": samples.count}
        )  # fmt: skip
    output.show({"layers": rows}, lambda console: show_measured.layers(console, rows))


@contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """A bar on a terminal, else a line for each part."""
    if not sys.stderr.isatty():
        yield lambda done, total, what: progress(f"{done} of {total}: {what}")
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("starting", total=1)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


COMMANDS = (profile, kineto)
