"""Check finds every kind of planted fault, and names the op."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from spipe.check import check, require
from spipe.errors import SpipeError
from spipe.layout import coupled_layout, decoupled_layout
from spipe.lower import lower
from spipe.ops import Kind, Op
from spipe.options import Options
from spipe.program import Program
from spipe.schedules import breadth_first, one_forward_one_backward

Fault = Callable[[Program], Program]


def sound(**options: object) -> Program:
    layout = decoupled_layout(2, [1.0] * 8, 4, 6)
    return lower(layout, breadth_first(layout, 3), 3, Options(**options), tied=True)


def at(program: Program, text: str) -> int:
    return program.ops.index(Op.parse(text))


def without_dependency(text: str, dependency: str) -> Fault:
    def plant(program: Program) -> Program:
        i, d = at(program, text), at(program, dependency)
        deps = list(program.dependencies)
        assert d in deps[i]
        deps[i] = tuple(x for x in deps[i] if x != d)
        return replace(program, dependencies=deps)

    return plant


def without_carried(text: str, kind: Kind) -> Fault:
    def plant(program: Program) -> Program:
        i = at(program, text)
        carried = list(program.carried)
        carried[i] = tuple(x for x in carried[i] if program.kind[x] != kind)
        assert carried[i] != program.carried[i]
        return replace(program, carried=carried)

    return plant


def changed(field: str, text: str, value: int) -> Fault:
    def plant(program: Program) -> Program:
        column = list(getattr(program, field))
        column[at(program, text)] = value
        return replace(program, **{field: column})

    return plant


def swapped(first: str, second: str) -> Fault:
    """Exchange two ops of one rank, dependencies and all, as a wrong order on one side would."""

    def plant(program: Program) -> Program:
        i, j = at(program, first), at(program, second)
        columns = {}
        for field in ("stage", "index"):
            column = list(getattr(program, field))
            column[i], column[j] = column[j], column[i]
            columns[field] = column
        return replace(program, **columns)

    return plant


FAULTS: dict[str, tuple[Fault, str]] = {
    "an op of another stage": (changed("stage", "FORWARD F1 m0", 0), r"FORWARD of F0 index 0 occurs 2 times"),
    "an op on the wrong rank": (changed("rank", "BACKWARD B0 m1", 0), r"BACKWARD of B0 index 1 is on rank 0"),
    "a missing step": (changed("kind", "STEP B3 b0", Kind.FREE), r"STEP of B3 index 0 occurs 0 times"),
    "send order differs from receive order": (
        swapped("SEND_ACTIVATION F1 m0", "SEND_ACTIVATION F1 m1"),
        r"SEND_ACTIVATION F1 m1 of rank 0 is matched with RECV_ACTIVATION F1 m0",
    ),
    "a message without a partner": (
        changed("partner", "SEND_GRADIENT B2 m0", -1),
        r"SEND_GRADIENT B2 m0 .* no partner",
    ),
    "a message on two lanes": (changed("lane", "RECV_GRADIENT B2 m0", 0), r"SEND_GRADIENT B2 m0 .* different lanes"),
    "compute without its weights": (
        without_dependency("FORWARD F1 m0", "FETCH F1 b0 v0"),
        r"FORWARD F1 m0 of rank 1 does not wait for its weights, FETCH F1 b0 v0",
    ),
    "compute without its input": (
        without_dependency("FORWARD F1 m2", "RECV_ACTIVATION F1 m2"),
        r"FORWARD F1 m2 of rank 1 does not wait for its input",
    ),
    "compute without tokens": (
        without_dependency("RECOMPUTE B0 m1", "LOAD_TOKENS B0 m1"),
        r"RECOMPUTE B0 m1 .* does not wait for its tokens",
    ),
    "a message before what it carries": (
        without_dependency("SEND_GRADIENT B1 m1", "BACKWARD B2 m1"),
        r"SEND_GRADIENT B1 m1 .* does not wait for its gradient",
    ),
    "a recompute without its stage input": (
        without_dependency("RECOMPUTE B5 m0", "RECV_STAGE_INPUT B5 m0"),
        r"RECOMPUTE B5 m0 .* its stage input",
    ),
    "a step before its gradient": (
        without_dependency("STEP B2 b0", "OFFLOAD_GRAD B2 b0"),
        r"STEP B2 b0 .* its gradient",
    ),
    "a gradient that leaves too early": (
        without_dependency("OFFLOAD_GRAD B2 b0", "BACKWARD B2 m2"),
        r"OFFLOAD_GRAD B2 b0 .* the last gradient",
    ),
    "a tied weight stepped without the head's gradient": (
        without_dependency("STEP B0 b0", "OFFLOAD_GRAD B5 b0"),
        r"STEP B0 b0 .* the head's gradient of the tied weight",
    ),
    "a commit before its step": (without_dependency("COMMIT B1 b0", "STEP B1 b0"), r"COMMIT B1 b0 .* its STEP"),
    "a commit before the verdict": (without_dependency("COMMIT B1 b0", "VALIDATE R0"), r"COMMIT B1 b0 .* the verdict"),
    "a verdict without a gradient": (
        without_dependency("VALIDATE R1", "OFFLOAD_GRAD B0 b0"),
        r"VALIDATE R1 .* a gradient it judges",
    ),
    "stale weights": (without_carried("FETCH F2 b0 v1", Kind.COMMIT), r"FETCH F2 b0 v1 .* may read stale weights"),
    "an overwritten host gradient": (
        without_carried("OFFLOAD_GRAD B3 b0", Kind.COMMIT),
        r"OFFLOAD_GRAD B3 b0 .* may overwrite a gradient",
    ),
    "a weight slot taken too early": (
        without_dependency("FETCH B5 b0 v2", "FREE F0 v0"),
        r"FETCH B5 b0 v2 .* weights slot \d to be free",
    ),
    "a weight slot taken too early by the next step": (
        without_carried("FETCH F0 b0 v0", Kind.FREE),
        r"FETCH F0 b0 v0 .* weights slot \d of the step before",
    ),
    "a weight slot too many": (changed("slot", "FREE F0 v0", 5), r"FREE F0 v0 .* uses weight slot 5 of 2"),
    "a step on a device before the verdict": (
        without_dependency("STEP B1 b0", "VALIDATE R0"),
        r"STEP B1 b0 .* the verdict \(it cannot be undone\)",
    ),
    "weights of a device stored before their step": (
        without_dependency("STORE_WEIGHTS B1 b0", "STEP B1 b0"),
        r"STORE_WEIGHTS B1 b0 .* the weights it stores",
    ),
    "weights of a device replaced while they are stored": (
        without_carried("STEP B1 b0", Kind.STORE_WEIGHTS),
        r"STEP B1 b0 .* may replace weights that STORE_WEIGHTS B1 b0",
    ),
    "weights of a device replaced while they are copied": (
        without_dependency("STEP B1 b0", "FETCH B1 b0 v4"),
        r"STEP B1 b0 .* a copy of the weights it replaces",
    ),
    "stale weights of a layer on another rank's device": (
        without_carried("FETCH F0 b1 v0", Kind.STORE_WEIGHTS),
        r"FETCH F0 b1 v0 .* may read stale weights: it does not wait for STORE_WEIGHTS",
    ),
    "weights that a device does not store": (
        changed("kind", "STORE_WEIGHTS B1 b0", Kind.FREE),
        r"STORE_WEIGHTS of B1 index 0 occurs 0 times",
    ),
    "a gradient slab taken too early": (
        without_dependency("BACKWARD B1 m0", "OFFLOAD_GRAD B5 b0"),
        r"BACKWARD B1 m0 .* gradient slab slot \d to be free",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found_and_named(fault: str) -> None:
    plant, message = FAULTS[fault]
    program = sound(device_layers=4 if "device" in fault else 0)
    assert check(program) == []
    with pytest.raises(SpipeError, match=message):
        require(plant(program))


def test_a_receive_slot_taken_too_early_is_found() -> None:
    layout = coupled_layout(2, [1.0] * 2, 2, full_forward=True)
    program = lower(layout, breadth_first(layout, 4), 4, Options(receive_slots=1))
    i = max(i for i, kind in enumerate(program.kind) if kind == Kind.RECV_ACTIVATION)
    deps = list(program.dependencies)
    deps[i] = ()
    assert any("activation slot" in fault for fault in check(replace(program, dependencies=deps)))


def test_a_dependency_on_a_later_op_is_found() -> None:
    program = sound()
    deps = list(program.dependencies)
    deps[0] = (5,)
    assert any("which comes later" in fault for fault in check(replace(program, dependencies=deps)))


def test_a_dependency_on_another_rank_without_a_message_is_found() -> None:
    program = sound()
    i, d = at(program, "FORWARD F1 m0"), at(program, "FORWARD F0 m0")
    deps = list(program.dependencies)
    deps[i] = (*deps[i], d)
    assert any("without a message" in fault for fault in check(replace(program, dependencies=deps)))


def test_gradients_out_of_order_are_found() -> None:
    layout = coupled_layout(1, [1.0] * 2, 1)
    order = breadth_first(layout, 3)
    order[0].reverse()
    assert any("not accumulated in the order" in fault for fault in check(lower(layout, order, 3)))


def test_sends_before_receives_deadlock_on_one_serial_lane() -> None:
    """Two ranks that each send first: fine with buffers, not with rendezvous on one lane."""
    layout = coupled_layout(2, [1.0] * 4, 4, full_forward=True)
    program = lower(layout, one_forward_one_backward(layout, 4), 4)
    order = list(range(len(program)))
    sends = [i for i in order if program.rank[i] == 0 and program.kind[i] == Kind.SEND_ACTIVATION]
    checker_lanes = [(0, rank) for rank in program.rank]
    from spipe.check import _Checker

    assert _Checker(program).stuck(list(checker_lanes), ready_first=False) == []
    late = program.dependencies[:]
    first, last = sends[0], [i for i in order if program.rank[i] == 0 and program.kind[i] == Kind.RECV_GRADIENT][-1]
    late[first] = (*late[first], last)
    stuck = _Checker(replace(program, dependencies=late)).stuck(list(checker_lanes), ready_first=False)
    assert first in stuck
