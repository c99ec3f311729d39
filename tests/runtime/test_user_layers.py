"""A list of modules trains like ``nn.Sequential`` of them, to the bit, on any ranks and cuts."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import user_layers as user
from safetensors.torch import load_file
from torch import nn

from spipe.check import check
from spipe.errors import SpipeError
from spipe.hardware import load_hardware
from spipe.memory import memory
from spipe.ops import Kind
from spipe.plan import Plan, make_plan
from spipe.runtime import RankProcesses, RunFailedError, describe, run, train
from spipe.sim import simulate

Layers = list[nn.Module]
Pool = Callable[[], RankProcesses]
SEQUENCE = 16


def language_model(dropout: float = 0.0) -> Layers:
    torch.manual_seed(1)
    return [nn.Embedding(256, 24), *(user.Residual(24, dropout) for _ in range(3)), user.Head(24, 256)]


def picture_model() -> Layers:
    torch.manual_seed(1)
    return [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 3)]


def plan_for(
    layers: Layers, loss: Any, data: Any, num_ranks: int, schedule: str = "spipe", forward: int = 1, backward: int = 1,
    microbatches: int = 3, size: int = 2, sequence: int = 1, **fields: Any,
) -> Plan:  # fmt: skip
    return make_plan(
        describe(layers, loss, data, microbatch_size=size, sequence=sequence),
        load_hardware("laptop"),
        schedule=schedule,
        num_ranks=num_ranks,
        forward_stages=forward,
        backward_stages=backward,
        global_batch=size * microbatches,
        microbatch_size=size,
        sequence=sequence,
        **{"precision": "fp32", **fields},
    )


def assert_same(layers: Sequence[nn.Module], others: Sequence[nn.Module]) -> None:
    ours, theirs = nn.Sequential(*layers).state_dict(), nn.Sequential(*others).state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize(
    ("make", "loss", "data", "fields"),
    [
        (language_model, user.token_loss, None, {"sequence": SEQUENCE}),
        (lambda: language_model(0.2), user.token_loss, None, {"sequence": SEQUENCE}),
        (picture_model, F.cross_entropy, user.Digits(), {}),
        (lambda: [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)], nn.MSELoss(), user.points, {"size": 3}),
    ],
    ids=["tokens", "dropout", "pictures", "function"],
)
def test_any_layers_have_the_bits_of_sequential(
    rank_pool: Pool, tmp_path: Path, make: Callable[[], Layers], loss: Any, data: Any, fields: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    start = make()
    expected = copy.deepcopy(start)
    losses: list[float] = []
    cases = [(1, "spipe", 1, 1), (2, "spipe", 1, 1), (2, "1f1b", 1, 1)]
    if len(start) > 4:
        cases += [(1, "spipe", 2, 3), (2, "mobius", 2, 2)]
    for number, (num_ranks, schedule, forward, backward) in enumerate(cases):
        layers = copy.deepcopy(start)
        plan = plan_for(layers, loss, data, num_ranks, schedule, forward, backward, **fields)
        losses = losses or user.plain(expected, loss, data, plan, 4)
        result = train(layers, loss, data, plan, steps=4, output=tmp_path / str(number), ranks=rank_pool())
        assert result.losses == losses
        assert_same(layers, expected)
    assert losses[-1] != losses[0]


def adapted() -> Layers:
    """Frozen embedding and head, linear layers with an update of low rank, and a parameter that nothing reads."""
    torch.manual_seed(2)
    inner = [user.Adapted(nn.Linear(24, 24), 2) for _ in range(3)]
    return [
        nn.Embedding(256, 24).requires_grad_(False),
        *inner,
        user.Unused(24),
        user.Head(24, 256).requires_grad_(False),
    ]


def test_what_is_frozen_is_fetched_and_never_stepped(rank_pool: Pool, tmp_path: Path) -> None:
    start = adapted()
    expected = copy.deepcopy(start)
    losses: list[float] = []
    for number, (num_ranks, backward, bucket) in enumerate([(1, 1, 1), (2, 1, 0), (2, 3, 1)]):
        layers = copy.deepcopy(start)
        plan = plan_for(
            layers, user.token_loss, None, num_ranks, backward=backward, sequence=SEQUENCE,
            options={"bucket_layers": bucket}, optimizer={"weight_decay": 0.1, "max_norm": 1e3},
        )  # fmt: skip
        program = plan.program()
        assert check(program) == []
        for kind in (Kind.OFFLOAD_GRAD, Kind.STEP, Kind.COMMIT):
            stepped = [i for i in range(len(program)) if program.kind[i] == kind]
            found = {layer for i in stepped for layer in program.buckets[program.stage[i]][program.index[i]]}
            assert found >= {1, 2, 3, 4}
            if bucket:
                assert found == {1, 2, 3, 4}
        assert simulate(plan).step_s > 0
        losses = losses or user.plain(expected, user.token_loss, None, plan, 4)
        result = train(layers, user.token_loss, None, plan, steps=4, output=tmp_path / str(number), ranks=rank_pool())
        assert result.losses == losses
        assert_same(layers, expected)
    assert torch.equal(start[4].idle, layers[4].idle)  # type: ignore[arg-type]
    assert not torch.equal(start[4].weight, layers[4].weight)  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_frozen_layers_are_clipped_and_rounded_alike_on_any_ranks(
    rank_pool: Pool, tmp_path: Path, precision: str
) -> None:
    """The norm is that of what is trained; frozen values are those that came, whatever the type of training."""
    start = adapted()
    results: list[tuple[list[float | None], Layers]] = []
    for number, (num_ranks, backward, optimizer) in enumerate([(1, 1, "sync"), (2, 1, "async"), (2, 3, "async")]):
        layers = copy.deepcopy(start)
        plan = plan_for(
            layers, user.token_loss, None, num_ranks, backward=backward, sequence=SEQUENCE, precision=precision,
            loss_scale={"initial": 1024.0}, options={"optimizer": optimizer},
            optimizer={"max_norm": 0.02, "learning_rate": 1e-2},
        )  # fmt: skip
        result = train(layers, user.token_loss, None, plan, steps=4, output=tmp_path / str(number), ranks=rank_pool())
        assert len(result.summary["clipped_steps"]) >= 2
        results.append((result.losses, layers))
    losses, first = results[0]
    assert losses[-1] != losses[0]
    for other_losses, layers in results[1:]:
        assert other_losses == losses
        assert_same(layers, first)
    for before, after in zip(start, first, strict=True):
        for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True):
            assert torch.equal(old, new) != (old.requires_grad and name != "idle"), name


def test_moments_and_gradients_are_of_what_is_trained_only() -> None:
    full, lean = (
        plan_for(layers, user.token_loss, None, 1, sequence=SEQUENCE) for layers in (language_model(), adapted())
    )
    trained = sum(p.numel() for layer in adapted() for p in layer.parameters() if p.requires_grad) - 24
    items = memory(lean).hosts[0]
    assert 12 * trained <= items["master weights and moments"] < 12 * trained * 1.2
    assert 4 * trained <= items["gradients"] < 4 * trained * 1.2
    assert items["gradients"] < memory(full).hosts[0]["gradients"] / 3


def test_it_goes_on_from_a_checkpoint_on_other_ranks(rank_pool: Pool, tmp_path: Path) -> None:
    for number, make in enumerate((lambda: language_model(0.1), adapted)):
        expected, layers = make(), make()
        plans = [plan_for(layers, user.token_loss, None, n, backward=b, sequence=SEQUENCE) for n, b in ((2, 1), (1, 2))]
        losses = user.plain(expected, user.token_loss, None, plans[0], 6)
        output = tmp_path / str(number)
        train(layers, user.token_loss, None, plans[0], steps=3, output=output, ranks=rank_pool())
        layers = make()
        result = train(
            layers, user.token_loss, None, plans[1], steps=6, output=output, resume="auto", ranks=rank_pool()
        )
        assert result.losses == losses[3:]
        assert_same(layers, expected)
        weights: dict[str, torch.Tensor] = {}
        for file in (output / "checkpoints" / "step-00000006").glob("model*.safetensors"):
            weights |= load_file(file)
        buffers = {name for name, _ in nn.Sequential(*layers).named_buffers()}
        state = nn.Sequential(*layers).state_dict()
        assert weights.keys() == state.keys() - buffers
        assert all(torch.equal(state[name], value) for name, value in weights.items())


def test_outputs_of_another_type_are_passed_on_in_the_plans(rank_pool: Pool, tmp_path: Path) -> None:
    """A layer that leaves its type does not change what a message or a neighbour reads."""
    torch.manual_seed(3)
    start: Layers = [linear(), user.Halves(4, 4), linear(), linear()]
    expected = copy.deepcopy(start)
    losses: list[float] = []
    for number, ranks in enumerate((1, 2)):
        layers = copy.deepcopy(start)
        plan = plan_for(layers, nn.MSELoss(), user.same_size, ranks, size=3, backward=2)
        if not losses:
            losses = user.plain([*expected[:2], user.Floats(), *expected[2:]], nn.MSELoss(), user.same_size, plan, 3)
        output = tmp_path / str(number)
        result = train(layers, nn.MSELoss(), user.same_size, plan, steps=3, output=output, ranks=rank_pool())
        assert result.losses == losses
        assert_same(layers, expected)


def test_evaluation_draws_nothing_and_changes_nothing(rank_pool: Pool, tmp_path: Path) -> None:
    results = []
    for num_ranks, every in ((1, 2), (2, 2), (1, None)):
        layers = language_model(0.3)
        plan = plan_for(layers, user.token_loss, None, num_ranks, sequence=SEQUENCE)
        output = tmp_path / f"{num_ranks}{every}"
        results.append(
            train(
                layers, user.token_loss, None, plan, steps=4, output=output, ranks=rank_pool(), evaluate_every=every,
                validation_fraction=0.1,
            )
        )  # fmt: skip
    one, two, none = results
    assert one.losses == two.losses == none.losses
    assert one.summary["validation_losses"] == two.summary["validation_losses"]
    plan = plan_for(picture_model(), F.cross_entropy, user.Digits(), 1)
    done = train(
        picture_model(), F.cross_entropy, user.Digits(), plan, steps=2, output=tmp_path / "pictures",
        validation=user.Digits(), evaluate_every=1, ranks=rank_pool(),
    )  # fmt: skip
    assert len(done.summary["validation_losses"]) == 2


def linear(size: int = 4) -> nn.Linear:
    return nn.Linear(size, size)


def shared() -> Layers:
    one, two = linear(), linear()
    two.weight = one.weight
    return [one, two]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (list, "there are no layers"),
        (lambda: linear(), "layers is a single Linear"),
        (lambda: [linear(), torch.relu], "layer 1 is a builtin_function_or_method, not a torch.nn.Module"),
        (shared, r"layer 1 \(Linear\): parameter weight is also weight of layer 0"),
        (lambda: [linear(), nn.BatchNorm1d(4)], r"layer 1 \(BatchNorm1d\): buffer running_mean changes"),
        (lambda: [linear(), nn.ReLU(inplace=True)], r"layer 1 \(ReLU\) changes its input in place"),
        (lambda: [linear(), linear(5)], r"layer 1 \(Linear\) cannot take an input of shape \[3, 4\].*multiplied"),
        (lambda: [user.Tuple(4, 4), linear()], r"layer 0 \(Tuple\): its output is of class tuple"),
        (lambda: [linear(), user.Remembers(4, 4)], r"layer 1 \(Remembers\) gives another result"),
        (lambda: [linear(), user.Detached(4, 4)], r"layer 1 \(Detached\): no gradient reaches its input"),
        (lambda: [linear(), user.Summed(4, 4), linear()], r"layer 1 \(Summed\): output of shape \[4\] for 3 items"),
        (lambda: [linear().requires_grad_(False)], "no parameter is trained"),
        (lambda: [linear(), user.DrawsItself(4)], r"layer 1 \(DrawsItself\) gives another result"),
        (lambda: [linear(), user.Shrinks(4, 4)], r"layer 1 \(Shrinks\) changes its parameter weight"),
        (lambda: [linear(), user.NotNumbers(4, 4)], r"layer 1 \(NotNumbers\): its output has NaN"),
        (
            lambda: [user.Elsewhere(4, 4), linear()],
            r"layer 0 \(Elsewhere\): its output is on device meta, its input on",
        ),
        (lambda: [nn.Linear(4, 4, device="meta")], r"layer 0 \(Linear\): weight is on device meta; layers come with"),
        (
            lambda: [linear().double()],
            r"layer 0 \(Linear\): parameter weight is of type torch.float64; it can be float32",
        ),
        (lambda: [linear(), nn.LazyLinear(4)], r"layer 1 \(LazyLinear\): weight has no shape yet; run the layer once"),
        (lambda: [nn.utils.parametrizations.weight_norm(linear())], r"layer 0 \(\w+\) is parametrized"),
    ],
)
def test_layers_that_cannot_be_trained_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(SpipeError, match=message):
        describe(make(), nn.MSELoss(), user.same_size, microbatch_size=3)


@pytest.mark.parametrize(
    ("loss", "data", "message"),
    [
        (nn.MSELoss(reduction="none"), user.same_size, r"the loss gave a tensor of shape \[3, 4\]"),
        (nn.CrossEntropyLoss(), user.points, "the loss cannot take an output of shape"),
        (3, user.same_size, "loss is a int"),
        (user.Head(4, 4), user.same_size, "the loss Head has parameters"),
        (nn.MSELoss(), 5, "data is a int"),
        (nn.MSELoss(), user.Digits, "data is a type"),
        (nn.MSELoss(), [], "the data set is empty"),
        (nn.MSELoss(), user.drawing, "the data are others when they are asked for again"),
        (nn.MSELoss(), user.seeding, "the data draw from PyTorch's default generator"),
        (nn.MSELoss(), "missing.bin", "missing.bin: cannot read"),
        (nn.MSELoss(), user.on_another_device, "data gave a tensor on device meta; give tensors on the CPU"),
        (nn.MSELoss(), user.Ragged(), r"items \d+, \d+, \d+, ... of the data set cannot be stacked"),
    ],
)
def test_losses_and_data_that_do_not_fit_are_named(loss: Any, data: Any, message: str) -> None:
    with pytest.raises(SpipeError, match=message):
        describe([linear()], loss, data, microbatch_size=3)


def test_layers_and_plan_have_to_be_of_one_kind(tmp_path: Path, small_plan: Callable[..., Plan]) -> None:
    layers = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)]
    plan = plan_for(layers, nn.MSELoss(), user.points, 1, size=3)

    def refused(
        message: str, layers: Any = layers, loss: Any = None, data: Any = user.points, plan: Plan = plan
    ) -> None:
        with pytest.raises(SpipeError, match=message):
            train(layers, loss or nn.MSELoss(), data, plan, steps=1, output=tmp_path / "run")
        assert not (tmp_path / "run").exists()

    refused("the plan is for the built-in model", plan=small_plan())
    refused("there are 2 layers, the plan has 3", layers[:2])
    refused(r"layer 0 \(Linear\): parameters weight \[9, 4\], bias \[9\], in the plan", [nn.Linear(4, 9), *layers[1:]])
    half = [nn.Linear(4, 8).requires_grad_(False), *layers[1:]]
    refused(r"weight \[8, 4\] \(frozen\)", half)
    refused(
        r"in the plan weight \[8, 4\] \(frozen\), bias", plan=plan_for(half, nn.MSELoss(), user.points, 1, size=3)
    )  # described frozen, trained now
    refused("layers and loss cannot be sent to the ranks", loss=lambda y, t: (y - t).square().mean())
    with pytest.raises(SpipeError, match="validation is for data sets"):
        train(layers, nn.MSELoss(), None, plan, steps=1, output=tmp_path / "run", validation=user.points)
    with pytest.raises(SpipeError, match="which only Python has"):
        run(plan, steps=1, output=tmp_path / "run")
    with pytest.raises(SpipeError, match="are for built-in layers"):
        plan.replace(dropout=0.1)
    with pytest.raises(SpipeError, match="sequence = 2, but the layers"):
        plan.replace(sequence=2)
    assert Plan.model_validate_json(plan.text()) == plan


def test_a_microbatch_that_is_not_as_described_ends_the_run(rank_pool: Pool, tmp_path: Path) -> None:
    layers = [nn.Linear(4, 1)]
    plan = plan_for(layers, nn.MSELoss(), user.points, 1, size=3)
    with pytest.raises(
        RunFailedError, match=r"the input of a microbatch has shape \[3, 4\].*as described have \[2, 4\]"
    ):
        train(
            layers, nn.MSELoss(), user.points, plan.replace(microbatch_size=2), steps=1, output=tmp_path / "run",
            ranks=rank_pool(),
        )  # fmt: skip


def test_a_shape_that_depends_on_the_data_ends_the_run(rank_pool: Pool, tmp_path: Path) -> None:
    layers = [user.DependsOnData(4, 4), linear()]
    plan = plan_for(layers, nn.MSELoss(), user.positive_at_first, 1, size=3)
    with pytest.raises(RunFailedError, match=r"layer 0 \(DependsOnData\): output of shape \[0, 4\], not \[3, 4\]"):
        train(
            layers, nn.MSELoss(), user.positive_at_first, plan, steps=2, output=tmp_path / "run", ranks=rank_pool()
        )  # fmt: skip
