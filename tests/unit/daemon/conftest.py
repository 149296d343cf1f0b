"""What the tests of the daemon's own parts share."""

from __future__ import annotations

import pytest

from tests.fakes.fixtures import broker, metrics, store
from tests.fakes.log_lines import listening

__all__ = ["broker", "metrics", "store"]


@pytest.fixture
def log():
    """Listen to the log for the time of a test."""
    with listening() as lines:
        yield lines
