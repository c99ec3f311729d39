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
from spipe.plan import make_plan


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
