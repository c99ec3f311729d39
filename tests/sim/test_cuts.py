"""Cuts: neighbours are layouts, retiming is exact where nothing but costs changes, descent never makes worse."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spipe.hardware import load_hardware
from spipe.model import ModelSpec
from spipe.plan import Plan, make_plan
from spipe.sim.cost import CostModel
from spipe.sim.cuts import Cuts, Freedom, Retiming, descend
from spipe.sim.pricing import op_costs
from spipe.sim.replay import Replay

MODEL = ModelSpec(name="blocks", num_layers=14, hidden_size=512, ffn_size=1024, num_heads=4, vocab_size=20_000)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, Freedom]:
    coupled = draw(st.booleans())
    full = draw(st.booleans())
    forward = draw(st.integers(1, 2))
    ranks = draw(st.integers(1, 3))
    plan = make_plan(
        MODEL,
        load_hardware("v100x4"),
        schedule="mobius" if coupled else "spipe",
        num_ranks=ranks,
        forward_stages=forward,
        backward_stages=forward if coupled else draw(st.integers(1, 4)),
        full_forward=full,
        global_batch=draw(st.integers(1, 4)),
        microbatch_size=1,
        sequence=128,
        precision="fp16",
        options={"bucket_layers": draw(st.integers(0, 1)), "barrier": draw(st.booleans())},
    )
    return plan, Freedom(coupled, plan.layout.layout().forward_stop == MODEL.num_total_layers)


def retiming(plan: Plan) -> Retiming:
    program, model = plan.program(), CostModel.of(plan)
    return Retiming(program, op_costs(model, program), model)


def recut(plan: Plan, cuts: Cuts) -> Plan:
    return make_plan(
        plan.model, plan.hardware, schedule=plan.schedule, num_ranks=plan.layout.num_ranks,
        layout=cuts.applied_to(plan.layout.layout()), global_batch=plan.global_batch, microbatch_size=1,
        sequence=plan.sequence, precision="fp16", options=plan.options.model_dump(),
    )  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(plans())
def test_neighbours_are_sound_layouts_that_differ_by_one_layer(case: tuple[Plan, Freedom]) -> None:
    plan, freedom = case
    layout = plan.layout.layout()
    own = Cuts.of(layout)
    around = list(freedom.neighbours(own))
    assert own not in around
    assert len(set(around)) == len(around)
    for cuts in around:
        moved = cuts.applied_to(layout)  # refuses what is no layout
        assert max(abs(a - b) for a, b in zip(own.backward, cuts.backward, strict=True)) <= 1
        if not freedom.full_forward:
            assert moved.forward_stop == moved.backward[-1].first
        if freedom.coupled:
            assert [s.layers for s in moved.forward] == [s.layers for s in moved.backward[: len(moved.forward)]]


def test_every_cut_is_found_once() -> None:
    # 5 layers: backward in 3 stages (6 ways), forward in 2 stages below the top one (its first layer less 1 ways)
    cuts = list(Freedom(False, False).every(Cuts((0, 1, 3), (0, 1, 3, 5))))
    assert len(set(cuts)) == len(cuts) == sum(top - 1 for middle in range(1, 5) for top in range(middle + 1, 5))
    assert len(list(Freedom(False, True).every(Cuts((0, 1, 5), (0, 1, 3, 5))))) == 6 * 4
    assert len(list(Freedom(True, False).every(Cuts((0, 1, 3), (0, 1, 3, 5))))) == 6


@settings(max_examples=30, deadline=None)
@given(plans())
def test_retiming_is_exact_for_the_programs_own_cuts(case: tuple[Plan, Freedom]) -> None:
    plan, _ = case
    own = Cuts.of(plan.layout.layout())
    timed = retiming(plan)
    assert timed.seconds([own, own])[:, 1].tolist() == timed.own.tolist()


@settings(max_examples=30, deadline=None)
@given(plans(), st.data())
def test_retiming_prices_other_cuts_as_lowering_them_does(case: tuple[Plan, Freedom], data: st.DataObject) -> None:
    """Where the new cuts lower to the same ops, their times are those of the new program."""
    plan, freedom = case
    around = list(freedom.neighbours(Cuts.of(plan.layout.layout())))
    if not around:
        return
    cuts = data.draw(st.sampled_from(around))
    other = recut(plan, cuts)
    before, after = plan.program(), other.program()
    if (before.kind, before.rank, before.dependencies, before.carried, before.partner, before.priority) != (
        after.kind, after.rank, after.dependencies, after.carried, after.partner, after.priority,
    ):  # fmt: skip
        return
    timed = retiming(plan)
    exact = Replay(after, op_costs(CostModel.of(other), after))
    estimate = timed.replay.step_s(timed.seconds([cuts]))[0]
    assert estimate == pytest.approx(exact.step_s()[0], rel=2e-3)  # copies: latencies are scaled with the bytes


@settings(max_examples=15, deadline=None)
@given(plans(), st.integers(0, 3))
def test_descent_never_makes_worse_and_is_repeatable(case: tuple[Plan, Freedom], seed: int) -> None:
    plan, freedom = case
    timed, own = retiming(plan), Cuts.of(plan.layout.layout())
    best, judged = descend(timed, freedom, own, budget=200, seed=seed, finalists=4)
    scores = timed.scores(best)
    assert scores[0] <= timed.scores([own])[0]
    assert sorted(scores) == pytest.approx(list(scores), rel=1e-8)
    assert len(set(best)) == len(best) <= 4
    assert judged <= 200
    assert descend(retiming(plan), freedom, own, budget=200, seed=seed, finalists=4) == (best, judged)


def test_no_move_of_one_or_two_layers_helps_after_descent() -> None:
    plan = make_plan(
        MODEL, load_hardware("v100x4"), num_ranks=2, forward_stages=1, backward_stages=2, global_batch=4,
        microbatch_size=1, sequence=128, precision="fp16",
    )  # fmt: skip
    freedom, timed = Freedom(False, False), retiming(plan)
    own = Cuts.of(plan.layout.layout())
    (best,), _ = descend(timed, freedom, own, budget=5000)
    near = timed.scores(list(freedom.neighbours(best)))
    assert timed.scores([best])[0] <= min(near) * (1 + 1e-9)
    pairs = {far for cuts in freedom.neighbours(best) for far in freedom.neighbours(cuts)}
    assert len(pairs) <= 256
    assert timed.scores([best])[0] <= min(timed.scores(list(pairs))) * (1 + 1e-9)
