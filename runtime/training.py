"""Run a plan on this machine."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spipe.errors import SpipeError
from spipe.plan import Plan
from spipe.runtime.hooks import NO_HOOKS, TestHooks
from spipe.runtime.job import RUN_FILES, Job
from spipe.runtime.launch import RankProcesses

Log = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class RunResult:
    """What a run came to.

    Attributes:
        output: the run directory: ``plan.json``, ``metrics.jsonl``, ``trace.json``, ``result.json``.
        losses: mean loss over the tokens of each step; None where it was not finite.
        step_s: seconds of each step.
        median_step_s: median over the steps after three of warm-up (over all steps of a shorter run).
        tokens_per_s: tokens of a step by that time.
        skipped_steps: steps that changed nothing because a gradient was not finite.
        summary: everything in ``result.json``.
    """

    output: Path
    losses: list[float | None]
    step_s: list[float]
    median_step_s: float
    tokens_per_s: float
    skipped_steps: list[int]
    summary: dict[str, Any]

    @classmethod
    def load(cls, output: str | Path) -> "RunResult":
        """Read the result of a finished run. Raises SpipeError if there is none."""
        output = Path(output)
        try:
            summary = json.loads((output / "result.json").read_text())
        except (OSError, ValueError) as error:
            raise SpipeError(f"{output}: no result of a finished run ({error})") from None
        return cls(
            output,
            summary["losses"],
            summary["step_s"],
            summary["median_step_s"],
            summary["median_tokens_per_s"],
            summary["skipped_steps"],
            summary,
        )


def run(
    plan: Plan,
    *,
    steps: int,
    output: str | Path,
    data: str | Path | None = None,
    transport: str = "auto",
    timeout_s: float = 600.0,
    trace_steps: int = 25,
    log: Log | None = None,
    host_memory_bytes: int | None = None,
    overwrite: bool = False,
    dump_state: str | Path | None = None,
    ranks: RankProcesses | None = None,
    hooks: TestHooks = NO_HOOKS,
) -> RunResult:
    """Train a plan for some steps: one process per rank, on this host.

    Args:
        plan: ``plan.hardware.device`` says on what.
        steps: training steps.
        output: a new directory (or one that holds no run).
        overwrite: replace a run that is there, once everything else was found to be right.
        data: text file or folder of text files; None for the text of Python's documentation topics.
        transport: ``host``, ``gloo`` (CPU), ``nccl`` (CUDA), or ``auto``.
        timeout_s: give up if no op of any rank completes for so long.
        trace_steps: how many of the last steps go into ``trace.json``.
        log: called with each step's row of ``metrics.jsonl``, and with ``{"message": text}``.
        host_memory_bytes: memory of this host, where it shows less than it has.
        dump_state: also save weights, masters and moments by parameter to this file (``torch.load`` reads it).
        ranks: processes to use again; None to start new ones.

    Raises:
        SpipeError: before anything is started, if what was given cannot work.
        spipe.runtime.RunFailedError: if a rank fails; it names rank, lane, op and reason. Every rank has ended.
    """
    job = Job(
        plan=plan,
        steps=steps,
        output=Path(output),
        data=None if data is None else Path(data),
        transport=transport,
        timeout_s=timeout_s,
        trace_steps=trace_steps,
        host_memory_bytes=host_memory_bytes,
        overwrite=overwrite,
        dump_state=None if dump_state is None else Path(dump_state),
        hooks=hooks,
    )
    job.check()
    claim(job)
    with _processes(ranks, job.num_ranks) as processes:
        processes.run(job, log or (lambda row: None))
    return RunResult.load(job.output)


def claim(job: Job) -> None:
    """Make the run directory and put the plan into it. Raises SpipeError if another run was faster."""
    text = job.plan.text()
    try:
        job.output.mkdir(parents=True, exist_ok=True)
        if job.overwrite:
            for name in RUN_FILES:
                (job.output / name).unlink(missing_ok=True)
        descriptor = os.open(job.output / "plan.json", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        raise SpipeError(f"{job.output} already holds a run (plan.json); give another directory or remove it") from None
    except OSError as error:
        raise SpipeError(f"{job.output}: cannot write the run there ({error.strerror})") from None
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


@contextmanager
def _processes(given: RankProcesses | None, num_ranks: int) -> Iterator[RankProcesses]:
    if given is not None:
        yield given
        return
    with RankProcesses(num_ranks) as own:
        yield own
