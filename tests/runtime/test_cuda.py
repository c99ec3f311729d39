"""Runs on a CUDA device: the losses of a plain loop, the same bits from any layout, overflow as on the CPU."""

import copy
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import user_layers as user
from reference import Reference, differences
from torch import nn

from spipe.hardware import load_hardware
from spipe.memory import memory
from spipe.model import ModelSpec
from spipe.ops import Kind
from spipe.plan import Plan, make_plan
from spipe.runtime import RankProcesses, RunFailedError, RunResult, describe, run, train
from spipe.runtime.hooks import TestHooks

pytestmark = pytest.mark.gpu
# Rank processes are used for many runs, and cuBLAS reads this only once.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

MODEL = ModelSpec(name="gpu", num_layers=6, hidden_size=256, ffn_size=704, num_heads=4, vocab_size=320)


@pytest.fixture
def gpu_plan(small_plan: Callable[..., Plan]) -> Callable[..., Plan]:
    """A plan whose ranks share what CUDA devices there are."""

    def make(num_ranks: int = 1, **fields: Any) -> Plan:
        hardware = load_hardware("h200x2")
        shape = {"model": MODEL, "sequence": 128, "microbatches": 4, "optimizer": {"learning_rate": 1e-3}}
        return small_plan(num_ranks, hardware=hardware, **(shape | fields))

    return make


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 1e-2)])
@pytest.mark.parametrize("options", [{}, {"device_layers": 3, "stage_input_route": "host"}], ids=str)
def test_losses_of_a_plain_loop(
    run_plan: Callable[..., RunResult], gpu_plan: Callable[..., Plan], precision: str, tolerance: float,
    options: dict[str, Any],
) -> None:  # fmt: skip
    plan = gpu_plan(precision=precision, options=options)
    torch.backends.cuda.matmul.allow_tf32 = False
    reference = Reference(plan, device="cuda").run(20)
    losses = run_plan(plan, 20).losses
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(reference.losses), rtol=tolerance, atol=0)
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_rank_two_ranks_and_every_option_have_the_same_bits(
    run_plan: Callable[..., RunResult], gpu_plan: Callable[..., Plan], precision: str
) -> None:
    results = [
        run_plan(gpu_plan(ranks, precision=precision, deterministic=True, options=options), 6)
        for ranks, options in [
            (1, {}),
            (1, {"device_layers": 4}),
            (2, {}),
            (2, {"device_layers": 3, "stage_input_route": "host"}),
            (2, {"optimizer": "sync", "weight_slots": 1}),
        ]
    ]
    first = torch.load(results[0].output / "state.pt")
    for result in results[1:]:
        assert result.losses == results[0].losses
        assert differences(torch.load(result.output / "state.pt"), first) == []


def test_every_transport_has_the_same_bits(run_plan: Callable[..., RunResult], gpu_plan: Callable[..., Plan]) -> None:
    """Through the host's memory, from GPU to GPU (or within the one that the ranks share), and NCCL where it can."""
    transports = ["host", "peer"] + ["nccl"] * (torch.cuda.device_count() > 1)
    plan = gpu_plan(2, precision="bf16", deterministic=True)
    results = [run_plan(plan, 6, transport=name) for name in transports]
    assert [result.summary["transport"] for result in results] == transports
    expected = torch.load(results[0].output / "state.pt")
    for result in results[1:]:
        assert result.losses == results[0].losses
        assert differences(torch.load(result.output / "state.pt"), expected) == []


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, -1])
@pytest.mark.parametrize("options", [{}, {"device_layers": 8}], ids=str)
def test_an_infinite_gradient_changes_nothing(
    run_plan: Callable[..., RunResult], gpu_plan: Callable[..., Plan], precision: str, stage: int,
    options: dict[str, Any],
) -> None:  # fmt: skip
    scale = {"initial": 1024.0, "window": 100}
    plan = gpu_plan(precision=precision, deterministic=True, loss_scale=scale, options=options)
    k = range(len(plan.layout.backward))[stage]
    result = run_plan(plan, 4, hooks=TestHooks(overflow=((2, k),)))
    assert result.skipped_steps == [2]
    assert result.summary["num_updates"] == 3
    assert result.summary["loss_scale"] == (512.0 if precision == "fp16" else 1.0)
    three = run_plan(plan, 2)  # what two good steps come to
    state, before = torch.load(result.output / "state.pt"), torch.load(three.output / "state.pt")
    assert differences(state, before), "the step after the bad one has changed nothing"
    bad_last = run_plan(plan, 3, hooks=TestHooks(overflow=((2, k),)))
    assert differences(torch.load(bad_last.output / "state.pt"), before) == []


