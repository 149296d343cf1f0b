"""
Segments: a broker's `.log` file with its side files, and its stored copy.

`last_offset` is inclusive, `next_offset` exclusive. A segment's last offset is the next
segment's base minus one, not the last offset found inside: compaction and control records
leave holes that are not gaps.

A `Rewriting` is what a job says of the segments that it rewrote: which they are, and what they were made
of.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

EpochStart: TypeAlias = tuple[int, int]
"""(leader epoch, first offset written under it); a history ascends in both."""

NO_TIMESTAMP = -1
"""Kafka's "no timestamp": a batch without records or from a client that sent none."""


NO_CRC = -1
"""No checksum was noted: what was stored before there was room for one."""

JOB_PREFIX: Final = "spark-"
"""What the id of a writer begins with that is a job on an archive, and no daemon."""
REWRITER_PREFIX: Final = "rewritten-"
"""What the id of a writer begins with of a job that takes records out of stored segments."""


def rewriter_of(writer_id: str) -> str:
    """Return the id under which a daemon or job stores what it makes of rewritten segments."""
    return f"{REWRITER_PREFIX}{writer_id.removeprefix(JOB_PREFIX)}"


@dataclass(frozen=True, slots=True)
class AbortedTransaction:
    """An aborted transaction's data: *producer_id*'s records from first to last offset, inclusive."""

    producer_id: int
    first_offset: int
    last_offset: int
    """The offset of the abort marker."""


@dataclass(frozen=True, slots=True)
class CrossingTransaction:
    """
    A transaction with records below some offset, and its marker there or later.

    The marker's offset and leader epoch name it for ever: each epoch has one leader. A log that
    has another record at that offset may have ended the transaction otherwise.
    """

    producer_id: int
    first_offset: int
    marker_offset: int
    leader_epoch: int
    """Under which the marker was written."""


@dataclass(frozen=True, slots=True)
class LocalSegment:
    """One `.log` file of a partition as a directory scan saw it."""

    base_offset: int
    next_offset: int | None
    """The base offset of the following segment; None for the active segment."""
    size_bytes: int
    """What stat says. The active segment's may be preallocated and longer than its data."""
    path: str
    """The `.log` file; side files share its name up to the suffix."""
    inode: int
    modified_ns: int

    @property
    def is_active(self) -> bool:
        """Say whether the broker still appends to this segment."""
        return self.next_offset is None

    @property
    def identity(self) -> tuple[int, int, int]:
        """Return a value that changes when the bytes may have changed (inode, size, mtime)."""
        return (self.inode, self.size_bytes, self.modified_ns)


@dataclass(frozen=True, slots=True)
class SegmentSlice:
    """
    What one upload takes of a local segment: mostly all of a closed one.

    It is a part where an earlier upload, or another leader that rolled elsewhere, ended inside the
    segment, and where stable records of a segment that is not eligible yet have waited long enough.
    """

    segment: LocalSegment
    base_offset: int
    """The first offset to take: the segment's own base, or where the archive goes on."""
    next_offset: int
    """Exclusive. A bound only where *is_open*: then the slice ends with the last whole batch below it,
    unless it *keeps_end*."""
    is_open: bool = False
    """Whether the segment goes on after the slice."""
    keeps_end: bool = False
    """Whether it ends at *next_offset* wherever its last batch does: what followed was compacted away."""

    @classmethod
    def whole(cls, segment: LocalSegment) -> SegmentSlice:
        """Return all of a closed segment."""
        assert segment.next_offset is not None, "an active segment has no end"
        return cls(segment, segment.base_offset, segment.next_offset)

    @classmethod
    def between(cls, segment: LocalSegment, base_offset: int, next_offset: int) -> SegmentSlice:
        """Return the part of a closed segment that was archived by itself, from *base_offset* on."""
        is_open = next_offset != segment.next_offset
        return cls(segment, base_offset, next_offset, is_open=is_open, keeps_end=True)

    @property
    def is_whole(self) -> bool:
        """Say whether this is all of a closed segment."""
        return (self.base_offset, self.next_offset, self.is_open) == (
            self.segment.base_offset,
            self.segment.next_offset,
            False,
        )


