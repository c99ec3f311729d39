"""The walk as a script: its plans fit the machine that they are for, and on the CPU all of its checks pass."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import train_walk  # noqa: E402

from spipe.hardware import load_hardware  # noqa: E402
from spipe.memory import memory  # noqa: E402


def test_a_billion_parameters_fit_one_gpu_in_both_parts(tmp_path: Path) -> None:
    """Two ranks share a GPU: what both need is there, on the device and on its host, and two checkpoints on disk."""
    given = argparse.Namespace(device="cuda", ranks=2, **train_walk.DEFAULTS["cuda"])
    walk = train_walk.Walk(given, tmp_path)
    assert walk.model.num_parameters() >= 1e9
    machine = load_hardware("h200x1")
    plans = walk.plans(walk.model)
    assert [plan.layout.num_ranks for plan in plans] == [2, 1]
    assert len({plan.schedule for plan in plans}) == 2
    for plan in plans:
        plan.require_runnable()
        needs = memory(plan, evaluates=True)
        assert sum(needs.rank_bytes) < 0.5 * machine.accelerator.memory_bytes
        assert sum(needs.hosts[0].values()) < 0.5 * machine.cpu.memory_bytes
    assert 2 * 14 * walk.model.num_parameters() < 40e9


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_whole_walk_on_the_cpu(tmp_path: Path, precision: str) -> None:
    model = tmp_path / "small.toml"
    model.write_text(
        'name = "small"\nnum_layers = 4\nhidden_size = 32\nffn_size = 64\nnum_heads = 4\nnum_kv_heads = 2\n'
        'vocab_size = 256\nfamily = "qwen3"\nqk_norm = true\ntied_embeddings = true\n'
    )
    command = [
        sys.executable,
        ROOT / "scripts" / "train_walk.py",
        "--device",
        "cpu",
        "--model",
        model,
        "--sequence",
        16,
    ]
    command += [
        "--steps",
        40,
        "--precision",
        precision,
        "--json",
        tmp_path / "walk.json",
        "--output",
        tmp_path / "walk",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, timeout=190)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "walk.json").read_text())
    parts = {part["part"]: part for part in report["parts"]}
    assert parts["model folder"]["shards"] > 1
    first, second = parts["train, 2 ranks, SIGTERM"], parts["go on, 1 rank, to the end"]
    assert first["steps"] + second["steps"] == parts["all steps at once, 1 rank"]["steps"] == 40
    assert second["last loss"] < first["first loss"]
    assert len(report["checks"]) >= 3
    assert all(check["passed"] for check in report["checks"])


def test_a_check_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = {"parts": [], "checks": [{"check": "weights", "passed": False, "found": "others"}]}
    monkeypatch.setattr(train_walk.Walk, "run", lambda self: report)
    monkeypatch.setattr(sys, "argv", ["train_walk.py", "--device", "cpu", "--json", str(tmp_path / "walk.json")])
    assert train_walk.main() == 1
    assert json.loads((tmp_path / "walk.json").read_text()) == report
    report["checks"][0]["passed"] = True
    assert train_walk.main() == 0
    monkeypatch.setattr(sys, "argv", ["train_walk.py", "--device", "cpu", "--output", str(tmp_path)])
    assert train_walk.main() == 2
