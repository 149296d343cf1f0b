"""The bookkeeper: chores that wait for the object store, and none that keeps another from being done."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from tests.fakes.log_writer import CLUSTER
from tests.fakes.store import store_unavailable
from tests.fakes.virtual_loop import virtually
from tieringd.model.partition import Leadership
from tieringd.services.bookkeeper import Bookkeeper
from tieringd.services.follower import Follower
from tieringd.services.observer import Followed, World
from tieringd.services.retention_manager import RetentionManager
from tieringd.services.topic_registry import TopicRegistry, topic_key

INTERVAL_SECONDS = 10


@pytest.fixture
def registry(store, archive):
    return TopicRegistry(store, archive.manifests)


@pytest.fixture
def follower(archive, clock):
    return Follower(archive.manifests, now_ms=clock)


@pytest.fixture
def bookkeeper(registry, follower, broker):
    return Bookkeeper(
        registry=registry,
        follower=follower,
        retention=RetentionManager(broker, registry),
        interval_seconds=INTERVAL_SECONDS,
    )


def world_of(writer, *, is_led: bool = True) -> World:
    """Return a world of one partition, without a look at it."""
    followed = () if is_led else (Followed(writer.identified, writer.local_log(), ()),)
    wanted = {Leadership(writer.identified, 0): None} if is_led else {}
    return World(CLUSTER, wanted, followed, {})


def asked(store, operation: str) -> int:
    return sum(1 for each, _ in store.requests if each == operation)


@virtually
async def test_first_answer_of_the_bucket_is_worth_another_look(bookkeeper, registry, writer):
    """From then on it is known what is paused; a bucket that says the same again is not."""
    assert await bookkeeper.step(world_of(writer))
    assert registry.is_known
    assert registry.manifest(topic_key(writer.identified)).partition_count == writer.identified.partition + 1
    assert not await bookkeeper.step(world_of(writer))


@virtually
async def test_bucket_is_listed_once_in_an_interval(bookkeeper, store, writer):
    """However many hints bring rounds forward."""
    for _ in range(3):
        await bookkeeper.step(world_of(writer))
    assert asked(store, "list_page") == 1


@virtually
async def test_store_that_is_away_is_a_fault_until_it_is_back(bookkeeper, registry, store, writer):
    """The fault says which chore waits; nothing is taken for known meanwhile."""
    store.fail_next("list_page", lambda: store_unavailable("list"))
    with capture_logs() as lines:
        assert not await bookkeeper.step(world_of(writer))
    assert not registry.is_known
    assert "topic manifests cannot be read" in bookkeeper.fault
    assert [line["event"] for line in lines] == ["topic manifests cannot be read"]
    assert registry.manifest(topic_key(writer.identified)) is None

    assert await bookkeeper.step(world_of(writer))
    assert bookkeeper.fault == ""


@virtually
async def test_chore_that_fails_does_not_keep_the_next_from_being_done(bookkeeper, follower, store, writer):
    """A topic manifest that cannot be stored leaves followed manifests fresh."""
    await bookkeeper.step(world_of(writer, is_led=False))
    store.fail_next("put", lambda: store_unavailable("put"))
    both = World(CLUSTER, world_of(writer).wanted, world_of(writer, is_led=False).followed, {})
    with capture_logs() as lines:
        await bookkeeper.step(both)
    assert [line["event"] for line in lines] == ["topic manifests cannot be kept"]
    assert follower.take(writer.identified) is not None
