"""From tensors to the native optimizer, which knows addresses only: everything about them is checked here."""

from typing import Any

import torch

from spipe import _native
from spipe.errors import SpipeError
from spipe.runtime.region import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def parameter_of(
    gradient: torch.Tensor,
    master: torch.Tensor,
    first_moment: torch.Tensor,
    second_moment: torch.Tensor,
    weight: torch.Tensor,
    *,
    gradient2: torch.Tensor | None = None,
    **options: Any,
) -> _native.Parameter:
    """A parameter for ``Optimizer.add_bucket``, which also refuses buffers that overlap. The caller keeps them alive.

    Args:
        gradient, weight: fp32, bf16 or fp16, each of its own dtype.
        master, first_moment, second_moment: fp32.
        gradient2: second gradient of a tied weight, in the dtype of the first.
        options: ``weight_decay`` and the other numbers of ``_native.Parameter``.

    Raises:
        SpipeError: naming the argument and its value, unless all are dense contiguous CPU tensors of one shape with at
            least one element, in these dtypes. No memory is touched.
    """
    tensors = {
        "gradient": gradient,
        "master": master,
        "first_moment": first_moment,
        "second_moment": second_moment,
        "weight": weight,
    }
    if gradient2 is not None:
        tensors["gradient2"] = gradient2
    allowed: dict[str, tuple[torch.dtype, ...]] = dict.fromkeys(tensors, (torch.float32,))
    allowed |= {"gradient": tuple(_NAMES), "weight": tuple(_NAMES)}
    for name, tensor in tensors.items():
        _check_memory(name, tensor)
        if name == "gradient2":
            allowed[name] = (gradient.dtype,)
        if tensor.dtype not in allowed[name]:
            dtypes = " or ".join(str(dtype) for dtype in allowed[name])
            raise SpipeError(f"{name} has dtype {tensor.dtype}; it must be {dtypes}")
        if tensor.shape != master.shape:
            raise SpipeError(f"{name} has shape {tuple(tensor.shape)}; it must be {tuple(master.shape)}, like master")
    if master.numel() == 0:
        raise SpipeError(f"master has shape {tuple(master.shape)}; it must have at least one element")
    return _native.Parameter(
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        gradient_dtype=_NAMES[gradient.dtype],
        weight_dtype=_NAMES[weight.dtype],
        count=master.numel(),
        **options,
    )


def _check_memory(name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise SpipeError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor")
    if tensor.layout != torch.strided:
        raise SpipeError(f"{name} has layout {tensor.layout}; it must be dense: use .to_dense()")
    if tensor.device.type != "cpu":
        raise SpipeError(f"{name} is on device {tensor.device}; it must be on the CPU: use .cpu()")
    if not tensor.is_contiguous():
        raise SpipeError(f"{name} has strides {tensor.stride()}; it must be contiguous: use .contiguous()")
