"""
Which local segments replace archived ones, after the broker has compacted them.

A closed segment is archived as it was when it closed. Compaction later replaces it by a smaller file, or
several files by one. This policy aligns local and archived segments in the shortest runs that begin and
end together. A run that is smaller on disk replaces its archived segments: then reading the archive gives
what the broker would give.

Where the local log is trimmed, a run that only differs in its bytes is uploaded as well. A cleaner may
rewrite batches without saving a byte, and each broker's does so in its own way. A trim takes only bytes
that match the archive.

Bounds are compared, and not the offsets found inside: compaction leaves holes that are no gaps. Nothing
is replaced over a recorded gap, past the last stable offset, or where the broker is deleting. Segments
that a job has rewritten are not replaced: an erased record would come back with the file. Where a file
covers such segments and others, and the log is trimmed, the others may be replaced piece by piece; the
file would stay for ever otherwise. Spilled segments are skipped; the archiver takes back those that the
local log still holds.

A tombstone, or the marker of a transaction that may have begun before the run, may be dropped only where
all that the archive has before it matches the log: see `Tombstones`, and `policies.record_removal` for the
rule.

This policy decides nothing about trimming. A segment whose file does not match the archive is never
trimmed, before and after a reupload.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from typing import TypeAlias

from tieringd.model.local_log import LocalLog
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import LogBounds
from tieringd.model.segment import FilePart, LocalSegment, RemoteSegment
from tieringd.policies.record_removal import may_drop_tombstones
from tieringd.policies.retention_time import retention_time_ms

RUN_SEGMENTS_MAX = 64
"""
Local segments in one run. Where brokers cut their logs so differently that a run is longer, it is not worth
one commit.
"""
_NS_PER_MS = 1_000_000

ACTIVE = "the broker still appends to the segment"
UNSTABLE = "the segment ends past the last stable offset"
LEAVING = "the log begins inside or after the segment"
BEFORE_START = "a user deleted all records of the segment from the archive"
SPILLED = (
    "its archived offsets are in a spillover manifest; the archiver takes them back into the manifest first"
)
NOT_COVERED = "the archive does not have all offsets of the segment"
NOT_ALIGNED = "archived segments begin or end inside the segment"
AS_LARGE = "the archive has the same number of bytes: compaction has not changed the segment since the upload"
LARGER = "the archive has fewer bytes: another broker had already compacted the segment further"
"""This reason does not apply where the log is trimmed."""
REWRITTEN = "a job removed records from the archived segment, and the local file may still have them"
NOT_TOUCHED = "the file has not changed since it was uploaded"
PART_IS_MISSING = "the file is only as large as the first archived segments: the rest may be missing on disk"
BEHIND = "closed segments still wait for upload, and one of them may be the reason for this compaction"
FAILED = "an earlier attempt could not read the file"


RunIdentity: TypeAlias = tuple[tuple[int, int, int], ...]
"""The identities of a run's files; it changes when the bytes may have changed."""


class Tombstones(Enum):
    """A choice for tombstones and markers that are in the archive, and not in the cleaned run any more."""

    GO = "go"
    """
    They are dropped: all readable offsets before the run match the log, so no older record of a key is left,
    and no record of the transaction.
    """
    WAIT = "wait"
    """They will go, once earlier runs of the same plan are replaced."""
    STAY = "stay"
    """They stay: the archive may have older records that they hide, or records of the transaction."""


@dataclass(frozen=True, slots=True)
class Reupload:
    """Local segments, and the archived segments that they, or parts of them, replace."""

    segments: tuple[LocalSegment, ...]
    replaced: tuple[RemoteSegment, ...]
    tombstones: Tombstones = field(default=Tombstones.STAY, compare=False)

    @property
    def base_offset(self) -> int:
        """Return the first offset that is replaced."""
        return self.replaced[0].base_offset

    @property
    def next_offset(self) -> int:
        """Return the first offset after the replaced segments."""
        return self.replaced[-1].next_offset

    @property
    def archived_bytes(self) -> int:
        """Return the size of the replaced segments, in bytes."""
        return sum(one.size_bytes for one in self.replaced)

    @property
    def identity(self) -> RunIdentity:
        """Return the identities that distinguish these local bytes from others."""
        return tuple(one.identity for one in self.segments)


@dataclass(frozen=True, slots=True)
class SkippedSegment:
    """A local segment that replaces nothing, and why."""

    base_offset: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReuploadPlan:
    """What to upload again, oldest first, and what not."""

    reuploads: tuple[Reupload, ...]
    passed: tuple[SkippedSegment, ...]
    beside_rewritten: tuple[Reupload, ...] = ()
    """
    Files that replace nothing as a whole, because part of what they cover was rewritten. Reading them shows
    which parts may replace archived segments; see `parts_to_go`.
    """


