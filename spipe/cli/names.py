"""Names that option values may be, as the shell completes them; where none fits, shells offer files."""

from collections.abc import Iterable
from typing import Annotated

import typer


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def model_names(incomplete: str) -> list[str]:
    from spipe.model import MODELS

    return _beginning(incomplete, MODELS)


def hardware_names(incomplete: str) -> list[str]:
    from spipe.hardware import HARDWARE_NAMES

    return _beginning(incomplete, HARDWARE_NAMES)


def schedule_names(incomplete: str) -> list[str]:
    from spipe.schedules import SCHEDULES

    return _beginning(incomplete, SCHEDULES)


OnlySchedules = Annotated[
    list[str] | None,
    typer.Option(
        "--schedule",
        metavar="NAME",
        autocompletion=schedule_names,
        help="Only this schedule: spipe, mobius, gpipe, 1f1b (interleaved with several stages a rank), roundpipe, "
        "zb-h1, pipeoffload; may be repeated.",
    ),
]
