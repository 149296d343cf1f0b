"""
Which neighbouring segments are rewritten as one, after a job has removed records from them.

A run begins and ends with a segment that loses records. Its expected size after the removal is no larger
than the target. That estimate takes all records to have the same size, and those that stay may be the
large ones: so segments are joined only where all of their bytes would fit into a broker's file. Segments
that may not be merged are not joined either: across the first offset of a leader epoch, a bound of what
was replaced, or a gap (`policies.segment_merge`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tieringd.formats.segment_scan import SegmentScan
from tieringd.model.manifest import PartitionManifest
from tieringd.model.segment import NO_TIMESTAMP, RemoteSegment
from tieringd.policies.compacted_reupload import reuploaded_segment
from tieringd.policies.segment_merge import FILE_BYTES_MAX, RUN_SEGMENTS_MAX, is_parted, joining_borders


@dataclass(frozen=True, slots=True)
class Remainder:
    """A segment, and how many of its records are to be kept."""

    segment: RemoteSegment
    records: int
    """The number of records in it."""
    kept: int
    """The number of records that stay."""

    @property
    def is_changed(self) -> bool:
        """Say whether it loses any record."""
        return self.kept < self.records

    @property
    def expected_bytes(self) -> int:
        """Return its approximate size afterwards; all records are taken to have the same size."""
        return self.segment.size_bytes * self.kept // self.records if self.records else 0


def plan_rewrites(
    manifest: PartitionManifest,
    remainders: Iterable[Remainder],
    *,
    target_bytes: int,
    joined_up_to: int | None = None,
) -> tuple[tuple[Remainder, ...], ...]:
    """
    Return the runs of segments to be rewritten, ascending; each becomes one segment.

    *remainders* are of segments of *manifest*, ascending. Unchanged ones are in a run only where they lie
    inside it. A segment that ends after *joined_up_to* is a run by itself.
    """
    borders = sorted(joining_borders(manifest))
    runs = [_Run()]
    for one in remainders:
        may_join = joined_up_to is None or one.segment.next_offset <= joined_up_to
        if runs[-1].parts and not (may_join and runs[-1].has_room_for(one, borders, target_bytes)):
            runs.append(_Run())
        # An unchanged segment joins only a run that begins with a changed one.
        if runs[-1].parts or one.is_changed:
            runs[-1].add(one)
    return tuple(trimmed for run in runs if (trimmed := _without_unchanged_end(run.parts)))


def rewritten_segment(
    parts: Sequence[RemoteSegment],
    scan: SegmentScan,
    *,
    sidecar_bytes: int,
    sidecar_crc32c: int,
    writer_id: str,
) -> RemoteSegment:
    """
    Return the manifest's row of the rewritten form of *parts*; *scan* is of the rewritten object.

    Its leader epoch is the newest one under which one of the parts was uploaded: a job has not compared
    them with any leader's log. Retention counts its age as before.
    """
    row = RemoteSegment(
        base_offset=parts[0].base_offset,
        last_offset=parts[-1].last_offset,
        size_bytes=scan.size_bytes,
        crc32c=scan.crc32c,
        base_timestamp_ms=scan.base_timestamp_ms,
        max_timestamp_ms=scan.max_timestamp_ms,
        leader_epoch=max(one.leader_epoch for one in parts),
        writer_id=writer_id,
        uploaded_at_ms=max(one.uploaded_at_ms for one in parts),
        index_size_bytes=sidecar_bytes,
        broker_timestamp_ms=NO_TIMESTAMP,
        index_crc32c=sidecar_crc32c,
    )
    return reuploaded_segment(row, parts)


class _Run:
    """Neighbouring segments, with their sums: a run may have a thousand segments."""

    def __init__(self) -> None:
        self.parts: list[Remainder] = []
        self._stored_bytes = self._expected_bytes = 0

    def add(self, one: Remainder) -> None:
        """Append a segment."""
        self.parts.append(one)
        self._stored_bytes += one.segment.size_bytes
        self._expected_bytes += one.expected_bytes

    def has_room_for(self, one: Remainder, borders: Sequence[int], target_bytes: int) -> bool:
        """Say whether *one* may be the next segment. The run has a segment already."""
        first, last, segment = self.parts[0].segment, self.parts[-1].segment, one.segment
        return (
            last.next_offset == segment.base_offset
            and self._stored_bytes + segment.size_bytes <= FILE_BYTES_MAX
            and self._expected_bytes + one.expected_bytes <= target_bytes
            and len(self.parts) < RUN_SEGMENTS_MAX
            and segment.last_offset - first.base_offset <= FILE_BYTES_MAX
            and not is_parted(borders, first.base_offset, segment.last_offset)
        )


def _without_unchanged_end(run: Sequence[Remainder]) -> tuple[Remainder, ...]:
    end = len(run)
    while end and not run[end - 1].is_changed:
        end -= 1
    return tuple(run[:end])
