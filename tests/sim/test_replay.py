"""Replay: the same times as the engine without contention, for one set of costs and for many."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spipe.hardware import load_hardware
from spipe.model import ModelSpec
from spipe.plan import Plan, make_plan
from spipe.sim import simulate
from spipe.sim.cost import CostModel
from spipe.sim.engine import play
from spipe.sim.pricing import OpCosts, op_costs
from spipe.sim.replay import Replay

MODEL = ModelSpec(name="small", num_layers=9, hidden_size=256, ffn_size=512, num_heads=4, vocab_size=1000)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    schedule = draw(st.sampled_from(["spipe", "spipe", "mobius", "1f1b", "gpipe", "roundpipe", "zb-h1", "pipeoffload"]))
    num_ranks = draw(st.integers(1, 4))
    kept = schedule in ("zb-h1", "pipeoffload")
    forward = 1 if schedule in ("gpipe", "zb-h1") else draw(st.integers(1, 2))
    backward = draw(st.integers(1, 2)) if schedule in ("spipe", "roundpipe") else forward
    microbatches = num_ranks * draw(st.integers(1, 2)) if kept or schedule == "1f1b" else draw(st.integers(1, 6))
    return make_plan(
        MODEL.replace(tied_embeddings=draw(st.booleans())),
        load_hardware(draw(st.sampled_from(["h200x4", "rtx3090x4", "laptop", "v100-cluster"]))),
        schedule=schedule,
        num_ranks=num_ranks,
        forward_stages=forward,
        backward_stages=backward,
        global_batch=microbatches,
        microbatch_size=1,
        sequence=64,
        published=draw(st.booleans()),
        precision="fp32",
        options={
            "stage_input_route": draw(st.sampled_from(["p2p", "host"])),
            "step_order": draw(st.sampled_from(["deadline", "arrival"])),
            "recompute": "never" if kept else draw(st.sampled_from(["early", "late"])),
            "optimizer": draw(st.sampled_from(["async", "sync"])),
            "barrier": draw(st.booleans()),
            "bucket_layers": draw(st.integers(0, 3)),
            "optimizer_workers": draw(st.integers(1, 2)),
            "weight_slots": None if kept else draw(st.integers(1, 3)),
        },
    )


def costs_of(plan: Plan) -> OpCosts:
    return op_costs(CostModel.of(plan), plan.program())


@settings(max_examples=150, deadline=None)
@given(plans(), st.integers(1, 3))
def test_gives_the_engines_times_to_the_last_bit(plan: Plan, num_steps: int) -> None:
    program, costs = plan.program(), costs_of(plan)
    assert Replay(program, costs).timeline(num_steps) == play(program, costs, num_steps, contention=False)


@settings(max_examples=40, deadline=None)
@given(plans(), st.randoms(use_true_random=False))
def test_columns_are_replayed_as_if_alone(plan: Plan, random: Random) -> None:
    program, costs = plan.program(), costs_of(plan)
    factors = [[random.uniform(0.2, 5.0) for _ in program.kind] for _ in range(3)]
    for factor in factors:  # both halves of a message, and all of a collective, cost the same
        leader = Replay(program, costs).node
        first = {node: i for i, node in reversed(list(enumerate(leader)))}
        factor[:] = [factor[first[node]] for node in leader]
    own = Replay(program, costs)
    columns = np.array([[costs.seconds[i] * factor[i] for factor in factors] for i in own.leaders])
    together = [(start.copy(), end.copy()) for start, end in own.steps(columns, 2)]
    for column, factor in enumerate(factors):
        changed = OpCosts(
            [s * f for s, f in zip(costs.seconds, factor, strict=True)], costs.flows, costs.issue_s, costs.capacities
        )
        alone = play(program, changed, 2, contention=False)
        ends = np.concatenate([end[own.node, column] for _, end in together])
        assert ends.tolist() == list(alone.end_s)


@settings(max_examples=40, deadline=None)
@given(plans())
def test_gives_the_engines_step_time(plan: Plan) -> None:
    replayed = Replay(plan.program(), costs_of(plan)).step_s(num_steps=3)
    assert replayed[0] == pytest.approx(simulate(plan, contention=False).step_s, rel=1e-9)
