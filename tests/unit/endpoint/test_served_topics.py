"""The topics that an endpoint knows: listed once for all callers, and kept while the store is away."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.log_writer import LogWriter
from tests.support.archive_endpoints import archive_topic
from tieringd.endpoint.served_manifests import ServedTopics
from tieringd.errors import StorageUnavailable
from tieringd.topics.topic_registry import TopicRegistry

pytestmark = pytest.mark.looptime

INTERVAL_SECONDS = 30.0


@pytest.fixture
async def topics(archive, writer):
    """Give what is known of a bucket with one topic; in the end nothing is under way."""
    writer.closed_segment()
    await archive_topic(writer, archive)
    topics = ServedTopics(
        TopicRegistry(archive.store, archive.manifests),
        from_cluster=None,
        interval_seconds=INTERVAL_SECONDS,
    )
    yield topics
    await topics.close()


def names(topics):
    return [one.name for one in topics.all()]


async def test_slow_store_delays_no_request_for_topics(topics, store, archive, tmp_path):
    """
    Requests wait a little, all for one listing, and get the topics seen last.

    Later ones get the new topics.
    """
    await topics.start()
    other = LogWriter(tmp_path / "other", "payments")
    other.closed_segment()
    await archive_topic(other, archive)
    await asyncio.sleep(INTERVAL_SECONDS + 1)
    store.latency_seconds = 100.0
    store.requests.clear()
    loop = asyncio.get_running_loop()
    began = loop.time()
    await asyncio.gather(*(topics.ensure_fresh() for _ in range(10)))
    assert 0 < loop.time() - began < 10
    assert names(topics) == ["orders"]
    await asyncio.sleep(1_000)
    assert [operation for operation, _ in store.requests].count("list_page") == 1
    assert names(topics) == ["orders", "payments"]


async def test_listing_that_fails_is_not_repeated_at_once(topics, store):
    """A failed listing is not repeated at once, even if the failure took longer than the interval."""
    await topics.start()
    await asyncio.sleep(INTERVAL_SECONDS + 1)
    store.latency_seconds = 2 * INTERVAL_SECONDS
    store.fail_next("list_page", lambda: StorageUnavailable("away"))
    store.requests.clear()
    await topics.ensure_fresh()
    await asyncio.sleep(2 * INTERVAL_SECONDS)
    await topics.ensure_fresh()
    assert len(store.requests) == 1
    assert names(topics) == ["orders"]
