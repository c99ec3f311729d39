"""What a search found: the best plan, how good it is for certain, and what it was compared with."""

from collections.abc import Sequence
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass
from typing import Any

from spipe.plan import Plan
from spipe.sim.simulation import Simulation

Range = tuple[float, float]
"""From a step time to a longer one, seconds."""
ENDINGS = (KeyboardInterrupt, BrokenExecutor)
"""What ends a search before it is done: somebody did, or one of its processes is gone."""


@dataclass(frozen=True)
class SearchResult:
    """The best plan, with its predicted metrics, and what it was compared with.

    Attributes:
        plan, simulation: the best one.
        lower_bound_s: no plan in the searched space has a shorter step (``spipe.sim.bounds.least_step_s``).
        limit: what the bound comes from.
        candidates: one row per simulated candidate, best first. Where the hardware says how surely it was measured,
            the first rows have an ``interval_s``, and ``slower`` says whether the best plan beats them for certain.
        front: the rows that no other beats in step time, accelerator memory and host memory together.
        rejected: rows of what does not fit or cannot be laid out, each with its ``reason``.
        interval_s: 90 % interval of the plan's step time (``spipe.sim.interval``); None where the hardware does not say
            how surely it was measured.
        counts: candidates ``enumerated``, ``discarded`` by their bound, ``ranked`` by replay, ``simulated``.
        notes: what the costs rest on, and what the search left out.
        ended: why the search ended before it was done; empty if it was.
    """

    plan: Plan
    simulation: Simulation
    lower_bound_s: float
    limit: str
    candidates: list[dict[str, Any]]
    front: list[dict[str, Any]]
    rejected: list[dict[str, Any]]
    interval_s: Range | None
    counts: dict[str, int]
    notes: tuple[str, ...]
    ended: str = ""

    @property
    def gap(self) -> float:
        """How much longer the plan's step is than the lower bound: 0.04 for 4 per cent."""
        return self.simulation.step_s / self.lower_bound_s - 1 if self.lower_bound_s > 0 else float("inf")


def why_ended(error: BaseException) -> str:
    """One of ``ENDINGS`` in words."""
    gone = "a worker process is gone (killed, perhaps for want of memory: take fewer with --workers)"
    return gone if isinstance(error, BrokenExecutor) else "interrupted"


def beats(one: Range, other: Range) -> bool:
    """Whether a step time is shorter than another for certain: the intervals do not meet."""
    return one[1] < other[0]


def pareto_front(
    rows: Sequence[dict[str, Any]], keys: Sequence[str] = ("step_s", "rank_bytes", "host_bytes")
) -> list[dict[str, Any]]:
    """The rows that no other row beats: none is as good in all of ``keys`` (less is better) and better in one."""

    def beaten(row: dict[str, Any]) -> bool:
        return any(
            all(other[key] <= row[key] for key in keys) and any(other[key] < row[key] for key in keys) for other in rows
        )

    return [row for row in rows if not beaten(row)]
