"""Counters between GPUs, without one: an aborted run lets go all that waits, however often and from how many sides."""

import ctypes
from itertools import permutations

import pytest

from spipe.runtime import peer_memory
from spipe.runtime.peer_memory import Counter


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_memory, "_call", lambda name, *arguments: None)


def passes(word: ctypes.c_uint32, value: int) -> bool:
    """Whether a stream that waits for ``value`` goes on: the driver compares with wrap-around."""
    return ctypes.c_int32(word.value - value & 0xFFFFFFFF).value >= 0


@pytest.mark.parametrize("reached", [0, 7, 2**31 - 3, 2**32 - 2, 2**33 + 5])
def test_a_released_counter_lets_go_everything_and_stays_so(reached: int) -> None:
    word = ctypes.c_uint32(reached & 0xFFFFFFFF)
    sender, receiver = (Counter(ctypes.addressof(word)) for _ in range(2))
    sender.write(reached + 1, 0)
    for ahead in (1, 2, 3):
        receiver.wait(reached + ahead, 0)
    waited = range(reached, reached + 300)
    assert passes(word, reached)
    assert not passes(word, reached + 1)
    for order in permutations((sender, receiver, receiver, sender)):
        for counter in order:
            counter.release()
            assert all(passes(word, value) for value in waited)
    word.value = (reached + 1) & 0xFFFFFFFF  # a write that was queued
    assert not passes(word, reached + 2)
    receiver.release()
    assert all(passes(word, value) for value in waited)
