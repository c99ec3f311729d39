"""Refit: constants that made a table are found again from it, and a fit that cannot be is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from spipe.cli import main
from spipe.errors import SpipeError
from spipe.hardware import HardwareSpec, load_hardware
from spipe.sim.published import Run
from spipe.sim.refit import constants, refit
from spipe.sim.simulation import simulate
from spipe.sim.validation import validate


def run(system: str, sequence: int, microbatch: int = 2) -> Run:
    return Run(2, "9", system, "spipe-v100", 10, microbatch, 4 * microbatch, 1, sequence, None, 1.0, None)


def made_by(hardware: HardwareSpec) -> list[Run]:
    """Runs with the times that the hardware is predicted to take."""
    rows = []
    for row in (run("SPipe", 1024), run("SPipe", 512, 1), run("Mobius", 1024), run("Mobius", 512, 1)):
        times = simulate(row.plan(hardware), num_steps=1)
        rows.append(replace(row, measured_s=times.makespan_s, gpu_measured_s=times.gpu_time_s))
    return rows


def test_constants_are_found_again_from_what_they_predict() -> None:
    true = load_hardware("v100-cluster")
    start = true
    for constant, factor in zip(constants(true, network=False), (0.8, 1.5, 1.3, 0.7), strict=True):
        start = constant.put(start, factor * constant.get(start))
    found = refit(made_by(true), start)
    assert list(found.values) == ["max_efficiency", "half_efficiency_tokens", "PCIe", "adam"]
    for constant in constants(true, network=False):
        assert found.values[constant.name] == pytest.approx(constant.human(true), rel=0.02), constant.name
    assert refit(made_by(true), start) == found


def test_what_is_only_assumed_stays_as_it_is() -> None:
    assumed = load_hardware("rtx3090-cluster")
    found = refit(made_by(assumed), assumed)
    assert list(found.values) == ["max_efficiency", "PCIe", "adam"]
    assert found.hardware.accelerator.half_efficiency_tokens == pytest.approx(16, rel=0.01)


def test_fitting_happens_before_judging(tmp_path: Path) -> None:
    slower = load_hardware("v100-cluster")
    slower = slower.replace(cpu=slower.cpu.replace(adam_parameters_per_s=1e9))
    rows = [*made_by(slower)[:3], replace(made_by(slower)[3], figure="12")]
    before, after = validate(rows, fit="none"), validate(rows, fit="figure=9")
    assert [row.used_for for row in after.rows] == ["fit", "fit", "fit", "judge"]
    assert abs(before.rows[3].error or 0) > 0.1 > 10 * abs(after.rows[3].error or 0)
    assert after.to_json()["fitted_constants"]["spipe-v100"]["num_rows"] == 3


def test_too_few_rows_are_refused() -> None:
    rows = made_by(load_hardware("v100-cluster"))[:1]
    with pytest.raises(SpipeError, match="2 measured times of pipelines cannot decide 4 constants"):
        validate(rows, fit="figure=9")
    with pytest.raises(SpipeError, match="selects no row"):
        validate(rows, fit="figure=10")


def test_the_command_says_what_was_fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["jobid,name,cluster,model_size,mubs,mbs,nnode,seq,tflops,elapsed_time_ms,gpu_latency", "<Figure 9>"]
    for row in made_by(load_hardware("v100-cluster")):
        times = f"{row.measured_s * 1e3},{row.gpu_measured_s * 1e3}"  # type: ignore[operator]
        lines.append(
            f",{row.system},{row.cluster},10,{row.microbatch_size},{row.global_batch},1,{row.sequence},,{times}"
        )
    table = tmp_path / "runs.csv"
    table.write_text("\n".join(lines))
    output = tmp_path / "v.json"
    with pytest.raises(SystemExit) as ended:
        main(["validate", str(table), "--fit", "figure=9", "--json", str(output)])
    assert not ended.value.code
    assert "fitting v100-cluster to figure=9" in capsys.readouterr().err
    constants_found = json.loads(output.read_text())["fitted_constants"]["spipe-v100"]["constants"]
    assert constants_found["PCIe"]["value"] == pytest.approx(13.7, rel=0.02)
