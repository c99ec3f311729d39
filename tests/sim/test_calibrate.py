"""Calibration recovers a known hardware from simulated traces, and refuses traces that cannot be used."""

import dataclasses
import math
import re
from array import array
from collections.abc import Callable

import pytest

from spipe.errors import SpipeError
from spipe.hardware import HardwareSpec, MeasuredLayer, load_hardware
from spipe.memory import memory
from spipe.model import ModelSpec, load_model
from spipe.ops import COMPUTE, Kind
from spipe.plan import Plan, make_plan
from spipe.sim import calibrate, compare, simulate
from spipe.sim.compare import memory_rows
from spipe.sim.cost import CostModel
from spipe.sim.fitting import Prior, nonnegative_fit
from spipe.sim.stability import warnings_of
from spipe.trace import Trace

SMALL = ModelSpec(name="small", num_layers=8, hidden_size=256, ffn_size=704, num_heads=4, vocab_size=1024)
GPU = load_hardware("h200x2")
LAPTOP = load_hardware("laptop").override({"cpu.cores": 2})


def gpu_plan(**changes: object) -> Plan:
    fields = {"forward_stages": 2, "backward_stages": 6, "global_batch": 8, "microbatch_size": 1, "sequence": 1024}
    return make_plan(load_model("llama2-7b"), GPU, **(fields | changes))  # type: ignore[arg-type]


def laptop_plan(**changes: object) -> Plan:
    fields = {"forward_stages": 1, "backward_stages": 2, "num_ranks": 2, "global_batch": 8, "microbatch_size": 1,
              "sequence": 128, "precision": "fp32"}  # fmt: skip
    return make_plan(SMALL, LAPTOP, **(fields | changes))  # type: ignore[arg-type]


def runs(plans: list[Plan], truth: HardwareSpec, num_steps: int = 8) -> list[tuple[Plan, Trace]]:
    return [(plan, simulate(plan, hardware=truth, num_steps=num_steps).trace) for plan in plans]


def slower_gpu_host() -> HardwareSpec:
    links = [
        link.replace(bandwidth_bytes_per_s=0.7 * link.bandwidth_bytes_per_s, both_directions_bytes_per_s=None)
        for link in GPU.links
    ]
    changed = GPU.override({"accelerator.max_efficiency": 0.5, "cpu.adam_billion_parameters_per_s": 5.0})
    return changed.replace(links=tuple(links))


def test_recovers_layers_links_and_optimizer_of_a_gpu_host() -> None:
    truth = slower_gpu_host()
    plans = [
        gpu_plan(),
        gpu_plan(schedule="mobius", forward_stages=4, backward_stages=4, microbatch_size=2),
    ]
    found = calibrate(runs(plans, truth)).hardware
    for plan in plans:
        true, fitted = CostModel.of(plan, truth), CostModel.of(plan, found)
        for kind in ("block", "head"):
            for name in ("forward", "recompute", "backward"):
                assert fitted.layer_s(kind, name) == pytest.approx(true.layer_s(kind, name), rel=0.02)
        assert fitted.notes == ()
    assert found.cpu.adam_parameters_per_s == pytest.approx(5e9, rel=0.02)
    bandwidths = {(link.a, link.b): link.bandwidth_bytes_per_s for link in truth.links}
    for link in found.links:
        assert link.bandwidth_bytes_per_s == pytest.approx(bandwidths[link.a, link.b], rel=0.02)
    assert found.provenance["measured"] == "measured"
    assert found.provenance["cpu.adam_parameters_per_s"] == "fitted"


def test_recovers_the_parts_of_split_blocks_and_what_follows_for_whole_ones() -> None:
    truth = slower_gpu_host()
    whole = gpu_plan()
    split = make_plan(
        whole.model.replace(split_blocks=True), GPU, forward_stages=3, backward_stages=7, global_batch=8,
        microbatch_size=1, sequence=1024,
    )  # fmt: skip
    found = calibrate(runs([split], truth)).hardware
    for name in ("forward", "recompute", "backward"):
        true, fitted = CostModel.of(split, truth), CostModel.of(split, found)
        for kind in ("attention", "mlp"):
            assert fitted.layer_s(kind, name) == pytest.approx(true.layer_s(kind, name), rel=0.02)
        assert CostModel.of(whole, found).block_s(name) == pytest.approx(true.block_s(name), rel=0.02)
    assert simulate(whole, hardware=found).step_s == pytest.approx(simulate(whole, hardware=truth).step_s, rel=0.02)
    both = calibrate(runs([split, whole], truth)).hardware
    assert CostModel.of(whole, both).block_s("backward") == pytest.approx(true.block_s("backward"), rel=0.02)


