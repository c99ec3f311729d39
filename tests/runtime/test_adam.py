"""Tensors on their way to the native optimizer: shapes and views of any kind, and what is refused."""

import itertools
from collections.abc import Callable
from math import prod

import pytest
import torch

from spipe import _native
from spipe.errors import SpipeError
from spipe.runtime.adam import parameter_of
from spipe.runtime.adam_reference import adamw_step_tensors

NAMES = ("gradient", "master", "first_moment", "second_moment", "weight")
HYPERPARAMETERS = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8}


def tensors(
    shape: tuple[int, ...],
    gradient_dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype = torch.bfloat16,
    offset: int = 0,
) -> dict[str, torch.Tensor]:
    """Random tensors ``offset`` elements behind the start of their memory, which is a multiple of 64 bytes."""
    dtypes = (gradient_dtype, torch.float32, torch.float32, torch.float32, weight_dtype)
    generator = torch.Generator().manual_seed(prod(shape))
    result = {}
    for name, dtype in zip(NAMES, dtypes, strict=True):
        memory = torch.randn(prod(shape) + offset, generator=generator).square().to(dtype)
        result[name] = memory[offset:].view(shape)
    return result


@pytest.mark.parametrize("shape", [(4, 1000), (1000, 4), (3, 5, 7), (1,), ()])
def test_every_element_of_any_shape_and_view_is_stepped(shape: tuple[int, ...]) -> None:
    optimizer = _native.Optimizer(_native.WorkerPool(2), **HYPERPARAMETERS)
    halves = (torch.float32, torch.bfloat16, torch.float16)
    for gradient_dtype, weight_dtype, offset in itertools.product(halves, halves, (0, 1, 3, 15)):
        ours = tensors(shape, gradient_dtype, weight_dtype, offset)
        theirs = {name: tensor.clone() for name, tensor in ours.items()}
        before = {name: tensor.clone() for name, tensor in ours.items()}
        bucket = optimizer.add_bucket([parameter_of(**ours, weight_decay=0.1)])
        optimizer.submit(bucket, step=1, learning_rate=1e-2)
        optimizer.join(bucket)
        adamw_step_tensors(**theirs, step=1, learning_rate=1e-2, weight_decay=0.1, **HYPERPARAMETERS)
        for name in NAMES:
            assert torch.equal(ours[name], theirs[name])
            if name in ("master", "first_moment", "second_moment"):
                assert bool((ours[name] != before[name]).all()), name


def test_options_and_the_second_gradient_reach_the_parameter() -> None:
    given = tensors((3, 4))
    second = torch.zeros(3, 4)
    parameter = parameter_of(**given, gradient2=second, l2_decay=0.5, random_stream=7)
    assert parameter.gradient2 == second.data_ptr()
    assert (parameter.l2_decay, parameter.random_stream, parameter.count) == (0.5, 7, 12)
    assert (parameter.gradient_dtype, parameter.weight_dtype) == ("fp32", "bf16")


@pytest.mark.parametrize("name", [*NAMES, "gradient2"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.to("meta"), "is on device meta; it must be on the CPU"),
        (lambda t: t.to_sparse(), "has layout torch.sparse_coo"),
        (lambda t: t.t().contiguous().t(), r"has strides \(1, 4\); it must be contiguous"),
        (lambda t: t.to(torch.float64), "has dtype torch.float64; it must be torch.float32"),
        (lambda t: t.view(6, 4), r"has shape \(6, 4\); it must be|has shape \(4, 6\); it must be \(6, 4\)"),
        (lambda t: t.view(-1)[:20].view(4, 5), r"has shape \(4, 5\)|it must be \(4, 5\)"),
        (lambda t: t.numpy(force=True) if t.dtype == torch.float32 else [1.0], "must be a torch.Tensor"),
    ],
)
def test_wrong_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor], message: str) -> None:
    given = tensors((4, 6)) | {"gradient2": torch.zeros(4, 6)}
    before = {key: tensor.clone() for key, tensor in given.items()}
    about = "gradient" if name == "master" and "shape" in message else name
    with pytest.raises(SpipeError, match=f"^{about} .*({message})|^{about} ({message})"):
        parameter_of(**(given | {name: change(given[name])}))
    assert all(torch.equal(given[key], before[key]) for key in given)


@pytest.mark.gpu
def test_a_tensor_on_a_gpu_is_refused() -> None:
    with pytest.raises(SpipeError, match=r"weight is on device cuda:0; it must be on the CPU: use \.cpu\(\)"):
        parameter_of(**(tensors((2,)) | {"weight": torch.zeros(2, device="cuda")}))


def test_dtypes_that_do_not_fit_and_empty_tensors() -> None:
    given = tensors((4, 6), torch.bfloat16)
    with pytest.raises(SpipeError, match=r"master has dtype torch\.bfloat16; it must be torch\.float32"):
        parameter_of(**(given | {"master": given["gradient"]}))
    with pytest.raises(SpipeError, match=r"gradient2 has dtype torch\.float32; it must be torch\.bfloat16"):
        parameter_of(**given, gradient2=torch.zeros(4, 6))
    with pytest.raises(SpipeError, match=r"master has shape \(0, 6\); it must have at least one element"):
        parameter_of(**tensors((0, 6)))
    with pytest.raises(TypeError, match="momentum"):
        parameter_of(**given, momentum=0.9)


def test_overlapping_tensors_are_refused_by_the_bucket() -> None:
    optimizer = _native.Optimizer(_native.WorkerPool(1), **HYPERPARAMETERS)
    memory = torch.zeros(100)
    given = tensors((60,)) | {"first_moment": memory[:60], "second_moment": memory[40:]}
    with pytest.raises(ValueError, match=r"second_moment at .* overlaps first_moment of parameter 0"):
        optimizer.add_bucket([parameter_of(**given)])
