"""Plans and traces: files that give back what was written, and errors that name what is wrong."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spipe.errors import SpipeError
from spipe.hardware import load_hardware
from spipe.layout import Layout, Stage
from spipe.memory import aligned, layer_bytes, memory
from spipe.model import ModelSpec, load_model
from spipe.options import Options
from spipe.plan import Plan, make_plan
from spipe.trace import Trace


def plan(**changes: Any) -> Plan:
    arguments: dict[str, Any] = {
        "num_ranks": 2,
        "forward_stages": 1,
        "backward_stages": 3,
        "global_batch": 8,
        "microbatch_size": 2,
        "sequence": 128,
        "precision": "fp32",
    }
    return make_plan(load_model("tiny"), load_hardware("laptop"), **{**arguments, **changes})


def test_a_plan_file_gives_back_the_plan_and_the_same_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    plan().save(first)
    loaded = Plan.load(first)
    assert loaded == plan()
    loaded.save(second)
    assert first.read_bytes() == second.read_bytes()


def edit(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        data = plan().model_dump(mode="json")
        change(data)
        path.write_text(json.dumps(data))
        return path

    return write


def drop_layer(data: dict[str, Any]) -> None:
    data["layout"]["backward"].pop(2)


def overlap(data: dict[str, Any]) -> None:
    data["layout"]["backward"][1]["first"] -= 1


EDITS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "missing layer": (drop_layer, "leaves a gap: it has to start at layer"),
    "overlap": (overlap, "overlaps the one below"),
    "wrong rank": (lambda d: d["layout"]["forward"][0].update(rank=7), r"rank 7\): rank is not one of 0..1"),
    "schema": (lambda d: d.update(schema_version=99), "schema_version = 99, this version reads 1"),
    "unknown field": (lambda d: d.update(colour="red"), "colour"),
    "unknown option": (lambda d: d["options"].update(weight_slot=3), "weight_slot"),
    "huge counts": (lambda d: d.update(num_microbatches=10**12), "num_microbatches = 1000000000000"),
    "too many ops": (lambda d: d.update(num_microbatches=10**6), "compute ops a step; the limit is"),
    "huge slots": (lambda d: d["options"].update(weight_slots=10**18), "weight_slots = 1000000000000000000"),
    "huge threads": (lambda d: d.update(compute_threads=10**9), "compute_threads = 1000000000"),
    "infinite prediction": (lambda d: d.update(predicted={"step_s": float("inf")}), "predicted.step_s = inf"),
    "no backward stage": (lambda d: d["layout"].update(backward=[]), "backward stages cover 0 of 8 layers"),
    "zero microbatches": (lambda d: d.update(num_microbatches=0), "num_microbatches = 0"),
    "negative sequence": (lambda d: d.update(sequence=-5), "sequence = -5"),
    "fractional count": (lambda d: d.update(microbatch_size=1.5), "microbatch_size = 1.5"),
    "unknown schedule": (lambda d: d.update(schedule="gpip"), "unknown schedule 'gpip'; nearest: gpipe"),
    "beta": (lambda d: d["optimizer"].update(beta1=1.0), "beta1 = 1.0"),
    "costs": (lambda d: d["layout"]["layer_costs"].pop(), "layer_costs has 7 entries, but tiny has 8"),
    "too long": (lambda d: d.update(sequence=100000), "sequence = 100000"),
    "ranks": (lambda d: d["layout"].update(num_ranks=64), "the layout uses 64 ranks, but laptop has 4"),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_plan_edited_by_hand_is_refused_and_the_fault_named(name: str, tmp_path: Path) -> None:
    change, message = EDITS[name]
    path = edit(change)(tmp_path / "plan.json")
    with pytest.raises(SpipeError, match=message) as caught:
        Plan.load(path)
    assert str(path) in str(caught.value)


def test_not_a_number_in_a_plan_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan().model_dump(mode="json")).replace("0.001", "NaN", 1))
    with pytest.raises(SpipeError):
        Plan.load(path)


@pytest.mark.parametrize("text", ["", "{", "[" * 200000, "[]", "3", '{"schema_version": null}'])
def test_what_is_not_a_plan_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(SpipeError, match="spipe search"):
        Plan.load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"global_batch": 8, "microbatch_size": 3},
            "global batch of 8 sequences does not divide into microbatches of 3",
        ),
        ({"global_batch": 0}, "global_batch = 0"),
        ({"global_batch": 10**12}, "global_batch = 1000000000000 should be"),
        ({"microbatch_size": -1}, "microbatch_size = -1"),
        ({"sequence": float("nan")}, "sequence = nan"),
        ({"num_ranks": 9}, "num_ranks = 9 should be 1 to 4"),
        ({"num_ranks": 0}, "num_ranks = 0 should be 1 to 4"),
        ({"backward_stages": 9}, "cannot cut 8 layers into 18 stages"),
        ({"options": {"recompute": "sometimes"}}, "recompute"),
    ],
)
def test_what_does_not_make_a_plan_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpipeError, match=message):
        plan(**changes)


def test_more_ranks_than_layers_are_refused() -> None:
    hardware = load_hardware("ideal")
    with pytest.raises(SpipeError, match="32 ranks are more than the 8 layers of tiny"):
        make_plan(load_model("tiny"), hardware, global_batch=8, microbatch_size=1, sequence=64)


def test_the_digest_tells_plans_apart_and_ignores_predictions() -> None:
    assert plan().digest() == plan().replace(predicted={"step_s": 1.0}).digest()
    assert plan().digest() != plan(microbatch_size=4).digest()


def test_memory_items_by_hand() -> None:
    chosen = plan(schedule="gpipe", backward_stages=1, num_ranks=1, options={"optimizer": "sync"})
    model = chosen.model
    report = memory(chosen)
    parameters = sum(layer_bytes(model, i, 4) for i in range(model.num_total_layers))
    assert report.ranks[0]["weights"] == report.ranks[0]["gradients"] == parameters
    assert report.hosts[0]["weights"] == parameters
    assert report.hosts[0]["master weights and moments"] == 3 * parameters
    assert report.hosts[0]["undo data"] == 0
    assert report.ranks[0]["stage inputs"] == 0
    assert report.hosts[0]["ranks"] == report.rank_bytes[0]
    assert parameters >= 4 * model.num_parameters()
    assert aligned(1) == 64


def test_stage_inputs_grow_with_microbatches_and_leave_for_the_host() -> None:
    few, many = memory(plan(global_batch=4)), memory(plan(global_batch=8))
    assert many.ranks[0]["stage inputs"] == 2 * few.ranks[0]["stage inputs"] > 0
    through_host = memory(plan(options={"stage_input_route": "host"}))
    assert through_host.ranks[0]["stage inputs"] < many.ranks[0]["stage inputs"]
    assert through_host.hosts[0]["stage inputs"] > 0


@pytest.mark.parametrize(
    ("batch", "options", "peak_gib"),
    [
        (16, {}, 8.556141),
        (16, {"device_layers": 2}, 13.525013),
        (16, {"device_layers": 2, "stage_input_route": "host"}, 8.806263),
        (4, {"device_layers": 2}, 9.775011),
    ],
    ids=str,
)
def test_device_memory_is_that_measured(batch: int, options: dict[str, Any], peak_gib: float) -> None:
    """Peaks that PyTorch 2.11 reported on an H200 for 4.3 B parameters, a stage per block, 2 x 2048 tokens, bf16."""
    model = ModelSpec(name="4b", num_layers=20, hidden_size=4096, ffn_size=11008, num_heads=32, vocab_size=32000)
    blocks = (Stage(0, 2, 0), *(Stage(i, i + 1, 0) for i in range(2, 21)))
    layout = Layout(22, 1, blocks, (*blocks, Stage(21, 22, 0)), (0.0, *[1.0] * 20, 0.6))
    chosen = make_plan(
        model, load_hardware("h200x1"), layout=layout, global_batch=batch, microbatch_size=2, sequence=2048,
        precision="bf16", options=options,
    )  # fmt: skip
    assert memory(chosen).rank_bytes[0] / 2**30 == pytest.approx(peak_gib, rel=0.001)


def test_what_does_not_fit_is_said_with_numbers() -> None:
    hardware = load_hardware("rtx3090x4")
    big = make_plan(load_model("110b"), hardware, global_batch=16, microbatch_size=2, sequence=2048, precision="fp16")
    report = memory(big)
    assert not report.fits
    with pytest.raises(SpipeError, match=r"host 0 needs .* GiB of .* GiB usable, mostly master weights and moments"):
        report.require()


def test_a_tied_weight_is_kept_once() -> None:
    model = load_model("tiny").replace(tied_embeddings=True, name="tied")
    tied = plan().replace(model=model)
    saved = sum(
        memory(plan()).hosts[0][x] - memory(tied).hosts[0][x] for x in ("weights", "master weights and moments")
    )
    assert saved == 16 * model.vocab_size * model.hidden_size


def trace() -> Trace:
    result = Trace.empty(plan().program(), "measured", device="cpu")
    for i in range(len(plan().program())):
        result.add(0, i, 0.1 * i, 0.1 * i + 1 / 3, 0.1 * i + 2 / 3, math.nan if i % 2 else 0.01)
    result.notes[0, 3] = "rollback"
    return result


def test_a_trace_file_gives_back_the_trace_to_the_last_bit(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace().save(path)
    loaded = Trace.load(path)
    loaded.check_matches(plan().program(), "trace")
    pairs = zip(loaded.frame().itertuples(index=False), trace().frame().itertuples(index=False), strict=True)
    assert all(repr(a) == repr(b) for a, b in pairs)
    assert loaded.notes == {(0, 3): "rollback"}
    assert loaded.metadata == {"device": "cpu"}


def test_a_trace_file_is_a_chrome_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace().save(path)
    events = json.loads(path.read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for event in (e for e in events if e["ph"] == "X"):
        assert event["dur"] >= 0
        assert (event["pid"], event["tid"]) in names


@pytest.mark.parametrize("text", ["", "{}", '{"traceEvents": []}', '{"metadata": {"spipe_trace": 9}}'])
def test_what_is_not_a_trace_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(SpipeError, match=r"trace\.json"):
        Trace.load(path)


def test_a_truncated_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace().save(path)
    path.write_text(path.read_text()[:-100])
    with pytest.raises(SpipeError, match="not a readable trace"):
        Trace.load(path)


def test_a_trace_of_another_plan_is_refused() -> None:
    with pytest.raises(SpipeError, match="belongs to another plan"):
        trace().check_matches(plan(microbatch_size=4).program(), "here")


@pytest.mark.parametrize("changes", [{"weight_slots": 0}, {"bucket_layers": -1}, {"recompute": 3}, {"slots": 2}])
def test_wrong_options_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(SpipeError, match=next(iter(changes))):
        Options(**changes)


def test_the_processes_of_ranks_are_part_of_what_a_host_must_hold() -> None:
    """Where the hardware says what they take, a search accepts no plan that a run would refuse."""
    hardware = load_hardware("laptop")
    plan = make_plan(load_model("tiny"), hardware, num_ranks=2, forward_stages=1, backward_stages=2, global_batch=8,
                     microbatch_size=2, sequence=128, precision="fp32")  # fmt: skip
    without = memory(plan)
    gib = 3.0
    larger = hardware.override({"cpu.process_gib": gib})
    known = memory(plan.replace(hardware=larger))
    assert known.hosts[0]["PyTorch processes"] == 2 * gib * 2**30
    assert known.host_bytes[0] - without.host_bytes[0] == 2 * gib * 2**30
    room_gib = without.host_bytes[0] / 2**30 + 2 * gib
    small = {"cpu.process_gib": gib, "cpu.memory_gib": 100, "cpu.usable_memory_gib": room_gib * 0.99}
    assert "PyTorch processes" in memory(plan.replace(hardware=hardware.override(small))).problems[0]
