"""Snapshot, undo log and deferral behind one interface: the same bits after commit, and after rollback as before."""

import ctypes
import mmap
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import spipe._native as native

KINDS = ["snapshot", "delta", "defer"]
STEP = {"step": 2, "learning_rate": 1e-2, "gradient_scale": 0.5, "speculative": True}


def new_optimizer(pool, rollback, beta1=0.9, beta2=0.95, **options):
    return native.Optimizer(pool, beta1, beta2, 1e-8, rollback=rollback, **options)


def step(optimizer, bucket, **options):
    optimizer.submit(bucket, **(STEP | options))
    return optimizer.join(bucket)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtypes", [("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "bf16"), ("bf16", "fp32")])
def test_commit_keeps_and_rollback_restores_every_byte(pool, make_buffers, instruction_set, kind, dtypes):
    optimizer = new_optimizer(pool, kind)
    group = [make_buffers(count, *dtypes, seed=count, tied=count % 2 == 0) for count in (1, 15, 17, 5000, 70_001)]
    group[2].weight_decay = 0.0
    bucket = optimizer.add_bucket([buffers.parameter() for buffers in group])
    expected = [buffers.clone() for buffers in group]
    for t in (1, 2, 3):
        for _ in range(2):  # roll back twice
            assert not step(optimizer, bucket, step=t).nonfinite
            optimizer.rollback(bucket)
            assert [b.state_bytes() for b in group] == [e.state_bytes() for e in expected]
        step(optimizer, bucket, step=t)
        optimizer.commit(bucket)
        for twin in expected:
            twin.reference_step(step=t, learning_rate=1e-2, gradient_scale=0.5)
        assert [b.state_bytes() for b in group] == [e.state_bytes() for e in expected]


def test_log_of_one_instruction_set_is_undone_by_another(pool, make_buffers):
    optimizer = new_optimizer(pool, "delta")
    buffers = make_buffers(9001)
    before = buffers.state_bytes()
    bucket = optimizer.add_bucket([buffers.parameter()])
    names = native.features()["available_instruction_sets"]
    try:
        for first in names:
            for second in names:
                native.set_instruction_set(first)
                step(optimizer, bucket)
                native.set_instruction_set(second)
                optimizer.rollback(bucket)
                assert buffers.state_bytes() == before
    finally:
        native.set_instruction_set(names[-1])


EXTREME = st.one_of(
    st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 1e38, -3e38, 100.0, float(np.float32(1e-38)), np.nan, np.inf]),
    st.floats(width=32),
)
GRADIENT = st.one_of(
    st.sampled_from([0.0, -0.0, 1e-45, 1e20, -3e38, 1e4]), st.floats(width=32, allow_nan=False, allow_infinity=False)
)


@settings(max_examples=150, deadline=None)
@given(
    gradient=hnp.arrays(np.float32, 37, elements=GRADIENT),
    state=hnp.arrays(np.float32, (3, 37), elements=EXTREME),
    betas=st.sampled_from([(0.9, 0.95), (0.0, 0.95), (0.9, 0.0), (0.0, 0.0), (0.999999, 0.999999), (1e-30, 1e-30)]),
    decays=st.sampled_from([(0.0, 0.0), (0.1, 0.0), (100.0, 0.0), (0.0, 0.1), (0.3, 1e30)]),
    kind=st.sampled_from(["delta", "snapshot"]),
)
def test_rollback_is_exact_for_extreme_values(pool, make_buffers, gradient, state, betas, decays, kind):
    optimizer = new_optimizer(pool, kind, *betas)
    buffers = make_buffers(37, "fp32", "fp32")
    buffers.gradient[:] = gradient
    buffers.master[:], buffers.first_moment[:], buffers.second_moment[:] = state
    buffers.weight[:] = buffers.master
    before = buffers.state_bytes()
    bucket = optimizer.add_bucket([buffers.parameter(weight_decay=decays[0], l2_decay=decays[1])])
    step(optimizer, bucket, gradient_scale=1.0)
    optimizer.rollback(bucket)
    assert buffers.state_bytes() == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1e-20, 1.0, 100.0, 1e15])
def test_gradients_of_any_size_are_undone(pool, make_buffers, instruction_set, kind, scale):
    """Large gradients hide the old second moment entirely: every element escapes."""
    optimizer = new_optimizer(pool, kind)
    buffers = make_buffers(10_000, "fp32", "bf16")
    buffers.gradient *= np.float32(scale)
    buffers.first_moment[::3] = 0
    buffers.second_moment[::5] = 0
    before = buffers.state_bytes()
    bucket = optimizer.add_bucket([buffers.parameter()])
    step(optimizer, bucket)
    optimizer.rollback(bucket)
    assert buffers.state_bytes() == before


