"""Dropout is part of what is trained, not of the layout: a recompute on another rank draws what the forward drew."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import Reference, differences

from spipe.plan import Plan
from spipe.runtime import RunResult
from spipe.runtime.network import draw_seed

SmallPlan = Callable[..., Plan]
RunPlan = Callable[..., RunResult]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_dropout_and_z_loss_have_the_bits_of_a_loop_without_recompute(
    run_plan: RunPlan, small_plan: SmallPlan, precision: str
) -> None:
    fields: dict[str, Any] = {"precision": precision, "dropout": 0.1, "z_loss": 1e-3}
    reference = None
    for case in ((1, "spipe", 1, 1), (1, "spipe", 2, 6), (2, "spipe", 1, 3), (4, "spipe", 1, 2), (2, "1f1b", 1, 1)):
        plan = small_plan(*case, 3, **fields)
        reference = reference or Reference(plan).run(6)
        result = run_plan(plan, 6)
        assert result.losses == reference.losses
        assert differences(torch.load(result.output / "state.pt"), reference.state) == []
    assert Reference(small_plan(1, **fields | {"dropout": 0.0})).run(2).losses != reference.losses[:2]
    assert Reference(small_plan(1, **fields | {"z_loss": 0.0})).run(2).losses != reference.losses[:2]


def test_masks_go_on_after_a_resume(run_plan: RunPlan, small_plan: SmallPlan) -> None:
    whole = run_plan(small_plan(2, dropout=0.2), 6)
    part = run_plan(small_plan(2, dropout=0.2), 4, checkpoint_every=4)
    rest = run_plan(small_plan(1, "gpipe", 1, 1, dropout=0.2), 6, resume=part.output)
    assert part.losses + rest.losses == whole.losses
    states = [torch.load(result.output / "state.pt") for result in (whole, rest)]
    assert differences(*states) == []


def test_every_layer_microbatch_and_step_draws_for_itself() -> None:
    keys = [(seed, step, m, layer) for seed in range(3) for step in range(4) for m in range(5) for layer in range(6)]
    assert len({draw_seed(*key) for key in keys}) == len(keys)
    assert draw_seed(1, 2, 3, 4) == 2319475572399523498
