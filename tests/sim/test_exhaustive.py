"""Search against brute force: on instances small enough to try every way to cut the stages, the same optimum."""

from importlib import import_module
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spipe.hardware import load_hardware
from spipe.layout import Layout, decoupled_layout, stages_from_cuts
from spipe.memory import memory
from spipe.model import ModelSpec
from spipe.plan import make_plan
from spipe.sim import search, simulate
from spipe.sim.cost import CostModel

FIXED = {
    "weight_slots": 2, "recompute": "early", "bucket_layers": 1, "stage_input_route": "p2p", "optimizer_workers": 1,
    "device_layers": 0, "optimizer": "async",
}  # fmt: skip


@st.composite
def instances(draw: st.DrawFn) -> dict[str, Any]:
    num_ranks = draw(st.integers(1, 3))
    blocks = draw(st.integers(max(2, 2 * num_ranks - 2), 5))
    split = draw(st.booleans())
    model = ModelSpec(
        name="few",
        num_layers=blocks // 2 if split else blocks,
        split_blocks=split,
        hidden_size=draw(st.sampled_from([64, 256, 512])),
        ffn_size=draw(st.sampled_from([128, 1024])),
        num_heads=4,
        vocab_size=draw(st.sampled_from([256, 4000, 32000])),
    )
    most = model.num_total_layers // num_ranks
    return {
        "model": model,
        "hardware": load_hardware(draw(st.sampled_from(["h200x4", "rtx3090x4", "v100x4", "laptop"]))),
        "num_ranks": num_ranks,
        "forward_stages": draw(st.integers(1, min(2, most))),
        "backward_stages": draw(st.integers(1, most)),
        "global_batch": draw(st.integers(1, 5)),
        "sequence": draw(st.sampled_from([32, 256])),
        "contention": draw(st.booleans()),
    }


def brute_force(instance: dict[str, Any]) -> float:
    """The shortest step over all bounds of the forward and of the backward stages."""
    model, hardware, ranks = instance["model"], instance["hardware"], instance["num_ranks"]
    precision = "fp32" if hardware.device == "cpu" else "fp16"
    layers = model.num_total_layers
    costs = CostModel(model, hardware, precision, instance["sequence"], 1, ranks_per_host=ranks).layer_costs()
    relative = [round(cost / costs[1], 2) for cost in costs]
    backward_stages = ranks * instance["backward_stages"]
    balanced = decoupled_layout(ranks, relative, ranks * instance["forward_stages"], backward_stages)
    forward_stages = len(balanced.forward)
    best = float("inf")
    for inner in combinations(range(1, layers), backward_stages - 1):
        backward = (0, *inner, layers)
        stop = backward[-2]
        for lower in combinations(range(1, stop), forward_stages - 1) if forward_stages else [()]:
            forward = (0, *lower, stop) if forward_stages else (0,)
            if not forward_stages and stop:
                continue
            layout = Layout(
                layers,
                ranks,
                stages_from_cuts(forward, [k % ranks for k in range(forward_stages)]),
                stages_from_cuts(backward, [(backward_stages - 1 - k) % ranks for k in range(backward_stages)]),
                tuple(relative),
            )
            plan = make_plan(
                model, hardware, layout=layout, num_ranks=ranks, global_batch=instance["global_batch"],
                microbatch_size=1, sequence=instance["sequence"], options=FIXED, precision=precision,
            )  # fmt: skip
            if memory(plan).fits:
                best = min(best, simulate(plan, contention=instance["contention"]).step_s)
    return best


def found(instance: dict[str, Any], **changes: Any) -> float:
    precision = "fp32" if instance["hardware"].device == "cpu" else "fp16"
    result = search(**instance, microbatch_size=1, schedules=["spipe"], options=FIXED, precision=precision, **changes)
    assert result.lower_bound_s <= result.simulation.step_s * (1 + 1e-9)
    assert result.simulation.memory.fits
    return result.simulation.step_s


@settings(max_examples=40, deadline=None)
@given(instances())
def test_finds_the_optimum_of_every_small_instance(instance: dict[str, Any]) -> None:
    assert found(instance) == pytest.approx(brute_force(instance), rel=1e-12)


@settings(max_examples=20, deadline=None)
@given(instances())
def test_improved_cuts_are_not_far_from_the_optimum(instance: dict[str, Any]) -> None:
    """What large instances get: descent driven by replay, which may miss the best."""
    instance |= {"hardware": load_hardware("v100-ideal-host"), "contention": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module("spipe.sim.search"), "MAX_CUTS", 0)
        step_s = found(instance)
    best = brute_force(instance)
    assert best * (1 - 1e-12) <= step_s <= best * 1.05