@pytest.mark.parametrize("kind", KINDS)
def test_bypassed_blocks_stay_untouched(pool, make_buffers, kind):
    optimizer = new_optimizer(pool, kind)
    buffers = make_buffers(3 * 4096 + 10)
    buffers.gradient[4096 + 77] = np.inf
    buffers.weight[4096:8192] = 7  # not the rounded master
    before, expected = buffers.clone(), buffers.clone()
    expected.reference_step(step=2, learning_rate=1e-2, gradient_scale=0.5)
    bucket = optimizer.add_bucket([buffers.parameter()])
    result = step(optimizer, bucket)
    assert (result.nonfinite, result.bypassed) == (True, 1)
    optimizer.rollback(bucket)
    assert buffers.state_bytes() == before.state_bytes()
    step(optimizer, bucket)
    optimizer.commit(bucket)
    assert buffers.state_bytes() == expected.state_bytes()


def test_undo_log_refuses_another_gradient_and_goes_on_with_the_right_one(pool, make_buffers):
    optimizer = new_optimizer(pool, "delta")
    buffers = make_buffers(100_000)
    before = buffers.state_bytes()
    bucket = optimizer.add_bucket([buffers.parameter()])
    step(optimizer, bucket)
    kept = buffers.gradient[50_000].copy()
    buffers.gradient[50_000] += 1
    with pytest.raises(RuntimeError, match="gradient of parameter 0 has changed"):
        optimizer.rollback(bucket)
    assert optimizer.state(bucket) == "stepped"
    buffers.gradient[50_000] = kept
    optimizer.rollback(bucket)
    assert buffers.state_bytes() == before


@pytest.mark.parametrize("kind", ["snapshot", "delta"])
def test_exception_of_a_worker_can_be_rolled_back(pool, make_buffers, kind):
    optimizer = new_optimizer(pool, kind)
    buffers = make_buffers(200_000)
    before = buffers.state_bytes()
    bucket = optimizer.add_bucket([buffers.parameter()])
    optimizer._fail_at_block(bucket, 20)
    optimizer.submit(bucket, **STEP)
    with pytest.raises(RuntimeError, match="failure of a block"):
        optimizer.join(bucket)
    optimizer.rollback(bucket)
    assert buffers.state_bytes() == before


def test_deferred_step_touches_nothing_before_its_commit(pool, make_buffers):
    optimizer = new_optimizer(pool, "defer")
    buffers = make_buffers(10_000)
    before = buffers.state_bytes()
    bucket = optimizer.add_bucket([buffers.parameter()])
    step(optimizer, bucket)
    assert buffers.state_bytes() == before
    assert optimizer.undo_bytes == 0
    optimizer._fail_at_block(bucket, 1)
    with pytest.raises(RuntimeError, match="failure of a block"):
        optimizer.commit(bucket)
    assert optimizer.state(bucket) == "idle"


def realistic(make_buffers, count):
    """Moments as a training run has them: the first a fraction of the gradient's size, the second its square."""
    buffers = make_buffers(count, "bf16", "bf16")
    rng = np.random.default_rng(1)
    buffers.first_moment[:] = rng.standard_normal(count) * 0.23
    buffers.second_moment[:] = 1 + 0.3 * rng.random(count)
    return buffers


def test_bytes_of_the_undo_log(pool, make_buffers):
    optimizer = new_optimizer(pool, "delta")
    count = 400_000
    buffers = realistic(make_buffers, count)
    bucket = optimizer.add_bucket([buffers.parameter()])
    with pytest.raises(RuntimeError, match="it is idle"):
        optimizer.logged_bytes(bucket)
    step(optimizer, bucket, learning_rate=1e-4, gradient_scale=1.0)
    assert 3 * count <= optimizer.logged_bytes(bucket) <= optimizer.undo_bytes
    assert optimizer.logged_bytes(bucket) < 3.5 * count
    held = optimizer.undo_bytes
    optimizer.rollback(bucket)
    step(optimizer, bucket, learning_rate=1e-4, gradient_scale=1.0)
    assert optimizer.undo_bytes == held


