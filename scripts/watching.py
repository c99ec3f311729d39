"""Processes of a benchmark seen from outside: the memory that they take on host and GPUs, and their end."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SAMPLE_S, GRACE_S = 0.5, 5.0
GROWTH_BYTES = 16 << 20


@dataclass
class Seen:
    """The most of each that was seen while a system ran."""

    host_bytes: int = 0
    host_taken_bytes: int = 0
    gpu_bytes: int | None = None
    timed_out: bool = False


def watch(process: subprocess.Popen[Any], limit_s: float) -> Seen:
    """Sample the memory of a process and its descendants until it ends; end them all at the time limit.

    Adding up the pages of 100 GiB takes a tenth of a second, in which the process waits at its next page fault. So it
    is done only while the memory grows, which is before the steps that are timed.
    """
    seen, deadline = Seen(), time.monotonic() + limit_s
    available, gpu_before = available_memory(), gpu_memory()
    added_up: int | None = None
    try:
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(SAMPLE_S)
            taken = available - available_memory()
            seen.host_taken_bytes = max(seen.host_taken_bytes, taken)
            if added_up is None or taken > 1.01 * added_up + GROWTH_BYTES:
                added_up = taken
                seen.host_bytes = max(seen.host_bytes, sum(map(pss, descendants(process.pid))))
            used = [now - before for now, before in zip(gpu_memory(), gpu_before, strict=True)]
            seen.gpu_bytes = max([seen.gpu_bytes or 0, *used]) if used else None
            if time.monotonic() > deadline:
                seen.timed_out = True
                break
    finally:
        end(process)
    return seen


def descendants(root: int) -> list[int]:
    """The process and all below it."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def pss(pid: int) -> int:
    """Bytes of memory of a process; what several share counts in parts."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def available_memory() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def gpu_memory() -> list[int]:
    """Bytes in use on every GPU, whoever uses them; empty where that cannot be asked."""

    class Memory(ctypes.Structure):
        _fields_ = tuple((name, ctypes.c_ulonglong) for name in ("total", "free", "used"))

    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    count, result = ctypes.c_uint(), []
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return []
    for index in range(count.value):
        device, used = ctypes.c_void_p(), Memory()
        nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
        nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(used))
        result.append(used.used)
    nvml.nvmlShutdown()
    return result


def end(process: subprocess.Popen[Any]) -> None:
    """End what is left of a process and its descendants: interrupted (it may hold locks on files), then killed."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is not None:
            return
        for pid in descendants(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
