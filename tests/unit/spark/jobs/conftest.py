"""A directory for a bucket, and the buckets that were opened on it closed again."""

from __future__ import annotations

import atexit

import pytest

from tests.unit.spark.jobs.shelf import Shelf
from tieringd.spark import bucket as opened


@pytest.fixture(autouse=True)
def no_bucket_stays_open():
    """Close what a process would keep open for its next task."""
    yield
    while opened._open:
        _, bucket = opened._open.pop()
        atexit.unregister(bucket.close)
        bucket.close()


@pytest.fixture
def shelf(tmp_path):
    """Give an empty bucket."""
    return Shelf(tmp_path)
