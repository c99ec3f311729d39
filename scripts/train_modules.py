"""Train a list of modules of one's own: a small GPT with dropout, its embedding and blocks plain PyTorch.

    python scripts/train_modules.py --ranks 2 --steps 20 -o modules-run

The layers are described by running them once, a plan is made, two processes train it, and the result is back in the
modules. ``--lora`` freezes everything but updates of low rank of the blocks' projections.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spipe.hardware import load_hardware
from spipe.plan import Plan, make_plan
from spipe.runtime import describe, train

VOCABULARY, SEQUENCE = 256, 64


class Embedding(nn.Module):
    """Tokens (b, s) -> activations (b, s, h), positions added."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, size), nn.Embedding(SEQUENCE, size)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.position.weight[: tokens.shape[1]]


class Block(nn.Module):
    """Activations (b, s, h) -> (b, s, h)."""

    def __init__(self, size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(mixed))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Head(nn.Module):
    """Activations (b, s, h) -> logits (b, s, V)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(size), nn.Linear(size, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


class LowRank(nn.Module):
    """A linear layer that stays as it is, and a trained update of low rank (LoRA, arXiv 2106.09685)."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear
        self.a, self.b = (
            nn.Linear(linear.in_features, rank, bias=False),
            nn.Linear(rank, linear.out_features, bias=False),
        )
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.b(self.a(x))


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy over tokens."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make_layers(num_blocks: int = 3, size: int = 48, dropout: float = 0.1) -> list[nn.Module]:
    """Layers with values of a fixed seed."""
    torch.manual_seed(0)
    return [Embedding(size), *(Block(size, 4, dropout) for _ in range(num_blocks)), Head(size)]


def add_low_rank(layers: list[nn.Module], rank: int) -> None:
    """Freeze all parameters and give the blocks' projections trained updates."""
    for layer in layers:
        layer.requires_grad_(False)
        if isinstance(layer, Block):
            layer.qkv, layer.out = LowRank(layer.qkv, rank), LowRank(layer.out, rank)


def plan_of(layers: list[nn.Module], ranks: int) -> Plan:
    """Two sequences a microbatch, four microbatches a step, on text of Python's documentation."""
    return make_plan(
        describe(layers, loss, microbatch_size=2, sequence=SEQUENCE),
        load_hardware("laptop"),
        num_ranks=ranks,
        forward_stages=1,
        backward_stages=2,
        global_batch=8,
        microbatch_size=2,
        sequence=SEQUENCE,
        precision="fp32",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lora", type=int, metavar="RANK", help="train updates of this rank only")
    parser.add_argument("-o", "--output", type=Path, required=True, help="new run folder")
    options = parser.parse_args()
    layers = make_layers()
    if options.lora:
        add_low_rank(layers, options.lora)
    result = train(layers, loss, None, plan_of(layers, options.ranks), steps=options.steps, output=options.output)
    print(f"loss {result.losses[0]} -> {result.losses[-1]}, {result.tokens_per_s:.0f} tokens / s")


if __name__ == "__main__":
    main()
