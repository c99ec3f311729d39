"""A model as a list of layers: the same questions, and frozen layers in programs and memory."""

from itertools import product
from typing import Any

import pytest

from spipe.check import check
from spipe.errors import SpipeError
from spipe.hardware import load_hardware
from spipe.layer_list import LayerListSpec, LayerSpec
from spipe.memory import memory
from spipe.model import MODELS
from spipe.ops import Kind
from spipe.plan import Plan, make_plan
from spipe.tensors import TensorSpec


def layer(size: int, frozen: bool = False, **fields: Any) -> LayerSpec:
    known: dict[str, Any] = {
        "name": "Linear", "parameters": {"weight": (size, size), "bias": (size,)}, "output": (1, size),
        "frozen": ("weight", "bias") if frozen else (), "forward_flops": 2.0 * size * size, "saved_elements": size,
    }  # fmt: skip
    return LayerSpec(**known | fields)


def spec(*frozen: int, count: int = 5) -> LayerListSpec:
    tensor = TensorSpec(shape=(1, 16))
    return LayerListSpec(layers=tuple(layer(16, i in frozen) for i in range(count)), input=tensor, target=tensor)


def plan(model: LayerListSpec, num_ranks: int = 2, schedule: str = "spipe", **fields: Any) -> Plan:
    fields = {"forward_stages": 1, "backward_stages": 1, "precision": "fp32"} | fields
    return make_plan(
        model, load_hardware("laptop"), schedule=schedule, num_ranks=num_ranks, global_batch=8, microbatch_size=2,
        sequence=1, **fields,
    )  # fmt: skip


def stepped(plan: Plan, kind: Kind) -> set[int]:
    program = plan.program()
    ops = [i for i in range(len(program)) if program.kind[i] == kind]
    return {layer for i in ops for layer in program.buckets[program.stage[i]][program.index[i]]}


@pytest.mark.parametrize("frozen", [(), (0,), (4,), (0, 4), (1, 2), (0, 1, 2, 3), (1, 2, 3, 4)], ids=str)
def test_programs_step_what_is_trained_and_nothing_else(frozen: tuple[int, ...]) -> None:
    layouts = [(1, "spipe", 1, 1), (2, "spipe", 1, 2), (2, "1f1b", 1, 1), (2, "mobius", 2, 2), (2, "gpipe", 1, 1)]
    option_sets: list[dict[str, Any]] = [{}, {"optimizer": "sync", "barrier": True}, {"recompute": "late"}]
    for (ranks, schedule, forward, backward), options in product(layouts, option_sets):
        made = plan(spec(*frozen), ranks, schedule, forward_stages=forward, backward_stages=backward, options=options)
        assert check(made.program()) == []
        for kind in (Kind.OFFLOAD_GRAD, Kind.STEP, Kind.COMMIT):
            assert stepped(made, kind) == set(range(5)) - set(frozen)
        assert stepped(made, Kind.FETCH) == set(range(5))


def test_a_program_that_runs_ahead_of_the_verdict_is_found() -> None:
    program = plan(spec(0)).program()
    fetch = next(
        i for i in range(len(program))
        if program.kind[i] == Kind.FETCH and list(program.buckets[program.stage[i]][program.index[i]]) == [0]
    )  # fmt: skip
    kept = [d for d in program.carried[fetch] if program.kind[d] != Kind.VALIDATE]
    assert len(kept) == len(program.carried[fetch]) - 1
    program.carried[fetch] = tuple(kept)
    assert any("may start a step before the one before is judged" in fault for fault in check(program))
    plan(spec(1)).program()  # not to leave the changed one in the cache
    plan(spec(2)).program()


def test_memory_by_hand() -> None:
    whole, lean = (memory(plan(spec(*frozen), 1, backward_stages=1)) for frozen in ((), (0, 1, 2, 3)))
    each = 4 * (16 * 16 + 16)
    assert whole.hosts[0]["weights"] == lean.hosts[0]["weights"] == 5 * each
    assert whole.hosts[0]["gradients"] == 5 * each
    assert lean.hosts[0]["gradients"] == each
    assert lean.hosts[0]["master weights and moments"] == 3 * each
    assert lean.ranks[0]["gradients"] == each


def test_an_evaluation_counts_where_it_needs_more_than_a_step() -> None:
    made = make_plan(
        MODELS["tiny"], load_hardware("h200x1"), forward_stages=1, backward_stages=8, global_batch=2,
        microbatch_size=2, sequence=4, precision="bf16",
    )  # fmt: skip
    without, with_it = memory(made).ranks[0], memory(made, evaluates=True).ranks[0]
    tokens = 8 * 2 * (2 * 4 * 8)
    assert with_it["evaluation data"] == tokens
    assert "evaluation data" not in without
    boundary, block = 2 * 4 * 128 * 2, 2 * (4 * 128 * 128 + 3 * 352 * 128 + 2 * 128)
    temporaries = MODELS["tiny"].layer_forward_activation_bytes("block", 2, 4, 2)
    assert with_it["activations and temporaries"] == 8 * boundary + block + temporaries
    assert with_it["activations and temporaries"] > without["activations and temporaries"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": ()}, "layers = .* should have at least 1 item"),
        ({"layers": (layer(16, frozen=True),)}, "no parameter is trained"),
        ({"sequence": 0}, "sequence = 0 should be greater than or equal to 1"),
        ({"widgets": 1}, "unknown key 'widgets'"),
    ],
)
def test_wrong_specs_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpipeError, match=message):
        LayerListSpec(**dict(spec()) | change)
    with pytest.raises(SpipeError, match="frozen parameters gain are not among its parameters"):
        LayerListSpec(**dict(spec()) | {"layers": (layer(16).replace(frozen=("gain",)),)})


def test_a_plan_file_gives_the_model_back_and_faults_are_named() -> None:
    made = plan(spec(1))
    assert Plan.model_validate_json(made.text()) == made
    table = made.model_dump(mode="json")
    table["model"]["layers"][0]["output"] = ["x"]
    with pytest.raises(SpipeError, match=r"model\.layers\[0\]\.output\[0\] = 'x' should be a valid integer"):
        Plan.model_validate(table)
    with pytest.raises(SpipeError, match="device_layers = 2 is for models that are trained as a whole"):
        plan(spec(1), options={"device_layers": 2})
    assert plan(spec(), options={"device_layers": 2}).options.device_layers == 2
