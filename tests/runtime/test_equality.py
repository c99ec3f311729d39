"""A run has the bits of a plain training loop: losses, weights, masters and moments, whatever the layout."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from reference import Reference, differences

from spipe.layout import Layout, Stage
from spipe.model import ModelSpec
from spipe.plan import Plan
from spipe.runtime import RunResult
from spipe.runtime.hooks import TestHooks

STEPS = 10


@lru_cache(maxsize=16)
def _reference(training: str, steps: int) -> Reference:
    return Reference(Plan.model_validate_json(training)).run(steps)


def reference_of(plan: Plan, steps: int = STEPS) -> Reference:
    """The plain loop for a plan; it knows neither layout nor schedule, so plans that differ in those share it."""
    one_stage = Layout(plan.model.num_total_layers, 1, (), (Stage(0, plan.model.num_total_layers, 0),))
    fields = {"schedule": "spipe", "layout": type(plan.layout).of(one_stage), "options": type(plan.options)()}
    return _reference(plan.model_copy(update=fields).model_dump_json(), steps)


def assert_equal(plan: Plan, result: RunResult, steps: int = STEPS) -> None:
    reference = reference_of(plan, steps)
    assert result.losses == reference.losses
    assert differences(torch.load(result.output / "state.pt"), reference.state) == []
    assert not any(torch.isnan(value).any() for value in reference.state.values())


CASES = [
    # schedule, ranks, F, B, microbatches
    ("spipe", 1, 1, 1, 1),
    ("spipe", 1, 2, 6, 3),
    ("spipe", 2, 1, 3, 4),
    ("spipe", 2, 2, 3, 1),  # F does not divide B; fewer microbatches than ranks
    ("spipe", 2, 3, 2, 3),
    ("spipe", 4, 1, 2, 4),
    ("spipe", 4, 1, 1, 2),
    ("spipe", 4, 2, 2, 6),
    ("mobius", 1, 2, 2, 2),
    ("mobius", 2, 2, 2, 4),
    ("mobius", 4, 2, 2, 3),
    ("1f1b", 2, 1, 1, 5),
    ("1f1b", 2, 2, 2, 4),
    ("1f1b", 4, 1, 1, 4),
    ("1f1b", 4, 2, 2, 4),
    ("gpipe", 1, 1, 1, 2),
    ("gpipe", 2, 1, 1, 3),
    ("gpipe", 4, 1, 1, 2),
]


@pytest.mark.parametrize(
    ("precision", "case"),
    [("fp32", case) for case in CASES]
    + [pytest.param("bf16", case, marks=[pytest.mark.slow] * (n % 3 != 1)) for n, case in enumerate(CASES)],
    ids=str,
)
def test_every_schedule_equals_the_plain_loop(
    run_plan: Callable[..., RunResult], small_plan: Callable[..., Plan], case: tuple[Any, ...], precision: str
) -> None:
    schedule, ranks, forward, backward, microbatches = case
    plan = small_plan(ranks, schedule, forward, backward, microbatches, precision=precision)
    assert_equal(plan, run_plan(plan, STEPS))


def _uneven() -> list[Layout]:
    return [
        # starts inside a forward stage, both directions, uneven cuts
        Layout(
            8, 2, (Stage(0, 3, 0), Stage(3, 7, 1)), (Stage(0, 2, 1), Stage(2, 5, 0), Stage(5, 6, 0), Stage(6, 8, 1))
        ),
        # a rank without any stage, a rank with only one pass
        Layout(8, 4, (Stage(0, 5, 0), Stage(5, 6, 1)), (Stage(0, 1, 3), Stage(1, 6, 0), Stage(6, 8, 0))),
        # full forward, the head a stage of its own
        Layout(8, 3, (Stage(0, 4, 0), Stage(4, 8, 1)), (Stage(0, 4, 2), Stage(4, 7, 1), Stage(7, 8, 0))),
        # no forward stage at all
        Layout(8, 2, (), (Stage(0, 8, 1),)),
        # a stage input that its rank receives as a forward input
        Layout(8, 2, (Stage(0, 3, 0), Stage(3, 6, 1)), (Stage(0, 3, 0), Stage(3, 6, 1), Stage(6, 8, 0))),
    ]


@pytest.mark.parametrize("number", range(len(_uneven())))
@pytest.mark.parametrize("options", [{}, {"stage_input_route": "host", "barrier": True, "bucket_layers": 0}], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_layouts_of_ones_own(
    run_plan: Callable[..., RunResult],
    small_plan: Callable[..., Plan],
    number: int,
    options: dict[str, Any],
    tied: bool,
) -> None:
    layout = _uneven()[number]
    plan = small_plan(layout.num_ranks, layout=layout, microbatches=3, options=options, tied=tied)
    assert_equal(plan, run_plan(plan, STEPS))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_cuts_inside_blocks_change_no_bit(
    run_plan: Callable[..., RunResult], small_plan: Callable[..., Plan], precision: str, tied: bool
) -> None:
    whole = small_plan(1, "spipe", 1, 1, 4, precision=precision, tied=tied)
    forward = (Stage(0, 2, 0), Stage(2, 10, 1))  # the first ends behind an attention
    backward = (Stage(0, 4, 1), Stage(4, 5, 0), Stage(5, 9, 1), Stage(9, 14, 0))
    layout = Layout(14, 2, forward, backward)
    plan = small_plan(2, layout=layout, microbatches=4, precision=precision, tied=tied, split=True)
    result = run_plan(plan, STEPS)
    assert_equal(plan, result)
    assert result.losses == reference_of(whole).losses


OPTIONS = [
    {"barrier": True, "step_order": "arrival"},
    {"step_order": "arrival"},
    {"optimizer": "sync"},
    {"recompute": "late", "weight_slots": 1},
    {"reuse_weights": False, "weight_slots": 3},
    {"receive_slots": 1, "send_slots": 1, "token_slots": 1},
    {"gradient_slots": 1, "bucket_layers": 2},
    {"stage_input_route": "host", "stage_input_slots": 1},
    {"device_layers": 4},
    {"device_layers": 8, "optimizer": "sync", "stage_input_route": "host"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_do_not_change_a_bit(
    run_plan: Callable[..., RunResult], small_plan: Callable[..., Plan], options: dict[str, Any]
) -> None:
    plan = small_plan(2, "spipe", 2, 3, 4, options=options, tied=True)
    assert_equal(plan, run_plan(plan, STEPS))


@pytest.mark.parametrize("published", ["spipe", "mobius", "1f1b"])
def test_published_options(run_plan: Callable[..., RunResult], small_plan: Callable[..., Plan], published: str) -> None:
    forward, backward = (1, 3) if published == "spipe" else (2, 2)
    plan = small_plan(2, published, forward, backward, 4, published=True)
    assert_equal(plan, run_plan(plan, STEPS))


@pytest.mark.parametrize(("precision", "gradients"), [("bf16", "fp32"), ("fp32", "bf16"), ("fp16", "fp16")])
def test_gradient_types(
    run_plan: Callable[..., RunResult], small_plan: Callable[..., Plan], precision: str, gradients: str
) -> None:
    plan = small_plan(2, precision=precision, gradient_precision=gradients, tied=True)
    assert_equal(plan, run_plan(plan, STEPS))


def test_families_of_models(run_plan: Callable[..., RunResult], small_plan: Callable[..., Plan]) -> None:
    model = ModelSpec(
        name="everything",
        num_layers=3,
        hidden_size=24,
        ffn_size=40,
        num_heads=6,
        num_kv_heads=3,
        head_dim=8,
        vocab_size=300,
        attention_bias=True,
        qk_norm=True,
    )
    plan = small_plan(2, backward=1, model=model, optimizer={"weight_decay": 0.1, "learning_rate": 3e-3})
    assert_equal(plan, run_plan(plan, STEPS))


@pytest.mark.parametrize("transport", ["host", "gloo"])
def test_transports_agree(run_plan: Callable[..., RunResult], small_plan: Callable[..., Plan], transport: str) -> None:
    plan = small_plan(4, microbatches=5)
    result = run_plan(plan, STEPS, transport=transport)
    assert result.summary["transport"] == transport
    assert_equal(plan, result)


@pytest.mark.parametrize("case", [("spipe", 4, 1, 2, 5), ("1f1b", 2, 2, 2, 4)], ids=str)
@pytest.mark.parametrize("options", [{}, {"stage_input_route": "host"}, {"device_layers": 5}], ids=str)
def test_late_and_poisoned_buffers_do_not_change_a_bit(
    run_plan: Callable[..., RunResult], small_plan: Callable[..., Plan], case: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Every buffer is NaN once its content was used; every op starts a random time late."""
    schedule, ranks, forward, backward, microbatches = case
    plan = small_plan(ranks, schedule, forward, backward, microbatches, tied=True, options=options)
    assert_equal(plan, run_plan(plan, 5, hooks=TestHooks(poison=True, delay_s=0.02)), 5)


def test_the_comparison_can_fail(small_plan: Callable[..., Plan]) -> None:
    """The smallest change of the learning rate is seen, and another number of threads where the processor's is."""
    model = ModelSpec(name="wide", num_layers=1, hidden_size=512, ffn_size=1024, num_heads=4, vocab_size=256)

    def state(learning_rate: float = 1e-3, threads: int = 1) -> dict[str, torch.Tensor]:
        shape = {"model": model, "sequence": 128, "microbatches": 1, "compute_threads": threads}
        plan = small_plan(1, backward=1, optimizer={"learning_rate": learning_rate}, **shape)
        return Reference(plan).run(2).state

    one = state()
    assert not differences(one, state())
    assert differences(one, state(learning_rate=1e-3 * (1 + 2**-23)))
    if _threads_change_bits():
        assert differences(one, state(threads=2))


def _threads_change_bits() -> bool:
    """Whether a product as in a backward pass has other bits with two threads; not so on every processor."""
    a, b = torch.randn(128, 512), torch.randn(128, 1024)
    products = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        products.append(a.T @ b)
    torch.set_num_threads(1)
    return not torch.equal(*products)
