"""
Durability: up to which offset a local log is safe in the archive.

A segment is durable when a stored manifest covers it without a hole: mostly with one entry of the same
bounds and size, otherwise with several, or with entries that another leader cut elsewhere. A recorded gap
covers nothing: it stands for bytes that were not archived.

A segment that a job has rewritten holds less than the log, on purpose: the removed records were archived
before, and are no longer wanted. So it covers what it replaced, whatever its size, where the leader
epochs of log and archive are known and could be compared (`policies.lineage`).

`walk_log` goes over a local log for this policy, local retention and the trim target.

The trimmer compares the bytes just before a trim, because that takes a read of the file; this policy does
not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tieringd.model.local_log import LocalLog
from tieringd.model.manifest import PartitionManifest
from tieringd.model.segment import LocalSegment, RemoteSegment


@dataclass(frozen=True, slots=True)
class DurableEnd:
    """The end of the durable head of a local log."""

    offset: int
    """Exclusive: all offsets on disk below it are in the archive."""
    because: str
    """Why the next offset is not durable."""


@dataclass(frozen=True, slots=True)
class WalkedSegment:
    """A local segment, and what the archive has of it."""

    local: LocalSegment
    pieces: tuple[RemoteSegment, ...]
    """The stored segments that overlap it, ascending. Empty for the active segment."""
    not_durable_because: str
    """The result of `why_not_durable`. Empty for the active segment."""
    end_bytes: int
    """The bytes of the log up to the end of this segment, also those that the broker is deleting."""


def durable_end(
    log: LocalLog, manifest: PartitionManifest, *, log_start_offset: int, up_to: int | None = None
) -> DurableEnd:
    """
    Return how far *log*, from *log_start_offset* on, is durable without a hole.

    A caller that asks about offsets below *up_to* needs to know no more: the walk ends with the segment
    that reaches it.
    """
    end = log_start_offset
    for one in walk_log(log, manifest, log_start_offset=log_start_offset, up_to=up_to):
        if one.local.next_offset is None:
            pieces = manifest.segments.overlapping(one.local.base_offset, manifest.next_offset)
            covered_to = _covered_to(one.local, pieces)
            return DurableEnd(max(end, covered_to), f"offset {covered_to} is in the active segment")
        if one.not_durable_because:
            covered_to = _covered_to(one.local, one.pieces)
            is_short = covered_to < one.local.next_offset
            return DurableEnd(covered_to if is_short else one.local.base_offset, one.not_durable_because)
        end = one.local.next_offset
    if up_to is not None and end >= up_to:
        return DurableEnd(end, f"offset {up_to} is the limit that was requested")
    return DurableEnd(end, "there is no active segment yet")


def walk_log(
    log: LocalLog, manifest: PartitionManifest, *, log_start_offset: int, up_to: int | None = None
) -> Iterator[WalkedSegment]:
    """
    Yield the segments of *log* from the head on, with what *manifest* has of each.

    Segments below *log_start_offset* are left out: the broker is already deleting them. The walk ends with
    the active segment, or with the segment that reaches *up_to*. What the archive has of a segment is found
    only when the walk comes to it.
    """
    end, end_bytes = log_start_offset, 0
    for segment in log.segments:
        if up_to is not None and end >= up_to:
            return
        if segment.next_offset is None:
            yield WalkedSegment(segment, (), "", end_bytes + segment.size_bytes)
            return
        end_bytes += segment.size_bytes
        if segment.next_offset > log_start_offset:
            pieces = manifest.segments.overlapping(segment.base_offset, segment.next_offset)
            yield WalkedSegment(segment, pieces, why_not_durable(segment, pieces, log, manifest), end_bytes)
            end = segment.next_offset


def why_not_durable(
    segment: LocalSegment, pieces: Sequence[RemoteSegment], log: LocalLog, manifest: PartitionManifest
) -> str:
    """
    Say why a closed segment, of which *manifest* has *pieces*, is not durable; empty when it is.

    Sizes are compared where the pieces begin and end with the segment, and none was rewritten. Where a
    log is reframed, its files have other bytes than the stored batches, and sizes cannot be compared.
    """
    assert segment.next_offset is not None, "only closed segments are compared"
    covered_to = _covered_to(segment, pieces)
    if covered_to < segment.next_offset:
        return f"offset {covered_to} of segment {segment.base_offset} is not in the archive"
    if any(piece.is_rewritten for piece in pieces) and not (log.epochs and manifest.epochs):
        # No byte is compared with a rewritten piece, so only the lineage shows that it belongs to this log.
        return (
            f"a job has rewritten the archived offsets of segment {segment.base_offset}, and there is no "
            "leader-epoch history to check that they came from this log"
        )
    stored_bytes = sum(piece.size_bytes for piece in pieces)
    if not log.is_reframed and is_comparable(segment, pieces) and stored_bytes != segment.size_bytes:
        return (
            f"segment {segment.base_offset} has {segment.size_bytes} bytes on disk "
            f"and {stored_bytes} in the archive"
        )
    return ""


def is_comparable(segment: LocalSegment, pieces: Sequence[RemoteSegment]) -> bool:
    """Say whether *pieces* begin and end where *segment* does, and none was rewritten."""
    return (pieces[0].base_offset, pieces[-1].next_offset) == (
        segment.base_offset,
        segment.next_offset,
    ) and not any(piece.is_rewritten for piece in pieces)


def _covered_to(segment: LocalSegment, pieces: Sequence[RemoteSegment]) -> int:
    """Return the first offset from the base of *segment* on, or after it, that *pieces* do not hold."""
    expected = segment.base_offset
    for piece in pieces:
        if piece.base_offset > expected:
            break
        expected = piece.next_offset
    return expected
