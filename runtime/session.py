"""One rank's share in what happens between steps: where a run starts and ends, checkpoints, evaluation.

Nothing here stops the lanes but an evaluation, before which every COMMIT of the step is waited for. Asked to stop, the
ranks agree in a VALIDATE on the step after the next one as the end: by then no lane has begun it.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from spipe.ops import Kind
from spipe.program import Program
from spipe.runtime.checkpoint import Position
from spipe.runtime.saver import Bucket, Saver

if TYPE_CHECKING:
    from spipe.runtime.job import Job
    from spipe.runtime.settlement import MasterState, Scaling
    from spipe.runtime.store import Parameter, Store

Report = Callable[[dict[str, Any]], None]


class Request(Protocol):
    """Something that may be asked for at any time: an event, or the signals of a process."""

    def is_set(self) -> bool:
        """Whether it was."""


class Session:
    """Steps are counted from the start of this run.

    Attributes:
        start: where the run goes on from.
        last: steps that this run has; smaller than at first once the ranks have agreed to stop.
        stopped: whether they have.
    """

    def __init__(
        self, job: "Job", program: Program, rank: int, store: "Store", masters: "MasterState", stop: "Request",
        report: Report,
    ) -> None:  # fmt: skip
        self.job, self.program, self.rank, self.store, self._stop = job, program, rank, store, stop
        self.start, self.last, self.stopped = job.start, job.num_steps, False
        self.saver = Saver(job, rank, store, masters, report) if job.saves else None
        self.evaluate: Callable[[int], None] | None = None
        """Computes this rank's share of the evaluation before a step."""
        self.finish_copies: Callable[[], None] = lambda: None
        """Waits for what the device was told to copy; on CUDA a flag says only that it was told."""
        self._validate = next(i for i in program.of_rank(rank) if program.kind[i] == Kind.VALIDATE)
        self._commits = [i for i in program.of_rank(rank) if program.kind[i] in (Kind.COMMIT, Kind.STORE_WEIGHTS)]

    # Called by the executor's lanes

    def continues(self, lane: int, step: int) -> bool:
        """Whether a lane is to run a step; what has to come before it is waited for."""
        if step >= 2 and self.saver is not None:  # the verdict of two steps before is the last that can end the run
            self._wait([self._validate], step - 1)
        if step >= self.last:
            return False
        if step and self.evaluates_after(step - 1):
            if self.program.lanes[lane].name == "control":
                self.take_part(step)
            self.wait_evaluated(step)
        return True

    def _wait(self, flags: list[int], value: int) -> None:
        self.store.flags.wait_many(flags, [value] * len(flags), math.inf, self.store.layout.abort)

    # Evaluation

    def evaluates_after(self, step: int) -> bool:
        """Whether an evaluation follows a step."""
        every = self.job.evaluate_every
        return every is not None and ((self.start.step + step + 1) % every == 0 or step + 1 == self.last)

    def take_part(self, step: int) -> None:
        """This rank's share of the evaluation before ``step``, once every weight is that of the step before."""
        assert self.evaluate is not None
        self._wait(self._commits, step)
        self.finish_copies()
        self._meet("settled", step)
        self.evaluate(step)
        self.store.flags.set(self.store.layout.arrivals["evaluated"] + self.rank, step)

    def _meet(self, name: str, step: int) -> None:
        first = self.store.layout.arrivals[name]
        self.store.flags.set(first + self.rank, step)
        self._wait(list(range(first, first + self.job.num_ranks)), step)

    def wait_evaluated(self, step: int) -> None:
        """Return once all ranks have done their share of the evaluation before ``step``."""
        first = self.store.layout.arrivals["evaluated"]
        self._wait(list(range(first, first + self.job.num_ranks)), step)

    # Called by the settlement

    def stop_asked(self) -> bool:
        """Whether this rank was asked to end the run early; only runs that save can."""
        return self.saver is not None and self._stop.is_set()

    def validated(self, step: int, stop: bool, scaling: "Scaling", buckets: dict[Bucket, list["Parameter"]]) -> None:
        """A verdict is there; the same on all ranks, as is ``stop``: whether any was asked to."""
        if stop and self.last > step + 2:
            self.last, self.stopped = step + 2, True
        if self.saver is not None and self._saves_after(step):
            done = step + 1
            position = Position(
                self.start.step + done,
                self.start.sequences + done * self.job.plan.global_batch,
                scaling.loss_scale,
                scaling.num_updates,
                scaling.good_steps,
            )
            self.saver.begin(position, buckets)

    def committed(self, bucket: Bucket, step: int) -> None:
        """A bucket has the state after ``step``."""
        if self.saver is not None and self._saves_after(step):
            self.saver.committed(bucket)

    def wait_written(self, bucket: Bucket) -> None:
        """Return once a bucket may change: what a checkpoint needs of it is written."""
        if self.saver is not None:
            self.saver.wait_written(bucket)

    def _saves_after(self, step: int) -> bool:
        every = self.job.checkpoint_every
        periodic = every is not None and (self.start.step + step + 1) % every == 0
        return periodic or step + 1 == self.last
