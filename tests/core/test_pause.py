"""What the garbage collector is kept from, and what not."""

import gc
import weakref

import pytest

from spipe.pause import collector_paused, objects_spared


class Knot:
    """Two of them hold each other."""

    def __init__(self) -> None:
        self.other: Knot | None = None


def knot() -> weakref.ref[Knot]:
    one, other = Knot(), Knot()
    one.other, other.other = other, one
    return weakref.ref(one)


def test_objects_that_exist_are_left_alone_and_new_garbage_is_found() -> None:
    old = knot()
    with objects_spared():
        new = knot()
        gc.collect()
        assert new() is None
        assert old() is not None
    gc.collect()
    assert old() is None


def test_the_collector_is_as_before_after_an_error() -> None:
    for manager in (collector_paused, objects_spared):
        with pytest.raises(KeyError), manager():
            raise KeyError
        assert gc.isenabled()
        assert gc.get_freeze_count() == 0
