"""The model's layers as plain functions over named tensors, and their initial values.

Legend: b sequences of s tokens, h hidden size, a = heads·head_dim, k = kv_heads·head_dim, V vocabulary. A layer's
parameters are a mapping with the names and shapes of ``ModelSpec.parameter_shapes``; the functions keep no state, so
the same code runs on views into a weight slot and in a plain training loop.
"""

import hashlib
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from spipe.errors import SpipeError
from spipe.model import ModelSpec
from spipe.runtime import fused

Parameters = Mapping[str, Tensor]

INITIAL_STD = 0.02
_BLOCK_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class RotaryTable:
    """Cosines and sines of the rotary positions, each of shape (s, head_dim), in the dtype of the activations."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def build(cls, model: ModelSpec, sequence: int, dtype: torch.dtype, device: torch.device) -> "RotaryTable":
        """The table for positions 0 .. ``sequence`` - 1. Raises SpipeError for a scaling that is not supported."""
        frequencies = 1.0 / model.rope_theta ** (
            torch.arange(0, model.head_dim, 2, dtype=torch.float64) / model.head_dim
        )
        if model.rope_scaling:
            frequencies = _scaled_frequencies(model, frequencies)
        angles = torch.arange(sequence, dtype=torch.float64)[:, None] * torch.cat((frequencies, frequencies))[None]
        return cls(angles.cos().to(device, dtype), angles.sin().to(device, dtype))

    def part(self, first: int, stop: int) -> "RotaryTable":
        """Of some neighbouring positions."""
        return RotaryTable(self.cos[first:stop], self.sin[first:stop])

    def apply(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Turn queries (b, heads, s, head_dim) and keys (b, kv_heads, s, head_dim)."""
        return fused.rotate(q, k, self.cos, self.sin)


def check_rotary(model: ModelSpec) -> None:
    """Raises SpipeError if the model's rotary positions are scaled in a way that is not supported."""
    RotaryTable.build(model, 1, torch.float32, torch.device("cpu"))


def _scaled_frequencies(model: ModelSpec, frequencies: Tensor) -> Tensor:
    """Rotary frequencies with Hugging Face's ``linear`` or ``llama3`` scaling."""
    scaling = dict(model.rope_scaling or {})
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind not in ("linear", "llama3"):
        raise SpipeError(f"{model.name}: rope_scaling of type {kind!r} cannot be run; supported are linear and llama3")
    try:
        factor = float(str(scaling["factor"]))
        if kind == "linear":
            return frequencies / factor
        low, high = float(str(scaling["low_freq_factor"])), float(str(scaling["high_freq_factor"]))
        original = float(str(scaling["original_max_position_embeddings"]))
    except KeyError as error:
        raise SpipeError(f"{model.name}: rope_scaling of type {kind} lacks {error}") from None
    turns = original * frequencies / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / factor + smooth * frequencies


def embedding(p: Parameters, tokens: Tensor) -> Tensor:
    """Tokens (b, s) -> activations (b, s, h)."""
    return F.embedding(tokens, p["weight"])