@pytest.mark.parametrize(
    ("budget", "beta1", "chosen"),
    [(35_100, 0.9, "delta"), (34_900, 0.9, "defer"), (120_000, 0.0, "snapshot"), (119_000, 0.0, "defer"),
     (0, 0.9, "defer"), (None, 0.9, "delta")],
)  # fmt: skip
def test_auto_takes_what_the_memory_allows(pool, make_buffers, budget, beta1, chosen):
    optimizer = new_optimizer(pool, "auto", beta1, undo_budget_bytes=budget)
    group = [make_buffers(count) for count in (4000, 6000)]
    buckets = [optimizer.add_bucket([buffers.parameter()]) for buffers in group]
    assert optimizer.rollback_kind == "auto"
    step(optimizer, buckets[0], speculative=False)
    assert (optimizer.rollback_kind, optimizer.undo_bytes) == ("auto", 0)
    before = [buffers.state_bytes() for buffers in group]
    for bucket in buckets:
        step(optimizer, bucket)
        optimizer.rollback(bucket)
    assert optimizer.rollback_kind == chosen
    assert [buffers.state_bytes() for buffers in group] == before


BYTES = {"gradient": 2, "master": 4, "first_moment": 4, "second_moment": 4, "weight": 2}


def parameter_at(arrays, count):
    at = {name: array.ctypes.data for name, array in arrays.items()}
    return native.Parameter(gradient_dtype="bf16", weight_dtype="bf16", count=count, **at)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif("san" in os.environ.get("LD_PRELOAD", ""), reason="sanitizers have memory of their own")
@pytest.mark.parametrize(
    ("kind", "beta1", "chosen", "undo_bytes"),
    [("auto", 0.9, "delta", 3), ("auto", 0.0, "snapshot", 12), ("snapshot", 0.9, "snapshot", 12),
     ("defer", 0.9, "defer", 0)],
)  # fmt: skip
def test_prepared_steps_need_no_new_memory(pool, kind, beta1, chosen, undo_bytes):
    count = 5_000_000
    optimizer = new_optimizer(pool, kind, beta1)
    arrays = {name: np.frombuffer(mmap.mmap(-1, count * size), np.uint8) for name, size in BYTES.items()}
    bucket = optimizer.add_bucket([parameter_at(arrays, count)])
    ctypes.CDLL(None).malloc_trim(0)  # what other tests have freed is not new when it is used again
    before = resident_bytes()
    optimizer.prepare(speculative=True)
    prepared = resident_bytes()
    assert prepared - before > count * (sum(BYTES.values()) + undo_bytes) * 0.98
    assert optimizer.rollback_kind == chosen
    held = optimizer.undo_bytes
    assert count * undo_bytes <= held <= count * undo_bytes + 3_000_000  # whole huge pages
    for settle in (optimizer.rollback, optimizer.commit):
        step(optimizer, bucket)
        settle(bucket)
    assert resident_bytes() - prepared < 4_000_000
    assert optimizer.undo_bytes == held


@pytest.mark.parametrize("speculative", [False, True])
def test_preparing_keeps_every_byte_and_allocates_undo_memory_only_if_asked(pool, make_buffers, speculative):
    optimizer = new_optimizer(pool, "delta", rounding="stochastic")
    group = [make_buffers(count, misalignment=1) for count in (1, 5000, 2_000_000, 3)]
    before = [buffers.state_bytes() for buffers in group]
    buckets = [optimizer.add_bucket([b.parameter() for b in part]) for part in (group[:3], group[3:])]
    optimizer.prepare(speculative=speculative)
    optimizer.prepare(speculative=speculative)
    assert [buffers.state_bytes() for buffers in group] == before
    assert (optimizer.undo_bytes > 0) == speculative
    step(optimizer, buckets[1])
    with pytest.raises(RuntimeError, match="cannot prepare bucket 1: it is stepped"):
        optimizer.prepare(speculative=speculative)


def test_wrong_choices(pool):
    with pytest.raises(ValueError, match="rollback is 'undo'; it must be 'snapshot', 'delta', 'defer' or 'auto'"):
        new_optimizer(pool, "undo")
    with pytest.raises(ValueError, match="undo_budget_bytes is -1"):
        new_optimizer(pool, "auto", undo_budget_bytes=-1)
    with pytest.raises(ValueError, match="rounding is 'up'; it must be 'nearest' or 'stochastic'"):
        native.Optimizer(pool, 0.9, 0.95, 1e-8, rounding="up")
