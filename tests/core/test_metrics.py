"""Metrics: idle intervals of hand-made timelines go to the right cause, and causes sum to idleness."""

import math

import pytest

from spipe.errors import SpipeError
from spipe.layout import Layout, Stage
from spipe.lower import lower
from spipe.metrics import CAUSES, analyse, median_step_s, step_times
from spipe.ops import Kind
from spipe.options import Options
from spipe.program import Program
from spipe.schedules import breadth_first
from spipe.trace import Trace

COST = {Kind.FORWARD: 1.0, Kind.RECOMPUTE: 1.0, Kind.BACKWARD: 2.0}


def program() -> Program:
    layout = Layout(4, 2, (Stage(0, 2, 0), Stage(2, 3, 1)), (Stage(0, 2, 1), Stage(2, 3, 0), Stage(3, 4, 0)))
    return lower(layout, breadth_first(layout, 2), 2, Options())


def replay(program: Program, costs: dict[Kind, float], num_steps: int = 1) -> Trace:
    """Every op as early as its dependencies and its lane allow."""
    trace = Trace.empty(program, "simulated")
    lane_end: dict[tuple[int, int], float] = {}
    previous: list[float] = []
    for step in range(num_steps):
        end = [0.0] * len(program)
        group_ready: dict[int, float] = {}
        for i in range(len(program)):
            ready = max(
                [end[d] for d in program.dependencies[i]] + [previous[d] for d in program.carried[i] if step] + [0]
            )
            group_ready[i] = ready
        # Ops are in topological order; messages and collectives start when all of their ops are ready.
        for i in range(len(program)):
            group = [i]
            if program.partner[i] >= 0:
                group.append(program.partner[i])
            elif program.kind[i] == Kind.VALIDATE:
                group = [j for j in range(len(program)) if program.kind[j] == Kind.VALIDATE]
            ready = {
                j: max(
                    [end[d] for d in program.dependencies[j]] + [previous[d] for d in program.carried[j] if step] + [0]
                )
                for j in group
            }
            if i != max(group):
                continue
            lanes = {(program.lane[j], program.rank[j]) for j in group}
            start = max([*ready.values(), *(lane_end.get(lane, 0.0) for lane in lanes)])
            finish = start + costs.get(Kind(program.kind[i]), 0.0)
            for j in group:
                end[j] = finish
                trace.add(step, j, ready[j], start, finish)
            lane_end.update(dict.fromkeys(lanes, finish))
        previous = end
    return trace


SLOW = {
    "transfer": {
        Kind.RECV_ACTIVATION: 3.0,
        Kind.RECV_GRADIENT: 3.0,
        Kind.SEND_ACTIVATION: 3.0,
        Kind.SEND_GRADIENT: 3.0,
    },
    "weight fetch": {Kind.FETCH: 5.0},
    "stage input": {Kind.SEND_STAGE_INPUT: 20.0, Kind.RECV_STAGE_INPUT: 20.0},
    "gradient push": {Kind.OFFLOAD_GRAD: 4.0},
    "optimizer": {Kind.STEP: 9.0},
}


@pytest.mark.parametrize("cause", SLOW)
@pytest.mark.parametrize("num_steps", [1, 3])
def test_what_is_slow_is_named_and_is_zero_when_it_is_fast(cause: str, num_steps: int) -> None:
    fast = analyse(program(), replay(program(), COST, num_steps), num_steps - 1).total()
    slow = analyse(program(), replay(program(), COST | SLOW[cause], num_steps), num_steps - 1).total()
    assert fast[cause] == 0
    assert slow[cause] > 0
    assert all(slow[other] == 0 for other in SLOW if other != cause)


@pytest.mark.parametrize("cause", SLOW)
@pytest.mark.parametrize("num_steps", [1, 3])
def test_causes_sum_to_idleness(cause: str, num_steps: int) -> None:
    metrics = analyse(program(), replay(program(), COST | SLOW[cause], num_steps), num_steps - 1)
    for busy, bubbles in zip(metrics.busy_s, metrics.bubbles, strict=True):
        assert set(bubbles) == set(CAUSES)
        assert math.isclose(busy + math.fsum(bubbles.values()), metrics.duration_s, rel_tol=1e-12)
        assert min(bubbles.values()) >= 0


def test_a_pipeline_alone_has_fill_drain_and_upstream_only() -> None:
    metrics = analyse(program(), replay(program(), COST), 0)
    assert {cause for cause, seconds in metrics.total().items() if seconds} <= {"fill", "drain", "upstream"}
    assert metrics.bubbles[1]["fill"] == 1.0


def test_step_times_are_distances_of_verdicts() -> None:
    trace = replay(program(), COST | {Kind.STEP: 0.5}, 6)
    times = step_times(program(), trace)
    assert list(times) == [1, 2, 3, 4, 5]
    assert median_step_s(program(), trace) == pytest.approx(times[5])
    assert analyse(program(), trace, 5).duration_s == pytest.approx(times[5])


def test_too_few_steps_are_refused_with_the_number() -> None:
    with pytest.raises(SpipeError, match="has 2 steps"):
        median_step_s(program(), replay(program(), COST, 2))


def test_an_incomplete_step_is_refused() -> None:
    with pytest.raises(SpipeError, match=r"0 of \d+ ops of step 4"):
        analyse(program(), replay(program(), COST, 2), 4)


def test_tokens_that_come_after_the_weights_do_not_hide_the_optimizer() -> None:
    """On a GPU a small copy stands behind the weights' in the queue, and so it ends last after a barrier."""
    layout = Layout(4, 1, (Stage(0, 4, 0),), (Stage(0, 4, 0),))
    options = Options(optimizer="sync", barrier=True, bucket_layers=0)
    program = lower(layout, breadth_first(layout, 2), 2, options)
    costs = COST | {Kind.STEP: 5.0, Kind.FETCH: 0.25, Kind.LOAD_TOKENS: 0.5}
    bubbles = analyse(program, replay(program, costs, num_steps=2), 1).total()
    assert bubbles["optimizer"] == pytest.approx(5.0 * sum(kind == Kind.STEP for kind in program.kind))
    assert bubbles["host issue"] == pytest.approx(0.5)
