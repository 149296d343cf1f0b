"""The shared fixtures of tests of `reading`, and a segment in a store whose answers can be changed."""

from __future__ import annotations

import pytest

from tests.fakes.fixtures import archive, clock, writer
from tests.fakes.hydration import Host, OddStore, Stored

__all__ = ["archive", "clock", "writer"]


@pytest.fixture
def store():
    """Return an empty bucket; a test may change its next answers, or hold them back."""
    return OddStore()


@pytest.fixture
def stored(store):
    """Return a segment in the bucket."""
    return Stored(store)


@pytest.fixture
def host(tmp_path, store):
    """Return a host with a chunk cache in front of the bucket."""
    return Host(tmp_path / "cache", store)
