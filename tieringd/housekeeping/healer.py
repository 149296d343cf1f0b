"""
Repairs the faults that a scrub found, where the right bytes still exist.

The healer searches the bucket's quarantine, this broker's own log and, for an index, the data object. A
spillover manifest is only looked for in quarantine. It
stores only bytes with exactly the size and CRC32C that the manifest names, under the key that the
manifest names: any other process that repairs the object stores the same bytes, so there are no races.
Should the segment leave the manifest meanwhile, an object is left that no manifest names.

`local_bytes` finds the bytes of a stored segment in the local log, and verifies them by size and CRC32C.
A stored segment is a local one, a part of one, or several that were merged. A compacted local log has
other bytes, and cannot be used. The function blocks; services call it in a thread.

`IndexRebuilder` rebuilds a lost index. An unchanged local log gives the same index, with the broker's own
side files in it. The data object gives an index without these files; a broker builds them when it finds
none. Such an index has other bytes, so it needs another name and a commit: that is an `IndexChange`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import structlog
from crc32c import crc32c
from crc32c import crc32c as crc32c_of

from tieringd.archive.archive_reader import ArchiveReader
from tieringd.archive.manifest_store import ManifestStore, StoredManifest
from tieringd.archive.object_joiner import ObjectJoiner
from tieringd.archive.scrub.data_scan import DataIndexer, is_index_of, renamed_by
from tieringd.archive.segment_swap import store_rewriting
from tieringd.archive.spillover_manifests import SpilloverManifests
from tieringd.archiving.claim import Claim, ManifestChange
from tieringd.archiving.segment_copier import local_index
from tieringd.broker.layout import Layout
from tieringd.broker.segment_file import OpenSegment, position_of
from tieringd.errors import ChecksumRejected, CorruptDataError, LocalFileError, ObjectNotFound
from tieringd.formats.object_keys import data_key, index_key, parse_spillover_key, spillover_key
from tieringd.formats.sidecar import encode_sidecar
from tieringd.housekeeping.bucket_quarantine import ObjectQuarantine
from tieringd.model.corrections import reindexed
from tieringd.model.local_log import LocalLog
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import NO_CRC, RemoteSegment, Rewriting, RewritingKind, SegmentSlice
from tieringd.policies.scrub import DATA_FAULTS, INDEX_FAULTS, SPILLOVER_FAULTS, FaultKind, Finding
from tieringd.storage.base import FileSlice, JoinSource, ObjectStore
from tieringd.storage.threads import in_thread

log = structlog.get_logger(__name__)

_PIECE_BYTES = 8 << 20

FROM_MANIFEST = "from what the manifest says"
FROM_QUARANTINE = "from its copy in quarantine"
FROM_LOG = "from this broker's log"
FROM_DATA = "from its data object"
UNDER_NEW_NAME = "from its data object, under a new name"


@dataclass(frozen=True, slots=True)
class _Range:
    """A part of an open file."""

    file: OpenSegment
    position: int
    size_bytes: int


@contextmanager
def local_bytes(
    layout: Layout, log: LocalLog, segment: RemoteSegment, *, work_directory: Path
) -> Iterator[FileSlice | None]:
    """
    Give the bytes of *segment* from the local log, as long as the context lasts.

    None where the log does not have these offsets, or has other bytes there. Bytes of several files are
    joined in an unlinked file in *work_directory*.

    Raises:
        LocalFileError: A file cannot be read, or changed meanwhile.
        CorruptDataError: A file does not have the format of a log segment.
    """
    with ExitStack() as files:
        ranges = _ranges(layout, log, segment, files)
        if sum(one.size_bytes for one in ranges) != segment.size_bytes:
            yield None
            return
        if len(ranges) == 1:
            (only,) = ranges
            checksum = only.file.crc32c(only.position, only.size_bytes)
            found = FileSlice(only.file.fd, only.position, only.size_bytes)
        else:
            joined = files.enter_context(_temporary(work_directory))
            checksum = _joined(ranges, joined, work_directory)
            found = FileSlice(joined.fileno(), 0, segment.size_bytes)
        for one in ranges:
            one.file.require_unchanged()
        yield found if checksum == segment.crc32c else None


def _ranges(layout: Layout, log: LocalLog, segment: RemoteSegment, files: ExitStack) -> list[_Range]:
    """Return where the files have the offsets of *segment*, with at most as many bytes."""
    ranges: list[_Range] = []
    left, offset = segment.size_bytes, segment.base_offset
    for local in log.segments:
        is_after = local.next_offset is not None and local.next_offset <= offset
        if is_after or not left or local.base_offset >= segment.next_offset:
            continue
        if local.base_offset > offset:
            break
        file = layout.open(local)
        files.callback(file.close)
        position = 0
        if local.base_offset < offset:
            position = position_of(file.fd, file.segment, offset)
        size_bytes = min(left, file.segment.size_bytes - position)
        ranges.append(_Range(file, position, size_bytes))
        left -= size_bytes
        offset = segment.next_offset if local.next_offset is None else local.next_offset
    return ranges


def _joined(ranges: list[_Range], target: IO[bytes], work_directory: Path) -> int:
    checksum = 0
    for one in ranges:
        position, end = one.position, one.position + one.size_bytes
        while position < end:
            piece = one.file.read_at(position, min(_PIECE_BYTES, end - position))
            checksum = crc32c_of(piece, checksum)
            with _naming(work_directory):
                target.write(piece)
            position += len(piece)
    with _naming(work_directory):
        target.flush()
    return checksum


@contextmanager
def _temporary(work_directory: Path) -> Iterator[IO[bytes]]:
    with _naming(work_directory):
        file = tempfile.TemporaryFile(dir=work_directory)  # noqa: SIM115 - closed below
    try:
        yield file
    finally:
        file.close()


@contextmanager
def _naming(work_directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LocalFileError(
            f"segments cannot be assembled in the directory {work_directory}: {error.strerror or error}",
            path=str(work_directory),
            hint="Free some space there, or set state_directory to a disk with more space",
        ) from error


@dataclass(frozen=True, slots=True)
class IndexChange:
    """A segment stored again under a new name, with a rebuilt index; see `ManifestChange`."""

    old: RemoteSegment
    new: RemoteSegment
    now_ms: Callable[[], int]

    async def commit(self, claim: Claim, stored: StoredManifest) -> StoredManifest:
        """
        Name the new objects instead of the old ones, where these are still named.

        Raises:
            FencedError: Another writer owns the manifest now.
            StorageUnavailable: The claim reads the manifest again; then this may be called again.
        """
        manifest = stored.existing
        if manifest.segments.covering(self.old.base_offset) != self.old:
            return stored
        committed = await claim.commit(stored, reindexed(manifest, self.old, self.new, now_ms=self.now_ms()))
        log.info(
            "segment has a new index",
            topic=manifest.partition.topic,
            partition=manifest.partition.partition,
            base_offset=self.old.base_offset,
        )
        return committed


class IndexRebuilder(DataIndexer):
    """Rebuild indexes of segments, from the data or from the local log. Reads only; stateless."""

    def __init__(
        self, store: ObjectStore, reader: ArchiveReader, spillovers: SpilloverManifests, *, layout: Layout
    ) -> None:
        super().__init__(store, reader, spillovers)
        self._layout = layout

    async def from_log(
        self, partition: TopicIdPartition, segment: RemoteSegment, log: LocalLog
    ) -> bytes | None:
        """Return the segment's index from the local log, if that gives the same bytes; None otherwise."""
        part = _slice_of(segment, log)
        if part is None:
            return None
        try:
            index = await in_thread(local_index, self._layout, partition, log, part)
        except (LocalFileError, CorruptDataError):
            return None  # The log is truncated or changed, so only the data object is left as a source.
        sidecar = encode_sidecar(index) if index else b""
        return sidecar if is_index_of(sidecar, segment, partition) else None


