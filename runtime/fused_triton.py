"""Fused element-wise kernels for CUDA devices; see ``spipe.runtime.fused``. Importing it needs Triton."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _turn(  # type: ignore[no-untyped-def]  # its language is not Python
    x, y, cos, sin, sequence, x_batch, x_head, x_place, y_batch, y_head, y_place, heads, half,
    inverse: tl.constexpr, block_heads: tl.constexpr, block_half: tl.constexpr,
):  # fmt: skip
    """All heads of one token; each product and each sum is rounded to the type of x, as one operation after another."""
    token = tl.program_id(0).to(tl.int64)
    batch, place = token // sequence, token % sequence
    head, column = tl.arange(0, block_heads)[:, None], tl.arange(0, block_half)[None, :]
    mask = (head < heads) & (column < half)
    kind: tl.constexpr = x.dtype.element_ty
    c = tl.load(cos + place * 2 * half + column, column < half).to(tl.float32)
    s = tl.load(sin + place * 2 * half + column, column < half).to(tl.float32)
    if inverse:
        s = -s
    first = x + batch * x_batch + place * x_place + head * x_head + column
    a, b = tl.load(first, mask).to(tl.float32), tl.load(first + half, mask).to(tl.float32)
    low = (a * c).to(kind).to(tl.float32) - (b * s).to(kind).to(tl.float32)
    high = (b * c).to(kind).to(tl.float32) + (a * s).to(kind).to(tl.float32)
    out = y + batch * y_batch + place * y_place + head * y_head + column
    tl.store(out, low.to(kind), mask)
    tl.store(out + half, high.to(kind), mask)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def rotary_kernel(  # type: ignore[no-untyped-def]  # its language is not Python
    q, k, q_out, k_out, cos, sin, sequence, half,
    q_batch, q_head, q_place, r_batch, r_head, r_place, q_heads,
    k_batch, k_head, k_place, t_batch, t_head, t_place, k_heads,
    inverse: tl.constexpr, block_q: tl.constexpr, block_k: tl.constexpr, block_half: tl.constexpr,
):  # fmt: skip
    """Queries and keys of one token turned by its position, or back."""
    _turn(q, q_out, cos, sin, sequence, q_batch, q_head, q_place, r_batch, r_head, r_place, q_heads, half,
          inverse, block_q, block_half)  # fmt: skip
    _turn(k, k_out, cos, sin, sequence, k_batch, k_head, k_place, t_batch, t_head, t_place, k_heads, half,
          inverse, block_k, block_half)  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def swiglu_kernel(gate, up, out, count, block: tl.constexpr):  # type: ignore[no-untyped-def]  # its language is not Python
    """silu(gate) * up; silu(gate) is rounded to the type of gate first."""
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = place < count
    kind: tl.constexpr = gate.dtype.element_ty
    g = tl.load(gate + place, mask).to(tl.float32)
    silu = (g / (1.0 + tl.exp(-g))).to(kind).to(tl.float32)
    tl.store(out + place, (silu * tl.load(up + place, mask).to(tl.float32)).to(kind), mask)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def swiglu_backward_kernel(gradient, gate, up, gate_out, up_out, count, block: tl.constexpr):  # type: ignore[no-untyped-def]  # its language is not Python
    """The gradients of gate and up."""
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = place < count
    kind: tl.constexpr = gate.dtype.element_ty
    d = tl.load(gradient + place, mask).to(tl.float32)
    g, u = tl.load(gate + place, mask).to(tl.float32), tl.load(up + place, mask).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-g))
    tl.store(up_out + place, (d * (g * sigmoid).to(kind).to(tl.float32)).to(kind), mask)
    of_silu = (d * u).to(kind).to(tl.float32)
    tl.store(gate_out + place, (of_silu * sigmoid * (1.0 + g * (1.0 - sigmoid))).to(kind), mask)
