"""Memory in use over a step: the account of `spipe.memory`, followed through the times of a trace.

Slots exist from the start of a run to its end; here an item counts from the moment something is put into it until its
last reader is done. So what is in use never exceeds what is planned, and the difference is what slots wait for.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from spipe.memory import MemoryAccount
from spipe.ops import COMPUTE, SENDS, Kind
from spipe.timed import TimedStep

WORKSPACES = "workspaces of libraries"
DEVICE_ITEMS = (
    WORKSPACES,
    "held layers",
    "weights",
    "gradients",
    "stage inputs",
    "messages",
    "activations and temporaries",
)


@dataclass(frozen=True)
class Occupancy:
    """Bytes in use at times (seconds from the step's start), item by item; constant from one time to the next.

    Attributes:
        ranks: per rank, item -> bytes at each time.
        hosts: per host, item -> bytes; what a host holds does not change, but for stage inputs on their way.
    """

    times_s: np.ndarray
    ranks: tuple[dict[str, np.ndarray], ...]
    hosts: tuple[dict[str, np.ndarray], ...]


def occupancy(timed: TimedStep) -> Occupancy:
    """Memory in use over a step of a plan's trace, by the plan's own account."""
    assert timed.plan is not None, "memory needs a plan"
    follow = _Follow(timed, MemoryAccount(timed.plan))
    for rank in range(timed.program.layout.num_ranks):
        follow.rank(rank)
    return follow.result()


class _Follow:
    def __init__(self, timed: TimedStep, account: MemoryAccount) -> None:
        self.timed, self.account, self.program = timed, account, timed.program
        self.begin, finish = timed.metrics().window_s
        self.duration = finish - self.begin
        rows = timed.trace.rows(timed.step)
        self.start = {i: timed.trace.start_s[row] - self.begin for i, row in rows.items()}
        self.end = {i: timed.trace.end_s[row] - self.begin for i, row in rows.items()}
        self.readers: dict[int, list[int]] = defaultdict(list)
        for i, dependencies in enumerate(self.program.dependencies):
            for d in dependencies:
                self.readers[d].append(i)
        self.changes: dict[tuple[str, int, str], list[tuple[float, float]]] = defaultdict(list)

    def add(self, rank: int, item: str, begin: float, end: float, num_bytes: float, place: str = "rank") -> None:
        """Something of an item is there from ``begin`` to ``end``; what began in the step before goes round."""
        changes = self.changes[place, rank, item]
        low, high = max(begin, 0.0), min(end, self.duration)
        if high > low:
            changes += [(low, num_bytes), (high, -num_bytes)]
        if begin < 0:  # in steady state the next step does at its start what this one did before its own
            wrapped = max(begin + self.duration, 0.0)
            changes += [(wrapped, num_bytes), (self.duration, -num_bytes)]

    def rank(self, rank: int) -> None:
        account, program = self.account, self.program
        held = account.rank_items(rank)["weights, gradients and optimizer state of held layers"]
        self.add(rank, "held layers", 0.0, self.duration, held)
        self.add(rank, WORKSPACES, 0.0, self.duration, account.activation_items(rank).get(WORKSPACES, 0))
        mine = [i for i in range(len(program)) if program.rank[i] == rank]
        freed = {program.visit[i]: i for i in mine if program.kind[i] == Kind.FREE}
        last_backward: dict[int, int] = {}
        first_backward: dict[int, int] = {}
        for i in mine:
            if program.kind[i] == Kind.BACKWARD:
                first_backward.setdefault(program.stage[i], i)
            if program.kind[i] in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT):
                last_backward[program.stage[i]] = i
        for i in mine:
            kind = Kind(program.kind[i])
            if kind is Kind.FETCH:
                size = account.total(account.weights, self.layers(i))
                free = freed.get(program.visit[i])
                self.add(rank, "weights", self.start[i], self.duration if free is None else self.end[free], size)
            elif kind is Kind.OFFLOAD_GRAD:
                size = account.total(account.gradients, self.layers(i))
                self.add(rank, "gradients", self.start[first_backward[program.stage[i]]], self.end[i], size)
            elif kind in (Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT):
                self.add(rank, "messages", self.start[i], self.last_reader(i), account.boundary)
            elif kind in SENDS:
                self.add(rank, "messages", self.made(i), self.end[i], account.boundary)
            elif kind in (Kind.RECV_STAGE_INPUT, Kind.LOAD_STAGE_INPUT):
                self.add(rank, "stage inputs", self.start[i], self.last_reader(i), self.input_bytes(i))
            elif kind is Kind.STORE_STAGE_INPUT:
                host = account.plan.hardware.host_of(rank)
                self.add(host, "stage inputs", self.start[i], self.loaded(i), self.input_bytes(i), "host")
        self.activations(rank)

    def layers(self, i: int) -> range:
        return self.program.buckets[self.program.stage[i]][self.program.index[i]]

    def input_bytes(self, i: int) -> int:
        """A stage input's boundary, or what a forward saved, where that is kept."""
        if self.program.options.recompute != "never" or self.program.kind[i] == Kind.RECV_STAGE_INPUT:
            return self.account.boundary
        return self.account.total(self.account.saved, self.program.layers(self.program.stage[i]))

    def last_reader(self, i: int) -> float:
        """The end of the last compute op that reads what op ``i`` brought; of the backward, for a stage input."""
        backwards = {
            (self.program.stage[j], self.program.index[j]): j
            for j in self.readers[i]
            if self.program.kind[j] in COMPUTE
        }
        ends = [self.end[j] for j in backwards.values()]
        if self.program.kind[i] in (Kind.RECV_STAGE_INPUT, Kind.LOAD_STAGE_INPUT):
            ends += [self.end[j] for key in backwards if (j := self.backward.get(key)) is not None]
        return max(ends, default=self.end[i])

    @property
    def backward(self) -> dict[tuple[int, int], int]:
        if not hasattr(self, "_backward"):
            program = self.program
            self._backward = {
                (program.stage[i], program.index[i]): i for i, kind in enumerate(program.kind) if kind == Kind.BACKWARD
            }
        return self._backward

    def made(self, send: int) -> float:
        """When what a SEND sends was made."""
        makers = [d for d in self.program.dependencies[send] if self.program.kind[d] in COMPUTE]
        return max((self.end[d] for d in makers), default=self.start[send])

    def loaded(self, store: int) -> float:
        """When what was stored on the host has been read for the last time."""
        loads = [j for j in self.readers[store] if self.program.kind[j] == Kind.LOAD_STAGE_INPUT]
        return max((self.end[j] for j in loads), default=self.end[store])

    def activations(self, rank: int) -> None:
        name = "activations and temporaries"
        if self.program.options.recompute == "never":
            items = self.account.activation_items(rank)
            for i in (
                i for i, kind in enumerate(self.program.kind) if kind in COMPUTE and self.program.rank[i] == rank
            ):
                self.add(rank, name, self.start[i], self.end[i], items[name])
            self.saved_by_forwards(rank)
            return
        program = self.program
        recomputes = {
            (program.stage[i], program.index[i]): self.start[i]
            for i, kind in enumerate(program.kind)
            if kind == Kind.RECOMPUTE
        }
        # A recompute's activations stay for its backward, which the account counts with the backward.
        sets = [
            (recomputes.get((program.stage[i], program.index[i]), self.start[i]), self.end[i], during, after)
            for i, during, after in self.account.working_sets(rank)
        ]
        for (begin, end, during, after), following in zip(sets, [*sets[1:], None], strict=True):
            self.add(rank, name, begin, end, during)
            self.add(rank, name, end, self.duration if following is None else following[0], after)

    def saved_by_forwards(self, rank: int) -> None:
        """What forwards keep for their own backward, where nothing is recomputed and it stays on the accelerator."""
        if self.program.options.stage_input_route == "host":
            return
        program, first = self.program, len(self.program.layout.forward)
        for i, kind in enumerate(program.kind):
            if kind == Kind.FORWARD and program.rank[i] == rank:
                used = self.backward.get((program.stage[i] + first, program.index[i]))
                until = self.end[i] if used is None else self.end[used]
                size = self.account.total(self.account.saved, program.layers(program.stage[i]))
                self.add(rank, "saved by forwards", self.start[i], until, size)

    def result(self) -> Occupancy:
        times = sorted({0.0, self.duration, *(time for changes in self.changes.values() for time, _ in changes)})
        grid = np.array(times)

        def levels(changes: list[tuple[float, float]]) -> np.ndarray:
            jumps = np.zeros(len(grid))
            at = np.searchsorted(grid, [time for time, _ in changes])
            np.add.at(jumps, at, [num_bytes for _, num_bytes in changes])
            return np.cumsum(jumps)

        report = self.account.report()
        names = [*DEVICE_ITEMS, "saved by forwards"]
        ranks = tuple(
            {
                name: levels(self.changes["rank", rank, name])
                for name in names
                if any(num_bytes for _, num_bytes in self.changes["rank", rank, name])
            }
            for rank in range(self.program.layout.num_ranks)
        )
        hosts = []
        for host, items in enumerate(report.hosts):
            shown: dict[str, np.ndarray] = {
                name: np.full(len(grid), float(size)) for name, size in items.items() if size and name != "stage inputs"
            }
            if moving := self.changes.get(("host", host, "stage inputs")):
                shown["stage inputs"] = levels(moving)
            hosts.append(shown)
        return Occupancy(grid, ranks, tuple(hosts))
