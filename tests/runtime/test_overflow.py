"""A non-finite gradient anywhere leaves weights, moments and step count as they were, to the last bit."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import Reference, differences

from spipe.ops import Kind
from spipe.plan import Plan
from spipe.runtime import RunFailedError, RunResult
from spipe.runtime.hooks import TestHooks
from spipe.trace import Trace

STEPS = 6
BAD_STEP = 2


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("place", ["first to finish", "middle", "last to finish"])
@pytest.mark.parametrize("optimizer", ["async", "sync", "device"])
def test_an_infinite_gradient_changes_nothing_but_the_loss_scale(
    run_plan: Callable[..., RunResult], small_plan: Callable[..., Plan], precision: str, place: str, optimizer: str
) -> None:
    scale = {"initial": 1024.0, "window": 2}
    options = {"device_layers": 8} if optimizer == "device" else {"optimizer": optimizer}
    plan = small_plan(2, backward=2, microbatches=2, precision=precision, loss_scale=scale, options=options)
    stages = plan.layout.backward
    k = {"first to finish": len(stages) - 1, "middle": 1, "last to finish": 0}[place]
    reference = Reference(plan, overflow=((BAD_STEP, stages[k].first),)).run(STEPS)
    messages: list[dict[str, Any]] = []
    result = run_plan(plan, STEPS, hooks=TestHooks(overflow=((BAD_STEP, k),)), log=messages.append, trace_steps=STEPS)
    assert result.skipped_steps == reference.skipped == [BAD_STEP]
    assert result.losses == reference.losses
    assert differences(torch.load(result.output / "state.pt"), reference.state) == []
    assert result.summary["loss_scale"] == reference.scale
    assert result.summary["num_updates"] == reference.updates == STEPS - 1
    rows = [json.loads(line) for line in (result.output / "metrics.jsonl").read_text().splitlines()]
    assert [row["skipped"] for row in rows] == [step == BAD_STEP for step in range(STEPS)]
    if precision == "fp16":  # two good steps double, the overflow halves
        assert [row["loss_scale"] for row in rows] == [1024, 1024, 2048, 1024, 1024, 2048]
    assert any(f"step {BAD_STEP}" in row.get("message", "") for row in messages)
    notes = Trace.load(result.output / "trace.json").notes
    assert {step for step, _ in notes} <= {BAD_STEP}
    if optimizer in ("sync", "device"):
        assert set(notes.values()) == {"bypass"}


def test_a_speculative_step_is_rolled_back(run_plan: Callable[..., RunResult], small_plan: Callable[..., Plan]) -> None:
    """The bottom stage overflows last; the stages above have stepped by then (their ops are not delayed)."""
    plan = small_plan(1, backward=4, microbatches=4)
    result = run_plan(plan, STEPS, hooks=TestHooks(overflow=((BAD_STEP, 0),)), trace_steps=STEPS)
    trace = Trace.load(result.output / "trace.json")
    undone = {trace.names[op] for (_, op), note in trace.notes.items() if note == "rollback"}
    assert any(name.startswith("COMMIT B3") for name in undone)


@pytest.mark.parametrize("optimizer_workers", [1, 2])
@pytest.mark.parametrize("k", range(4))
def test_no_step_starts_once_its_rank_knows(
    run_plan: Callable[..., RunResult], small_plan: Callable[..., Plan], k: int, optimizer_workers: int
) -> None:
    """An infinite gradient in any stage: nothing changes, and STEPs that start once it is on the host are left out."""
    plan = small_plan(1, backward=4, options={"optimizer_workers": optimizer_workers})
    layer = plan.layout.backward[k].first
    reference = Reference(plan, overflow=((BAD_STEP, layer),)).run(4)
    result = run_plan(plan, 4, hooks=TestHooks(overflow=((BAD_STEP, k),)), trace_steps=4)
    assert result.skipped_steps == [BAD_STEP]
    assert differences(torch.load(result.output / "state.pt"), reference.state) == []
    trace, program = Trace.load(result.output / "trace.json"), plan.program()
    rows = trace.rows(BAD_STEP)
    stage = len(plan.layout.forward) + k
    arrived = next(
        trace.end_s[row]
        for op, row in rows.items()
        if program.kind[op] == Kind.OFFLOAD_GRAD
        and program.stage[op] == stage
        and layer in program.buckets[stage][program.index[op]]
    )
    later = [op for op, row in rows.items() if program.kind[op] == Kind.STEP and trace.start_s[row] >= arrived]
    assert {trace.notes.get((BAD_STEP, op)) for op in later} == {"bypass"}
    own = [op for op in later if program.stage[op] == stage]
    assert own, "the STEP of the bucket itself comes after its gradient"


@pytest.mark.parametrize(
    ("beta1", "optimizer", "kind"), [(0.9, "async", "delta"), (0.0, "async", "snapshot"), (0.9, "sync", "none")]
)
def test_the_way_to_undo_a_step_follows_the_plan(
    run_plan: Callable[..., RunResult], small_plan: Callable[..., Plan], beta1: float, optimizer: str, kind: str
) -> None:
    plan = small_plan(2, optimizer={"beta1": beta1}, options={"optimizer": optimizer})
    reference = Reference(plan, overflow=((BAD_STEP, plan.layout.backward[0].first),)).run(4)
    result = run_plan(plan, 4, hooks=TestHooks(overflow=((BAD_STEP, 0),)))
    assert result.summary["rollback"] == kind
    assert differences(torch.load(result.output / "state.pt"), reference.state) == []


def test_overflow_in_the_first_step_and_twice_in_a_row(
    run_plan: Callable[..., RunResult], small_plan: Callable[..., Plan]
) -> None:
    plan = small_plan(2, precision="fp16", microbatches=2)
    bad = ((0, 0), (1, 3))
    layers = tuple((step, plan.layout.backward[k].first) for step, k in bad)
    reference = Reference(plan, overflow=layers).run(4)
    result = run_plan(plan, 4, hooks=TestHooks(overflow=bad))
    assert result.skipped_steps == reference.skipped == [0, 1]
    assert differences(torch.load(result.output / "state.pt"), reference.state) == []


def test_a_real_overflow_of_fp16(run_plan: Callable[..., RunResult], small_plan: Callable[..., Plan]) -> None:
    """A loss scale that is too large halves until the gradients fit."""
    plan = small_plan(2, precision="fp16", microbatches=2, loss_scale={"initial": 2.0**20})
    reference = Reference(plan).run(STEPS)
    assert reference.skipped[0] == 0  # which ones later depends on the text
    assert 1 < len(reference.skipped) < STEPS
    result = run_plan(plan, STEPS)
    assert result.skipped_steps == reference.skipped
    assert differences(torch.load(result.output / "state.pt"), reference.state) == []


@pytest.mark.parametrize("options", [{}, {"optimizer": "sync"}], ids=str)
def test_the_two_gradients_of_a_tied_weight_overflow_only_together(
    run_plan: Callable[..., RunResult], small_plan: Callable[..., Plan], options: dict[str, Any]
) -> None:
    plan = small_plan(2, backward=2, microbatches=2, tied=True, options=options)
    reference = Reference(plan, overflow=((BAD_STEP, 0),)).run(4)
    result = run_plan(plan, 4, hooks=TestHooks(huge=(BAD_STEP,)))
    assert result.skipped_steps == reference.skipped == [BAD_STEP]
    assert differences(torch.load(result.output / "state.pt"), reference.state) == []


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_run_that_skips_every_step_gives_up(
    small_plan: Callable[..., Plan], run_plan: Callable[..., RunResult], precision: str
) -> None:
    """fp16 only once a smaller loss scale is no longer possible."""
    scale = {"initial": 4.0, "minimum": 1.0}
    plan = small_plan(1, "spipe", 1, 1, 1, precision=precision, loss_scale=scale)
    overflow = tuple((step, 0) for step in range(40))
    last = 19 + 2 * (precision == "fp16")
    with pytest.raises(RunFailedError, match=f"VALIDATE.* of step {last}: 20 steps in a row"):
        run_plan(plan, 30, hooks=TestHooks(overflow=overflow))
    assert run_plan(plan, 10, hooks=TestHooks(overflow=overflow)).skipped_steps == list(range(10))