def test_predicts_plans_it_has_not_seen() -> None:
    truth = slower_gpu_host()
    found = calibrate(runs([gpu_plan(), gpu_plan(schedule="1f1b", backward_stages=2)], truth)).hardware
    unseen = gpu_plan(schedule="mobius", forward_stages=4, backward_stages=4)
    before = simulate(unseen).step_s
    expected = simulate(unseen, hardware=truth).step_s
    assert abs(before / expected - 1) > 0.1
    assert simulate(unseen, hardware=found).step_s == pytest.approx(expected, rel=0.02)


def test_time_beyond_processor_time_is_added_to_the_layers_of_the_runs_only() -> None:
    """Steps take 15 % longer than processor time explains; another model in batches of the same shape is known."""
    other = SMALL.replace(name="other", hidden_size=128)
    shape = {"forward_stages": 1, "backward_stages": 2, "num_ranks": 2, "global_batch": 8, "microbatch_size": 1}
    other_plan = make_plan(other, LAPTOP, sequence=128, precision="fp32", **shape)  # type: ignore[arg-type]
    start = calibrate(runs([other_plan], LAPTOP), LAPTOP).hardware
    slow = runs([laptop_plan()], LAPTOP)
    for column in (slow[0][1].ready_s, slow[0][1].start_s, slow[0][1].end_s):
        for row, seconds in enumerate(column):
            column[row] = 1.15 * seconds
    once = calibrate(slow, start)
    assert once.runs[0]["error"] == pytest.approx(0, abs=0.02)
    assert next(row["value"] for row in once.report if "beyond" in row["what"]) == pytest.approx(0.15, abs=0.03)
    known = [entry for entry in start.measured if entry.hidden_size == 128]
    assert known
    assert [entry for entry in once.hardware.measured if entry.hidden_size == 128] == known
    twice = calibrate(slow, once.hardware)
    assert twice.runs[0]["predicted_s"] == pytest.approx(once.runs[0]["predicted_s"], rel=1e-6)


def test_contention_for_cores_is_not_taken_for_slow_compute() -> None:
    truth = LAPTOP.override(
        {"accelerator.max_efficiency": 0.6, "cpu.cores": 1, "cpu.adam_billion_parameters_per_s": 0.3}
    )
    start = LAPTOP.override({"cpu.cores": 1})
    result = calibrate(runs([laptop_plan(), laptop_plan(schedule="mobius", backward_stages=1)], truth), start)
    for row in result.runs:
        assert row["predicted_s"] == pytest.approx(row["measured_s"], rel=0.02)
    plenty = result.hardware.override({"cpu.cores": 8})
    unseen = laptop_plan(backward_stages=3, microbatch_size=1)
    expected = simulate(unseen, hardware=truth.override({"cpu.cores": 8})).step_s
    assert simulate(unseen, hardware=plenty).step_s == pytest.approx(expected, rel=0.1)


def test_the_result_is_a_spec_that_can_be_saved(tmp_path_factory: pytest.TempPathFactory) -> None:
    result = calibrate(runs([gpu_plan()], slower_gpu_host()))
    path = tmp_path_factory.mktemp("spec") / "hardware.toml"
    result.hardware.save(path)
    assert load_hardware(path) == result.hardware
    for row in result.report:
        assert row["value"] >= 0
        assert row["unit"] in ("s", "bytes/s", "parameters/s", "share")


def test_a_trace_of_another_plan_is_refused() -> None:
    ((_, trace),) = runs([gpu_plan()], GPU)
    with pytest.raises(SpipeError, match="belongs to another plan"):
        calibrate([(gpu_plan(schedule="mobius", backward_stages=2), trace)])


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(SpipeError, match=r"has 1 steps after 3 warm-up steps; it takes at least 2"):
        calibrate(runs([gpu_plan()], GPU, num_steps=4))
    with pytest.raises(SpipeError, match="at least one run"):
        calibrate([])


def test_impossible_durations_are_refused() -> None:
    ((plan, trace),) = runs([gpu_plan()], GPU)
    row = next(row for row, i in enumerate(trace.op) if trace.step[row] == 5 and plan.program().kind[i] == Kind.FORWARD)
    for end in (trace.start_s[row] - 1.0, math.nan):
        damaged = dataclasses.replace(trace, end_s=[*trace.end_s[:row], end, *trace.end_s[row + 1 :]])
        with pytest.raises(SpipeError, match="FORWARD F0 m0 of step 5"):
            calibrate([(plan, damaged)])


