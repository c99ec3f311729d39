"""What a run leaves behind."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import spipe
from spipe.errors import SpipeError
from spipe.memory import memory
from spipe.metrics import analyse
from spipe.model import MODELS
from spipe.ops import COLLECTIVES, RECVS, SENDS
from spipe.plan import Plan
from spipe.program import Program
from spipe.runtime import RunResult
from spipe.runtime.environment import git_commit
from spipe.runtime.job import Job
from spipe.runtime.results import measured_trace
from spipe.runtime.store import StoreLayout
from spipe.trace import Trace

STEPS = 4


def test_the_trace_respects_the_program(run_plan: Callable[..., RunResult], small_plan: Callable[..., Plan]) -> None:
    plan = small_plan(2, backward=3, tied=True)
    program = plan.program()
    result = run_plan(plan, STEPS, trace_steps=2)
    trace = Trace.load(result.output / "trace.json")
    trace.check_matches(program, "test")
    assert trace.source == "measured"
    assert trace.steps() == [2, 3]
    assert len(trace) == 2 * len(program)
    row = {(step, op): n for n, (step, op) in enumerate(zip(trace.step, trace.op, strict=True))}
    for (step, op), n in row.items():
        assert trace.ready_s[n] <= trace.start_s[n] <= trace.end_s[n]
        assert trace.cpu_s[n] >= 0
        # A message has one start for both sides, and a mailbox lets the sender go before the receiver has it.
        slack = 0.0 if program.partner[op] < 0 else math.inf
        for dependency in program.dependencies[op]:
            if program.kind[dependency] not in SENDS:
                assert trace.end_s[row[step, dependency]] <= trace.start_s[n] + slack
        if step == 3:
            for dependency in program.carried[op]:
                if program.kind[dependency] not in SENDS:
                    assert trace.end_s[row[2, dependency]] <= trace.start_s[n] + slack
        if program.kind[op] in COLLECTIVES:  # waiting for the last rank is not the collective's time
            together = next(members for members in program.collectives() if op in members)
            assert len({trace.start_s[row[step, i]] for i in together}) == 1
        if program.partner[op] >= 0:
            partner = row[step, program.partner[op]]
            assert (trace.start_s[n], trace.end_s[n]) == (trace.start_s[partner], trace.end_s[partner])


def test_metrics_and_summary(run_plan: Callable[..., RunResult], small_plan: Callable[..., Plan]) -> None:
    plan = small_plan(2)
    rows: list[dict[str, object]] = []
    result = run_plan(plan, STEPS, log=rows.append)
    written = [json.loads(line) for line in (result.output / "metrics.jsonl").read_text().splitlines()]
    assert written == rows
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert [row["loss"] for row in rows] == result.losses
    assert all(row["tokens_per_s"] == plan.tokens_per_step / row["step_s"] for row in written)
    region = StoreLayout(plan, STEPS, STEPS).num_bytes
    assert all(row["host_bytes"] > region + 2 * 50e6 and row["device_peak_bytes"] == 0 for row in written)
    assert Plan.load(result.output / "plan.json") == plan
    (start,) = [json.loads(line) for line in (result.output / "environment.jsonl").read_text().splitlines()]
    assert start["versions"]["torch"] == result.summary["versions"]["torch"]
    assert start["git"]["spipe"] == git_commit(Path(spipe.__file__).parent)
    assert start["cores"] >= 1
    assert start["command"][1:] == sys.argv
    assert result.summary["num_updates"] == STEPS
    assert result.summary["ops_per_step"]["BACKWARD"] == 4 * 4
    assert RunResult.load(result.output) == result
    with pytest.raises(SpipeError, match="no result of a finished run"):
        RunResult.load(result.output / "nowhere")


def test_a_run_without_a_trace(run_plan: Callable[..., RunResult], small_plan: Callable[..., Plan]) -> None:
    result = run_plan(small_plan(1, backward=1, microbatches=1), 2, trace_steps=0)
    assert len(Trace.load(result.output / "trace.json")) == 0


@pytest.mark.parametrize("tied", [False, True])
def test_the_store_is_as_large_as_planned(small_plan: Callable[..., Plan], tied: bool) -> None:
    model = MODELS["tiny"]
    plan = small_plan(2, model=model, tied=tied, precision="bf16", options={"stage_input_route": "host"})
    planned = memory(plan).hosts[0]
    job = Job(plan, 10, Path("unused"))
    held = job.store_layout().table_of_bytes()
    for item in ("weights", "gradients", "stage inputs"):
        assert held[item] == pytest.approx(planned[item], rel=1e-3), item
    table = job.table_of_bytes()
    assert table["weights"] == planned["weights"]
    assert {"master weights and moments", "undo data", "mailboxes", "PyTorch processes"} <= table.keys()


def recorded_times(program: Program, seconds: float) -> NDArray[np.float64]:
    """Every op of a step begins and ends at a time of its own, as a rank writes them down."""
    times = np.zeros((1, len(program), 4))
    times[0, :, 0] = np.arange(len(program)) * seconds
    times[0, :, 1] = times[0, :, 0] + 0.5 * seconds
    times[0, :, 2] = math.nan
    return times


@pytest.mark.parametrize("schedule", ["spipe", "1f1b", "gpipe"])
def test_transfers_start_when_both_sides_are_there(small_plan: Callable[..., Plan], schedule: str) -> None:
    """Whichever side comes first waits for the other, and its waiting is no part of the transfer."""
    program = small_plan(2, schedule, backward=1 if schedule != "spipe" else 2).program()
    for late in (SENDS, RECVS):
        times = recorded_times(program, 1.0)
        for i, partner in enumerate(program.partner):
            if partner >= 0 and program.kind[i] in late:
                times[0, i, 0] = times[0, i, 1] = max(times[0, i, 1], times[0, partner, 1]) + 5.0
        validates = [i for i, kind in enumerate(program.kind) if kind in COLLECTIVES]
        times[0, validates[-1], :2] += (40.0, 41.0)
        store = SimpleNamespace(times=times, step_ends=np.zeros((2, 2)))
        trace = measured_trace(program, store, 0, 1)  # type: ignore[arg-type]
        for i in range(len(program)):
            assert trace.ready_s[i] <= trace.start_s[i] <= trace.end_s[i]
            if program.partner[i] >= 0:
                there = [times[0, i, 0], times[0, program.partner[i], 0]]
                assert trace.start_s[i] == max(there)
            elif program.kind[i] in COLLECTIVES:
                assert trace.start_s[i] == times[0, validates, 0].max()
            else:
                assert (trace.start_s[i], trace.end_s[i]) == (times[0, i, 0], times[0, i, 1])


def test_measured_traces_have_metrics(run_plan: Callable[..., RunResult], small_plan: Callable[..., Plan]) -> None:
    plan = small_plan(2)
    result = run_plan(plan, STEPS)
    found = analyse(plan.program(), Trace.load(result.output / "trace.json"), STEPS - 1)
    window_s = found.window_s[1] - found.window_s[0]
    for rank in range(2):
        assert found.busy_s[rank] > 0
        assert found.busy_s[rank] + sum(found.bubbles[rank].values()) == pytest.approx(window_s, rel=1e-9)


def test_devices_and_their_connections_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pretended devices that cannot reach each other's memory."""
    from spipe.runtime.system import device_facts

    assert device_facts()["devices"][0] == "cpu"
    pretended = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "mem_get_info": lambda index: (8 << 30, 24 << 30),
        "get_device_name": lambda index: "GeForce",
        "can_device_access_peer": lambda a, b: False,
    }
    for name, value in pretended.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    facts = device_facts()
    assert facts["devices"] == ["cpu", *(f"cuda:{i} GeForce, 8.0 of 24.0 GiB free" for i in range(2))]
    assert facts["peer access"] == "not from 0 to 1, 1 to 0: use transport host"
    assert facts["NCCL"] == "none"
