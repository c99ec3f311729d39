"""Buffers of one parameter, for the native optimizer and its plain twin alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import spipe._native as native
from spipe.runtime import adam_reference

STORAGE = {"fp32": np.float32, "bf16": np.uint16, "fp16": np.float16}
HYPERPARAMETERS = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8}


def empty(count: int, dtype: str, misalignment: int = 0) -> np.ndarray:
    """``count`` elements whose address is ``misalignment`` elements after a multiple of 64 bytes."""
    storage = np.dtype(STORAGE[dtype])
    raw = np.zeros(count * storage.itemsize + 192, np.uint8)
    start = -raw.ctypes.data % 64 + misalignment * storage.itemsize
    return raw[start : start + count * storage.itemsize].view(storage)


@dataclass
class Buffers:
    gradient_dtype: str
    weight_dtype: str
    gradient: np.ndarray
    master: np.ndarray
    first_moment: np.ndarray
    second_moment: np.ndarray
    weight: np.ndarray
    gradient2: np.ndarray | None = None
    weight_decay: float = 0.1
    names: tuple[str, ...] = field(default=("master", "first_moment", "second_moment", "weight"), repr=False)

    def parameter(self, **changes: Any) -> native.Parameter:
        values: dict[str, Any] = {name: getattr(self, name).ctypes.data for name in ("gradient", *self.names)} | {
            "gradient_dtype": self.gradient_dtype,
            "weight_dtype": self.weight_dtype,
            "count": self.master.size,
            "weight_decay": self.weight_decay,
            "gradient2": 0 if self.gradient2 is None else self.gradient2.ctypes.data,
        }
        return native.Parameter(**(values | changes))

    def clone(self) -> Buffers:
        copies = {name: getattr(self, name).copy() for name in ("gradient", *self.names)}
        gradient2 = None if self.gradient2 is None else self.gradient2.copy()
        return Buffers(self.gradient_dtype, self.weight_dtype, **copies, gradient2=gradient2,
                       weight_decay=self.weight_decay)  # fmt: skip

    def state_bytes(self) -> dict[str, bytes]:
        """Bytes, not values: -0.0 and NaN count."""
        return {name: getattr(self, name).tobytes() for name in self.names}

    def reference_step(self, **options: Any) -> int:
        return adam_reference.adamw_step(
            self.gradient,
            self.master,
            self.first_moment,
            self.second_moment,
            self.weight,
            gradient2=self.gradient2,
            weight_decay=self.weight_decay,
            **(HYPERPARAMETERS | options),
        )


def store(destination: np.ndarray, values: np.ndarray) -> None:
    adam_reference.round_into(destination, values.astype(np.float32))


@pytest.fixture(scope="session")
def make_buffers() -> Callable[..., Buffers]:
    def make(
        count: int,
        gradient_dtype: str = "fp32",
        weight_dtype: str = "bf16",
        seed: int = 0,
        misalignment: int = 0,
        tied: bool = False,
    ) -> Buffers:
        rng = np.random.default_rng(seed)
        buffers = Buffers(
            gradient_dtype,
            weight_dtype,
            empty(count, gradient_dtype, misalignment),
            *(empty(count, "fp32", misalignment) for _ in range(3)),
            empty(count, weight_dtype, misalignment),
            gradient2=empty(count, gradient_dtype, misalignment) if tied else None,
        )
        store(buffers.gradient, rng.standard_normal(count))
        if buffers.gradient2 is not None:
            store(buffers.gradient2, rng.standard_normal(count))
        store(buffers.master, rng.standard_normal(count))
        store(buffers.first_moment, rng.standard_normal(count) * 0.1)
        store(buffers.second_moment, np.square(rng.standard_normal(count)) * 0.01)
        store(buffers.weight, buffers.master)
        return buffers

    return make


@pytest.fixture(scope="session")
def pool() -> native.WorkerPool:
    return native.WorkerPool(2)


@pytest.fixture
def optimizer(pool: native.WorkerPool) -> native.Optimizer:
    return native.Optimizer(pool, **HYPERPARAMETERS)


@pytest.fixture(params=native.features()["available_instruction_sets"])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native.features()["instruction_set"]
    native.set_instruction_set(request.param)
    yield request.param
    native.set_instruction_set(before)