def test_the_run_that_cannot_be_used_is_named() -> None:
    good, short = runs([gpu_plan()], GPU), runs([gpu_plan()], GPU, num_steps=4)
    with pytest.raises(SpipeError, match=r"calibrate: run 1: the trace has 1 steps"):
        calibrate(good + short)
    with pytest.raises(SpipeError, match=r"calibrate: short: the trace has 1 steps"):
        calibrate(good + short, names=["good", "short"])


def without(trace: Trace, rows: set[int]) -> Trace:
    columns = ("step", "op", "ready_s", "start_s", "end_s", "cpu_s")
    kept = {name: [value for row, value in enumerate(getattr(trace, name)) if row not in rows] for name in columns}
    return dataclasses.replace(trace, **kept)


@pytest.mark.parametrize("use", [lambda plan, trace: calibrate([(plan, trace)]), compare], ids=["calibrate", "compare"])
def test_incomplete_steps_are_refused(use: Callable[[Plan, Trace], object]) -> None:
    ((plan, trace),) = runs([gpu_plan()], GPU)
    kinds = plan.program().kind
    one = {next(row for row, i in enumerate(trace.op) if trace.step[row] == 5 and kinds[i] == Kind.OFFLOAD_GRAD)}
    validates = {row for row, i in enumerate(trace.op) if kinds[i] == Kind.VALIDATE}
    for rows, message in (
        (one, rf"step 5 of the trace has {len(kinds) - 1} of {len(kinds)} ops \(OFFLOAD_GRAD .* is missing\)"),
        (validates, r"step 0 of the trace .*\(VALIDATE .* is missing\)"),
    ):
        with pytest.raises(SpipeError, match=message):
            use(plan, without(trace, rows))


@pytest.mark.parametrize(
    "use", [lambda plan, trace, h: calibrate([(plan, trace)], h), compare], ids=["calibrate", "compare"]
)
def test_a_machine_of_another_device_is_refused(use: Callable[[Plan, Trace, HardwareSpec], object]) -> None:
    ((cpu_plan, cpu_trace),) = runs([laptop_plan()], LAPTOP)
    ((cuda_plan, cuda_trace),) = runs([gpu_plan()], GPU)
    with pytest.raises(SpipeError, match=r"on device cpu \(laptop\), but hardware h200x2 has device cuda"):
        use(cpu_plan, cpu_trace, GPU)
    with pytest.raises(SpipeError, match=r"on device cuda \(h200x2\), but hardware laptop has device cpu"):
        use(cuda_plan, cuda_trace, LAPTOP)


def test_steps_that_take_no_time_are_refused() -> None:
    ((plan, trace),) = runs([gpu_plan()], GPU)
    kinds = plan.program().kind
    ends = [9.0 if kinds[i] == Kind.VALIDATE else end for i, end in zip(trace.op, trace.end_s, strict=True)]
    with pytest.raises(SpipeError, match=r"compare: the steps took 0\.0 s in the median: the trace is damaged"):
        compare(plan, dataclasses.replace(trace, end_s=ends))


def test_the_cores_of_the_machine_that_ran_are_taken_over() -> None:
    ((plan, trace),) = runs([laptop_plan()], LAPTOP)
    trace.metadata["usable_cores"] = 7
    assert calibrate([(plan, trace)]).hardware.cpu.cores == 7


def test_different_numbers_of_threads_are_refused() -> None:
    with pytest.raises(SpipeError, match="1 and 2 threads"):
        calibrate(runs([laptop_plan(), laptop_plan(compute_threads=2)], LAPTOP))


def test_outliers_do_not_move_a_fit() -> None:
    rows = [[float(n), 1.0] for n in range(1, 11)]
    values = [3.0 * n + 2.0 for n in range(1, 11)]
    values[4] *= 5
    assert nonnegative_fit(rows, values) == pytest.approx([3.0, 2.0], rel=0.01)
    assert nonnegative_fit([[1.0, 1.0]] * 3, [2.0, 2.0, 2.0], [Prior([0.0, 1.0], 0.5, 1.0)]) == pytest.approx(
        [1.5, 0.5], abs=1e-6
    )
    assert min(nonnegative_fit([[1.0, 1.0], [2.0, 1.0]], [3.0, 4.0 / 3])) == 0


