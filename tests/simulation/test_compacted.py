"""Seeded histories of a compacted topic, read by key, with every promise checked throughout."""

# Long: dozens of whole histories of a cluster.

from __future__ import annotations

import pytest

from tests.fakes.virtual_loop import run_virtual
from tests.simulation.compacted import Compacted
from tests.simulation.seeds import CHUNKS, run_history, seeds_of


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_key_reads_as_it_was_written(tmp_path, chunk, quiet):
    """The latest values are there, and no deleted key is, whatever cleaners drop and daemons upload again."""
    for seed in seeds_of(chunk, usual=20, share=0.05):
        history = Compacted(seed, tmp_path / str(seed))
        run_history(history, seed, quiet, name=f"seed {seed}")
        assert history.promises.views > 5


def test_histories_have_what_they_are_about(tmp_path, quiet):
    """Cleaners drop tombstones for their age; daemons copy cleaned files, and keep tombstones of others."""
    histories = [Compacted(seed, tmp_path / str(seed)) for seed in (3, 15)]
    for history in histories:
        run_virtual(history.run(), seed=5)
    logs = [replica for history in histories for replica in history.partitions[0].replicas]
    assert sum(one.dropped_tombstones for one in logs) > 2
    events = [each["event"] for each in quiet]
    assert "archived segments replaced by compacted ones" in events
    assert "a cleaner has dropped tombstones or markers that the archive needs; they stay" in events
