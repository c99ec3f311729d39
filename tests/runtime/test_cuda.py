"""Runs on a CUDA device: the losses of a plain loop, the same bits from any layout, overflow as on the CPU."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import Reference, differences

from spipe.hardware import load_hardware
from spipe.model import ModelSpec
from spipe.ops import Kind
from spipe.plan import Plan
from spipe.runtime import RankProcesses, RunFailedError, RunResult, run
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