def plan_reuploads(
    log: LocalLog,
    manifest: PartitionManifest,
    bounds: LogBounds,
    *,
    is_trimmed: bool = False,
    failed: Collection[RunIdentity] = (),
    differing: Collection[RunIdentity] = (),
) -> ReuploadPlan:
    """
    Compare the local log of a compacted topic with its archive.

    *is_trimmed* says whether tieringd trims that log. *failed* are the runs that could not be read in
    their current form. *differing* are those known to have as many bytes as the archive, but other ones.
    Where the layout stores other bytes than its files have, as for Redpanda, sizes cannot be compared: a
    run then counts as smaller once one of its files is newer than its upload, and only reading it shows
    whether it is.
    """
    closed_end = max((one.next_offset for one in log.segments if one.next_offset is not None), default=0)
    if closed_end > manifest.next_offset:
        bases = [one.base_offset for one in log.segments]
        return ReuploadPlan((), tuple(SkippedSegment(base, BEHIND) for base in bases))
    walk = _ReuploadWalk(log, manifest, is_trimmed=is_trimmed, failed=failed, differing=differing)
    for segment in log.segments:
        walk.take(segment, _why_not(segment, manifest, bounds))
    walk.end(NOT_ALIGNED)
    return ReuploadPlan(tuple(walk.reuploads), tuple(walk.passed), tuple(walk.beside_rewritten))


def parts_to_go(found: Reupload, parts: Sequence[FilePart]) -> tuple[Reupload, ...]:
    """
    Return the archived segments that parts of a file replace; each part replaces one.

    *found* is a run of one file that covers segments that a job has rewritten; *parts* is what the file
    has of each archived segment. A segment of which the file has nothing stays: its own file may be lost
    rather than merged into this one. A segment of which the file has more stays too: a replica that was
    compacted less is likely to have what was erased.
    """
    return tuple(
        Reupload(found.segments, (piece,))
        for piece, part in zip(found.replaced, parts, strict=True)
        if not piece.is_rewritten
        and 0 < part.size_bytes <= piece.size_bytes
        and (part.size_bytes, part.crc32c) != (piece.size_bytes, piece.crc32c)
    )


def same_sized_head(log: LocalLog, manifest: PartitionManifest, bounds: LogBounds) -> Reupload | None:
    """
    Return the first segment that a trim would take, if only its checksum can tell whether it may.

    None where its size differs from the archive's, or it has to stay for other reasons.
    """
    for segment in log.segments:
        if segment.next_offset is None or segment.next_offset > bounds.last_stable_offset:
            break
        if segment.next_offset > bounds.log_start_offset:
            pieces = manifest.segments.overlapping(segment.base_offset, segment.next_offset)
            head = Reupload((segment,), pieces)
            is_head = (
                segment.base_offset >= bounds.log_start_offset
                and _covers(pieces, segment.base_offset, segment.next_offset)
                and (head.base_offset, head.next_offset) == (segment.base_offset, segment.next_offset)
                and head.archived_bytes == segment.size_bytes
            )
            return head if is_head else None
    return None


def reuploaded_segment(copied: RemoteSegment, replaced: Sequence[RemoteSegment]) -> RemoteSegment:
    """
    Return the manifest's row of *copied*, which replaces some of *replaced*.

    The age of the records counts as before: a copy is not new data, and retention must not delete its
    records earlier because the newest one was compacted away.
    """
    before = [
        one
        for one in replaced
        if one.base_offset < copied.next_offset and copied.base_offset < one.next_offset
    ]
    row = replace(copied, uploaded_at_ms=max(one.uploaded_at_ms for one in before))
    counted_from_ms = max(retention_time_ms(one) for one in before)
    if retention_time_ms(row) < counted_from_ms:
        return replace(row, broker_timestamp_ms=counted_from_ms)
    return row


