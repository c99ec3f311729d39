"""Local rank processes: started once, given jobs, watched.

A rank is a fresh interpreter (spawned, never forked) that reads jobs from a pipe. It ends when its launcher ends.
"""

import contextlib
import multiprocessing.connection as connections
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import spipe
from spipe.runtime.environment import PROCESS_DEFAULTS
from spipe.runtime.failure import RunFailedError
from spipe.runtime.job import Job

GRACE_S = 10.0
"""How long the other ranks may take to end by themselves after one has failed."""


class RankProcesses:
    """``num_ranks`` rank processes on this host, as a context manager; run as many jobs as you like, one at a time.

    After a failed job the processes are gone.
    """

    def __init__(self, num_ranks: int) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.pipes: list[Any] = []
        self._num_jobs = 0
        environment = PROCESS_DEFAULTS | dict(os.environ)
        roots = [str(Path(spipe.__file__).parent.parent), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, roots))
        for _ in range(num_ranks):
            ours, theirs = connections.Pipe()
            command = [sys.executable, "-m", "spipe.runtime.rank_process", str(theirs.fileno())]
            # A session of its own: Ctrl-C reaches the launcher only, which ends the ranks.
            self.processes.append(
                subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, start_new_session=True)
            )
            theirs.close()
            self.pipes.append(ours)
        self.pipes[0].send(("serve", None))
        self._port: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def usable(self) -> bool:
        """Whether all processes are there."""
        return bool(self.processes) and all(process.poll() is None for process in self.processes)

    def run(self, job: Job, report: Callable[[dict[str, Any]], None]) -> None:
        """Run a job that uses the first ``job.num_ranks`` processes; ``report`` gets what rank 0 reports.

        Raises:
            RunFailedError: with what went wrong first; all processes have ended then.
        """
        try:
            with StopSignals(job.saves) as stop:
                problem = self._run(job, report, stop)
        except BaseException:
            self.kill()
            raise
        if problem:
            self.kill()
            raise RunFailedError(problem)

    def _run(self, job: Job, report: Callable[[dict[str, Any]], None], stop: "StopSignals") -> str:
        pipes = self.pipes[: job.num_ranks]
        if self._port is None:
            try:
                self._port = int(pipes[0].recv())
            except EOFError:
                return self._death(0, -1)
        self._num_jobs += 1
        for rank, pipe in enumerate(pipes):
            try:
                pipe.send(("run", (job, rank, self._port, self._num_jobs)))
            except OSError:
                return self._death(rank, -1)
        running, step, died, problem, deadline = set(range(job.num_ranks)), -1, "", "", float("inf")
        while running and time.monotonic() < deadline:
            if stop.take():
                report({"message": f"{stop.name}: finishing the steps in flight, then a checkpoint"})
                with contextlib.suppress(OSError):
                    pipes[0].send(("stop", None))
            for ready in connections.wait([pipes[rank] for rank in running], timeout=0.5):
                rank = pipes.index(ready)
                try:
                    what, value = pipes[rank].recv()
                except (EOFError, OSError):
                    running.discard(rank)
                    # The others may have noticed the loss before us: the cause comes first. They get some time to let
                    # go what their devices wait for.
                    died = died or self._death(rank, step)
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                    continue
                if what == "report":
                    step = value.get("step", step)
                    report(value)
                elif what == "done":
                    running.discard(rank)
                else:
                    running.discard(rank)
                    problem = problem or value
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return died or problem

    def _death(self, rank: int, step: int) -> str:
        try:
            code = self.processes[rank].wait(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            code = 0
        how = f"exit code {code}"
        if code < 0:
            how = f"killed by signal {-code} ({signal.Signals(-code).name})"
            if -code == signal.SIGKILL:
                how += "; if nobody killed it, the system ran out of memory"
        when = "before the first step was done" if step < 0 else f"after step {step}"
        return f"rank {rank} ended: {how}, {when}; the other ranks were stopped"

    def kill(self) -> None:
        """End all processes at once."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        self._reap()

    def close(self) -> None:
        """End all processes once they are idle."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.close()
        deadline = time.monotonic() + GRACE_S
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(deadline - time.monotonic(), 0.1))
        self.kill()

    def _reap(self) -> None:
        for process in self.processes:
            process.wait()
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.close()
        self.processes, self.pipes = [], []


class StopSignals:
    """While active, SIGTERM, SIGINT and SIGUSR1 ask for an orderly end; a second SIGINT interrupts as ever.

    Only where the run can save, and only in a program's main thread, where alone signals can be handled. ``also`` is
    another way to ask.
    """

    def __init__(self, active: bool, also: threading.Event | None = None) -> None:
        self._also = also or threading.Event()
        self._active = active and threading.current_thread() is threading.main_thread()
        self._before: dict[int, Any] = {}
        self._asked = self._taken = False
        self.name = ""

    def __enter__(self) -> Self:
        if self._active:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: object) -> None:
        if self._asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._asked, self.name = True, signal.Signals(number).name

    def is_set(self) -> bool:
        """Whether an end was asked for."""
        return self._asked or self._also.is_set()

    def take(self) -> bool:
        """Whether an end was asked for since the last call."""
        if self._asked and not self._taken:
            self._taken = True
            return True
        return False
