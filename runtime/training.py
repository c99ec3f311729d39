"""Run a plan on this machine."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spipe.errors import SpipeError
from spipe.plan import Plan
from spipe.runtime.checkpoint import FOLDER, MODEL_FOLDER, find_checkpoint, find_checkpoints
from spipe.runtime.data import TOKENS_FILE, tokenize
from spipe.runtime.environment import ENVIRONMENT_FILE, environment
from spipe.runtime.hooks import NO_HOOKS, TestHooks
from spipe.runtime.huggingface import CONFIG, EXTRAS, copy_extras
from spipe.runtime.job import RUN_FILES, Job, held
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
    tokenizer: str | Path | None = None,
    token_bytes: int | None = None,
    validation_fraction: float = 0.0,
    evaluate_every: int | None = None,
    checkpoint_every: int | None = None,
    keep: int | None = None,
    resume: str | Path | None = None,
    model_folder: str | Path | None = None,
    transport: str = "auto",
    timeout_s: float = 600.0,
    trace_steps: int = 25,
    log: Log | None = None,
    host_memory_bytes: int | None = None,
    overwrite: bool = False,
    dump_state: str | Path | None = None,
    ranks: RankProcesses | None = None,
    files: Mapping[str, str] | None = None,
    hooks: TestHooks = NO_HOOKS,
) -> RunResult:
    """Train a plan for some steps: one process per rank, on this host.

    Args:
        plan: ``plan.hardware.device`` says on what.
        steps: training steps, those before the checkpoint that the run goes on from included.
        output: a new directory (or one that holds no run, or the one whose checkpoint ``resume`` is).
        overwrite: replace a run that is there, once everything else was found to be right.
        data: token file (``.bin``, ``.npy``), text file or folder of text files; None for the text of Python's
            documentation topics.
        tokenizer: a Hugging Face ``tokenizer.json``, or its folder, for text; None: a token is a byte.
        token_bytes: bytes of a token in a ``.bin`` file, 2 or 4; None: 2 if the vocabulary fits.
        validation_fraction: part of the data, at its end, that is for evaluation only.
        evaluate_every: steps between evaluations; None: none.
        checkpoint_every: steps between checkpoints, in ``checkpoints`` of the run directory; None: none. With it the
            last step is saved, too, and SIGTERM, SIGINT or SIGUSR1 end the run early with a checkpoint.
        keep: how many of the newest checkpoints are kept; None: all.
        resume: a checkpoint, or a run directory whose newest one is taken; ``auto``: the newest of ``output``, if any.
            Ranks, cuts, schedule and device may differ from those that wrote it.
        model_folder: a Hugging Face model folder to start from, unless from a checkpoint; None: random weights.
        transport: ``host``, ``peer`` or ``nccl`` (CUDA), ``gloo`` (CPU), or ``auto``.
        timeout_s: give up if no op of any rank completes for so long.
        trace_steps: how many of the last steps go into ``trace.json``.
        log: called with each step's row of ``metrics.jsonl``, and with ``{"message": text}``.
        host_memory_bytes: memory of this host, where it shows less than it has.
        dump_state: also save weights, masters and moments by parameter to this file (``torch.load`` reads it).
        ranks: processes to use again; None to start new ones.
        files: further text files for the run directory, by name.

    Raises:
        SpipeError: before anything is started, if what was given cannot work.
        spipe.runtime.RunFailedError: if a rank fails; it names rank, lane, op and reason. Every rank has ended.
    """
    job = job_of(
        plan,
        steps=steps,
        output=output,
        data=data,
        tokenizer=tokenizer,
        token_bytes=token_bytes,
        validation_fraction=validation_fraction,
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
        keep=keep,
        resume=resume,
        model_folder=model_folder,
        transport=transport,
        timeout_s=timeout_s,
        trace_steps=trace_steps,
        host_memory_bytes=host_memory_bytes,
        overwrite=overwrite,
        dump_state=dump_state,
        hooks=hooks,
    )
    return execute(job, ranks=ranks, log=log, files=files)


def job_of(plan: Plan, **arguments: Any) -> Job:
    """The job of ``run``'s arguments, texts turned into paths. Raises SpipeError if there is nothing to resume."""
    output, resume = Path(arguments.pop("output")), arguments.pop("resume", None)
    for name in ("data", "tokenizer", "model_folder", "dump_state"):
        arguments[name] = _path(arguments.get(name))
    overwrite = arguments.pop("overwrite", False) or starts_over(resume, output)
    return Job(plan, output=output, resume=resolve_resume(resume, output), overwrite=overwrite, **arguments)