class _ReuploadWalk:
    """One pass over a local log: the current run, and the results so far."""

    def __init__(
        self,
        log: LocalLog,
        manifest: PartitionManifest,
        *,
        is_trimmed: bool,
        failed: Collection[RunIdentity],
        differing: Collection[RunIdentity],
    ) -> None:
        self._table = manifest.segments
        self._readable_from = manifest.start_offset
        self._alike_from: int | None = None
        """
        From this offset up to the run, the archive matches the log; None where the run begins such a range.
        """
        self._expected: int | None = None
        """Base offset of the next file if no file is missing."""
        self._has_earlier = False
        """Whether the range from `_alike_from` matches only once an earlier run is replaced."""
        self._is_reframed = log.is_reframed
        self._is_trimmed = is_trimmed
        self._failed = failed
        self._differing = differing
        self._run: list[LocalSegment] = []
        self.reuploads: list[Reupload] = []
        self.beside_rewritten: list[Reupload] = []
        self.passed: list[SkippedSegment] = []

    def take(self, segment: LocalSegment, why_not: str) -> None:
        """Add the next segment to the run, unless *why_not* gives a reason to skip it."""
        if segment.base_offset != self._expected:
            # Files are missing in between, and the archive may hold the records that were in them.
            self._alike_from = None
        self._expected = segment.next_offset
        self._run.append(segment)
        if why_not or segment.next_offset is None:
            self._run.pop()
            self.end(NOT_ALIGNED)
            self.passed.append(SkippedSegment(segment.base_offset, why_not))
            return
        begin, end = self._run[0].base_offset, segment.next_offset
        pieces = self._table.overlapping(begin, end)
        if not _covers(pieces, begin, end):
            self.end(NOT_COVERED)
        elif end <= self._readable_from:
            self.end(BEFORE_START)
        elif pieces[0].base_offset != begin:
            self.end(NOT_ALIGNED)
        elif pieces[-1].next_offset == end:
            self._judge(Reupload(tuple(self._run), pieces))
        elif len(self._run) == RUN_SEGMENTS_MAX:
            self.end(NOT_ALIGNED)

    def end(self, reason: str) -> None:
        """Skip the run, for *reason*."""
        self.passed += [SkippedSegment(one.base_offset, reason) for one in self._run]
        self._run = []
        self._alike_from = None

    def _tombstones(self, base_offset: int) -> Tombstones:
        """Return what becomes of the tombstones of a run that begins at *base_offset*."""
        read_from = base_offset if self._alike_from is None else self._alike_from
        if not may_drop_tombstones(read_from=read_from, readable_from=self._readable_from):
            return Tombstones.STAY
        return Tombstones.WAIT if self._alike_from is not None and self._has_earlier else Tombstones.GO

    def _note_alike(self, base_offset: int) -> None:
        if self._alike_from is None:
            self._alike_from, self._has_earlier = base_offset, False

    def _judge(self, found: Reupload) -> None:
        reason = self._why_not_smaller(found)
        if reason == AS_LARGE:
            self._run = []
            self.passed += [SkippedSegment(one.base_offset, reason) for one in found.segments]
            self._note_alike(found.base_offset)
        elif reason:
            if reason == REWRITTEN and self._may_go_in_parts(found):
                self.beside_rewritten.append(found)
            self.end(reason)
        else:
            self._run = []
            self.reuploads.append(replace(found, tombstones=self._tombstones(found.base_offset)))
            self._note_alike(found.base_offset)
            self._has_earlier = True

    def _may_go_in_parts(self, found: Reupload) -> bool:
        return (
            self._is_trimmed
            and not self._is_reframed
            and len(found.segments) == 1
            and not all(one.is_rewritten for one in found.replaced)
            and found.identity not in self._failed
        )

    def _why_not_smaller(self, found: Reupload) -> str:
        if any(one.is_rewritten for one in found.replaced):
            return REWRITTEN
        if found.identity in self._failed:
            return FAILED
        if self._is_reframed:
            uploaded_ms = max(one.uploaded_at_ms for one in found.replaced)
            changed_ms = max(one.modified_ns for one in found.segments) // _NS_PER_MS
            return "" if changed_ms > uploaded_ms else NOT_TOUCHED
        local_bytes = sum(one.size_bytes for one in found.segments)
        if local_bytes == found.archived_bytes:
            return "" if found.identity in self._differing else AS_LARGE
        if local_bytes > found.archived_bytes:
            return "" if self._is_trimmed else LARGER
        return PART_IS_MISSING if any(_lacks_rest(one, found.replaced) for one in found.segments) else ""


def _why_not(segment: LocalSegment, manifest: PartitionManifest, bounds: LogBounds) -> str:
    if segment.next_offset is None:
        return ACTIVE
    if segment.base_offset < bounds.log_start_offset:
        return LEAVING
    if segment.next_offset > bounds.last_stable_offset:
        return UNSTABLE
    if manifest.start_offset <= segment.base_offset < manifest.live_offset:
        return SPILLED
    return ""


def _covers(pieces: Sequence[RemoteSegment], begin: int, end: int) -> bool:
    """Say whether *pieces* hold all offsets from *begin* up to *end* (exclusive)."""
    return (
        bool(pieces)
        and pieces[0].base_offset <= begin
        and pieces[-1].next_offset >= end
        and all(later.base_offset == one.next_offset for one, later in pairwise(pieces))
    )


def _lacks_rest(segment: LocalSegment, pieces: Sequence[RemoteSegment]) -> bool:
    """
    Say whether a file has exactly the bytes of the first *pieces* in it, and none of the later ones.

    A segment ends where the next file begins. Where a file is lost, the one before it seems to reach over
    the hole, and the archived segments of that hole may be the only copy.
    """
    size_bytes = 0
    for piece in pieces:
        if piece.base_offset >= segment.base_offset and piece.next_offset < (segment.next_offset or 0):
            size_bytes += piece.size_bytes
            if size_bytes == segment.size_bytes:
                return True
    return False
