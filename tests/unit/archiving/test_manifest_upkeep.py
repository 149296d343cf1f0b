"""Manifest upkeep: chores that wait for the object store, and none that keeps another from being done."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from tests.fakes.log_writer import CLUSTER, LogWriter
from tests.fakes.store import store_unavailable
from tests.fakes.topics import topic_config
from tests.fakes.virtual_loop import virtually
from tieringd.archiving.manifest_upkeep import CLEAN_UP_INTERVAL_SECONDS, FollowedManifests, ManifestUpkeep
from tieringd.archiving.observer import BrokerSnapshot, FollowedPartition
from tieringd.errors import ConfigError
from tieringd.formats.object_keys import topic_key, topic_manifest_key
from tieringd.formats.topic_manifest import TieringDefaults
from tieringd.model.partition import Leadership
from tieringd.topics.retention_manager import RetentionManager
from tieringd.topics.topic_defaults import TopicDefaultsRecorder
from tieringd.topics.topic_registry import TopicRegistry

INTERVAL_SECONDS = 10


@pytest.fixture
def registry(store, archive):
    return TopicRegistry(store, archive.manifests)


@pytest.fixture
def followed_manifests(archive, clock):
    return FollowedManifests(archive.manifests, steady_ms=clock)


@pytest.fixture
def upkeep(registry, followed_manifests, broker):
    return ManifestUpkeep(
        registry=registry,
        followed_manifests=followed_manifests,
        defaults_recorder=TopicDefaultsRecorder(broker, registry),
        retention=RetentionManager(broker, registry),
        interval_seconds=INTERVAL_SECONDS,
    )


def snapshot_of(writer, *, is_led: bool = True) -> BrokerSnapshot:
    """Return a world of one partition, without a step."""
    followed = () if is_led else (FollowedPartition(writer.identified, writer.local_log(), ()),)
    wanted = {Leadership(writer.identified, 0): None} if is_led else {}
    return BrokerSnapshot(CLUSTER, wanted, followed, {})


def asked(store, operation: str) -> int:
    return sum(1 for each, _ in store.requests if each == operation)


@virtually
async def test_first_answer_of_the_bucket_asks_for_another_round(upkeep, registry, writer):
    """
    The first listing asks for another round: only then does the daemon know which topics are paused.

    An equal listing asks for none.
    """
    assert await upkeep.step(snapshot_of(writer))
    assert registry.is_known
    assert registry.manifest(topic_key(writer.identified)).partition_count == writer.identified.partition + 1
    assert not await upkeep.step(snapshot_of(writer))


@virtually
async def test_topic_that_has_gone_since_its_archiver_began_has_a_manifest(upkeep, registry, writer):
    """A topic manifest is written for a topic that has gone: nothing else finds its partition manifest."""
    await upkeep.step(BrokerSnapshot(CLUSTER, {}, (), {}))
    upkeep.note_begun(writer.identified)
    assert await upkeep.step(BrokerSnapshot(CLUSTER, {}, (), {}))
    assert registry.counts(writer.identified)
    assert not await upkeep.step(BrokerSnapshot(CLUSTER, {}, (), {}))


@virtually
async def test_bucket_is_listed_once_in_an_interval(upkeep, store, writer):
    """The bucket is listed once in an interval, however many hints bring rounds forward."""
    for _ in range(3):
        await upkeep.step(snapshot_of(writer))
    assert asked(store, "list_page") == 1


@virtually
async def test_store_that_is_away_is_a_fault_until_it_is_back(upkeep, registry, store, writer):
    """The fault says which chore waits; nothing is taken for known meanwhile."""
    store.fail_next("list_page", lambda: store_unavailable("list"))
    with capture_logs() as lines:
        assert not await upkeep.step(snapshot_of(writer))
    assert not registry.is_known
    assert "topic manifests cannot be read" in upkeep.fault
    assert upkeep.store_fault == upkeep.fault
    assert not upkeep.knows_topics
    assert [line["event"] for line in lines] == ["topic manifests cannot be read"]
    assert registry.manifest(topic_key(writer.identified)) is None

    assert await upkeep.step(snapshot_of(writer))
    assert (upkeep.fault, upkeep.store_fault, upkeep.knows_topics) == ("", "", True)


@virtually
async def test_chore_that_fails_does_not_keep_the_next_from_being_done(
    upkeep, followed_manifests, store, writer
):
    """A topic manifest that cannot be stored leaves followed manifests fresh."""
    await upkeep.step(snapshot_of(writer, is_led=False))
    store.fail_next("put", lambda: store_unavailable("put"))
    both = BrokerSnapshot(CLUSTER, snapshot_of(writer).wanted, snapshot_of(writer, is_led=False).followed, {})
    with capture_logs() as lines:
        await upkeep.step(both)
    assert [line["event"] for line in lines] == ["topic manifests cannot be kept"]
    assert followed_manifests.take(writer.identified) is not None


@virtually
async def test_topic_first_seen_is_recorded_once_and_for_all(upkeep, registry, writer):
    """Later values of the cluster do not change the record."""
    key = topic_key(writer.identified)
    topic = topic_config(remote_read=False)
    defaults = TieringDefaults(remote_write=True, remote_read=False)
    seen = replace(snapshot_of(writer), unrecorded_topics={key: topic}, defaults=defaults)
    await upkeep.step(snapshot_of(writer))
    await upkeep.step(seen)
    assert registry.manifest(key).defaults == seen.defaults
    assert registry.manifest(key).partition_count == writer.identified.partition + 1
    later = replace(seen, defaults=TieringDefaults(remote_write=False, remote_read=False))
    await upkeep.step(later)
    assert registry.manifest(key).defaults == seen.defaults


@virtually
async def test_archive_can_be_found_before_anything_else_is_recorded(
    registry, followed_manifests, broker, writer
):
    """Asking a broker with what a topic began may take long, and its archive may be needed meanwhile."""
    key = topic_key(writer.identified)
    found = []

    class SlowRecorder(TopicDefaultsRecorder):
        async def step(self, unrecorded_topics, defaults):
            found.append(registry.manifest(key))
            await super().step(unrecorded_topics, defaults)

    upkeep = ManifestUpkeep(
        registry=registry,
        followed_manifests=followed_manifests,
        defaults_recorder=SlowRecorder(broker, registry),
        retention=RetentionManager(broker, registry),
        interval_seconds=INTERVAL_SECONDS,
    )
    topic = topic_config(remote_read=False)
    defaults = TieringDefaults(remote_write=True, remote_read=False)
    await upkeep.step(replace(snapshot_of(writer), unrecorded_topics={key: topic}, defaults=defaults))
    assert [one.partition_count for one in found] == [writer.identified.partition + 1]
    assert registry.manifest(key).defaults == defaults


@virtually
async def test_nothing_is_known_before_the_store_is_found_fit(
    registry, followed_manifests, broker, writer, store
):
    """A store that ignores conditions is not used, however often it is asked."""
    fits = False

    async def check_store(_) -> None:
        if not fits:
            raise ConfigError("the object store ignores conditions")

    retention = RetentionManager(broker, registry)
    upkeep = ManifestUpkeep(
        registry=registry,
        followed_manifests=followed_manifests,
        defaults_recorder=TopicDefaultsRecorder(broker, registry),
        retention=retention,
        interval_seconds=INTERVAL_SECONDS,
        check_store=check_store,
    )
    for _ in range(2):
        assert not await upkeep.step(snapshot_of(writer))
    assert (registry.is_known, store.requests) == (False, [])
    assert "ignores conditions" in upkeep.fault
    assert upkeep.store_fault == ""

    fits = True
    assert await upkeep.step(snapshot_of(writer))
    assert upkeep.fault == ""


@virtually
async def test_another_cluster_is_checked_before_anything_is_stored_for_it(
    registry, followed_manifests, broker, writer, store
):
    """A broker can be formatted anew at any time, also right after the topics were looked at."""

    async def check_store(cluster: str) -> None:
        if cluster != writer.identified.cluster:
            raise ConfigError("the archive is that of another cluster")

    upkeep = ManifestUpkeep(
        registry=registry,
        followed_manifests=followed_manifests,
        defaults_recorder=TopicDefaultsRecorder(broker, registry),
        retention=RetentionManager(broker, registry),
        interval_seconds=INTERVAL_SECONDS,
        check_store=check_store,
    )
    await upkeep.step(snapshot_of(writer))
    assert upkeep.fault == ""
    await upkeep.step(replace(snapshot_of(writer), cluster="another"))
    assert "that of another cluster" in upkeep.fault


@virtually
async def test_abandoned_uploads_are_removed_now_and_then(registry, followed_manifests, broker, writer):
    """Abandoned uploads are removed at an interval of their own: they only cost storage."""
    asked = 0

    async def clean_up() -> int:
        nonlocal asked
        asked += 1
        return 3

    upkeep = ManifestUpkeep(
        registry=registry,
        followed_manifests=followed_manifests,
        defaults_recorder=TopicDefaultsRecorder(broker, registry),
        retention=RetentionManager(broker, registry),
        interval_seconds=INTERVAL_SECONDS,
        clean_up=clean_up,
    )
    with capture_logs() as lines:
        for _ in range(3):
            await upkeep.step(snapshot_of(writer))
    assert asked == 1
    assert [line["uploads"] for line in lines] == [3]
    await asyncio.sleep(CLEAN_UP_INTERVAL_SECONDS)
    await upkeep.step(snapshot_of(writer))
    assert asked == 2


@virtually
async def test_remote_delete_is_recorded_when_it_changes(upkeep, registry, store, writer):
    """A living topic's `remote_delete` is in the bucket after the same step, and is written once."""
    key = topic_key(writer.identified)
    for is_set in (True, False):
        snapshot = replace(snapshot_of(writer), remote_delete={key: is_set})
        await upkeep.step(snapshot)
        assert registry.manifest(key).remote_delete is is_set
        puts = asked(store, "put")
        await upkeep.step(snapshot)
        assert asked(store, "put") == puts


