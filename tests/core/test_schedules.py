"""Schedules as text: the compute order of every rank, and what 1F1B refuses."""

import pytest

from spipe.errors import SpipeError
from spipe.layout import coupled_layout, decoupled_layout
from spipe.schedules import SCHEDULES, ComputeOrder, breadth_first, get_schedule, one_forward_one_backward, zero_bubble


def grid(order: ComputeOrder) -> list[str]:
    return [" ".join(f"{pass_}{k}.{m}" for pass_, k, m in steps) for steps in order]


def test_spipe_on_two_ranks() -> None:
    layout = decoupled_layout(2, [1.0] * 12, 2, 6, full_forward=True)
    assert grid(breadth_first(layout, 2)) == [
        "F0.0 F0.1 B5.0 B5.1 B3.0 B3.1 B1.0 B1.1",
        "F1.0 F1.1 B4.0 B4.1 B2.0 B2.1 B0.0 B0.1",
    ]


def test_mobius_on_two_ranks_visits_the_last_forward_stage_and_the_first_backward_stage_in_a_row() -> None:
    layout = coupled_layout(2, [1.0] * 4, 4, full_forward=True)
    assert grid(breadth_first(layout, 2)) == [
        "F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1",
        "F1.0 F1.1 F3.0 F3.1 B3.0 B3.1 B1.0 B1.1",
    ]


def test_1f1b_on_four_ranks() -> None:
    layout = coupled_layout(4, [1.0] * 4, 4, full_forward=True)
    assert grid(one_forward_one_backward(layout, 4)) == [
        "F0.0 F0.1 F0.2 F0.3 B0.0 B0.1 B0.2 B0.3",
        "F1.0 F1.1 F1.2 B1.0 F1.3 B1.1 B1.2 B1.3",
        "F2.0 F2.1 B2.0 F2.2 B2.1 F2.3 B2.2 B2.3",
        "F3.0 B3.0 F3.1 B3.1 F3.2 B3.2 F3.3 B3.3",
    ]


def test_interleaved_1f1b_on_two_ranks() -> None:
    layout = coupled_layout(2, [1.0] * 4, 4, full_forward=True)
    assert grid(one_forward_one_backward(layout, 4)) == [
        "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3",
    ]


def test_zero_bubble_on_four_ranks() -> None:
    layout = coupled_layout(4, [1.0] * 4, 4, full_forward=True)
    assert ["".join(f"{pass_}{m}" for pass_, _, m in steps) for steps in zero_bubble(layout, 4)] == [
        "F0F1F2F3B0W0B1W1B2W2B3W3",
        "F0F1F2B0F3B1W0B2W1B3W2W3",
        "F0F1B0F2B1F3B2W0B3W1W2W3",
        "F0B0F1B1F2B2F3B3W0W1W2W3",
    ]


def test_zero_bubble_has_one_stage_a_rank() -> None:
    with pytest.raises(SpipeError, match="ZB-H1 has one stage a rank, got 8 stages on 4 ranks"):
        zero_bubble(coupled_layout(4, [1.0] * 8, 8), 4)


def test_1f1b_refuses_microbatches_that_do_not_form_groups() -> None:
    layout = coupled_layout(4, [1.0] * 8, 8)
    with pytest.raises(SpipeError, match=r"6 microbatches do not divide by 4.*use a multiple of 4"):
        one_forward_one_backward(layout, 6)


def test_1f1b_refuses_stages_that_do_not_divide() -> None:
    layout = coupled_layout(4, [1.0] * 8, 6)
    with pytest.raises(SpipeError, match=r"6 stages do not divide by 4 ranks"):
        one_forward_one_backward(layout, 4)


def test_1f1b_refuses_decoupled_passes() -> None:
    layout = decoupled_layout(2, [1.0] * 8, 2, 4)
    with pytest.raises(SpipeError, match=r"1F1B needs forward and backward of stage 0"):
        one_forward_one_backward(layout, 4)


@pytest.mark.parametrize("name", ["mobius", "gpipe", "1f1b"])
def test_coupled_schedules_refuse_different_numbers_of_stages(name: str) -> None:
    with pytest.raises(SpipeError, match="F=2"):
        SCHEDULES[name].make_layout(2, [1.0] * 20, 2, 6, False)


def test_an_unknown_schedule_names_the_nearest() -> None:
    with pytest.raises(SpipeError, match=r"unknown schedule 'spip'.*spipe"):
        get_schedule("spip")


@pytest.mark.parametrize("name", ["spipe", "mobius", "gpipe", "1f1b", "zb-h1", "roundpipe"])
def test_ranks_may_stand_in_any_order(name: str) -> None:
    """Whatever numbers the ranks of a pipeline have, each computes what the rank at its place does."""
    schedule, ranks = SCHEDULES[name], [2, 0, 3, 1]
    stages = 1 if name in ("gpipe", "zb-h1") else 2
    layout = schedule.make_layout(4, [1.0] * 8, stages, stages, False)
    plain, mapped = (schedule.compute_order(x, 8) for x in (layout, layout.mapped(ranks)))
    assert [mapped[rank] for rank in ranks] == plain
