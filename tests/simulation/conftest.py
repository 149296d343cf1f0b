"""What every simulation needs."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs


@pytest.fixture(autouse=True)
def quiet():
    """Keep the daemons' logs from the output: thousands of failures are expected here."""
    with capture_logs() as logs:
        yield logs
