"""The command ``spipe``: one module a group of commands, imported light; heavy parts load when a command needs them."""

import os
import sys
from collections.abc import Sequence

import typer

from spipe.cli import planning, plotting, running, specs, validating
from spipe.errors import SpipeError

app = typer.Typer(
    name="spipe",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Simulate, search, run and calibrate pipeline training of language models with parameters in CPU memory.

\b
Examples:
  spipe demo                                  the whole loop on this machine's CPU, in a few minutes
  spipe search --model llama2-13b --hardware rtx4090x8 --global-batch 64 --sequence 2048 -o plan.json
  spipe simulate plan.json --trace trace.json
  spipe run plan.json --steps 30 -o run
  spipe calibrate run -o hardware.toml
  spipe compare plan.json run --hardware hardware.toml
""",
)
for _module in (specs, planning, running, validating, plotting):
    for _command in _module.COMMANDS:
        app.command()(_command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 failed on the way, 2 wrong input, 130 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows ? instead of a traceback
    try:
        app(args=arguments, prog_name="spipe")
    except SpipeError as error:
        print(f"spipe: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("spipe: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads on: not an error of ours
        sys.exit(1)
