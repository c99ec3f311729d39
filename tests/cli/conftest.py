"""Run the command line in this process, and a small plan to give it."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spipe.cli import main
from spipe.hardware import load_hardware
from spipe.model import MODELS
from spipe.plan import Plan, make_plan
from spipe.sim import simulate


@dataclass(frozen=True)
class Result:
    """What a command left behind."""

    code: int
    out: str
    err: str


Command = Callable[..., Result]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: object) -> Result:
        with pytest.raises(SystemExit) as exit_info:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(int(exit_info.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture
def refused(command: Command) -> Callable[..., str]:
    """Run a command that has to end with exit code 2, nothing on stdout and no traceback; the message."""

    def run(*arguments: object) -> str:
        result = command(*arguments)
        assert (result.code, result.out) == (2, "")
        assert "Traceback" not in result.err
        return result.err

    return run


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    make_plan(
        MODELS["tiny"],
        load_hardware("laptop"),
        num_ranks=2,
        forward_stages=1,
        backward_stages=2,
        global_batch=4,
        microbatch_size=2,
        sequence=32,
        precision="fp32",
    ).save(path)
    return path


@pytest.fixture
def edited_plan(plan_file: Path) -> Callable[[Callable[[Any], None]], Path]:
    """The plan file after a change by hand."""

    def edit(change: Callable[[Any], None]) -> Path:
        data = json.loads(plan_file.read_text())
        change(data)
        plan_file.write_text(json.dumps(data))
        return plan_file

    return edit


@pytest.fixture
def run_folder(tmp_path: Path, plan_file: Path) -> Path:
    """A folder as `spipe run` leaves it; the times are a simulation's."""
    folder = tmp_path / "run"
    folder.mkdir()
    plan = Plan.load(plan_file)
    plan.save(folder / "plan.json")
    trace = simulate(plan, num_steps=6).trace
    trace.source = "measured"
    trace.save(folder / "trace.json")
    return folder


ROW = {
    "cluster": "spipe-v100",
    "system": "SPipe",
    "used_for": "judge",
    "measured_ms": 8171.0,
    "predicted_ms": 8215.0,
}


@pytest.fixture
def validation(tmp_path: Path) -> Path:
    path = tmp_path / "v.json"
    path.write_text(
        json.dumps({"rows": [ROW, {**ROW, "used_for": "fit", "measured_ms": 12707.0}], "order_agreement": {}})
    )
    return path
