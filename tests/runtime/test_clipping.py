"""Clipping by the global norm is exact: speculation, redone where needed, has the bits of the synchronous order."""

import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import Reference, differences

from spipe.plan import Plan
from spipe.runtime import RunResult
from spipe.runtime.hooks import TestHooks
from spipe.trace import Trace

RunPlan = Callable[..., RunResult]
SmallPlan = Callable[..., Plan]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_fifty_steps_half_of_them_clipped(run_plan: RunPlan, small_plan: SmallPlan, tied: bool) -> None:
    free = Reference(small_plan(2, tied=tied, optimizer={"max_norm": 1e9})).run(50)
    # The median norm of training without clipping; with it the norms differ, and still about half are above.
    optimizer = {"max_norm": statistics.median(free.norms), "weight_decay": 0.1}
    plan = small_plan(2, backward=3, tied=tied, optimizer=optimizer)
    reference = Reference(plan).run(50)
    assert 15 <= len(reference.clipped) <= 35
    notes = set()
    for options in ({}, {"optimizer": "sync"}, {"optimizer_workers": 2, "bucket_layers": 0}):
        result = run_plan(plan.replace(options=options), 50, trace_steps=50)
        assert result.losses == reference.losses
        assert result.summary["clipped_steps"] == reference.clipped
        assert differences(torch.load(result.output / "state.pt"), reference.state) == []
        made = set(Trace.load(result.output / "trace.json").notes.values())
        assert not (options.get("optimizer") == "sync" and made)
        notes |= made
    assert notes == {"redo"}


@pytest.mark.parametrize(
    "case", [("spipe", 1, 1, 2), ("spipe", 4, 1, 2), ("1f1b", 2, 2, 2), ("gpipe", 2, 1, 1)], ids=str
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_norm_is_that_of_the_whole_model_for_any_cut(
    run_plan: RunPlan, small_plan: SmallPlan, case: tuple[Any, ...], tied: bool
) -> None:
    """A tied weight counts once, with the sum of both gradients, whichever ranks they come from."""
    schedule, ranks, forward, backward = case
    rows: list[dict[str, Any]] = []
    plan = small_plan(ranks, schedule, forward, backward, tied=tied, optimizer={"max_norm": 0.5})
    reference = Reference(plan).run(6)
    result = run_plan(plan, 6, log=rows.append, hooks=TestHooks(poison=True, delay_s=0.005))
    assert [row["gradient_norm"] for row in rows] == reference.norms
    assert differences(torch.load(result.output / "state.pt"), reference.state) == []


def test_any_number_of_microbatches_has_the_gradients_of_one(run_plan: RunPlan, small_plan: SmallPlan) -> None:
    """42 sequences in 1, 2, 3 and 7 microbatches: the same text, the same loss, and the same gradients."""
    rows: list[dict[str, Any]] = []
    for count in (1, 2, 3, 7):
        plan = small_plan(2, microbatches=count, microbatch_size=42 // count, sequence=8)
        run_plan(plan, 1, log=rows.append)
    for name in ("loss", "gradient_norm"):
        assert [row[name] for row in rows] == pytest.approx([rows[0][name]] * 4, rel=1e-5)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_clipping_with_overflow_and_loss_scale(run_plan: RunPlan, small_plan: SmallPlan, precision: str) -> None:
    plan = small_plan(
        2, precision=precision, loss_scale={"initial": 1024.0, "window": 2}, optimizer={"max_norm": 0.8},
        options={"device_layers": 3},
    )  # fmt: skip
    bad = ((3, plan.layout.backward[1].first),)
    reference = Reference(plan, overflow=bad).run(8)
    result = run_plan(plan, 8, hooks=TestHooks(overflow=((3, 1),)))
    assert (result.skipped_steps, result.summary["clipped_steps"]) == (reference.skipped, reference.clipped)
    assert reference.clipped
    assert differences(torch.load(result.output / "state.pt"), reference.state) == []


def test_where_clipping_is_frequent_steps_wait_for_the_verdict(run_plan: RunPlan, small_plan: SmallPlan) -> None:
    plan = small_plan(1, backward=4, optimizer={"max_norm": 1e-3})
    result = run_plan(plan, 10, trace_steps=10)
    assert result.summary["clipped_steps"] == list(range(10))
    redone = {step for step, _ in Trace.load(result.output / "trace.json").notes}
    assert redone <= {0}  # only the first step could not know


def test_the_learning_rate_of_every_schedule(small_plan: SmallPlan) -> None:
    def rates(**fields: Any) -> list[float]:
        adam = small_plan(1, backward=1, optimizer={"learning_rate": 1.0, **fields}).optimizer
        return [adam.learning_rate_of(update) for update in range(12)]

    assert rates() == [1.0] * 12
    assert rates(warmup_steps=4) == [0.25, 0.5, 0.75] + [1.0] * 9
    linear = rates(learning_rate_schedule="linear", warmup_steps=2, total_steps=10, minimum_learning_rate=0.2)
    assert linear[:3] == [0.5, 1.0, 1.0]
    assert linear[6] == pytest.approx(0.6)
    assert linear[10:] == pytest.approx([0.2, 0.2])
    cosine = rates(learning_rate_schedule="cosine", total_steps=10)
    assert [cosine[0], cosine[5], cosine[10]] == pytest.approx([1.0, 0.5, 0.0])
    assert cosine == sorted(cosine, reverse=True)
    wsd = rates(learning_rate_schedule="wsd", warmup_steps=2, total_steps=10, decay_steps=4)
    assert wsd == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_norm": 0.0}, "max_norm = 0.0 should be greater than 0"),
        ({"max_norm": -1.0}, "max_norm = -1.0 should be greater than 0"),
        ({"max_norm": float("nan")}, "max_norm = nan should be"),
        ({"max_norm": float("inf")}, "max_norm = inf should be a finite number"),
        ({"momentum": 0.9}, "unknown key 'momentum'"),
        ({"learning_rate_schedule": "cosin"}, "learning_rate_schedule = 'cosin' should be"),
        ({"learning_rate_schedule": "linear", "warmup_steps": 5, "total_steps": 5}, "total_steps = 5 should be above"),
        (
            {"learning_rate_schedule": "cosine", "decay_steps": 2},
            "decay_steps = 2 is for learning_rate_schedule = 'wsd'",
        ),
        (
            {"learning_rate_schedule": "wsd", "warmup_steps": 2, "total_steps": 9, "decay_steps": 8},
            "decay_steps = 8 should be at most total_steps - warmup_steps, 7",
        ),
        ({"learning_rate_schedule": "cosine", "minimum_learning_rate": 1.0}, "minimum_learning_rate = 1.0 should be"),
    ],
)
def test_unfit_optimizers_are_refused(small_plan: SmallPlan, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_plan(1, backward=1, optimizer=fields)
