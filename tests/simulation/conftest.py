"""What every simulation needs."""

from __future__ import annotations

import gc

import pytest
from structlog.testing import capture_logs

from tests.support.memory_directory import memory_directory

_COLLECT_AFTER = 50_000
"""How many objects are made before the collector looks for cycles: a history makes few, and is short."""


@pytest.fixture(autouse=True)
def quiet():
    """Keep the daemons' logs from the output: thousands of failures are expected here."""
    with capture_logs() as logs:
        yield logs


@pytest.fixture(autouse=True)
def seldom_collected():
    """Let the garbage collector run seldom: at its usual pace it is a tenth of what a history costs."""
    usual = gc.get_threshold()
    gc.set_threshold(_COLLECT_AFTER, *usual[1:])
    yield
    gc.set_threshold(*usual)


@pytest.fixture
def tmp_path():
    """Yield a directory in memory: a history writes hundreds of small files, and no disk is in question."""
    with memory_directory() as directory:
        yield directory
