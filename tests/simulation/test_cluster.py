"""Seeded histories of a cluster with a daemon beside each broker, with every promise checked throughout."""

# Long: dozens of whole histories of a cluster.

from __future__ import annotations

import pytest

from tests.fakes.virtual_loop import run_virtual
from tests.simulation.cluster import Cluster
from tests.simulation.seeds import CHUNKS, run_history, seeds_of


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_promises_hold_in_every_history_of_a_cluster(tmp_path, chunk, quiet):
    """Each acknowledged record is read once in the end, under any leader and any failure."""
    for seed in seeds_of(chunk, usual=40, share=0.2):
        root = tmp_path / str(seed)
        cluster = Cluster(seed, root)
        run_history(cluster, seed, quiet, name=f"seed {seed}")
        assert cluster.promises.checks > len(cluster.events)


@pytest.mark.parametrize("seed", [1, 2])
def test_cluster_history_of_a_seed_is_the_same_each_time(tmp_path, seed):
    """A seed that failed once fails again: every request comes in the same order."""
    histories = []
    for name in ("first", "again"):
        cluster = Cluster(seed, tmp_path / name)
        run_virtual(cluster.run(), seed=seed)
        histories.append(cluster.store.requests)

    assert histories[0] == histories[1]
    assert len(histories[0]) > 50
