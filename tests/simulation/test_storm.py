"""Seeded histories of a cluster in rougher weather, with every promise checked throughout."""

# Long: dozens of whole histories of a cluster.

from __future__ import annotations

import pytest

from tests.fakes.virtual_loop import run_virtual
from tests.simulation.seeds import CHUNKS, run_history, seeds_of
from tests.simulation.storm import Storm


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_promises_hold_in_every_storm(tmp_path, chunk, quiet):
    """Each acknowledged record is read once in the end, whatever comes together. A scrub finds nothing."""
    for seed in seeds_of(chunk, usual=45, share=0.2):
        storm = Storm(seed, tmp_path / str(seed))
        run_history(storm, seed, quiet, name=f"storm {seed}")


def test_storm_of_a_seed_is_the_same_each_time(tmp_path):
    """A seed that failed once fails again: every request comes in the same order."""
    histories = []
    for name in ("first", "again"):
        storm = Storm(1, tmp_path / name)
        run_virtual(storm.run(), seed=1)
        # The names of trials of the store are random.
        histories.append([each for each in storm.store.requests if not each[1].startswith("tieringd-probe/")])

    assert histories[0] == histories[1]
    assert len(histories[0]) > 50