def test_what_issuing_a_layer_takes_bounds_smaller_microbatches() -> None:
    """A run says how long the host needs to issue a pass; with fewer tokens that is what the pass takes."""
    plan, small = gpu_plan(microbatch_size=4), gpu_plan(sequence=16)
    simulation = simulate(plan, num_steps=8)
    issue_s = {Kind.FORWARD: 1e-3, Kind.RECOMPUTE: 2e-3, Kind.BACKWARD: 3e-3}
    program, trace = simulation.program, simulation.trace
    for row, i in enumerate(trace.op):
        if (kind := Kind(program.kind[i])) in issue_s:
            of_its_own = sum(layer > 0 for layer in program.layers(program.stage[i]))
            late = 50.0 if row % 7 == 0 else 1.0  # now and then the host waits for the device
            trace.cpu_s[row] = late * of_its_own * issue_s[kind]
    found = calibrate([(plan, trace)]).hardware
    assert found.accelerator.layer_issue_s == pytest.approx(
        {"forward": 1e-3, "recompute": 2e-3, "backward": 3e-3}, rel=1e-6
    )
    assert found.provenance["accelerator.layer_issue_s"] == "fitted"
    before, after = (CostModel.of(small, hardware) for hardware in (plan.hardware, found))
    assert before.layer_s("block", "recompute") < 1e-3
    assert after.layer_s("block", "recompute") == pytest.approx(2e-3)
    assert after.layer_s("embedding", "recompute") < 1e-3
    assert simulate(small, hardware=found).step_s > 1.1 * simulate(small).step_s


def test_a_comparison_of_a_plan_with_its_own_simulation_has_no_error() -> None:
    plan = gpu_plan()
    result = compare(plan, simulate(plan, num_steps=8).trace)
    assert result.step_time["error"] == pytest.approx(0, abs=1e-6)
    assert all(row["ratio"] is None or row["ratio"] == pytest.approx(1, rel=0.01) for row in result.ops)
    for row in result.bubbles:
        assert row["predicted_s"] == pytest.approx(row["measured_s"], rel=1e-3, abs=1e-6)


def test_a_comparison_names_what_is_slower_than_predicted() -> None:
    plan = gpu_plan()
    slow = GPU.override({"cpu.adam_billion_parameters_per_s": 2.0})
    result = compare(plan, simulate(plan, hardware=slow, num_steps=8).trace)
    ratios = {row["kind"]: row["ratio"] for row in result.ops}
    assert ratios["STEP"] < 0.5
    assert ratios["FORWARD"] == pytest.approx(1, rel=0.01)
    causes = {row["cause"]: row for row in result.bubbles}
    assert causes["optimizer"]["measured_s"] > causes["optimizer"]["predicted_s"]
    assert result.step_time["error"] < 0
    assert set(result.to_json()) == {
        "hardware", "step_time", "ops", "bubbles", "lanes", "memory", "disagreements", "notes"
    }  # fmt: skip
    assert set(result.step_time) == {"predicted_s", "measured_s", "error", "interval_s"}
    assert len(result.disagreements) == 3
    assert re.search(r"STEP ops last longer than predicted: .* \(\+\d+\.\d % of the step\)", result.disagreements[0])
    lanes = {(row["rank"], row["lane"]): row for row in result.lanes}
    assert lanes[0, "cpu 0"]["measured_s"] > 2 * lanes[0, "cpu 0"]["predicted_s"]
    assert lanes[0, "compute 0"]["measured_s"] == pytest.approx(lanes[0, "compute 0"]["predicted_s"], rel=0.01)


def test_memory_is_compared_item_by_item() -> None:
    plan = gpu_plan()
    planned = memory(plan)
    summary = {
        "peak_device_bytes": [100, 200],
        "device_items_bytes": [{"weights": 10, "messages and stage inputs": 7}, {"weights": 20}],
        "host_items_bytes": {"weights": 30},
        "host_planned_bytes": {"weights": 31, "processes": 5},
        "peak_resident_bytes": [1, 2],
    }
    rows = {(row["place"], row["item"]): row for row in memory_rows(planned, "cuda", summary)}
    assert rows["rank 1", "all"]["measured_bytes"] == 200
    assert rows["rank 1", "all"]["predicted_bytes"] == planned.rank_bytes[1]
    assert rows["rank 0", "weights"]["measured_bytes"] == 10
    items = planned.ranks[0]
    expected = items["stage inputs"] + items["received messages"]
    assert rows["rank 0", "messages and stage inputs"]["predicted_bytes"] == expected
    assert rows["host 0", "weights"] == {
        "place": "host 0", "item": "weights", "predicted_bytes": 31, "measured_bytes": 30
    }  # fmt: skip
    assert rows["host 0", "all"]["measured_bytes"] is None, "what two ranks share counts in both"
    alone = memory_rows(planned, "cpu", {"peak_resident_bytes": [9]})
    assert [row["measured_bytes"] for row in alone if row["place"] == "host 0" and row["item"] == "all"] == [9]
    assert all(row["measured_bytes"] is None for row in memory_rows(planned, "cuda", {}))