def test_blocks_can_be_compiled(run_plan: Callable[..., RunResult], gpu_plan: Callable[..., Plan]) -> None:
    plain, compiled = (run_plan(gpu_plan(precision="bf16", compile_layers=wanted), 4) for wanted in (False, True))
    torch.testing.assert_close(torch.tensor(compiled.losses), torch.tensor(plain.losses), rtol=1e-2, atol=0)


@pytest.mark.parametrize("options", [{}, {"device_layers": 3, "stage_input_route": "host"}], ids=str)
@pytest.mark.parametrize("gradients", ["bf16", "fp32"])
def test_recorded_ops_have_the_same_bits(
    run_plan: Callable[..., RunResult], gpu_plan: Callable[..., Plan], options: dict[str, Any], gradients: str
) -> None:
    found, unplanned = [], []
    for num_ranks, recorded in ((1, False), (1, True), (2, True)):
        plan = gpu_plan(
            num_ranks, backward=6 // num_ranks, precision="bf16", gradient_precision=gradients, options=options,
            deterministic=True, cuda_graphs=recorded,
        )  # fmt: skip
        result = run_plan(plan, 6)
        found.append((result.losses, torch.load(result.output / "state.pt")))
        unplanned.append(result.summary["peak_device_bytes"][0] - sum(memory(plan).ranks[0].values()))
    for losses, state in found[1:]:
        assert losses == found[0][0]
        assert differences(state, found[0][1]) == []
    assert unplanned[1] <= unplanned[0] + 2**20


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_clipping_saving_and_evaluation_do_not_change_a_bit(
    run_plan: Callable[..., RunResult], gpu_plan: Callable[..., Plan], tmp_path: Path, tied: bool
) -> None:
    """Speculation with clipping against waiting; 3 + 3 steps on one rank, then two, with layers held on the device."""
    fields: dict[str, Any] = {"precision": "bf16", "deterministic": True, "tied": tied}
    norms = [row["gradient_norm"] for row in rows_of(run_plan(gpu_plan(optimizer={"max_norm": 1e9}, **fields), 6))]
    fields["optimizer"] = {"learning_rate": 1e-3, "max_norm": sorted(norms)[2], "weight_decay": 0.1}
    whole = run_plan(gpu_plan(options={"optimizer": "sync"}, **fields), 6)
    assert 0 < len(whole.summary["clipped_steps"]) < 6
    speculative = run_plan(gpu_plan(**fields), 6)
    first = run_plan(gpu_plan(**fields), 3, output=tmp_path / "first", checkpoint_every=2)
    held = gpu_plan(2, options={"device_layers": 3}, **fields)
    second = run_plan(held, 6, output=tmp_path / "second", resume=first.output, checkpoint_every=1)
    assert first.losses + second.losses == speculative.losses == whole.losses
    expected = torch.load(whole.output / "state.pt")
    for result in (speculative, second):
        assert differences(torch.load(result.output / "state.pt"), expected) == []


def test_an_evaluation_takes_the_weights_of_its_step(
    run_plan: Callable[..., RunResult], gpu_plan: Callable[..., Plan]
) -> None:
    """Evaluating changes nothing, and is the same from one rank as from two, wherever the weights are."""
    options = {"validation_fraction": 0.1, "evaluate_every": 2}
    plans = [gpu_plan(1), gpu_plan(2), gpu_plan(2, options={"device_layers": 4})]
    plans = [plan.model_copy(update={"precision": "bf16", "deterministic": True}) for plan in plans]
    results = [run_plan(plan, 5, **options) for plan in plans]
    assert results[0].summary["validation_losses"].keys() == {"1", "3", "4"}
    for result in results[1:]:
        assert result.summary["validation_losses"] == results[0].summary["validation_losses"]
    assert run_plan(plans[0], 5, validation_fraction=0.1).losses == results[0].losses


