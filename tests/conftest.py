"""What every test needs."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import structlog

from tests.support.examples import load_profile
from tieringd.compiled import loading

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

pytest_plugins = [
    "tests.support.forked_workers",
    "tests.support.suite_report",
    "tests.support.shared_brokers",
    "tests.support.ended_fixtures",
    "tests.support.final_scrub",
]

load_profile()

# No test connects to a public server. Reading the system's 140 certificate authorities takes 40 ms for each
# client of a store, here and in every process that the tests start.
_ONE_AUTHORITY = str(Path(__file__).parent / "support/one_authority.pem")
os.environ |= {"SSL_CERT_FILE": _ONE_AUTHORITY, "AWS_CA_BUNDLE": _ONE_AUTHORITY}

# A shell that starts the tests in the background makes them, and every process that they start, ignore
# SIGINT. Tests interrupt processes by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """
    Import and collect without the garbage collector.

    Nearly all that comes here stays, and the collector would walk through it again and again.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """
    Take what has been imported out of the garbage collector's sight.

    It lives until the end, and a full collection would walk through a million of its objects; some
    tests collect after each test to see what it left behind. Collections are made rare as well: with the
    interpreter's own thresholds they are a seventh of a worker's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def no_walk_by_chance() -> None:
    """
    Load the compiled walk in no test that does not ask for it.

    The small segments of many tests together reach the bytes from which on a process loads the walk. In which
    test that happens would depend on the order.
    """
    loading._is_begun = True


@pytest.fixture(scope="session", autouse=True)
def idle_loop() -> Iterator[None]:
    """
    Set an event loop that no test uses.

    The looptime plugin asks for the current loop before each ordinary test. Before Python 3.14
    that makes one, which would never be closed.
    """
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    loop.close()


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """
    Give the log its settings back after each test.

    A command that is loaded in this process sets the log up for its own standard error. pytest closes that
    with the test, and later tests would write to a closed file.
    """
    before = structlog.get_config()
    yield
    structlog.configure(**before)