@virtually
async def test_nothing_is_recorded_of_a_topic_that_is_not_archived(upkeep, registry, writer):
    """There is nothing to delete; that it was seen is another thing."""
    key = topic_key(writer.identified)
    snapshot = replace(snapshot_of(writer, is_led=False), remote_delete={key: False})
    await upkeep.step(snapshot)
    assert registry.manifest(key) is None
    await registry.record_defaults(key, TieringDefaults(remote_write=False, remote_read=False))
    await upkeep.step(snapshot)
    assert registry.manifest(key).remote_delete is None


@virtually
async def test_topic_that_fails_keeps_no_other_from_its_manifest(upkeep, registry, store, tmp_path):
    """The failed one is named until it is mended; another that fails later is logged as well."""
    writers = [LogWriter(tmp_path / "logs", name) for name in ("audit", "orders", "payments")]
    keys = [topic_key(one.identified) for one in writers]
    snapshot = BrokerSnapshot(CLUSTER, {Leadership(one.identified, 0): None for one in writers}, (), {})
    store.add(topic_manifest_key(keys[0]), b"{")
    with capture_logs() as lines:
        assert await upkeep.step(snapshot)
        await upkeep.step(snapshot)
    assert [registry.manifest(key) is not None for key in keys] == [False, True, True]
    assert "topic audit: " in upkeep.fault
    assert upkeep.store_fault == ""
    assert [one["event"] for one in lines if one["event"] == "topic manifests cannot be kept"] == [
        "topic manifests cannot be kept"
    ]

    store.remove(topic_manifest_key(keys[0]))
    assert await upkeep.step(snapshot)
    assert upkeep.fault == ""
    assert registry.manifest(keys[0]) is not None
