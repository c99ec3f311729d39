"""Lowering: golden text of a small program, properties of slots, residency and messages, sound for every generator."""

import itertools
from collections import Counter

import pytest

from spipe.check import check
from spipe.errors import SpipeError
from spipe.layout import Layout, Stage, coupled_layout, decoupled_layout
from spipe.lower import lower
from spipe.ops import COMPUTE, Kind
from spipe.options import Options
from spipe.program import Program
from spipe.schedules import SCHEDULES, breadth_first, one_forward_one_backward

PUBLISHED = {"optimizer": "sync", "barrier": True, "recompute": "late", "bucket_layers": 0}
KEPT = {"recompute": "never", "weight_slots": None}
TIGHT = {"weight_slots": 1, "receive_slots": 1, "send_slots": 1, "token_slots": 1}


def small() -> Program:
    layout = Layout(3, 2, (Stage(0, 1, 0), Stage(1, 2, 1)), (Stage(0, 1, 1), Stage(1, 2, 1), Stage(2, 3, 0)))
    return lower(layout, breadth_first(layout, 1), 1, Options(barrier=True))


def test_a_small_program_as_text() -> None:
    expected = """
0 h2d: FETCH F0 b0 v0
0 h2d: FETCH B2 b0 v1
1 h2d: FETCH F1 b0 v0
1 h2d: FETCH B0 b0 v1
0 h2d_in: LOAD_TOKENS F0 m0
0 compute: FORWARD F0 m0
1 h2d_in: LOAD_TOKENS B0 m0
0 h2d_in: LOAD_TOKENS B2 m0
0 compute: FREE F0 v0
0 p2p: SEND_ACTIVATION F1 m0
1 p2p: RECV_ACTIVATION F1 m0
1 compute: FORWARD F1 m0
1 p2p_in: SEND_STAGE_INPUT B2 m0
0 p2p_in: RECV_STAGE_INPUT B2 m0
0 compute: RECOMPUTE B2 m0
1 compute: RECOMPUTE B1 m0
0 compute: BACKWARD B2 m0
0 compute: FREE B2 v1
0 p2p: SEND_GRADIENT B1 m0
1 p2p: RECV_GRADIENT B1 m0
1 compute: BACKWARD B1 m0
0 d2h: OFFLOAD_GRAD B2 b0
0 cpu: STEP B2 b0
1 compute: FREE F1 v0
1 compute: RECOMPUTE B0 m0
1 d2h: OFFLOAD_GRAD B1 b0
1 cpu: STEP B1 b0
1 compute: BACKWARD B0 m0
1 compute: FREE B0 v1
1 d2h: OFFLOAD_GRAD B0 b0
0 control: VALIDATE R0
1 control: VALIDATE R1
0 settle: COMMIT B2 b0
1 settle: COMMIT B1 b0
1 cpu: STEP B0 b0
1 settle: COMMIT B0 b0
0 control: BARRIER R0
1 control: BARRIER R1
"""
    assert small().text() == expected.strip()


def programs(stages: int, ranks: int, microbatches: int) -> list[tuple[str, Program]]:
    """Programs of every generator for a number of stages, ranks and microbatches, under various options."""
    costs = [0.0] + [1.0] * 10 + [0.7]
    found = []
    for full_forward, (name, options) in itertools.product(
        (False, True),
        [
            ("spipe", {}),
            ("spipe", PUBLISHED),
            ("spipe", TIGHT | {"gradient_slots": 1}),
            ("spipe", {"stage_input_route": "host"}),
            ("spipe", {"device_layers": 5, "optimizer": "sync"}),
            ("mobius", {"weight_slots": 3, "device_layers": 12}),
            ("1f1b", {}),
            ("1f1b", TIGHT | {"reuse_weights": False}),
            ("1f1b", KEPT | {"stage_input_route": "host"}),
            ("mobius", KEPT | {"optimizer": "stale"}),
            ("zb-h1", TIGHT),
            ("zb-h1", KEPT | {"stage_input_route": "host", "stage_input_slots": 1}),
        ],
    ):
        if name == "spipe":
            layout = decoupled_layout(ranks, costs, max(1, stages - 3), stages, full_forward=full_forward)
        else:
            layout = coupled_layout(ranks, costs, stages, full_forward=full_forward)
        groups = microbatches <= ranks or microbatches % ranks == 0 or stages == ranks
        uneven = stages % ranks or not groups
        if (name == "1f1b" and uneven) or (name == "zb-h1" and stages != ranks):
            with pytest.raises(SpipeError, match=r"divide|one stage a rank"):
                SCHEDULES[name].compute_order(layout, microbatches)
            continue
        order = SCHEDULES[name].compute_order(layout, microbatches)
        label = f"{name} {options} stages={stages} ranks={ranks} microbatches={microbatches} full={full_forward}"
        found.append((label, lower(layout, order, microbatches, Options(**options), tied=microbatches % 2 == 1)))
    return found


