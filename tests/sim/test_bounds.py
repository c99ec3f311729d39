"""Bounds: nothing that the engine plays is faster, and they are near where they can be."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spipe.hardware import load_hardware
from spipe.model import ModelSpec, load_model
from spipe.plan import Plan, make_plan
from spipe.sim import simulate
from spipe.sim.bounds import least_step_s, lower_bound_s
from spipe.sim.cost import CostModel

MODEL = ModelSpec(name="small", num_layers=9, hidden_size=256, ffn_size=512, num_heads=4, vocab_size=1000)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    systems = ["spipe", "spipe", "mobius", "1f1b", "gpipe", "roundpipe", "zb-h1", "pipeoffload"]
    schedule = draw(st.sampled_from(systems))
    num_ranks = draw(st.integers(1, 4))
    kept = schedule in ("zb-h1", "pipeoffload")
    forward = 1 if schedule in ("gpipe", "zb-h1") else draw(st.integers(1, 2))
    bucket_layers = draw(st.integers(0, 2))
    optimizer = draw(st.sampled_from(["async", "sync", "stale"]))
    hardware = load_hardware(
        draw(st.sampled_from(["h200x4", "rtx3090x4", "laptop", "v100-cluster", "v100-ideal-host"]))
    )
    holding = bucket_layers == 1 and hardware.device == "cuda" and optimizer != "stale"
    return make_plan(
        MODEL.replace(
            tied_embeddings=draw(st.booleans()),
            hidden_size=draw(st.sampled_from([64, 512])),
            head_dim=16,
            vocab_size=draw(st.sampled_from([100, 50_000])),
        ),
        hardware,
        schedule=schedule,
        num_ranks=num_ranks,
        forward_stages=forward,
        backward_stages=draw(st.integers(1, 2)) if schedule in ("spipe", "roundpipe") else forward,
        global_batch=num_ranks * draw(st.integers(1, 2)) if kept or schedule == "1f1b" else draw(st.integers(1, 6)),
        microbatch_size=1,
        sequence=draw(st.sampled_from([16, 512])),
        full_forward=draw(st.booleans()),
        precision="fp16" if "fp16" in hardware.accelerator.peak_flops else "fp32",
        options={
            "stage_input_route": draw(st.sampled_from(["p2p", "host"])),
            "step_order": draw(st.sampled_from(["deadline", "arrival"])),
            "recompute": "never" if kept else draw(st.sampled_from(["early", "late"])),
            "optimizer": optimizer,
            "barrier": draw(st.booleans()) and optimizer != "stale",
            "bucket_layers": bucket_layers,
            "device_layers": draw(st.integers(0, 3)) if holding else 0,
            "optimizer_workers": draw(st.integers(1, 2)),
            "weight_slots": None if kept else draw(st.integers(1, 3)),
        },
    )


@settings(max_examples=200, deadline=None)
@given(plans(), st.booleans())
def test_no_step_is_shorter_than_the_bounds(plan: Plan, contention: bool) -> None:
    if plan.options.optimizer_workers > 1 and not contention:
        contention = True  # without it, two STEPs at a time take no longer than one
    step_s = simulate(plan, contention=contention).step_s
    costs, layout = CostModel.of(plan), plan.layout.layout()
    held, chosen = plan.options.device_layers, plan.options.model_dump()
    assert lower_bound_s(costs, layout, plan.num_microbatches, chosen) <= step_s * (1 + 1e-9)
    limits = least_step_s(
        costs, layout.num_ranks, plan.num_microbatches,
        full_forward=layout.forward_stop == layout.num_layers, barrier=plan.options.barrier, held_layers=held,
        steps_together=plan.options.optimizer_workers > 1, recompute=plan.options.recompute != "never",
        stale=plan.options.optimizer == "stale",
    )  # fmt: skip
    for limit, seconds in limits.items():
        assert seconds <= step_s * (1 + 1e-9), limit


def test_several_steps_of_ranks_that_do_not_divide_the_cores_keep_to_the_bound() -> None:
    """32 cores, three ranks, two STEPs of each at a time, and nothing else that takes any time."""
    plan = make_plan(
        load_model("tiny"), load_hardware("v100-ideal-host"), schedule="gpipe", num_ranks=3, forward_stages=1,
        backward_stages=1, global_batch=1, microbatch_size=1, sequence=16, precision="fp16",
        options={"optimizer": "stale", "optimizer_workers": 2},
    )  # fmt: skip
    limits = least_step_s(CostModel.of(plan), 3, 1, stale=True)
    assert limits["optimizer"] == max(limits.values())
    assert simulate(plan).step_s >= limits["optimizer"] * (1 - 1e-9)


def test_the_bound_of_one_rank_is_its_compute_and_the_turn() -> None:
    hardware = load_hardware("v100-ideal-host")
    model = load_model("llama2-7b")
    plan = make_plan(
        model, hardware, num_ranks=1, forward_stages=8, backward_stages=16, global_batch=32, microbatch_size=4,
        sequence=1024, precision="fp16",
    )  # fmt: skip
    step_s = simulate(plan, contention=False).step_s
    bound = max(least_step_s(CostModel.of(plan), 1, 8).values())
    assert 0.6 * step_s < bound <= step_s


@pytest.mark.parametrize(("barrier", "full_forward"), [(True, True), (False, False)])
def test_tighter_rules_never_lower_the_bound(barrier: bool, full_forward: bool) -> None:
    model = CostModel(load_model("10b"), load_hardware("v100x4"), "fp16", 1024, 2, ranks_per_host=4)
    free = least_step_s(model, 4, 8)
    bound = least_step_s(model, 4, 8, barrier=barrier, full_forward=full_forward)
    assert all(bound[name] >= free[name] for name in free)
    fewer = least_step_s(model, 2, 8)
    assert all(fewer[name] >= free[name] * (1 - 1e-12) for name in free)
