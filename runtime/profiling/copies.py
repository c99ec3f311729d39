"""Copies of CUDA devices: to and from the host by size, direction and number of GPUs, and between GPUs."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from spipe.profile import Sample
from spipe.runtime.profiling import host
from spipe.runtime.profiling.repeat import repeat, synchronized
from spipe.runtime.region import private_memory

cuda: Any = torch.cuda
MIB = host.MIB
SIZES = (64 << 10, MIB, 16 * MIB, 128 * MIB)
DIRECTIONS = ("h2d", "d2h", "both")
_COPIES = 4  # copies that are issued before any is waited for


def device_of(index: int) -> torch.device:
    return torch.device("cuda", index)


class _Ends:
    """Buffers of one size on the host and on one GPU, and a stream for each direction."""

    def __init__(self, index: int, num_bytes: int, page_locked: bool) -> None:
        self.device = device_of(index)
        self.host = {way: torch.ones(num_bytes, dtype=torch.uint8, pin_memory=page_locked) for way in ("h2d", "d2h")}
        self.gpu = {way: torch.ones(num_bytes, dtype=torch.uint8, device=self.device) for way in self.host}
        self.streams = {way: cuda.Stream(self.device) for way in self.host}
        cuda.synchronize(self.device)

    def copy(self, way: str) -> None:
        source, target = (self.host, self.gpu) if way == "h2d" else (self.gpu, self.host)
        with cuda.stream(self.streams[way]):
            target[way].copy_(source[way], non_blocking=True)


def host_copies(effort: float) -> list[Sample]:
    """By size and direction on one GPU, page-locked and pageable; the largest size on 2, 4 .. GPUs at once, too."""
    found = []
    count = cuda.device_count()
    numbers = sorted({1, count, *(n for n in (2, 4, 8) if n < count)})
    cases = [(size, True, 1) for size in SIZES] + [(size, False, 1) for size in SIZES[-2:]]
    cases += [(SIZES[-1], True, number) for number in numbers[1:]]
    for size, page_locked, number in cases:
        ends = [_Ends(index, size, page_locked) for index in range(number)]
        for direction in DIRECTIONS:
            found.append(_host_copy(ends, size, page_locked, direction, effort))
    return found


def _host_copy(ends: list[_Ends], size: int, page_locked: bool, direction: str, effort: float) -> Sample:
    ways = ("h2d", "d2h") if direction == "both" else (direction,)
    repeats = 1 if not page_locked else _COPIES

    def work() -> None:
        for end in ends:
            for way in ways:
                end.copy(way)

    times = repeat(synchronized(work, repeats), 0.15 * effort)
    memory = "page-locked" if page_locked else "pageable"
    about = {"direction": direction, "bytes": size, "memory": memory, "devices": len(ends)}
    return Sample("copy", about, tuple(seconds / repeats for seconds in times))


def peer_copies(effort: float) -> list[Sample]:
    """Between the first two GPUs and between the first and the last, by size."""
    count, found = cuda.device_count(), []
    for target in sorted({1, count - 1}) if count > 1 else ():
        for size in SIZES:
            a = torch.ones(size, dtype=torch.uint8, device=device_of(0))
            b = torch.ones(size, dtype=torch.uint8, device=device_of(target))
            times = repeat(synchronized(lambda a=a, b=b: b.copy_(a, non_blocking=True), _COPIES), 0.15 * effort)  # type: ignore[misc]  # a lambda with defaults
            about = {"bytes": size, "source": 0, "target": target}
            found.append(Sample("peer copy", about, tuple(seconds / _COPIES for seconds in times)))
    return found


def device_copy(effort: float) -> list[Sample]:
    """Inside the first GPU: every byte is read once and written once."""
    a = torch.ones(512 * MIB, dtype=torch.uint8, device=device_of(0))
    b = torch.empty_like(a)
    times = repeat(synchronized(lambda: b.copy_(a), 8), 0.3 * effort)
    return [Sample("device copy", {"bytes": a.numel()}, tuple(seconds / 8 for seconds in times))]


def page_lock(effort: float) -> list[Sample]:
    """Page-locking memory that has its pages. Raises RuntimeError if the driver refuses."""
    num_bytes, runtime = 512 * MIB, cuda.cudart()
    cuda.synchronize()  # a context, before the first call
    memory = private_memory(num_bytes // 4).fill_(1.0)
    times = []
    for _ in range(max(2, round(3 * effort))):
        begin = time.perf_counter()
        code = int(runtime.cudaHostRegister(memory.data_ptr(), num_bytes, 0))
        times.append(time.perf_counter() - begin)
        if code != 0:
            with suppress(RuntimeError):  # the failed call must not surface in a later one
                torch.zeros(1, device=device_of(0))
            raise RuntimeError(f"cudaHostRegister of {num_bytes >> 20} MiB gave CUDA error {code}")
        runtime.cudaHostUnregister(memory.data_ptr())
    return [Sample("page lock", {"bytes": num_bytes}, tuple(times))]


def adam_beside_copies(dtype: str, threads: int, effort: float) -> list[Sample]:
    """Optimizer steps while all GPUs copy in both directions, and how long those copies take then."""
    size, count = SIZES[-1], host.num_parameters()
    ends = [_Ends(index, size, True) for index in range(cuda.device_count())]
    stop, copied = threading.Event(), []

    def copy_on() -> None:
        work = synchronized(_all_ways(ends))
        while not stop.is_set():
            begin = time.perf_counter()
            work()
            copied.append(time.perf_counter() - begin)

    copying = threading.Thread(target=copy_on, daemon=True)
    with host.optimizer(count, threads, dtype) as step:
        step()
        copying.start()
        try:
            seconds = repeat(step, 0.8 * effort)
        finally:
            stop.set()
            copying.join()
    about = {"threads": threads, "parameters": count, "dtype": dtype, "beside_copies": True}
    beside = {"direction": "both", "bytes": size, "memory": "page-locked", "devices": len(ends), "beside_adam": True}
    return [Sample("adam", about, seconds), Sample("copy", beside, tuple(copied[1:-1] or copied))]


def _all_ways(ends: list[_Ends]) -> Callable[[], None]:
    def work() -> None:
        for end in ends:
            for way in end.host:
                end.copy(way)

    return work
