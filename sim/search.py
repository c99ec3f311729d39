"""Search: the fastest plan that fits, over schedules, stages per rank, microbatch sizes and numbers of ranks.

Candidates are simulated in the order of a lower bound on their step time until no bound is below the best time found,
so that the result is the best of the space unless ``max_simulations`` cuts it short (then a note says so). Afterwards a
few options of the best plan are varied. The same inputs give the same plan.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from spipe.errors import SpipeError
from spipe.hardware import HardwareSpec
from spipe.memory import MemoryReport, memory
from spipe.model import ModelSpec
from spipe.options import Options
from spipe.plan import Plan, make_plan
from spipe.schedules import SCHEDULES, get_schedule
from spipe.sim.candidates import Candidate, Space
from spipe.sim.cost import CostModel
from spipe.sim.simulation import Simulation, simulate

Progress = Callable[[int, int, float | None], None]
"""Called with candidates done, candidates in all, and the best step time so far (seconds)."""

MAX_OPS = 60_000  # larger programs are left out, unless nothing smaller is asked for
VARIATIONS: tuple[dict[str, Any], ...] = (
    {"weight_slots": 3},
    {"recompute": "late"},
    {"bucket_layers": 0},
    {"stage_input_route": "host"},
)


@dataclass(frozen=True)
class SearchResult:
    """The best plan, with its predicted metrics, and what it was compared with.

    Attributes:
        plan, simulation: the best one.
        candidates: one row per simulated candidate, fastest first.
        rejected: rows of what does not fit or cannot be laid out, each with its ``reason``.
        notes: what the costs rest on, and what the search left out.
    """

    plan: Plan
    simulation: Simulation
    candidates: list[dict[str, Any]]
    rejected: list[dict[str, Any]]
    notes: tuple[str, ...]


def search(
    model: ModelSpec,
    hardware: HardwareSpec,
    *,
    global_batch: int,
    sequence: int,
    schedules: Sequence[str] | None = None,
    num_ranks: int | Sequence[int] | None = None,
    forward_stages: int | Sequence[int] | None = None,
    backward_stages: int | Sequence[int] | None = None,
    microbatch_size: int | Sequence[int] | None = None,
    precision: str | None = None,
    progress: Progress | None = None,
    max_simulations: int = 48,
    **plan_fields: Any,
) -> SearchResult:
    """The fastest plan that fits.

    Args:
        global_batch: sequences per training step.
        schedules: names; None: all.
        num_ranks, forward_stages, backward_stages, microbatch_size: a value, several, or None to search. Stages are per
            rank. Ranks are searched downwards from all of them by halves: the best plan may use fewer than offered.
        precision: None: bf16 on device ``cuda`` (fp16 if the accelerator has no bf16), fp32 on ``cpu``.
        progress: see ``Progress``.
        max_simulations: at most so many candidates are simulated.
        plan_fields: further arguments of ``make_plan``; ``options`` given here are kept.

    Raises:
        SpipeError: if nothing fits: what is short, by how much, and the nearest change.
    """
    Options(**(plan_fields.get("options") or {}))  # an unknown option is the caller's mistake, not a plan that fails
    return _Search(model, hardware, global_batch, sequence, precision or default_precision(hardware), plan_fields).run(
        schedules=[name for name in SCHEDULES if not SCHEDULES[name].simulated_only]
        if schedules is None
        else list(schedules),
        num_ranks=_rank_choices(hardware, num_ranks),
        forward_stages=_choices("forward_stages", forward_stages),
        backward_stages=_choices("backward_stages", backward_stages),
        microbatch_sizes=_microbatch_choices(global_batch, microbatch_size),
        progress=progress or (lambda done, total, best: None),
        max_simulations=max_simulations,
    )


def default_precision(hardware: HardwareSpec) -> str:
    """fp32 on device ``cpu``; on ``cuda`` bf16, or fp16 where the accelerator has no bf16."""
    if hardware.device == "cpu":
        return "fp32"
    return next((dtype for dtype in ("bf16", "fp16") if dtype in hardware.accelerator.peak_flops), "fp32")


def _choices(name: str, value: int | Sequence[int] | None) -> list[int] | None:
    if value is None:
        return None
    values = [value] if isinstance(value, int) else sorted(set(value))
    if not values or min(values) < 1:
        raise SpipeError(f"{name} = {value!r} should be whole numbers of at least 1")
    return values


def _rank_choices(hardware: HardwareSpec, value: int | Sequence[int] | None) -> list[int]:
    chosen = _choices("num_ranks", value)
    if chosen is None:
        chosen, ranks = [], hardware.num_ranks
        while ranks >= 1:
            chosen.append(ranks)
            ranks //= 2
        return chosen
    if max(chosen) > hardware.num_ranks:
        raise SpipeError(f"num_ranks = {max(chosen)}, but {hardware.name} has {hardware.num_ranks}")
    return chosen


def _microbatch_choices(global_batch: int, value: int | Sequence[int] | None) -> list[int]:
    if not isinstance(global_batch, int) or global_batch < 1:
        raise SpipeError(f"global_batch = {global_batch!r} should be a whole number of at least 1")
    divisors = [size for size in range(1, global_batch + 1) if global_batch % size == 0]
    chosen = _choices("microbatch_size", value)
    wrong = [size for size in chosen or [] if size not in divisors]
    if wrong:
        raise SpipeError(
            f"a global batch of {global_batch} sequences does not divide into microbatches of {wrong[0]}; use one of "
            f"{', '.join(map(str, divisors[:12]))}"
        )
    return chosen or divisors


class _Search:
    def __init__(
        self,
        model: ModelSpec,
        hardware: HardwareSpec,
        global_batch: int,
        sequence: int,
        precision: str,
        plan_fields: dict[str, Any],
    ) -> None:
        model.check_sequence(sequence)
        hardware.accelerator.peak(precision)
        self.model, self.hardware, self.global_batch, self.sequence = model, hardware, global_batch, sequence
        self.plan_fields = {**plan_fields, "precision": precision}
        self.options: dict[str, Any] = self.plan_fields.pop("options", None) or {}
        self.rejected: list[dict[str, Any]] = []
        self.nearest: tuple[tuple[int, float, float], Candidate, MemoryReport] | None = None
        self.too_big: dict[tuple[object, ...], tuple[int, str]] = {}  # candidate shape -> smallest microbatch, reason
        self.simulated: list[tuple[Candidate, Simulation]] = []
        self.most_ranks = hardware.num_ranks
        self.best: tuple[Candidate, Simulation] | None = None

    def run(
        self,
        *,
        schedules: Sequence[str],
        num_ranks: Sequence[int],
        forward_stages: Sequence[int] | None,
        backward_stages: Sequence[int] | None,
        microbatch_sizes: Sequence[int],
        progress: Progress,
        max_simulations: int,
    ) -> SearchResult:
        for name in schedules:
            get_schedule(name)
        self.most_ranks = max(num_ranks)
        space = Space(
            self.model,
            self.hardware,
            self.sequence,
            self.global_batch,
            schedules,
            num_ranks,
            forward_stages,
            backward_stages,
            microbatch_sizes,
            bool(self.plan_fields.get("full_forward")),
            self.cost_model,
        )
        refused: dict[str, int] = {}
        candidates = space.candidates(refused)
        self.rejected += [{"reason": reason, "count": count} for reason, count in refused.items()]
        notes = []
        small = [candidate for candidate in candidates if candidate.num_ops <= MAX_OPS]
        if small and len(small) < len(candidates):
            notes.append(
                f"{len(candidates) - len(small)} candidates with more than about {MAX_OPS} ops were left out: small "
                "microbatches; ask for a microbatch size to include them"
            )
            candidates = small
        for done, candidate in enumerate(candidates):
            if candidate.bound_s >= self.best_s:
                break
            if len(self.simulated) >= max_simulations:
                left = sum(1 for other in candidates[done:] if other.bound_s < self.best_s)
                notes.append(
                    f"stopped after {max_simulations} simulations; {left} candidates that might be faster by their "
                    "lower bound were not simulated (max_simulations)"
                )
                break
            self.attempt_frugally(candidate)
            progress(done + 1, len(candidates), self.best_s if self.best else None)
        if self.best is None:
            raise self.nothing_fits(refused)
        self.vary()
        progress(len(candidates), len(candidates), self.best_s)
        return self.result(*self.best, notes)

    @property
    def best_s(self) -> float:
        return self.best[1].step_s if self.best else float("inf")

    def cost_model(self, microbatch_size: int, num_ranks: int) -> CostModel:
        fields = self.plan_fields
        return CostModel(
            model=self.model,
            hardware=self.hardware,
            precision=fields["precision"],
            sequence=self.sequence,
            microbatch_size=microbatch_size,
            gradient_precision=fields.get("gradient_precision"),
            compute_threads=fields.get("compute_threads", 1),
            optimizer_threads=fields.get("optimizer_threads", 0),
            ranks_per_host=min(num_ranks, self.hardware.ranks_per_host),
        )

    def plan(self, candidate: Candidate, num_microbatches: int | None = None) -> Plan:
        fields = {key: value for key, value in self.plan_fields.items() if key != "full_forward"}
        count = num_microbatches or candidate.num_microbatches
        return make_plan(
            self.model,
            self.hardware,
            schedule=candidate.schedule,
            num_ranks=candidate.num_ranks,
            layout=candidate.layout,
            global_batch=candidate.microbatch_size * count,
            microbatch_size=candidate.microbatch_size,
            sequence=self.sequence,
            options={**candidate.options, **self.options},
            **fields,
        )

    # ------------------------------------------------------------------ one candidate

    def attempt_frugally(self, candidate: Candidate) -> None:
        """Simulate a candidate; where it is short of memory, with the options that need less of it."""
        report = self.attempt(candidate)
        for place, name, value in (("rank", "stage_input_route", "host"), ("host", "optimizer", "sync")):
            if report is None:
                return
            if name not in self.options and any(problem.startswith(place) for problem in report.problems):
                candidate = candidate.with_options(**{name: value})
                report = self.attempt(candidate)

    def attempt(self, candidate: Candidate, gain: float = 0.0) -> MemoryReport | None:
        """Simulate a candidate if it fits; else note why not, and return its memory where that is the reason.

        It becomes the best one if it is faster by more than the fraction ``gain``; otherwise it is a row of the table
        only if ``gain`` is 0.
        """
        size, reason = self.too_big.get(candidate.shape, (candidate.microbatch_size + 1, ""))
        if candidate.microbatch_size >= size:
            self.reject(candidate, f"as with microbatches of {size}: {reason}")
            return None
        try:
            # One microbatch needs the least memory and is quick to find out.
            report = memory(self.plan(candidate, 1))
            if report.fits:
                report = memory(plan := self.plan(candidate))
            if not report.fits:
                self.too_big[candidate.shape] = candidate.microbatch_size, "; ".join(report.problems)
                self.reject(candidate, "; ".join(report.problems))
                self.remember_nearest(candidate, report)
                return report
            simulation = simulate(plan)
        except SpipeError as error:
            self.reject(candidate, str(error))
            return None
        better = simulation.step_s < self.best_s * (1 - gain)
        if better:
            self.best = candidate, simulation
        if better or not gain:
            self.simulated.append((candidate, simulation))
        return None

    def reject(self, candidate: Candidate, reason: str) -> None:
        self.rejected.append({**candidate.row(), "reason": reason})

    def remember_nearest(self, candidate: Candidate, report: MemoryReport) -> None:
        """Nearest: short in the fewest places, then by the least."""
        ranks = max(total / report.rank_capacity_bytes for total in report.rank_bytes)
        hosts = max(total / report.host_capacity_bytes for total in report.host_bytes)
        excess = ((ranks > 1) + (hosts > 1), max(hosts, 1.0), max(ranks, 1.0))
        if self.nearest is None or excess < self.nearest[0]:
            self.nearest = excess, candidate, report

    def vary(self) -> None:
        """Try single options of the best plan, keeping those that gain at least 0.1 per cent."""
        for variation in VARIATIONS:
            assert self.best is not None
            candidate, _ = self.best
            if not set(variation) & (set(self.options) | set(candidate.options)):
                self.attempt(candidate.with_options(**variation), gain=0.001)

    # ------------------------------------------------------------------ results

    def result(self, candidate: Candidate, simulation: Simulation, notes: list[str]) -> SearchResult:
        plan = simulation.plan.replace(predicted=simulation.predicted())
        if candidate.num_ranks < self.most_ranks:
            notes.append(f"the plan uses {candidate.num_ranks} of the {self.most_ranks} ranks offered")
        table = [
            {**other.row(), "step_s": run.step_s, "tokens_per_s": run.tokens_per_s}
            for other, run in sorted(self.simulated, key=lambda entry: (entry[1].step_s, entry[0].key))
        ]
        return SearchResult(plan, simulation, table, self.rejected, (*simulation.notes, *notes))

    def nothing_fits(self, refused: dict[str, int]) -> SpipeError:
        """What is short, by how much, and the nearest change."""
        offered = (
            f"no plan for {self.model.name} on {self.hardware.name} (global batch {self.global_batch}, sequence "
            f"{self.sequence})"
        )
        if self.nearest is None:
            reasons = list(dict.fromkeys([*refused, *(row["reason"] for row in self.rejected)]))
            return SpipeError(f"{offered}: {'; '.join(reasons[:3]) or 'nothing to search'}")
        _, candidate, report = self.nearest
        shortages = []
        changes = []
        for place, totals, capacity, what in (
            ("rank", report.rank_bytes, report.rank_capacity_bytes, "accelerators"),
            ("host", report.host_bytes, report.host_capacity_bytes, "hosts"),
        ):
            most = max(totals)
            if most > capacity:
                number = totals.index(most)
                shortages.append(f"{place} {number} is short of {(most - capacity) / 2**30:.2f} GiB")
                changes.append(f"{what} with at least {most / 2**30:.2f} GiB usable")
        advice = "more hosts" if any("hosts" in change for change in changes) else "a shorter sequence"
        return SpipeError(
            f"{offered}: nothing fits. Nearest is {candidate.schedule} on {candidate.num_ranks} ranks with "
            f"F={candidate.forward_stages}, B={candidate.backward_stages} and microbatches of "
            f"{candidate.microbatch_size}: {'; '.join(report.problems)}; {', '.join(shortages)}. Use "
            f"{' and '.join(changes)}, or {advice} or a smaller model"
        )
