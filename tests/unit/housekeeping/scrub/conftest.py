"""A bucket whose parts spill early."""

from __future__ import annotations

import pytest

from tests.unit.housekeeping.scrub.buckets import Bucket
from tieringd.policies import spillover as policy


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Make each segment that may spill a part of its own."""
    monkeypatch.setattr(policy, "ROWS_MIN", 1)
    monkeypatch.setattr(policy, "SEGMENTS_REMEMBERED", 1)


@pytest.fixture
def bucket(writer, tmp_path):
    """Give a bucket that is empty."""
    return Bucket(writer, work_directory=tmp_path)
