"""The same run under torchrun and mpirun."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference import differences

from spipe.plan import Plan
from spipe.runtime import RunResult

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
LAUNCHERS = {
    "alone": [sys.executable],
    "torchrun": [str(BIN / "torchrun"), "--nproc-per-node", "2"],
    "mpirun": [str(BIN / "mpirun"), "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable],
}


def _launch(launcher: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    if not Path(LAUNCHERS[launcher][0]).exists():
        pytest.skip(f"{launcher} is not installed")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "3"}
    command = [*LAUNCHERS[launcher], "-m", "spipe.runtime", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_launchers_give_the_same_bits(
    run_plan: Callable[..., RunResult], small_plan: Callable[..., Plan], tmp_path: Path, launcher: str
) -> None:
    plan = small_plan(2, compute_threads=1)
    plan.save(tmp_path / "plan.json")
    run = tmp_path / "launched"
    done = _launch(launcher, tmp_path / "plan.json", "--steps", "3", "-o", run, "--dump-state", run / "state.pt")
    assert done.returncode == 0, done.stderr
    assert "step 2: loss" in done.stdout
    local = run_plan(plan, 3)
    assert json.loads((run / "result.json").read_text())["losses"] == local.losses
    assert differences(torch.load(run / "state.pt"), torch.load(local.output / "state.pt")) == []


@pytest.mark.parametrize("launcher", list(LAUNCHERS))
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--steps", "0", "--steps 0 is not"),
        ("--trace-steps", "x", "--trace-steps x is not"),
        ("--data", "/none", "/none"),
    ],
)
def test_bad_input_is_one_message(
    small_plan: Callable[..., Plan], tmp_path: Path, launcher: str, option: str, value: str, message: str
) -> None:
    small_plan(2).save(tmp_path / "plan.json")
    arguments = {"--steps": "1", option: value}
    options = [text for pair in arguments.items() for text in pair]
    done = _launch(launcher, tmp_path / "plan.json", *options, "-o", tmp_path / "run")
    assert done.returncode != 0
    assert done.stderr.count(f"spipe: {message}") == 1
    assert "spipe/runtime" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_a_wrong_number_of_ranks(small_plan: Callable[..., Plan], tmp_path: Path, launcher: str) -> None:
    small_plan(4, microbatches=2).save(tmp_path / "plan.json")
    done = _launch(launcher, tmp_path / "plan.json", "--steps", "1", "-o", tmp_path / "run")
    assert done.returncode != 0
    assert done.stderr.count("is for 4 ranks, but 2 were started") == 1
