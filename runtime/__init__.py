"""The runtime: executes a plan's program on real devices, one process per rank. Start with ``run``.

This folder is linked into the package and is never imported by its bare name. Importing the package does not import
torch; its first use does.
"""

if __name__ != "spipe.runtime":
    raise ImportError("import this package as spipe.runtime, not as a top-level package named runtime")

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spipe.runtime.failure import RunFailedError as RunFailedError
    from spipe.runtime.inspection import describe as describe
    from spipe.runtime.launch import RankProcesses as RankProcesses
    from spipe.runtime.training import RunResult as RunResult
    from spipe.runtime.training import run as run
    from spipe.runtime.user_training import train as train

_HOME = {
    "run": "spipe.runtime.training",
    "train": "spipe.runtime.user_training",
    "describe": "spipe.runtime.inspection",
    "RunResult": "spipe.runtime.training",
    "RankProcesses": "spipe.runtime.launch",
    "RunFailedError": "spipe.runtime.failure",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
