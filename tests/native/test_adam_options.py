"""Options of a step: groups of hyper-parameters, L2 decay, bias correction, stochastic rounding, statistics, tuning."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spipe._native as native
from spipe.runtime import adam_reference

STEP = {"step": 3, "learning_rate": 1e-2, "gradient_scale": 0.5}


def run(optimizer, group, changes, **options):
    bucket = optimizer.add_bucket([buffers.parameter(**change) for buffers, change in zip(group, changes, strict=True)])
    optimizer.submit(bucket, **(STEP | options))
    return optimizer.join(bucket)


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "l2_decay": st.sampled_from([0.0, 0.01, 10.0]),
        "learning_rate_factor": st.sampled_from([0.0, 0.1, 3.0]),
        "beta1": st.sampled_from([0.0, 0.5, 0.999]),
        "beta2": st.sampled_from([0.0, 0.5, 0.9999]),
        "epsilon": st.sampled_from([1e-30, 1e-6, 0.1]),
    },
)


@settings(max_examples=60, deadline=None)
@given(changes=st.lists(OPTIONS, min_size=1, max_size=4), bias_correction=st.booleans(), t=st.integers(1, 5000))
def test_groups_have_their_own_hyperparameters(pool, make_buffers, changes, bias_correction, t):
    optimizer = native.Optimizer(pool, 0.9, 0.95, 1e-8, bias_correction=bias_correction)
    group = [make_buffers(700 + 4000 * i, "bf16", "bf16", seed=i) for i in range(len(changes))]
    expected = [buffers.clone() for buffers in group]
    run(optimizer, group, changes, step=t)
    for buffers, twin, change in zip(group, expected, changes, strict=True):
        twin.reference_step(**(STEP | {"step": t, "bias_correction": bias_correction} | change))
        assert buffers.state_bytes() == twin.state_bytes()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_l2_decay_on_every_instruction_set(optimizer, make_buffers, instruction_set, dtype):
    buffers = make_buffers(5001, dtype, dtype)
    expected = buffers.clone()
    expected.reference_step(**STEP, l2_decay=0.3)
    run(optimizer, [buffers], [{"l2_decay": 0.3}])
    assert buffers.state_bytes() == expected.state_bytes()


def test_l2_decay_follows_torch_adam(optimizer, make_buffers):
    torch = pytest.importorskip("torch")
    buffers = make_buffers(3000, "fp32", "fp32", seed=5)
    buffers.first_moment[:] = buffers.second_moment[:] = 0
    theirs = torch.nn.Parameter(torch.from_numpy(buffers.master.copy()))
    reference = torch.optim.Adam([theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    bucket = optimizer.add_bucket([buffers.parameter(weight_decay=0.0, l2_decay=0.1)])
    rng = np.random.default_rng(0)
    for t in range(1, 101):
        buffers.gradient[:] = rng.standard_normal(3000)
        theirs.grad = torch.from_numpy(buffers.gradient.copy())
        optimizer.submit(bucket, step=t, learning_rate=1e-2)
        optimizer.join(bucket)
        reference.step()
    torch.testing.assert_close(torch.from_numpy(buffers.master), theirs.detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "value"),
    [("l2_decay", -0.1), ("learning_rate_factor", -1.0), ("beta1", 1.0), ("beta2", -0.5), ("epsilon", 0.0),
     ("epsilon", float("nan"))],
)  # fmt: skip
def test_wrong_group_value(optimizer, make_buffers, name, value):
    with pytest.raises(ValueError, match=f"parameter 0: {name} is {value:g}"):
        optimizer.add_bucket([make_buffers(5).parameter(**{name: value})])


@pytest.mark.parametrize("weight_dtype", ["fp32", "bf16", "fp16"])
def test_stochastic_rounding_equals_plain_twin(pool, make_buffers, instruction_set, weight_dtype):
    options = {"rounding": "stochastic", "seed": 2**63 + 5}
    optimizer = native.Optimizer(pool, 0.9, 0.95, 1e-8, **options)
    group = [make_buffers(count, "bf16", weight_dtype, seed=count) for count in (3, 9001)]
    group[1].master[:4000] *= np.float32(1e-6)  # denormal halves
    expected = [buffers.clone() for buffers in group]
    run(optimizer, group, [{"random_stream": 7}, {"random_stream": 8}])
    for buffers, twin, stream in zip(group, expected, (7, 8), strict=True):
        twin.reference_step(**STEP, **options, random_stream=stream)
        assert buffers.state_bytes() == twin.state_bytes()


@pytest.mark.parametrize("value", [1.00390625 / 3, -(2.0**-15) * 1.2345, 3e-7, 1.0])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_stochastic_rounding_is_right_on_average(dtype, value):
    master = np.full(200_000, value, np.float32)
    weight = np.empty(master.size, np.uint16 if dtype == "bf16" else np.float16)
    random = adam_reference.random_bits(1, 2, 3, 0, master.size)
    adam_reference.round_randomly_into(weight, master, random)
    rounded = adam_reference.to_fp32(weight).astype(np.float64)
    values = np.unique(rounded)
    assert len(values) <= 2
    assert values[0] <= master[0] <= values[-1]
    gap = values[-1] - values[0]
    assert abs(rounded.mean() - float(master[0])) <= max(gap, 1e-30) * 0.01
    assert gap > 0 or values[0] == master[0]


@pytest.mark.parametrize("kind", ["snapshot", "delta", "defer"])
def test_stochastic_rounding_is_rolled_back_to_the_former_weight(pool, make_buffers, kind):
    optimizer = native.Optimizer(pool, 0.9, 0.95, 1e-8, rounding="stochastic", rollback=kind)
    group = [make_buffers(5000, "bf16", weight_dtype) for weight_dtype in ("bf16", "fp16", "fp32")]
    bucket = optimizer.add_bucket([buffers.parameter() for buffers in group])
    optimizer.submit(bucket, step=1, learning_rate=1e-2)
    optimizer.join(bucket)
    before = [buffers.state_bytes() for buffers in group]
    rounded = np.empty_like(group[0].weight)
    adam_reference.round_into(rounded, group[0].master)
    assert rounded.tobytes() != before[0]["weight"]
    optimizer.submit(bucket, step=2, learning_rate=1e-2, speculative=True)
    optimizer.join(bucket)
    optimizer.rollback(bucket)
    assert [buffers.state_bytes() for buffers in group] == before


@pytest.mark.parametrize("speculative", [False, True])
def test_statistics_of_a_step_are_those_of_its_gradients(optimizer, make_buffers, instruction_set, speculative):
    group = [make_buffers(count, dtype, tied=tied) for count, dtype, tied in
             itertools.product((1, 19, 20_000), ("fp32", "bf16", "fp16"), (False, True))]  # fmt: skip
    result = run(optimizer, group, [{}] * len(group), statistics=True, speculative=speculative)
    for buffers, total in zip(group, result.sums_of_squares, strict=True):
        second = 0 if buffers.gradient2 is None else buffers.gradient2.ctypes.data
        apart = native.gradient_statistics(
            None, buffers.gradient.ctypes.data, buffers.gradient_dtype, buffers.gradient.size, gradient2=second
        )
        assert apart == (False, total)
        assert total == adam_reference.sum_of_squares(buffers.gradient, buffers.gradient2)
    group[0].gradient[0] = np.inf
    again = run(native.Optimizer(native.WorkerPool(1), 0.9, 0.95, 1e-8), group, [{}] * len(group), statistics=True)
    assert np.isfinite(again.sums_of_squares).sum() == len(group) - 1
    small = [make_buffers(5)]
    assert run(optimizer, small, [{}]).sums_of_squares == []


@pytest.mark.parametrize("stores", ["plain", "weight", "all"])
@pytest.mark.parametrize(("ahead", "blocks"), [(0, 1), (64, 3), (4096, 64)])
def test_tuning_changes_no_bit(optimizer, make_buffers, instruction_set, stores, ahead, blocks):
    kinds = [
        (count, dtype, shift) for count in (4097, 70_000, 48, 1000) for dtype in ("fp32", "bf16") for shift in (0, 1)
    ]
    group = [make_buffers(count, dtype, dtype, misalignment=shift) for count, dtype, shift in kinds]
    expected = [buffers.clone() for buffers in group]
    native._set_tuning(stores=stores, prefetch_elements=ahead, chunk_blocks=blocks)
    try:
        run(optimizer, group, [{}] * len(group))
    finally:
        native._set_tuning()
    for buffers, twin in zip(group, expected, strict=True):
        twin.reference_step(**STEP)
        assert buffers.state_bytes() == twin.state_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"stores": "none"}, "stores is 'none'"), ({"prefetch_elements": 100}, "prefetch_elements is 100"),
     ({"chunk_blocks": 0}, "chunk_blocks is 0")],
)  # fmt: skip
def test_wrong_tuning(options, message):
    with pytest.raises(ValueError, match=message):
        native._set_tuning(**options)


def test_reference_loops_move_what_they_say(pool, make_buffers, instruction_set):
    count = 64 * 1025
    buffers, destination = make_buffers(count, "bf16", "bf16"), make_buffers(count).master
    before = buffers.clone()
    at = {name: getattr(buffers, name).ctypes.data for name in ("gradient", *buffers.names)}
    for name in ("streams", "streams_weight_nt", "streams_nt", "triad", "triad_nt"):
        buffers.weight[:] = 0
        assert native._run_streams(pool, name, **at, destination=destination.ctypes.data, count=count) > 0
        if name.startswith("streams"):
            assert (buffers.weight == (buffers.master.view(np.uint32) >> 16)).all()
        else:
            assert (destination == buffers.first_moment + np.float32(3) * buffers.second_moment).all()
    for name in ("master", "first_moment", "second_moment"):
        assert getattr(buffers, name).tobytes() == getattr(before, name).tobytes()
    for change in ({"count": 63}, {"master": at["master"] + 4}):
        with pytest.raises(ValueError, match="multiple"):
            native._run_streams(
                pool, "triad", **(at | {"destination": destination.ctypes.data, "count": count} | change)
            )
    with pytest.raises(ValueError, match="name is 'copy'"):
        native._run_streams(pool, "copy", **at, destination=destination.ctypes.data, count=count)
