"""Where a script keeps what it makes."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spipe.errors import SpipeError


@contextmanager
def output_folder(given: Path | None, prefix: str) -> Iterator[Path]:
    """The folder that was given, made if need be; without one, a temporary folder with this prefix.

    Raises SpipeError if it is no folder, or not empty.
    """
    if given is None:
        with tempfile.TemporaryDirectory(prefix=prefix) as folder:
            yield Path(folder)
        return
    if given.exists() and (not given.is_dir() or any(given.iterdir())):
        raise SpipeError(f"--output {given} is there and not empty; give a new folder")
    given.mkdir(parents=True, exist_ok=True)
    yield given
