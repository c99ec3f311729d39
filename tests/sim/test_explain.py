"""Explanations, and what holds for every prediction: conservation, scaling, soundness of the systems' programs."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spipe.check import check
from spipe.hardware import HardwareSpec, load_hardware
from spipe.model import load_model
from spipe.ops import Kind
from spipe.plan import Plan, make_plan
from spipe.sim import simulate
from spipe.sim.cost import CostModel
from spipe.sim.explain import explain
from spipe.sim.pricing import Pricing
from spipe.sim.zero3 import zero3, zero3_program


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    schedule = draw(st.sampled_from(["spipe", "mobius", "1f1b"]))
    forward = draw(st.integers(1, 2))
    return make_plan(
        load_model("tiny"),
        load_hardware(draw(st.sampled_from(["v100x4", "rtx3090x4", "h200x2"]))),
        schedule=schedule,
        num_ranks=2,
        forward_stages=forward,
        backward_stages=draw(st.integers(1, 3)) if schedule == "spipe" else forward,
        global_batch=2 * draw(st.integers(1, 3)),
        microbatch_size=1,
        sequence=128,
        precision="fp16",
        published=draw(st.booleans()),
        options={
            "stage_inputs": draw(st.sampled_from(["async", "sync"])),
            "optimizer_workers": draw(st.integers(1, 3)),
            "weight_slots": draw(st.integers(1, 3)),
        },
    )


@settings(max_examples=40, deadline=None)
@given(plans())
def test_programs_are_sound_with_synchronous_stage_inputs_and_several_workers(plan: Plan) -> None:
    assert check(plan.program()) == []


@settings(max_examples=15, deadline=None)
@given(plans())
def test_the_critical_path_is_as_long_as_a_step(plan: Plan) -> None:
    for num_steps in (1, 3):
        simulation = simulate(plan, num_steps=num_steps)
        found = explain(simulation)
        assert math.fsum(found.shares.values()) == pytest.approx(simulation.step_s, rel=1e-9)
    assert all(segment.seconds >= 0 for segment in found.path)
    assert found.resource in next(found.words())
    assert [change["gain"] for change in found.changes] == sorted((c["gain"] for c in found.changes), reverse=True)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "spipe"])
def test_the_words_tell_the_whole_critical_path(schedule: str) -> None:
    stages = {} if schedule == "spipe" else {"forward_stages": 1, "backward_stages": 1}
    plan = make_plan(
        load_model("10b"), load_hardware("v100x4"), schedule=schedule, global_batch=16, microbatch_size=2,
        sequence=1024, precision="fp16", **stages,
    )  # fmt: skip
    found = explain(simulate(plan))
    lines = [line for line in found.words() if line.startswith("  ")]
    told = sum(float(line.split()[-2]) for line in lines)
    assert told == pytest.approx(sum(found.shares.values()), rel=2e-3)
    assert len(lines) == len(set(lines)) <= 9
    assert ("recompute" in " ".join(lines)) == (schedule != "zb-h1")


def test_the_resource_that_limits_is_the_one_worth_buying() -> None:
    plan = make_plan(
        load_model("10b"),
        load_hardware("v100x4"),
        global_batch=16,
        microbatch_size=2,
        sequence=1024,
        published=True,
        precision="fp16",
    )
    found = explain(simulate(plan))
    assert "optimizer" in found.resource
    assert "cores" in found.changes[0]["change"]


def test_what_overlaps_with_compute_does_not_limit() -> None:
    """Without a barrier the optimizer works on while the next step computes; alone, a step would wait for it."""
    plan = make_plan(
        load_model("10b"),
        load_hardware("v100x4"),
        global_batch=64,
        microbatch_size=2,
        sequence=1024,
        precision="fp16",
    )
    found = explain(simulate(plan))
    assert "compute" in found.resource
    assert "accelerators" in found.changes[0]["change"]


def twice_as_fast(hardware: HardwareSpec) -> HardwareSpec:
    accelerator, cpu = hardware.accelerator, hardware.cpu
    links = tuple(
        link.replace(
            bandwidth_bytes_per_s=2 * link.bandwidth_bytes_per_s,
            both_directions_bytes_per_s=link.both_directions_bytes_per_s and 2 * link.both_directions_bytes_per_s,
            latency_s=link.latency_s / 2,
        )
        for link in hardware.links
    )
    return hardware.replace(
        links=links,
        accelerator=accelerator.replace(
            peak_flops={dtype: 2 * flops for dtype, flops in accelerator.peak_flops.items()},
            memory_bandwidth_bytes_per_s=2 * accelerator.memory_bandwidth_bytes_per_s,
            launch_overhead_s=accelerator.launch_overhead_s / 2,
        ),
        cpu=cpu.replace(
            adam_parameters_per_s=2 * cpu.adam_parameters_per_s,
            adam_s_per_op=cpu.adam_s_per_op / 2,
            memory_bandwidth_bytes_per_s=2 * cpu.memory_bandwidth_bytes_per_s,
        ),
    )


@settings(max_examples=20, deadline=None)
@given(plans())
def test_everything_twice_as_fast_takes_half_as_long(plan: Plan) -> None:
    fast = simulate(plan, hardware=twice_as_fast(plan.hardware))
    assert fast.step_s == pytest.approx(simulate(plan).step_s / 2, rel=1e-6)


@settings(max_examples=20, deadline=None)
@given(plans())
def test_the_bytes_that_travel_are_those_of_the_ops(plan: Plan) -> None:
    program, model = plan.program(), CostModel.of(plan)
    pricing = Pricing(model, program)
    moved: dict[Kind, float] = dict.fromkeys(Kind, 0.0)
    for i, kind in enumerate(program.kind):
        parts = pricing.parts(i)
        moved[Kind(kind)] += math.fsum(size for _, size in parts)
        for route, size in parts:  # every edge of the route carries all bytes of the part
            uses = pricing.uses([(route, size)], 1.0)
            assert all(uses[edge] == size for edge in set(route.edges))
    assert moved[Kind.OFFLOAD_GRAD] == 2 * sum(model.num_parameters(s.layers) for s in program.layout.backward)
    fetched = [i for i, kind in enumerate(program.kind) if kind == Kind.FETCH]
    assert moved[Kind.FETCH] == 2 * sum(model.num_parameters(pricing.bucket(i)) for i in fetched)
    sends = sum(kind == Kind.SEND_ACTIVATION for kind in program.kind)
    assert moved[Kind.SEND_ACTIVATION] == sends * model.boundary_bytes()


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_zero3_is_sound_and_needs_more_time_on_more_hosts_with_a_slow_network(microbatches: int) -> None:
    assert check(zero3_program(load_model("tiny"), microbatches)) == []
    cluster = load_hardware("v100-cluster")
    one, two = (
        zero3(
            load_model("10b"),
            cluster.resized(num_hosts=hosts),
            global_batch=8 * hosts * microbatches,
            microbatch_size=2,
            sequence=1024,
            precision="fp16",
        ).makespan_s
        for hosts in (1, 2)
    )
    assert one > 0
    assert two < 2 * one


def test_resident_weights_are_a_parameter_of_1f1b() -> None:
    def fetches(weight_slots: int) -> int:
        plan = make_plan(
            load_model("tiny"),
            load_hardware("v100x4"),
            schedule="1f1b",
            num_ranks=2,
            forward_stages=2,
            backward_stages=2,
            global_batch=4,
            microbatch_size=1,
            sequence=128,
            precision="fp16",
            options={"weight_slots": weight_slots, "bucket_layers": 0},
        )
        return sum(kind == Kind.FETCH for kind in plan.program().kind)

    assert fetches(2) == 4 < fetches(1)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.integers(1, 2), st.integers(1, 3), st.integers(1, 5))
def test_roundpipe_is_sound_and_deals_stages_round_robin(ranks: int, forward: int, backward: int, batch: int) -> None:
    plan = make_plan(
        load_model("tiny").replace(num_layers=12),
        load_hardware("v100x4"),
        schedule="roundpipe",
        num_ranks=ranks,
        forward_stages=forward,
        backward_stages=backward,
        global_batch=batch,
        microbatch_size=1,
        sequence=128,
        precision="fp16",
        published=True,
    )
    program = plan.program()
    assert check(program) == []
    layout = program.layout
    assert layout.forward_stop == layout.backward[-1].first  # the last stage is run once, forward and backward
    dealt = [stage.rank for stage in (*layout.forward, *reversed(layout.backward))]
    if len(layout.forward) == ranks * forward:
        assert dealt == [k % ranks for k in range(len(dealt))]
    sends = {Kind.SEND_STAGE_INPUT, Kind.RECV_STAGE_INPUT}
    assert not sends & {Kind(kind) for kind in program.kind}
    assert simulate(plan).step_s > 0
