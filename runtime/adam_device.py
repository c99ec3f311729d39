"""AdamW on an accelerator, for layers that it holds: the bits of the native kernel and of its plain twin.

Every operation is rounded to fp32 by itself, in the twin's order. Where Triton is there, one kernel makes one pass over
memory, contraction to fused multiply-add turned off, division and square root correctly rounded; otherwise PyTorch's
own element-wise operations give the same bits in some twenty passes.
"""

from functools import cache
from typing import Any

import torch

from spipe.runtime.adam_reference import AdamScalars

_BLOCK = 1024


def adamw_step_on_device(
    gradient: torch.Tensor,
    master: torch.Tensor,
    first_moment: torch.Tensor,
    second_moment: torch.Tensor,
    weight: torch.Tensor,
    scalars: AdamScalars,
) -> None:
    """One step in place on flat, contiguous tensors of one device, in the order of its current stream.

    Args:
        gradient: of any floating type; every element finite.
        master, first_moment, second_moment: fp32.
        weight: gets the master, rounded to its type (to the nearest, ties to even).
        scalars: of this step.
    """
    kernel = _triton_kernel() if gradient.device.type == "cuda" else None
    if kernel is None:
        adamw_step_eager(gradient, master, first_moment, second_moment, weight, scalars)
        return
    count = gradient.numel()
    kernel[((count + _BLOCK - 1) // _BLOCK,)](
        gradient, master, first_moment, second_moment, weight, count,
        *(float(value) for value in vars(scalars).values()),
        block=_BLOCK, enable_fp_fusion=False,
    )  # fmt: skip


def adamw_step_eager(
    gradient: torch.Tensor,
    master: torch.Tensor,
    first_moment: torch.Tensor,
    second_moment: torch.Tensor,
    weight: torch.Tensor,
    scalars: AdamScalars,
) -> None:
    """The same, with PyTorch's element-wise operations."""
    s = {name: float(value) for name, value in vars(scalars).items()}
    g = gradient.float() * s["scale"]
    first_moment.mul_(s["beta1"]).add_(g * s["one_minus_beta1"])
    second_moment.mul_(s["beta2"]).add_(g.mul_(g).mul_(s["one_minus_beta2"]))
    update = second_moment.double().sqrt_().float().add_(s["epsilon"])  # rounded correctly, as fp32 is not everywhere
    torch.div(first_moment, update, out=update)
    master.mul_(s["decay"]).sub_(update.mul_(s["step_size"]))
    weight.copy_(master)


@cache
def _triton_kernel() -> Any:
    """The fused kernel, or None where Triton cannot be used."""
    try:
        from spipe.runtime.adam_triton import adamw_kernel
    except ImportError:
        return None
    return adamw_kernel
