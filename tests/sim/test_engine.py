"""Engine: what holds for every simulated program, with and without shared resources."""

import dataclasses
import time
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spipe.errors import SpipeError
from spipe.hardware import HardwareSpec, load_hardware
from spipe.model import ModelSpec, load_model
from spipe.ops import COMPUTE, Kind
from spipe.plan import Plan, make_plan
from spipe.program import Program
from spipe.sim import simulate
from spipe.sim.cost import CostModel
from spipe.sim.engine import Timeline, play
from spipe.sim.pricing import OpCosts, op_costs

MODEL = ModelSpec(name="small", num_layers=9, hidden_size=256, ffn_size=512, num_heads=4, vocab_size=1000)


@st.composite
def plans(draw: st.DrawFn, hardware: tuple[str, ...] = ("h200x4", "rtx3090x4", "laptop", "v100-cluster")) -> Plan:
    name = draw(st.sampled_from(hardware))
    schedule = draw(st.sampled_from(["spipe", "mobius", "1f1b"]))
    num_ranks = draw(st.integers(1, 4))
    forward = draw(st.integers(1, 2))
    backward = draw(st.integers(1, 2)) if schedule == "spipe" else forward
    microbatches = num_ranks * draw(st.integers(1, 2)) if schedule == "1f1b" else draw(st.integers(1, 6))
    return make_plan(
        MODEL,
        load_hardware(name),
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
            "recompute": draw(st.sampled_from(["early", "late"])),
        },
    )


def priced(plan: Plan, hardware: HardwareSpec | None = None) -> tuple[Program, OpCosts]:
    program = plan.program()
    return program, op_costs(CostModel.of(plan, hardware), program)


@settings(max_examples=40, deadline=None)
@given(plans(), st.booleans(), st.integers(1, 3))
def test_ops_wait_for_their_dependencies_and_lanes_keep_their_order(
    plan: Plan, contention: bool, num_steps: int
) -> None:
    program, costs = priced(plan)
    times = play(program, costs, num_steps, contention=contention)
    count = len(program)
    for step in range(num_steps):
        base = step * count
        for i in range(count):
            ready = [times.end_s[base + d] for d in program.dependencies[i]]
            ready += [times.end_s[base - count + d] for d in program.carried[i]] if step else []
            assert times.ready_s[base + i] == max(ready, default=0.0)
            assert times.start_s[base + i] >= times.ready_s[base + i]
            assert times.end_s[base + i] >= times.start_s[base + i]
            if program.partner[i] >= 0:
                assert times.start_s[base + i] == times.start_s[base + program.partner[i]]
                assert times.end_s[base + i] == times.end_s[base + program.partner[i]]
    for lane in range(len(program.lanes)):
        queue = [step * count + i for step in range(num_steps) for i in program.of_lane(lane)]
        if program.lanes[lane].discipline == "deadline":
            queue.sort(key=lambda k: (times.start_s[k], times.end_s[k]))
        rows = [k for k in queue if not 0 <= program.partner[k % count] < k % count]
        for before, after in pairwise(rows):
            assert times.end_s[before] <= times.start_s[after]
    for members in program.collectives():
        assert len({times.start_s[i] for i in members}) == len({times.end_s[i] for i in members}) == 1


@settings(max_examples=25, deadline=None)
@given(plans())
def test_without_contention_every_op_takes_its_own_seconds(plan: Plan) -> None:
    program, costs = priced(plan)
    times = play(program, costs, 2, contention=False)
    for k, (start, end) in enumerate(zip(times.start_s, times.end_s, strict=True)):
        assert end - start == pytest.approx(costs.seconds[k % len(program)], rel=1e-9, abs=1e-12)


@settings(max_examples=25, deadline=None)
@given(plans())
def test_contention_never_makes_an_op_faster(plan: Plan) -> None:
    program, costs = priced(plan)
    times = play(program, costs, 2)
    for k, (start, end) in enumerate(zip(times.start_s, times.end_s, strict=True)):
        assert end - start >= costs.seconds[k % len(program)] * (1 - 1e-6) - 1e-12


