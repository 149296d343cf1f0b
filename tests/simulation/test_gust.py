"""Seeded histories of one directed sequence each, with every promise checked throughout."""

# Long: dozens of whole histories of a cluster.

from __future__ import annotations

import pytest

from tests.fakes.virtual_loop import run_virtual
from tests.simulation.gust import GUSTS, Gust
from tests.simulation.seeds import CHUNKS, replay, seeds_of


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_promises_hold_in_every_gust(tmp_path, chunk, quiet):
    """Whatever meets in one moment, each acknowledged record is read once in the end."""
    for seed in seeds_of(chunk, usual=2 * len(GUSTS), share=0.1):
        gust = Gust(seed, tmp_path / str(seed))
        try:
            run_virtual(gust.run(), seed=seed)
        except BaseException:
            said = f"gust {seed} ({gust.theme.name}) fails after {len(gust.events)} events"
            print(f"{said}; {replay(seed)} runs it alone")  # noqa: T201 - pytest shows it with the failure
            raise
        # The daemons meet only what they were built for.
        assert not [each for each in quiet if each["event"].startswith("archiver failed")], seed
