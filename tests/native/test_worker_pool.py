"""The pool follows the real cores, returns at once, keeps order, and ends with its process."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest

import spipe._native as native

USABLE = "import spipe._native as n; print(n.WorkerPool().num_threads, n.features()['affinity_cores'])"
MAKE_BUCKET = """
import os, sys, numpy as np, spipe._native as native
count = 4_000_000
buffers = {name: np.full(count, 1e-3, np.float32)
           for name in ("gradient", "master", "first_moment", "second_moment", "weight")}
optimizer = native.Optimizer(native.WorkerPool(2), 0.9, 0.95, 1e-8)
bucket = optimizer.add_bucket([native.Parameter(gradient_dtype="fp32", weight_dtype="fp32", count=count,
                                                **{k: v.ctypes.data for k, v in buffers.items()})])
optimizer.submit(bucket, step=1, learning_rate=1e-3)
"""


def run_python(code: str, **environment: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env={**os.environ, **environment}, check=True, timeout=60, capture_output=True, text=True
    )
    return done.stdout


def test_threads_follow_the_scheduling_mask_and_not_the_environment():
    everywhere = len(os.sched_getaffinity(0))
    quota = native.features()["cgroup_cores"] or everywhere
    expected = f"{min(everywhere, quota)} {everywhere}"
    assert run_python(USABLE, OMP_NUM_THREADS="1").strip() == expected
    core = min(os.sched_getaffinity(0))
    pinned = f"import os; os.sched_setaffinity(0, {{{core}}}); " + USABLE
    assert run_python(pinned, OMP_NUM_THREADS="64").strip() == "1 1"


def test_features():
    features = native.features()
    assert features["available_instruction_sets"][0] == "baseline"
    assert features["instruction_set"] == features["available_instruction_sets"][-1]
    assert 1 <= features["usable_cores"] <= features["affinity_cores"] == len(os.sched_getaffinity(0))


def test_cpu_seconds_grow_with_work(make_buffers):
    pool = native.WorkerPool(2)
    optimizer = native.Optimizer(pool, 0.9, 0.95, 1e-8)
    buffers = make_buffers(2_000_000)
    bucket = optimizer.add_bucket([buffers.parameter()])
    before = pool.cpu_seconds()
    start = time.perf_counter()
    optimizer.submit(bucket, step=1, learning_rate=1e-3)
    result = optimizer.join(bucket)
    elapsed = time.perf_counter() - start
    assert 0 < result.seconds <= elapsed
    assert 0 < result.cpu_seconds <= pool.cpu_seconds() - before
    assert result.cpu_seconds <= 2 * result.seconds * 1.05


def test_submit_returns_before_the_work_is_done(make_buffers):
    optimizer = native.Optimizer(native.WorkerPool(1), 0.9, 0.95, 1e-8)
    buffers = make_buffers(2_000_000)
    bucket = optimizer.add_bucket([buffers.parameter()])
    ratios = []
    for t in range(1, 6):
        start = time.perf_counter()
        optimizer.submit(bucket, step=t, learning_rate=1e-3)
        submitted = time.perf_counter()
        optimizer.join(bucket)
        ratios.append((submitted - start) / (time.perf_counter() - start))
    assert min(ratios) < 0.2


def test_buckets_are_done_in_the_order_of_submission(make_buffers):
    optimizer = native.Optimizer(native.WorkerPool(1), 0.9, 0.95, 1e-8)
    first, second = make_buffers(3_000_000), make_buffers(1000)
    buckets = [optimizer.add_bucket([buffers.parameter()]) for buffers in (first, second)]
    expected = first.clone()
    expected.reference_step(step=1, learning_rate=1e-3)
    for bucket in buckets:
        optimizer.submit(bucket, step=1, learning_rate=1e-3)
    optimizer.join(buckets[1])
    assert first.state_bytes() == expected.state_bytes()
    optimizer.join(buckets[0])


def test_one_pool_serves_several_optimizers_and_outlives_its_name(make_buffers):
    pool = native.WorkerPool(2)
    optimizers = [native.Optimizer(pool, beta1, 0.95, 1e-8) for beta1 in (0.9, 0.0)]
    del pool
    group = [make_buffers(50_000) for _ in optimizers]
    for optimizer, buffers in zip(optimizers, group, strict=True):
        optimizer.submit(optimizer.add_bucket([buffers.parameter()]), step=1, learning_rate=1e-3)
    for optimizer in optimizers:
        optimizer.join(0)
    assert (group[0].master != group[1].master).any()


def test_deleting_an_optimizer_waits_for_its_work(make_buffers):
    pool = native.WorkerPool(1)
    optimizer = native.Optimizer(pool, 0.9, 0.95, 1e-8)
    buffers = make_buffers(1_000_000)
    expected = buffers.clone()
    optimizer.submit(optimizer.add_bucket([buffers.parameter()]), step=1, learning_rate=1e-3)
    del optimizer
    expected.reference_step(step=1, learning_rate=1e-3)
    assert buffers.state_bytes() == expected.state_bytes()


def test_process_ends_cleanly_with_work_in_flight():
    run_python(MAKE_BUCKET)
    run_python(MAKE_BUCKET + "sys.exit(0)")
    run_python(MAKE_BUCKET + "os._exit(0)")


def test_forked_process_is_told_instead_of_hanging():
    code = """