@settings(max_examples=20, deadline=None)
@given(plans(("h200x4", "rtx3090x4")))
def test_compute_lanes_are_busy_for_the_sum_of_their_costs(plan: Plan) -> None:
    simulation = simulate(plan, num_steps=2)
    program, costs = priced(plan)
    for rank, busy in enumerate(simulation.bubbles.busy_s):
        expected = sum(costs.seconds[i] for i in program.of_rank(rank) if program.kind[i] in COMPUTE)
        assert busy == pytest.approx(expected, rel=1e-6)
    idle = sum(simulation.bubbles.total().values())
    assert idle == pytest.approx(simulation.bubbles.idle_s, rel=1e-9, abs=1e-9)


@settings(max_examples=20, deadline=None)
@given(plans(), st.booleans())
def test_twice_the_costs_take_twice_as_long(plan: Plan, contention: bool) -> None:
    program, costs = priced(plan)
    twice = OpCosts(
        [2 * seconds for seconds in costs.seconds],
        [flow and dataclasses.replace(flow, work=2 * flow.work) for flow in costs.flows],
        2 * costs.issue_s,
        costs.capacities,
    )
    once = play(program, costs, 2, contention=contention)
    assert play(program, twice, 2, contention=contention).end_s == pytest.approx(
        [2 * end for end in once.end_s], rel=1e-9
    )


@settings(max_examples=10, deadline=None)
@given(plans())
def test_the_same_plan_gives_the_same_times(plan: Plan) -> None:
    program, costs = priced(plan)
    assert play(program, costs, 2) == play(program, costs, 2)


@settings(max_examples=20, deadline=None)
@given(plans(("h200x4", "v100-cluster", "rtx3090x4")), st.integers(0, 5))
def test_faster_hardware_is_not_slower_without_contention(plan: Plan, part: int) -> None:
    hardware = plan.hardware
    faster = [
        hardware.override({"accelerator.peak_flops.fp32": 1e15}),
        hardware.override({"cpu.adam_parameters_per_s": 1e12}),
        hardware.replace(
            links=tuple(
                link.replace(bandwidth_bytes_per_s=1e13, both_directions_bytes_per_s=None) for link in hardware.links
            )
        ),
        hardware.replace(links=tuple(link.replace(latency_s=0.0) for link in hardware.links)),
        hardware.override({"accelerator.memory_bandwidth_bytes_per_s": 1e15, "accelerator.launch_overhead_s": 0.0}),
        hardware.override({"cpu.memory_bandwidth_bytes_per_s": 1e14}),
    ][part]
    in_order = plan.replace(options=plan.options.replace(step_order="arrival"))
    before = simulate(in_order, contention=False).makespan_s
    assert simulate(in_order, hardware=faster, contention=False).makespan_s <= before * (1 + 1e-9)


def test_the_most_urgent_ready_step_goes_first() -> None:
    plan = make_plan(
        load_model("tiny"),
        load_hardware("h200x1").override({"cpu.adam_parameters_per_s": 1e6}),
        forward_stages=1,
        backward_stages=4,
        global_batch=2,
        microbatch_size=1,
        sequence=64,
    )
    program, costs = priced(plan)
    times = play(program, costs)
    steps = sorted((i for i, kind in enumerate(program.kind) if kind == Kind.STEP), key=lambda i: times.start_s[i])
    for position, i in enumerate(steps):
        for other in steps[position + 1 :]:
            waiting = times.ready_s[other] < times.start_s[i]
            assert not waiting or program.priority[i] <= program.priority[other]


def test_the_host_issues_an_op_only_so_fast() -> None:
    hardware = load_hardware("h200x1").override({"accelerator.launch_overhead_ms": 5.0})
    plan = make_plan(
        load_model("tiny"),
        hardware,
        forward_stages=1,
        backward_stages=1,
        global_batch=16,
        microbatch_size=1,
        sequence=32,
    )
    simulation = simulate(plan)
    assert simulation.step_s >= 16 * 2 * 5e-3
    causes = simulation.bubbles.total()
    assert causes["host issue"] > 0.8 * simulation.bubbles.idle_s


def test_ops_that_can_never_start_are_named() -> None:
    plan = make_plan(
        load_model("tiny"), load_hardware("h200x2"), forward_stages=1, backward_stages=1,
        global_batch=2, microbatch_size=1, sequence=32,
    )  # fmt: skip
    program, costs = priced(plan)
    first = next(i for i, kind in enumerate(program.kind) if kind == Kind.FORWARD)
    last = next(i for i, kind in enumerate(program.kind) if kind == Kind.VALIDATE)
    dependencies = list(program.dependencies)
    dependencies[first] = (*dependencies[first], last)
    with pytest.raises(SpipeError, match="FORWARD F0 m0 of rank 0"):
        play(dataclasses.replace(program, dependencies=dependencies), costs)