def assert_sound(cases: list[tuple[int, int, int]]) -> None:
    for case in cases:
        for label, program in programs(*case):
            assert check(program) == [], label


def test_all_generators_are_sound_on_a_sample() -> None:
    assert_sound([(1, 1, 1), (1, 3, 2), (4, 4, 1), (5, 3, 4), (6, 2, 7), (8, 4, 8), (9, 8, 3), (3, 8, 12)])


@pytest.mark.slow
@pytest.mark.parametrize("stages", range(1, 10))
def test_all_generators_are_sound(stages: int) -> None:
    assert_sound([(stages, ranks, microbatches) for ranks in range(1, 9) for microbatches in range(1, 13)])


def fetches(program: Program, rank: int) -> int:
    return sum(program.kind[i] == Kind.FETCH for i in program.of_rank(rank))


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
def test_without_reuse_every_stage_switch_is_a_fetch(num_ranks: int) -> None:
    layout = coupled_layout(num_ranks, [1.0] * num_ranks * 2, num_ranks * 2, full_forward=True)
    order = one_forward_one_backward(layout, 2 * num_ranks)
    program = lower(layout, order, 2 * num_ranks, Options(reuse_weights=False, bucket_layers=0))
    for rank, steps in enumerate(order):
        switches = 1 + sum(a[1] != b[1] for a, b in itertools.pairwise(steps))
        assert fetches(program, rank) == switches
    assert max(fetches(program, rank) for rank in range(num_ranks)) <= 4 * num_ranks + 3


def test_mobius_fetches_one_stage_less_than_it_visits() -> None:
    layout = coupled_layout(4, [1.0] * 16, 16, full_forward=True)
    program = lower(layout, breadth_first(layout, 8), 8, Options(reuse_weights=False))
    assert [fetches(program, rank) for rank in range(4)] == [2 * 4 - 1] * 4


def test_one_stage_a_rank_stays_resident() -> None:
    layout = coupled_layout(4, [1.0] * 4, 4, full_forward=True)
    for order in (breadth_first(layout, 8), one_forward_one_backward(layout, 8)):
        assert [fetches(lower(layout, order, 8), rank) for rank in range(4)] == [1] * 4


def test_reuse_needs_no_more_fetches_with_more_slots() -> None:
    layout = coupled_layout(2, [1.0] * 12, 12, full_forward=True)
    order = one_forward_one_backward(layout, 4)
    counts = [fetches(lower(layout, order, 4, Options(weight_slots=n, bucket_layers=0)), 0) for n in range(1, 8)]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 6


def test_a_full_ring_takes_in_messages_while_it_still_computes_earlier_stages() -> None:
    layout = decoupled_layout(4, [1.0] * 24, 8, 24, full_forward=True)
    program = lower(layout, breadth_first(layout, 16), 16, Options(receive_slots=2))
    slots = Counter(program.slot[i] for i in program.of_rank(0) if program.kind[i] == Kind.RECV_ACTIVATION)
    assert len(slots) == 16 - 4 + 2  # all that arrive before the stage starts, and one more while it starts
    assert check(program) == []


