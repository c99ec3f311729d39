"""The command that draws figures from result files."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from spipe.cli.common import Force, new_file, progress, writing
from spipe.errors import SpipeError


def plot(
    results: Annotated[
        list[Path], typer.Argument(metavar="RESULT.json...", help="One from `spipe validate`, or some of `simulate`.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FIGURE", help="A .png, .svg or .pdf.")],
    force: Force = False,
) -> None:
    """Draw predicted against measured times, or idle time by cause.

    \b
    Examples:
      spipe plot validation.json -o validation.png
      spipe plot spipe.json mobius.json -o idle.svg
    """
    from spipe import plots

    if output.suffix not in plots.SUFFIXES:
        raise SpipeError(f"{output}: a figure's name should end in {', '.join(plots.SUFFIXES)}")
    new_file(output, force)
    read = {path.stem: _read(path) for path in results}
    if len(read) < len(results):
        raise SpipeError("two results have the same name, by which the figure tells them apart; rename one")
    validations = [name for name, data in read.items() if "rows" in data]
    if validations and len(read) > 1:
        raise SpipeError(f"{validations[0]} is a validation: give it alone, or only results of `spipe simulate --json`")
    if validations:
        figure = plots.predicted_against_measured(read[validations[0]]["rows"])
    else:
        figure = plots.idle_time(read)
    with writing(output):
        plots.save(figure, output)
    progress(f"wrote {output}")


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise SpipeError(f"{path}: not a readable result ({error}); make one with --json") from None
    wanted = {"busy_s", "idle_s", "bubbles", "predicted"}
    if not isinstance(data, dict) or not ("rows" in data or wanted <= set(data)):
        raise SpipeError(
            f"{path}: neither a result of `spipe validate --json` nor of `spipe simulate --json`; make one of these"
        )
    return data


COMMANDS = (plot,)