child = os.fork()
if child == 0:
    try:
        optimizer.join(bucket)
    except RuntimeError as error:
        del optimizer
        os._exit(0 if "spawn processes instead of forking" in str(error) else 2)
    os._exit(1)
assert os.waitpid(child, 0)[1] == 0
optimizer.join(bucket)
"""
    run_python(MAKE_BUCKET + code)


def test_join_releases_the_interpreter(make_buffers):
    """A Python thread makes progress while another waits for a long step."""
    import threading

    optimizer = native.Optimizer(native.WorkerPool(1), 0.9, 0.95, 1e-8)
    buffers = make_buffers(8_000_000)
    bucket = optimizer.add_bucket([buffers.parameter()])
    optimizer.submit(bucket, step=1, learning_rate=1e-3)
    thread = threading.Thread(target=optimizer.join, args=(bucket,))
    thread.start()
    rounds = 0
    while thread.is_alive():
        rounds += 1
    assert rounds > 10


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 1_000_003])
def test_copy(num_bytes):
    source = np.random.default_rng(0).integers(0, 256, num_bytes + 8, dtype=np.uint8)
    destination = np.zeros_like(source)
    native.copy(destination.ctypes.data, source.ctypes.data, num_bytes)
    assert (destination[:num_bytes] == source[:num_bytes]).all()
    assert (destination[num_bytes:] == 0).all()


def test_lists_of_cores():
    assert native._core_list("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert native._core_list("\n") == []
    for text in ("a", "3-1", "1,,2", "1;2", "-1", "1-"):
        with pytest.raises(ValueError, match="is not a list of cores"):
            native._core_list(text)


def worker_masks() -> list[str]:
    """Cores that each worker thread of this process may run on."""
    masks = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/status") as file:
            fields = {name: value.strip() for name, _, value in (line.partition(":") for line in file)}
        if fields["Name"] == "spipe-adam":
            masks.append(fields["Cpus_allowed_list"])
    return sorted(masks)


def test_workers_stay_in_their_domain_and_share_all_the_work(make_buffers):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two cores")
    before = worker_masks()
    pool = native.WorkerPool(3, _domains=[str(cores[0]), f"{cores[1]}"])
    assert pool.num_domains == 2
    optimizer = native.Optimizer(pool, 0.9, 0.95, 1e-8, rollback="delta")
    group = [make_buffers(count, seed=count) for count in (1, 300_000, 5000)]
    expected = [buffers.clone() for buffers in group]
    bucket = optimizer.add_bucket([buffers.parameter() for buffers in group])
    for t in (1, 2, 3):
        optimizer.submit(bucket, step=t, learning_rate=1e-3, speculative=True)
        optimizer.join(bucket)
        optimizer.rollback(bucket)
        optimizer.submit(bucket, step=t, learning_rate=1e-3)
        optimizer.join(bucket)
        for twin in expected:
            twin.reference_step(step=t, learning_rate=1e-3)
    assert [buffers.state_bytes() for buffers in group] == [twin.state_bytes() for twin in expected]
    masks = worker_masks()
    for mask in before:
        masks.remove(mask)
    assert masks == sorted([str(cores[0]), str(cores[0]), str(cores[1])])


def test_pool_of_one_domain_is_not_pinned():
    everywhere = os.sched_getaffinity(0)
    pool = native.WorkerPool(1, _domains=["0"])
    pool.first_touch(np.zeros(1).ctypes.data, 0)
    assert {tuple(native._core_list(mask)) for mask in worker_masks()} >= {tuple(sorted(everywhere))}


def test_first_touch_keeps_the_content():
    memory = np.random.default_rng(0).integers(0, 256, 5_000_001, dtype=np.uint8)
    before = memory.copy()
    pool = native.WorkerPool(2, _domains=["0", "1"] if len(os.sched_getaffinity(0)) > 1 else None)
    pool.first_touch(memory.ctypes.data, memory.size)
    pool.first_touch(memory.ctypes.data, 0)
    assert (memory == before).all()
    for arguments, message in [((0, 4), "address is 0"), ((memory.ctypes.data, -1), "num_bytes is -1")]:
        with pytest.raises(ValueError, match=message):
            pool.first_touch(*arguments)