def test_the_report_has_the_layers_of_the_spec() -> None:
    slow = runs([laptop_plan()], LAPTOP)
    for column in (slow[0][1].ready_s, slow[0][1].start_s, slow[0][1].end_s):
        for row, seconds in enumerate(column):
            column[row] = 1.4 * seconds
    result = calibrate(slow)
    values = {row["what"]: row["value"] for row in result.report}
    assert values["time beyond processor time"] == pytest.approx(0.4, abs=0.1)
    blocks = [entry for entry in result.hardware.measured if entry.layer_kind == "block"]
    for entry in blocks:
        text = f"block {entry.pass_name}, 1 x 128 fp32, hidden 256"
        assert values[text] == pytest.approx(entry.seconds, rel=1e-12)
    assert result.runs[0]["error"] == pytest.approx(0, abs=0.03)


def test_steps_that_no_op_explains_are_said_and_left_out() -> None:
    """Between the ops the ranks wait for something: only the ops' own wall time may be laid to the layers."""
    ((plan, trace),) = runs([laptop_plan()], LAPTOP)
    long = Trace.empty(plan.program(), "measured")
    for row in range(len(trace)):
        start = 2 * trace.start_s[row]
        lasted = trace.end_s[row] - trace.start_s[row]
        long.add(trace.step[row], trace.op[row], 2 * trace.ready_s[row], start, start + lasted, trace.cpu_s[row])
    result = calibrate([(plan, long)])
    assert next(row["value"] for row in result.report if "beyond" in row["what"]) == pytest.approx(0, abs=0.03)
    assert any("longer than their ops explain" in text for text in result.warnings)


def test_every_run_is_predicted_by_the_others() -> None:
    truth = slower_gpu_host()
    shape = {"forward_stages": 4, "backward_stages": 4, "global_batch": 4}
    plans = [gpu_plan(global_batch=4), gpu_plan(schedule="mobius", **shape), gpu_plan(global_batch=2)]
    measured = runs(plans, truth)
    result = calibrate(measured)
    assert [row["used_for"] for row in result.held_out] == ["left out"] * 3
    assert {row["plan"] for row in result.held_out} == {plan.digest() for plan in plans}
    for row in result.held_out:
        assert row["error"] == pytest.approx(0, abs=0.04)
    assert 0 < result.hardware.prediction_error < 0.04
    assert all(abs(row["before_s"] / row["measured_s"] - 1) > 0.1 for row in result.runs)

    judged = calibrate(measured[:1], judged=measured[1:], judged_names=["a", "b"])
    assert [(row["name"], row["used_for"]) for row in judged.held_out] == [("a", "judge"), ("b", "judge")]
    assert calibrate(measured[:1]).held_out == calibrate([measured[0], measured[0]]).held_out == []


def test_a_rate_is_not_taken_for_slow_because_it_was_shared() -> None:
    """The host's memory is too slow for the optimizer and the copies at once: what they take then is not their rate."""
    truth = GPU.override({"cpu.memory_bandwidth_gb_per_s": 130.0, "cpu.adam_billion_parameters_per_s": 4.0})
    start = truth.override({"cpu.adam_billion_parameters_per_s": 6.0})
    plan = gpu_plan(microbatch_size=2)
    found = calibrate(runs([plan], truth), start).hardware
    assert found.cpu.adam_parameters_per_s == pytest.approx(4e9, rel=0.03)
    other = gpu_plan(schedule="mobius", forward_stages=4, backward_stages=4, global_batch=4)
    assert simulate(other, hardware=found).step_s == pytest.approx(simulate(other, hardware=truth).step_s, rel=0.03)


def test_what_was_measured_on_its_own_follows_what_runs_show() -> None:
    """Layers take 1.2 times as long in a run as on their own: so will those of a model that no run has."""
    other = SMALL.replace(name="other", hidden_size=128)
    other_plan = make_plan(
        other, LAPTOP, forward_stages=1, backward_stages=2, num_ranks=2, global_batch=8, microbatch_size=1,
        sequence=128, precision="fp32",
    )  # fmt: skip
    slow = LAPTOP.override({"accelerator.max_efficiency": LAPTOP.accelerator.max_efficiency / 1.2})
    entries = calibrate(runs([laptop_plan(), other_plan], LAPTOP), LAPTOP).hardware.measured
    profiled = LAPTOP.replace(measured=tuple(entry.replace(source="profile") for entry in entries))
    found = calibrate(runs([laptop_plan()], slow), profiled).hardware
    for name in ("forward", "recompute", "backward"):
        before, after = (CostModel.of(other_plan, spec).layer_s("block", name) for spec in (profiled, found))
        assert after / before == pytest.approx(1.2, abs=0.05)
        mine = CostModel.of(laptop_plan(), found).layer_s("block", name)
        assert mine / CostModel.of(laptop_plan(), profiled).layer_s("block", name) == pytest.approx(1.2, abs=0.05)
    again = calibrate(runs([laptop_plan()], slow), found).hardware
    assert CostModel.of(other_plan, again).layer_s("block", "forward") == pytest.approx(
        CostModel.of(other_plan, found).layer_s("block", "forward"), rel=1e-6
    )


