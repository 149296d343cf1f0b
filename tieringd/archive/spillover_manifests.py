"""
The spillover manifests of a bucket: found by listing, loaded on demand, held in memory and on disk.

The live manifest decides which ones belong to an archive: it names the newest, and each names the one
before it. A listing is enough to walk back while only one listed name ends where a known one begins.
Where several do, the known one is loaded and says which. So a spillover manifest that a crash or a
deposed leader left behind is never taken for history.

Spillover manifests never change, so a held copy is as good as the stored one. Decoded ones are held in
memory up to a number of bytes. Their files lie in the chunk cache if there is one, and every file's
checksum is checked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, Protocol

import structlog
from crc32c import crc32c

from tieringd.errors import CorruptDataError, ObjectNotFound
from tieringd.formats.cache_names import cached_name
from tieringd.formats.manifest_codec import decode_spillover, encode_spillover
from tieringd.formats.object_keys import parse_spillover_key, spillover_key, spillover_prefix
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition
from tieringd.model.spilling import live_piece, piece_of, with_parts
from tieringd.model.spillover import Spillover, SpilloverManifest, SpilloverName
from tieringd.storage.base import ObjectStore
from tieringd.storage.listing import list_objects
from tieringd.storage.threads import in_thread

log = structlog.get_logger(__name__)

HELD_BYTES_MAX: Final = 64 << 20
ROW_BYTES: Final = 64
"""Memory that a decoded segment takes at most."""
PART_BYTES: Final = 8192
"""Memory that a part takes besides its segments."""
LISTED_NAMES_MAX: Final = 100_000
"""For all partitions together. These names take some tens of megabytes."""


class CachedObjects(Protocol):
    """
    Small whole objects on a local disk, by their names in a cache.

    The reader of a file checks its bytes.
    """

    @property
    def buckets(self) -> int:
        """Return the number of buckets that file names are spread over."""
        ...

    async def read(self, name: str, size_bytes: int) -> bytes | None:
        """Return the bytes of a file of *size_bytes*, or None if they are not available."""
        ...

    async def put(self, name: str, data: bytes) -> None:
        """Store bytes that were checked, if there is room."""
        ...

    async def discard(self, name: str) -> None:
        """Delete a file whose bytes are wrong."""
        ...

    def touch(self, name: str) -> None:
        """Record a use of a file."""
        ...


@dataclass(frozen=True, slots=True)
class _Listing:
    """The spillover manifests of a partition with their object sizes, in its history or left behind."""

    sizes: dict[SpilloverName, int]

    def ending_at(self, offset: int) -> list[SpilloverName]:
        return [name for name in self.sizes if name.next_offset == offset]


class SpilloverManifests:
    """Find, load and store spillover manifests. One per process; belongs to one event loop."""

    def __init__(self, store: ObjectStore, *, held_bytes_max: int = HELD_BYTES_MAX) -> None:
        self._store = store
        self._held_bytes_max = held_bytes_max
        self._held: OrderedDict[tuple[TopicIdPartition, SpilloverName], SpilloverManifest] = OrderedDict()
        self._held_bytes = 0
        self._listings: OrderedDict[TopicIdPartition, _Listing] = OrderedDict()
        self._files: CachedObjects | None = None

    @property
    def held_bytes(self) -> int:
        """Return the approximate memory in bytes that the decoded parts take."""
        return self._held_bytes

    def use_files(self, files: CachedObjects | None) -> None:
        """Use *files* as the cache on disk from now on, or none."""
        self._files = files

    async def put(self, part: SpilloverManifest) -> SpilloverName:
        """
        Store a part and return its name. Storing the same part again writes the same object.

        Raises:
            StorageUnavailable: The part may be stored or not. Nothing refers to it yet.
        """
        data, name = await in_thread(encode_spillover, part)
        await self._store.put(spillover_key(part.partition, name), data, crc32c=crc32c(data))
        self._hold(part.partition, name, part)
        return name

    async def keep(self, part: SpilloverManifest, name: SpilloverName) -> bool:
        """
        Store a part again if it is gone; say so. Call it after the manifest that names the part is stored.

        A crash may have left the same part before. A scrub that judged that one by the manifest as it was
        may put the part into quarantine between `put` and the commit.

        Raises:
            StorageUnavailable: The part may be missing. The next scrub mends that.
        """
        try:
            await self._store.head(spillover_key(part.partition, name))
        except ObjectNotFound:
            await self.put(part)
            return True
        return False

    async def names(self, manifest: PartitionManifest, *, from_offset: int) -> tuple[SpilloverName, ...]:
        """
        Return the names of the newest parts of an archive, as far back as *from_offset*, ascending.

        Raises:
            ObjectNotFound: A part was deleted. Read the manifest again.
            CorruptDataError: A part names no part before it, although the manifest says that there is one.
        """
        spillover, partition = manifest.spillover, manifest.partition
        if spillover is None or spillover.next_offset <= from_offset:
            return ()
        listing = await self._listing(partition, spillover)
        found = [spillover.newest]
        while found[-1].base_offset > max(from_offset, spillover.begin_offset):
            candidates = listing.ending_at(found[-1].base_offset)
            if len(candidates) == 1:
                found.append(candidates[0])
                continue
            part = await self.load(partition, found[-1])
            if part.previous is None:
                raise CorruptDataError(
                    f"offsets {spillover.begin_offset} to {found[-1].base_offset - 1} should be spilled, "
                    "but no manifest names a spillover manifest for them",
                    source=spillover_key(partition, found[-1]),
                )
            if part.previous not in candidates:
                self._listings.pop(partition, None)
                key = spillover_key(partition, part.previous)
                raise ObjectNotFound(f"the bucket has no object {key}", key=key)
            found.append(part.previous)
        return tuple(reversed(found))

    async def load(self, partition: TopicIdPartition, name: SpilloverName) -> SpilloverManifest:
        """
        Return a part: from memory, from the cache, or from the bucket.

        Raises:
            ObjectNotFound: The part was deleted. Read the manifest again.
            CorruptDataError: The bytes of the part are damaged.
        """
        held = self._held.get((partition, name))
        if held is not None:
            self._held.move_to_end((partition, name))
            return held
        part = await self._from_file(partition, name)
        if part is None:
            key = spillover_key(partition, name)
            data, _ = await self._store.get(key)
            part = await self._decoded(data, partition, name, source=key)
            if self._files is not None:
                await self._files.put(cached_name(key, buckets=self._files.buckets), data)
        self._hold(partition, name, part)
        return part

    async def parts(
        self, manifest: PartitionManifest, *, from_offset: int
    ) -> AsyncGenerator[SpilloverManifest]:
        """
        Yield the parts from the one that holds *from_offset* on, ascending.

        Each is loaded when its turn comes.

        Raises:
            ObjectNotFound: A part was deleted. Read the manifest again.
            CorruptDataError: A part is damaged, or does not follow the one before it.
        """
        before: SpilloverName | None = None
        for name in await self.names(manifest, from_offset=from_offset):
            part = await self.load(manifest.partition, name)
            _require_order(part, name, before)
            before = name
            yield part

    async def with_history(
        self, manifest: PartitionManifest, *, from_offset: int | None = None
    ) -> PartitionManifest:
        """
        Return *manifest* with all its segments from *from_offset* on, or all of them by default.

        Some segments before *from_offset* may be included too. Nothing is loaded if the manifest already
        has them.

        Raises:
            ObjectNotFound: A part was deleted. Read the manifest again.
            CorruptDataError: A part is damaged, or does not follow the one before it.
        """
        start = max(manifest.start_offset, from_offset or 0)
        if start >= manifest.live_offset:
            return manifest
        return with_parts(manifest, [part async for part in self.parts(manifest, from_offset=start)])

    async def pieces(
        self, manifest: PartitionManifest, *, from_offset: int = 0, reaching_ms: int | None = None
    ) -> AsyncGenerator[PartitionManifest]:
        """
        Yield an archive in pieces, ascending, from the one that holds *from_offset* on.

        The last piece is live.

        Each piece is a manifest of its own offsets, and is loaded when its turn comes. Spilled pieces
        without any record as late as *reaching_ms* are skipped.

        Raises:
            ObjectNotFound: A part was deleted. Read the manifest again.
            CorruptDataError: A part is damaged, or does not follow the one before it.
        """
        if max(from_offset, manifest.start_offset) < manifest.live_offset:
            start = max(from_offset, manifest.start_offset)
            before: SpilloverName | None = None
            for name in await self.names(manifest, from_offset=start):
                if reaching_ms is not None and name.max_timestamp_ms < reaching_ms:
                    before = None
                    continue
                part = await self.load(manifest.partition, name)
                _require_order(part, name, before)
                before = name
                yield piece_of(manifest, part)
        yield live_piece(manifest)

    async def piece_at(self, manifest: PartitionManifest, offset: int) -> PartitionManifest:
        """
        Return the piece of an archive that holds *offset*. The archive must hold *offset*.

        Raises:
            ObjectNotFound: A part was deleted. Read the manifest again.
            CorruptDataError: A part is damaged.
        """
        if manifest.spillover is None:
            return manifest
        async with aclosing(self.pieces(manifest, from_offset=offset)) as pieces:
            return await anext(pieces)

    async def delete(self, partition: TopicIdPartition, names: Iterable[SpilloverName]) -> None:
        """
        Delete parts that no manifest names any more.

        Raises:
            StorageUnavailable: Some parts may be left.
        """
        gone = tuple(names)
        if gone:
            await self._store.delete_many([spillover_key(partition, name) for name in gone])
        self._listings.pop(partition, None)

    async def ending_before(self, partition: TopicIdPartition, offset: int) -> tuple[SpilloverName, ...]:
        """List and return all parts in the bucket that end at or before *offset*, also those left behind."""
        listing = await self._listed(partition)
        return tuple(name for name in listing.sizes if name.next_offset <= offset)

    async def _from_file(self, partition: TopicIdPartition, name: SpilloverName) -> SpilloverManifest | None:
        listing = self._listings.get(partition)
        size_bytes = listing.sizes.get(name) if listing else None
        if self._files is None or size_bytes is None:
            return None
        file_name = cached_name(spillover_key(partition, name), buckets=self._files.buckets)
        data = await self._files.read(file_name, size_bytes)
        if data is None:
            return None
        try:
            part = await self._decoded(data, partition, name, source=file_name)
        except CorruptDataError as error:
            log.warning("a cached manifest is wrong; it is fetched again", error=str(error))
            await self._files.discard(file_name)
            return None
        self._files.touch(file_name)
        return part

    async def _decoded(
        self, data: bytes, partition: TopicIdPartition, name: SpilloverName, *, source: str
    ) -> SpilloverManifest:
        try:
            return await in_thread(decode_spillover, data, partition=partition, name=name)
        except CorruptDataError as error:
            raise error.located(source) from error

    async def _listing(self, partition: TopicIdPartition, spillover: Spillover) -> _Listing:
        """Return a listing that has the newest part, and therefore all parts before it."""
        known = self._listings.get(partition)
        if known is not None and spillover.newest in known.sizes:
            self._listings.move_to_end(partition)
            return known
        return await self._listed(partition)

    async def _listed(self, partition: TopicIdPartition) -> _Listing:
        prefix, sizes = spillover_prefix(partition), {}
        async for info in list_objects(self._store, prefix):
            name = parse_spillover_key(partition, info.key)
            if name is not None:
                sizes[name] = info.size_bytes
        listing = self._listings[partition] = _Listing(sizes)
        self._listings.move_to_end(partition)
        names = sum(len(one.sizes) for one in self._listings.values())
        while names > LISTED_NAMES_MAX and len(self._listings) > 1:
            _, oldest = self._listings.popitem(last=False)
            names -= len(oldest.sizes)
        return listing

    def _hold(self, partition: TopicIdPartition, name: SpilloverName, part: SpilloverManifest) -> None:
        size_bytes = _held_bytes(part)
        if (partition, name) in self._held or size_bytes > self._held_bytes_max:
            return
        self._held[partition, name] = part
        self._held_bytes += size_bytes
        while self._held_bytes > self._held_bytes_max:
            _, oldest = self._held.popitem(last=False)
            self._held_bytes -= _held_bytes(oldest)


def _held_bytes(part: SpilloverManifest) -> int:
    return ROW_BYTES * len(part.segments) + PART_BYTES


def _require_order(part: SpilloverManifest, name: SpilloverName, before: SpilloverName | None) -> None:
    """Check that *part* names *before* as the part before it, if that is known."""
    if before is not None and part.previous != before:
        raise CorruptDataError(
            f"the spillover manifest of {part.partition} from offset {name.base_offset} names another "
            f"predecessor than the one in the bucket, from offset {before.base_offset}",
            offset=before.base_offset,
            hint="The predecessor that it names is missing from the bucket",
        )
