"""Schedules: the compute order of every rank. One generator a pattern, loops named by what they emit.

A generator maps a layout and a number of microbatches to one list per rank of ``(pass, stage, microbatch)``, with pass
``"F"`` or ``"B"``. A backward entry stands for the recompute and the backward of the microbatch; in an order with
entries ``"W"`` those make the gradients of the weights, and ``"B"`` only that of the stage's input. Everything else
(communication, weights, gradients, optimizer) is added by ``spipe.lower``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from spipe.errors import SpipeError, unknown
from spipe.layout import Layout, coupled_layout, decoupled_layout

ComputeOrder = list[list[tuple[Literal["F", "B", "W"], int, int]]]


def breadth_first(layout: Layout, num_microbatches: int) -> ComputeOrder:
    """All microbatches of a stage, then the rank's next stage; forward stages upwards, then backward stages downwards.

    The order of SPipe, Mobius and GPipe, which differ in layout. Every rank follows one order of the stages, so any
    assignment of stages to ranks is free of deadlock.
    """
    order: ComputeOrder = [[] for _ in range(layout.num_ranks)]
    for k, stage in enumerate(layout.forward):
        order[stage.rank] += [("F", k, m) for m in range(num_microbatches)]
    for k, stage in reversed(list(enumerate(layout.backward))):
        order[stage.rank] += [("B", k, m) for m in range(num_microbatches)]
    return order


def depth_first(layout: Layout, num_microbatches: int) -> ComputeOrder:
    """One microbatch after the other through all stages: upwards, then downwards."""
    order: ComputeOrder = [[] for _ in range(layout.num_ranks)]
    for m in range(num_microbatches):
        for k, stage in enumerate(layout.forward):
            order[stage.rank].append(("F", k, m))
        for k, stage in reversed(list(enumerate(layout.backward))):
            order[stage.rank].append(("B", k, m))
    return order


def one_forward_one_backward(layout: Layout, num_microbatches: int) -> ComputeOrder:
    """Interleaved 1F1B: warm-up forwards, then one forward and one backward in turn, then the remaining backwards.

    A rank cycles through its F stages in groups of N microbatches (the last group may be smaller). Warm-up of rank r:
    2(N-r-1) + (F-1)N microbatch-steps; N-r-1 for F = 1. Needs the stages dealt out
    round-robin, the same for both passes; rank r is here the r-th of the pipeline, whatever its number.
    """
    num_ranks, num_stages = layout.num_ranks, len(layout.backward)
    _require_interleaved(layout)
    stages_per_rank = num_stages // num_ranks
    if stages_per_rank > 1 and num_microbatches > num_ranks and num_microbatches % num_ranks:
        raise SpipeError(
            f"interleaved 1F1B with {stages_per_rank} stages a rank needs microbatches in groups of {num_ranks} ranks: "
            f"{num_microbatches} microbatches do not divide by {num_ranks}; use a multiple of {num_ranks}, "
            f"at most {num_ranks} microbatches, or one stage a rank"
        )
    groups = [range(g, min(g + num_ranks, num_microbatches)) for g in range(0, num_microbatches, num_ranks)]
    order: ComputeOrder = [[] for _ in range(num_ranks)]
    for place in range(num_ranks):
        chunks = range(place, num_stages, num_ranks)
        forwards = [(k, m) for group in groups for k in chunks for m in group]
        backwards = [(k, m) for group in groups for k in reversed(chunks) for m in group]
        warm_up = num_ranks - place - 1
        if stages_per_rank > 1:
            warm_up = 2 * warm_up + (stages_per_rank - 1) * num_ranks
        warm_up = min(warm_up, len(forwards))
        steps: list[tuple[Literal["F", "B", "W"], int, int]] = [("F", k, m) for k, m in forwards[:warm_up]]
        for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
            steps += [("F", *forward), ("B", *backward)]
        steps += [("B", k, m) for k, m in backwards[len(forwards) - warm_up :]]
        rank = layout.backward[place].rank
        order[rank] = [step for step in steps if step[0] == "B" or step[1] < len(layout.forward)]
    return order


def zero_bubble(layout: Layout, num_microbatches: int) -> ComputeOrder:
    """ZB-H1 (Qi et al. 2023): 1F1B whose weight gradients are put off to fill the bubbles, with 1F1B's memory.

    Rank r keeps r weight gradients back in the steady state; while the last gradients come in, one is made after each
    of them, and what is left at the end. One stage a rank.
    """
    if len(layout.backward) > layout.num_ranks:
        raise SpipeError(
            f"ZB-H1 has one stage a rank, got {len(layout.backward)} stages on {layout.num_ranks} ranks; use one stage "
            "a rank, or 1f1b for more"
        )
    order = one_forward_one_backward(layout, num_microbatches)
    for place, stage in enumerate(layout.backward):
        steps = order[stage.rank]
        last_forward = max((i for i, step in enumerate(steps) if step[0] == "F"), default=-1)
        mine: list[tuple[Literal["F", "B", "W"], int, int]] = []
        waiting: list[tuple[Literal["F", "B", "W"], int, int]] = []
        for i, step in enumerate(steps):
            mine.append(step)
            if step[0] == "B":
                waiting.append(("W", step[1], step[2]))
                if i > last_forward or len(waiting) > place:
                    mine.append(waiting.pop(0))
        order[stage.rank] = mine + waiting
    return order


def _require_interleaved(layout: Layout) -> None:
    num_ranks, num_stages = layout.num_ranks, len(layout.backward)
    if num_stages % num_ranks:
        raise SpipeError(
            f"1F1B needs the same number of stages on every rank: {num_stages} stages do not divide by "
            f"{num_ranks} ranks; use a multiple of {num_ranks} stages"
        )
    places = [stage.rank for stage in layout.backward[:num_ranks]]
    if len(set(places)) < num_ranks:
        raise SpipeError(f"1F1B needs one of the first {num_ranks} stages on every rank; they are on ranks {places}")
    for k, stage in enumerate(layout.backward):
        if stage.rank != places[k % num_ranks] or (k < len(layout.forward) and layout.forward[k] != stage):
            raise SpipeError(
                f"1F1B needs forward and backward of stage {k} with the same layers on rank {places[k % num_ranks]}; "
                f"backward has layers {stage.first}..{stage.stop - 1} on rank {stage.rank}"
            )


LayoutMaker = Callable[[int, Sequence[float], int, int, bool], Layout]


@dataclass(frozen=True)
class Schedule:
    """A system: how it lays stages out, in which order a rank computes, and which options it was published with.

    Attributes:
        make_layout: (num_ranks, layer costs, forward stages per rank F, backward stages per rank B, full forward).
        compute_order: one of the generators above.
        decoupled: forward and backward of a layer may run on different ranks, so F and B are free; otherwise B = F.
        published: options of ``spipe.lower.Options`` that reproduce the published system, overriding the defaults.
        essential: those of them without which it would be another system; every plan starts from them.
        simulated_only: the runtime does not know its ops.
    """

    name: str
    summary: str
    make_layout: LayoutMaker
    compute_order: Callable[[Layout, int], ComputeOrder]
    decoupled: bool
    published: dict[str, object]
    essential: Mapping[str, object] = field(default_factory=dict)
    simulated_only: bool = False


def _decoupled(num_ranks: int, costs: Sequence[float], forward: int, backward: int, full_forward: bool) -> Layout:
    return decoupled_layout(num_ranks, costs, num_ranks * forward, num_ranks * backward, full_forward=full_forward)


def _round_robin(num_ranks: int, costs: Sequence[float], forward: int, backward: int, full_forward: bool) -> Layout:
    return decoupled_layout(num_ranks, costs, num_ranks * forward, num_ranks * backward)  # the last stage is fused


def _coupled(num_ranks: int, costs: Sequence[float], forward: int, backward: int, full_forward: bool) -> Layout:
    if forward != backward:
        raise SpipeError(
            f"this schedule runs both passes of a stage on one rank: F={forward} and B={backward} must agree"
        )
    return coupled_layout(num_ranks, costs, num_ranks * forward, full_forward=full_forward)


def _gpipe(num_ranks: int, costs: Sequence[float], forward: int, backward: int, full_forward: bool) -> Layout:
    if (forward, backward) != (1, 1):
        raise SpipeError(f"GPipe has one stage a rank, got F={forward}, B={backward}; use mobius for more")
    return _coupled(num_ranks, costs, 1, 1, full_forward)


_SYNCHRONOUS: dict[str, object] = {
    "optimizer": "sync", "barrier": True, "recompute": "late", "recompute_output": True, "bucket_layers": 0
}  # fmt: skip
_THROUGH_HOST: dict[str, object] = {"stage_input_route": "host", "message_route": "host"}
_KEPT = _SYNCHRONOUS | {"recompute": "never", "weight_slots": None}

SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule(
            "spipe",
            "forward and backward of a layer on different ranks, fine backward stages, asynchronous optimizer",
            _decoupled,
            breadth_first,
            True,
            {"barrier": True, "step_order": "arrival", "bucket_layers": 0, "recompute_output": True},
        ),
        Schedule(
            "mobius", "breadth-first pipeline with weights in CPU memory", _coupled, breadth_first, False, _SYNCHRONOUS
        ),
        Schedule(
            "gpipe", "one stage a rank, all forwards, then all backwards", _gpipe, breadth_first, False, _SYNCHRONOUS
        ),
        Schedule(
            "1f1b",
            "(interleaved) one forward, one backward, with weights in CPU memory",
            _coupled,
            one_forward_one_backward,
            False,
            _SYNCHRONOUS,
        ),
        Schedule(
            "roundpipe",
            "stages round-robin over GPUs without state, last stage fused, stage inputs through host memory",
            _round_robin,
            breadth_first,
            True,
            {**_THROUGH_HOST, "optimizer": "sync", "barrier": True, "step_order": "arrival", "recompute_output": True},
            _THROUGH_HOST,
            simulated_only=True,
        ),
        Schedule(
            "zb-h1",
            "1F1B without recompute whose weight gradients fill the bubbles (zero bubble), with resident weights",
            _coupled,
            zero_bubble,
            False,
            _KEPT,
            _KEPT,
            simulated_only=True,
        ),
        Schedule(
            "pipeoffload",
            "interleaved 1F1B without recompute, activations kept in host memory, with resident weights",
            _coupled,
            one_forward_one_backward,
            False,
            _KEPT | {"stage_input_route": "host"},
            _KEPT | {"stage_input_route": "host"},
            simulated_only=True,
        ),
    )
}


def get_schedule(name: str) -> Schedule:
    """The schedule of that name. Raises SpipeError with the nearest names."""
    if name not in SCHEDULES:
        raise unknown("schedule", name, SCHEDULES)
    return SCHEDULES[name]
