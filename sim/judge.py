"""Judging candidates: do they fit, how fast are they, do other cuts make them faster. Work for a search's processes.

A job and a candidate go out, a verdict comes back; both are small. Nothing here depends on what other candidates were
found to be, so that a search gives the same result for any number of processes.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from spipe.errors import SpipeError
from spipe.hardware import HardwareSpec
from spipe.layer_list import Model
from spipe.memory import MemoryReport, memory
from spipe.plan import Plan, make_plan
from spipe.sim.candidates import Candidate
from spipe.sim.cost import CostModel
from spipe.sim.cuts import Cuts, Retiming, descend
from spipe.sim.interval import interval
from spipe.sim.pricing import op_costs
from spipe.sim.replay import Replay
from spipe.sim.search_result import Range
from spipe.sim.simulation import simulate

NEIGHBOURS = (128, 3072)
"""Fewest and most neighbouring cuts that one round of improvement judges."""
MOST_FINALISTS = 16  # cuts that are lowered after a round, if their program is small
_FINALIST_OPS = 2_000
_HOST_STATE_BYTES = 12  # of a parameter, that a host need not hold if an accelerator does
_SMALL = 4000  # ops that are lowered in no time
_NEIGHBOUR_OPS = 4e7  # ops replayed in one round, within the above


@dataclass(frozen=True)
class Job:
    """What all candidates of a search have in common.

    Attributes:
        contention: whether ops share links, memory bandwidth and cores when a plan is simulated.
        options: fixed by the caller; they override a candidate's.
        plan_fields: further arguments of ``make_plan``.
        max_rank_bytes, max_host_bytes: what a plan may use of an accelerator and of a host, if less than there is.
    """

    model: Model
    hardware: HardwareSpec
    sequence: int
    contention: bool
    options: dict[str, Any] = field(default_factory=dict)
    plan_fields: dict[str, Any] = field(default_factory=dict)
    max_rank_bytes: float = math.inf
    max_host_bytes: float = math.inf

    def cost_model(
        self, microbatch_size: int, num_ranks: int, compute_threads: int = 1, options: Mapping[str, Any] | None = None
    ) -> CostModel:
        """With options, those of a candidate; without, no plan's optimizer or recompute is faster."""
        fields, chosen = self.plan_fields, {**(options or {}), **self.options}
        optimizer = chosen.get("optimizer")
        return CostModel(
            model=self.model,
            hardware=self.hardware,
            precision=fields["precision"],
            sequence=self.sequence,
            microbatch_size=microbatch_size,
            gradient_precision=fields.get("gradient_precision"),
            compute_threads=compute_threads,
            optimizer_threads=fields.get("optimizer_threads", 0),
            ranks_per_host=min(num_ranks, self.hardware.ranks_per_host),
            cuda_graphs=fields.get("cuda_graphs", False),
            keeps_undo=optimizer == "async" or (optimizer is None and options is not None),
            skips_outputs=not (chosen.get("recompute_output") or fields.get("compile_layers") or fields.get("dropout")),
        )

    def costs(self, candidate: Candidate) -> CostModel:
        return self.cost_model(
            candidate.microbatch_size, candidate.num_ranks, candidate.compute_threads, candidate.options
        )

    def plan(self, candidate: Candidate, num_microbatches: int | None = None) -> Plan:
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
            compute_threads=candidate.compute_threads,
            options={**candidate.options, **self.options},
            **self.plan_fields,
        )


@dataclass(frozen=True)
class Verdict:
    """How fast a candidate is that fits.

    Attributes:
        candidate: what was judged, with the options and cuts it got.
        step_s: of a step in steady state.
        rank_bytes, host_bytes: of the rank and the host that hold most.
        ranked: how many neighbouring cuts were judged on the way.
    """

    candidate: Candidate
    step_s: float
    rank_bytes: int
    host_bytes: int
    ranked: int = 0

    @property
    def order(self) -> tuple[Any, ...]:
        """Sort key: faster first; equals in the order of their candidates."""
        return (self.step_s, *self.candidate.key)


@dataclass(frozen=True)
class Refusal:
    """Why a candidate cannot be run.

    Attributes:
        short: the memory report, if it is refused for lack of memory.
    """

    candidate: Candidate
    reason: str
    short: MemoryReport | None = None


def replayed(job: Job, candidate: Candidate) -> Verdict | Refusal:
    """The step time without contention, if the candidate fits."""
    return _judged(job, candidate, lambda plan: _replayed_s(job, plan))


def simulated(job: Job, candidate: Candidate) -> Verdict | Refusal:
    """The step time by the engine, if the candidate fits."""
    return _judged(job, candidate, lambda plan: simulate(plan, contention=job.contention).step_s)


