"""
The history of restored topics: read-only archives, perhaps of other clusters, that a log continues.

Links never change, so each is read once. The absence of a link is checked again after a minute, as a
restore may come at any time. The old manifests, which this process never writes, are checked again after
a minute as well.

`LogReader` reads a partition from its archive while retention, merges and new leaders change the
manifest. When an object is gone, it reads the manifest again and goes on from the reader's offset. An
object that the newest manifest still names is missing, which is an error. The reader begins with the
oldest of the archives that the log continues.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

from crc32c import crc32c

from tieringd.archive.manifest_store import ManifestStore, StoredManifest
from tieringd.archive.record_reader import RecordReader
from tieringd.errors import (
    ConfigError,
    CorruptDataError,
    ObjectNotFound,
    StorageUnavailable,
)
from tieringd.formats.history_link import HistoryLink, decode_history_link, encode_history_link
from tieringd.formats.object_keys import (
    TOPIC_MANIFESTS_PREFIX,
    TopicKey,
    history_link_key,
    manifest_key,
    parse_history_link_key,
    topic_key,
)
from tieringd.formats.records import Record
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Gap
from tieringd.model.partition import TopicIdPartition
from tieringd.policies.chunk_layout import history_part
from tieringd.policies.topic_lifecycle import BEYOND_RETURN
from tieringd.storage.base import ObjectStore
from tieringd.storage.checked_puts import create
from tieringd.storage.listing import list_objects

REFRESH_AFTER_MS = 60_000
FORGOTTEN_AFTER_MS = 3_600_000
"""How long an unused manifest is kept: an archive that was purged is never read again."""
LINKS_KEPT_MAX = 16_384
"""How many topics' links are kept, or the knowledge that a topic has none. The least recently used go."""
LINKS_MAX = 16
"""Longest chain of restores. A chain that is longer, or that is a circle, is reported as a fault."""

EXPIRED = "total retention has deleted these offsets"
NOT_ARCHIVED = "the archive begins after these offsets"


@dataclass(frozen=True, slots=True)
class _KnownLink:
    link: HistoryLink | None
    read_at_ms: int


@dataclass(frozen=True, slots=True)
class _KnownManifest:
    stored: StoredManifest
    read_at_ms: int


