"""Search: the fastest plan that fits, over schedules, ranks, microbatches, stages, cuts and options.

1. Candidates with balanced cuts, and on one rank such with a large top stage, are enumerated with a lower bound on
   their step time (``spipe.sim.bounds``).
2. In the order of their bounds, and in turn of every schedule, number of ranks and microbatch size, they are replayed
   without contention (``spipe.sim.replay``), until no bound is near the best time: as they are, and with as many layers
   held on accelerators as there is room for.
3. The cuts of the best, and of the best of every schedule and number of ranks, are improved, driven by the replay
   (``spipe.sim.cuts``). Where all cuts there are can be enumerated, they are instead.
4. The engine judges the finalists, contention and all, in the order of their replayed times, until none can be better.
5. Single options of the best plan are varied, and its cuts are improved once more with them.

All limits are numbers of candidates or ops, never times; and what is done next depends only on finished rounds. So the
same inputs give the same plan, for any number of processes.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import replace
from typing import Any

from spipe.check import check
from spipe.errors import SpipeError, unknown
from spipe.hardware import HardwareSpec
from spipe.layer_list import Model
from spipe.plan import require_recordable
from spipe.schedules import get_schedule
from spipe.sim.advice import no_plan
from spipe.sim.candidates import Candidate, every_cut
from spipe.sim.judge import Verdict, improved, interval_s, replayed, simulated
from spipe.sim.ledger import Ledger, Progress, Verdicts, best_of, best_s
from spipe.sim.search_result import ENDINGS, Range, SearchResult, beats, pareto_front, why_ended
from spipe.sim.shortage import LeastMemory, leanest
from spipe.sim.simulation import simulate
from spipe.sim.space import Space, make_space

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
HOPELESS = 1.002  # options that make a plan so much slower are left alone
VARIED = 3  # candidates whose options are varied, at first
WITH_INTERVAL = 8  # candidates, of the best, whose intervals are found


def search(
    model: Model,
    hardware: HardwareSpec,
    *,
    global_batch: int,
    sequence: int,
    schedules: Sequence[str] | None = None,
    num_ranks: int | Sequence[int] | None = None,
    forward_stages: int | Sequence[int] | None = None,
    backward_stages: int | Sequence[int] | None = None,
    microbatch_size: int | Sequence[int] | None = None,
    compute_threads: int | Sequence[int] = 1,
    precision: str | None = None,
    cuts: str = "improve",
    contention: bool = True,
    executor: Executor | None = None,
    progress: Progress | None = None,
    max_simulations: int = 48,
    effort: float = 1.0,
    full_forward: bool = False,
    cross_mapping: bool = False,
    max_rank_bytes: float | None = None,
    max_host_bytes: float | None = None,
    advise: bool = True,
    cuda_graphs: bool | None = None,
    **plan_fields: Any,
) -> SearchResult:
    """The fastest plan that fits.

    Args:
        global_batch: sequences per training step.
        schedules: names; None: all.
        num_ranks, forward_stages, backward_stages, microbatch_size: a value, several, or None to search. Stages are per
            rank. Ranks are searched downwards from all of them by halves: the best plan may use fewer than offered.
        compute_threads: device ``cpu``: threads of a rank's compute lane, or several numbers to choose from. How times
            shrink with threads is assumed, not measured, so that none but the given ones are tried.
        precision: None: bf16 on device ``cuda`` (fp16 if the accelerator has no bf16), fp32 on ``cpu``.
        cuts: ``improve``: move the bounds of stages where it helps, and try all where they are few; ``balanced``: only
            stages that are as equal as possible; ``all``: every way to cut, however many.
        contention: whether plans are simulated with ops that share links, memory bandwidth and cores.
        executor: processes to work in (``concurrent.futures``, ``mpi4py.futures``); None: this one. The result is the
            same for any.
        progress: see ``Progress``.
        max_simulations: at most so many candidates are simulated before options are varied.
        effort: how many candidates are looked at and improved, against the usual number; below 0.5, options are varied
            only once, and not at all where one program is more than that effort is good for.
        full_forward: forward also covers what the top backward stage recomputes anyway (the published schedule).
        cross_mapping: only plans whose ranks are in the order of ``spipe.layout.cross_mapping``; False: the search also
            tries other orders.
        max_rank_bytes, max_host_bytes: what a plan may use of an accelerator and of a host, if less than there is.
        advise: whether the error of a search that finds nothing looks for changes that would make a plan possible.
        cuda_graphs: whether stages are recorded and replayed; None: where they can be, if the hardware says what
            issuing layers takes the host, and if anything fits with what the recordings hold.
        plan_fields: further arguments of ``make_plan``; ``options`` given here are kept.

    A KeyboardInterrupt, or the end of one of the executor's processes (BrokenExecutor), ends the search with the best
    plan found so far; if there is none, it is passed on.

    Raises:
        SpipeError: naming a choice that is none.
        NoPlanError: if nothing fits: what is short, by how much, and the nearest changes, each of them tried.
    """
    if cuts not in CUTS:
        raise unknown("cuts", cuts, CUTS)
    if max_simulations < 1:
        raise SpipeError(f"max_simulations = {max_simulations} should be at least 1")
    if not 0 < effort < math.inf:
        raise SpipeError(f"effort = {effort!r} should be more than 0 and finite")
    arguments = {
        "model": model,
        "hardware": hardware,
        "global_batch": global_batch,
        "sequence": sequence,
        "schedules": schedules,
        "num_ranks": num_ranks,
        "forward_stages": forward_stages,
        "backward_stages": backward_stages,
        "microbatch_size": microbatch_size,
        "compute_threads": compute_threads,
        "precision": precision,
        "contention": contention,
        "full_forward": full_forward,
        "cross_mapping": cross_mapping,
        "max_rank_bytes": max_rank_bytes,
        "max_host_bytes": max_host_bytes,
        **plan_fields,
    }
    trained = model, plan_fields.get("dropout", 0.0), plan_fields.get("compile_layers", False)
    choices = [bool(cuda_graphs)]
    if cuda_graphs:
        require_recordable(*trained)
    elif cuda_graphs is None and hardware.device == "cuda" and hardware.accelerator.layer_issue_s:
        with suppress(SpipeError):
            require_recordable(*trained)
            choices = [True, False]
    for choice in choices:
        arguments["cuda_graphs"] = choice
        space = replace(make_space(**arguments), wide_tops=cuts == "improve")
        ledger = Ledger(space.job, executor, progress or (lambda done, total, best: None))
        refused: dict[str, int] = {}
        try:
            found = _Search(space, ledger, cuts, max_simulations, effort).run(refused)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("no plan had been found yet") from None
        if found is not None:
            return found
    raise no_plan(arguments, space, ledger, refused, advise)


class _Search:
    def __init__(self, space: Space, ledger: Ledger, cuts: str, max_simulations: int, effort: float) -> None:
        self.space, self.ledger, self.cuts = space, ledger, cuts
        self.max_simulations, self.effort = max_simulations, effort
        self.notes: list[str] = []
        self.ended = ""
        # On device cpu all lanes share the cores: without contention everything looks alike.
        job = space.job
        self.ranking = simulated if job.contention and job.hardware.device == "cpu" else replayed

    def run(self, refused: dict[str, int]) -> SearchResult | None:
        """The result; None if nothing fits. What cannot be laid out is counted by reason in ``refused``."""
        ledger = self.ledger
        candidates = self.space.candidates(refused)
        ledger.rejected += [{"reason": reason, "count": count} for reason, count in refused.items()]
        candidates = self.without_large(candidates)
        try:
            if everything := self.all_cuts(candidates):
                self.judge_all(self.without_short(everything))
            else:
                self.rank(self.without_short(candidates))
                if self.cuts == "improve" and ledger.replayed and self.small_enough():
                    families = FAMILIES[: max(2, round(self.effort * len(FAMILIES)))]
                    self.improve(_diverse(ledger.replayed, families[0]), families)
                self.judge()
            if ledger.simulated and self.small_enough():
                self.vary()
        except ENDINGS as error:
            if not (ledger.simulated or ledger.replayed):
                raise
            self.end(error, "this is the best plan found so far")
        return self.result() if ledger.simulated or ledger.replayed else None

    def small_enough(self) -> bool:
        """Whether the effort pays for many more plans like the best one, whose program may be very large."""
        ops = best_of(self.ledger.simulated or self.ledger.replayed, 1)[0].candidate.num_ops
        if ops <= self.effort * SIMULATED_OPS:
            return True
        note = (
            f"cuts and options were not varied: effort {self.effort:g} is too little for programs of {ops} ops (many "
            "microbatches); use more, or a global batch that divides into larger microbatches"
        )
        self.notes += [note] if note not in self.notes else []
        return False

    def end(self, error: BaseException, left: str) -> None:
        """Go on to the result, which is less than it could have been, in this process."""
        self.ended, self.ledger.executor = why_ended(error), None
        self.notes.append(f"{self.ended}: {left}")

    # ------------------------------------------------------------------ candidates

    def without_large(self, candidates: list[Candidate]) -> list[Candidate]:
        self.ledger.counts["enumerated"] = len(candidates)
        small = [candidate for candidate in candidates if candidate.num_ops <= MAX_OPS]
        if small and len(small) < len(candidates):
            self.notes.append(
                f"{len(candidates) - len(small)} candidates with more than about {MAX_OPS} ops were left out: small "
                "microbatches; ask for a microbatch size to include them"
            )
            return small
        return candidates

    def without_short(self, candidates: list[Candidate]) -> list[Candidate]:
        """Those that may fit; if there are none, those that need least, to say what is short."""
        least = LeastMemory(self.space.job)
        left = [candidate for candidate in candidates if least.may_fit(candidate)]
        if not left:
            left = leanest(candidates)[:WAVE]
        if count := len(candidates) - len(left):
            self.ledger.rejected.append({"reason": "short of memory with any options", "count": count})
            self.ledger.discard(count)
        return left

    def all_cuts(self, candidates: list[Candidate]) -> list[Candidate]:
        """Every cut of every candidate, best bound first; nothing if they are not wanted, or too many."""
        if self.cuts == "balanced":
            return []
        limit = MAX_CUTS if self.cuts == "improve" else None
        found: dict[Candidate, None] = {}
        for candidate in candidates:
            for other in every_cut(candidate, self.space.job.costs(candidate)):
                found[other] = None
                if limit is not None and len(found) > limit:
                    return []
        self.ledger.counts["enumerated"] = len(found)
        return sorted(found, key=lambda candidate: candidate.key)

    def judge_all(self, candidates: list[Candidate]) -> None:
        """Simulate every candidate whose bound allows it to be the best."""
        self.ledger.planned = len(candidates)
        for wave in _waves(candidates):
            left = [candidate for candidate in wave if candidate.bound_s < best_s(self.ledger.simulated)]
            self.ledger.discard(len(wave) - len(left))
            self.ledger.ask(simulated, left, self.ledger.simulated)
        held = [self.space.holding(verdict) for verdict in _diverse(self.ledger.simulated, WAVE)]
        self.ledger.ask(simulated, [candidate for candidate in held if candidate], self.ledger.simulated)

    def rank(self, candidates: list[Candidate]) -> None:
        """Replay candidates, as they are and with layers held, until no bound is near the best or it was enough."""
        ledger = self.ledger
        ledger.planned = len(candidates)
        bounds = {candidate: self.space.bound_s(candidate) for candidate in candidates}
        ordered = sorted(candidates, key=lambda candidate: (bounds[candidate], candidate.key))
        budget = _Budget(self.effort * RANKED_OPS, MIN_RANKED)
        left_out: list[Candidate] = []
        for wave in _waves(_in_turn(ordered)):
            near = [candidate for candidate in wave if bounds[candidate] < NEAR * best_s(ledger.replayed)]
            asked = [candidate for candidate in near if budget.allows(candidate)]
            if self.ranking is simulated:
                asked = asked[: max(0, self.max_simulations - len(ledger.replayed))]
            fitting = ledger.ask(self.ranking, asked, ledger.replayed)
            held = [other for verdict in fitting if (other := self.space.holding(verdict)) and budget.allows(other)]
            ledger.ask(self.ranking, held, ledger.replayed)
            left_out += [candidate for candidate in near if candidate not in asked]
            ledger.discard(len(wave) - len(asked))
        if not ledger.replayed:  # nothing fits so far: look further, at what needs less memory
            chosen = sorted(candidates, key=lambda c: (c.microbatch_size, -len(c.layout.backward), c.key))
            for wave in _waves(chosen):
                ledger.ask(self.ranking, wave, ledger.replayed)
                if ledger.replayed:
                    break
        missed = sum(bounds[candidate] < best_s(ledger.replayed) for candidate in left_out)
        if missed and ledger.replayed:
            self.notes.append(
                f"{missed} candidates that might be faster by their lower bound were not looked at; fix a choice "
                "(schedule, ranks, stages, microbatch size) to look deeper"
            )

    def improve(self, verdicts: list[Verdict], families: Sequence[int]) -> None:
        """Rounds of descent on the best candidates: fewer and fewer of them."""
        current = {verdict.candidate: verdict for verdict in verdicts}
        for round_, count in enumerate(families):
            going = sorted(current.values(), key=lambda verdict: verdict.order)[:count]
            current = {}
            asked = [verdict.candidate for verdict in going]
            for before, after in zip(asked, self.ledger.map(improved, asked, round_), strict=True):
                self.ledger.counts["ranked"] += after.ranked
                if after.candidate != before:
                    current[after.candidate] = self.ledger.replayed[after.candidate] = after
            if not current:
                return

    def judge(self) -> None:
        """Simulate the best by replay, until no other can be better; and the built-in presets that could be."""
        waiting = [verdict.candidate for verdict in best_of(self.ledger.replayed)]
        if self.ranking is simulated:
            self.ledger.simulated.update(
                (c, v) for c, v in self.ledger.replayed.items() if v.candidate.cuts != "improved"
            )
            waiting = [candidate for candidate in waiting if candidate not in self.ledger.simulated]
        ops = asked = 0
        for wave in _waves(waiting):
            left = []
            for candidate in wave:
                if self.ledger.replayed[candidate].step_s < best_s(self.ledger.simulated):
                    ops, asked = ops + candidate.num_ops, asked + 1
                    if asked <= self.max_simulations and (ops <= self.effort * SIMULATED_OPS or asked <= MIN_SIMULATED):
                        left.append(candidate)
            self.ledger.ask(simulated, left, self.ledger.simulated)
        if self.ranking is replayed and waiting:
            presets = self.space.presets(waiting[0])
            left = [preset for preset in presets if preset.bound_s < best_s(self.ledger.simulated)]
            self.ledger.ask(simulated, left, self.ledger.simulated)
        if asked > self.max_simulations:
            self.notes.append(
                f"stopped after {self.max_simulations} simulations; {asked - self.max_simulations} candidates that "
                "might be faster were only replayed without contention (max_simulations)"
            )

    def vary(self) -> None:
        """Try single options and other places for the ranks, and improve the cuts again with what was kept.

        An option that made the plan slower is not tried again together with others.
        """
        simulations = self.ledger.simulated
        useless: set[str] = set()
        for round_ in range(3 if self.effort >= 0.5 else 1):
            best = best_of(simulations, 1)[0]
            varied = {name: c for name, c in self.space.variations(best.candidate) if name not in useless}
            asked = list(varied.values())
            if not round_:  # another schedule or number of ranks may gain more
                others = [v for v in _diverse(simulations, VARIED) if best.step_s < v.step_s < NEAR * best.step_s]
                asked += [c for other in others for _, c in self.space.variations(other.candidate)]
            found: Verdicts = {}
            self.ledger.ask(simulated, asked, found)
            gain_s = 0.999 * best.step_s
            simulations |= {c: v for c, v in found.items() if v.step_s < gain_s or v.rank_bytes < best.rank_bytes}
            useless |= {name for name, c in varied.items() if c in found and found[c].step_s > HOPELESS * best.step_s}
            if best_s(simulations) >= gain_s:
                break
            self.climb()
        best = best_of(simulations, 1)[0]
        if self.cuts == "improve" and best.candidate.cuts != "all":
            known = set(self.ledger.replayed)
            self.improve([best], (1, 1))
            recut = [candidate for candidate in self.ledger.replayed if candidate not in known]
            self.ledger.ask(simulated, recut, simulations)

    def climb(self) -> None:
        """Put accelerators' memory to other uses, as long as that makes the best plan faster."""
        simulations = self.ledger.simulated
        best = best_of(simulations, 1)[0]
        while True:
            tried: Verdicts = {}
            self.ledger.ask(simulated, [candidate for _, candidate in self.space.trades(best.candidate)], tried)
            before, best = best, best_of({best.candidate: best} | tried, 1)[0]
            if best == before:
                return
            simulations[best.candidate] = best

    # ------------------------------------------------------------------ results

    def result(self) -> SearchResult:
        ledger, space, job = self.ledger, self.space, self.space.job
        for verdict in best_of(ledger.simulated or ledger.replayed):
            plan = job.plan(verdict.candidate)
            faults = check(plan.program())
            if not faults:
                break
            ledger.reject(verdict.candidate, f"the program is not sound: {faults[0]}")
            ledger.simulated.pop(verdict.candidate, None)
        else:
            raise SpipeError(f"no plan for {job.model.name} is sound: {ledger.rejected[-1]['reason']}")
        simulation = simulate(plan, contention=job.contention)
        bound_s, limit = space.least_step_s()
        metrics = simulation.predicted() | {"lower_bound_s": bound_s}
        limits = job.max_rank_bytes, job.max_host_bytes
        simulation = replace(simulation, plan=plan.replace(predicted=metrics), limits=limits)
        used, offered = verdict.candidate.num_ranks, max(space.num_ranks)
        if used < offered:
            self.notes.append(f"the plan uses {used} of the {offered} ranks offered")
        self.notes += self.without_effect(verdict.candidate)
        table = [self.row(other, plan.tokens_per_step) for other in best_of(ledger.simulated)]
        try:
            interval = self.compare(verdict, table)
        except ENDINGS as error:
            interval = None
            self.end(error, "how sure the plan's time is was not found out")
        ledger.finish(simulation.step_s)
        return SearchResult(
            simulation.plan,
            simulation,
            bound_s,
            limit,
            table,
            pareto_front(table),
            ledger.rejected,
            interval,
            ledger.counts,
            (*simulation.notes, *self.notes),
            self.ended,
        )

    def without_effect(self, best: Candidate) -> Iterator[str]:
        """What was asked for and changes nothing in the best plan."""
        job, layers = self.space.job, self.space.job.model.num_total_layers
        if self.space.cross_mapping and job.hardware.host_of(best.num_ranks - 1) == 0:
            yield "cross mapping has no effect: the plan's ranks are all on one host"
        if self.space.full_forward and not get_schedule(best.schedule).decoupled:
            yield f"full forward has no effect: the forward of {best.schedule} covers all layers anyway"
        if (held := job.options.get("device_layers") or 0) > layers:
            yield f"device_layers = {held} is more than the {layers} layers of the model: all are held"

    def row(self, verdict: Verdict, tokens: int) -> dict[str, Any]:
        job = self.space.job
        return {
            **verdict.candidate.bounded(job.costs(verdict.candidate), job.options).row(),
            "step_s": verdict.step_s,
            "tokens_per_s": tokens / verdict.step_s,
            "rank_bytes": verdict.rank_bytes,
            "host_bytes": verdict.host_bytes,
        }

    def compare(self, best: Verdict, table: list[dict[str, Any]]) -> Range | None:
        """The interval of the best plan; those of the next ones, and whether it beats them, go into their rows."""
        own = interval_s(self.space.job, best.candidate)
        if own is None:
            return None
        shown = best_of(self.ledger.simulated, WITH_INTERVAL)
        others = [found or own for found in self.ledger.map(interval_s, [verdict.candidate for verdict in shown])]
        for row, other in zip(table, others, strict=False):
            row |= {"interval_s": other, "slower": beats(own, other)}
        alike = sum(not beats(own, other) for other in others[1:])
        if alike:
            self.notes.append(
                f"{alike} of the {len(others) - 1} next best candidates have intervals that meet the plan's, "
                f"{own[0]:.4g} to {own[1]:.4g} s: by what was measured, it beats none of these"
            )
        return own