def rows_of(result: RunResult) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (result.output / "metrics.jsonl").read_text().splitlines()]


def test_dropout_is_the_same_in_every_layout(run_plan: Callable[..., RunResult], gpu_plan: Callable[..., Plan]) -> None:
    """Masks of a forward on one rank are those of the recompute on another, or gradients would differ."""
    shapes = [(1, {"forward": 1, "backward": 1}), (1, {"backward": 3}), (2, {}), (2, {"backward": 3})]
    results = [run_plan(gpu_plan(n, dropout=0.2, z_loss=1e-3, deterministic=True, **more), 5) for n, more in shapes]
    first = torch.load(results[0].output / "state.pt")
    for result in results[1:]:
        assert result.losses == results[0].losses
        assert differences(torch.load(result.output / "state.pt"), first) == []
    without = run_plan(gpu_plan(1, deterministic=True), 5)
    assert without.losses != results[0].losses


def test_layers_of_ones_own(rank_pool: Callable[[], RankProcesses], tmp_path: Path) -> None:
    """One rank and two have the same bits, dropout included; without it the losses are those of PyTorch on the CPU."""
    torch.manual_seed(0)
    for dropout in (0.0, 0.2):
        start = [nn.Embedding(256, 64), *(user.Residual(64, dropout) for _ in range(3)), user.Head(64, 256)]
        found: list[tuple[list[float | None], dict[str, torch.Tensor]]] = []
        for num_ranks, backward in ((1, 1), (1, 3), (2, 1)):
            layers = copy.deepcopy(start)
            plan = make_plan(
                describe(layers, user.token_loss, microbatch_size=2, sequence=32), load_hardware("h200x2"),
                num_ranks=num_ranks, forward_stages=1, backward_stages=backward, global_batch=6, microbatch_size=2,
                sequence=32, precision="fp32", deterministic=True,
            )  # fmt: skip
            output = tmp_path / f"{dropout}-{num_ranks}-{backward}"
            result = train(layers, user.token_loss, None, plan, steps=5, output=output, ranks=rank_pool())
            found.append((result.losses, nn.Sequential(*layers).state_dict()))
        for losses, state in found[1:]:
            assert losses == found[0][0]
            assert all(torch.equal(value, found[0][1][name]) for name, value in state.items())
        if not dropout:
            expected = user.plain(copy.deepcopy(start), user.token_loss, None, plan, 5)
            torch.testing.assert_close(torch.tensor(found[0][0]), torch.tensor(expected), rtol=1e-4, atol=0)


def test_an_evaluation_fits_into_what_is_planned_for_it(
    run_plan: Callable[..., RunResult], gpu_plan: Callable[..., Plan]
) -> None:
    model = MODEL.model_copy(update={"vocab_size": 32000})
    plan = gpu_plan(1, model=model, precision="bf16", microbatch_size=8, sequence=512, microbatches=1, backward=6)
    result = run_plan(plan, 4, validation_fraction=0.1, evaluate_every=2)
    planned = sum(memory(plan, evaluates=True).ranks[0].values())
    assert result.summary["peak_device_bytes"][0] <= 1.02 * planned


@pytest.mark.timeout(120)  # last, because a device that hangs takes everything after it along
@pytest.mark.parametrize("fault", ["fail", "kill"])
def test_a_rank_that_stops_ends_the_one_whose_gpu_waits_for_it(
    gpu_plan: Callable[..., Plan], tmp_path: Path, fault: str
) -> None:
    plan = gpu_plan(2, precision="bf16")
    op = next(str(plan.program().op(i)) for i in plan.program().of_rank(1) if plan.program().kind[i] == Kind.BACKWARD)
    hooks = TestHooks(fail=(1, 2, op)) if fault == "fail" else TestHooks(kill=(1, 2))
    with RankProcesses(2) as ranks:
        begin = time.monotonic()
        with pytest.raises(RunFailedError, match="a test asked for" if fault == "fail" else "rank 1"):
            run(plan, steps=500, output=tmp_path / "run", ranks=ranks, transport="peer", hooks=hooks)
        assert time.monotonic() - begin < 60
