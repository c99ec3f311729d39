"""Layouts: cuts are balanced and complete, wrong ones are named, stage inputs travel only where they must."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spipe.errors import SpipeError
from spipe.layout import Layout, Stage, balanced_cuts, coupled_layout, cross_mapping, decoupled_layout


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_balanced_cuts_equal_the_best_of_all_cuts(costs: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))

    def value(bounds: tuple[int, ...]) -> tuple[int, int]:
        sums = [sum(costs[a:b]) for a, b in pairwise(bounds)]
        return max(sums), sum(s * s for s in sums)

    every = [(0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), num_stages - 1)]
    assert value(tuple(balanced_cuts(costs, num_stages))) == min(value(bounds) for bounds in every)


@pytest.mark.parametrize(("layers", "stages"), [(30, 4), (10, 3), (42, 16), (80, 32), (7, 7)])
def test_no_layer_is_lost_and_no_stage_is_empty(layers: int, stages: int) -> None:
    sizes = [b - a for a, b in pairwise(balanced_cuts([1.0] * layers, stages))]
    assert len(sizes) == stages
    assert sum(sizes) == layers
    assert max(sizes) - min(sizes) <= 1


def test_more_stages_than_layers_is_refused_with_both_numbers() -> None:
    with pytest.raises(SpipeError, match="cannot cut 3 layers into 4 stages"):
        balanced_cuts([1.0] * 3, 4)


def test_the_head_of_a_large_vocabulary_gets_a_stage_of_its_own() -> None:
    costs = [0.0] + [1.0] * 8 + [6.0]
    assert balanced_cuts(costs, 4)[-2] == 9


def test_decoupled_ranks_count_up_forward_and_down_backward() -> None:
    layout = decoupled_layout(4, [1.0] * 24, 8, 24, full_forward=True)
    assert [stage.rank for stage in layout.forward] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [stage.rank for stage in layout.backward] == [3, 2, 1, 0] * 6
    assert not any(
        layer in forward.layers and forward.rank == backward.rank
        for backward in layout.backward
        for layer in backward.layers
        for forward in layout.forward
    )


def test_forward_stops_where_the_top_backward_stage_starts() -> None:
    layout = decoupled_layout(2, [1.0] * 12, 4, 6)
    assert layout.forward_stop == layout.backward[-1].first == 10


def test_one_backward_stage_needs_no_forward() -> None:
    layout = decoupled_layout(1, [1.0] * 5, 1, 1)
    assert layout.forward == ()
    assert layout.backward == (Stage(0, 5, 0),)


BAD = {
    "leaves a gap": ((Stage(0, 2, 0), Stage(3, 4, 0)), (Stage(0, 4, 0),)),
    "overlaps": ((Stage(0, 4, 0),), (Stage(0, 3, 0), Stage(2, 4, 0))),
    "is empty": ((Stage(0, 4, 0),), (Stage(0, 2, 0), Stage(2, 2, 0), Stage(2, 4, 0))),
    "rank is not one of 0..1": ((Stage(0, 4, 2),), (Stage(0, 4, 0),)),
    "every layer is needed": ((Stage(0, 4, 0),), (Stage(0, 3, 0),)),
    "forward has to reach it": ((Stage(0, 1, 0),), (Stage(0, 2, 0), Stage(2, 4, 0))),
    "end at layer 5 of 4": ((Stage(0, 5, 0),), (Stage(0, 4, 0),)),
}


@pytest.mark.parametrize("message", BAD)
def test_wrong_layouts_are_refused_and_named(message: str) -> None:
    forward, backward = BAD[message]
    with pytest.raises(SpipeError, match=message):
        Layout(4, 2, forward, backward)


@pytest.mark.parametrize("costs", [(1.0,) * 3, (1.0, 1.0, 1.0, float("nan")), (1.0, -1.0, 1.0, 1.0)])
def test_layer_costs_are_checked(costs: tuple[float, ...]) -> None:
    with pytest.raises(SpipeError, match="layer_costs"):
        Layout(4, 1, (), (Stage(0, 4, 0),), costs)


def test_stage_inputs_stay_where_they_are_computed_or_received() -> None:
    forward = (Stage(0, 2, 0), Stage(2, 4, 1), Stage(4, 6, 0))
    backward = (Stage(0, 1, 1), Stage(1, 2, 1), Stage(2, 4, 1), Stage(4, 5, 1), Stage(5, 6, 0))
    sources = [Layout(6, 2, forward, backward).stage_input(k) for k in range(5)]
    assert [(s.origin, s.forward, s.rank) for s in sources] == [
        ("tokens", -1, 1),
        ("output", 0, 0),  # starts inside forward stage 0
        ("input", 1, 1),  # rank 1 receives this boundary anyway
        ("output", 1, 1),  # rank 1 computes this boundary
        ("output", 2, 0),
    ]


def test_coupled_layout_shares_stages_between_passes() -> None:
    layout = coupled_layout(2, [1.0] * 8, 4)
    assert layout.forward == layout.backward[:-1]
    assert layout.ranks_used == {0, 1}


def remote(layout: Layout, ranks_per_host: int) -> float:
    """Part of the forward layers whose backward rank, which holds their weights, is on another host."""
    owner = {layer: stage.rank for stage in layout.backward for layer in stage.layers}
    hosts = [
        (owner[layer] // ranks_per_host, stage.rank // ranks_per_host)
        for stage in layout.forward
        for layer in stage.layers
    ]
    return sum(a != b for a, b in hosts) / len(hosts)


def test_cross_mapping_pairs_the_ends_of_the_pipeline() -> None:
    assert cross_mapping(8, 4) == [0, 1, 4, 5, 6, 7, 2, 3]
    assert cross_mapping(4, 4) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("num_ranks", "backward", "without", "crossed"), [(16, 2, 1, 0), (16, 6, 1, 10 / 12), (32, 6, 1, 11 / 12)]
)
def test_cross_mapping_saves_remote_fetches(num_ranks: int, backward: int, without: float, crossed: float) -> None:
    layout = decoupled_layout(
        num_ranks, [1.0] * (6 * num_ranks), 2 * num_ranks, backward * num_ranks, full_forward=True
    )
    assert remote(layout, 4) == pytest.approx(without)
    assert remote(layout.mapped(cross_mapping(num_ranks, 4)), 4) == pytest.approx(crossed)


def test_cross_mapping_refuses_what_has_no_pairs() -> None:
    for num_ranks, ranks_per_host in ((6, 4), (9, 3)):
        with pytest.raises(SpipeError, match="cross mapping"):
            cross_mapping(num_ranks, ranks_per_host)
    with pytest.raises(SpipeError, match=r"each of 0\.\.1 once"):
        coupled_layout(2, [1.0] * 4, 2).mapped([0, 0])
