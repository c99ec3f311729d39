"""Flags wake waiters of other threads and processes, lose no wake-up, and end at once on abort."""

import mmap
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import spipe._native as native

CHILD_START = """
import ctypes, mmap, os, sys, numpy as np, spipe._native as native
parent, descriptor, count = map(int, sys.argv[1:4])
region = mmap.mmap(os.open(f"/proc/{parent}/fd/{descriptor}", os.O_RDWR), count * native.Flags.BYTES_PER_FLAG)
flags = native.Flags(ctypes.addressof(ctypes.c_char.from_buffer(region)), count)
"""


@pytest.fixture
def memory():
    return np.zeros(16, np.int64)


TIMERS: list[threading.Timer] = []


@pytest.fixture
def flags(memory):
    yield native.Flags(memory.ctypes.data, memory.size)
    while TIMERS:  # a thread may still look through the flags when the wait it ended has returned
        TIMERS.pop().join()


def later(action, delay_s=0.05):
    timer = threading.Timer(delay_s, action)
    TIMERS.append(timer)
    timer.start()
    return timer


def test_flag_that_is_set_does_not_wait(flags):
    flags.set(3, 7)
    assert flags.get(3) == 7
    assert all(flags.wait(3, value, 0.0) for value in (0, 1, 7))
    assert not flags.wait(3, 8, 0.0)
    assert flags.wait_many([3, 0], [7, 0], 0.0)
    flags.clear()
    assert flags.get(3) == 0
    assert len(flags) == 16


def test_timeout(flags):
    start = time.perf_counter()
    assert not flags.wait(0, 1, 0.12)
    assert 0.1 <= time.perf_counter() - start < 5


def test_wait_is_woken_by_another_thread(flags):
    later(lambda: flags.set(2, 5))
    start = time.perf_counter()
    assert flags.wait(2, 5, 30.0)
    assert time.perf_counter() - start < 5


def test_wait_for_a_higher_value_sleeps_through_lower_ones(flags):
    later(lambda: flags.set(2, 1), 0.02)
    later(lambda: flags.set(2, 2), 0.08)
    assert flags.wait(2, 2, 30.0)
    assert flags.get(2) == 2


def test_wait_many_needs_all(flags):
    later(lambda: flags.set(1, 3), 0.02)
    assert not flags.wait_many(np.array([1, 2]), np.array([3, 4]), 0.1)
    later(lambda: flags.set(2, 4), 0.02)
    assert flags.wait_many((1, 2), (3, 4), 30.0)
    assert flags.wait_many([], [], 0.0)


@pytest.mark.parametrize("how", ["abort", "set"])
def test_abort_ends_a_wait_promptly(flags, how):
    action = (lambda: flags.abort(15)) if how == "abort" else (lambda: flags.set(15, 1))
    later(action, 0.1)
    start = time.perf_counter()
    with pytest.raises(native.AbortedError, match="flag 15"):
        flags.wait(0, 1, 30.0, abort_index=15)
    assert time.perf_counter() - start < 3
    with pytest.raises(native.AbortedError):
        flags.wait_many([0], [0], 30.0, abort_index=15)
    assert isinstance(native.AbortedError(), RuntimeError)


def test_nobody_misses_a_wake_up(flags):
    """Two threads hand a counter back and forth; a lost wake-up would cost 50 ms each time."""
    rounds = 2000

    def echo():
        for i in range(1, rounds + 1):
            assert flags.wait(0, i, 30.0)
            flags.set(1, i)

    thread = threading.Thread(target=echo)
    thread.start()
    start = time.perf_counter()
    for i in range(1, rounds + 1):
        flags.set(0, i)
        assert flags.wait(1, i, 30.0)
    thread.join()
    assert time.perf_counter() - start < rounds * 0.01


def test_wrong_arguments(flags, memory):
    flags.set(4, 4)
    for call, message in [
        (lambda: native.Flags(0, 1), "pointer is 0"),
        (lambda: native.Flags(memory.ctypes.data + 4, 1), "aligned to 8"),
        (lambda: native.Flags(memory.ctypes.data, 0), "count is 0"),
        (lambda: flags.set(4, 3), "value is 3, but flag 4 is already 4"),
        (lambda: flags.set(4, 2**32), "value is 4294967296"),
        (lambda: flags.wait(4, -1, 0.0), "value is -1"),
        (lambda: flags.wait(4, 1, -1.0), "timeout_s is -1"),
        (lambda: flags.wait(4, 1, float("nan")), "timeout_s is"),
        (lambda: flags.wait_many([1, 2], [1], 0.0), "indices has 2 entries and values has 1"),
        (lambda: flags.wait_many([[1]], [[1]], 0.0), "indices has 2 dimensions"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    for call in (lambda: flags.get(16), lambda: flags.set(-1, 1), lambda: flags.wait(99, 1, 0.0)):
        with pytest.raises(IndexError, match="does not exist; there are 16 flags"):
            call()


def test_flags_between_two_processes():
    count = 8
    descriptor = os.memfd_create("flags")
    os.ftruncate(descriptor, count * native.Flags.BYTES_PER_FLAG)
    region = mmap.mmap(descriptor, 0)
    view = np.frombuffer(region, np.uint8)
    flags = native.Flags(view.ctypes.data, count)
    echo = "[(flags.wait(0, i, 30.0), flags.set(1, i)) for i in range(1, 501)]"
    blocked = """
flags.set(3, 1)
try:
    flags.wait(2, 1, 30.0, abort_index=7)
except native.AbortedError:
    flags.set(4, 1)
"""
    arguments = [str(os.getpid()), str(descriptor), str(count)]
    children = [subprocess.Popen([sys.executable, "-c", CHILD_START + code, *arguments]) for code in (echo, blocked)]
    try:
        for i in range(1, 501):
            flags.set(0, i)
            assert flags.wait(1, i, 30.0)
        assert flags.wait(3, 1, 30.0)
        flags.abort(7)
        assert flags.wait_many([4], [1], 30.0)
        assert [child.wait(30) for child in children] == [0, 0]
    finally:
        for child in children:
            child.kill()
            child.wait()
        os.close(descriptor)


def test_waiter_that_was_killed_leaves_usable_flags(flags, memory):
    """Its entry in the number of waiters stays; later sets then make one needless system call, nothing more."""
    memory[5] = 1 << 32  # the upper half of a flag is the number of waiters
    flags.set(5, 1)
    assert flags.get(5) == 1
    assert flags.wait(5, 1, 0.0)


def test_interrupt_ends_a_wait_of_the_main_thread():
    code = """
import numpy as np, spipe._native as native
memory = np.zeros(2, np.int64)
flags = native.Flags(memory.ctypes.data, 2)
print("ready", flush=True)
try:
    flags.wait(0, 1, float("inf"))
except KeyboardInterrupt:
    print("interrupted")
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    output, _ = child.communicate(timeout=30)
    assert output == "interrupted\n"
    assert child.returncode == 0
