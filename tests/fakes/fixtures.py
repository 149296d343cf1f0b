"""Fixtures: one partition's log, one bucket, one daemon's services; or a daemon over three partitions."""

from __future__ import annotations

import pytest

from tests.fakes.archive import Clock, archive_in
from tests.fakes.broker import FakeBroker
from tests.fakes.daemons import Daemon
from tests.fakes.log_writer import LogWriter
from tests.fakes.memory_store import MemoryStore
from tieringd.metrics import Metrics


@pytest.fixture
def writer(tmp_path):
    """Return an empty log."""
    return LogWriter(tmp_path)


@pytest.fixture
def store():
    """Return an empty bucket."""
    return MemoryStore()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def archive(store, clock):
    """Return the services of one daemon."""
    return archive_in(store, now_ms=clock)


@pytest.fixture
def broker(writer):
    return FakeBroker(writer)


@pytest.fixture
def metrics():
    return Metrics()


@pytest.fixture
def writers(tmp_path):
    """Return the logs of three partitions, each with a closed segment."""
    writers = [LogWriter(tmp_path, "orders", number) for number in range(3)]
    for writer in writers:
        writer.closed_segment()
    return writers


@pytest.fixture
def daemon(tmp_path, store, writers):
    return Daemon(tmp_path, store, writers)