def test_cores_are_shared_out_when_there_are_too_few() -> None:
    laptop = load_hardware("laptop")
    plan = make_plan(
        load_model("tiny"), laptop, schedule="gpipe", num_ranks=4, forward_stages=1, backward_stages=1,
        global_batch=32, microbatch_size=1, sequence=128, precision="fp32",
    )  # fmt: skip
    one_core = laptop.override({"cpu.cores": 1})
    plenty = simulate(plan, hardware=laptop.override({"cpu.cores": 64}))
    work = sum(plenty.bubbles.busy_s)
    assert simulate(plan, hardware=one_core).step_s >= work
    assert plenty.step_s == pytest.approx(simulate(plan, contention=False).step_s, rel=0.05)


@pytest.mark.parametrize(("contention", "ops_per_s"), [(False, 30_000), (True, 10_000)])
def test_speed(contention: bool, ops_per_s: float) -> None:
    """A guard against accidents: several times slower than an idle core."""
    plan = make_plan(
        load_model("10b"), load_hardware("rtx3090x4"), global_batch=64, microbatch_size=1, sequence=1024,
        precision="fp16",
    )  # fmt: skip
    program, costs = priced(plan)
    start = time.process_time()
    timeline: Timeline = play(program, costs, 2, contention=contention)
    assert len(timeline.end_s) / (time.process_time() - start) > ops_per_s


def test_every_kind_of_op_is_priced() -> None:
    plan = make_plan(
        load_model("tiny"), load_hardware("rtx3090x4"), global_batch=4, microbatch_size=1, sequence=64,
        precision="fp16", forward_stages=1, backward_stages=2, options={"stage_input_route": "host"},
    )  # fmt: skip
    program, costs = priced(plan)
    seconds = defaultdict(float)
    for kind, cost in zip(program.kind, costs.seconds, strict=True):
        seconds[Kind(kind)] += cost
    free = {kind for kind, total in seconds.items() if total == 0}
    assert free == {Kind.FREE, Kind.COMMIT}


@pytest.mark.parametrize("machine", ["a100x8", "rtx3090x4", "v100x4"])
@pytest.mark.parametrize(("schedule", "forward", "backward"), [("mobius", 1, 1), ("zb-h1", 1, 1), ("spipe", 2, 6)])
def test_a_faster_optimizer_is_not_slower(machine: str, schedule: str, forward: int, backward: int) -> None:
    """With contention, too: what it takes of the host's memory it does not take from copies for nothing."""
    steps = []
    for factor in (0.5, 1, 2, 4, 16):
        base = load_hardware(machine)
        hardware = base.override({"cpu.adam_parameters_per_s": factor * base.cpu.adam_parameters_per_s})
        plan = make_plan(
            load_model("10b"), hardware, schedule=schedule, num_ranks=2, forward_stages=forward,
            backward_stages=backward, global_batch=8, microbatch_size=1, sequence=512, precision="fp16",
        )  # fmt: skip
        steps.append(simulate(plan).step_s)
    assert steps[0] > steps[2]
    assert all(later <= earlier * 1.015 for earlier, later in pairwise(steps))


def test_cores_that_do_not_divide_are_not_slower() -> None:
    plan = make_plan(
        load_model("10b"), load_hardware("v100x4"), schedule="mobius", forward_stages=1, backward_stages=1,
        global_batch=8, microbatch_size=1, sequence=512, precision="fp16",
    )  # fmt: skip
    for cores in (33, 34, 35, 36, 38):
        more = plan.hardware.override({"cpu.cores": cores})
        assert simulate(plan, hardware=more).step_s <= simulate(plan).step_s * (1 + 1e-9)


def test_a_faster_network_changes_nothing_inside_a_host() -> None:
    plan = make_plan(
        load_model("10b"), load_hardware("v100-ideal-host"), num_ranks=4, global_batch=8, microbatch_size=2,
        sequence=512, precision="fp16",
    )  # fmt: skip
    links = tuple(
        link.replace(bandwidth_bytes_per_s=10 * link.bandwidth_bytes_per_s)
        if "network" in (link.a, link.b) else link for link in plan.hardware.links
    )  # fmt: skip
    assert simulate(plan, hardware=plan.hardware.replace(links=links)).step_s == simulate(plan).step_s