def execute(
    job: Job, *, ranks: RankProcesses | None = None, log: Log | None = None, files: Mapping[str, str] | None = None,
    before_start: Callable[[], None] = lambda: None,
) -> RunResult:  # fmt: skip
    """Check a job, take its run directory, run it. ``before_start`` puts further files there."""
    try:
        prepare(job, files)
        before_start()
        with _processes(ranks, job.num_ranks) as processes:
            processes.run(job, log or (lambda row: None))
        return RunResult.load(job.output)
    finally:
        _vacate(job.output)


def _path(path: str | Path | None) -> Path | None:
    return None if path is None else Path(path)


def resolve_resume(resume: str | Path | None, output: Path) -> Path | None:
    """The checkpoint folder that ``resume`` means; None to start anew. Raises SpipeError if there is none."""
    if resume is None:
        return None
    if str(resume) == "auto":
        found = find_checkpoints(output)
        return found[-1] if found else None
    return find_checkpoint(Path(resume))


def starts_over(resume: str | Path | None, output: Path) -> bool:
    """Whether ``auto`` finds a run that was ended before its first checkpoint: it may be replaced."""
    return str(resume) == "auto" and not find_checkpoints(output) and not (output / "result.json").exists()


def is_done(resume: str | Path | None, job: Job) -> bool:
    """Whether ``auto`` finds a run that has made all its steps: the same command again has nothing to do."""
    return str(resume) == "auto" and job.checkpoint is not None and job.num_steps < 1


def prepare(job: Job, files: Mapping[str, str] | None = None) -> None:
    """Check everything, turn text into tokens where a tokenizer is given, and take the run directory.

    ``files``: further text files for it, by name.
    """
    job.check()
    _claim_with_tokens(job)
    for name, text in (files or {}).items():
        (job.output / name).write_text(text)
    with open(job.output / ENVIRONMENT_FILE, "a") as file:
        file.write(json.dumps(environment()) + "\n")


_occupied: dict[Path, int] = {}
"""Run directory -> the descriptor that is locked."""


def _occupy(output: Path) -> None:
    """Hold a run directory against other runs until `_vacate`, or the end of the process."""
    descriptor = os.open(output, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise SpipeError(f"{output}: a run is using this folder; wait for its end, or give another folder") from None
    except OSError:
        pass  # a file system without locks
    _occupied[output.resolve()] = descriptor


def _vacate(output: Path) -> None:
    descriptor = _occupied.pop(output.resolve(), None)
    if descriptor is not None:
        os.close(descriptor)


def _claim_with_tokens(job: Job) -> None:
    is_new = not job.output.exists()
    try:
        _take(job)
    except BaseException:
        if is_new:  # a run that is refused leaves nothing behind
            _vacate(job.output)
            with suppress(OSError):
                job.output.rmdir()
        raise


def _take(job: Job) -> None:
    try:
        job.output.mkdir(parents=True, exist_ok=True)
        _occupy(job.output)
    except OSError as error:
        raise SpipeError(f"{job.output}: cannot write the run there ({error.strerror})") from None
    if job.tokenizer is None:
        claim(job)
        return
    part = job.output / f".{TOKENS_FILE}"
    try:
        tokenize(job.data, job.tokenizer, part, job.token_width)
        job.check_data(part)
        claim(job)
        os.replace(part, job.tokens_file)
    except OSError as error:
        raise SpipeError(f"{job.output}: cannot write the run there ({error.strerror})") from None
    finally:
        part.unlink(missing_ok=True)


def claim(job: Job) -> None:
    """Make the run directory and put the plan into it. Raises SpipeError if another run was faster."""
    text = job.plan.text()
    try:
        if job.continues_run:
            for name in RUN_FILES:
                if name != "metrics.jsonl":
                    (job.output / name).unlink(missing_ok=True)
        elif job.overwrite:
            for name in RUN_FILES:
                (job.output / name).unlink(missing_ok=True)
            for name in (FOLDER, MODEL_FOLDER):
                if (job.output / name).is_dir():
                    shutil.rmtree(job.output / name)
        source = job.resume or job.model_folder
        if source is not None and not job.continues_run:
            (job.output / MODEL_FOLDER).mkdir(exist_ok=True)
            copy_extras(source, job.output / MODEL_FOLDER, (CONFIG, *EXTRAS))
        if job.tokenizer is not None:
            (job.output / MODEL_FOLDER).mkdir(exist_ok=True)
            folder = job.tokenizer if job.tokenizer.is_dir() else job.tokenizer.parent
            copy_extras(folder, job.output / MODEL_FOLDER, ("tokenizer_config.json", "special_tokens_map.json"))
            source = job.tokenizer / "tokenizer.json" if job.tokenizer.is_dir() else job.tokenizer
            shutil.copyfile(source, job.output / MODEL_FOLDER / "tokenizer.json")
        descriptor = os.open(job.output / "plan.json", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        raise held(job.output, "plan.json") from None
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
