"""Seeded histories that concentrate on one kind of trouble each, with every promise checked throughout."""

# Long: dozens of whole histories of a cluster.

from __future__ import annotations

import pytest

from tests.fakes.virtual_loop import run_virtual
from tests.simulation.seeds import CHUNKS, run_history, seeds_of
from tests.simulation.squall import THEMES, Squall


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_promises_hold_in_every_squall(tmp_path, chunk, quiet):
    """Each acknowledged record is read once in the end, whatever comes again and again."""
    for seed in seeds_of(chunk, usual=2 * len(THEMES), share=0.25):
        squall = Squall(seed, tmp_path / str(seed))
        run_history(squall, seed, quiet, name=f"squall {seed} ({squall.theme.name})")


def test_squall_of_a_seed_is_the_same_each_time(tmp_path):
    """A seed that failed once fails again: every request comes in the same order."""
    histories = []
    for name in ("first", "again"):
        squall = Squall(3, tmp_path / name)
        run_virtual(squall.run(), seed=3)
        # The names of trials of the store are random.
        histories.append(
            [each for each in squall.store.requests if not each[1].startswith("tieringd-probe/")]
        )

    assert histories[0] == histories[1]
    assert len(histories[0]) > 50


def test_pin_outlives_a_scan_that_stood_still(tmp_path):
    """
    A daemon is stopped in the middle of a scan, while its archive is cut back and its broker leads again.

    It took the old scan for a fresh one, and released the pin of records that were nowhere else.
    """
    run_virtual(Squall(675, tmp_path / "675").run(), seed=675)
