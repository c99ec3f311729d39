"""AdamW on an accelerator has the bits of the plain twin."""

import numpy as np
import pytest
import torch

from spipe.runtime.adam_device import adamw_step_eager, adamw_step_on_device
from spipe.runtime.adam_reference import AdamScalars, adamw_step_tensors

COUNT = 5000
OPTIONS = {"learning_rate": 3e-3, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}


def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    """Gradient, master, moments, weight; values over many magnitudes, zeros, denormals and huge ones among them."""
    generator = torch.Generator().manual_seed(3)
    scale = 2.0 ** torch.linspace(-45, 20, COUNT)
    gradient, master, m, v = (torch.randn(COUNT, generator=generator) * scale for _ in range(4))
    for tensor in (gradient, master, m, v):
        tensor[:7] = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 1.2e-38, 1e30, -1e30])
    return [gradient.clamp(-60000, 60000).to(dtype), master, m, v.abs(), torch.zeros(COUNT).to(dtype)]


def bytes_of(values: list[torch.Tensor]) -> list[bytes]:
    return [value.cpu().contiguous().view(torch.uint8).numpy().tobytes() for value in values]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_eager_equals_the_twin(dtype: torch.dtype) -> None:
    ours, twin = tensors(dtype), tensors(dtype)
    for step in (1, 2, 50):
        adamw_step_eager(*ours, AdamScalars.of(step=step, gradient_scale=0.25, **OPTIONS))
        assert adamw_step_tensors(*twin, step=step, gradient_scale=0.25, **OPTIONS) == 0
    assert bytes_of(ours) == bytes_of(twin)
    assert np.isfinite(ours[1].numpy()).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("step_on", [adamw_step_on_device, adamw_step_eager])
def test_cuda_equals_the_twin(dtype: torch.dtype, step_on: object) -> None:
    assert callable(step_on)
    ours, twin = [tensor.cuda() for tensor in tensors(dtype)], tensors(dtype)
    for step in (1, 2, 50):
        step_on(*ours, AdamScalars.of(step=step, gradient_scale=0.25, **OPTIONS))
        adamw_step_tensors(*twin, step=step, gradient_scale=0.25, **OPTIONS)
    assert bytes_of(ours) == bytes_of(twin)
