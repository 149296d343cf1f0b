"""Two minutes of the swarm: the start of what `make swarm` runs for longer."""

# Long: three brokers, and a minute of faults of many kinds, then all is read and scrubbed.

from __future__ import annotations

import pytest

from tests.swarm.faults import KINDS
from tests.swarm.run import swarm

_SECONDS = 60
_SEED = 5


# Long: a minute of faults, each with a recovery, between the start of a cluster and a check of everything.
@pytest.mark.timeout(600)
async def test_short_swarm_breaks_no_promise(tmp_path):
    """Some faults have their effect, each partition is archived on after each, and no promise is broken."""
    report = await swarm(tmp_path, seed=_SEED, seconds=_SECONDS, kinds=list(KINDS))
    history = "\n".join(report.history)
    assert report.broken == [], history
    assert len(report.proven) >= 4, history
    assert report.records > 500, history
