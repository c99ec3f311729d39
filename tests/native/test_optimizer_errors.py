"""Wrong arguments are refused before memory is touched, naming the argument and its value."""

import math

import numpy as np
import pytest

import spipe._native as native


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("count", 0, "count is 0"),
        ("count", -3, "count is -3"),
        ("count", 2**62, "count is 4611686018427387904"),
        ("weight_decay", -0.1, "weight_decay is -0.1"),
        ("weight_decay", math.nan, "weight_decay is nan"),
        ("weight_decay", math.inf, "weight_decay is inf"),
        *[(name, 0, f"{name} is 0") for name in ("gradient", "master", "first_moment", "second_moment", "weight")],
        ("master", 0x1001, "master is 0x1001; it must be a multiple of 4"),
        ("second_moment", 0x1002, "second_moment is 0x1002; it must be a multiple of 4"),
        ("weight", 0x1001, "weight is 0x1001; it must be a multiple of 2"),
        ("gradient", 0x1002, "gradient is 0x1002; it must be a multiple of 4"),
        ("gradient2", 0x1002, "gradient2 is 0x1002"),
        ("weight", 2**64 - 8, "beyond the address space"),
    ],
)
def test_wrong_parameter(optimizer, make_buffers, name, value, message):
    good, bad = make_buffers(10), make_buffers(10)
    with pytest.raises(ValueError, match=f"parameter 1: .*{message}|parameter 1: {name}.*{message}"):
        optimizer.add_bucket([good.parameter(), bad.parameter(**{name: value})])
    assert optimizer.num_buckets == 0


def test_unknown_dtype(make_buffers):
    for name in ("gradient_dtype", "weight_dtype"):
        with pytest.raises(ValueError, match=f"{name} is 'fp8'; it must be 'fp32', 'bf16' or 'fp16'"):
            make_buffers(3).parameter(**{name: "fp8"})


@pytest.mark.parametrize("name", ["gradient", "first_moment", "second_moment", "gradient2"])
def test_overlapping_buffers(optimizer, make_buffers, name):
    buffers = make_buffers(10)
    with pytest.raises(ValueError, match="overlaps"):
        optimizer.add_bucket([buffers.parameter(**{name: buffers.master.ctypes.data + 36})])
    with pytest.raises(ValueError, match=r"parameter 0.*overlaps|overlaps.*parameter 0"):
        optimizer.add_bucket([buffers.parameter(), make_buffers(10).parameter(weight=buffers.weight.ctypes.data)])


def test_adjacent_buffers_do_not_overlap(optimizer, make_buffers):
    whole = make_buffers(40)
    halves = [
        whole.parameter(
            count=20,
            **{name: getattr(whole, name)[begin:].ctypes.data for name in ("gradient", *whole.names)},
        )
        for begin in (0, 20)
    ]
    optimizer.add_bucket(halves)


def test_empty_bucket(optimizer):
    with pytest.raises(ValueError, match="parameters is empty"):
        optimizer.add_bucket([])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", 0),
        ("step", -1),
        ("learning_rate", -1e-3),
        ("learning_rate", math.nan),
        ("learning_rate", math.inf),
        ("gradient_scale", math.nan),
        ("gradient_scale", math.inf),
    ],
)
def test_wrong_step(optimizer, make_buffers, name, value):
    buffers = make_buffers(10)
    before = buffers.state_bytes()
    bucket = optimizer.add_bucket([buffers.parameter()])
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        optimizer.submit(bucket, **({"step": 1, "learning_rate": 1e-3} | {name: value}))
    assert optimizer.state(bucket) == "idle"
    assert buffers.state_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"learning_rate": 1e-3}, TypeError, "misses the keyword argument 'step'"),
        ({"step": 1}, TypeError, "misses the keyword argument 'learning_rate'"),
        ({"step": 1, "learning_rate": 1e-3, "rate": 2}, TypeError, "unexpected keyword argument 'rate'"),
        ({"step": 1.5, "learning_rate": 1e-3}, TypeError, "float"),
        ({"step": "1", "learning_rate": 1e-3}, TypeError, "str"),
        ({"step": 2**70, "learning_rate": 1e-3}, OverflowError, "too"),
        ({"step": 1, "learning_rate": None}, TypeError, "NoneType"),
        ({"step": 1, "learning_rate": 1e-3, "gradient_scale": "1"}, TypeError, "str"),
        ({"step": 1, "learning_rate": 1e-3, "event": -1}, OverflowError, "negative"),
    ],
)
def test_wrong_arguments_of_submit(optimizer, make_buffers, arguments, error, message):
    bucket = optimizer.add_bucket([make_buffers(10).parameter()])
    with pytest.raises(error, match=message):
        optimizer.submit(bucket, **arguments)
    for positional in ((), (bucket, 1)):
        with pytest.raises(TypeError, match=f"{len(positional)} positional given"):
            optimizer.submit(*positional, step=1, learning_rate=1e-3)
    with pytest.raises(IndexError, match=f"bucket {2**40 + bucket} is unknown"):
        optimizer.submit(2**40 + bucket, step=1, learning_rate=1e-3)
    with pytest.raises(TypeError, match="Optimizer"):
        native.Optimizer.submit(3, bucket, step=1, learning_rate=1e-3)
    assert optimizer.state(bucket) == "idle"
    optimizer.submit(np.int64(bucket), step=np.int64(1), learning_rate=np.float32(1e-3), statistics=np.True_)
    assert len(optimizer.join(bucket).sums_of_squares) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beta1", 1.0),
        ("beta1", -0.1),
        ("beta2", math.nan),
        ("beta2", 1.5),
        ("epsilon", 0.0),
        ("epsilon", -1e-8),
        ("epsilon", math.nan),
        ("epsilon", math.inf),
    ],
)
def test_wrong_hyperparameter(pool, name, value):
    with pytest.raises(ValueError, match=f"{name} is "):
        native.Optimizer(pool, **({"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8} | {name: value}))


@pytest.mark.parametrize("num_threads", [-1, 5000])
def test_wrong_number_of_threads(num_threads):
    with pytest.raises(ValueError, match=f"num_threads is {num_threads}"):
        native.WorkerPool(num_threads)


def test_wrong_instruction_set():
    with pytest.raises(ValueError, match="name is 'mmx'; this machine has: baseline"):
        native.set_instruction_set("mmx")


def test_wrong_copy(make_buffers):
    address = make_buffers(10).master.ctypes.data
    for arguments, message in [
        ((0, address, 4), "destination is 0"),
        ((address, 0, 4), "source is 0"),
        ((address, address, -4), "num_bytes is -4"),
    ]:
        with pytest.raises(ValueError, match=message):
            native.copy(*arguments)
    native.copy(0, 0, 0)