def test_where_values_come_from_is_listed() -> None:
    result = calibrate(runs([gpu_plan()], slower_gpu_host()))
    origins = {row["what"]: row["provenance"] for row in result.entries}
    assert origins["cpu.adam_parameters_per_s"] == "fitted"
    assert origins["accelerator.usable_fraction"] == "assumed"
    assert origins["block forward, 1 x 1024 bf16, hidden 4096"] == "measured in a run"
    errors = {row["what"]: row["error"] for row in result.entries}
    assert errors["cpu.adam_parameters_per_s"] is not None


def test_a_clock_that_jumps_is_refused() -> None:
    ((plan, trace),) = runs([laptop_plan()], LAPTOP)
    for jump_s in (3600.0, -3600.0):
        columns = {
            name: [value + jump_s * (step > 5) for value, step in zip(getattr(trace, name), trace.step, strict=True)]
            for name in ("ready_s", "start_s", "end_s")
        }
        jumped = dataclasses.replace(trace, **columns)
        with pytest.raises(SpipeError, match="the clock jumped"):
            calibrate([(plan, jumped)])


@pytest.mark.parametrize("jump_s", [-5.0, -0.05, 0.05, 5.0])
def test_a_clock_of_one_rank_that_differs_is_refused(jump_s: float) -> None:
    ((plan, trace),) = runs([laptop_plan()], LAPTOP)
    rank = plan.program().rank
    columns = {
        name: [
            value + jump_s * (step > 5 and rank[op] == 1)
            for value, step, op in zip(getattr(trace, name), trace.step, trace.op, strict=True)
        ]
        for name in ("ready_s", "start_s", "end_s")
    }
    differing = dataclasses.replace(trace, **columns)
    for use in (lambda: calibrate([(plan, differing)]), lambda: compare(plan, differing)):
        with pytest.raises(SpipeError, match="the ranks' clocks differ, or one jumped"):
            use()


def test_drift_outliers_and_busy_machines_are_said() -> None:
    ((plan, trace),) = runs([laptop_plan()], LAPTOP, num_steps=16)
    program = plan.program()
    steady = [0.1] * 12
    assert warnings_of(program, trace, steady, 3) == []
    (warming,) = warnings_of(program, trace, [0.1 + 0.002 * i for i in range(12)], 3)
    assert "steps became 20% slower during the run" in warming
    (faster,) = warnings_of(program, trace, [0.1 - 0.002 * i for i in range(12)], 3)
    assert "faster during the run" in faster
    (outlier,) = warnings_of(program, trace, [*steady, 0.2], 3)
    assert "1 of 13 steps took over 1.3 times the median (0.2 s against 0.1 s)" in outlier
    (single,) = warnings_of(program, trace, [0.1], 3)
    assert "only 1 step count" in single
    trace.cpu_s = array("d", [0.5 * seconds for seconds in trace.cpu_s])
    (busy,) = warnings_of(program, trace, steady, 3)
    assert re.search(r"compute ops had the processor for only \d\d% of their time", busy)
    trace.metadata["device"] = "cuda:0, some GPU"  # where the host only issues, it says nothing
    assert warnings_of(program, trace, steady, 3) == []


def test_what_issuing_takes_by_the_layer_and_by_the_op() -> None:
    """Stages of several sizes tell the two apart; where all have one size, what a profile knows of layers does."""
    by_op, by_layer = 4e-4, 2e-4
    different, alike = gpu_plan(backward_stages=6), gpu_plan(forward_stages=4, backward_stages=16)
    nothing = {"forward": 0.0, "recompute": 0.0, "backward": 0.0}
    for plan, known in (
        (different, {}),
        (different, nothing),
        (alike, {"forward": by_layer, "recompute": by_layer, "backward": by_layer}),
    ):
        ((_, trace),) = runs([plan], GPU)
        program = plan.program()
        for row, i in enumerate(trace.op):
            if program.kind[i] in (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD):
                blocks = sum(plan.model.layer_kind(x) == "block" for x in program.layers(program.stage[i]))
                trace.cpu_s[row] = by_op + by_layer * blocks
        start = GPU.replace(accelerator=GPU.accelerator.replace(layer_issue_s=known))
        accelerator = calibrate([(plan, trace)], start).hardware.accelerator
        for name in ("recompute", "backward"):
            assert accelerator.layer_issue_s[name] == pytest.approx(by_layer, rel=0.05)
            assert accelerator.op_issue_s[name] == pytest.approx(by_op, rel=0.1)


