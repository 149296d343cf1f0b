"""
Durability: up to where a local log is safe in the archive.

A segment is durable when a stored manifest covers it without a hole: mostly with one entry of the
same bounds and size, else with several, or with entries that another leader cut elsewhere. A
recorded gap covers nothing: it stands for bytes that were not archived.

What a job has rewritten holds less than the log, on purpose: what it took out was archived before, and
is no longer wanted. So it covers what it replaced, whatever its size, where the leader epochs of log and
archive are known and could be compared (`policies.lineage`).

Whether the bytes are the same is looked at just before a trim: that takes a read of the file, so
it is the trimmer's work and not this policy's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieringd.model.local_log import LocalLog
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.segment import LocalSegment, RemoteSegment


@dataclass(frozen=True, slots=True)
class DurableEnd:
    """Where the durable head of a local log ends."""

    offset: int
    """Exclusive: all that is on disk below it is in the archive."""
    because: str
    """What is the matter with the next offset."""


def durable_end(
    log: LocalLog, manifest: PartitionManifest, *, log_start_offset: int, up_to: int | None = None
) -> DurableEnd:
    """
    Return how far *log*, from *log_start_offset* on, is durable without a hole.

    Nobody who asks about offsets below *up_to* needs to know more: the walk ends with the segment
    that reaches it.
    """
    end = log_start_offset
    for segment in log.segments:
        if up_to is not None and end >= up_to:
            return DurableEnd(end, f"offset {up_to} is as far as anyone asked")
        if segment.next_offset is None:
            pieces = manifest.segments.overlapping(segment.base_offset, manifest.next_offset)
            covered_to = _covered_to(segment, pieces)
            return DurableEnd(max(end, covered_to), f"offset {covered_to} is in the active segment")
        if segment.next_offset > log_start_offset:
            pieces = manifest.segments.overlapping(segment.base_offset, segment.next_offset)
            reason = why_not_durable(segment, pieces, log, manifest)
            if reason:
                is_short = _covered_to(segment, pieces) < segment.next_offset
                return DurableEnd(_covered_to(segment, pieces) if is_short else segment.base_offset, reason)
            end = segment.next_offset
    return DurableEnd(end, "there is no active segment yet")


def why_not_durable(
    segment: LocalSegment, pieces: Sequence[RemoteSegment], log: LocalLog, manifest: PartitionManifest
) -> str:
    """
    Say why a closed segment of *log*, of which *manifest* has *pieces*, is not durable; empty when it is.

    Sizes are compared where the pieces begin and end with the segment, and none was rewritten. Where a log
    is reframed, files have other bytes than the batches that are stored, and sizes say nothing.
    """
    assert segment.next_offset is not None, "only closed segments are looked at"
    covered_to = _covered_to(segment, pieces)
    if covered_to < segment.next_offset:
        return f"offset {covered_to} of segment {segment.base_offset} is not in the archive"
    if any(piece.is_rewritten for piece in pieces) and not (log.epochs and manifest.epochs):
        # No byte is compared with a rewritten piece: only the lineage says that it is of this log.
        return (
            f"a job has rewritten what the archive has of segment {segment.base_offset}, and there is no "
            "leader-epoch history to tell whether that was this log"
        )
    stored_bytes = sum(piece.size_bytes for piece in pieces)
    if not log.is_reframed and is_comparable(segment, pieces) and stored_bytes != segment.size_bytes:
        return (
            f"segment {segment.base_offset} has {segment.size_bytes} bytes on disk "
            f"and {stored_bytes} in the archive"
        )
    return ""


def is_comparable(segment: LocalSegment, pieces: Sequence[RemoteSegment]) -> bool:
    """Say whether *pieces* begin and end where *segment* does, and hold all that was in it."""
    return (pieces[0].base_offset, pieces[-1].next_offset) == (
        segment.base_offset,
        segment.next_offset,
    ) and not any(piece.is_rewritten for piece in pieces)


def _covered_to(segment: LocalSegment, pieces: Sequence[RemoteSegment]) -> int:
    """Return the first offset of *segment*, or behind it, that *pieces* do not hold."""
    expected = segment.base_offset
    for piece in pieces:
        if piece.base_offset > expected:
            break
        expected = piece.next_offset
    return expected
