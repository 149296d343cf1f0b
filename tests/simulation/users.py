"""
Users who delete records of a simulated partition through a gateway, or with the command.

Both are recorded in the manifest, by the code that the gateway and the command run.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING

from tests.fakes.archive import archive_in
from tests.fakes.log_writer import CLUSTER, TOPIC_ID
from tests.simulation.node import LIMITS
from tieringd.broker.kafka_deletion import LedLog, TopicLeaders
from tieringd.errors import BrokerUnavailable, TieringError
from tieringd.formats.record_batch import parse_header
from tieringd.gateway.readable_partitions import ReadablePartitions
from tieringd.model.manifest_parts import RecordDeletion
from tieringd.storage.resilient import ResilientStore
from tieringd.topics.record_deleter import RecordDeleter

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.node import Node
    from tests.simulation.replication import Replication
    from tieringd.daemon.archive import Archive
    from tieringd.storage.base import ObjectStore

TRIES = 3
"""How often a user asks for a deletion before it succeeds."""


class _Request:
    """One request of a user: what the command sees of the cluster, and what the broker has deleted for it."""

    def __init__(self, partition: Replication, random: Random) -> None:
        self._partition = partition
        self._random = random
        self._gone: set[tuple[int, bytes]] = set()

    async def leaders(self, topic: str) -> TopicLeaders:
        """Return the leader of the partition."""
        partition = self._partition
        leader = (f"broker-{partition.leader}", 9092), partition.leader_epoch
        asked_at = asyncio.get_running_loop().time()
        leaders = {partition.name.partition: leader}
        return TopicLeaders(CLUSTER, topic, TOPIC_ID, leaders, partition_count=1, asked_at=asked_at)

    async def log_of(self, topic: TopicLeaders, number: int) -> LedLog:
        """Return the bounds of the partition's log."""
        log = self._partition.log
        return LedLog(log.name, topic.leaders[number][1], log.log_start_offset, log.stable_end)

    async def delete_before(self, topic: TopicLeaders, number: int, before_offset: int) -> int:
        """Delete the leader's records before an offset."""
        del topic, number
        return await self.delete(self._partition.leader, before_offset)

    async def delete(self, broker: int, before_offset: int) -> int:
        """Let *broker* delete. As Kafka does, it answers once the replicas in sync have deleted as well."""
        partition = self._partition
        if partition.leader != broker or before_offset > partition.log.stable_end:
            raise BrokerUnavailable(f"{partition.name} is not led by {broker}, or lacks {before_offset}")
        self._gone = partition.delete_records(before_offset)
        for follower in sorted(partition.in_sync - {broker}):
            partition.hear(follower)
            partition.fetch(follower)
        await asyncio.sleep(self._random.choice([0.0, 0.0, 2.0, 15.0, 60.0]))
        return before_offset

    def note_recorded(self, leader_epoch: int) -> None:
        """Note that the user has the answer: what was deleted under *leader_epoch*, or before, is gone."""
        self._partition.deleted |= {
            (offset, data)
            for offset, data in self._gone
            if parse_header(data, 0).leader_epoch <= leader_epoch
        }


class Users:
    """The users of *partition*. *now_ms* is the wall clock."""

    def __init__(self, partition: Replication, random: Random, *, now_ms: Callable[[], int]) -> None:
        self._partition = partition
        self._random = random
        self._now_ms = now_ms

    async def delete_by_command(self, before_offset: int, store: ObjectStore) -> None:
        """Run `topic delete-records` on the bucket *store* until it succeeds, a few times."""
        for number in range(TRIES):
            request = _Request(self._partition, self._random)
            manifests = self._archive(store).manifests
            deleter = RecordDeleter(request, store, manifests, now_ms=self._now_ms)
            leader_epoch = self._partition.leader_epoch
            self._partition.allow_deletion(before_offset)
            with suppress(TieringError):
                done = await deleter.delete(
                    self._partition.name.topic,
                    None,
                    before_offset,
                    requested_by="user",
                    job_id=f"{self._random.randrange(10**9)}-{number}",
                )
                if not done.results[0].fault:
                    request.note_recorded(leader_epoch)
                    return
            await asyncio.sleep(self._random.uniform(0, 5))

    async def delete_by_gateway(self, before_offset: int, store: ObjectStore, node: Node) -> None:
        """Send DeleteRecords through the gateway of *node* until it succeeds, a few times."""
        now, name = asyncio.get_running_loop().time, self._partition.name
        archive = self._archive(store)
        gateway = ReadablePartitions(
            node.reconciler, archive.manifests, archive.history, now=now, now_ms=self._now_ms
        )
        known: int | None = None
        for _ in range(TRIES):
            request = _Request(self._partition, self._random)
            with suppress(TieringError):
                # Other clients use this gateway all the time, so it knows the leader.
                gateway.may_have(name.topic, name.partition)
                known = self._known_epoch(node) if known is None else known
                epoch = await gateway.leader_epoch(name.topic, name.partition)
                await request.delete(node.number, before_offset)
                await node.store_wire.sendable()
                found = await gateway.find(name.topic, name.partition)
                if found is None or epoch is None:
                    return
                await gateway.record_deletion(found, RecordDeletion(before_offset, epoch))
                request.note_recorded(epoch if known is None else known)
                return
            await asyncio.sleep(self._random.uniform(0, 5))

    def _known_epoch(self, node: Node) -> int | None:
        """Return the leader epoch under which the daemon of *node* last saw its broker lead."""
        snapshot = node.reconciler.snapshot
        wanted = snapshot.wanted if snapshot else ()
        return next(
            (one.leader_epoch for one in wanted if one.partition == self._partition.log.identified), None
        )

    def _archive(self, store: ObjectStore) -> Archive:
        resilient = ResilientStore(store, LIMITS, random=Random(self._random.random()))
        return archive_in(resilient, writer_id="user", now_ms=self._now_ms)
