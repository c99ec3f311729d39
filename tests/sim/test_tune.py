"""Tuning on machines that are not what their description says: runs are simulated on the true one."""

from collections.abc import Callable
from typing import Any

import pytest

from spipe.errors import SpipeError
from spipe.hardware import HardwareSpec, load_hardware
from spipe.model import ModelSpec
from spipe.plan import Plan, make_plan
from spipe.sim import simulate
from spipe.trace import Trace
from spipe.tune import tune

SMALL = ModelSpec(name="small", num_layers=8, hidden_size=256, ffn_size=704, num_heads=4, vocab_size=1024)
GPU = load_hardware("h200x2")
JOB: dict[str, Any] = {"global_batch": 8, "sequence": 1024}


def slower_copies() -> HardwareSpec:
    links = [
        link.replace(bandwidth_bytes_per_s=0.1 * link.bandwidth_bytes_per_s, both_directions_bytes_per_s=None)
        for link in GPU.links
    ]
    return GPU.replace(links=tuple(links))


def plan_of(**changes: Any) -> Plan:
    fields = {"forward_stages": 2, "backward_stages": 3, "microbatch_size": 1}
    return make_plan(SMALL, GPU, **JOB, **(fields | changes))  # type: ignore[arg-type]


CANDIDATES = [
    plan_of(),
    plan_of(forward_stages=1, backward_stages=1),
    plan_of(forward_stages=1, backward_stages=1, microbatch_size=4),
    plan_of(schedule="mobius", forward_stages=4, backward_stages=4, microbatch_size=2),
    plan_of(options={"device_layers": 2}),
    plan_of(options={"weight_slots": None}),
]


def runs_on(truth: HardwareSpec, seen: list[str]) -> Callable[[Plan, str], tuple[Trace, list[float]]]:
    def run(plan: Plan, name: str) -> tuple[Trace, list[float]]:
        seen.append(name)
        simulation = simulate(plan, hardware=truth, num_steps=6)
        return simulation.trace, [simulation.step_s] * 3

    return run


def best_on(hardware: HardwareSpec) -> Plan:
    """Of a few plans the one that is predicted to be the fastest."""
    return min(CANDIDATES, key=lambda plan: simulate(plan, hardware=hardware).step_s)


def true_s(plan: Plan, truth: HardwareSpec) -> float:
    return simulate(plan, hardware=truth).step_s


def test_tuning_learns_the_machine_and_finds_a_faster_plan() -> None:
    truth, seen = slower_copies(), list[str]()
    first = plan_of()
    result = tune(first, GPU, best_on, runs_on(truth, seen))
    assert result.step_s == pytest.approx(true_s(result.plan, truth))
    assert result.step_s < 0.97 * true_s(first, truth)
    assert result.first_s == pytest.approx(true_s(first, truth))
    assert result.to_json()["gain"] == pytest.approx(result.first_s / result.step_s - 1)
    last = [trial for trial in result.trials if trial.measured_s is not None][-1]
    assert last.predicted_s == pytest.approx(last.measured_s, rel=0.1), "later predictions are of the true machine"
    assert seen[: len(result.trials)] == [f"plan-{number}" for number in range(len(result.trials))]


def test_a_plan_that_stays_the_same_ends_it() -> None:
    first, seen = plan_of(), list[str]()
    result = tune(first, GPU, lambda hardware: first, runs_on(GPU, seen))
    assert (result.reason, result.plan, seen) == ("the plan stays the same", first, ["plan-0"])


def test_a_plan_that_promises_next_to_nothing_is_not_run() -> None:
    first, seen = plan_of(), list[str]()
    result = tune(first, GPU, lambda hardware: plan_of(seed=1), runs_on(GPU, seen))
    assert "the gain is not worth a run" in result.reason
    assert seen == ["plan-0"]


def test_a_lucky_run_does_not_replace_the_first_plan() -> None:
    """The other plan is the faster one once only."""
    other, first = plan_of(), plan_of(forward_stages=4, backward_stages=4, schedule="mobius")

    def run(plan: Plan, name: str) -> tuple[Trace, list[float]]:
        seconds = 0.5 if name == "plan-1" else 1.0 if plan == first else 1.1
        return simulate(plan, hardware=slower_copies(), num_steps=6).trace, [seconds] * 3

    result = tune(first, slower_copies(), lambda hardware: other, run, rounds=2)
    assert len(result.trials) == 2, result.reason
    assert (result.plan, result.step_s, result.first_s) == (first, 1.0, 1.0)
    assert result.confirmed == {"plan 0": [1.0] * 6, "plan 1": [1.1] * 6}
    assert "so the first plan stays" in result.reason


def test_the_budget_ends_it_before_a_run_that_would_be_too_long() -> None:
    now, seen = [0.0], list[str]()
    simulated = runs_on(slower_copies(), seen)

    def run(plan: Plan, name: str) -> tuple[Trace, list[float]]:
        now[0] += 10.0
        return simulated(plan, name)

    result = tune(plan_of(), GPU, best_on, run, budget_s=15.0, clock=lambda: now[0])
    assert (result.reason, seen) == ("the budget is used up", ["plan-0"])


def test_a_plan_that_fails_is_left_behind_and_the_first_must_run() -> None:
    first, truth = plan_of(), slower_copies()

    def run(plan: Plan, name: str) -> tuple[Trace, list[float]]:
        if plan != first:
            raise SpipeError("out of memory\nand more")
        return runs_on(truth, [])(plan, name)

    result = tune(first, GPU, best_on, run)
    assert result.plan == first
    assert result.trials[-1].failure == "out of memory"
    assert result.reason == "the plan stays the same"
    with pytest.raises(SpipeError, match="the plan to begin with cannot be run: out of memory"):
        tune(plan_of(seed=3), GPU, best_on, run)
