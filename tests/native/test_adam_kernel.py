"""One step of the native kernel has the bits of the plain twin, for every size, type, address and instruction set."""

import ctypes
import itertools
import mmap
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import spipe._native as native
from spipe.runtime import adam_reference

SIZES = [1, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 1023, 1024, 1025, 4097]
DTYPES = ["fp32", "bf16", "fp16"]
STEP = {"step": 3, "learning_rate": 1e-2, "gradient_scale": 0.5}


def step(optimizer, bucket, **options):
    optimizer.submit(bucket, **(STEP | options))
    return optimizer.join(bucket)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", SIZES)
def test_step_equals_plain_twin_in_every_bit(optimizer, make_buffers, instruction_set, count, dtype):
    for weight_dtype, tied in itertools.product(DTYPES, (False, True)):
        buffers = make_buffers(count, dtype, weight_dtype, seed=count, tied=tied)
        before, expected = buffers.clone(), buffers.clone()
        expected.reference_step(**STEP)
        result = step(optimizer, optimizer.add_bucket([buffers.parameter()]))
        assert (result.nonfinite, result.bypassed) == (False, 0)
        assert buffers.state_bytes() == expected.state_bytes()
        for name in ("master", "first_moment", "second_moment"):
            assert (getattr(buffers, name) != getattr(before, name)).all(), name


@pytest.mark.parametrize("misalignment", [1, 3, 7])
def test_buffers_need_no_more_alignment_than_their_elements(optimizer, make_buffers, instruction_set, misalignment):
    for dtype in DTYPES:
        buffers = make_buffers(4113, dtype, dtype, misalignment=misalignment)
        expected = buffers.clone()
        expected.reference_step(**STEP)
        step(optimizer, optimizer.add_bucket([buffers.parameter()]))
        assert buffers.state_bytes() == expected.state_bytes()


def test_nothing_outside_the_buffers_is_written(optimizer, make_buffers):
    whole = make_buffers(4200)
    before = whole.state_bytes()
    changes = {name: getattr(whole, name)[50:].ctypes.data for name in ("gradient", *whole.names)}
    step(optimizer, optimizer.add_bucket([whole.parameter(count=4099, **changes)]))
    for name, content in whole.state_bytes().items():
        item = getattr(whole, name).itemsize
        assert content[: 50 * item] == before[name][: 50 * item]
        assert content[4149 * item :] == before[name][4149 * item :]


def test_every_weight_follows_its_own_master(optimizer, make_buffers):
    kinds = [(1000, "fp32", "bf16"), (3, "bf16", "fp16"), (8200, "fp16", "bf16"), (1, "bf16", "fp32")]
    group = [make_buffers(count, g, w, seed=i) for i, (count, g, w) in enumerate(kinds)]
    for i, buffers in enumerate(group):
        buffers.weight_decay = 0.1 * i
    expected = [buffers.clone() for buffers in group]
    bucket = optimizer.add_bucket([buffers.parameter() for buffers in group])
    for t in range(1, 4):
        step(optimizer, bucket, step=t)
        for buffers, twin in zip(group, expected, strict=True):
            twin.reference_step(**(STEP | {"step": t}))
            assert buffers.state_bytes() == twin.state_bytes()
            rounded = np.empty_like(buffers.weight)
            adam_reference.round_into(rounded, buffers.master)
            assert buffers.weight.tobytes() == rounded.tobytes()


def test_many_tiny_parameters(optimizer, make_buffers):
    group = [make_buffers(1 + i % 5, seed=i) for i in range(300)]
    expected = [buffers.clone() for buffers in group]
    step(optimizer, optimizer.add_bucket([buffers.parameter() for buffers in group]))
    for buffers, twin in zip(group, expected, strict=True):
        twin.reference_step(**STEP)
        assert buffers.state_bytes() == twin.state_bytes()


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_number_of_threads_changes_no_bit(make_buffers, num_threads):
    threads = native.WorkerPool(num_threads)
    optimizer = native.Optimizer(threads, 0.9, 0.95, 1e-8)
    buffers = make_buffers(200_001)
    expected = buffers.clone()
    bucket = optimizer.add_bucket([buffers.parameter()])
    for t in range(1, 4):
        step(optimizer, bucket, step=t)
        expected.reference_step(**(STEP | {"step": t}))
    assert buffers.state_bytes() == expected.state_bytes()


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 9000),
    gradient_dtype=st.sampled_from(DTYPES),
    weight_dtype=st.sampled_from(DTYPES),
    t=st.integers(1, 10**6),
    learning_rate=st.floats(0, 10),
    scale=st.sampled_from([1.0, 2.0**-16, 1e-30, -3.0, 0.0]),
    seed=st.integers(0, 1000),
)
def test_any_step_equals_plain_twin(
    pool, make_buffers, count, gradient_dtype, weight_dtype, t, learning_rate, scale, seed
):
    optimizer = native.Optimizer(pool, 0.9, 0.95, 1e-8)
    buffers = make_buffers(count, gradient_dtype, weight_dtype, seed)
    expected = buffers.clone()
    options = {"step": t, "learning_rate": learning_rate, "gradient_scale": scale}
    step(optimizer, optimizer.add_bucket([buffers.parameter()]), **options)
    expected.reference_step(**options)
    assert buffers.state_bytes() == expected.state_bytes()


