"""A bucket with a deleted topic, a topic that was created again with the same name, and a third topic."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.fakes.archive import Clock, archive_in, archived, archiver_of, observed
from tests.fakes.broker import FakeBroker
from tests.fakes.log_writer import CLUSTER, LogWriter
from tests.fakes.memory_store import MemoryStore
from tests.fakes.store import DistantStore
from tests.fakes.wire import Wire
from tieringd.formats.object_keys import (
    TopicKey,
    data_key,
    index_key,
    owner_of,
    topic_key,
    topic_manifest_key,
)
from tieringd.housekeeping.topic_purge import TopicObjectDeleter, TopicPurgeJob
from tieringd.metrics import Metrics
from tieringd.model.spilling import part_to_spill, spilled
from tieringd.policies.total_retention import RetentionPace, TotalRetention
from tieringd.topics.topic_registry import TopicRegistry

if TYPE_CHECKING:
    from pathlib import Path

    from tieringd.formats.topic_manifest import TopicManifest

OLD_ID, NEW_ID, THIRD_ID = "oldoldoldoldoldoldoldo", "newnewnewnewnewnewnewn", "thirdthirdthirdthirdth"
OLD, NEW, THIRD = (
    TopicKey(CLUSTER, name, topic_id)
    for name, topic_id in (("orders", OLD_ID), ("orders", NEW_ID), ("third", THIRD_ID))
)
GRACE_MS = 30_000


class DeletedTopics:
    """The bucket, before any daemon has noted the deletion."""

    def __init__(self, directory: Path) -> None:
        self.store = MemoryStore()
        self.clock = Clock()
        self.writers = [
            LogWriter(_made(directory / topic_id), name, number, topic_id=topic_id)
            for name, topic_id, number in (
                ("orders", OLD_ID, 0),
                ("orders", OLD_ID, 1),
                ("orders", NEW_ID, 0),
                ("third", THIRD_ID, 0),
            )
        ]

    async def fill(self, *, remote_delete: bool | None = True) -> None:
        """
        Archive all topics.

        The old topic also has a spilled part, a retired segment, and objects that no manifest names.
        """
        archive = archive_in(self.store, now_ms=self.clock)
        for writer in self.writers:
            for value in (b"one", b"two", b"three", b"four"):
                writer.closed_segment(value)
            key = topic_key(writer.identified)
            await archive.manifests.ensure_topic(key, partition_count=writer.identified.partition + 1)
            await archived(writer, archive)
            await archive.manifests.change_topic(
                key, lambda found: replace(found, remote_delete=remote_delete)
            )
        first = self.writers[0]
        pace = RetentionPace(interval_ms=1, delete_delay_ms=10**9)
        archiver = archiver_of(first, archive, FakeBroker(first), now_ms=self.clock)
        size_bytes = (await archive.manifests.load(first.identified)).existing.size_bytes
        total = TotalRetention(limit_ms=None, limit_bytes=size_bytes - 1)
        for _ in range(3):
            await archiver.step(observed(first, total=total, retention_pace=pace))
            self.clock.now_ms += 10
        stored = await archive.manifests.load(first.identified)
        assert stored.existing.retired, "a segment has expired, and its objects are there"
        part = part_to_spill(stored.existing, 1)
        name = await archive.manifests.spillovers.put(part)
        stored = await archive.manifests.commit(stored, spilled(stored.existing, part, name), leader_epoch=0)
        nobodys = replace(stored.existing.segments[0], writer_id="dead")
        for key in (data_key(first.identified, nobodys), index_key(first.identified, nobodys)):
            self.store.add(key, b"of a crashed process")

    def keys_of(self, topic: TopicKey) -> set[str]:
        """Return the keys of a topic's objects, without its topic manifest."""
        return {
            key
            for key in self.store.objects
            if (owner := owner_of(key)) is not None and topic_key(owner) == topic
        }

    def objects_of(self, *topics: TopicKey) -> dict[str, bytes]:
        """Return the objects of topics by key, including their topic manifests."""
        keys = {key for topic in topics for key in self.keys_of(topic)}
        keys |= {topic_manifest_key(topic) for topic in topics}
        return {key: self.store.objects[key][0] for key in keys}

    async def manifest(self, topic: TopicKey) -> TopicManifest:
        """Return a topic's stored manifest."""
        found = await archive_in(self.store).manifests.load_topic(topic)
        assert found is not None
        return found


class Purging:
    """One daemon's purge job. The cluster has the new and the third topic, and not the old one."""

    def __init__(self, world: DeletedTopics, name: str, *, wire: Wire | None = None) -> None:
        self.clock = world.clock
        store = DistantStore(world.store, wire or Wire())
        self.archive = archive_in(store, writer_id=name, now_ms=self.clock)
        self.metrics = Metrics()
        self.broker = FakeBroker()
        self.broker.cluster_topics = {"orders": {NEW_ID}, "third": {THIRD_ID}}
        self.to_stay: set[str] = set()
        """Topics whose configuration has `redpanda.remote.delete: false`."""
        self.listed = TopicRegistry(store, self.archive.manifests)
        """What the daemon's rounds would list. Nothing does here, so that each turn lists by itself."""
        self.job = TopicPurgeJob(
            broker=self.broker,
            registry=TopicRegistry(store, self.archive.manifests),
            listed=self.listed,
            purger=TopicObjectDeleter(store, self.archive.manifests, metrics=self.metrics.purge),
            history=self.archive.history,
            owner=name,
            grace_ms=GRACE_MS,
            is_to_stay=lambda name: name in self.to_stay,
            clock=self.archive.clock,
            metrics=self.metrics.purge,
        )

    async def turn(self, *, after_ms: int = 0, requests_max: int = 10_000) -> bool:
        """Move the clock by *after_ms*, and run one turn of the job; return whether there is more work."""
        self.clock.now_ms += after_ms
        return (await self.job.turn(requests_max=requests_max)).has_more

    async def note(self) -> None:
        """Run the two turns after which the deletion is noted."""
        await self.turn()
        await self.turn(after_ms=10_000)

    async def work(self, *, minutes: int = 8) -> None:
        """Run small turns, twelve in each minute."""
        for _ in range(minutes):
            for _ in range(12):
                await self.turn(after_ms=5_000, requests_max=3)


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory
