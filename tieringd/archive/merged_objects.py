"""
The objects of a merged segment: its parts joined, and one index beside it. No manifest is touched.

The order is data, then index; a crash after either leaves objects that nothing names. The same writer
stores the same objects when it comes again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from crc32c import crc32c

from tieringd.archive.rewriting_records import store_rewriting
from tieringd.formats.index_merge import IndexedSegment, merged_index
from tieringd.formats.object_keys import data_key, index_key
from tieringd.formats.sidecar import encode_sidecar
from tieringd.model.rewriting import Rewriting, RewritingKind
from tieringd.model.segment import rewriter_of
from tieringd.policies.merged_segment import merged_segment
from tieringd.storage.base import JoinSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieringd.archive.object_joiner import ObjectJoiner
    from tieringd.archive.segment_indexes import Indexes
    from tieringd.model.partition import TopicIdPartition
    from tieringd.model.segment import RemoteSegment, SegmentIndex
    from tieringd.storage.base import ObjectStore


@dataclass(frozen=True, slots=True)
class PreparedMerge:
    """A merged segment whose objects are stored, and which no manifest names yet."""

    parts: tuple[RemoteSegment, ...]
    segment: RemoteSegment
    host_bytes: int
    """Of its data, how much came through this host."""


async def index_of_parts(
    indexes: Indexes, partition: TopicIdPartition, parts: Sequence[RemoteSegment]
) -> SegmentIndex:
    """
    Return the index of what *parts* make.

    Raises:
        ObjectNotFound: The index of one is gone.
        CorruptDataError: One is damaged, or they do not follow each other.
    """
    return merged_index([IndexedSegment(part, await indexes.index_of(partition, part)) for part in parts])


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
    Store the objects of what *parts*, whose common index is *index*, become.

    What is made of rewritten segments is marked like them, and a record says that it is stored whole. Without
    *is_recorded* that is left to whoever swaps it in, which may be hours later.

    Raises:
        ObjectNotFound: The data of a part is gone.
        ChecksumRejected: A part has other bytes than the manifest says.
        RetryableError: The store or the work directory is in the way.
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
