"""A speculative step can be undone to the byte, and calls that do not fit the state of a bucket are refused."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import spipe._native as native

STEP = {"step": 2, "learning_rate": 1e-2, "speculative": True}


def step(optimizer, bucket, **options):
    optimizer.submit(bucket, **(STEP | options))
    return optimizer.join(bucket)


@pytest.mark.parametrize("weight_dtype", ["fp32", "bf16", "fp16"])
def test_rollback_restores_every_byte(optimizer, make_buffers, instruction_set, weight_dtype):
    group = [make_buffers(count, "bf16", weight_dtype, seed=count) for count in (1, 5000, 70_000)]
    before = [buffers.state_bytes() for buffers in group]
    bucket = optimizer.add_bucket([buffers.parameter() for buffers in group])
    for t in (1, 2, 3):
        step(optimizer, bucket, step=t)
        assert all(buffers.state_bytes() != old for buffers, old in zip(group, before, strict=True))
        optimizer.rollback(bucket)
        assert [buffers.state_bytes() for buffers in group] == before


EXTREME = st.one_of(
    st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 1e38, -3e38, 100.0, float(np.float32(1e-38))]), st.floats(width=32)
)


@settings(max_examples=80, deadline=None)
@given(
    gradient=hnp.arrays(np.float32, 33, elements=EXTREME),
    state=hnp.arrays(np.float32, (3, 33), elements=EXTREME),
    beta1=st.sampled_from([0.0, 0.9]),
)
def test_rollback_is_exact_for_extreme_values(pool, make_buffers, gradient, state, beta1):
    optimizer = native.Optimizer(pool, beta1, 0.95, 1e-8)
    buffers = make_buffers(33, "fp32", "fp32")
    buffers.gradient[:] = gradient
    buffers.master[:], buffers.first_moment[:], buffers.second_moment[:] = state
    buffers.weight[:] = buffers.master
    before = buffers.state_bytes()
    bucket = optimizer.add_bucket([buffers.parameter()])
    step(optimizer, bucket)
    optimizer.rollback(bucket)
    assert buffers.state_bytes() == before


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("speculative", [False, True])
def test_block_with_nonfinite_gradient_is_left_untouched(optimizer, make_buffers, poison, speculative):
    buffers = make_buffers(3 * 4096 + 10)
    buffers.gradient[4096 + 77] = poison
    buffers.weight[4096:8192] = 7  # not the rounded master: a bypassed block must not be rewritten either
    before, expected = buffers.clone(), buffers.clone()
    assert expected.reference_step(step=2, learning_rate=1e-2) == 1
    bucket = optimizer.add_bucket([buffers.parameter()])
    result = step(optimizer, bucket, speculative=speculative)
    assert (result.nonfinite, result.bypassed) == (True, 1)
    assert buffers.state_bytes() == expected.state_bytes()
    assert (buffers.weight[4096:8192] == 7).all()
    if speculative:
        optimizer.rollback(bucket)
        assert buffers.state_bytes() == before.state_bytes()


def test_scale_or_sum_that_overflows_counts_as_nonfinite(optimizer, make_buffers):
    buffers = make_buffers(100, tied=True)
    bucket = optimizer.add_bucket([buffers.parameter()])
    assert step(optimizer, bucket, gradient_scale=3e38, speculative=False).nonfinite
    buffers.gradient[0] = buffers.gradient2[0] = 3e38
    assert step(optimizer, bucket, speculative=False).nonfinite
    buffers.gradient[0] = -buffers.gradient2[0]
    assert not step(optimizer, bucket, speculative=False).nonfinite


def test_step_rollback_and_step_again_equals_one_step(optimizer, make_buffers):
    """What clipping does: the coefficient is known only after the speculative step."""
    buffers = make_buffers(10_000)
    expected = buffers.clone()
    expected.reference_step(step=2, learning_rate=1e-2, gradient_scale=0.25)
    bucket = optimizer.add_bucket([buffers.parameter()])
    step(optimizer, bucket)
    optimizer.rollback(bucket)
    step(optimizer, bucket, gradient_scale=0.25, speculative=False)
    assert buffers.state_bytes() == expected.state_bytes()


def test_commit_keeps_the_step_and_the_snapshot_memory(optimizer, make_buffers):
    buffers = make_buffers(10_000)
    expected = buffers.clone()
    bucket = optimizer.add_bucket([buffers.parameter()])
    assert optimizer.snapshot_bytes == 0
    held = set()
    for t in (1, 2, 3):
        step(optimizer, bucket, step=t)
        optimizer.commit(bucket)
        expected.reference_step(step=t, learning_rate=1e-2)
        held.add(optimizer.snapshot_bytes)
    assert buffers.state_bytes() == expected.state_bytes()
    assert len(held) == 1
    assert 12 * 10_000 <= held.pop() <= 12 * 10_048  # padded to 64 elements


def test_calls_out_of_order_are_refused_naming_bucket_and_state(optimizer, make_buffers):
    optimizer.add_bucket([make_buffers(5).parameter()])
    buffers = make_buffers(100)
    bucket = optimizer.add_bucket([buffers.parameter()])

    def refuse(*calls, state):
        for call in calls:
            with pytest.raises(RuntimeError, match=f"bucket {bucket}: it is {state}"):
                getattr(optimizer, call)(bucket)
        assert optimizer.state(bucket) == state

    refuse("join", "rollback", "commit", state="idle")
    optimizer.submit(bucket, **STEP)
    refuse("rollback", "commit", state="submitted")
    with pytest.raises(RuntimeError, match=f"submit bucket {bucket}: it is submitted"):
        optimizer.submit(bucket, **STEP)
    optimizer.join(bucket)
    refuse("join", state="stepped")
    with pytest.raises(RuntimeError, match=f"submit bucket {bucket}: it is stepped"):
        optimizer.submit(bucket, **STEP)
    optimizer.rollback(bucket)
    after = buffers.state_bytes()
    refuse("rollback", "commit", state="idle")
    step(optimizer, bucket)
    optimizer.commit(bucket)
    refuse("rollback", "commit", state="idle")
    step(optimizer, bucket, speculative=False)
    refuse("rollback", state="idle")
    assert buffers.state_bytes() != after


def test_unknown_bucket(optimizer):
    for number in (-1, 0, 5):
        with pytest.raises(IndexError, match=f"bucket {number} is unknown"):
            optimizer.join(number)
        with pytest.raises(IndexError, match=f"bucket {number} is unknown"):
            optimizer.submit(number, **STEP)


@pytest.mark.parametrize("speculative", [False, True])
def test_exception_of_a_worker_arrives_at_join(optimizer, make_buffers, speculative):
    buffers = make_buffers(200_000)
    before = buffers.clone()
    bucket = optimizer.add_bucket([buffers.parameter()])
    optimizer._fail_at_block(bucket, 20)
    optimizer.submit(bucket, **(STEP | {"speculative": speculative}))
    with pytest.raises(RuntimeError, match="failure of a block"):
        optimizer.join(bucket)
    assert (buffers.master[20 * 4096 : 21 * 4096] == before.master[20 * 4096 : 21 * 4096]).all()
    if speculative:
        optimizer.rollback(bucket)
        assert buffers.state_bytes() == before.state_bytes()
    assert optimizer.state(bucket) == "idle"
    step(optimizer, bucket)


def test_buckets_are_stepped_from_several_threads(optimizer, make_buffers):
    group = [make_buffers(20_000, seed=i) for i in range(8)]
    expected = [buffers.clone() for buffers in group]
    buckets = [optimizer.add_bucket([buffers.parameter()]) for buffers in group]

    def work(bucket):
        for t in range(1, 11):
            step(optimizer, bucket, step=t)
            if t % 2:
                optimizer.rollback(bucket)
                step(optimizer, bucket, step=t)
            optimizer.commit(bucket)

    threads = [threading.Thread(target=work, args=(bucket,)) for bucket in buckets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for buffers, twin in zip(group, expected, strict=True):
        for t in range(1, 11):
            twin.reference_step(step=t, learning_rate=1e-2)
        assert buffers.state_bytes() == twin.state_bytes()
