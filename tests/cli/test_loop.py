"""Run, calibrate and compare as a user does; the demo as a whole."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from spipe import demo
from spipe.hardware import load_hardware
from spipe.metrics import CAUSES
from spipe.plan import Plan

from .conftest import Command


def test_run_calibrate_compare(command: Command, plan_file: Path, tmp_path: Path) -> None:
    run, hardware = tmp_path / "run", tmp_path / "hardware.toml"
    ran = command("run", plan_file, "--steps", 6, "-o", run, "--device", "cpu", "--json", "-")
    assert ran.code == 0, ran.err
    result = json.loads(ran.out)
    assert len(result["losses"]) == 6
    assert "step 6 of 6: loss" in ran.err
    assert {path.name for path in run.iterdir()} == {
        "plan.json",
        "trace.json",
        "metrics.jsonl",
        "result.json",
        "train.toml",
    }

    assert "already holds a run" in command("run", plan_file, "--steps", 1, "-o", run).err
    missing = command("run", plan_file, "--steps", 1, "--data", tmp_path / "none", "-o", run, "--force")
    assert missing.code == 2
    assert {path.name for path in run.iterdir()} == {
        "plan.json",
        "trace.json",
        "metrics.jsonl",
        "result.json",
        "train.toml",
    }
    calibrated = command("calibrate", run, "-o", hardware, "--json", "-")
    assert calibrated.code == 0, calibrated.err
    assert json.loads(calibrated.out)["runs"][0]["measured_s"] > 0
    assert load_hardware(hardware).measured
    assert "exists; give another name" in command("calibrate", run, "-o", hardware).err

    compared = command("compare", plan_file, run, "--hardware", hardware, "--json", "-")
    assert compared.code == 0, compared.err
    rows = json.loads(compared.out)["bubbles"]
    assert [row["cause"] for row in rows] == ["busy", *CAUSES]
    assert "step: predicted" in command("compare", plan_file, run).out

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
    again = found["attempts"] - 1
    predictions = tmp_path / "demo" / (f"predictions-again-{again}.json" if again else "predictions.json")
    assert json.loads(predictions.read_text()) == {
        each["plan"]: {key: each[key] for key in ("predicted_before_s", "predicted_after_s")}
        for each in found["judged"]
    }
    assert "makes a folder of its own" in command("demo", "-o", tmp_path / "demo").err


@pytest.mark.parametrize(("changes", "attempts"), [([1.05], 1), ([1.3, 1.0], 2), ([0.8, 1.3, 1.02], 3)])
def test_demo_judges_again_if_the_machine_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: list[float], attempts: int
) -> None:
    """Nothing is run: ``changes`` is by how much the calibrating plan runs slower in the rounds of each attempt."""
    hardware = load_hardware("laptop")
    plan = next(iter(demo.other_plans(hardware, "mobius").values()))
    judging = demo._Judging(plan, hardware, tmp_path, None, Console(quiet=True), lambda text: None)
    judging.calibrated_s = 0.1
    seen: list[str] = []

    def train(ran: Plan, output: Path, steps: int, trace_steps: int, processes: object, say: object) -> SimpleNamespace:
        seen.append(output.name)
        if steps == demo.ROUND_STEPS:
            assert judging._new("predictions.json").exists(), "a judged plan ran before the predictions were written"
        return SimpleNamespace(step_s=[9.0] * 3 + [0.1 * changes[judging.attempt - 1]] * (steps - 3))

    monkeypatch.setattr(demo, "_train", train)
    monkeypatch.setattr(demo, "processor_share", lambda run: 1.0)
    monkeypatch.setattr(demo, "_predict", lambda plan, hardware: 0.1)
    monkeypatch.setattr(judging, "calibrate", lambda run: None)
    judging.judge(time.monotonic() + 100)
    assert judging.attempt == attempts
    assert judging.drift == pytest.approx(changes[-1] - 1)
    assert [each.measured_s for each in judging.judged] == [pytest.approx(0.1 * changes[-1])] * 3
    assert len(seen) == attempts * demo.ROUNDS * 4 + (attempts - 1)
    judging.attempt, changes = 1, [1.3, 1.3]
    judging.judge(time.monotonic() - 1)
    assert judging.attempt == 1, "nothing is repeated after the deadline"