def test_too_few_gradient_slots_for_alternating_stages_are_refused_with_both_numbers() -> None:
    layout = coupled_layout(2, [1.0] * 6, 6, full_forward=True)
    order = one_forward_one_backward(layout, 4)
    with pytest.raises(SpipeError, match=r"alternates between 3 backward stages but has gradient_slots=2.*at least 3"):
        lower(layout, order, 4, Options(gradient_slots=2))
    assert check(lower(layout, order, 4)) == []


def test_deadline_order_steps_the_layers_needed_first() -> None:
    program = lower(layout := decoupled_layout(1, [1.0] * 4, 2, 4), breadth_first(layout, 1), 1)
    steps = [i for i, kind in enumerate(program.kind) if kind == Kind.STEP]
    by_priority = sorted(steps, key=lambda i: program.priority[i])
    assert [program.op(i).stage for i in by_priority] == ["B0", "B1", "B2", "B3"]
    lanes = {program.lanes[program.lane[i]].discipline for i in steps}
    assert lanes == {"deadline"}


def test_no_two_buckets_share_a_layer_and_every_layer_is_stepped_once() -> None:
    layout = decoupled_layout(2, [1.0] * 11, 4, 6)
    for size in (0, 1, 2, 5):
        program = lower(layout, breadth_first(layout, 2), 2, Options(bucket_layers=size))
        stepped = [
            layer
            for i, kind in enumerate(program.kind)
            if kind == Kind.STEP
            for layer in program.buckets[program.stage[i]][program.index[i]]
        ]
        assert sorted(stepped) == list(range(11))


def test_a_microbatch_count_below_one_is_refused() -> None:
    layout = decoupled_layout(1, [1.0] * 2, 1, 1)
    with pytest.raises(SpipeError, match="at least one microbatch, got 0"):
        lower(layout, breadth_first(layout, 0), 0)


def test_an_incomplete_compute_order_is_refused() -> None:
    layout = decoupled_layout(1, [1.0] * 4, 2, 2)
    order = breadth_first(layout, 2)
    order[0].remove(("B", 1, 1))
    with pytest.raises(SpipeError, match=r"no entry for B1 m1"):
        lower(layout, order, 2)


def test_lowering_is_deterministic() -> None:
    first, second = small(), small()
    assert first == second


def test_compute_keeps_the_generators_order() -> None:
    layout = coupled_layout(2, [1.0] * 4, 4, full_forward=True)
    order = one_forward_one_backward(layout, 4)
    program = lower(layout, order, 4)
    for rank in range(2):
        mine = [program.op(i) for i in program.of_rank(rank) if program.kind[i] in COMPUTE - {Kind.RECOMPUTE}]
        assert [(op.stage[0], int(op.stage[1:]), op.index) for op in mine] == order[rank]


def test_resident_weights_are_fetched_once_a_step() -> None:
    layout = coupled_layout(2, [1.0] * 8, 8)
    order = one_forward_one_backward(layout, 4)
    for rank in range(2):
        assert fetches(lower(layout, order, 4, Options(weight_slots=None, bucket_layers=0)), rank) == 4
        assert fetches(lower(layout, order, 4, Options(bucket_layers=0)), rank) > 4


def test_what_is_needed_again_soon_does_not_go_to_the_host() -> None:
    layout = coupled_layout(4, [1.0] * 4, 4, full_forward=True)
    options = Options(recompute="never", stage_input_route="host", stage_input_slots=2)
    program = lower(layout, one_forward_one_backward(layout, 8), 8, options)
    stored = [sum(program.kind[i] == Kind.STORE_STAGE_INPUT for i in program.of_rank(rank)) for rank in range(4)]
    assert stored == [6, 6, 0, 0]  # 4, 3, 2 and 1 microbatches are in flight; the first two come back at once


def test_kept_activations_need_both_passes_on_one_rank() -> None:
    layout = decoupled_layout(2, [1.0] * 8, 2, 4)
    with pytest.raises(SpipeError, match=r"recompute = never.*forward stage 0"):
        lower(layout, breadth_first(layout, 2), 2, Options(recompute="never"))


def test_stale_weights_and_a_barrier_exclude_each_other() -> None:
    with pytest.raises(SpipeError, match="optimizer = stale"):
        Options(optimizer="stale", barrier=True)