@dataclass
class KeysAndValues:
    """What attention of one layer keeps of the tokens before, each (b, kv_heads, tokens, head_dim), when text grows
    token by token."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def extended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """With those of the new tokens behind; kept for the next time."""
        self.keys = k if self.keys is None else torch.cat((self.keys, k), dim=2)
        self.values = v if self.values is None else torch.cat((self.values, v), dim=2)
        return self.keys, self.values


def block(
    p: Parameters, x: Tensor, model: ModelSpec, rotary: RotaryTable, dropout: float = 0.0,
    past: KeysAndValues | None = None, output: bool = True,
) -> Tensor:  # fmt: skip
    """One transformer block: activations (b, s, h) -> (b, s, h).

    Args:
        dropout: probability with which an element of what attention and feed-forward add is left out.
        output: False: only what backward needs is computed; what is returned has a shape and a graph, but no values.
    """
    return feed_forward(p, attention(p, x, model, rotary, dropout, past), model, dropout, output)


def attention(
    p: Parameters, x: Tensor, model: ModelSpec, rotary: RotaryTable, dropout: float = 0.0,
    past: KeysAndValues | None = None, output: bool = True,
) -> Tensor:  # fmt: skip
    """The first part of a block, activations (b, s, h) -> (b, s, h): what causal attention adds to them."""
    mixed = _mixed(p, _norm(x, p["input_layernorm.weight"], model), model, rotary, past)
    return _add(x, mixed, p["self_attn.o_proj.weight"], dropout, output)


def feed_forward(p: Parameters, x: Tensor, model: ModelSpec, dropout: float = 0.0, output: bool = True) -> Tensor:
    """The second part of a block, activations (b, s, h) -> (b, s, h): what the SwiGLU feed-forward adds to them."""
    y = _norm(x, p["post_attention_layernorm.weight"], model)
    product = fused.swiglu(F.linear(y, p["mlp.gate_proj.weight"]), F.linear(y, p["mlp.up_proj.weight"]))
    return _add(x, product, p["mlp.down_proj.weight"], dropout, output)


def _add(x: Tensor, y: Tensor, weight: Tensor, dropout: float, output: bool) -> Tensor:
    """x (b, s, h) plus what the last product of a layer makes of y (b, s, n): weight is (h, n)."""
    if not output and not dropout:
        unseen: Tensor = UnseenSum.apply(x, y, weight)  # type: ignore[no-untyped-call]  # torch's
        return unseen
    y = F.linear(y, weight)
    return x + (F.dropout(y, dropout) if dropout else y)


class UnseenSum(torch.autograd.Function):
    """x (.., h) plus y (.., n) times weight (h, n) transposed, of which only the backward is computed.

    A recompute ends with such a sum, and nothing reads it: a fifth of a block's operations. Gradients have the bits of
    those of ``F.linear`` and the sum.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(y, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        y, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        dweight = rows.t() @ y.flatten(0, -2) if ctx.needs_input_grad[2] else None
        return gradient, (rows @ weight).view_as(y), dweight


def _mixed(
    p: Parameters, x: Tensor, model: ModelSpec, rotary: RotaryTable, past: KeysAndValues | None = None
) -> Tensor:
    """Causal (grouped-query) attention of the normed activations x (b, s, h) -> (b, s, a), before its last product.

    With a ``past``, x is what comes behind it: all tokens of a text (nothing is past yet), or the next one.
    """
    q, k, v = (_heads(p, name, x, model) for name in ("q", "k", "v"))  # (b, heads or kv_heads, s, head_dim)
    if model.qk_norm:
        q = F.rms_norm(q, (model.head_dim,), p["self_attn.q_norm.weight"], model.norm_epsilon)
        k = F.rms_norm(k, (model.head_dim,), p["self_attn.k_norm.weight"], model.norm_epsilon)
    q, k = rotary.apply(q, k)
    if past is not None:
        k, v = past.extended(k, v)
    mixed = F.scaled_dot_product_attention(
        q,
        k,
        v,
        is_causal=k.shape[2] == q.shape[2],
        enable_gqa=model.num_kv_heads != model.num_heads,
    )
    return mixed.transpose(1, 2).flatten(2)


def _heads(p: Parameters, name: str, x: Tensor, model: ModelSpec) -> Tensor:
    y = F.linear(x, p[f"self_attn.{name}_proj.weight"], p.get(f"self_attn.{name}_proj.bias"))
    return y.view(*y.shape[:-1], -1, model.head_dim).transpose(1, 2)


def _norm(x: Tensor, weight: Tensor, model: ModelSpec) -> Tensor:
    return F.rms_norm(x, (model.hidden_size,), weight, model.norm_epsilon)


def head(p: Parameters, x: Tensor, labels: Tensor, model: ModelSpec, z_loss: float = 0.0) -> Tensor:
    """Final norm, LM head and cross entropy: activations (b, s, h), labels (b, s) -> mean loss over tokens, fp32.

    ``z_loss`` times the squared log-sum-exp of the logits is added to a token's loss (PaLM, arXiv 2204.02311). Where
    all logits together would be too many (``ModelSpec.loss_chunk_tokens``), they exist only a part at a time.
    """
    x = _norm(x, p["norm.weight"], model)
    chunk = model.loss_chunk_tokens(labels.numel())
    if chunk < labels.numel() or z_loss:
        loss: Tensor = ChunkedLoss.apply(x.flatten(0, 1), p["lm_head.weight"], labels.flatten(), chunk, z_loss)  # type: ignore[no-untyped-call]  # torch's
        return loss
    logits = F.linear(x, p["lm_head.weight"])
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def logits(p: Parameters, x: Tensor, model: ModelSpec) -> Tensor:
    """Final norm and LM head: activations (b, s, h) -> (b, s, V)."""
    return F.linear(_norm(x, p["norm.weight"], model), p["lm_head.weight"])


class ChunkedLoss(torch.autograd.Function):
    """Mean cross entropy of x (T, h) times weight (V, h) transposed against labels (T,), ``chunk`` tokens at a time,
    plus ``z_loss`` times the mean square of the logits' log-sum-exp.

    Backward computes the logits again, so that (chunk, V) of them is all that ever exists.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, chunk: int, z_loss: float) -> Tensor:
        log_sums = torch.empty(len(x), dtype=torch.float32, device=x.device)
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        for rows in _chunks(len(x), chunk):
            logits = F.linear(x[rows], weight).float()
            of_labels, highest = logits.gather(1, labels[rows, None])[:, 0], logits.amax(dim=1)
            # In place: logsumexp would need as much memory again.
            log_sums[rows] = logits.sub_(highest[:, None]).exp_().sum(dim=1).log_().add_(highest)
            total += (log_sums[rows] - of_labels).sum()
            del logits  # before the next ones are there
        ctx.save_for_backward(x, weight, labels, log_sums)
        ctx.chunk, ctx.z_loss = chunk, z_loss
        loss = total / len(x)
        return loss + z_loss * log_sums.square().mean() if z_loss else loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, weight, labels, log_sums = ctx.saved_tensors
        dx, dweight = torch.empty_like(x), torch.zeros_like(weight)
        for rows in _chunks(len(x), ctx.chunk):
            p = F.linear(x[rows], weight).float().sub_(log_sums[rows, None]).exp_()
            if ctx.z_loss:
                p.mul_(1 + 2 * ctx.z_loss * log_sums[rows, None])
            p.scatter_add_(1, labels[rows, None], p.new_full((len(p), 1), -1.0))
            d = p.mul_(gradient / len(x)).to(weight.dtype)
            torch.mm(d, weight, out=dx[rows])
            dweight.addmm_(d.T, x[rows])
            del p, d
        return dx, dweight, None, None, None


def _chunks(count: int, chunk: int) -> list[slice]:
    return [slice(first, min(first + chunk, count)) for first in range(0, count, chunk)]


def initialize(model: ModelSpec, seed: int, layer: int, name: str, out: Tensor, num_threads: int = 1) -> None:
    """Fill ``out`` (fp32, CPU, contiguous, the parameter's shape) with the initial value of one parameter.

    A function of (seed, layer, name) alone, whatever the layout and the number of threads, and whether blocks are
    split: norms 1, biases 0, matrices normal with std 0.02, the two projections that write into the residual stream
    scaled by 1/sqrt(2L).
    """
    if name.endswith("norm.weight"):
        out.fill_(1.0)
    elif name.endswith(".bias"):
        out.zero_()
    else:
        std = INITIAL_STD
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            std /= math.sqrt(2 * model.num_layers)
        _fill_normal(out.view(-1).numpy(), std, f"{seed}/{model.whole_layer(layer)}/{name}", num_threads)


def _fill_normal(values: NDArray[np.float32], std: float, key: str, num_threads: int) -> None:
    """Normal values in blocks, each with its own generator, so that threads can share the work."""
    entropy = int.from_bytes(hashlib.sha256(key.encode()).digest()[:16], "little")

    def fill(number: int) -> None:
        part = values[number * _BLOCK_ELEMENTS : (number + 1) * _BLOCK_ELEMENTS]
        generator = np.random.Generator(np.random.SFC64(np.random.SeedSequence([entropy, number])))
        generator.standard_normal(out=part, dtype=np.float32)
        part *= np.float32(std)

    blocks = range(-(-len(values) // _BLOCK_ELEMENTS))
    if num_threads == 1 or len(blocks) == 1:
        for number in blocks:
            fill(number)
        return
    with ThreadPoolExecutor(num_threads) as threads:
        for _ in threads.map(fill, blocks):
            pass
