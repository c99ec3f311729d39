"""Ledger of a search: asks for verdicts on candidates, in this process or others, and keeps them."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any

from spipe.memory import MemoryReport
from spipe.sim.candidates import Candidate
from spipe.sim.judge import Job, Refusal, Verdict, improved, simulated

Progress = Callable[[int, int, float | None], None]
"""Called with candidates done, candidates in all, and the best step time so far (seconds)."""
Verdicts = dict[Candidate, Verdict]

WORTH_SENDING_OPS = 10_000  # less work than this is done here, not in other processes


class Ledger:
    """What is known about candidates.

    Attributes:
        replayed, simulated: verdicts by replay and by the engine.
        rejected: rows of candidates that cannot be run, each with its ``reason``.
        nearest: of those that are short of memory, the one that is short in the fewest places, then by the least.
        counts: as in ``SearchResult``.
        planned: candidates that the present stage of the search may ask about.
    """

    def __init__(self, job: Job, executor: Executor | None, progress: Progress) -> None:
        self.job, self.executor, self.progress = job, executor, progress
        self.replayed: Verdicts = {}
        self.simulated: Verdicts = {}
        self.rejected: list[dict[str, Any]] = []
        self.nearest: tuple[Candidate, MemoryReport] | None = None
        self.counts = dict.fromkeys(("enumerated", "discarded", "ranked", "simulated"), 0)
        self.done = self.planned = 0
        self._too_big: dict[tuple[object, ...], tuple[int, str]] = {}  # shape -> smallest microbatch, reason

    def map(self, task: Callable[..., Any], candidates: Sequence[Candidate], *rest: Any) -> Iterator[Any]:
        """What a task says of each candidate, in the order of the candidates."""
        arguments = [self.job] * len(candidates), candidates, *([value] * len(candidates) for value in rest)
        ops = sum(candidate.num_ops for candidate in candidates) * (10 if task is improved else 1)
        if self.executor is not None and len(candidates) > 1 and ops > WORTH_SENDING_OPS:
            results = self.executor.map(task, *arguments)
        else:
            results = map(task, *arguments)
        for result in results:
            self.done += 1
            best = min(best_s(self.simulated), best_s(self.replayed))
            self.progress(self.done, max(self.done, self.planned), best if best < float("inf") else None)
            yield result

    def ask(
        self,
        task: Callable[[Job, Candidate], Verdict | Refusal],
        candidates: Sequence[Candidate],
        into: Verdicts,
    ) -> list[Verdict]:
        """Judge candidates, keep the verdicts of those that fit and return them; note why the others do not."""
        asked, fitting = [], []
        for candidate in candidates:
            size, reason = self._too_big.get(candidate.shape, (candidate.microbatch_size + 1, ""))
            if candidate.microbatch_size >= size:
                self.reject(candidate, f"as with microbatches of {size}: {reason}")
            elif candidate not in into:
                asked.append(candidate)
        for candidate, verdict in zip(asked, self.map(task, asked), strict=True):
            if isinstance(verdict, Verdict):
                into[verdict.candidate] = verdict
                fitting.append(verdict)
                self.counts["simulated" if task is simulated else "ranked"] += 1
                continue
            self.reject(verdict.candidate, verdict.reason)
            if verdict.short is not None:
                self._too_big[candidate.shape] = candidate.microbatch_size, verdict.reason
                self._remember_nearest(verdict.candidate, verdict.short)
        return fitting

    def discard(self, count: int) -> None:
        """Candidates that their bounds rule out."""
        self.counts["discarded"] += count
        self.done += count

    def finish(self, step_s: float) -> None:
        """All is done that was planned; the plan that was found takes so long."""
        self.done = self.planned = max(self.done, self.planned)
        self.progress(self.done, self.planned, step_s)

    def reject(self, candidate: Candidate, reason: str) -> None:
        """A candidate that cannot be run."""
        self.rejected.append({**candidate.row(), "reason": reason})

    def _remember_nearest(self, candidate: Candidate, report: MemoryReport) -> None:
        if self.nearest is None or excess(report) < excess(self.nearest[1]):
            self.nearest = candidate, report


def excess(report: MemoryReport) -> tuple[int, float, float]:
    """Sort key of what is short of memory: kinds of places, then hosts, then ranks, as parts of what they have."""
    ranks = max(report.rank_bytes) / report.rank_capacity_bytes
    hosts = max(report.host_bytes) / report.host_capacity_bytes
    return (ranks > 1) + (hosts > 1), max(hosts, 1.0), max(ranks, 1.0)


def best_s(verdicts: Verdicts) -> float:
    """The shortest step time; infinite if there is none."""
    return min((verdict.step_s for verdict in verdicts.values()), default=float("inf"))


def best_of(verdicts: Verdicts, count: int | None = None) -> list[Verdict]:
    """The fastest, in order; None: all."""
    return sorted(verdicts.values(), key=lambda verdict: verdict.order)[:count]
