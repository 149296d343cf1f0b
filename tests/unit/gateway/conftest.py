"""The broker behind the gateways of these tests."""

from __future__ import annotations

import pytest

from tests.fakes.fixtures import daemon, store, writers
from tests.fakes.scripted_broker import scripted_broker

__all__ = ["daemon", "store", "writers"]


@pytest.fixture
async def broker():
    """Give a broker that does what the test says."""
    async with scripted_broker() as broker:
        yield broker
