"""Layers of a user's own, and faulty ones; a module of its own because ranks have to find the classes by name."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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


class Digits(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Ten small pictures of stripes."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.sin(torch.arange(36.0) * (i + 1)).view(1, 6, 6), i % 3
