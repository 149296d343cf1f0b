"""Garbage collections that leave the start's objects out."""

from __future__ import annotations

import gc

from tieringd.daemon.app import startup_objects_spared


def test_objects_of_the_start_are_left_out_of_collections():
    """Meanwhile a full collection looks only at what came later; afterwards at everything again."""
    before = [[] for _ in range(1000)]
    with startup_objects_spared():
        assert gc.get_freeze_count() >= len(before)
        known = len(gc.get_objects())
        later = [[] for _ in range(1000)]
        assert known < len(gc.get_objects()) <= known + 2 * len(later)
    assert gc.get_freeze_count() == 0


def test_cycles_made_later_are_still_collected():
    """Only what was there before is spared."""
    with startup_objects_spared():
        cycle: list[object] = []
        cycle.append(cycle)
        del cycle
        assert gc.collect() > 0
