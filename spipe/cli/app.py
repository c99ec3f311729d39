"""The commands as one application."""

import functools
from collections.abc import Callable
from typing import Annotated, Any

import typer

from spipe.cli import (
    buying,
    calibrating,
    common,
    planning,
    plotting,
    profiling,
    reporting,
    running,
    specs,
    training,
    tuning,
    validating,
)


class CommandInterrupted(BaseException):
    """Ctrl-C in a command: typer would answer a KeyboardInterrupt in words of its own."""


def _interruptible(command: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        token = common.GIVEN.set(options)
        try:
            command(*arguments, **options)
        except KeyboardInterrupt as error:
            raise CommandInterrupted(*error.args) from None
        finally:
            common.GIVEN.reset(token)

    return run


app = typer.Typer(
    name="spipe",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Simulate, search, run and calibrate pipeline training of language models with parameters in CPU memory.

\b
Examples:
  spipe demo                                  the whole loop on this machine's CPU, in a few minutes
  spipe profile -o hardware.toml              this machine, measured
  spipe search --model llama2-13b --hardware rtx4090x8 --global-batch 64 --sequence 2048 -o plan.json
  spipe simulate plan.json --trace trace.json
  spipe run plan.json --steps 30 -o run
  spipe calibrate run -o hardware.toml
  spipe compare plan.json run --hardware hardware.toml
  spipe tune --plan plan.json -o tuned        plan, run, calibrate, plan again
  spipe report run -o report.html
""",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from spipe import __version__

        print(f"spipe {__version__}")
        raise typer.Exit


@app.callback()
def _of_all_commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


_MODULES = (
    specs, profiling, planning, buying, training, running, calibrating, tuning, validating, plotting, reporting,
)  # fmt: skip
for _module in _MODULES:
    for _command in _module.COMMANDS:
        app.command()(_interruptible(_command))