FLOATS = hnp.arrays(np.float32, 37, elements=st.floats(width=32, allow_nan=False))


@settings(max_examples=60, deadline=None)
@given(gradient=FLOATS, master=FLOATS, first=FLOATS, second=FLOATS, weight_dtype=st.sampled_from(DTYPES))
def test_extreme_values_equal_plain_twin(pool, make_buffers, gradient, master, first, second, weight_dtype):
    optimizer = native.Optimizer(pool, 0.9, 0.95, 1e-8)
    buffers = make_buffers(37, "fp32", weight_dtype)
    buffers.gradient[:], buffers.master[:], buffers.first_moment[:] = gradient, master, first
    buffers.second_moment[:] = np.abs(second)
    expected = buffers.clone()
    result = step(optimizer, optimizer.add_bucket([buffers.parameter()]))
    assert result.bypassed == expected.reference_step(**STEP)
    assert buffers.state_bytes() == expected.state_bytes()


def test_all_half_precision_gradients_are_read_exactly(optimizer, make_buffers, instruction_set):
    patterns = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    for dtype in ("bf16", "fp16"):
        bits = patterns if dtype == "bf16" else patterns.view(np.float16)
        finite = bits[np.isfinite(adam_reference.to_fp32(bits))]
        buffers = make_buffers(finite.size, dtype, "fp32")
        buffers.gradient[:] = finite
        buffers.first_moment[:] = 0
        fresh = native.Optimizer(native.WorkerPool(1), 0.0, 0.95, 1e-8)  # beta1 = 0: the first moment is the gradient
        step(fresh, fresh.add_bucket([buffers.parameter()]), gradient_scale=1.0)
        exact = adam_reference.to_fp32(finite)
        assert (buffers.first_moment == exact).all()
        if dtype == "fp16":
            assert (exact == finite.astype(np.float32)).all()


