"""Repeat a piece of work and keep how long each repetition took."""

import time
from collections.abc import Callable
from math import ceil
from typing import Any

import torch

cuda: Any = torch.cuda
LEAST, MOST = 5, 60
"""Repetitions that are timed."""
_BRIEF_S = 2e-3  # what is shorter is timed several at a time


def repeat(
    work: Callable[[], object], budget_s: float, *, clock: Callable[[], float] = time.perf_counter, warm_s: float = 0.0
) -> tuple[float, ...]:
    """Seconds of ``work``, once or (if it is brief) on average of some in a row, for about ``budget_s`` seconds.

    Args:
        clock: what counts as time, such as ``time.thread_time``.
        warm_s: how long to work before anything is timed; once at least.
    """
    begin = time.perf_counter()
    work()
    while time.perf_counter() - begin < warm_s:
        work()
    begin = time.perf_counter()
    work()
    once_s = max(time.perf_counter() - begin, 1e-7)
    together = ceil(_BRIEF_S / once_s) if once_s < _BRIEF_S else 1
    times = []
    for _ in range(min(MOST, max(LEAST, int(budget_s / (once_s * together))))):
        start = clock()
        for _ in range(together):
            work()
        times.append((clock() - start) / together)
    return tuple(times)


def synchronized(work: Callable[[], object], repeats: int = 1) -> Callable[[], None]:
    """Work of every CUDA device, issued ``repeats`` times and then waited for."""

    def run() -> None:
        for _ in range(repeats):
            work()
        for index in range(cuda.device_count()):
            cuda.synchronize(index)

    return run
