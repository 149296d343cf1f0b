"""Seeded histories of a cluster in rougher weather, with every promise checked throughout."""

# Long: dozens of whole histories of a cluster.

from __future__ import annotations

import pytest

from tests.fakes.virtual_loop import run_virtual
from tests.simulation.seeds import CHUNKS, replay, seeds_of
from tests.simulation.storm import Storm


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_promises_hold_in_every_storm(tmp_path, chunk, quiet):
    """Whatever comes together, each acknowledged record is read once in the end; a scrub finds nothing."""
    for seed in seeds_of(chunk, usual=45, share=0.2):
        storm = Storm(seed, tmp_path / str(seed))
        try:
            run_virtual(storm.run(), seed=seed)
        except BaseException:
            said = f"storm {seed} fails after {len(storm.events)} events"
            print(f"{said}; {replay(seed)} runs it alone")  # noqa: T201 - pytest shows it with the failure
            raise
        # The daemons meet only what they were built for.
        assert not [each for each in quiet if each["event"].startswith("archiver failed")], seed


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
