"""The command ``spipe``: one module a group of commands, imported light; heavy parts load when a command needs them."""

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor

from spipe.errors import SpipeError


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 failed on the way, 2 wrong input or output, 130 interrupted."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started us
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (for as long as the process lasts)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows ? instead of a traceback
    try:
        _run(arguments)
    except SpipeError as error:
        _end(2, str(error))
    except ImportError as error:
        if not _is_of_torch(error):
            raise
        _end(
            2,
            f"PyTorch cannot be imported ({error}), which this command needs; install it anew: pip install torch. "
            "Searching, simulating and figures go without it",
        )
    except KeyboardInterrupt as error:
        _end(130, ": ".join(("interrupted", *error.args)))
    except BrokenExecutor as error:
        from spipe.sim.search_result import why_ended

        _end(1, f"{why_ended(error)}: no plan had been found yet")
    except MemoryError:
        _end(2, "not enough memory for this; use fewer steps, fewer microbatches or a smaller model")
    except BrokenPipeError:
        _leave_stdout()  # nobody reads on: not an error of ours
        sys.exit(1)
    except OSError as error:
        _leave_stdout()
        where = f"{error.filename}: " if error.filename else ""
        _end(2, f"{where}{error.strerror or error}; check that there is room, and that it may be read and written")


def _run(arguments: Sequence[str] | None) -> None:
    from spipe.cli.app import CommandInterrupted, app  # here, so that Ctrl-C while it loads is answered, too

    try:
        app(args=arguments, prog_name="spipe")
    except CommandInterrupted as error:
        raise KeyboardInterrupt(*error.args) from None
    finally:
        sys.stdout.flush()


def _is_of_torch(error: ImportError) -> bool:
    """Whether torch is missing, or something that torch itself wanted to import."""
    frames = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(name.partition(".")[0] == "torch" for name in (error.name or "", *frames))


def _end(code: int, message: str) -> None:
    print(f"spipe: {message}", file=sys.stderr)
    sys.exit(code)


def _leave_stdout() -> None:
    """Let what stdout still holds go nowhere."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