def improved(job: Job, candidate: Candidate, seed: int) -> Verdict:
    """Better cuts for a candidate that fits: the best of one round of descent, lowered and replayed; else its own."""
    plan = job.plan(candidate)
    program, costs = plan.program(), job.costs(candidate)
    retiming = Retiming(program, op_costs(costs, program), costs)
    best = Verdict(candidate, float(retiming.replay.step_s()[0]), *_most(memory(plan)))
    num_nodes, (fewest, most) = retiming.replay.num_nodes, NEIGHBOURS
    budget = int(min(most, max(fewest, _NEIGHBOUR_OPS / num_nodes)))
    finalists = int(min(MOST_FINALISTS, max(1, _FINALIST_OPS / num_nodes)))
    start = Cuts.of(candidate.layout)
    found, judged = descend(retiming, candidate.freedom, start, budget=budget, seed=seed, finalists=finalists)
    for cuts in found:
        if cuts != start:
            after = replayed(job, candidate.with_cuts(cuts, "improved", costs))
            if isinstance(after, Verdict) and after.step_s < best.step_s:
                best = after
    return replace(best, ranked=judged)


def interval_s(job: Job, candidate: Candidate) -> Range | None:
    """The 90 % interval of the step time of a candidate that fits; see ``spipe.sim.interval``."""
    found = interval(simulate(job.plan(candidate), contention=job.contention))
    return found.seconds if found else None


def _replayed_s(job: Job, plan: Plan) -> float:
    program = plan.program()
    return float(Replay(program, op_costs(CostModel.of(plan), program)).step_s()[0])


def fitting(job: Job, candidate: Candidate) -> tuple[Candidate, MemoryReport]:
    """The candidate, with the options that need less memory where it is short of it, and what it needs then.

    Raises:
        SpipeError: if there is no such plan.
    """
    report = _memory(job, candidate)
    for leaner in (_inputs_on_host, _no_undo_data, _held_layers):
        other = leaner(job, candidate, report)
        if other is not None:
            candidate, report = other, _memory(job, other)
    return candidate, report


def _judged(job: Job, candidate: Candidate, step_s: Callable[[Plan], float]) -> Verdict | Refusal:
    try:
        candidate, report = fitting(job, candidate)
        if not report.fits:
            return Refusal(candidate, "; ".join(report.problems), report)
        return Verdict(candidate, step_s(job.plan(candidate)), *_most(report))
    except SpipeError as error:
        return Refusal(candidate, str(error))


def _inputs_on_host(job: Job, candidate: Candidate, report: MemoryReport) -> Candidate | None:
    if "stage_input_route" in job.options or max(report.rank_bytes) <= report.rank_capacity_bytes:
        return None
    return candidate.with_options(stage_input_route="host")


def _no_undo_data(job: Job, candidate: Candidate, report: MemoryReport) -> Candidate | None:
    if "optimizer" in job.options or max(report.host_bytes) <= report.host_capacity_bytes:
        return None
    return candidate.with_options(optimizer="sync")


def _held_layers(job: Job, candidate: Candidate, report: MemoryReport) -> Candidate | None:
    """As many layers with all their state on accelerators as the host is short of."""
    short = max(report.host_bytes) - report.host_capacity_bytes
    options = {**candidate.options, **job.options}
    if short <= 0 or "device_layers" in options or options.get("bucket_layers", 1) != 1 or job.hardware.device == "cpu":
        return None
    hosts = len(report.host_bytes)
    model = job.model
    usual = model.layer_num_parameters(model.layer_kind(model.num_total_layers // 2))
    held = 1 + math.ceil(hosts * short / (_HOST_STATE_BYTES * max(1, usual)))
    if held > model.num_total_layers:
        return None
    return candidate.with_options(device_layers=held)


def _memory(job: Job, candidate: Candidate) -> MemoryReport:
    """Of the whole candidate, or, if that is too much already and much quicker to find out, with one microbatch."""
    if candidate.num_ops > _SMALL and not (report := account(job, candidate, 1)).fits:
        return report
    return account(job, candidate, candidate.num_microbatches)


def account(job: Job, candidate: Candidate, num_microbatches: int) -> MemoryReport:
    """What a candidate would need with so many microbatches."""
    return memory(job.plan(candidate, num_microbatches)).limited(job.max_rank_bytes, job.max_host_bytes)


def _most(report: MemoryReport) -> tuple[int, int]:
    return max(report.rank_bytes), max(report.host_bytes)


__all__ = ["Job", "Refusal", "Verdict", "account", "fitting", "improved", "interval_s", "replayed", "simulated"]
