"""Run, calibrate and compare as a user does; the demo as a whole."""

import json
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest
from rich.console import Console

from spipe import demo
from spipe.errors import SpipeError
from spipe.hardware import HardwareSpec, load_hardware
from spipe.metrics import CAUSES
from spipe.plan import AdamW, Plan
from spipe.profile import Profile
from spipe.runtime import profiling
from spipe.sim.profiled import hardware_of
from spipe.tune import TRAINED, Search

from .conftest import Command


def test_run_calibrate_compare(command: Command, plan_file: Path, tmp_path: Path) -> None:
    run, hardware = tmp_path / "run", tmp_path / "hardware.toml"
    ran = command("run", plan_file, "--steps", 6, "-o", run, "--device", "cpu", "--json", "-")
    assert ran.code == 0, ran.err
    result = json.loads(ran.out)
    assert len(result["losses"]) == 6
    assert "step 6 of 6: loss" in ran.err
    files = {"plan.json", "trace.json", "metrics.jsonl", "result.json", "train.toml", "environment.jsonl"}
    assert {path.name for path in run.iterdir()} == files

    assert "already holds a run" in command("run", plan_file, "--steps", 1, "-o", run).err
    missing = command("run", plan_file, "--steps", 1, "--data", tmp_path / "none", "-o", run, "--force")
    assert missing.code == 2
    assert {path.name for path in run.iterdir()} == files
    calibrated = command("calibrate", run, "-o", hardware, "--json", "-")
    assert calibrated.code == 0, calibrated.err
    assert json.loads(calibrated.out)["runs"][0]["measured_s"] > 0
    assert load_hardware(hardware).measured
    assert "exists; give another name" in command("calibrate", run, "-o", hardware).err
    twice = command("calibrate", run, "--judge", run, "-o", tmp_path / "twice.toml")
    assert (twice.code, "is given twice" in twice.err) == (2, True)

    both, figure = tmp_path / "both.json", tmp_path / "both.png"
    more = ("--trace", both, "--figure", figure)
    compared = command("compare", plan_file, run, "--hardware", hardware, "--json", "-", *more)
    assert compared.code == 0, compared.err
    assert figure.read_bytes().startswith(b"\x89PNG")
    events = json.loads(both.read_text())["traceEvents"]
    processes = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert processes == {f"rank {rank}, {name}" for rank in range(2) for name in ("predicted", "measured")}
    items = json.loads(compared.out)["memory"]
    known = [row for row in items if row["item"] == "weights"]
    assert len(known) == 3
    assert all(row["measured_bytes"] == pytest.approx(row["predicted_bytes"], rel=1e-3) for row in known)
    rows = json.loads(compared.out)["bubbles"]
    assert [row["cause"] for row in rows] == ["busy", *CAUSES]
    shown = command("compare", plan_file, run).out
    assert "step: predicted" in shown
    assert "than predicted" in shown
    (run / "result.json").write_text("{")
    assert "its memory is left out" in command("compare", plan_file, run).err
    assert "should end in" in command("compare", plan_file, run, "--figure", tmp_path / "x.gif").err

    for use in (["calibrate", run, "-o", tmp_path / "other.toml"], ["compare", plan_file, run]):
        refused = command(*use, "--hardware", "h200x2")
        assert refused.code == 2
        assert "the run was on device cpu (laptop), but hardware h200x2 has device cuda" in refused.err
    short = tmp_path / "short"
    assert command("run", plan_file, "--steps", 4, "-o", short).code == 0
    refused = command("calibrate", run, short, "-o", tmp_path / "other.toml")
    assert refused.code == 2
    assert f"calibrate: {short}: the trace has 1 steps after 3 warm-up steps" in refused.err

    text = (run / "trace.json").read_text()
    (run / "trace.json").write_text(text.replace('"step":5', '"step":"a"', 1))
    for use in (["calibrate", run, "-o", tmp_path / "other.toml"], ["compare", plan_file, run]):
        refused = command(*use)
        assert refused.code == 2
        assert f"{run / 'trace.json'}: damaged trace: traceEvents[" in refused.err
    assert not (tmp_path / "other.toml").exists()
    before = hardware.read_bytes()
    assert command("calibrate", run, "-o", hardware, "--force").code == 2
    assert hardware.read_bytes() == before


