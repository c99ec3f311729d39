"""Search: the fastest plan that fits, over schedules, ranks, microbatches, stages, cuts and options.

1. Candidates with balanced cuts are enumerated with a lower bound on their step time (``spipe.sim.bounds``).
2. In the order of their bounds they are replayed without contention (``spipe.sim.replay``), until no bound is near the
   best time.
3. The cuts of the best are improved, driven by the replay (``spipe.sim.cuts``). Where all cuts there are can be
   enumerated, they are instead.
4. The engine judges the finalists, contention and all, in the order of their replayed times, until none can be better.
5. Single options of the best plan are varied, and its cuts are improved once more with them.

All limits are numbers of candidates or ops, never times; and what is done next depends only on finished rounds. So the
same inputs give the same plan, for any number of processes.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

from spipe.check import check
from spipe.errors import SpipeError, unknown
from spipe.hardware import HardwareSpec
from spipe.memory import MemoryReport
from spipe.model import ModelSpec
from spipe.options import Options
from spipe.plan import Plan
from spipe.schedules import SCHEDULES, get_schedule
from spipe.sim.bounds import least_step_s
from spipe.sim.candidates import Candidate, Space, every_cut, ranks_mapped
from spipe.sim.interval import interval
from spipe.sim.judge import Job, Verdict, improved, replayed, simulated
from spipe.sim.simulation import Simulation, simulate

Progress = Callable[[int, int, float | None], None]
"""Called with candidates done, candidates in all, and the best step time so far (seconds)."""

CUTS = ("improve", "balanced", "all")
MAX_OPS = 150_000  # larger programs are left out, unless nothing smaller is asked for
RANKED_OPS = 1_500_000  # replayed in step 2, by programs' ops; at least MIN_RANKED candidates
MIN_RANKED = 12
SIMULATED_OPS = 1_500_000  # played by the engine in step 4; at least MIN_SIMULATED candidates
MIN_SIMULATED = 6
WAVE = 8  # candidates that are judged before the next decision
FAMILIES = (8, 4, 4, 2, 2, 2, 2, 2)  # candidates whose cuts are improved, round after round
MAX_CUTS = 512  # up to so many cuts in all are enumerated
NEAR = 1.1  # other cuts may make a candidate so much faster than balanced ones
_STATE_BYTES = 16  # of a parameter that an accelerator holds: weight, gradient, master and moments
WORTH_SENDING_OPS = 10_000  # less work than this is done here, not in other processes
HELD_LAYERS = (1, 2, 4, 8, 16, 32)
VARIATIONS: tuple[dict[str, Any], ...] = (
    {"weight_slots": 3},
    {"weight_slots": 4},
    {"recompute": "late"},
    {"bucket_layers": 0},
    {"bucket_layers": 2},
    {"stage_input_route": "host"},
    {"optimizer_workers": 2},
    *({"device_layers": held} for held in HELD_LAYERS),
)


@dataclass(frozen=True)
class SearchResult:
    """The best plan, with its predicted metrics, and what it was compared with.

    Attributes:
        plan, simulation: the best one.
        lower_bound_s: no plan in the searched space has a shorter step (``spipe.sim.bounds.least_step_s``).
        limit: what the bound comes from.
        candidates: one row per simulated candidate, best first.
        front: the rows that no other beats in step time, accelerator memory and host memory together.
        rejected: rows of what does not fit or cannot be laid out, each with its ``reason``.
        interval_s: 90 % interval of the plan's step time (``spipe.sim.interval``); None where the hardware does not say
            how surely it was measured.
        counts: candidates ``enumerated``, ``discarded`` by their bound, ``ranked`` by replay, ``simulated``.
        notes: what the costs rest on, and what the search left out.
    """

    plan: Plan
    simulation: Simulation
    lower_bound_s: float
    limit: str
    candidates: list[dict[str, Any]]
    front: list[dict[str, Any]]
    rejected: list[dict[str, Any]]
    interval_s: tuple[float, float] | None
    counts: dict[str, int]
    notes: tuple[str, ...]

    @property
    def gap(self) -> float:
        """How much longer the plan's step is than the lower bound: 0.04 for 4 per cent."""
        return self.simulation.step_s / self.lower_bound_s - 1 if self.lower_bound_s > 0 else float("inf")


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
    cuts: str = "improve",
    contention: bool = True,
    executor: Executor | None = None,
    progress: Progress | None = None,
    max_simulations: int = 48,
    effort: float = 1.0,
    full_forward: bool = False,
    max_rank_bytes: float | None = None,
    max_host_bytes: float | None = None,
    **plan_fields: Any,
) -> SearchResult:
    """The fastest plan that fits.

    Args:
        global_batch: sequences per training step.
        schedules: names; None: all.
        num_ranks, forward_stages, backward_stages, microbatch_size: a value, several, or None to search. Stages are per
            rank. Ranks are searched downwards from all of them by halves: the best plan may use fewer than offered.
        precision: None: bf16 on device ``cuda`` (fp16 if the accelerator has no bf16), fp32 on ``cpu``.
        cuts: ``improve``: move the bounds of stages where it helps, and try all where they are few; ``balanced``: only
            stages that are as equal as possible; ``all``: every way to cut, however many.
        contention: whether plans are simulated with ops that share links, memory bandwidth and cores.
        executor: processes to work in (``concurrent.futures``, ``mpi4py.futures``); None: this one. The result is the
            same for any.
        progress: see ``Progress``.
        max_simulations: at most so many candidates are simulated before options are varied.
        effort: how many candidates are looked at, against the usual number; below 0.5, options are varied only once.
        full_forward: forward also covers what the top backward stage recomputes anyway (the published schedule).
        max_rank_bytes, max_host_bytes: what a plan may use of an accelerator and of a host, if less than there is.
        plan_fields: further arguments of ``make_plan``; ``options`` given here are kept.

    A KeyboardInterrupt ends the search with the best plan found so far, if there is one.

    Raises:
        SpipeError: if nothing fits: what is short, by how much, and the nearest change.
    """
    options = plan_fields.pop("options", None) or {}
    Options(**options)  # an unknown option is the caller's mistake, not a plan that fails
    if cuts not in CUTS:
        raise unknown("cuts", cuts, CUTS)
    if max_simulations < 1:
        raise SpipeError(f"max_simulations = {max_simulations} should be at least 1")
    if not 0 < effort < math.inf:
        raise SpipeError(f"effort = {effort!r} should be more than 0 and finite")
    model.check_sequence(sequence)
    precision = precision or default_precision(hardware)
    hardware.accelerator.peak(precision)
    runnable = [name for name in SCHEDULES if not SCHEDULES[name].simulated_only]
    names = runnable if schedules is None else list(schedules)
    for name in names:
        get_schedule(name)
    for name, limit in (("max_rank_bytes", max_rank_bytes), ("max_host_bytes", max_host_bytes)):
        if limit is not None and not limit > 0:
            raise SpipeError(f"{name} = {limit!r} should be more than 0")
    job = Job(
        model,
        hardware,
        sequence,
        contention,
        options,
        {**plan_fields, "precision": precision},
        max_rank_bytes or math.inf,
        max_host_bytes or math.inf,
    )
    space = Space(
        model,
        hardware,
        sequence,
        global_batch,
        names,
        _rank_choices(hardware, num_ranks),
        _choices("forward_stages", forward_stages),
        _choices("backward_stages", backward_stages),
        _microbatch_choices(global_batch, microbatch_size),
        full_forward,
        job.cost_model,
        options,
    )
    progress = progress or (lambda done, total, best: None)
    return _Search(job, space, cuts, executor, progress, max_simulations, effort).run()


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
        job: Job,
        space: Space,
        cuts: str,
        executor: Executor | None,
        progress: Progress,
        max_simulations: int,
        effort: float,
    ) -> None:
        self.job, self.space, self.cuts, self.executor = job, space, cuts, executor
        self.progress, self.max_simulations, self.effort = progress, max_simulations, effort
        self.rejected: list[dict[str, Any]] = []
        self.nearest: tuple[tuple[int, float, float], Candidate, MemoryReport] | None = None
        self.too_big: dict[tuple[object, ...], tuple[int, str]] = {}  # candidate shape -> smallest microbatch, reason
        self.replayed: dict[Candidate, Verdict] = {}
        self.simulated: dict[Candidate, Verdict] = {}
        self.unsound: set[Candidate] = set()
        self.notes: list[str] = []
        self.counts = dict.fromkeys(("enumerated", "discarded", "ranked", "simulated"), 0)
        self.done = self.planned = 0
        # On device cpu all lanes share the cores: without contention everything looks alike.
        self.ranking = simulated if job.contention and job.hardware.device == "cpu" else replayed

    def run(self) -> SearchResult:
        refused: dict[str, int] = {}
        candidates = self.space.candidates(refused)
        self.rejected += [{"reason": reason, "count": count} for reason, count in refused.items()]
        candidates = self.without_large(candidates)
        try:
            if everything := self.all_cuts(candidates):
                self.judge_all(everything)
            else:
                self.rank(candidates)
                if self.cuts == "improve" and self.replayed:
                    self.improve(self.best_of(self.replayed, FAMILIES[0]))
                self.judge()
            if self.simulated:
                self.vary()
        except KeyboardInterrupt:
            if not (self.simulated or self.replayed):
                raise
            self.notes.append("interrupted: this is the best plan found so far")
        if not (self.simulated or self.replayed):
            raise self.nothing_fits(refused)
        return self.result()

    # ------------------------------------------------------------------ candidates

    def without_large(self, candidates: list[Candidate]) -> list[Candidate]:
        self.counts["enumerated"] = len(candidates)
        small = [candidate for candidate in candidates if candidate.num_ops <= MAX_OPS]
        if small and len(small) < len(candidates):
            self.notes.append(
                f"{len(candidates) - len(small)} candidates with more than about {MAX_OPS} ops were left out: small "
                "microbatches; ask for a microbatch size to include them"
            )
            return small
        return candidates

    def all_cuts(self, candidates: list[Candidate]) -> list[Candidate]:
        """Every cut of every candidate, best bound first; nothing if they are not wanted, or too many."""
        if self.cuts == "balanced":
            return []
        limit = MAX_CUTS if self.cuts == "improve" else None
        found: dict[Candidate, None] = {}
        for candidate in candidates:
            for other in every_cut(candidate, self.job.costs(candidate)):
                found[other] = None
                if limit is not None and len(found) > limit:
                    return []
        self.counts["enumerated"] = len(found)
        return sorted(found, key=lambda candidate: candidate.key)

    def judge_all(self, candidates: list[Candidate]) -> None:
        """Simulate every candidate whose bound allows it to be the best."""
        self.planned = len(candidates)
        for wave in _waves(candidates):
            left = [candidate for candidate in wave if candidate.bound_s < self.best_s(self.simulated)]
            self.discard(len(wave) - len(left))
            self.ask(simulated, left, self.simulated)

    def rank(self, candidates: list[Candidate]) -> None:
        """Replay candidates, best bound first, until no bound is near the best time or there were enough."""
        ops = ranked = 0
        chosen = []
        for candidate in candidates:
            ops, ranked = ops + candidate.num_ops, ranked + 1
            if ops > self.effort * RANKED_OPS and ranked > MIN_RANKED:
                break
            chosen.append(candidate)
        if self.ranking is simulated:
            chosen = chosen[: self.max_simulations]
        self.planned = len(candidates)
        for wave in _waves(chosen):
            left = [candidate for candidate in wave if candidate.bound_s < NEAR * self.best_s(self.replayed)]
            self.discard(len(wave) - len(left))
            self.ask(self.ranking, left, self.replayed)
        if not self.replayed:  # nothing fits so far: look further, at what needs less memory
            chosen = sorted(candidates, key=lambda c: (c.microbatch_size, -len(c.layout.backward), c.key))
            for wave in _waves(chosen):
                self.ask(self.ranking, wave, self.replayed)
                if self.replayed:
                    break
        missed = sum(c.bound_s < self.best_s(self.replayed) for c in candidates[len(chosen) :])
        if missed and self.replayed:
            self.notes.append(
                f"{missed} candidates that might be faster by their lower bound were not looked at; fix a choice "
                "(schedule, ranks, stages, microbatch size) to look deeper"
            )
        self.discard(max(0, len(candidates) - len(chosen)))

    def improve(self, verdicts: list[Verdict], families: Sequence[int] = FAMILIES) -> None:
        """Rounds of descent on the best candidates: fewer and fewer of them."""
        current = {verdict.candidate: verdict for verdict in verdicts}
        for round_, count in enumerate(families):
            going = sorted(current.values(), key=lambda verdict: verdict.order)[:count]
            current = {}
            asked = [verdict.candidate for verdict in going]
            for before, after in zip(asked, self.map(improved, asked, round_), strict=True):
                self.counts["ranked"] += after.ranked
                if after.candidate != before:
                    current[after.candidate] = self.replayed[after.candidate] = after
            if not current:
                return

    def judge(self) -> None:
        """Simulate the best by replay, until no other can be better; and the built-in presets."""
        waiting = [v.candidate for v in sorted(self.replayed.values(), key=lambda verdict: verdict.order)]
        if self.ranking is simulated:
            self.simulated.update((c, v) for c, v in self.replayed.items() if v.candidate.cuts != "improved")
            waiting = [candidate for candidate in waiting if candidate not in self.simulated]
        else:
            self.ask(simulated, list(self.presets(waiting[:1])), self.simulated)
        ops = asked = 0
        for wave in _waves(waiting):
            left = []
            for candidate in wave:
                if self.replayed[candidate].step_s < self.best_s(self.simulated):  # type: ignore[operator]
                    ops, asked = ops + candidate.num_ops, asked + 1
                    if asked <= self.max_simulations and (ops <= self.effort * SIMULATED_OPS or asked <= MIN_SIMULATED):
                        left.append(candidate)
            self.ask(simulated, left, self.simulated)
        if asked > self.max_simulations:
            self.notes.append(
                f"stopped after {self.max_simulations} simulations; {asked - self.max_simulations} candidates that "
                "might be faster were only replayed without contention (max_simulations)"
            )

    def presets(self, like: Iterable[Candidate]) -> Iterator[Candidate]:
        """What the built-in systems would run with the ranks and microbatches of a candidate."""
        space = self.space
        for candidate in like:
            for name in space.schedules:
                system = get_schedule(name)
                forward, backward = (1, 1) if name == "gpipe" else (2, 6) if system.decoupled else (2, 2)
                if forward not in (space.forward_stages or [forward]) or backward not in (
                    space.backward_stages or [backward]
                ):
                    continue
                published: dict[str, Any] = dict(system.published)
                for options in ({}, published):
                    if Options(**options).simulated_only and not system.simulated_only:
                        continue
                    full = bool(options) or space.full_forward
                    preset = space.candidate(
                        name, candidate.num_ranks, candidate.microbatch_size, forward, backward, full_forward=full
                    )
                    if preset is not None:
                        yield replace(preset.with_options(**options), cuts="preset")

    def vary(self) -> None:
        """Try single options and other places for the ranks, and improve the cuts again with what was kept."""
        for _ in range(3 if self.effort >= 0.5 else 1):
            best = self.best_of(self.simulated, 1)[0]
            found: dict[Candidate, Verdict] = {}
            self.ask(simulated, list(self.variations(best.candidate)), found)
            gain_s = 0.999 * self.best_s(self.simulated)
            kept = {c: v for c, v in found.items() if v.step_s < gain_s or v.rank_bytes < best.rank_bytes}  # type: ignore[operator]
            self.simulated |= kept
            if self.best_s(self.simulated) >= gain_s:
                break
        best = self.best_of(self.simulated, 1)[0]
        if self.cuts == "improve" and best.candidate.cuts != "all":
            known = set(self.replayed)
            self.improve([best], (1, 1))
            self.ask(simulated, [candidate for candidate in self.replayed if candidate not in known], self.simulated)

    def variations(self, candidate: Candidate) -> Iterator[Candidate]:
        for variation in VARIATIONS:
            (name,) = variation
            if name in self.job.options or candidate.options.get(name) == variation[name]:
                continue
            if name == "optimizer_workers" and not self.job.contention:
                continue  # what two STEPs at a time share is all that keeps them from being twice as fast
            if name == "device_layers" and not 0 < variation[name] <= self.most_held(candidate):
                continue
            yield candidate.with_options(**variation)
        yield from ranks_mapped(candidate, self.job.hardware, self.job.costs(candidate))

    def most_held(self, candidate: Candidate | None = None) -> int:
        """How many of the lowest layers accelerators may keep with all their state; more would not fit."""
        options = {**(candidate.options if candidate else {}), **self.job.options}
        if self.job.hardware.device != "cuda" or options.get("bucket_layers", 1) != 1:
            return 0
        hardware, model = self.job.hardware, self.job.model
        room = min(hardware.accelerator.usable_memory_bytes, self.job.max_rank_bytes) * max(self.space.num_ranks)
        most = 0
        while most < min(model.num_total_layers, HELD_LAYERS[-1]) and room > 0:
            room -= _STATE_BYTES * model.layer_num_parameters(model.layer_kind(most))
            most += room > 0
        return most

    # ------------------------------------------------------------------ asking

    def map(self, task: Callable[..., Verdict], candidates: Sequence[Candidate], *rest: Any) -> Iterator[Verdict]:
        """Verdicts in the order of the candidates."""
        arguments = [self.job] * len(candidates), candidates, *([value] * len(candidates) for value in rest)
        ops = sum(candidate.num_ops for candidate in candidates) * (10 if task is improved else 1)
        if self.executor is not None and len(candidates) > 1 and ops > WORTH_SENDING_OPS:
            results = self.executor.map(task, *arguments)
        else:
            results = map(task, *arguments)
        for verdict in results:
            self.done += 1
            best = min(self.best_s(self.simulated), self.best_s(self.replayed))
            self.progress(self.done, max(self.done, self.planned), best if best < float("inf") else None)
            yield verdict

    def ask(
        self, task: Callable[..., Verdict], candidates: Sequence[Candidate], into: dict[Candidate, Verdict]
    ) -> None:
        """Judge candidates and keep the verdicts of those that fit; note why the others do not."""
        asked = []
        for candidate in candidates:
            size, reason = self.too_big.get(candidate.shape, (candidate.microbatch_size + 1, ""))
            if candidate.microbatch_size >= size:
                self.reject(candidate, f"as with microbatches of {size}: {reason}")
            elif candidate not in into:
                asked.append(candidate)
        for candidate, verdict in zip(asked, self.map(task, asked), strict=True):
            if verdict.step_s is not None:
                into[verdict.candidate] = verdict
                self.counts["simulated" if task is simulated else "ranked"] += 1
                continue
            self.reject(verdict.candidate, verdict.reason)
            if verdict.short is not None:
                self.too_big[candidate.shape] = candidate.microbatch_size, verdict.reason
                self.remember_nearest(verdict.candidate, verdict.short)

    def discard(self, count: int) -> None:
        self.counts["discarded"] += count
        self.done += count

    def best_s(self, verdicts: dict[Candidate, Verdict]) -> float:
        return min((v.step_s for v in verdicts.values() if v.step_s is not None), default=float("inf"))

    def best_of(self, verdicts: dict[Candidate, Verdict], count: int) -> list[Verdict]:
        return sorted(verdicts.values(), key=lambda verdict: verdict.order)[:count]

    def reject(self, candidate: Candidate, reason: str) -> None:
        self.rejected.append({**candidate.row(), "reason": reason})

    def remember_nearest(self, candidate: Candidate, report: MemoryReport) -> None:
        """Nearest: short in the fewest places, then by the least."""
        ranks = max(total / report.rank_capacity_bytes for total in report.rank_bytes)
        hosts = max(total / report.host_capacity_bytes for total in report.host_bytes)
        excess = ((ranks > 1) + (hosts > 1), max(hosts, 1.0), max(ranks, 1.0))
        if self.nearest is None or excess < self.nearest[0]:
            self.nearest = excess, candidate, report

    # ------------------------------------------------------------------ results

    def result(self) -> SearchResult:
        verdicts = sorted((self.simulated or self.replayed).values(), key=lambda verdict: verdict.order)
        for verdict in verdicts:
            plan = self.job.plan(verdict.candidate)
            faults = check(plan.program())
            if not faults:
                break
            self.reject(verdict.candidate, f"the program is not sound: {faults[0]}")
            self.simulated.pop(verdict.candidate, None)
        else:
            raise SpipeError(f"no plan for {self.job.model.name} is sound: {self.rejected[-1]['reason']}")
        simulation = simulate(plan, contention=self.job.contention)
        bound_s, limit = self.least_step_s()
        metrics = simulation.predicted() | {"lower_bound_s": bound_s}
        simulation = replace(simulation, plan=plan.replace(predicted=metrics))
        used, offered = verdict.candidate.num_ranks, max(self.space.num_ranks)
        if used < offered:
            self.notes.append(f"the plan uses {used} of the {offered} ranks offered")
        tokens = plan.tokens_per_step
        table = [
            {
                **other.candidate.bounded(self.job.costs(other.candidate), self.job.options).row(),
                "step_s": other.step_s,
                "tokens_per_s": tokens / other.step_s,
                "rank_bytes": other.rank_bytes,
                "host_bytes": other.host_bytes,
            }
            for other in sorted(self.simulated.values(), key=lambda other: other.order)
            if other.step_s is not None
        ]
        found = interval(simulation)
        if found is not None:
            alike = sum(row["step_s"] <= found.high_s for row in table) - 1
            if alike > 0:
                self.notes.append(
                    f"{alike} other candidates lie within the plan's 90 % interval of {found.low_s:.4g} to "
                    f"{found.high_s:.4g} s: by what was measured, none of these beats another"
                )
        self.progress(max(self.done, self.planned), max(self.done, self.planned), simulation.step_s)
        return SearchResult(
            simulation.plan,
            simulation,
            bound_s,
            limit,
            table,
            pareto_front(table),
            self.rejected,
            None if found is None else found.seconds,
            self.counts,
            (*simulation.notes, *self.notes),
        )

    def least_step_s(self) -> tuple[float, str]:
        """What no plan of the space can beat, and what limits it."""
        space, options = self.space, self.job.options
        held = options.get("device_layers", self.most_held())
        together = options.get("optimizer_workers", 2 if self.job.contention else 1) > 1
        bounds = []
        for size in space.microbatch_sizes:
            for num_ranks in space.num_ranks:
                limits = least_step_s(
                    self.job.cost_model(size, num_ranks),
                    num_ranks,
                    space.global_batch // size,
                    full_forward=space.full_forward and not set(space.schedules) - {"spipe"},
                    barrier=bool(options.get("barrier")) and options.get("optimizer") != "stale",
                    held_layers=held,
                    steps_together=together,
                    recompute="never" not in self.choices("recompute"),
                    stale=options.get("optimizer") == "stale",
                )
                limit = max(limits, key=lambda name: limits[name])
                bounds.append((limits[limit], limit))
        return min(bounds)

    def choices(self, name: str) -> list[Any]:
        """What an option is in this search: what was fixed, else what simulated systems set it to."""
        if name in self.job.options:
            return [self.job.options[name]]
        systems = [get_schedule(schedule) for schedule in self.space.schedules]
        return [system.published.get(name) for system in systems if system.simulated_only]

    def nothing_fits(self, refused: dict[str, int]) -> SpipeError:
        """What is short, by how much, and the nearest change."""
        model, hardware, space = self.job.model, self.job.hardware, self.space
        offered = (
            f"no plan for {model.name} on {hardware.name} (global batch {space.global_batch}, sequence "
            f"{space.sequence})"
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


def pareto_front(
    rows: Sequence[dict[str, Any]], keys: Sequence[str] = ("step_s", "rank_bytes", "host_bytes")
) -> list[dict[str, Any]]:
    """The rows that no other row beats: none is as good in all of ``keys`` (less is better) and better in one."""

    def beaten(row: dict[str, Any]) -> bool:
        return any(
            all(other[key] <= row[key] for key in keys) and any(other[key] < row[key] for key in keys) for other in rows
        )

    return [row for row in rows if not beaten(row)]


def _waves(candidates: Sequence[Candidate]) -> Iterator[Sequence[Candidate]]:
    for begin in range(0, len(candidates), WAVE):
        yield candidates[begin : begin + WAVE]
