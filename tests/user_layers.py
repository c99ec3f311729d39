"""Layers of a user's own, and faulty ones; a module of its own because ranks have to find the classes by name."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spipe.plan import Plan
from spipe.runtime.adam_reference import adamw_step_tensors
from spipe.runtime.checkpoint import Position
from spipe.runtime.data import Corpus, TokenFeed
from spipe.runtime.modules import feed_of
from spipe.runtime.network import draw_seed


class Residual(nn.Module):
    """A feed-forward beside the identity, with dropout and a buffer that stays as it is."""

    def __init__(self, size: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, size))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x) * self.scale))))


class Adapted(nn.Module):
    """A linear layer that stays as it is, with a trained update of low rank (LoRA, arXiv 2106.09685)."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.up(self.down(x))


class Head(nn.Module):
    def __init__(self, size: int, vocabulary: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(size), nn.Linear(size, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


class Unused(nn.Linear):
    """Has a parameter that nothing reads."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        self.idle = nn.Parameter(torch.ones(size))


class Remembers(nn.Linear):
    """Its result depends on how often it was called."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class Tuple(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), x


class Summed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum(0)


class Halves(nn.Linear):
    """Its output is of another type than its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).half()


class Floats(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


class Elsewhere(nn.Linear):
    """Its output is on another device than its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to("meta")


class NotNumbers(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float("nan")


class Shrinks(nn.Linear):
    """Changes its own parameter."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.9)
        return super().forward(x)


class DrawsItself(nn.Linear):
    """Has a generator of its own, which goes on from call to call."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.rand(x.shape, generator=self.generator)


class DependsOnData(nn.Linear):
    """Leaves out items, as soon as there are any with a first element below 0."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[x[:, 0] >= 0]


class Detached(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def points(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
    """Three points and a number for each: a function of step and microbatch."""
    generator = torch.Generator().manual_seed(1000 * step + microbatch)
    x = torch.randn(3, 4, generator=generator)
    return x, x.sin().sum(1, keepdim=True)


def same_size(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
    """Three points and as many numbers for each."""
    return torch.ones(3, 4), torch.zeros(3, 4)


def drawing(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
    """Another microbatch every time."""
    return torch.randn(3, 4), torch.zeros(3, 4)


def seeding(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
    """The same microbatch, from a generator that is not its own."""
    torch.manual_seed(step)
    return torch.randn(3, 4), torch.zeros(3, 4)


def positive_at_first(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
    """Three points, all above 0 in the first step."""
    return torch.full((3, 4), 1.0 if not step else -1.0), torch.zeros(3, 4)


def on_another_device(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
    return torch.ones(3, 4, device="meta"), torch.zeros(3, 4)


class Ragged(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Items of different lengths."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.ones(i + 1), 0


class Digits(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Ten small pictures of stripes."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.sin(torch.arange(36.0) * (i + 1)).view(1, 6, 6), i % 3


def plain(layers: Sequence[nn.Module], loss: Any, data: Any, plan: Plan, steps: int) -> list[float]:
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