class History:
    """Find the archives before a topic's own. One per process; many readers may call it concurrently."""

    def __init__(
        self,
        store: ObjectStore,
        manifests: ManifestStore,
        *,
        now_ms: Callable[[], int],
        links_kept_max: int = LINKS_KEPT_MAX,
    ) -> None:
        self._store = store
        self._links_kept_max = links_kept_max
        self._manifests = manifests
        self._now_ms = now_ms
        self._links: OrderedDict[TopicKey, _KnownLink] = OrderedDict()
        """Least recently used first."""
        self._known: OrderedDict[TopicIdPartition, _KnownManifest] = OrderedDict()
        """Least recently checked first."""
        self._asking: WeakValueDictionary[TopicKey, asyncio.Lock] = WeakValueDictionary()

    async def link(self, link: HistoryLink) -> None:
        """
        Store the link from a topic to its history. A link that is already stored must be the same.

        Raises:
            ConfigError: The topic has another history, the link would make a loop, or the linked archive
                is being purged.
        """
        await self._require_no_loop(link)
        data = encode_history_link(link)
        is_new = await create(self._store, history_link_key(link.topic), data, crc32c=crc32c(data))
        if not is_new and await self._load(link.topic) != link:
            raise ConfigError(
                f"topic {link.topic.topic} ({link.topic.topic_id}) already continues another archive, or "
                "the same one from another offset",
                hint="Delete the topic, create it again under a new id, and run this again",
            )
        # Read after the link is stored: a purge that is claimed later sees the link.
        history = await self._manifests.load_topic(link.history)
        if history is not None and history.lifecycle in BEYOND_RETURN:
            if is_new:
                await self._store.delete_many([history_link_key(link.topic)])
            raise ConfigError(
                f"the archive of topic {link.history.topic} ({link.history.topic_id}) is "
                f"{history.lifecycle.value}: no topic can continue it"
            )

    async def link_of(self, topic: TopicKey) -> HistoryLink | None:
        """
        Return a topic's link as it is stored now, or None if it has none.

        Raises:
            CorruptDataError: The link is damaged.
        """
        return await self._load(topic)

    async def users(self) -> dict[TopicKey, list[TopicKey]]:
        """
        Return the topics of any cluster that continue each archive, as stored now.

        The keys are the continued archives; an archive that no topic continues is not among them.

        Raises:
            CorruptDataError: A link is damaged, so it is unknown which archive its topic continues.
        """
        found: dict[TopicKey, list[TopicKey]] = {}
        async for info in list_objects(self._store, TOPIC_MANIFESTS_PREFIX):
            key = parse_history_link_key(info.key)
            link = await self._load(key) if key is not None else None
            if link is not None:
                found.setdefault(link.history, []).append(link.topic)
        return found

    async def parts(
        self,
        partition: TopicIdPartition,
        *,
        start_offset: int,
        deleted_before: int = 0,
        from_offset: int = 0,
        is_fresh: bool = False,
    ) -> tuple[PartitionManifest, ...]:
        """
        Return the archives before a partition's own, which begins at *start_offset*: oldest first.

        Each ends where the next begins, and the last one ends at *start_offset*. Records before
        *deleted_before*, which a user deleted from the partition, are left out. So are those that a user
        deleted through an archive in between, when its topic was the newest. With *is_fresh* their manifests
        are read again, because an object is gone.

        An archive that was purged is left out, and so are those before it. So is one whose manifest is
        missing, if it ends at or before *from_offset*: the caller needs what comes after that.

        Raises:
            ObjectNotFound: A manifest is missing, and its topic was not purged.
            CorruptDataError: A link or manifest is damaged, or links lead in a circle.
        """
        found: list[PartitionManifest] = []
        hidden = deleted_before
        key, number = topic_key(partition), partition.partition
        seen = {key}
        while (link := await self._link_of(key)) is not None:
            end_offset = link.start_of(number)
            if end_offset is None or end_offset > start_offset:
                break
            key = link.history
            if key in seen or len(seen) > LINKS_MAX:
                raise CorruptDataError(
                    f"the history of {partition} does not end after {len(seen)} links: {key.topic} "
                    f"({key.topic_id}) is repeated, or there are too many"
                )
            seen.add(key)
            old = TopicIdPartition(key.cluster, key.topic, key.topic_id, number)
            manifest = await self._manifest(old, is_fresh=is_fresh)
            if manifest is None:
                if end_offset > max(hidden, from_offset):
                    await self._require_purged(old, end_offset)
                break
            if manifest.start_offset < end_offset:
                spillovers = self._manifests.spillovers
                manifest = await spillovers.with_history(manifest, from_offset=end_offset - 1)
            part = history_part(manifest, end_offset=end_offset, next_start=start_offset)
            start_offset = part.start_offset
            # A deletion reaches the archives before its own as well, and stays in force for later restores.
            hidden = max(hidden, manifest.deleted_before)
            if part.next_offset > hidden:
                found.append(part.seen_from(hidden))
        return tuple(reversed(found))

    async def _require_purged(self, partition: TopicIdPartition, end_offset: int) -> None:
        """
        Check that the archive of *partition*, which has no manifest, was purged.

        Raises:
            ObjectNotFound: It was not purged: the manifest is lost.
        """
        topic = await self._manifests.load_topic(topic_key(partition))
        # A topic that was moved to this bucket came without an older archive that had been purged before.
        if topic is not None and topic.lifecycle not in BEYOND_RETURN:
            raise ObjectNotFound(
                f"{manifest_key(partition)} is missing: the log continues the archive of {partition} in "
                f"cluster {partition.cluster}, whose records before offset {end_offset} cannot be read "
                "without it",
                hint="Restore it from the bucket's own versions, or build it anew with `tieringd spark "
                f"rebuild`. Reading from offset {end_offset} on does not need it",
            )

    async def precedes(self, partition: TopicIdPartition) -> bool:
        """
        Say whether the log of *partition* continues an older archive.

        Raises:
            CorruptDataError: The link is damaged.
            StorageUnavailable: The store does not answer, and it is not known yet whether there is a link.
        """
        link = await self._link_of(topic_key(partition))
        return link is not None and link.start_of(partition.partition) is not None

    async def _require_no_loop(self, link: HistoryLink) -> None:
        key, seen = link.history, {link.topic}
        while key not in seen and len(seen) <= LINKS_MAX:
            seen.add(key)
            further = await self._load(key)
            if further is None:
                return
            key = further.history
        raise ConfigError(
            f"the history of topic {link.topic.topic} would be circular, or have more than {LINKS_MAX} "
            "restores"
        )

    async def _link_of(self, key: TopicKey) -> HistoryLink | None:
        known = self._links.get(key)
        if known is None or (known.link is None and self._is_old(known.read_at_ms)):
            async with self._asking.setdefault(key, asyncio.Lock()):
                known = self._links.get(key)
                if known is None or (known.link is None and self._is_old(known.read_at_ms)):
                    known = _KnownLink(await self._loaded(key, known), self._now_ms())
                    self._links[key] = known
        self._links.move_to_end(key)
        if len(self._links) > self._links_kept_max:
            self._links.popitem(last=False)
        return known.link

    async def _loaded(self, key: TopicKey, known: _KnownLink | None) -> HistoryLink | None:
        """Read a link. While the store is unavailable, an earlier finding that there is none stays valid."""
        try:
            return await self._load(key)
        except StorageUnavailable:
            if known is None:
                raise
            return known.link

    async def _load(self, key: TopicKey) -> HistoryLink | None:
        object_key = history_link_key(key)
        try:
            data, _ = await self._store.get(object_key)
        except ObjectNotFound:
            return None
        try:
            link = decode_history_link(data)
        except CorruptDataError as error:
            raise error.located(object_key) from error
        if link.topic != key:
            raise CorruptDataError(
                f"the history link of {link.topic} is stored under the key of {key}", source=object_key
            )
        return link

    async def _manifest(self, partition: TopicIdPartition, *, is_fresh: bool) -> PartitionManifest | None:
        known = self._known.get(partition)
        if known is not None and not is_fresh and not self._is_old(known.read_at_ms):
            return known.stored.manifest
        stored = await self._manifests.refreshed(partition, known.stored if known else None)
        now_ms = self._now_ms()
        self._known[partition] = _KnownManifest(stored, now_ms)
        self._known.move_to_end(partition)
        while not 0 <= now_ms - next(iter(self._known.values())).read_at_ms < FORGOTTEN_AFTER_MS:
            self._known.popitem(last=False)
        return stored.manifest

    def _is_old(self, read_at_ms: int) -> bool:
        return not 0 <= self._now_ms() - read_at_ms < REFRESH_AFTER_MS


