"""What the tests of the daemon's own parts share."""

from __future__ import annotations

import pytest

from tests.fakes.log_lines import listening


@pytest.fixture
def log():
    """Listen to the log for the time of a test."""
    with listening() as lines:
        yield lines
