"""A bucket whose parts spill early."""

from __future__ import annotations

import pytest

from tests.fakes.spilling import make_parts_small
from tests.unit.housekeeping.scrub.buckets import Bucket


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Make each segment that may spill a part of its own."""
    make_parts_small(monkeypatch)


@pytest.fixture
def bucket(writer, tmp_path):
    """Give a bucket that is empty."""
    return Bucket(writer, work_directory=tmp_path)
