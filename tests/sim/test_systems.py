"""Systems that only the simulator knows: their closed formulas, what they hold, and that a run refuses them."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from spipe.errors import SpipeError
from spipe.hardware import load_hardware
from spipe.memory import memory
from spipe.model import ModelSpec, load_model
from spipe.ops import Kind
from spipe.plan import Plan, make_plan
from spipe.schedules import SCHEDULES, get_schedule
from spipe.sim import simulate
from spipe.sim.cost import CostModel
from spipe.sim.pricing import Pricing


def plan(schedule: str, forward: int = 1, microbatches: int = 8, hardware: str = "ideal", **options: Any) -> Plan:
    blocks = 4 * forward
    ideal = hardware == "ideal"
    small = ModelSpec(name="equal", num_layers=blocks, hidden_size=64, ffn_size=128, num_heads=4, vocab_size=128)
    return make_plan(
        small if ideal else load_model("10b"),
        load_hardware(hardware),
        schedule=schedule,
        num_ranks=4,
        forward_stages=forward,
        backward_stages=forward,
        global_batch=microbatches,
        microbatch_size=1,
        sequence=16 if ideal else 1024,
        full_forward=True,
        layer_costs=[0.0, *[1.0] * blocks, 0.0] if ideal else None,
        precision="fp32" if ideal else "fp16",
        options=options,
    )


@pytest.mark.parametrize("microbatches", [4, 8, 12])
@pytest.mark.parametrize(
    ("schedule", "forward", "bubble"),
    [("1f1b", 1, 3), ("1f1b", 2, 3), ("pipeoffload", 2, 3), ("mobius", 2, 3), ("zb-h1", 1, 1)],
)
def test_steps_without_recompute(schedule: str, forward: int, bubble: int, microbatches: int) -> None:
    """3FM + 3(N-1), and 3M + N-1 where weight gradients fill the bubbles (Qi et al. 2023: F + B - W, not F + B + W)."""
    step = simulate(plan(schedule, forward, microbatches, recompute="never", weight_slots=None))
    expected = 3 * forward * microbatches + bubble * 3
    assert step.makespan_s == pytest.approx(expected * 1e-3)


def test_zero_bubble_holds_as_many_microbatches_as_the_first_rank_of_1f1b() -> None:
    kept = {"recompute": "never", "weight_slots": None, "hardware": "v100x4"}
    plain, split = (
        [items["saved by forwards"] for items in memory(plan(schedule, **kept)).ranks] for schedule in ("1f1b", "zb-h1")
    )
    for rank in range(4):
        assert split[rank] == plain[rank] / (4 - rank) * 4


def test_a_split_backward_takes_as_long_as_a_whole_one() -> None:
    split, whole = (plan(schedule, hardware="v100x4") for schedule in ("zb-h1", "1f1b"))

    def compute_s(chosen: Plan) -> float:
        program = chosen.program()
        pricing = Pricing(CostModel.of(chosen), program)
        kinds = (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)
        return math.fsum(pricing.price(i)[0] for i, kind in enumerate(program.kind) if kind in kinds)

    assert compute_s(split) == pytest.approx(compute_s(whole), rel=1e-9)


def test_activations_in_host_memory_make_room_on_the_gpu() -> None:
    kept, away = (
        plan("1f1b", 2, recompute="never", hardware="v100x4"),
        plan("1f1b", 2, recompute="never", stage_input_route="host", hardware="v100x4"),
    )
    assert max(memory(away).rank_bytes) < max(memory(kept).rank_bytes)
    assert sum(items["stage inputs"] for items in memory(away).hosts) > 0
    assert simulate(away).step_s >= simulate(kept).step_s * (1 - 1e-9)
    counts = Counter(away.program().kind)
    assert counts[Kind.STORE_STAGE_INPUT] == counts[Kind.LOAD_STAGE_INPUT] > 0


@pytest.mark.parametrize(("system", "like"), [("roundpipe", "spipe"), ("pipeoffload", "1f1b"), ("zb-h1", "1f1b")])
def test_a_system_is_itself_without_being_asked(system: str, like: str) -> None:
    stages = {"forward_stages": 1, "backward_stages": 1}
    made, other = (
        make_plan(
            load_model("10b"), load_hardware("v100x4"), schedule=name, global_batch=8, microbatch_size=1,
            sequence=512, precision="fp16", **stages,
        )
        for name in (system, like)
    )  # fmt: skip
    essential = get_schedule(system).essential
    assert essential
    assert all(getattr(made.options, name) == value for name, value in essential.items())
    assert made.options != other.options
    assert simulate(made).step_s != simulate(other).step_s


@pytest.mark.parametrize("schedule", ["spipe", "roundpipe", "mobius"])
def test_stale_weights_hide_the_optimizer(schedule: str) -> None:
    exact = simulate(plan(schedule, 2, hardware="v100x4"))
    stale = simulate(plan(schedule, 2, hardware="v100x4", optimizer="stale"))
    longer = simulate(plan(schedule, 2, hardware="v100x4", optimizer="stale"), num_steps=7)
    assert stale.step_s < exact.step_s
    assert stale.makespan_s == pytest.approx(exact.makespan_s)
    assert stale.step_s == pytest.approx(longer.step_s, rel=0.02)
    bubbles = stale.bubbles
    assert sum(bubbles.total().values()) == pytest.approx(bubbles.idle_s, rel=1e-9)
    assert sum(bubbles.busy_s) == pytest.approx(sum(exact.bubbles.busy_s), rel=0.02)
    assert bubbles.duration_s == pytest.approx(stale.step_s, rel=0.01)  # steps take turns in being long and short


def test_stale_weights_are_one_step_old() -> None:
    simulation = simulate(plan("roundpipe", 2, hardware="v100x4", optimizer="stale"), num_steps=5)
    program, times = simulation.program, simulation.timeline
    count = len(program)
    early = 0
    for i, kind in enumerate(program.kind):
        for d in program.carried[i] if kind == Kind.FETCH else ():
            if program.kind[d] == Kind.COMMIT:
                for step in range(2, times.num_steps):
                    assert times.start_s[step * count + i] >= times.end_s[(step - 2) * count + d]
                    early += times.start_s[step * count + i] < times.end_s[(step - 1) * count + d]
    assert early > 0


def test_messages_through_host_memory_do_not_hold_up_compute() -> None:
    def compute_s(route: str) -> float:
        chosen = plan("mobius", 2, hardware="v100x4", message_route=route)
        pricing = Pricing(CostModel.of(chosen), chosen.program())
        program = chosen.program()
        routes = [
            part for i in range(len(program)) if program.kind[i] == Kind.SEND_ACTIVATION for part in pricing.parts(i)
        ]
        assert all(bool(r.memory_accesses) == (route == "host") for r, _ in routes)
        return pricing.price(program.kind.index(Kind.FORWARD))[0]

    assert compute_s("host") < compute_s("p2p")


def test_cross_mapping_keeps_fetches_on_the_host() -> None:
    def remote_bytes(cross_mapping: bool) -> float:
        chosen = make_plan(
            load_model("30b"),
            load_hardware("v100-cluster").resized(num_hosts=2),
            schedule="spipe",
            forward_stages=2,
            backward_stages=2,
            global_batch=32,
            microbatch_size=2,
            sequence=1024,
            full_forward=True,
            layer_costs=[0.0, *[1.0] * 96, 0.0],
            precision="fp16",
            cross_mapping=cross_mapping,
        )
        program, pricing = chosen.program(), Pricing(CostModel.of(chosen), chosen.program())
        fetches = [i for i, kind in enumerate(program.kind) if kind == Kind.FETCH]
        return sum(size for i in fetches for route, size in pricing.parts(i) if route.is_remote)

    assert remote_bytes(cross_mapping=False) > 0
    assert remote_bytes(cross_mapping=True) == 0


@pytest.mark.parametrize(
    ("schedule", "options", "named"),
    [
        ("zb-h1", {}, "schedule zb-h1"),
        ("mobius", {"recompute": "never"}, "option recompute = never"),
        ("spipe", {"optimizer": "stale"}, "option optimizer = stale"),
        ("spipe", {"message_route": "host"}, "option message_route = host"),
    ],
)
def test_a_run_refuses_what_only_the_simulator_knows(
    schedule: str, options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    from spipe.runtime import run

    forward = 1 if SCHEDULES[schedule].simulated_only else 2
    with pytest.raises(SpipeError, match=f"{named}.*the runtime does not"):
        run(plan(schedule, forward, **options), steps=1, output=tmp_path / "run")


def test_pageable_memory_slows_copies_and_loads_host_memory() -> None:
    locked = plan("spipe", 2, hardware="v100x4")
    pageable = locked.hardware.override({"cpu.page_locked": False, "cpu.pageable_gb_per_s": 4})
    program = locked.program()
    fetch = program.kind.index(Kind.FETCH)
    quick, slow = (Pricing(CostModel.of(locked, hardware), program) for hardware in (locked.hardware, pageable))
    assert quick.parts(fetch)[0][0].bandwidth_bytes_per_s == pytest.approx(13.7e9)
    assert slow.parts(fetch)[0][0].bandwidth_bytes_per_s == pytest.approx(4e9)
    assert slow.parts(fetch)[0][0].memory_accesses == ((0, 3),)
    assert simulate(locked, hardware=pageable).step_s > simulate(locked).step_s


def test_bounce_buffers_slow_remote_messages() -> None:
    chosen = make_plan(
        load_model("30b"),
        load_hardware("v100-cluster").resized(num_hosts=2),
        schedule="spipe",
        forward_stages=2,
        backward_stages=6,
        global_batch=32,
        microbatch_size=2,
        sequence=1024,
        precision="fp16",
    )
    steps = [
        simulate(chosen, hardware=chosen.hardware.override(change)).step_s
        for change in (
            {},
            {"gpu_direct_rdma": False},
            {"gpu_direct_rdma": False, "staging_piece_mib": 32},
        )
    ]
    assert steps[0] < steps[1] < steps[2]


def test_zero3_in_the_form_of_a_simulated_plan() -> None:
    from spipe.metrics import CAUSES
    from spipe.sim.zero3 import zero3

    step = zero3(
        load_model("10b"),
        load_hardware("v100x4"),
        global_batch=16,
        microbatch_size=2,
        sequence=1024,
        precision="fp16",
    )
    result = step.to_json()
    assert set(result["bubbles"]) == set(CAUSES)
    assert sum(result["bubbles"].values()) == pytest.approx(result["idle_s"])
    assert sum(result["busy_s"]) + result["idle_s"] == pytest.approx(4 * step.makespan_s)
    assert result["bubbles"]["transfer"] >= 4 * step.collective_s > 0
    with pytest.raises(SpipeError, match="use a multiple of 8"):
        zero3(
            load_model("10b"),
            load_hardware("v100x4"),
            global_batch=12,
            microbatch_size=2,
            sequence=1024,
            precision="fp16",
        )
