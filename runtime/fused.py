"""Element-wise parts of a block in one kernel each, forward and backward: rotary positions and SwiGLU.

As single products and sums they are a third of a block's launches, and about an eighth of its time on a GPU. Where
Triton cannot be used (on the CPU, too), PyTorch's own operations do the same. Rounding is theirs: every product and sum
goes to the tensors' type by itself.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = 1024


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries (b, heads, s, d) and keys (b, kv_heads, s, d), turned by the angles of their positions.

    Args:
        q, k: of one floating type; the results have their strides.
        cos, sin: (s, d), both halves of the last dimension alike; contiguous.
    """
    if _usable(q, k):
        turned: tuple[Tensor, Tensor] = _Rotate.apply(q, k, cos, sin)  # type: ignore[no-untyped-call]  # torch's
        return turned
    return rotate_eager(q, cos, sin), rotate_eager(k, cos, sin)


def rotate_eager(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same for one of them, with PyTorch's element-wise operations."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, of equal shapes and types. Only these two are saved for backward."""
    if torch.compiler.is_compiling():
        return F.silu(gate) * up
    product: Tensor = _SwiGLU.apply(gate.contiguous(), up.contiguous())  # type: ignore[no-untyped-call]  # torch's
    return product


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _turn(q, k, cos, sin, inverse=False)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return *_turn(dq, dk, *ctx.saved_tensors, inverse=True), None, None


def _turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool) -> tuple[Tensor, Tensor]:
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    turned = torch.empty_like(q), torch.empty_like(k)
    (batch, q_heads, sequence, size), k_heads = q.shape, k.shape[1]
    _kernels().rotary_kernel[(batch * sequence,)](
        q, k, *turned, cos, sin, sequence, size // 2,
        *q.stride()[:3], *turned[0].stride()[:3], q_heads, *k.stride()[:3], *turned[1].stride()[:3], k_heads,
        inverse=inverse, block_q=_power(q_heads), block_k=_power(k_heads), block_half=_power(size // 2),
        enable_fp_fusion=False,
    )  # fmt: skip
    return turned


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        if not _usable(gate, up):
            return F.silu(gate) * up
        out, count = torch.empty_like(gate), gate.numel()
        _kernels().swiglu_kernel[(-(-count // _BLOCK),)](gate, up, out, count, block=_BLOCK)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        if not _usable(gate, up):
            return torch.ops.aten.silu_backward(gradient * up, gate), gradient * F.silu(gate)
        of_gate, of_up, count = torch.empty_like(gate), torch.empty_like(up), gate.numel()
        _kernels().swiglu_backward_kernel[(-(-count // _BLOCK),)](
            gradient.contiguous(), gate, up, of_gate, of_up, count, block=_BLOCK
        )
        return of_gate, of_up


def _power(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()


def _usable(*tensors: Tensor) -> bool:
    return (
        all(x.device.type == "cuda" for x in tensors) and not torch.compiler.is_compiling() and _kernels() is not None
    )


@cache
def _kernels() -> Any:
    """The kernels, or None where Triton cannot be used."""
    try:
        from spipe.runtime import fused_triton
    except ImportError:
        return None
    return fused_triton
