"""Failures end every rank, promptly, with one message that says what happened."""

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from spipe.errors import SpipeError
from spipe.hardware import load_hardware
from spipe.plan import Plan
from spipe.runtime import RankProcesses, RunFailedError, RunResult, run
from spipe.runtime.hooks import TestHooks


def _gone(processes: list[Any]) -> bool:
    return all(process.poll() is not None for process in processes)


@pytest.mark.parametrize("transport", ["host", "gloo"])
def test_a_killed_rank_ends_all(small_plan: Callable[..., Plan], tmp_path: Path, transport: str) -> None:
    with RankProcesses(2) as ranks:
        processes = list(ranks.processes)
        hooks = TestHooks(kill=(1, 2))
        with pytest.raises(RunFailedError, match=r"rank 1 ended: killed by signal 9 \(SIGKILL\).*after step [01]"):
            run(small_plan(), steps=500, output=tmp_path / "run", ranks=ranks, transport=transport, hooks=hooks)
        assert _gone(processes)
    # No clean-up is needed before the next run.
    again = run(small_plan(), steps=2, output=tmp_path / "again", transport=transport)
    assert len(again.losses) == 2


@pytest.mark.parametrize("transport", ["host", "gloo"])
def test_an_error_names_rank_lane_and_op(small_plan: Callable[..., Plan], tmp_path: Path, transport: str) -> None:
    with RankProcesses(2) as ranks:
        processes = list(ranks.processes)
        started = time.monotonic()
        plan = small_plan()
        owner = plan.layout.backward[0].rank
        hooks = TestHooks(fail=(owner, 3, "BACKWARD B0 m1"))
        with pytest.raises(RunFailedError) as caught:
            run(plan, steps=500, output=tmp_path / "run", ranks=ranks, transport=transport, hooks=hooks)
        message = str(caught.value)
        assert f"rank {owner}, lane compute {owner}, BACKWARD B0 m1 of step 3: RuntimeError: a failure" in message
        assert time.monotonic() - started < 60
        assert _gone(processes)
    assert not (tmp_path / "run" / "result.json").exists()


def test_a_hang_is_reported_with_every_pending_op(small_plan: Callable[..., Plan], tmp_path: Path) -> None:
    plan = small_plan()
    owner = plan.layout.backward[1].rank
    hooks = TestHooks(hang=(owner, 1, "RECOMPUTE B1 m0"))
    with pytest.raises(RunFailedError, match="no op of any rank completed for 2 s") as caught:
        run(plan, steps=5, output=tmp_path / "run", timeout_s=2.0, hooks=hooks)
    message = str(caught.value)
    assert f"rank {owner}, compute {owner}: RECOMPUTE B1 m0 of step 1 has all it needs" in message
    assert f"rank {1 - owner}, control {1 - owner}: VALIDATE R{1 - owner} of step 1 waits for" in message


def test_ranks_end_with_their_launcher(tmp_path: Path) -> None:
    ranks = RankProcesses(2)
    processes = list(ranks.processes)
    ranks._port = int(ranks.pipes[0].recv())
    for pipe in ranks.pipes:
        pipe.close()
    for process in processes:
        process.wait(timeout=20)
    ranks.processes.clear()


def test_two_jobs_at_once(small_plan: Callable[..., Plan], tmp_path: Path) -> None:
    plan = small_plan(microbatches=2)
    with ThreadPoolExecutor(2) as jobs:
        one, two = jobs.map(lambda name: run(plan, steps=3, output=tmp_path / name), ["one", "two"])
    assert one.losses == two.losses


def test_a_run_directory_is_used_once(run_plan: Callable[..., RunResult], small_plan: Callable[..., Plan]) -> None:
    result = run_plan(small_plan(1, backward=1, microbatches=1), 1)
    with pytest.raises(SpipeError, match="already holds a run"):
        run_plan(small_plan(1, backward=1, microbatches=1), 1, output=result.output)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps = 0 should be at least 1"),
        ({"transport": "carrier pigeon"}, "unknown transport 'carrier pigeon'"),
        ({"transport": "nccl"}, "needs device cuda"),
        ({"data": "nowhere.txt"}, "nowhere.txt: cannot read the training text"),
        ({"host_memory_bytes": 1 << 20}, r"needs .* GiB, 0.001 GiB are available(.|\n)*weights"),
        ({"timeout_s": 0.0}, "timeout_s = 0.0 should be positive"),
    ],
    ids=str,
)
def test_bad_input_is_refused_before_anything_starts(
    small_plan: Callable[..., Plan], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    options: dict[str, Any] = {"steps": 1, "output": tmp_path / "run"} | change
    with pytest.raises(SpipeError, match=message):
        run(small_plan(), **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, "rope_scaling of type 'yarn' cannot be run; supported are linear and"),
        ({"rope_type": "llama3", "factor": 4.0}, "rope_scaling of type llama3 lacks 'low_freq_factor'"),
    ],
)
def test_positions_that_cannot_be_scaled_are_refused(
    small_plan: Callable[..., Plan], tmp_path: Path, scaling: dict[str, Any], message: str
) -> None:
    plan = small_plan()
    with pytest.raises(SpipeError, match=message):
        run(plan.replace(model=plan.model.replace(rope_scaling=scaling)), steps=1, output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_several_hosts_are_refused(small_plan: Callable[..., Plan], tmp_path: Path) -> None:
    hardware = load_hardware("laptop").model_copy(update={"ranks_per_host": 1, "num_hosts": 2})
    plan = small_plan().model_copy(update={"hardware": hardware})
    with pytest.raises(SpipeError, match="2 ranks over 2 hosts"):
        run(plan, steps=1, output=tmp_path / "run")


def test_a_cuda_plan_without_a_device(small_plan: Callable[..., Plan], tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    plan = small_plan().model_copy(update={"hardware": load_hardware("h200x2")})
    with pytest.raises((SpipeError, RunFailedError), match="no CUDA device"):
        run(plan, steps=1, output=tmp_path / "run", host_memory_bytes=1 << 40)


def test_interrupt_ends_the_ranks(small_plan: Callable[..., Plan], tmp_path: Path) -> None:
    with RankProcesses(2) as ranks:
        processes = list(ranks.processes)

        def interrupt(row: dict[str, Any]) -> None:
            if row.get("step") == 1:
                os.kill(os.getpid(), signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            run(small_plan(), steps=500, output=tmp_path / "run", ranks=ranks, log=interrupt)
        assert _gone(processes)
