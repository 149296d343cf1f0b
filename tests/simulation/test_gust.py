"""Seeded histories of one directed sequence each, with every promise checked throughout."""

# Long: dozens of whole histories of a cluster.

from __future__ import annotations

import pytest

from tests.simulation.gust import GUSTS, Gust
from tests.simulation.seeds import CHUNKS, run_history, seeds_of


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_promises_hold_in_every_gust(tmp_path, chunk, quiet):
    """Each acknowledged record is read once in the end, whatever meets in one moment."""
    for seed in seeds_of(chunk, usual=2 * len(GUSTS), share=0.1):
        gust = Gust(seed, tmp_path / str(seed))
        run_history(gust, seed, quiet, name=f"gust {seed} ({gust.theme.name})")
