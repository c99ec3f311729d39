"""The training benchmark: what it asks for, how it watches the systems, and a whole one in miniature on the CPU."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from spipe.runtime import layers

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench_train  # noqa: E402
import peers  # noqa: E402
import watching  # noqa: E402

TINY = (
    *("--device", "cpu", "--layers", "2", "--hidden", "64", "--ffn", "96", "--heads", "4", "--vocabulary", "256"),
    *("--sequence", "16", "--global-batch", "4", "--microbatch", "1", "--cap", "2", "--steps", "2", "--warmup", "1"),
)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["bench_train.py", *TINY, *map(str, arguments)])
    return bench_train.main()


def given(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["bench_train.py", *TINY, *arguments])
    return bench_train.arguments()


def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> peers.Work:
    plan_file = tmp_path / "plan.json"
    bench_train.plan_of(given(monkeypatch, *arguments)).save(plan_file)
    return peers.Work(str(plan_file), steps=2, warmup=1, data=None, output=str(tmp_path / "run"))


def test_we_run_first_and_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def order(systems: str) -> list[str]:
        return bench_train.systems_of(given(monkeypatch, "--systems", systems))

    assert order("ours,fsdp2, roundpipe") == ["ours", "fsdp2", "roundpipe", "ours"]
    assert order("ours") == ["ours"]
    assert order("deepspeed") == ["deepspeed"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--systems", "ours,megatron"), "--systems has 'megatron'; choose from ours, roundpipe"),
        (("--options", "{"), "is not JSON"),
        (("--options", "[]"), "should be a JSON object"),
        (("--options", '{"weight_slot": 3}'), "weight_slot"),
        (("--hardware", "h200x1"), "has device cuda, but --device is cpu"),
        (("--global-batch", "3", "--microbatch", "2"), "should be a multiple of --microbatch 2"),
        (("--output", str(SCRIPTS)), "is there and not empty"),
        (("--json", "/none/rows.json"), "--json /none/rows.json: cannot write there"),
    ],
)
def test_what_cannot_work_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert run(monkeypatch, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.startswith("error: ")


def test_a_plan_for_another_job_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = bench_train.plan_of(given(monkeypatch))
    plan.save(tmp_path / "plan.json")
    file = str(tmp_path / "plan.json")
    again = bench_train.plans_of(given(monkeypatch, "--plan", f"again={file}", "--options", '{"barrier": true}'))[
        "again"
    ]
    assert again.options.barrier
    assert again.layout == plan.layout
    with pytest.raises(bench_train.SpipeError, match="global_batch = 4 instead of 8"):
        bench_train.plans_of(given(monkeypatch, "--plan", file, "--global-batch", "8"))
    for twice in (f"fsdp2={file}", f"again={file}"):
        with pytest.raises(bench_train.SpipeError, match="is taken"):
            bench_train.plans_of(given(monkeypatch, "--plan", f"again={file}", "--plan", twice))


def test_several_gpus_get_the_searched_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = bench_train.plan_of(given(monkeypatch, "--gpus", "2"))
    assert plan.layout.num_ranks == 2
    assert plan.optimizer.learning_rate == bench_train.LEARNING_RATE
    assert (plan.microbatch_size, plan.num_microbatches) == (1, 4)


def test_the_plain_model_is_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    job = work(tmp_path, monkeypatch)
    spec = job.plan.model
    model = peers.CheckpointedModel(spec)
    ours: list[dict[str, torch.Tensor]] = [{} for _ in range(spec.num_total_layers)]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = job.initial(name)
            parameter.copy_(value)
            _, layer, inside = name.split(".", 2)
            ours[int(layer)][inside] = value
    assert [set(p) for p in ours] == [set(spec.parameter_shapes(spec.layer_kind(i))) for i in range(len(ours))]
    tokens, labels = job.batch(0, 0)
    rotary = layers.RotaryTable.build(spec, job.plan.sequence, torch.float32, torch.device("cpu"))
    x = layers.embedding(ours[0], tokens)
    for p in ours[1:-1]:
        x = layers.block(p, x, spec, rotary)
    loss = layers.head(ours[-1], x, labels, spec)
    assert model(tokens, labels).item() == pytest.approx(loss.item(), rel=1e-6)


def test_memory_of_the_whole_tree_is_seen_and_a_time_limit_ends_it(tmp_path: Path) -> None:
    child = "import time; held = bytearray(range(256)) * (200 << 12); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], start_new_session=True)"
    process = subprocess.Popen([sys.executable, "-c", parent])
    time.sleep(0.5)
    family = watching.descendants(process.pid)
    seen = watching.watch(process, 4.0)
    assert seen.timed_out
    assert len(family) == 2
    assert 200 << 20 <= seen.host_bytes < 400 << 20
    assert not any((Path("/proc") / str(pid)).exists() for pid in family)
    (tmp_path / "log").write_text("in a thread\n  OutOfMemoryError: too much\n")
    error = bench_train.result_of(process, tmp_path / "none", tmp_path / "log", seen.timed_out, 4.0)["error"]
    assert error == "not done after the time limit of 4 s (OutOfMemoryError: too much)"


def test_a_killed_system_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    assert not watching.watch(process, 60).timed_out
    (tmp_path / "log").write_text("its last words\n")
    error = bench_train.result_of(process, tmp_path / "none", tmp_path / "log", False, 60)["error"]
    assert "killed by SIGKILL, perhaps for lack of memory" in error
    assert "its last words" in capsys.readouterr().err


def test_a_system_that_raises_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = work(tmp_path, monkeypatch)
    job.save(tmp_path / "work.json")
    Path(job.plan_file).write_text("{}")
    command = [sys.executable, SCRIPTS / "bench_train.py", "--worker", "reference", "work.json", "result.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert json.loads((tmp_path / "result.json").read_text())["error"].startswith("SpipeError: ")


def test_table_is_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    blank = dict.fromkeys(bench_train.ROW)
    rows = [
        blank
        | {"system": "ours", "tokens_per_s": 14503.0, "step_s": 2.2594, "exact": True, "host_peak_bytes": 90 << 30},
        blank | {"system": "roundpipe-exact", "exact": True, "error": "roundpipe is not installed"},
    ]
    about = {
        "machine": {"cores": 16, "torch": "2.11", "date": "2026-01-01"}, "model": {"parameters": 43e8},
        "tokens_per_step": 32768, "cap_gib": 24.0, "gpus": 1, "ceiling": [{"step_s": 2.1}, {"error": "none"}],
    }  # fmt: skip
    facts, titles, first, second = bench_train.table(rows, about).strip().splitlines()
    assert "4.30 B parameters, 32,768 tokens a step, cap 24 GiB; compute ceiling 2.100 s and - s" in facts
    assert first.split() == ["ours", "14,503", "2.259", "-", "-", "-", "-", "90.0", "-", "yes"]
    assert second.endswith("yes  roundpipe is not installed")
    assert [line.index("yes") + 3 for line in (first, second)] == [len(titles)] * 2


@pytest.mark.slow
def test_a_whole_benchmark_in_miniature(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(bench_train, "find_spec", lambda package: None if package == "roundpipe" else package)
    output, file = tmp_path / "out", tmp_path / "result.json"
    assert run(monkeypatch, "--check", "--systems", "ours,fsdp2,roundpipe", "--json", file, "--output", output) == 0
    result = json.loads(file.read_text())
    rows = result["rows"]
    assert [row["system"] for row in rows] == ["ours", "fsdp2", "roundpipe", "ours"]
    assert all(set(bench_train.ROW) <= set(row) for row in rows)
    assert rows[2]["error"] == "roundpipe is not installed"
    assert [row["exact"] for row in rows] == [True, True, False, True]
    for row in (rows[0], rows[1], rows[3]):
        assert row["error"] is None
        assert len(row["step_times_s"]) == 2
        assert row["tokens_per_s"] == pytest.approx(4 * 16 / row["step_s"])
        assert row["losses"] == pytest.approx(rows[0]["losses"], rel=1e-5)
        assert row["host_peak_bytes"] > 100 << 20
        assert row["hfu"] > 0
    assert len(result["ceiling"]) == 2
    assert result["machine"]["torch"] == torch.__version__
    assert len(result["check"]["losses"]) == 5
    assert result["check"]["max_difference"] < 1e-5
    assert (output / "2-reference.log").exists()
    assert "compute gaps of rank 0" in capsys.readouterr().out


def test_a_ceiling_counts_the_passes_that_a_plan_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_train.py", "--layers", "6"])
    plan = bench_train.plan_of(bench_train.arguments())
    assert [(stage.first, stage.stop) for stage in plan.layout.forward] == [(0, 2), (2, 3), (3, 4), (4, 5)]
    assert [(stage.first, stage.stop) for stage in plan.layout.backward][-1] == (5, 8)
    times = {
        "block_forward_s": 1.0, "block_recompute_and_backward_s": 10.0, "block_whole_recompute_and_backward_s": 100.0,
        "head_s": 1000.0,
    }  # fmt: skip
    assert bench_train.ceiling_s(times, plan) == 8 * (4 * 1 + 4 * 10 + 2 * 100 + 1000)
    assert bench_train.ceiling_s(times, plan, whole=True) == 8 * (6 * 1 + 6 * 100 + 1000)
    output = plan.replace(options=plan.options.model_copy(update={"recompute_output": True}))
    assert bench_train.ceiling_s(times, output) == 8 * (4 * 1 + 6 * 100 + 1000)
