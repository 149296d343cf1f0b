"""Seeded histories of the newer group protocol: no partition has two readers, and in the end each has one."""

from __future__ import annotations

import pytest

from tests.simulation.newer_groups import NewerGroups
from tests.simulation.seeds import CHUNKS, run_history, seeds_of


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_each_partition_has_one_reader(chunk, quiet):
    """Members come and leave, an endpoint dies, and answers of the store are lost."""
    for seed in seeds_of(chunk, usual=30, share=0.1):
        run_history(NewerGroups(seed), seed, quiet, name=f"newer_groups {seed}")
