"""
Deletes records of a topic before an offset in both tiers, and leaves two records of it in the bucket.

Everything is checked before anything is deleted: the offset, the partitions, and that the bucket has their
archives. Then the request is stored (`audit/deletions/`). For each partition the broker deletes first, if it
still has that topic under that leader epoch. The manifest records the deletion after the broker's success. At
the end the outcome is stored.

A run that ends in between has lost nothing at or past the offset. The same command is run again: the broker
accepts an offset that is deleted already, and so does the archive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from crc32c import crc32c

from tieringd.archive.manifest_store import ManifestStore
from tieringd.archive.record_deletion import delete_archived
from tieringd.errors import ConfigError, ObjectNotFound, TieringError
from tieringd.formats.job_records import (
    DeletedPartition,
    DeletionOutcome,
    DeletionRequest,
    encode_deletion_outcome,
    encode_deletion_request,
)
from tieringd.formats.object_keys import deletion_key
from tieringd.model.manifest_parts import RecordDeletion
from tieringd.model.partition import TopicIdPartition
from tieringd.storage.base import ObjectStore

if TYPE_CHECKING:
    # An ordinary import would load the protocol's schema into commands that do not need it.
    from tieringd.broker.kafka_deletion import LedLog, TopicLeaders


class Cluster(Protocol):
    """The cluster that holds the local logs; see `broker.kafka_deletion.KafkaRecordDeleter`."""

    async def leaders(self, topic: str) -> TopicLeaders:
        """Return the leaders of a topic's partitions."""

    async def log_of(self, topic: TopicLeaders, number: int) -> LedLog:
        """Return the bounds of a partition's log."""

    async def delete_before(self, topic: TopicLeaders, number: int, before_offset: int) -> int:
        """
        Delete a partition's records before an offset; return where its log begins now.

        *topic* is the answer of `leaders` right before.
        """


@dataclass(frozen=True, slots=True)
class DeletedRecords:
    """What a deletion has done."""

    results: tuple[DeletedPartition, ...]
    record: str
    """The key of the record of the outcome."""


class RecordDeleter:
    """Delete records of topics, by offset. Keeps no state."""

    def __init__(
        self, cluster: Cluster, store: ObjectStore, manifests: ManifestStore, *, now_ms: Callable[[], int]
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._manifests = manifests
        self._now_ms = now_ms

    async def delete(
        self, topic: str, numbers: Sequence[int] | None, before_offset: int, *, requested_by: str, job_id: str
    ) -> DeletedRecords:
        """
        Delete the records of *topic* before *before_offset*: of the partitions *numbers*, or of all.

        A partition that fails has a fault in the result, and the others are deleted. *job_id* is part of the
        names of the two records, and unique.

        Raises:
            ConfigError: The offset is past the end of a log, or an archive is closed. Nothing is deleted.
            ObjectNotFound: There is no such topic, partition or archive. Nothing is deleted.
            BrokerUnavailable: A leader does not answer. Nothing is deleted.
            BrokerDenied: This user may not ask. Nothing is deleted.
            StorageUnavailable: Nothing is deleted; or the outcome is not known to be stored.
        """
        found = await self._cluster.leaders(topic)
        chosen = tuple(range(found.partition_count)) if numbers is None else tuple(sorted(set(numbers)))
        logs = [await self._checked(found, number, before_offset) for number in chosen]
        request = DeletionRequest(
            job_id=job_id,
            begun_at_ms=self._now_ms(),
            requested_by=requested_by,
            cluster=found.cluster,
            topic=found.topic,
            topic_id=found.topic_id,
            partitions=chosen,
            before_offset=before_offset,
        )
        await self._store_record(request, encode_deletion_request(request), is_done=False)
        results = tuple([await self._delete(found, one, before_offset) for one in logs])
        outcome = DeletionOutcome(self._now_ms(), results)
        key = await self._store_record(request, encode_deletion_outcome(request, outcome), is_done=True)
        return DeletedRecords(results, key)

    async def check(
        self, topic: str, numbers: Sequence[int] | None, before_offset: int
    ) -> tuple[LedLog, ...]:
        """Return the logs that `delete` would change, after the same checks. Raises as it does."""
        found = await self._cluster.leaders(topic)
        chosen = range(found.partition_count) if numbers is None else sorted(set(numbers))
        return tuple([await self._checked(found, number, before_offset) for number in chosen])

    async def _checked(self, topic: TopicLeaders, number: int, before_offset: int) -> LedLog:
        """Return the bounds of a log whose records before *before_offset* may be deleted."""
        if not 0 <= number < topic.partition_count:
            raise ObjectNotFound(
                f"topic {topic.topic} has {topic.partition_count} partitions, and none is number {number}"
            )
        led = await self._cluster.log_of(topic, number)
        if before_offset > led.high_watermark:
            raise ConfigError(
                f"offset {before_offset} is past the end of {led.name}: its high watermark is "
                f"{led.high_watermark}. Nothing was deleted",
                hint=f"Delete before offset {led.high_watermark} to delete every record",
            )
        manifest = (await self._manifests.load(_identified(topic, number))).manifest
        if manifest is None:
            raise ObjectNotFound(
                f"the bucket has no archive of {led.name}. Nothing was deleted",
                hint="The broker's own kafka-delete-records deletes records of a topic that is not archived",
            )
        if manifest.is_closed:
            raise ConfigError(
                f"the archive of {led.name} in this bucket is closed. Nothing was deleted",
                hint="`tieringd archive topics` says why. After a move, name the new bucket in the "
                "configuration",
            )
        return led

    async def _delete(self, topic: TopicLeaders, led: LedLog, before_offset: int) -> DeletedPartition:
        number = led.name.partition
        is_only_archived = before_offset <= led.log_start_offset
        log_start_offset = led.log_start_offset if is_only_archived else None
        try:
            if not is_only_archived:
                # The topic may have been deleted and created again, and the request goes by name.
                now = await self._cluster.leaders(topic.topic)
                now.require_same_log(topic, number)
                log_start_offset = await self._cluster.delete_before(now, number, before_offset)
            stored = await delete_archived(
                self._manifests,
                _identified(topic, number),
                RecordDeletion(before_offset, led.leader_epoch),
                now_ms=self._now_ms,
            )
        except TieringError as error:
            return DeletedPartition(number, log_start_offset, None, fault=str(error))
        return DeletedPartition(number, log_start_offset, stored.existing.start_offset, fault="")

    async def _store_record(self, request: DeletionRequest, data: bytes, *, is_done: bool) -> str:
        key = deletion_key(begun_at_ms=request.begun_at_ms, job_id=request.job_id, is_done=is_done)
        await self._store.put(key, data, crc32c=crc32c(data))
        return key


def _identified(topic: TopicLeaders, number: int) -> TopicIdPartition:
    return TopicIdPartition(topic.cluster, topic.topic, topic.topic_id, number)