def test_a_run_of_another_plan_is_refused(command: Command, plan_file: Path, tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other.json"
    assert command("run", plan_file, "--steps", 5, "-o", run).code == 0
    search = ["search", "--model", "tiny", "--hardware", "laptop", "--global-batch", 6, "--sequence", 32]
    assert command(*search, "--ranks", 1, "-o", other).code == 0
    refused = command("compare", other, run)
    assert refused.code == 2
    assert "belongs to another plan" in refused.err

    plan = Plan.load(plan_file)
    plan.replace(microbatch_size=1).save(other)
    refused = command("compare", other, run)
    assert refused.code == 2
    assert "has the ops of the plan in" in refused.err


@pytest.mark.slow
def test_demo(command: Command, tmp_path: Path) -> None:
    result = command("demo", "-o", tmp_path / "demo", "--json", "-")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert 5.2 < found["loss_first"] < 5.9
    assert found["loss_last"] < 3.0
    assert sum(found["bubbles"].values()) == pytest.approx(found["idle_s"], rel=1e-9)
    assert len(found["judged"]) == 3
    assert found["elapsed_s"] < 300
    written = [json.loads(path.read_text()) for path in sorted((tmp_path / "demo").glob("predictions-*.json"))]
    assert len(written) == demo.ROUNDS
    for each in found["judged"]:
        rounds = [rows[each["plan"]] for rows in written]
        assert {row["predicted_before_s"] for row in rounds} == {each["predicted_before_s"]}
        assert median(row["predicted_after_s"] for row in rounds) == each["predicted_after_s"]
    assert "makes a folder of its own" in command("demo", "-o", tmp_path / "demo").err


def test_every_round_of_the_demo_predicts_before_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is run: the machine has another speed in every round, and predictions follow it."""
    hardware = load_hardware("laptop")
    plan = next(iter(demo.other_plans(hardware, "mobius").values()))
    speed, seen = iter([1.0, 1.4, 0.8]), []

    def train(ran: Plan, output: Path, steps: int, *_: object) -> SimpleNamespace:
        number = output.name[-1]
        if "calibrating" not in output.name:
            assert (tmp_path / f"predictions-{number}.json").exists()
        seen.append(output.name)
        return SimpleNamespace(step_s=[9.0] * 3 + [0.1 * int(number)] * (steps - 3))

    monkeypatch.setattr(demo, "_train", train)
    monkeypatch.setattr(demo, "processor_share", lambda run: 1.0)
    monkeypatch.setattr(demo, "calibrate", lambda plan, hardware, run: SimpleNamespace(hardware=next(speed)))
    monkeypatch.setattr(demo, "_predict", lambda plan, hardware: hardware if isinstance(hardware, float) else 7.0)
    judged = demo.judge(plan, hardware, tmp_path, None, Console(quiet=True), lambda text: None)
    assert [(each.predicted_before_s, each.predicted_after_s) for each in judged] == [(7.0, 1.0)] * 3
    assert [each.measured_s for each in judged] == [pytest.approx(0.2)] * 3
    assert len(seen) == demo.ROUNDS * 4


def test_profile_and_what_a_prediction_on_it_says(
    command: Command, plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling.host, "num_parameters", lambda: 1 << 16)
    monkeypatch.setattr(profiling, "process_bytes", lambda device: 3e8)
    hardware, samples = tmp_path / "hardware.toml", tmp_path / "samples.json"
    shape = ("--microbatch-size", 2, "--sequence", 32, "--device", "cpu", "--effort", 0.01)
    made = command("profile", "-o", hardware, *shape, "--json", samples)
    assert made.code == 0, made.err
    assert "layers of tiny, 2 x 32 fp32" in made.err
    assert "Profiled" in made.out
    assert hardware_of(Profile.load(samples), "hardware") == load_hardware(hardware)
    assert "exists; give another name" in command("profile", "-o", hardware, *shape).err

    simulated = command("simulate", plan_file, "--hardware", hardware, "--interval", "--json", "-")
    assert simulated.code == 0, simulated.err
    found = json.loads(simulated.out)
    assert found["interval"]["low_s"] < found["predicted"]["step_s"] < found["interval"]["high_s"]
    assert "90 % interval of the step" in command("simulate", plan_file, "--hardware", hardware, "--interval").out
    assert "no interval: this hardware does not say" in command("simulate", plan_file, "--interval").out


def test_a_trace_of_pytorch_gives_layer_times(command: Command, tmp_path: Path) -> None:
    rows = [
        {"ph": "X", "cat": "user_annotation", "name": f"block {n}", "pid": 1, "tid": 1, "ts": 100.0 * n, "dur": 50.0}
        for n in range(7)
    ]
    trace, hardware = tmp_path / "trace.json", tmp_path / "hardware.toml"
    trace.write_text(json.dumps({"traceEvents": rows}))
    job = ("--model", "tiny", "--microbatch-size", 2, "--sequence", 32, "--precision", "fp32", "--hardware", "laptop")
    result = command("kineto", trace, *job, "-o", hardware)
    assert result.code == 0, result.err
    assert "the trace has 7 forwards of blocks, tiny has 6 blocks" in result.err
    assert "50.0 us" in result.out
    seconds = [entry.seconds for entry in load_hardware(hardware).measured]
    assert seconds == [pytest.approx(50e-6)] * 2


@pytest.mark.slow
def test_tune_keeps_the_best_measured_plan(command: Command, plan_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tuned"
    result = command(
        "tune", "--plan", plan_file, "--steps", 8, "--rounds", 2, "--effort", 0.1, "--workers", 1, "-o", folder,
        "--json", "-",
    )  # fmt: skip
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert found["step_s"] <= found["first_s"]
    assert Plan.load(folder / "plan.json").digest() == found["plan"]
    assert load_hardware(folder / "hardware.toml").measured
    assert json.loads((folder / "tune.json").read_text()) == found
    assert found["trials"][0]["plan"] == Plan.load(plan_file).digest()


def test_a_tuned_plan_trains_what_the_first_one_does(
    command: Command, plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Plan.load(plan_file).replace(dropout=0.1, z_loss=1e-4, seed=7, optimizer=AdamW(max_norm=0.5))
    first.save(tmp_path / "first.json")
    searched: list[Plan] = []

    def tuned(first: Plan, hardware: HardwareSpec, search: Search, *_: object, **__: object) -> None:
        searched.append(search(hardware))
        raise SpipeError("enough")

    monkeypatch.setattr("spipe.tune.tune", tuned)
    result = command("tune", "--plan", tmp_path / "first.json", "--effort", 0.1, "--workers", 1, "-o", tmp_path / "t")
    assert "enough" in result.err
    for name in TRAINED:
        assert getattr(searched[0], name) == getattr(first, name), name