def _slice_of(segment: RemoteSegment, log: LocalLog) -> SegmentSlice | None:
    """Return the part of a local segment that *segment* was copied from; None where there is none."""
    for local in log.segments:
        ends_after = local.next_offset is None or local.next_offset >= segment.next_offset
        if local.base_offset <= segment.base_offset and ends_after:
            return SegmentSlice.between(local, segment.base_offset, segment.next_offset)
    return None


class Healer:
    """
    Repair segments and spillover manifests of one bucket.

    *offer* hands a change of a manifest to the archiver that owns it. Without it, faults whose repair
    changes the manifest are not repaired.
    """

    def __init__(
        self,
        store: ObjectStore,
        manifests: ManifestStore,
        reader: ArchiveReader,
        quarantine: ObjectQuarantine,
        *,
        layout: Layout,
        local_log: Callable[[TopicIdPartition], LocalLog | None],
        work_directory: Path,
        now_ms: Callable[[], int],
        offer: Callable[[TopicIdPartition, ManifestChange], Awaitable[None]] | None = None,
    ) -> None:
        self._store = store
        self._manifests = manifests
        self._quarantine = quarantine
        self._rebuilder = IndexRebuilder(store, reader, manifests.spillovers, layout=layout)
        self._joiner = ObjectJoiner(store, work_directory=work_directory)
        self._layout = layout
        self._local_log = local_log
        self._work_directory = work_directory
        self._now_ms = now_ms
        self._offer = offer

    async def heal(self, finding: Finding) -> str:
        """
        Repair the fault of *finding*; return how, in words, or "" where that was not possible.

        Raises:
            StorageUnavailable: The store does not answer; trying again is safe.
        """
        partition, segment = finding.partition, finding.segment
        how = ""
        if partition is not None and segment is not None:
            if finding.kind in DATA_FAULTS:
                how = await self._heal_data(partition, segment)
            elif finding.kind in INDEX_FAULTS:
                how = await self._heal_index(partition, segment)
            elif finding.kind is FaultKind.REWRITING_MISSING:
                how = await self._heal_record(partition, segment)
        elif partition is not None and finding.kind in SPILLOVER_FAULTS:
            how = await self._heal_spillover(partition, finding.key)
        if how:
            log.warning("archived object mended", key=finding.key, fault=finding.detail, how=how)
        return how

    async def _heal_data(self, partition: TopicIdPartition, segment: RemoteSegment) -> str:
        key = data_key(partition, segment)
        if await self._copied_back(key, size_bytes=segment.size_bytes, crc32c=segment.crc32c):
            return FROM_QUARANTINE
        local = self._local_log(partition)
        if local is not None and await self._put_from(local, key, segment):
            return FROM_LOG
        return ""

    async def _heal_record(self, partition: TopicIdPartition, segment: RemoteSegment) -> str:
        """
        Store a record that names the segment alone.

        What it was made of is not known any more. If it has left the manifest meanwhile, the record of what
        took its place says that this was made of it.
        """
        rewriting = Rewriting.of(RewritingKind.REWRITTEN, (), (segment,))
        await store_rewriting(self._store, partition, rewriting)
        return FROM_MANIFEST

    async def _heal_spillover(self, partition: TopicIdPartition, key: str) -> str:
        """
        Take a spillover manifest from quarantine: its name has the checksum of its bytes.

        Only that manifest names the one before it, so the search covers that one as well.
        """
        name = parse_spillover_key(partition, key)
        if name is None or not await self._copied_back(key, size_bytes=None, crc32c=name.crc32c):
            return ""
        manifest = (await self._manifests.load(partition)).manifest
        spillover = manifest.spillover if manifest else None
        while spillover is not None and name.base_offset > spillover.begin_offset:
            previous = (await self._manifests.spillovers.load(partition, name)).previous
            if previous is None:
                break
            name, key = previous, spillover_key(partition, previous)
            try:
                await self._store.head(key)
            except ObjectNotFound:
                if not await self._copied_back(key, size_bytes=None, crc32c=name.crc32c):
                    break
            else:
                break
        return FROM_QUARANTINE

    async def _copied_back(self, key: str, *, size_bytes: int | None, crc32c: int) -> bool:
        if crc32c == NO_CRC:
            return False
        try:
            return await self._quarantine.copy_back(key, size_bytes=size_bytes, crc32c=crc32c)
        except (ChecksumRejected, CorruptDataError) as error:
            log.warning("the copy in quarantine is damaged", key=key, error=str(error))
            return False

    async def _put_from(self, local: LocalLog, key: str, segment: RemoteSegment) -> bool:
        """Store the data again from the local log, if that has the same bytes; say so."""
        bytes_of = local_bytes(self._layout, local, segment, work_directory=self._work_directory)
        with_files = ExitStack()
        try:
            found = await in_thread(with_files.enter_context, bytes_of)
            if found is None:
                return False
            await self._store.put(key, found if found.size_bytes else b"", crc32c=segment.crc32c)
        except (LocalFileError, CorruptDataError, ChecksumRejected) as error:
            log.info("the local log does not have an archived segment's bytes", key=key, reason=str(error))
            return False
        finally:
            await in_thread(with_files.close)
        return True

    async def _heal_index(self, partition: TopicIdPartition, segment: RemoteSegment) -> str:
        key = index_key(partition, segment)
        if await self._copied_back(key, size_bytes=segment.index_size_bytes, crc32c=segment.index_crc32c):
            return FROM_QUARANTINE
        local = self._local_log(partition)
        sidecar = await self._rebuilder.from_log(partition, segment, local) if local else None
        if sidecar is not None:
            await self._store.put(key, sidecar, crc32c=crc32c(sidecar))
            return FROM_LOG
        manifest = (await self._manifests.load(partition)).manifest
        sidecar = await self._rebuilder.from_data(manifest, segment) if manifest else None
        if sidecar is None:
            return ""
        if is_index_of(sidecar, segment, partition):
            await self._store.put(key, sidecar, crc32c=crc32c(sidecar))
            return FROM_DATA
        return UNDER_NEW_NAME if await self._renamed(partition, segment, sidecar) else ""

    async def _renamed(self, partition: TopicIdPartition, segment: RemoteSegment, sidecar: bytes) -> bool:
        """
        Store data and index under the names that the rebuilt index gives them, and have them committed.

        Returns whether the manifest names them now.
        """
        if self._offer is None:
            return False
        new = renamed_by(segment, sidecar)
        source = JoinSource(data_key(partition, segment), segment.size_bytes, segment.crc32c)
        try:
            await self._joiner.join(data_key(partition, new), [source], crc32c=segment.crc32c)
        except (ObjectNotFound, ChecksumRejected) as error:
            log.info("an index cannot be made anew: its data is gone", key=source.key, reason=str(error))
            return False
        await self._store.put(index_key(partition, new), sidecar, crc32c=crc32c(sidecar))
        await self._offer(partition, IndexChange(segment, new, self._now_ms))
        manifest = (await self._manifests.load(partition)).manifest
        return manifest is not None and manifest.segments.covering(new.base_offset) == new
