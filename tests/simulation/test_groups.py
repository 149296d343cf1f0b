"""Seeded histories of consumer groups over several endpoints: no acknowledged commit is lost or undone."""

from __future__ import annotations

import pytest

from tests.simulation.groups import Groups
from tests.simulation.seeds import CHUNKS, run_history, seeds_of


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_acknowledged_commit_is_lost_or_undone(chunk, quiet):
    """Endpoints die and do not reach the store, members die and move, and a consumer is no member."""
    for seed in seeds_of(chunk, usual=30, share=0.1):
        run_history(Groups(seed), seed, quiet, name=f"groups {seed}")
