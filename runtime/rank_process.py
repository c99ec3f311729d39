"""The program of a local rank process: ``python -m spipe.runtime.rank_process DESCRIPTOR``, see ``launch``."""

import contextlib
import os
import queue
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any


def main() -> None:
    """Read jobs from the pipe and run them until the launcher closes it."""
    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))
    commands: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    stop = threading.Event()
    threading.Thread(target=_read, args=(pipe, commands, stop), name="commands", daemon=True).start()

    from spipe.runtime.failure import RunFailedError
    from spipe.runtime.launch import StopSignals
    from spipe.runtime.rank import run_rank
    from spipe.runtime.rendezvous import connect, prefixed, serve

    server = None
    while True:
        command, value = commands.get()
        if command == "serve":
            server = serve()
            pipe.send(server.port)
            continue
        job, rank, port, number = value
        store = server or connect("127.0.0.1", port)
        try:
            with StopSignals(job.saves, stop) as asked:  # a batch system may signal every process of a job
                run_rank(job, rank, prefixed(store, f"job{number}"), lambda row: pipe.send(("report", row)), asked)
        except RunFailedError as error:
            _leave(pipe, str(error))
        except Exception as error:
            _leave(pipe, f"rank {rank}: {type(error).__name__}: {error}")
        pipe.send(("done", None))


def _read(pipe: Any, commands: "queue.SimpleQueue[tuple[str, Any]]", stop: threading.Event) -> None:
    while True:
        try:
            command, value = pipe.recv()
            if command == "stop":
                stop.set()
                continue
            if command == "run":
                stop.clear()
            commands.put((command, value))
        except (EOFError, OSError):
            os._exit(0)


def _leave(pipe: Any, reason: str) -> None:
    """End after a failure: lanes may be blocked in calls that nothing else ends."""
    with contextlib.suppress(OSError):
        pipe.send(("failed", reason))
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    main()
