"""The extension neither changes nor inherits flush-to-zero modes."""

import subprocess
import sys

import numpy as np
import pytest

import spipe._native as native

CHECK = """
import sys
def normal():
    return float("1e-320") * float("1.0") != 0.0 and float("2.3e-308") / float("7.0") != 0.0
assert normal()
import spipe._native as native
assert normal(), "after import"
import threading, numpy as np
from spipe._native import Optimizer, Parameter, WorkerPool
count = 20000
gradient, master, first, second, weight = (np.full(count, 1e-3, np.float32) for _ in range(5))
def work():
    optimizer = Optimizer(WorkerPool(2), 0.9, 0.95, 1e-8)
    address = dict(gradient=gradient, master=master, first_moment=first, second_moment=second, weight=weight)
    bucket = optimizer.add_bucket([Parameter(gradient_dtype="fp32", weight_dtype="fp32", count=count,
                                             **{k: v.ctypes.data for k, v in address.items()})])
    optimizer.submit(bucket, step=1, learning_rate=1e-3)
    optimizer.join(bucket)
    native.gradient_statistics(None, gradient.ctypes.data, "fp32", count)
    assert normal(), "on the thread that stepped"
    results.append(1)
results = []
thread = threading.Thread(target=work)
thread.start()
thread.join()
assert results and normal(), "after a step"
assert (np.full(100, 1e-42, np.float32) * np.float32(1.0) != 0).all()
"""


def test_denormals_survive_import_and_steps():
    subprocess.run([sys.executable, "-c", CHECK], check=True, timeout=60)


def test_denormal_state_is_not_flushed(optimizer, make_buffers, instruction_set):
    buffers = make_buffers(50, "fp32", "bf16")
    buffers.gradient[:] = 1e-41
    buffers.master[:] = np.float32(3e-40)
    buffers.first_moment[:] = 1e-42
    buffers.second_moment[:] = 1e-44
    expected = buffers.clone()
    options = {"step": 1000, "learning_rate": 1e-6}
    expected.reference_step(**options)
    bucket = optimizer.add_bucket([buffers.parameter()])
    optimizer.submit(bucket, **options)
    optimizer.join(bucket)
    assert buffers.state_bytes() == expected.state_bytes()
    for name in ("master", "first_moment", "second_moment", "weight"):
        assert (getattr(buffers, name) != 0).all(), name


def test_result_does_not_depend_on_the_mode_of_the_caller(make_buffers):
    torch = pytest.importorskip("torch")
    buffers = make_buffers(50, "fp32", "bf16")
    buffers.gradient[:] = 1e-41
    buffers.second_moment[:] = 1e-44
    expected = buffers.clone()
    expected.reference_step(step=1, learning_rate=1e-3)
    squares = native.gradient_statistics(None, buffers.gradient.ctypes.data, "fp32", 50)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        optimizer = native.Optimizer(native.WorkerPool(2), 0.9, 0.95, 1e-8)
        bucket = optimizer.add_bucket([buffers.parameter()])
        optimizer.submit(bucket, step=1, learning_rate=1e-3)
        optimizer.join(bucket)
        flushed_squares = native.gradient_statistics(None, buffers.gradient.ctypes.data, "fp32", 50)
        assert float("1e-320") * float("1.0") == 0.0, "the mode of the caller is left as it was"
    finally:
        torch.set_flush_denormal(False)
    assert buffers.state_bytes() == expected.state_bytes()
    assert flushed_squares == squares
    assert squares[1] > 0