def test_what_is_replayed_says_what_layers_and_one_launch_take() -> None:
    """Not what the host needs for layers one by one: that stays what was known."""
    issue_s = {"forward": 1.0, "recompute": 1.0, "backward": 1.0}
    start = GPU.replace(accelerator=GPU.accelerator.replace(layer_issue_s=issue_s))
    plan = gpu_plan(num_ranks=1, forward_stages=16, backward_stages=33, cuda_graphs=True)
    ((_, trace),) = runs([plan], start)
    for row, i in enumerate(trace.op):
        if plan.program().kind[i] in COMPUTE and plan.records(plan.program().layers(plan.program().stage[i])):
            trace.cpu_s[row] = 2e-4
    found = calibrate([(plan, trace)], start).hardware
    assert found.accelerator.launch_overhead_s == pytest.approx(2e-4)
    assert found.accelerator.layer_issue_s == pytest.approx(issue_s, rel=0.01)
    truth, fitted = CostModel.of(plan, start), CostModel.of(plan, found)
    for name in ("forward", "recompute", "backward"):
        assert fitted.device_s("block", name) == pytest.approx(truth.device_s("block", name), rel=0.01)


@pytest.mark.parametrize("stages", [(2, 6), (16, 33)], ids=str)
def test_layers_are_recovered_from_recomputes_that_leave_their_output_out(stages: tuple[int, int]) -> None:
    """Whole layers, from stages of several and of one: with other cuts other layers are left whole."""
    start = GPU.replace(accelerator=GPU.accelerator.replace(launch_overhead_s=0.0))
    fields = {"num_ranks": 1, "forward_stages": stages[0], "backward_stages": stages[1]}
    plan = gpu_plan(**fields)
    found = calibrate(runs([plan], start), start).hardware
    truth, fitted = CostModel.of(plan, start), CostModel.of(plan, found)
    assert fitted.device_s("block", "recompute") == pytest.approx(truth.device_s("block", "recompute"), rel=0.01)
    other = gpu_plan(num_ranks=1, forward_stages=4, backward_stages=11)
    assert simulate(other, hardware=found).step_s == pytest.approx(simulate(other, hardware=start).step_s, rel=0.015)


def test_a_run_without_an_undo_log_tells_the_rate_with_one() -> None:
    start = GPU.replace(cpu=GPU.cpu.replace(undo_slowdown=1.3, memory_bandwidth_bytes_per_s=1e14))
    plan = gpu_plan(options={"optimizer": "sync"})
    found = calibrate(runs([plan], start), start.replace(cpu=start.cpu.replace(adam_parameters_per_s=1e9)))
    assert found.hardware.cpu.adam_parameters_per_s == pytest.approx(start.cpu.adam_parameters_per_s, rel=0.03)


def test_a_run_that_is_bound_by_its_host_says_nothing_of_how_fast_layers_are() -> None:
    """The profile knew the layers; the run only shows how long the host needs. Other plans follow from both."""
    small, large = gpu_plan(global_batch=16), gpu_plan(microbatch_size=4, global_batch=32)
    known = [CostModel.of(plan, GPU) for plan in (small, large)]
    profiled = GPU.replace(
        measured=tuple(
            MeasuredLayer.model_validate(
                {
                    "source": "profile", "layer_kind": kind, "pass_name": name,
                    "microbatch_size": costs.microbatch_size, "sequence": 1024, "dtype": "bf16",
                    "seconds": costs.layer_s(kind, name),
                    **MeasuredLayer.shape_of(load_model("llama2-7b"), kind),
                }
            )
            for costs in known
            for kind in ("embedding", "block", "head")
            for name in ("forward", "recompute", "backward")
        )
    )  # fmt: skip
    issue_s = {
        name: 2.0 * known[0].layer_s("block", name) for name in ("forward", "recompute", "backward")
    }  # less than four times as many tokens take
    truth = profiled.replace(accelerator=profiled.accelerator.replace(layer_issue_s=issue_s))
    ((plan, trace),) = runs([small], truth)
    trace.cpu_s = array("d", [0.95 * (end - start) for start, end in zip(trace.start_s, trace.end_s, strict=True)])
    found = calibrate([(plan, trace)], profiled)
    assert found.hardware.accelerator.layer_issue_s == pytest.approx(issue_s, rel=0.02)
    assert found.runs[0]["before_s"] < 0.8 * found.runs[0]["measured_s"]
    assert found.runs[0]["error"] == pytest.approx(0, abs=0.01)
    for entry in found.hardware.measured:
        if entry.layer_kind == "block":
            before = profiled.find_measured(
                small.model, "block", entry.pass_name, entry.microbatch_size, entry.sequence, entry.dtype
            )
            assert before is not None
            assert entry.seconds == pytest.approx(before.seconds, rel=0.01)
    assert simulate(large, hardware=found.hardware).step_s == pytest.approx(
        simulate(large, hardware=truth).step_s, rel=0.01
    )


