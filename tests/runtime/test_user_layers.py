"""A list of modules trains like ``nn.Sequential`` of them, to the bit, on any ranks and cuts."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import user_layers as user
from torch import nn

from spipe.hardware import load_hardware
from spipe.plan import Plan, make_plan
from spipe.runtime import RankProcesses, describe, train
from spipe.runtime.adam_reference import adamw_step_tensors
from spipe.runtime.checkpoint import Position
from spipe.runtime.data import Corpus, TokenFeed
from spipe.runtime.modules import feed_of
from spipe.runtime.network import draw_seed

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


def plain(layers: Layers, loss: Any, data: Any, plan: Plan, steps: int) -> list[float]:
    """PyTorch alone: nn.Sequential, backward per microbatch, AdamW in the arithmetic of ``adam_reference``."""
    model, adam, losses = nn.Sequential(*layers), plan.optimizer, []
    feed = TokenFeed(plan, Corpus.load()) if data is None else feed_of(data, plan, Position())
    trained = [p for p in model.parameters() if p.requires_grad]
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in trained]
    torch.set_num_threads(plan.compute_threads)
    for step in range(steps):
        total = 0.0
        for m in range(plan.num_microbatches):
            x, target = feed.tensors(step, m)
            for i, layer in enumerate(layers):
                torch.manual_seed(draw_seed(plan.seed, step, m, i))
                x = layer(x)
            value = loss(x, target)
            value.backward(torch.tensor(1.0 / plan.num_microbatches))
            total += float(value.detach())
        losses.append(total / plan.num_microbatches)
        for p, (first, second) in zip(trained, moments, strict=True):
            if p.grad is not None:
                adamw_step_tensors(
                    p.grad, p.data, first, second, p.data, step=step + 1, learning_rate=adam.learning_rate,
                    beta1=adam.beta1, beta2=adam.beta2, epsilon=adam.epsilon,
                    weight_decay=adam.weight_decay_of(p.shape),
                )  # fmt: skip
                p.grad = None
    return losses


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
        losses = losses or plain(expected, loss, data, plan, 4)
        result = train(layers, loss, data, plan, steps=4, output=tmp_path / str(number), ranks=rank_pool())
        assert result.losses == losses
        assert_same(layers, expected)
    assert losses[-1] != losses[0]
