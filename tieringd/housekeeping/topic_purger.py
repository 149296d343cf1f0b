"""
Purging: everything that a bucket holds of deleted topics is deleted, but for the mark of it.

First every partition's manifest is closed: an archiver that lives on somewhere loses its next commit, and
stops. Then the whole bucket is listed once, and what has one of the topics' ids in its name goes, be it named
by a manifest, spilled, retired, in quarantine, or named by nothing. The live manifests go last of all, as
they keep archivers out. Whose an object is, is read in its name alone: so damaged ones go as well, and so
does what a crash has left of an earlier purge. A topic that was created again has another id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from tieringd.archive.closing import closed
from tieringd.errors import CorruptDataError
from tieringd.formats.object_keys import (
    history_link_key,
    manifest_key,
    owner_of,
    parse_quarantined_key,
    topic_key,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from tieringd.archive.manifest_store import ManifestStore
    from tieringd.formats.object_keys import TopicKey
    from tieringd.formats.topic_manifest import TopicManifest
    from tieringd.metrics.archive_work import PurgeMetrics
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.partition import TopicIdPartition
    from tieringd.storage.base import ObjectStore

log = structlog.get_logger(__name__)

_DELETED_AT_ONCE = 1000


class TopicPurger:
    """Delete what is left of topics. Keeps no state: begun again, it goes on with what is there."""

    def __init__(self, store: ObjectStore, manifests: ManifestStore, *, metrics: PurgeMetrics) -> None:
        self._store = store
        self._manifests = manifests
        self._metrics = metrics

    async def purge(
        self,
        topics: Sequence[TopicManifest],
        *,
        count: Callable[[TopicKey, int, int], Awaitable[object]],
    ) -> AsyncGenerator[int]:
        """
        Delete everything of *topics*, piece by piece; yield the store requests that each piece took.

        *count* is told how many segments and bytes each topic's archive held, before anything is deleted.

        Raises:
            TieringError: What is left is deleted the next time.
        """
        for topic in topics:
            segments = size_bytes = 0
            for partition in topic.partitions():
                held = await self._close(partition)
                if held is not None:
                    segments, size_bytes = segments + held.segment_count, size_bytes + held.size_bytes
                yield 2
            await count(topic.key, segments, size_bytes)
            yield 2
        keys = frozenset(topic.key for topic in topics)
        manifests = frozenset(manifest_key(one) for topic in topics for one in topic.partitions())
        start_after: str | None = None
        while True:
            start_after, requests = await self._sweep(keys, manifests, start_after)
            yield requests
            if start_after is None:
                break
        for topic in topics:
            last = [manifest_key(one) for one in topic.partitions()] + [history_link_key(topic.key)]
            for begin in range(0, len(last), _DELETED_AT_ONCE):
                await self._store.delete_many(last[begin : begin + _DELETED_AT_ONCE])
                yield 1

    async def _close(self, partition: TopicIdPartition) -> PartitionManifest | None:
        """Close a partition's manifest, if it has one that can be read; return it."""
        try:
            return (await closed(self._manifests, partition)).manifest
        except CorruptDataError as error:
            log.warning("a damaged manifest is purged unread", partition=str(partition), error=str(error))
            return None

    async def _sweep(
        self, keys: frozenset[TopicKey], kept: frozenset[str], start_after: str | None
    ) -> tuple[str | None, int]:
        """Delete what one page of the whole listing holds of *keys*, but for the objects *kept*."""
        page = await self._store.list_page("", start_after=start_after)
        found: list[str] = []
        for info in page.objects:
            owner = owner_of(parse_quarantined_key(info.key) or info.key)
            if owner is not None and topic_key(owner) in keys and info.key not in kept:
                found.append(info.key)
        if found:
            await self._store.delete_many(found)
            self._metrics.purged_objects.inc(len(found))
        return page.next_start_after, 2 if found else 1