@dataclass(frozen=True, slots=True)
class FilePart:
    """What a local segment's file has between two offsets."""

    size_bytes: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class RemoteSegment:
    """A stored segment, as its manifest knows it."""

    base_offset: int
    last_offset: int
    size_bytes: int
    crc32c: int
    """Of the whole data object."""
    base_timestamp_ms: int
    """The smallest batch base timestamp, or NO_TIMESTAMP."""
    max_timestamp_ms: int
    """The largest batch maximum timestamp, or NO_TIMESTAMP."""
    leader_epoch: int
    """The epoch under which the writer uploaded it (part of the object's name)."""
    writer_id: str
    """The daemon process that uploaded it (part of the object's name)."""
    uploaded_at_ms: int
    index_size_bytes: int
    """Of the `.log.index` sidecar object."""
    broker_timestamp_ms: int = NO_TIMESTAMP
    """When the broker took the newest of its records, where the broker notes that, or NO_TIMESTAMP."""
    index_crc32c: int = NO_CRC
    """
    Of the whole sidecar, and part of the object's name: two uploads of the same offsets by one process
    have the same name only where they are the same bytes. NO_CRC for what was stored before version 3.
    """

    @property
    def next_offset(self) -> int:
        """Return the first offset after this segment."""
        return self.last_offset + 1

    @property
    def is_rewritten(self) -> bool:
        """
        Say whether a job took records out of it: it has less than the log that it came from, on purpose.

        So a local log that has more is no reason not to be trimmed, and must not take its place.
        """
        return self.writer_id.startswith(REWRITER_PREFIX)


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A point of the sparse index: the batch at byte *position* starts at *offset*."""

    offset: int
    position: int
    max_timestamp_ms: int
    """The largest timestamp in batches before this entry's position plus this batch."""


@dataclass(frozen=True, slots=True)
class BrokerIndexes:
    """The broker's own side files of a segment, byte for byte; None where there was no file."""

    offset_index: bytes | None = None
    time_index: bytes | None = None
    transaction_index: bytes | None = None
    producer_snapshot: bytes | None = None
    """`<next base>.snapshot`: the producer state at the end of the segment."""


@dataclass(frozen=True, slots=True)
class SegmentIndex:
    """What the sidecar of a stored segment holds."""

    base_offset: int
    last_offset: int
    size_bytes: int
    crc32c: int
    """Of the data object this index describes."""
    record_count: int
    batch_count: int
    epochs: tuple[EpochStart, ...]
    """The leader epochs of the batches inside, the first clipped to the segment's base."""
    aborted: tuple[AbortedTransaction, ...]
    """Every aborted transaction that has data in this segment, wherever its marker is."""
    entries: tuple[IndexEntry, ...]
    """Ascending by offset; the first is the segment's first batch. Empty for an empty segment."""
    broker: BrokerIndexes = BrokerIndexes()


class RewritingKind(StrEnum):
    """Which of the new segments count together."""

    MERGED = "merged"
    """Each for itself; they hold all records of what they were made of."""
    REWRITTEN = "rewritten"
    """Each for itself."""
    COMPACTED = "compacted"
    """All together or not at all."""


@dataclass(frozen=True, slots=True)
class SegmentIdentity:
    """What the name of a stored segment says of it, but for its index, which may be made again."""

    base_offset: int
    last_offset: int
    size_bytes: int
    leader_epoch: int
    writer_id: str

    @classmethod
    def of(cls, segment: RemoteSegment) -> SegmentIdentity:
        """Return that of a segment."""
        return cls(
            segment.base_offset,
            segment.last_offset,
            segment.size_bytes,
            segment.leader_epoch,
            segment.writer_id,
        )

    def overlaps(self, other: SegmentIdentity) -> bool:
        """Say whether both have offsets in common."""
        return self.base_offset <= other.last_offset and other.base_offset <= self.last_offset


@dataclass(frozen=True, slots=True)
class Rewriting:
    """Segments of one partition that are all stored, and may take the places of what they were made of."""

    kind: RewritingKind
    replaced: tuple[SegmentIdentity, ...]
    """Of what they were made of, those that were rewritten themselves."""
    stored: tuple[SegmentIdentity, ...]
    """Ascending; at least one."""

    @classmethod
    def of(
        cls, kind: RewritingKind, parts: tuple[RemoteSegment, ...], segments: tuple[RemoteSegment, ...]
    ) -> Rewriting:
        """Return that of *segments*, which are made of *parts*."""
        return cls(
            kind,
            tuple(SegmentIdentity.of(part) for part in parts if part.is_rewritten),
            tuple(map(SegmentIdentity.of, segments)),
        )

    @property
    def writer_id(self) -> str:
        """Return whoever stored them."""
        return self.stored[0].writer_id
