"""The example with modules of one's own: run as a program, it has the bits of plain PyTorch."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

import train_modules  # noqa: E402
import user_layers as user  # noqa: E402

from spipe.hardware import load_hardware  # noqa: E402
from spipe.runtime import RunResult, describe  # noqa: E402
from spipe.runtime.checkpoint import Checkpoint, find_checkpoint  # noqa: E402
from spipe.sim import search, simulate  # noqa: E402


def start(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=200,
    )  # fmt: skip


@pytest.mark.parametrize(("ranks", "low_rank"), [(2, 0), pytest.param(1, 4, marks=pytest.mark.slow)], ids=str)
def test_the_example_has_the_bits_of_pytorch(tmp_path: Path, ranks: int, low_rank: int) -> None:
    options = ["--lora", low_rank] if low_rank else []
    done = start(
        ROOT / "scripts" / "train_modules.py", "--ranks", ranks, "--steps", 3, "-o", tmp_path / "run", *options
    )
    assert done.returncode == 0, done.stderr
    layers = train_modules.make_layers()
    if low_rank:
        train_modules.add_low_rank(layers, low_rank)
    before = copy.deepcopy(nn.Sequential(*layers).state_dict())
    plan = train_modules.plan_of(layers, ranks)
    losses = user.plain(layers, train_modules.loss, None, plan, 3)
    assert RunResult.load(tmp_path / "run").losses == losses
    assert done.stdout.startswith(f"loss {losses[0]} -> {losses[-1]}, ")
    files = Checkpoint.load(find_checkpoint(tmp_path / "run")).weight_files()
    state = nn.Sequential(*layers).state_dict()
    assert files.keys() == state.keys()
    for name, value in state.items():
        found = torch.empty_like(value)
        files[name].read_into(name, found)
        assert torch.equal(found, value), name
    changed = {name for name, value in state.items() if not torch.equal(value, before[name])}
    if low_rank:
        assert changed == {name for name in state if name.endswith((".a.weight", ".b.weight"))}
    else:
        assert changed == state.keys()


def test_a_plan_for_modules_is_searched_and_simulated() -> None:
    spec = describe(train_modules.make_layers(), train_modules.loss, microbatch_size=2, sequence=train_modules.SEQUENCE)
    result = search(
        spec, load_hardware("laptop"), global_batch=8, sequence=train_modules.SEQUENCE, precision="fp32",
        schedules=["spipe"], num_ranks=[2],
    )  # fmt: skip
    assert result.plan.model == spec
    assert result.lower_bound_s <= simulate(result.plan).step_s == result.simulation.step_s


@pytest.mark.slow
def test_a_script_that_trains_when_it_is_imported_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        """import torch
from torch import nn
from spipe.hardware import load_hardware
from spipe.plan import make_plan
from spipe.runtime import describe, train

class Mine(nn.Linear): pass

def data(step, microbatch):
    return torch.ones(2, 4), torch.zeros(2, 4)

layers, loss = [Mine(4, 4), nn.Linear(4, 4)], nn.MSELoss()
spec = describe(layers, loss, data, microbatch_size=2)
plan = make_plan(spec, load_hardware("laptop"), num_ranks=1, forward_stages=1, backward_stages=1, global_batch=2,
                 microbatch_size=2, sequence=1, precision="fp32")
train(layers, loss, data, plan, steps=1, output="run")
"""
    )
    done = subprocess.run(
        [sys.executable, script], env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True,
        text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode != 0
    assert 'put what it does under `if __name__ == "__main__":`' in done.stderr