def test_weights_are_rounded_to_nearest_even(optimizer, make_buffers, instruction_set):
    """Masters at, just below and just above the middle between two neighbouring halves, denormals included."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    kept = rng.integers(0, 2**16, 40_000, dtype=np.uint32)
    low = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x3000], np.uint32)
    masters = ((kept << np.uint32(16)) | low[rng.integers(0, len(low), kept.size)]).view(np.float32)
    masters = np.concatenate([masters[np.isfinite(masters)], rng.standard_normal(9000).astype(np.float32) * 1e-6])
    for dtype, torch_dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        buffers = make_buffers(masters.size, "fp32", dtype)
        buffers.master[:] = masters
        step(optimizer, optimizer.add_bucket([buffers.parameter()]), learning_rate=0.0)
        assert buffers.master.tobytes() == masters.tobytes()
        expected = torch.from_numpy(masters.copy()).to(torch_dtype).view(torch.uint16).numpy()
        assert (buffers.weight.view(np.uint16) == expected).all()


def test_200_steps_follow_torch_adamw(optimizer, make_buffers):
    """Both get the same gradients: a trajectory that feeds back its own rounding errors would amplify them."""
    torch = pytest.importorskip("torch")
    buffers = make_buffers(5000, "fp32", "fp32", seed=5)
    buffers.first_moment[:] = 0
    buffers.second_moment[:] = 0
    theirs = torch.nn.Parameter(torch.from_numpy(buffers.master.copy()))
    reference = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    bucket = optimizer.add_bucket([buffers.parameter()])
    rng = np.random.default_rng(0)
    for t in range(1, 201):
        buffers.gradient[:] = rng.standard_normal(5000)
        theirs.grad = torch.from_numpy(buffers.gradient.copy())
        step(optimizer, bucket, step=t, gradient_scale=1.0)
        reference.step()
    torch.testing.assert_close(torch.from_numpy(buffers.master), theirs.detach(), rtol=0, atol=1e-5)


def test_loss_curve_of_a_small_model_follows_torch_adamw(optimizer, make_buffers):
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(20, 64, 8, generator=generator)
    labels = torch.sin(inputs.sum(-1, keepdim=True))
    shapes = [(8, 32), (32,), (32, 1)]

    def loss_of(first, bias, second, t):
        return ((torch.tanh(inputs[t % 20] @ first + bias) @ second - labels[t % 20]) ** 2).mean()

    group = [make_buffers(int(np.prod(shape)), "fp32", "fp32", seed=i) for i, shape in enumerate(shapes)]
    for buffers in group:
        buffers.first_moment[:] = 0
        buffers.second_moment[:] = 0
        buffers.master *= 0.3
        buffers.weight[:] = buffers.master
    mine = [torch.from_numpy(b.weight).view(shape) for b, shape in zip(group, shapes, strict=True)]
    theirs = [torch.nn.Parameter(weight.clone()) for weight in mine]
    reference = torch.optim.AdamW(theirs, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    bucket = optimizer.add_bucket([buffers.parameter() for buffers in group])
    losses = []
    for t in range(1, 201):
        leaves = [weight.clone().requires_grad_() for weight in mine]
        loss, reference_loss = loss_of(*leaves, t), loss_of(*theirs, t)
        for buffers, gradient in zip(group, torch.autograd.grad(loss, leaves), strict=True):
            buffers.gradient[:] = gradient.flatten().numpy()
        step(optimizer, bucket, step=t, learning_rate=3e-3, gradient_scale=1.0)
        reference.zero_grad()
        reference_loss.backward()
        reference.step()
        losses.append((loss.item(), reference_loss.item()))
    np.testing.assert_allclose(*np.transpose(losses), rtol=1e-4)
    assert losses[-1][0] < 0.8 * losses[0][0]


def test_twin_on_tensors_refuses_what_it_cannot_read():
    torch = pytest.importorskip("torch")
    dense = [torch.ones(4, 1000) for _ in range(5)]
    options = {"step": 1, "learning_rate": 0.1, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8}
    assert adam_reference.adamw_step_tensors(*dense, **options) == 0
    assert (dense[1] != 1).all()
    for bad in (torch.ones(4, device="meta"), torch.ones(4).to_sparse(), torch.ones(4, 4).t()):
        with pytest.raises(ValueError, match="dense contiguous CPU tensor"):
            adam_reference.adamw_step_tensors(bad, *dense[1:], **options)


def test_block_numbers_beyond_2_to_the_31():
    big = 3 * 2**31 + 5
    counts = [10, big, 7]
    blocks_of_big = -(-big // 4096)
    assert native._block_bounds(counts, 0) == (0, 0, 10, 0)
    assert native._block_bounds(counts, 1) == (1, 0, 4096, 10)
    assert native._block_bounds(counts, 1 + 2**19) == (1, 2**31, 4096, 10 + 2**31)
    assert native._block_bounds(counts, blocks_of_big) == (1, big - 5, 5, 10 + big - 5)
    assert native._block_bounds(counts, blocks_of_big + 1) == (2, 0, 7, 10 + big)
    with pytest.raises(IndexError):
        native._block_bounds(counts, blocks_of_big + 2)


@pytest.mark.slow
def test_more_than_2_to_the_31_elements(optimizer):
    """Untouched pages cost nothing: one 2 MiB piece of infinities, mapped everywhere, makes the kernel pass over all
    blocks but the first, a middle and the last one."""
    count, piece = 2**31 + 4096 * 256, 2 * 2**20
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    read_write, fixed, no_reserve = mmap.PROT_READ | mmap.PROT_WRITE, 0x10, 0x4000

    def reserve(num_bytes: int) -> int:
        address = libc.mmap(None, num_bytes, read_write, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve, -1, 0)
        if address == ctypes.c_void_p(-1).value:
            pytest.skip("this machine does not reserve that much address space")
        return address

    sizes = {"gradient": 2 * count, "master": 4 * count, "first_moment": 4 * count, "second_moment": 4 * count}
    sizes["weight"] = 2 * count
    at = {name: reserve(size) for name, size in sizes.items()}
    infinities = os.memfd_create("infinities")
    os.write(infinities, np.full(piece // 2, 0x7F80, np.uint16).tobytes())
    try:
        for begin in range(0, 2 * count, piece):
            libc.mmap(at["gradient"] + begin, piece, read_write, mmap.MAP_PRIVATE | fixed, infinities, 0)
        changed = [0, 2**30, 2**31 - 4096, 2**31, count - 4096]
        for first in changed:
            gradient = (ctypes.c_uint16 * 4096).from_address(at["gradient"] + 2 * first)
            np.frombuffer(gradient, np.uint16)[:] = 0x3F80
        bucket = optimizer.add_bucket(
            [native.Parameter(gradient_dtype="bf16", weight_dtype="bf16", count=count, weight_decay=0.0, **at)]
        )
        result = step(optimizer, bucket)
        assert result.bypassed == count // 4096 - len(changed)
        for first in changed:
            for name, kind in (("master", ctypes.c_float), ("weight", ctypes.c_uint16)):
                values = (kind * 4096).from_address(at[name] + ctypes.sizeof(kind) * first)
                assert all(values), (name, first)
        untouched = (ctypes.c_float * 4096).from_address(at["master"] + 4 * (2**31 + 4096))
        assert not any(untouched)
    finally:
        for name, size in sizes.items():
            libc.munmap(at[name], size)
        os.close(infinities)
