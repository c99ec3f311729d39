"""What the commands share: options, tables and JSON on the right stream, files that are not overwritten by accident."""

import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spipe.errors import SpipeError

if TYPE_CHECKING:
    from rich.console import Console

    from spipe.hardware import HardwareSpec
    from spipe.plan import Plan

JsonFile = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="Write the result as JSON; - for standard output, without the tables."),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite outputs that exist.")]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json made by `spipe search`.")]
HardwareOverride = Annotated[
    str | None, typer.Option("--hardware", metavar="H", help="Name or file to use instead of the plan's hardware.")
]


def whole_number(minimum: int) -> Callable[[object], int]:
    """A parser of option values that names the value and what is allowed."""

    def parse(text: object) -> int:
        try:
            number = int(str(text))
        except ValueError:
            number = minimum - 1
        if number < minimum:
            raise typer.BadParameter(f"{text} is not a whole number of at least {minimum}")
        return number

    return parse


Count = whole_number(1)


def progress(message: str) -> None:
    """Say on stderr what is going on."""
    print(message, file=sys.stderr, flush=True)


def new_file(path: Path | None, force: bool) -> Path | None:
    """``path`` if it may be written: asked before the work, not after it."""
    if path is None:
        return None
    if path.is_dir():
        raise SpipeError(f"{path} is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise SpipeError(f"{path}: there is no folder {path.parent}; make it first")
    if path.exists() and not force:
        raise SpipeError(f"{path} exists; give another name, or --force to overwrite it")
    return path


class Output:
    """Where a command's result goes: tables to stdout, JSON to a file or instead of the tables to stdout."""

    def __init__(self, json_file: str | None, force: bool) -> None:
        self.to_stdout = json_file == "-"
        self.file = None if json_file is None or self.to_stdout else new_file(Path(json_file), force)

    def show(self, data: Mapping[str, Any], render: Callable[["Console"], None]) -> None:
        """Write ``data`` where JSON is wanted, and render tables unless stdout is taken."""
        self.write(data)
        if not self.to_stdout:
            from spipe.show import console

            render(console())

    def write(self, data: Mapping[str, Any]) -> None:
        """Write ``data`` where JSON is wanted."""
        text = json.dumps(finite(data), indent=1, allow_nan=False) + "\n"
        if self.to_stdout:
            sys.stdout.write(text)
        elif self.file is not None:
            self.file.write_text(text)


def step_log(
    steps: int, say: Callable[[str], None] = progress, every_s: float = 2.0
) -> Callable[[dict[str, Any]], None]:
    """Reports a run: the first step, then one every ``every_s`` seconds, the last, and every message."""
    last_s = -math.inf

    def log(row: dict[str, Any]) -> None:
        nonlocal last_s
        if "message" in row:
            say(row["message"])
        elif time.monotonic() - last_s >= every_s or row["step"] == steps - 1:
            last_s = time.monotonic()
            loss = "not finite" if row["loss"] is None else f"{row['loss']:.4f}"
            say(f"step {row['step'] + 1} of {steps}: loss {loss}, {row['step_s']:.4g} s")

    return log


def finite(value: Any) -> Any:
    """``value`` for JSON, which has no infinity (written ``"inf"``) and no NaN (written ``null``)."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def parse_options(pairs: list[str]) -> dict[str, Any]:
    """``["weight_slots=3", "barrier=true"]`` as fields of ``spipe.options.Options``."""
    words: dict[str, Any] = {"true": True, "false": False, "none": None}
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise SpipeError(f"--option {pair!r}: write name=value, for example --option weight_slots=3")
        if name in options:
            raise SpipeError(f"--option {name} is given twice; keep one")
        number = int(text) if text.removeprefix("-").isdecimal() else text
        options[name] = words.get(text.lower(), number)
    return options


def load_plan(path: Path) -> "Plan":
    """The plan of a file, or of a folder that holds a ``plan.json``."""
    from spipe.plan import Plan

    return Plan.load(path / "plan.json" if path.is_dir() else path)


def load_override(name: str | None) -> "HardwareSpec | None":
    """The hardware of ``--hardware``, None if it was not given."""
    from spipe.hardware import load_hardware

    return None if name is None else load_hardware(name)
