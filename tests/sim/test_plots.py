"""Figures: made from result files, deterministic, refused with a reason."""

import json
from pathlib import Path

import pytest

from spipe.cli import main


def code(*arguments: object) -> int:
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as exit_:
        return int(exit_.code or 0)
    return 0


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
    path.write_text(json.dumps({"rows": [ROW, {**ROW, "used_for": "fit", "measured_ms": 12707.0}]}))
    return path


@pytest.fixture
def simulation(tmp_path: Path) -> Path:
    path = tmp_path / "s.json"
    result = {
        "busy_s": [1.0, 1.0],
        "idle_s": 1.0,
        "bubbles": {"fill": 0.25, "drain": 0.75},
        "predicted": {"step_s": 1.5},
    }
    path.write_text(json.dumps(result))
    return path


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_figures_are_made(validation: Path, simulation: Path, tmp_path: Path, suffix: str) -> None:
    for result in (validation, simulation):
        figure = tmp_path / f"{result.stem}.{suffix}"
        assert code("plot", result, "-o", figure) == 0
        assert figure.stat().st_size > 1000
        assert code("plot", result, "-o", figure) == 2  # never overwritten unasked
        drawn = figure.read_bytes()
        assert code("plot", result, "-o", figure, "--force") == 0
        assert figure.read_bytes() == drawn


def test_bad_input_is_named(
    validation: Path, simulation: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    other.write_text("[]")
    empty = tmp_path / "empty.json"
    empty.write_text('{"rows": []}')
    for arguments, message in (
        ((validation, "-o", tmp_path / "a.gif"), "should end in .png"),
        ((other, "-o", tmp_path / "a.png"), "neither a result"),
        ((tmp_path / "none.json", "-o", tmp_path / "a.png"), "not a readable result"),
        ((validation, simulation, "-o", tmp_path / "a.png"), "give it alone"),
        ((simulation, simulation, "-o", tmp_path / "a.png"), "the same name"),
        ((empty, "-o", tmp_path / "a.png"), "nothing to plot"),
    ):
        assert code("plot", *arguments) == 2
        assert message in capsys.readouterr().err