class _Budget:
    """So many ops, in programs of candidates; at least so many candidates."""

    def __init__(self, ops: float, least: int) -> None:
        self.ops, self.least = ops, least

    def allows(self, candidate: Candidate) -> bool:
        self.ops, self.least = self.ops - candidate.num_ops, self.least - 1
        return self.ops >= 0 or self.least >= 0


def _in_turn(candidates: list[Candidate]) -> list[Candidate]:
    """Alternately the next one, and the next one of those that are the best so far of their kind."""
    seen: Counter[tuple[object, ...]] = Counter()
    turns = []
    for candidate in candidates:
        kind = (*_group(candidate), candidate.microbatch_size, candidate.compute_threads)
        turns.append((seen[kind], candidate))
        seen[kind] += 1
    turns.sort(key=lambda turn: turn[0])
    pairs = zip(candidates, (candidate for _, candidate in turns), strict=True)
    return list(dict.fromkeys(candidate for pair in pairs for candidate in pair))


def _diverse(verdicts: Verdicts, count: int) -> list[Verdict]:
    """The fastest, of which half may be from groups that would not be among them."""
    ordered = best_of(verdicts)
    firsts = {_group(verdict.candidate): verdict for verdict in reversed(ordered)}
    chosen = dict.fromkeys([*ordered[: -(-count // 2)], *sorted(firsts.values(), key=lambda v: v.order), *ordered])
    return sorted(list(chosen)[:count], key=lambda verdict: verdict.order)


def _group(candidate: Candidate) -> tuple[object, ...]:
    return candidate.schedule, candidate.num_ranks


def _waves(candidates: Sequence[Candidate]) -> Iterator[Sequence[Candidate]]:
    for begin in range(0, len(candidates), WAVE):
        yield candidates[begin : begin + WAVE]


__all__ = ["CUTS", "Progress", "SearchResult", "search"]
