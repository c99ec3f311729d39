"""The benchmark of the closed loop: its plans, what it says of results, and the whole of it on small models."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench_loop  # noqa: E402

from spipe.hardware import load_hardware  # noqa: E402
from spipe.memory import memory  # noqa: E402


@pytest.mark.parametrize(("device", "machine"), [("cuda", "h200x1"), ("cpu", "laptop")])
def test_the_plans_fit_can_be_run_and_differ(device: str, machine: str) -> None:
    hardware = load_hardware(machine)
    if device == "cuda":
        hardware = hardware.override({"accelerator.memory_gib": bench_loop.CAP_GIB})
    makers = bench_loop.cuda_plans(False) if device == "cuda" else bench_loop.cpu_plans(False)
    plans = [make(hardware) for make in makers.values()]
    assert len({plan.digest() for plan in plans}) == len(plans) >= 6
    for plan in plans:
        plan.require_runnable()
        assert memory(plan).fits
    first, *others = makers
    assert first.startswith("calibrating")
    assert not any(name.startswith("calibrating") for name in others)


def row(plan: str, used_for: str, predicted_s: float, measured_s: float, **more: Any) -> dict[str, Any]:
    one = {"profiled_s": 2 * measured_s, "predicted_s": predicted_s, "measured_s": measured_s,
           "interval_s": (0.9 * predicted_s, 1.1 * predicted_s), "device_bytes": None, "host_bytes": 100}  # fmt: skip
    made = {"plan": plan, "used_for": used_for, "model": "m", "tokens": 10, "ranks": 1, "rounds": [one],
            "predicted_device_bytes": None, "predicted_host_bytes": 103}  # fmt: skip
    return bench_loop.summary_of({**made, **more})


def test_errors_intervals_and_order_are_summed_up() -> None:
    rows = [row("a", "fit", 1.0, 1.0), row("b", "judge", 2.2, 2.0), row("c", "judge", 1.5, 3.0)]
    found = bench_loop.summary(rows)
    assert found["mean_error"] == pytest.approx((0.1 + 0.5) / 2)
    assert found["max_error"] == pytest.approx(0.5)
    assert found["mean_error_of_the_profile_alone"] == pytest.approx(1.0)
    assert (found["in_interval"], found["plans"]) == (1, 2)
    assert (found["order_kept"], found["pairs"]) == (2, 3), "b and c are predicted the other way round"
    assert found["max_host_memory_error"] == pytest.approx(0.03)
    assert found["max_device_memory_error"] is None
    facts = {"machine": {"cpu": "C", "cores": 2, "gpus": [], "torch": "2", "date": "now"}}
    text = bench_loop.table({"rows": rows, "summary": found, **facts})
    assert "+10.0%" in text
    assert "off by 30.0% on average, 50.0% at most" in text


@pytest.mark.slow
def test_the_whole_loop_on_small_models(tmp_path: Path) -> None:
    """A loose bound: virtual machines change their speed between a prediction and the run."""
    command = [
        sys.executable, str(SCRIPTS / "bench_loop.py"), "--device", "cpu", "--tiny", "--rounds", "2", "--effort", "0.3",
        "--json", str(tmp_path / "loop.json"), "--output", str(tmp_path / "loop"), "--most-error", "0.5",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "loop.json").read_text())
    predictions = [json.loads(line) for line in (tmp_path / "loop/predictions.json").read_text().splitlines()]
    judged = [row for row in result["rows"] if row["used_for"] == "judge"]
    for row in judged:
        for number, each in enumerate(row["rounds"]):
            (written,) = [p for p in predictions if (p["round"], p["plan"]) == (number, row["plan"])]
            assert written["predicted_s"] == each["predicted_s"]
            assert "measured_s" not in written
