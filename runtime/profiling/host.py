"""The host: memory bandwidth, the optimizer by number of threads, copies by one core."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from spipe import _native
from spipe.profile import Sample
from spipe.runtime.adam import parameter_of
from spipe.runtime.profiling.repeat import repeat
from spipe.runtime.region import DTYPES, private_memory
from spipe.runtime.system import available_host_memory

BYTES_PER_PARAMETER = 28
MIB = 1 << 20
_MOST_PARAMETERS = 1 << 26


def cores() -> int:
    return int(_native.features()["usable_cores"])


def optimizer_threads(device: str) -> int:
    """Threads of all ranks' optimizers in a run with a rank on every device: all cores, less those that launch."""
    from spipe.runtime.rank import default_optimizer_threads

    if device == "cpu":
        return cores()
    devices = min(torch.cuda.device_count(), cores())
    return devices * default_optimizer_threads(device, devices)


def thread_counts(most: int) -> list[int]:
    """1, 2, 4 .. and the most."""
    powers = [1 << k for k in range(16) if 1 << k < most]
    return [*powers, most]


def num_parameters() -> int:
    """Far beyond the caches, and a small part of the memory that is free."""
    room = available_host_memory() // (8 * BYTES_PER_PARAMETER * 2)
    return max(1 << 16, min(_MOST_PARAMETERS, (1 << 22) * cores(), room) // 64 * 64)


def triad(effort: float) -> list[Sample]:
    """STREAM triad in fp32, 12 bytes an element, with all cores; the better of two kinds of stores."""
    count, pool = num_parameters(), _native.WorkerPool(cores())
    columns = [private_memory(count).fill_(1.0) for _ in range(3)]
    first, second, third = (column.data_ptr() for column in columns)
    names = {"gradient": first, "master": first, "weight": first}

    def run(name: str) -> Callable[[], object]:
        return lambda: _native._run_streams(
            pool, name, **names, first_moment=first, second_moment=second, destination=third, count=count
        )

    run("triad")()
    begin, used = time.perf_counter(), pool.cpu_seconds()
    both = [repeat(run(name), 0.3 * effort) for name in ("triad", "triad_nt")]
    share = (pool.cpu_seconds() - used) / ((time.perf_counter() - begin) * pool.num_threads)
    best = min(both, key=lambda seconds: sorted(seconds)[len(seconds) // 2])
    return [Sample("triad", {"threads": cores(), "bytes": 12 * count, "processor_share": min(share, 1.0)}, best)]


def adam(dtype: str, most: int, effort: float) -> list[Sample]:
    """Steps as a run takes them, with an undo log, by number of threads: 1, 2, 4 .. ``most``; and without the log."""
    count, found = num_parameters(), []
    for threads in thread_counts(most):
        with optimizer(count, threads, dtype) as step:
            seconds = repeat(step, 0.4 * effort)
        found.append(Sample("adam", {"threads": threads, "parameters": count, "dtype": dtype}, seconds))
    with optimizer(count, most, dtype, undo=False) as step:
        seconds = repeat(step, 0.4 * effort)
    found.append(Sample("adam", {"threads": most, "parameters": count, "dtype": dtype, "undo": False}, seconds))
    small = 4096
    with optimizer(small, most, dtype) as step:
        seconds = repeat(step, 0.1 * effort)
    return [*found, Sample("adam", {"threads": most, "parameters": small, "dtype": dtype}, seconds)]


@contextmanager
def optimizer(count: int, threads: int, dtype: str, undo: bool = True) -> Iterator[Callable[[], None]]:
    """A function that takes and settles one step of ``count`` parameters."""
    half = DTYPES[dtype]
    master, first, second = (private_memory(count) for _ in range(3))
    second.fill_(1e-6)
    weight, gradient = torch.zeros(count, dtype=half), torch.full((count,), 1e-3, dtype=half)
    native = _native.Optimizer(_native.WorkerPool(threads), 0.9, 0.95, 1e-8, rollback="delta")
    bucket = native.add_bucket([parameter_of(gradient, master, first, second, weight)])
    steps = 10

    def step() -> None:
        nonlocal steps
        steps += 1
        native.submit(bucket, step=steps, learning_rate=1e-5, speculative=undo, statistics=undo)
        native.join(bucket)
        if undo:
            native.commit(bucket)

    yield step


def memory_copies(effort: float) -> list[Sample]:
    """Copies by one core between two places of the same memory, as device ``cpu`` makes them."""
    found = []
    for size in (64 << 10, MIB, 16 * MIB):
        source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
        work = partial(_native.copy, target.data_ptr(), source.data_ptr(), size)
        about = {"direction": "h2d", "bytes": size, "memory": "pageable", "devices": 1}
        found.append(Sample("copy", about, repeat(work, 0.2 * effort)))
    return found