def test_ops_that_now_and_then_come_late_count_with_their_mean() -> None:
    """Every fourth compute op takes twice as long: a step is as long as the sum of its ops, not of their medians."""
    ((plan, trace),) = runs([gpu_plan(global_batch=16)], GPU)
    program = plan.program()
    found = []
    for every in (10**9, 4):
        slow = Trace.empty(program, "measured")
        for row, (i, step) in enumerate(zip(trace.op, trace.step, strict=True)):
            extra = (trace.end_s[row] - trace.start_s[row]) * (
                program.kind[i] == Kind.FORWARD and program.index[i] % every == every - 1
            )
            slow.add(step, i, trace.ready_s[row], trace.start_s[row] - extra, trace.end_s[row])
        hardware = calibrate([(plan, slow)]).hardware
        found.append(CostModel.of(plan, hardware).layer_s("block", "forward"))
    assert found[1] == pytest.approx(1.25 * found[0], rel=0.02)


def test_what_a_gpu_takes_to_get_to_the_next_op_is_part_of_it() -> None:
    """Streams wait for events: compute ops start 0.3 ms after their dependencies are done and their lane is free."""
    ((plan, trace),) = runs([gpu_plan(microbatch_size=2)], GPU)
    kinds, late_s = plan.program().kind, 3e-4
    compute = {Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD}
    started = [
        start + late_s * (kinds[i] in compute) for i, start in zip(trace.op, trace.start_s, strict=True)
    ]  # fmt: skip
    result = calibrate([(plan, dataclasses.replace(trace, start_s=started))])
    assert result.runs[0]["error"] == pytest.approx(0, abs=0.005)
    overheads = result.hardware.measured_op_overhead_s
    assert overheads["FORWARD"] == pytest.approx(late_s, rel=0.2)


def test_a_host_that_now_and_then_issues_late_is_part_of_the_layers() -> None:
    """Every fifteenth compute op of rank 0 comes 5 ms late: no usual gap shows it, but the idle time does."""
    plan = make_plan(
        load_model("llama2-7b"), GPU, num_ranks=1, forward_stages=2, backward_stages=6, global_batch=8,
        microbatch_size=1, sequence=1024,
    )  # fmt: skip
    trace = simulate(plan, num_steps=8).trace
    kinds, delayed, count = plan.program().kind, 0.0, 0
    late = Trace.empty(plan.program(), "measured")
    for row in sorted(range(len(trace)), key=lambda row: trace.start_s[row]):
        before = delayed
        if kinds[trace.op[row]] in (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD):
            count += 1
            delayed += 5e-3 * (count % 15 == 0)
        late.add(
            trace.step[row], trace.op[row], trace.ready_s[row] + before, trace.start_s[row] + delayed,
            trace.end_s[row] + delayed,
        )  # fmt: skip
    result = calibrate([(plan, late)])
    share = next(row["value"] for row in result.report if row["what"] == "time between ops")
    assert result.runs[0]["measured_s"] > 1.015 * result.runs[0]["before_s"]
    assert share > 0.01
    assert result.runs[0]["error"] == pytest.approx(0, abs=0.015)


def test_how_much_steps_vary_is_the_least_that_a_prediction_may_be_wrong() -> None:
    ((plan, trace),) = runs([laptop_plan()], LAPTOP, num_steps=24)
    shaken = Trace.empty(plan.program(), "measured")
    shift = [0.0]
    step_s = simulate(plan, hardware=LAPTOP).step_s
    for step in range(24):
        shift.append(shift[-1] + step_s * 0.1 * math.sin(2.4 * step))
    for row in range(len(trace)):
        at = trace.step[row]
        ready, start, end = (x[row] + shift[at] for x in (trace.ready_s, trace.start_s, trace.end_s))
        shaken.add(at, trace.op[row], ready, start, end, trace.cpu_s[row])
    steady = calibrate([(plan, trace)]).hardware.prediction_error
    varied = calibrate([(plan, shaken)]).hardware.prediction_error
    assert steady < 0.02
    assert 0.05 < varied < 0.15
    known = LAPTOP.replace(prediction_error=0.3)
    assert calibrate([(plan, trace)], known).hardware.prediction_error == pytest.approx(0.3)