class LogReader:
    """
    Read one partition's records in order, once. A reader is not shared.

    Wanted offsets that are not archived, or not any more, are reported to *on_gap*, each range once.
    """

    def __init__(
        self,
        partition: TopicIdPartition,
        *,
        manifests: ManifestStore,
        records: RecordReader,
        from_offset: int,
        on_gap: Callable[[Gap], None],
        history: History | None = None,
    ) -> None:
        self._partition = partition
        self._manifests = manifests
        self._records = records
        self._on_gap = on_gap
        self._history = history
        self.next_offset = from_offset
        """The next offset to read."""
        self._told_to = from_offset
        """All gaps before this offset have been reported."""

    async def records(self, *, read_committed: bool) -> AsyncGenerator[Record]:
        """
        Yield the records from `next_offset` to the end of the archive, as it is when the end is reached.

        Call it again to read the records that were archived since.

        Raises:
            ObjectNotFound: The newest manifest names an object that the bucket does not have, or the
                manifest is missing, or that of an older archive which has the next offset.
            CorruptDataError: Stored bytes are damaged.
        """
        manifest = await self._following(is_fresh=False)
        while True:
            try:
                reading = self._records.records(
                    manifest,
                    from_offset=self.next_offset,
                    read_committed=read_committed,
                    on_gap=self._note_gap,
                )
                async with aclosing(reading) as records:
                    async for record in records:
                        self.next_offset = record.offset + 1
                        yield record
            except ObjectNotFound:
                newer = await self._following(is_fresh=True)
                if newer == manifest:
                    raise
                manifest = newer
            else:
                self.next_offset = max(self.next_offset, manifest.next_offset)
                if manifest.partition == self._partition:
                    return
                manifest = await self._following(is_fresh=False)

    async def _following(self, *, is_fresh: bool) -> PartitionManifest:
        """
        Return the manifest of the oldest archive that ends after `next_offset`, or the partition's own.

        A deletion by a user may take the first archives out of the list at any time, so none has a number.
        """
        own = await self._load()
        # All older archives end where this one begins. What is read from here on does not need them.
        if self._history is not None and self.next_offset < own.start_offset:
            parts = await self._history.parts(
                self._partition,
                start_offset=own.start_offset,
                deleted_before=own.deleted_before,
                from_offset=self.next_offset,
                is_fresh=is_fresh,
            )
            for part in parts:
                if part.next_offset > self.next_offset:
                    return self._begun(part)
        return self._begun(own)

    async def _load(self) -> PartitionManifest:
        manifest = (await self._manifests.load(self._partition)).manifest
        if manifest is None:
            raise ObjectNotFound(f"the bucket holds nothing of {self._partition}")
        return manifest

    def _begun(self, manifest: PartitionManifest) -> PartitionManifest:
        """Move `next_offset` to the start of *manifest*, and report the wanted offsets before it."""
        if self.next_offset < manifest.start_offset:
            reason = NOT_ARCHIVED if manifest.expired_at_ms is None else EXPIRED
            at_ms = manifest.expired_at_ms or 0
            self._note_gap(Gap(self.next_offset, manifest.start_offset - 1, reason, at_ms))
        self.next_offset = max(self.next_offset, manifest.start_offset)
        return manifest

    def _note_gap(self, gap: Gap) -> None:
        """Report the part of *gap* that is still wanted: not read, and not reported before."""
        base_offset = max(gap.base_offset, self._told_to, self.next_offset)
        if base_offset < gap.next_offset:
            self._told_to = gap.next_offset
            self._on_gap(replace(gap, base_offset=base_offset))
