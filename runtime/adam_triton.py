"""The fused AdamW kernel for CUDA devices; see ``spipe.runtime.adam_device``. Importing it needs Triton."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def adamw_kernel(  # type: ignore[no-untyped-def]  # its language is not Python
    gradient, master, first_moment, second_moment, weight, count,
    scale, beta1, one_minus_beta1, beta2, one_minus_beta2, decay, step_size, epsilon,
    block: tl.constexpr,
):  # fmt: skip
    """One block of elements; the scalars are those of ``AdamScalars``, in its order."""
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = place < count
    g = tl.load(gradient + place, mask).to(tl.float32) * scale
    m = beta1 * tl.load(first_moment + place, mask) + one_minus_beta1 * g
    v = beta2 * tl.load(second_moment + place, mask) + one_minus_beta2 * (g * g)
    p = tl.load(master + place, mask) * decay - step_size * tl.div_rn(m, tl.sqrt_rn(v) + epsilon)
    tl.store(first_moment + place, m, mask)
    tl.store(second_moment + place, v, mask)
    tl.store(master + place, p, mask)
    tl.store(weight + place, p.to(weight.dtype.element_ty), mask)
