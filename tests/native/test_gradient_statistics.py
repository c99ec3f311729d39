"""The norm of a gradient has the same bits as the plain twin, for any number of threads."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spipe._native as native
from spipe.runtime import adam_reference

DTYPES = ["fp32", "bf16", "fp16"]


def statistics(buffers, pool=None):
    second = 0 if buffers.gradient2 is None else buffers.gradient2.ctypes.data
    return native.gradient_statistics(
        pool, buffers.gradient.ctypes.data, buffers.gradient_dtype, buffers.gradient.size, gradient2=second
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 4095, 4096, 4097, 8 * 4096, 8 * 4096 + 1, 100_003])
def test_sum_of_squares_equals_plain_twin(make_buffers, count, dtype):
    pools = [None, *(native.WorkerPool(num_threads) for num_threads in (1, 2, 3))]
    for tied in (False, True):
        buffers = make_buffers(count, dtype, tied=tied, misalignment=1)
        expected = adam_reference.sum_of_squares(buffers.gradient, buffers.gradient2)
        assert [statistics(buffers, pool) for pool in pools] == [(False, expected)] * 4


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 40_000), scale=st.sampled_from([1e-30, 1.0, 1e30]), seed=st.integers(0, 99))
def test_sum_is_accurate(pool, make_buffers, count, scale, seed):
    buffers = make_buffers(count, seed=seed)
    buffers.gradient *= np.float32(scale)
    exact = math.fsum(float(x) ** 2 for x in buffers.gradient)
    assert statistics(buffers, pool)[1] == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("where", [0, 5000, 39_999])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_nonfinite_element_is_found(pool, make_buffers, dtype, where):
    for poison in (np.nan, np.inf, -np.inf):
        buffers = make_buffers(40_000, dtype)
        value = np.array([poison], np.float32)
        adam_reference.round_into(buffers.gradient[where : where + 1], value)
        for threads in (None, pool):
            nonfinite, total = statistics(buffers, threads)
            assert nonfinite
            assert not math.isfinite(total)


def test_largest_finite_gradient_is_finite(pool, make_buffers):
    buffers = make_buffers(10_000)
    buffers.gradient[:] = np.finfo(np.float32).max
    nonfinite, total = statistics(buffers, pool)
    assert not nonfinite
    assert math.isfinite(total)


def test_wrong_arguments(make_buffers):
    address = make_buffers(10).gradient.ctypes.data
    for arguments, message in [
        ((None, 0, "fp32", 1), "gradient is 0"),
        ((None, address + 2, "fp32", 1), "multiple of 4"),
        ((None, address, "fp32", 0), "count is 0"),
        ((None, address, "int8", 1), "dtype is 'int8'"),
    ]:
        with pytest.raises(ValueError, match=message):
            native.gradient_statistics(*arguments)
