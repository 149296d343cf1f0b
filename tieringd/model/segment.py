"""
Segments: a broker's `.log` file with its side files, and its stored copy.

`last_offset` is inclusive, `next_offset` exclusive. A segment's last offset is the next segment's base minus
one, not the last offset found inside: compaction and control records leave holes that are not gaps.

A `Rewriting` is a job's record of the segments that it rewrote, and of the segments that they were made of.
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
"""No checksum was recorded: the segment was stored before the manifest had a field for it."""

JOB_PREFIX: Final = "spark-"
"""Prefix of the writer id of a job on an archive; no daemon's id has it."""
REWRITER_PREFIX: Final = "rewritten-"
"""Prefix of the writer id of a job that removes records from stored segments."""


def rewriter_of(writer_id: str) -> str:
    """Return the id under which a daemon or job stores segments made of rewritten ones."""
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

    The marker's offset and leader epoch identify it for ever: each epoch has one leader. In a log with
    another record at that offset, the transaction may have ended differently.
    """

    producer_id: int
    first_offset: int
    marker_offset: int
    leader_epoch: int
    """The epoch under which the marker was written."""


@dataclass(frozen=True, slots=True)
class LocalSegment:
    """One `.log` file of a partition as a directory scan saw it."""

    base_offset: int
    next_offset: int | None
    """The base offset of the following segment; None for the active segment."""
    size_bytes: int
    """The size from stat. The active segment's file may be preallocated and longer than its data."""
    path: str
    """The `.log` file. Side files have the same name with another suffix."""
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
    The part of a local segment that one upload takes: mostly all of a closed one.

    It is only a part in two cases. An earlier upload, or another leader that rolled elsewhere, ended
    inside the segment. Or stable records of a segment that is not eligible yet have waited long enough.
    """

    segment: LocalSegment
    base_offset: int
    """The first offset to take: the segment's own base, or where the archive goes on."""
    next_offset: int
    """
    Exclusive.

    With *is_open* only a bound: then the slice ends with the last whole batch below it, unless it
    *keeps_end*.
    """
    is_open: bool = False
    """Whether the segment goes on after the slice."""
    keeps_end: bool = False
    """Whether it ends at *next_offset* even if its last batch ends earlier: the rest was compacted away."""

    @classmethod
    def whole(cls, segment: LocalSegment) -> SegmentSlice:
        """Return all of a closed segment."""
        assert segment.next_offset is not None, "an active segment has no end"
        return cls(segment, segment.base_offset, segment.next_offset)

    @classmethod
    def between(cls, segment: LocalSegment, base_offset: int, next_offset: int) -> SegmentSlice:
        """Return the part of a closed segment that was archived separately, from *base_offset* on."""
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
    """The bytes of a local segment's file between two offsets."""

    size_bytes: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class RemoteSegment:
    """A stored segment, as its manifest describes it."""

    base_offset: int
    last_offset: int
    size_bytes: int
    crc32c: int
    """Checksum of the whole data object."""
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
    """Size of the `.log.index` sidecar object."""
    broker_timestamp_ms: int = NO_TIMESTAMP
    """Time of the broker's last append in ms since the epoch; NO_TIMESTAMP if the broker records none."""
    index_crc32c: int = NO_CRC
    """
    Checksum of the whole sidecar, and part of the object's name.

    So two uploads of the same offsets by one process have the same name only if they are the same bytes.
    NO_CRC for segments stored before version 3.
    """

    @property
    def next_offset(self) -> int:
        """Return the first offset after this segment."""
        return self.last_offset + 1

    @property
    def is_rewritten(self) -> bool:
        """
        Say whether a job removed records from it: it has fewer records than its log, on purpose.

        So a local log with more records may be trimmed all the same, and must not replace the segment.
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
    """The content of a stored segment's sidecar."""

    base_offset: int
    last_offset: int
    size_bytes: int
    crc32c: int
    """Checksum of the data object that this index describes."""
    record_count: int
    batch_count: int
    epochs: tuple[EpochStart, ...]
    """The leader epochs of the batches inside. The first one starts at the segment's base at the earliest."""
    aborted: tuple[AbortedTransaction, ...]
    """Every aborted transaction that has data in this segment, wherever its marker is."""
    entries: tuple[IndexEntry, ...]
    """Ascending by offset; the first is the segment's first batch. Empty for an empty segment."""
    broker: BrokerIndexes = BrokerIndexes()


class RewritingKind(StrEnum):
    """Which of the new segments take effect together."""

    MERGED = "merged"
    """Each by itself. They hold all records of the segments that they were made of."""
    REWRITTEN = "rewritten"
    """Each by itself."""
    COMPACTED = "compacted"
    """All together or not at all."""


@dataclass(frozen=True, slots=True)
class SegmentIdentity:
    """What the name of a stored segment says of it, without its index, which may be rebuilt."""

    base_offset: int
    last_offset: int
    size_bytes: int
    leader_epoch: int
    writer_id: str

    @classmethod
    def of(cls, segment: RemoteSegment) -> SegmentIdentity:
        """Return the identity of a segment."""
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
    """Stored segments of one partition that may replace the segments they were made of."""

    kind: RewritingKind
    replaced: tuple[SegmentIdentity, ...]
    """The replaced segments that were rewritten ones themselves."""
    stored: tuple[SegmentIdentity, ...]
    """The new segments, ascending; at least one."""

    @classmethod
    def of(
        cls, kind: RewritingKind, parts: tuple[RemoteSegment, ...], segments: tuple[RemoteSegment, ...]
    ) -> Rewriting:
        """Return the record of *segments*, which are made of *parts*."""
        return cls(
            kind,
            tuple(SegmentIdentity.of(part) for part in parts if part.is_rewritten),
            tuple(map(SegmentIdentity.of, segments)),
        )

    @property
    def writer_id(self) -> str:
        """Return the writer id of the new segments."""
        return self.stored[0].writer_id
