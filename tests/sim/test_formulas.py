"""Step times on hardware without communication cost equal the closed formulas of SPipe (PACT 2025, section 2)."""

import math

import pytest

from spipe.hardware import load_hardware
from spipe.model import ModelSpec
from spipe.plan import Plan, make_plan
from spipe.sim import simulate

SIZES = [
    (num_ranks, forward, microbatches)
    for num_ranks in (2, 4, 8)
    for forward in (1, 2)
    for microbatches in (num_ranks, 2 * num_ranks)
]
FORMULAS = {
    # (schedule, recompute, B / F): step time in units of tf, from N, F, M
    ("mobius", "late", 1): lambda n, f, m: 4 * (f * m + n - 1),
    ("1f1b", "late", 1): lambda n, f, m: 4 * (f * m + n - 1),
    ("mobius", "early", 1): lambda n, f, m: 4 * f * m + 3 * (n - 1),
    ("spipe", "late", 1): lambda n, f, m: 4 * f * m + 3 * (n - 1),
    ("spipe", "early", 1): lambda n, f, m: 4 * f * m + 2 * (n - 1),
    ("spipe", "early", 3): lambda n, f, m: 4 * f * m + n - 1,
}


def equal_stages(schedule: str, num_ranks: int, forward: int, backward: int, microbatches: int, recompute: str) -> Plan:
    """A published plan whose stages of a pass all hold the same number of blocks."""
    blocks = num_ranks * math.lcm(forward, backward)
    model = ModelSpec(name="equal", num_layers=blocks, hidden_size=64, ffn_size=128, num_heads=4, vocab_size=128)
    return make_plan(
        model,
        load_hardware("ideal"),
        schedule=schedule,
        num_ranks=num_ranks,
        forward_stages=forward,
        backward_stages=backward,
        global_batch=microbatches,
        microbatch_size=1,
        sequence=16,
        published=True,
        layer_costs=[0.0, *[1.0] * blocks, 0.0],
        options={"recompute": recompute},
    )


def makespan_in_tf(plan: Plan, num_ranks: int, forward: int) -> float:
    tf = plan.model.num_layers / (num_ranks * forward) * 1e-3
    return simulate(plan, num_steps=1).makespan_s / tf


@pytest.mark.parametrize(("num_ranks", "forward", "microbatches"), SIZES)
@pytest.mark.parametrize("case", FORMULAS, ids=lambda case: f"{case[0]}-{case[1]}-B={case[2]}F")
def test_step_time_equals_formula(case: tuple[str, str, int], num_ranks: int, forward: int, microbatches: int) -> None:
    schedule, recompute, factor = case
    plan = equal_stages(schedule, num_ranks, forward, factor * forward, microbatches, recompute)
    expected = FORMULAS[case](num_ranks, forward, microbatches)
    assert makespan_in_tf(plan, num_ranks, forward) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("case", FORMULAS, ids=lambda case: f"{case[0]}-{case[1]}-B={case[2]}F")
def test_step_time_equals_formula_on_32_ranks(case: tuple[str, str, int]) -> None:
    schedule, recompute, factor = case
    plan = equal_stages(schedule, 32, 1, factor, 32, recompute)
    assert makespan_in_tf(plan, 32, 1) == pytest.approx(FORMULAS[case](32, 1, 32), rel=1e-9)


def test_steady_state_step_equals_isolated_step_where_nothing_overlaps() -> None:
    plan = equal_stages("spipe", 4, 2, 6, 8, "early")
    simulation = simulate(plan, num_steps=3)
    assert simulation.step_s == pytest.approx(simulation.makespan_s, rel=1e-9)
    assert simulation.gpu_time_s == pytest.approx(simulation.makespan_s, rel=1e-9)
    assert simulation.makespan_s == pytest.approx(67 * 3e-3, rel=1e-9)  # N=4, F=2, M=8; three blocks a forward stage
