"""Steps against textbook AdamW in float64, written without a look at the kernel: every type, size, alignment, value."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spipe._native as native
from spipe.runtime import adam_reference

DTYPES = ["fp32", "bf16", "fp16"]
SIZES = [1, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 1023, 1024, 1025, 4097]
EPS = 2.0**-24
TINY = 2.0**-149
LARGEST = float(np.finfo(np.float32).max)
DIGITS = {"fp32": (24, -149, LARGEST), "bf16": (8, -133, (2 - 2.0**-7) * 2.0**127), "fp16": (11, -24, 65504.0)}
"""Significant bits, exponent of the smallest positive number, largest number."""
BETA1, BETA2, EPSILON = 0.9, 0.95, 1e-8


class Exact:
    """One step in float64, with bounds on what fp32 may miss; ``sure`` marks elements that stay in its range."""

    def __init__(self, before, step, learning_rate, scale):
        g, p, m, v = (np.asarray(adam_reference.to_fp32(array), np.float64) for array in (
            before.gradient, before.master, before.first_moment, before.second_moment))  # fmt: skip
        if before.gradient2 is not None:
            second = adam_reference.to_fp32(before.gradient2).astype(np.float64)
            slack_g = np.abs(scale) * EPS * (np.abs(g) + np.abs(second))
            g = g + second
        else:
            slack_g = 0.0
        g = g * scale
        slack_g = slack_g + EPS * np.abs(g) + TINY
        with np.errstate(all="ignore"):
            self.m = BETA1 * m + (1 - BETA1) * g
            self.v = BETA2 * v + (1 - BETA2) * g * g
            self.slack_m = 6 * EPS * (np.abs(BETA1 * m) + (1 - BETA1) * np.abs(g)) + (1 - BETA1) * slack_g + 3 * TINY
            self.slack_v = 6 * EPS * self.v + 2 * (1 - BETA2) * np.abs(g) * slack_g + 3 * TINY
            m_hat = self.m / (1 - BETA1**step)
            v_hat = self.v / (1 - BETA2**step)
            update = learning_rate * m_hat / (np.sqrt(v_hat) + EPSILON)
            self.p = p - learning_rate * before.weight_decay * p - update
            relative_v = np.minimum(self.slack_v / np.maximum(self.v, TINY), 1.0)
            root_share = np.sqrt(v_hat) / (np.sqrt(v_hat) + EPSILON)
            slack_update = learning_rate / (1 - BETA1**step) * self.slack_m / (np.sqrt(v_hat) + EPSILON)
            slack_update = slack_update + np.abs(update) * (8 * EPS + relative_v * root_share)
            self.slack_p = 4 * EPS * (np.abs(p) + np.abs(self.p) + np.abs(update)) + slack_update + 3 * TINY
            quotient = self.m / (np.sqrt(self.v) + EPSILON * np.sqrt(1 - BETA2**step))  # before the learning rate
            sizes = [np.abs(x) for x in (g, g * g, self.m, self.v, p, self.p, quotient, update)]
        self.sure = np.logical_and.reduce([np.isfinite(x) & (x < 0.9 * LARGEST) for x in sizes])

    def weight_slack(self, dtype):
        """Half a unit in the last place of the weight, and what the master may be off."""
        digits, smallest, _ = DIGITS[dtype]
        magnitude = np.abs(self.p) + self.slack_p
        exponent = np.floor(np.log2(np.maximum(magnitude, TINY)))
        unit = np.maximum(2.0 ** (exponent - digits + 1), 2.0**smallest)
        return self.slack_p + 0.5 * unit

    def check(self, after):
        sure = self.sure
        for name, exact, slack in [
            ("first_moment", self.m, self.slack_m),
            ("second_moment", self.v, self.slack_v),
            ("master", self.p, self.slack_p),
            ("weight", self.p, self.weight_slack(after.weight_dtype)),
        ]:
            actual = adam_reference.to_fp32(getattr(after, name)).astype(np.float64)
            if name == "weight":
                sure = sure & (np.abs(exact) < 0.99 * DIGITS[after.weight_dtype][2])
            wrong = sure & ~(np.abs(actual - exact) <= slack)
            assert not wrong.any(), (name, np.flatnonzero(wrong)[:5], actual[wrong][:5], exact[wrong][:5])


def step(optimizer, buffers, **options):
    bucket = optimizer.add_bucket([buffers.parameter()])
    optimizer.submit(bucket, **options)
    return optimizer.join(bucket)


@pytest.mark.parametrize("count", SIZES)
def test_every_dtype_and_size_equals_float64_within_rounding(optimizer, make_buffers, instruction_set, count):
    for gradient_dtype, weight_dtype, tied in itertools.product(DTYPES, DTYPES, (False, True)):
        buffers = make_buffers(count, gradient_dtype, weight_dtype, seed=count, tied=tied)
        before = buffers.clone()
        step(optimizer, buffers, step=3, learning_rate=0.1, gradient_scale=0.5)
        exact = Exact(before, 3, 0.1, 0.5)
        assert exact.sure.all()
        exact.check(buffers)
        for name in ("master", "first_moment", "second_moment"):
            assert (getattr(buffers, name) != getattr(before, name)).all(), name


def numbers(dtype):
    """Values that are exact in a dtype, the odd ones often."""
    digits, smallest, largest = DIGITS[dtype]
    odd = [0.0, 2.0**smallest, 3 * 2.0**smallest, 2.0 ** (smallest + digits - 1), largest, largest / 2, 1.0]
    return st.one_of(
        st.sampled_from([sign * x for x in odd for sign in (1, -1)]),
        st.floats(-4, 4, width=32),
        st.floats(-largest, largest, width=32),
    )


@st.composite
def odd_states(draw):
    """Sizes, types, alignments, and a few odd values at odd places of otherwise ordinary buffers."""
    gradient_dtype, weight_dtype = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
    count = draw(st.one_of(st.integers(1, 70), st.sampled_from([4095, 4096, 4097, 8193]), st.integers(71, 9000)))
    places = st.integers(0, count - 1)
    signed, not_negative = numbers("fp32"), numbers("fp32").map(abs)
    changes = {
        "gradient": draw(st.dictionaries(places, numbers(gradient_dtype), max_size=12)),
        "master": draw(st.dictionaries(places, signed, max_size=12)),
        "first_moment": draw(st.dictionaries(places, signed, max_size=12)),
        "second_moment": draw(st.dictionaries(places, not_negative, max_size=12)),
    }
    poison = draw(st.dictionaries(places, st.sampled_from([np.nan, np.inf, -np.inf]), max_size=2))
    return gradient_dtype, weight_dtype, count, draw(st.integers(0, 31)), changes, poison


def check_odd_state(pool, make_buffers, state, t, learning_rate, scale, tied):
    gradient_dtype, weight_dtype, count, misalignment, changes, poison = state
    buffers = make_buffers(count, gradient_dtype, weight_dtype, seed=count, misalignment=misalignment, tied=tied)
    for name, values in changes.items():
        array = getattr(buffers, name)
        for place, value in values.items():
            adam_reference.round_into(array[place : place + 1], np.array([value], np.float32))
    for place, value in poison.items():
        adam_reference.round_into(buffers.gradient[place : place + 1], np.array([value], np.float32))
    before, twin = buffers.clone(), buffers.clone()
    options = {"step": t, "learning_rate": learning_rate, "gradient_scale": scale}
    optimizer = native.Optimizer(pool, BETA1, BETA2, EPSILON)
    result = step(optimizer, buffers, **options)
    assert result.bypassed == twin.reference_step(**options)
    assert buffers.state_bytes() == twin.state_bytes()
    exact = Exact(before, t, learning_rate, scale)
    for first in range(0, count, 4096):
        block = slice(first, first + 4096)
        if any(place // 4096 == first // 4096 for place in poison):
            exact.sure[block] = False
            for name in before.names:
                assert getattr(buffers, name)[block].tobytes() == getattr(before, name)[block].tobytes()
    exact.sure[:] &= result.bypassed <= len({place // 4096 for place in poison})  # else a sum or scale overflowed
    exact.check(buffers)


ARGUMENTS = {
    "state": odd_states(),
    "t": st.integers(1, 10_000),
    "learning_rate": st.sampled_from([0.0, 1e-5, 1e-2, 1.0]),
    "scale": st.sampled_from([1.0, 0.5, 2.0**-16, 1 / 3]),
    "tied": st.booleans(),
}


@settings(max_examples=100, deadline=None)
@given(**ARGUMENTS)
def test_odd_values_sizes_and_alignments(pool, make_buffers, state, t, learning_rate, scale, tied):
    check_odd_state(pool, make_buffers, state, t, learning_rate, scale, tied)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(**ARGUMENTS)
def test_many_odd_values_sizes_and_alignments(pool, make_buffers, state, t, learning_rate, scale, tied):
    check_odd_state(pool, make_buffers, state, t, learning_rate, scale, tied)
