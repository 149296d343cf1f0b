"""Full garbage collections that leave long-lived objects out."""

from __future__ import annotations

import gc
import weakref

import pytest

from tieringd.daemon.garbage_collection import EVERYTHING_EVERY_SECONDS, long_lived_objects_spared


class Clock:
    """Each reading takes *step* seconds, so a collection lasts as long."""

    def __init__(self) -> None:
        self.now, self.step = 0.0, 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


class Node:
    """A cycle of one object."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def fresh_process():
    """Begin as a process that excluded nothing, and exclude again what the tests have loaded."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.fixture
def clock():
    clock = Clock()
    with long_lived_objects_spared(clock):
        yield clock


def test_objects_of_the_start_are_left_out_of_collections():
    """Meanwhile a full collection looks only at what came later; afterwards at everything again."""
    before = [[] for _ in range(1000)]
    with long_lived_objects_spared():
        assert gc.get_freeze_count() >= len(before)
        known = len(gc.get_objects())
        later = [[] for _ in range(1000)]
        assert known < len(gc.get_objects()) <= known + 2 * len(later)
    assert gc.get_freeze_count() == 0
    assert not [one for one in gc.callbacks if type(one).__name__ == "_Spared"]


def test_what_the_caller_excluded_stays_excluded():
    """A process that excluded its own objects, as the one of these tests, does not get them back."""
    gc.freeze()
    excluded = gc.get_freeze_count()
    with long_lived_objects_spared():
        pass
    assert gc.get_freeze_count() >= excluded / 2


def test_survivors_of_a_long_collection_are_left_out_of_the_next(clock):
    """A short collection leaves them: walking over them costs little."""
    frozen = gc.get_freeze_count()
    kept = [[] for _ in range(1000)]
    gc.collect()
    assert gc.get_freeze_count() <= frozen + len(kept) / 2
    clock.step = 1.0
    gc.collect(1)
    assert gc.get_freeze_count() <= frozen + len(kept) / 2
    gc.collect()
    assert gc.get_freeze_count() >= frozen + len(kept)


def test_cycles_made_later_are_still_collected(clock):
    """Only what a full collection found reachable is spared."""
    clock.step = 1.0
    gc.collect()
    gone = weakref.ref(Node())
    gc.collect()
    assert gone() is None


def test_spared_cycle_that_nothing_reaches_any_more_is_collected_in_the_end(clock):
    """A spared cycle stays until the next full collection."""
    node = Node()
    clock.step = 1.0
    gc.collect()
    gone = weakref.ref(node)
    del node
    gc.collect()
    assert gone() is not None
    clock.now += EVERYTHING_EVERY_SECONDS
    gc.collect()
    assert gone() is None
