"""
Join several objects of a bucket into one: with the store's own join where it has one, else through a file.

No manifest names the object before its size and checksum were checked against those of its parts put
together. If the store cannot report the checksum of the joined object, the object is read back once.

Memory is bounded by one piece. If the bytes have to pass through this host, they wait in an unnamed temporary
file in the daemon's work directory, never in the broker's. A killed process leaves nothing of it behind.

`store_merged` stores the objects of a merged segment: its joined parts, and one index beside them. It
touches no manifest. The order is data, then index. A crash after either leaves objects that no manifest
names. If the same writer repeats the merge, it stores the same objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from crc32c import crc32c
from crc32c import crc32c as crc32c_of

from tieringd.archive.archive_reader import Indexes
from tieringd.archive.segment_swap import store_rewriting
from tieringd.errors import ChecksumRejected, CorruptDataError
from tieringd.formats.index_merge import IndexedSegment, merged_index
from tieringd.formats.object_keys import data_key, index_key
from tieringd.formats.sidecar import encode_sidecar
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import RemoteSegment, Rewriting, RewritingKind, SegmentIndex, rewriter_of
from tieringd.policies.segment_merge import merged_segment
from tieringd.storage.base import JoiningStore, JoinSource, ObjectStore
from tieringd.storage.threads import in_thread
from tieringd.storage.work_file import work_file

PIECE_BYTES = 8 << 20
"""How many bytes one request reads when the bytes pass through this host."""


class ObjectJoiner:
    """
    Join objects of one bucket.

    Cancelling a join is safe, and so is repeating it: the object is stored whole or not at all.
    """

    def __init__(self, store: ObjectStore, *, work_directory: Path) -> None:
        self._store = store
        self._directory = work_directory

    async def join(self, key: str, sources: Sequence[JoinSource], *, crc32c: int) -> int:
        """
        Store *sources*, one after the other, as the object *key*.

        Returns:
            The bytes that passed through this host.

        Raises:
            ObjectNotFound: A source was deleted.
            ChecksumRejected: The joined bytes have another size or checksum than announced.
            LocalFileError: The work directory cannot take the bytes.
        """
        filled = [source for source in sources if source.size_bytes]
        if not filled:
            await self._store.put(key, b"", crc32c=crc32c)
            return 0
        size_bytes = sum(source.size_bytes for source in filled)
        joined = None
        if isinstance(self._store, JoiningStore):
            joined = await self._store.join(key, filled, crc32c=crc32c)
        if joined is None:
            host_bytes = await self._stream(key, filled, crc32c=crc32c)
            is_proven = True
        else:
            host_bytes, is_proven = joined.host_bytes, joined.is_proven
        if not is_proven:
            host_bytes += await self._read_back(key, size_bytes, crc32c)
        await self._require(key, size_bytes, crc32c)
        return host_bytes

    async def _stream(self, key: str, sources: Sequence[JoinSource], *, crc32c: int) -> int:
        """Copy the sources into a temporary file, and upload the file. Return its size."""
        async with work_file(
            self._directory,
            f"segments cannot be merged in the directory {self._directory}",
            hint="Free some space there, or set state_directory to a disk with more space",
        ) as file:
            for source in sources:
                begin = file.size_bytes
                while file.size_bytes < begin + source.size_bytes:
                    await file.append(await self._piece(source, file.size_bytes - begin))
            if file.crc32c != crc32c:
                raise ChecksumRejected(
                    f"join {key}: the checksum of the sources is not the expected one", key=key
                )
            await self._store.put(key, await file.body(), crc32c=crc32c)
        return file.size_bytes

    async def _piece(self, source: JoinSource, position: int) -> bytes:
        left = source.size_bytes - position
        piece = await self._store.get_range(source.key, position=position, size_bytes=min(PIECE_BYTES, left))
        if not piece:
            raise ChecksumRejected(
                f"{source.key} ends after {position} bytes, before its expected end", key=source.key
            )
        return piece

    async def _read_back(self, key: str, size_bytes: int, crc32c: int) -> int:
        """Read the joined object and compare its size and checksum. Return the bytes read."""
        checksum = position = 0
        while piece := await self._store.get_range(key, position=position, size_bytes=PIECE_BYTES):
            checksum = await in_thread(crc32c_of, piece, checksum)
            position += len(piece)
        if (position, checksum) != (size_bytes, crc32c):
            raise ChecksumRejected(f"{key} was joined, but its bytes are not those of its sources", key=key)
        return position

    async def _require(self, key: str, size_bytes: int, crc32c: int) -> None:
        """
        Ask the store for the size and checksum of the object, and check them.

        A wrong object is not deleted: nothing names it, and the fault may be in the name.
        """
        info = await self._store.head(key)
        if info.size_bytes != size_bytes or info.crc32c not in {None, crc32c}:
            raise ChecksumRejected(
                f"{key} was joined, but it has {info.size_bytes} bytes instead of {size_bytes}, or another "
                "checksum",
                key=key,
            )


@dataclass(frozen=True, slots=True)
class PreparedMerge:
    """A merged segment whose objects are stored, and that no manifest names yet."""

    parts: tuple[RemoteSegment, ...]
    segment: RemoteSegment
    host_bytes: int
    """How many bytes of its data passed through this host."""


async def index_of_parts(
    indexes: Indexes, partition: TopicIdPartition, parts: Sequence[RemoteSegment]
) -> SegmentIndex:
    """
    Return the index of the segment that *parts* merge into.

    Raises:
        ObjectNotFound: The index of a part was deleted.
        CorruptDataError: An index is damaged, the parts do not follow each other, or the marker of an aborted
            transaction is missing.
    """
    found = [IndexedSegment(part, await indexes.index_of(partition, part)) for part in parts]
    _require_markers([one.index for one in found])
    return merged_index(found)


def _require_markers(indexes: Sequence[SegmentIndex]) -> None:
    """
    Check that each segment lists the transactions whose abort markers it should have.

    A broker's cleaner may drop a marker before its segment is archived. A client of the merged segment would
    meet no marker, and would take the producer's next records for aborted.
    """
    has_marker = {
        (one.producer_id, one.last_offset)
        for index in indexes
        for one in index.aborted
        if index.base_offset <= one.last_offset <= index.last_offset
    }
    for one in (one for index in indexes for one in index.aborted):
        is_inside = one.last_offset <= indexes[-1].last_offset
        if is_inside and (one.producer_id, one.last_offset) not in has_marker:
            raise CorruptDataError(
                f"the segment with offset {one.last_offset} lacks the marker of producer "
                f"{one.producer_id}'s aborted transaction from offset {one.first_offset}",
                offset=one.last_offset,
            )


async def store_merged(
    store: ObjectStore,
    joiner: ObjectJoiner,
    partition: TopicIdPartition,
    parts: tuple[RemoteSegment, ...],
    index: SegmentIndex,
    *,
    leader_epoch: int,
    writer_id: str,
    is_recorded: bool = True,
) -> PreparedMerge:
    """
    Store the objects of the segment that *parts* merge into. Their common index is *index*.

    A segment made of rewritten ones is marked as rewritten, and a record says that it is stored whole.
    Without *is_recorded* the job that swaps it in writes the record, which may be hours later.

    Raises:
        ObjectNotFound: The data of a part was deleted.
        ChecksumRejected: A part has other bytes than the manifest says.
        RetryableError: The store or the work directory is temporarily unavailable.
    """
    is_rewritten = any(part.is_rewritten for part in parts)
    sidecar = encode_sidecar(index)
    sidecar_crc32c = crc32c(sidecar)
    segment = merged_segment(
        parts,
        index,
        sidecar_bytes=len(sidecar),
        sidecar_crc32c=sidecar_crc32c,
        leader_epoch=leader_epoch,
        writer_id=rewriter_of(writer_id) if is_rewritten else writer_id,
    )
    sources = [JoinSource(data_key(partition, part), part.size_bytes, part.crc32c) for part in parts]
    host_bytes = await joiner.join(data_key(partition, segment), sources, crc32c=segment.crc32c)
    await store.put(index_key(partition, segment), sidecar, crc32c=sidecar_crc32c)
    if is_rewritten and is_recorded:
        rewriting = Rewriting.of(RewritingKind.MERGED, parts, (segment,))
        await store_rewriting(store, partition, rewriting)
    return PreparedMerge(parts, segment, host_bytes)
