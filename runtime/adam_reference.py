"""The plain twin of the native AdamW kernel: the same operations in the same order, in numpy fp32.

It gives the same bits as ``spipe._native.Optimizer``. It is for tests and for reading; it is slow and needs several
temporary arrays of the size of the parameter.

Half-precision arrays: fp16 is ``numpy.float16``; bf16, which numpy lacks, is its bit pattern in ``numpy.uint16``.
Importing this module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

    FloatArray = NDArray[np.float32]
    HalfArray = NDArray[np.float16] | NDArray[np.uint16]

BLOCK_ELEMENTS = 4096
"""Non-finite gradients are bypassed and norms are summed in blocks of this many elements of a parameter."""


def bf16_from_fp32(values: FloatArray) -> NDArray[np.uint16]:
    """Bit patterns of ``values`` rounded to bf16, nearest even; a NaN keeps its sign and becomes quiet."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16)


def fp32_from_bf16(bits: NDArray[np.uint16]) -> FloatArray:
    """The exact fp32 values of bf16 bit patterns."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def fp16_from_fp32(values: FloatArray) -> NDArray[np.float16]:
    """``values`` rounded to fp16, nearest even; a NaN keeps its sign and upper payload bits and becomes quiet."""
    bits = values.view(np.uint32)
    sign = (bits >> np.uint32(16)) & np.uint32(0x8000)
    quiet_nan = (sign | np.uint32(0x7E00) | ((bits >> np.uint32(13)) & np.uint32(0x3FF))).astype(np.uint16)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        rounded = values.astype(np.float16)
    return np.where(np.isnan(values), quiet_nan, rounded.view(np.uint16)).view(np.float16)


def to_fp32(values: FloatArray | HalfArray) -> FloatArray:
    """The exact fp32 values of an fp32, fp16 or (as ``uint16``) bf16 array; ValueError for any other dtype."""
    if values.dtype == np.float32:
        return values.view(np.float32)
    if values.dtype == np.float16:
        return values.astype(np.float32)
    if values.dtype == np.uint16:
        return fp32_from_bf16(values.view(np.uint16))
    raise ValueError(f"dtype is {values.dtype}; it must be float32, float16, or uint16 holding bf16 bits")


def _mixed(x: int) -> int:
    """splitmix64."""
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def random_bits(seed: int, step: int, stream: int, first: int, count: int) -> NDArray[np.uint32]:
    """Noise of stochastic rounding for the elements from ``first`` (start of a block) on: a hash of all arguments."""
    key = _mixed(_mixed(_mixed(_mixed(seed) ^ step) ^ stream) ^ first)
    x = np.arange(count, dtype=np.uint32) + np.uint32(key & 0xFFFFFFFF)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15)) ^ np.uint32(key >> 32)) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def round_randomly_into(weight: FloatArray | HalfArray, master: FloatArray, random: NDArray[np.uint32]) -> None:
    """Like ``round_into``, but up with the probability of the fraction that is cut off: finite values, halves only."""
    bits = master.view(np.uint32)
    if weight.dtype == np.uint16:
        rounded = (bits + (random & np.uint32(0xFFFF))) >> np.uint32(16)
        weight[...] = np.where(np.isnan(master), bf16_from_fp32(master), rounded)
    elif weight.dtype == np.float16:
        magnitude, sign = bits & np.uint32(0x7FFFFFFF), (bits >> np.uint32(16)) & np.uint32(0x8000)
        noise = random & np.uint32(0x1FFF)
        small = magnitude < np.uint32(113 << 23)
        normal = (magnitude - np.uint32(112 << 23) + noise) >> np.uint32(13)
        units = np.where(small, magnitude, np.uint32(0)).view(np.float32) * np.float32(2.0**24)
        denormal = (units + noise.astype(np.float32) * np.float32(2.0**-13)).astype(np.uint32)
        finite = np.where(magnitude >= np.uint32(0x47800000), np.uint32(0x7C00), np.where(small, denormal, normal))
        rounded = (sign | finite).astype(np.uint16)
        weight.view(np.uint16)[...] = np.where(np.isnan(master), fp16_from_fp32(master).view(np.uint16), rounded)
    else:
        round_into(weight, master)


def round_into(weight: FloatArray | HalfArray, master: FloatArray) -> None:
    """Writes ``master`` (fp32) into ``weight`` (same shape), rounded to the dtype of ``weight``."""
    if weight.dtype == np.float32:
        weight[...] = master
    elif weight.dtype == np.float16:
        weight[...] = fp16_from_fp32(master)
    elif weight.dtype == np.uint16:
        weight[...] = bf16_from_fp32(master)
    else:
        raise ValueError(f"dtype of weight is {weight.dtype}; it must be float32, float16, or uint16 with bf16 bits")


@dataclass(frozen=True)
class AdamScalars:
    """The scalars of one step, computed in fp64 and rounded to fp32 once; what an element goes through is::

        g = gradient * scale
        m = beta1 * m + one_minus_beta1 * g
        v = beta2 * v + one_minus_beta2 * (g * g)
        master = master * decay - step_size * (m / (sqrt(v) + epsilon))

    Every operation is rounded to fp32 by itself.
    """

    scale: np.float32
    beta1: np.float32
    one_minus_beta1: np.float32
    beta2: np.float32
    one_minus_beta2: np.float32
    decay: np.float32
    step_size: np.float32
    epsilon: np.float32

    @classmethod
    def of(
        cls, *, step: int, learning_rate: float, beta1: float, beta2: float, epsilon: float, weight_decay: float = 0.0,
        gradient_scale: float = 1.0, bias_correction: bool = True,
    ) -> AdamScalars:  # fmt: skip
        """The scalars of step ``step``, counted from 1."""
        correction1 = 1.0 - float(beta1) ** step if bias_correction else 1.0
        correction2 = (1.0 - float(beta2) ** step) ** 0.5 if bias_correction else 1.0
        return cls(
            scale=np.float32(gradient_scale),
            beta1=np.float32(beta1),
            one_minus_beta1=np.float32(1.0 - beta1),
            beta2=np.float32(beta2),
            one_minus_beta2=np.float32(1.0 - beta2),
            decay=np.float32(1.0 - learning_rate * weight_decay),
            step_size=np.float32(learning_rate / correction1 * correction2),
            epsilon=max(np.float32(epsilon * correction2), np.finfo(np.float32).tiny),
        )


def adamw_step(
    gradient: FloatArray | HalfArray,
    master: FloatArray,
    first_moment: FloatArray,
    second_moment: FloatArray,
    weight: FloatArray | HalfArray,
    *,
    step: int,
    learning_rate: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float = 0.0,
    gradient_scale: float = 1.0,
    gradient2: FloatArray | HalfArray | None = None,
    l2_decay: float = 0.0,
    learning_rate_factor: float = 1.0,
    bias_correction: bool = True,
    rounding: str = "nearest",
    seed: int = 0,
    random_stream: int = 0,
) -> int:
    """One AdamW step in place on one parameter; all arrays have shape (num_elements,).

    ``step`` counts from 1; ``gradient_scale`` multiplies every gradient; ``gradient2`` is added to ``gradient`` in
    fp32 first. ``l2_decay`` times the master is added to the gradient, after the test for non-finite values.
    ``rounding`` is 'nearest' or 'stochastic'. Scalars are computed in fp64 and rounded once. Returns the number of
    blocks of 4096 elements that were left untouched because a scaled gradient in them is NaN or infinite.
    """
    s = AdamScalars.of(
        step=step, learning_rate=learning_rate * learning_rate_factor, beta1=beta1, beta2=beta2, epsilon=epsilon,
        weight_decay=weight_decay, gradient_scale=gradient_scale, bias_correction=bias_correction,
    )  # fmt: skip
    l2 = np.float32(l2_decay)
    bypassed = 0
    with np.errstate(all="ignore"):
        g = to_fp32(gradient)
        if gradient2 is not None:
            g = g + to_fp32(gradient2)
        g = g * s.scale
        for begin in range(0, len(g), BLOCK_ELEMENTS):
            block = slice(begin, begin + BLOCK_ELEMENTS)
            if not np.isfinite(g[block]).all():
                bypassed += 1
                continue
            gradient_block = g[block] if l2 == 0 else g[block] + l2 * master[block]
            m = s.beta1 * first_moment[block] + s.one_minus_beta1 * gradient_block
            v = s.beta2 * second_moment[block] + s.one_minus_beta2 * (gradient_block * gradient_block)
            p = master[block] * s.decay - s.step_size * (m / (np.sqrt(v) + s.epsilon))
            first_moment[block] = m
            second_moment[block] = v
            master[block] = p
            if rounding == "stochastic":
                random = random_bits(seed, step, random_stream, begin, len(p))
                round_randomly_into(weight[block], master[block], random)
            else:
                round_into(weight[block], master[block])
    return bypassed


def sum_of_squares(gradient: FloatArray | HalfArray, gradient2: FloatArray | HalfArray | None = None) -> float:
    """Twin of ``spipe._native.gradient_statistics``, in fp64.

    In a block, element i is added to partial sum i mod 16 and the partial sums are added in halves; the sums of the
    blocks are added in order.
    """
    values = to_fp32(gradient)
    if gradient2 is not None:
        values = values + to_fp32(gradient2)
    squares = np.square(values.astype(np.float64))
    total = 0.0
    for begin in range(0, len(squares), BLOCK_ELEMENTS):
        block = squares[begin : begin + BLOCK_ELEMENTS]
        rows = np.zeros((-(-len(block) // 16), 16))
        rows.ravel()[: len(block)] = block
        lanes = np.cumsum(rows, axis=0)[-1]  # cumsum adds one row after the other; sum would add in pairs
        while len(lanes) > 1:
            lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
        total += float(lanes[0])
    return total


def as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """A flat numpy view of a contiguous CPU tensor of dtype fp32, fp16, or bf16 (as ``uint16``).

    Raises ValueError, before any memory is touched, for a tensor on another device, sparse, or not contiguous.
    """
    import torch

    if tensor.layout != torch.strided or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"tensor has layout {tensor.layout}, device {tensor.device} and strides that are not checked further; "
            "it must be a dense contiguous CPU tensor: use .contiguous() or .cpu()"
        )
    flat = tensor.detach().reshape(-1)
    return (flat.view(torch.uint16) if flat.dtype == torch.bfloat16 else flat).numpy()


def adamw_step_tensors(
    gradient: torch.Tensor,
    master: torch.Tensor,
    first_moment: torch.Tensor,
    second_moment: torch.Tensor,
    weight: torch.Tensor,
    *,
    gradient2: torch.Tensor | None = None,
    **options: Any,
) -> int:
    """``adamw_step`` on torch tensors of any equal shapes; the options have the same names."""
    return adamw_step(
        as_array(gradient),
        as_array(master),
        as_array(first_moment),
        as_array(second_moment),
        as_array(weight),
        gradient2=None if gradient2 is None else as_array(gradient2),
        **options,
    )
