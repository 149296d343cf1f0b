"""
Which neighbouring small segments of an archive are worth merging into one object.

A run is two or more segments that follow each other and together are no larger than the target. A run is
complete when the next segment would not fit, or may not be joined to it. Then it is merged, however
small. A run at the end may still grow, so it waits until it is larger than the minimum. A run at the end
with a segment above the minimum waits until it is complete; otherwise each new segment would cause the
whole run to be copied again. So a byte is moved by merging at most twice.

Segments are not joined across the first offset of a leader epoch or a bound of what was replaced: logs
diverge there, and an archive is cut back to where segments meet. Nor are they joined across the bounds of
segments that are held for a compaction, which may be put back (`policies.record_removal`), or across a
gap. Segments that an earlier attempt could not merge are skipped for good. A merged segment fits into a
broker's file.

This is not compaction, which drops records. A merged segment holds every byte of its parts, in order.

`merged_segment` makes the manifest's row of a merged segment, from the rows of its parts and its index.
The row belongs to the merging writer: its name is unique. Its times are chosen so that retention deletes
none of its records earlier than it would have without the merge.

`explain_merging` says why a stored segment is not merged with its neighbours, or that it is going to be.
It decides nothing: it asks the policy. Only the daemon knows what an earlier attempt could not merge, and
logs it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from tieringd.model.local_log import LocalLog
from tieringd.model.manifest import PartitionManifest
from tieringd.model.segment import NO_TIMESTAMP, RemoteSegment, SegmentIndex
from tieringd.model.segment_table import SegmentTable
from tieringd.policies.retention_time import retention_time_ms

FILE_BYTES_MAX = 2**31 - 1
"""The range of a broker's index, in bytes, and in offsets from a segment's base."""
ROWS_AT_ONCE_MAX = 10_000
"""Segments that one call reads: a history of a million is walked in steps, with uploads in between."""
RUN_SEGMENTS_MAX = 1_000
"""Well below the number of parts that any store can join, and few enough indexes to hold at once."""
RUNS_AT_ONCE_MAX = 4
"""The same limit as Redpanda's."""

STILL_LOCAL = "its offsets are still on the broker's disk, and a trim compares them with this segment"


def merged_segment(
    parts: Sequence[RemoteSegment],
    index: SegmentIndex,
    *,
    sidecar_bytes: int,
    sidecar_crc32c: int,
    leader_epoch: int,
    writer_id: str,
) -> RemoteSegment:
    """
    Return the row of the merged object of *parts*; *index* is its index.

    *leader_epoch* and *writer_id* are of the merging writer.
    """
    base_times = [one.base_timestamp_ms for one in parts if one.base_timestamp_ms != NO_TIMESTAMP]
    broker_times = [one.broker_timestamp_ms for one in parts]
    merged = RemoteSegment(
        base_offset=index.base_offset,
        last_offset=index.last_offset,
        size_bytes=index.size_bytes,
        crc32c=index.crc32c,
        base_timestamp_ms=min(base_times, default=NO_TIMESTAMP),
        max_timestamp_ms=max(one.max_timestamp_ms for one in parts),
        leader_epoch=leader_epoch,
        writer_id=writer_id,
        uploaded_at_ms=max(one.uploaded_at_ms for one in parts),
        index_size_bytes=sidecar_bytes,
        # A broker time must cover all records: a part without one may be newer than the others.
        broker_timestamp_ms=NO_TIMESTAMP if NO_TIMESTAMP in broker_times else max(broker_times),
        index_crc32c=sidecar_crc32c,
    )
    counted_from_ms = max(retention_time_ms(one) for one in parts)
    if retention_time_ms(merged) < counted_from_ms:
        # A part without timestamps counts from its upload, which the other parts' timestamps do not reflect.
        return replace(merged, broker_timestamp_ms=counted_from_ms)
    return merged


@dataclass(frozen=True, slots=True)
class MergeSettings:
    """The settings for all topics; None where the value follows from a topic's segment size."""

    is_enabled: bool = True
    target_bytes: int | None = None
    min_bytes: int | None = None

    def limits(self, *, segment_bytes: int) -> MergeLimits:
        """
        Return the limits for a topic whose broker rolls segments at *segment_bytes*.

        The target is that size, and the minimum half of it. A minimum that is not below the target
        becomes four fifths of the target.
        """
        target = min(segment_bytes if self.target_bytes is None else self.target_bytes, FILE_BYTES_MAX)
        minimum = segment_bytes // 2 if self.min_bytes is None else self.min_bytes
        return MergeLimits(target, minimum if minimum < target else target * 4 // 5)


@dataclass(frozen=True, slots=True)
class MergeLimits:
    """The sizes that runs are chosen by, and how much one call plans."""

    target_bytes: int
    min_bytes: int
    runs_max: int = RUNS_AT_ONCE_MAX
    run_segments_max: int = RUN_SEGMENTS_MAX
    rows_max: int = ROWS_AT_ONCE_MAX


@dataclass(frozen=True, slots=True)
class MergeRun:
    """Segments to be merged: all from *base_offset* up to *next_offset* (exclusive)."""

    base_offset: int
    next_offset: int
    segments: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SkippedSegments:
    """Neighbouring segments that stay as they are, for one reason."""

    base_offset: int
    last_offset: int
    segments: int
    reason: str


@dataclass(frozen=True, slots=True)
class MergePlan:
    """The runs to merge, in order, and the segments that stay."""

    runs: tuple[MergeRun, ...]
    passed: tuple[SkippedSegments, ...]
    resume_offset: int
    """Offset from which the next call continues, once the runs are merged."""
    is_complete: bool
    """Whether the end of what may be merged was reached."""


def merge_limit_offset(log: LocalLog, *, log_start_offset: int) -> int:
    """
    Return up to which offset a partition's archive may be merged: segments still on disk are left alone.

    Before a trim a local segment is compared with its stored form, by size and checksum where both have
    the same bounds, and otherwise by reading it all back. The log start offset alone is not enough: a
    broker that crashed may forget a trim, and files that it is deleting may be observed again.
    """
    return min(log_start_offset, log_start_offset if log.first_offset is None else log.first_offset)


def job_limit_offset(manifest: PartitionManifest, *, has_log: bool) -> int | None:
    """
    Return up to which offset a job without access to a broker may join segments; None for no limit.

    Where a broker has the log, the local part of it is left alone, as in `merge_limit_offset`. An unclean
    election cuts an archive back to where segments meet: a segment that began before the log could not be
    replaced from it.
    """
    return manifest.trimmed_offset if has_log else None


LARGE = "the segment is as large as the target, or larger"
ALONE = "no neighbouring segment can be joined to it"
WAITS = "the segment waits for later segments: the run may still grow"
FAILED = "an earlier attempt could not merge the segment"


def plan_merges(
    manifest: PartitionManifest,
    limits: MergeLimits,
    *,
    from_offset: int = 0,
    up_to: int | None = None,
    failed: Collection[MergeRun] = (),
) -> MergePlan:
    """
    Choose the runs to merge, from *from_offset* on.

    *failed* are runs that could not be merged: none of their segments is proposed again. Segments that
    end after *up_to* are left for later, and count as possible continuation of a run. The caller does not
    ask for compacted topics.
    """
    assert limits.rows_max > limits.run_segments_max, "one step has room for a whole run"
    table = manifest.segments
    walk = _MergeWalk(manifest, limits, failed)
    # An archive that was cut back behind the cursor is a different one from there on.
    row = table.row_at_or_after(from_offset) if from_offset <= manifest.next_offset else 0
    stop = row + limits.rows_max
    end = len(table) if up_to is None else _rows_before(table, up_to)
    while row < min(end, stop) and len(walk.runs) < limits.runs_max:
        walk.take(row)
        row += 1
    if len(walk.runs) == limits.runs_max:
        return walk.plan(walk.runs[-1].next_offset, is_complete=False)
    resume_row = walk.held_from(row)
    if row >= end:
        walk.end()
    bases = table.column("base_offset")
    resume_offset = bases[resume_row] if resume_row < len(table) else manifest.next_offset
    return walk.plan(resume_offset, is_complete=row >= end)


class _MergeWalk:
    """One pass over a table: the current run, and the results so far."""

    def __init__(
        self, manifest: PartitionManifest, limits: MergeLimits, failed: Collection[MergeRun]
    ) -> None:
        self._bases = manifest.segments.column("base_offset")
        self._lasts = manifest.segments.column("last_offset")
        self._sizes = manifest.segments.column("size_bytes")
        self._limits = limits
        self._failed = sorted((one.base_offset, one.next_offset) for one in failed)
        self._borders = sorted(chain(joining_borders(manifest), _bounds_of_held(manifest)))
        self._rows: list[int] = []
        self._size_bytes = 0
        self.runs: list[MergeRun] = []
        self.passed: list[SkippedSegments] = []

    def take(self, row: int) -> None:
        """Add the next segment to the run, or skip it."""
        if self._has_failed(row):
            self.close()
            self._pass_over(row, FAILED)
            return
        if self._sizes[row] >= self._limits.target_bytes:
            self.close()
            self._pass_over(row, LARGE)
            return
        if self._rows and not self._fits(row):
            self.close()
        self._rows.append(row)
        self._size_bytes += self._sizes[row]

    def plan(self, resume_offset: int, *, is_complete: bool) -> MergePlan:
        """Return the plan; segments from *resume_offset* on are left for the next walk, unless they wait."""
        told = (one for one in self.passed if one.reason == WAITS or one.base_offset < resume_offset)
        return MergePlan(tuple(self.runs), tuple(told), resume_offset, is_complete)

    def held_from(self, row: int) -> int:
        """Return the first row of the run that may still grow; *row* where there is none."""
        return self._rows[0] if self._rows else row

    def close(self) -> None:
        """End the run: nothing more can be joined to it."""
        if len(self._rows) > 1:
            self._propose()
        else:
            self._drop(ALONE)

    def end(self) -> None:
        """End the run at the end of what may be merged, where more segments may follow."""
        has_one_of_size = any(self._sizes[row] > self._limits.min_bytes for row in self._rows)
        if len(self._rows) > 1 and self._size_bytes > self._limits.min_bytes and not has_one_of_size:
            self._propose()
        else:
            self._drop(WAITS)

    def _propose(self) -> None:
        base_offset, next_offset = self._bases[self._rows[0]], self._lasts[self._rows[-1]] + 1
        self.runs.append(MergeRun(base_offset, next_offset, len(self._rows), self._size_bytes))
        self._forget()

    def _drop(self, reason: str) -> None:
        for row in self._rows:
            self._pass_over(row, reason)
        self._forget()

    def _forget(self) -> None:
        self._rows, self._size_bytes = [], 0

    def _fits(self, row: int) -> bool:
        """Say whether *row* fits into the run."""
        first, last = self._rows[0], self._rows[-1]
        return (
            self._lasts[last] + 1 == self._bases[row]
            and self._size_bytes + self._sizes[row] <= self._limits.target_bytes
            and len(self._rows) < self._limits.run_segments_max
            and self._lasts[row] - self._bases[first] <= FILE_BYTES_MAX
            and not is_parted(self._borders, self._bases[first], self._lasts[row])
        )

    def _has_failed(self, row: int) -> bool:
        base_offset = self._bases[row]
        return any(begin <= base_offset < end for begin, end in self._failed)

    def _pass_over(self, row: int, reason: str) -> None:
        base_offset, last_offset = self._bases[row], self._lasts[row]
        before = self.passed[-1] if self.passed else None
        if before is not None and before.reason == reason and before.last_offset + 1 == base_offset:
            self.passed[-1] = SkippedSegments(before.base_offset, last_offset, before.segments + 1, reason)
        else:
            self.passed.append(SkippedSegments(base_offset, last_offset, 1, reason))


def is_parted(borders: Sequence[int], base_offset: int, last_offset: int) -> bool:
    """Say whether one of the ascending *borders* separates the two offsets."""
    at = bisect_right(borders, base_offset)
    return at < len(borders) and borders[at] <= last_offset


def joining_borders(manifest: PartitionManifest) -> Iterable[int]:
    """Yield the offsets that no run may cross."""
    for _, start_offset in manifest.epochs:
        yield start_offset
    for one in manifest.replacements:
        yield one.base_offset
        yield one.last_offset + 1


def _bounds_of_held(manifest: PartitionManifest) -> Iterable[int]:
    """Yield the bounds of held segments."""
    for one in manifest.retired:
        if one.is_held:
            yield from one.segments.column("base_offset")
            yield one.next_offset


def _rows_before(table: SegmentTable, offset: int) -> int:
    """Return how many segments end at or before *offset*."""
    return bisect_right(table.column("last_offset"), offset - 1)


@dataclass(frozen=True, slots=True)
class MergingTerms:
    """A topic's settings for merging."""

    is_enabled: bool
    is_compacted: bool
    limits: MergeLimits | None
    """None where its segments are not merged at all."""
    idle_because: str = ""
    """Why this broker's daemon does nothing to the partition."""


def why_never_merged(terms: MergingTerms) -> str:
    """Say why no segment of a topic is merged; empty when they may be."""
    if not terms.is_enabled:
        return "cloud_storage_enable_segment_merging is off"
    if terms.is_compacted:
        return "the topic is compacted, so its segments are replaced one by one instead"
    if terms.idle_because:
        return terms.idle_because
    return "" if terms.limits is not None else "the topic is not archived"


def explain_merging(
    manifest: PartitionManifest, log: LocalLog, terms: MergingTerms, *, log_start_offset: int
) -> Mapping[int, str]:
    """Return an explanation for each live segment of *manifest*, by its base offset."""
    bases = list(manifest.segments.column("base_offset"))
    never = why_never_merged(terms)
    if never or terms.limits is None:
        return dict.fromkeys(bases, never)
    rows = len(bases)
    limits = replace(terms.limits, runs_max=rows + 1, rows_max=rows + RUN_SEGMENTS_MAX + 1)
    up_to = merge_limit_offset(log, log_start_offset=log_start_offset)
    plan = plan_merges(manifest, limits, up_to=up_to)
    found = dict.fromkeys(bases, STILL_LOCAL)
    told = [(run.base_offset, run.segments, _becomes_one(run)) for run in plan.runs]
    told += [(one.base_offset, one.segments, one.reason) for one in plan.passed]
    for base_offset, segments, text in told:
        row = bisect_left(bases, base_offset)
        found |= dict.fromkeys(bases[row : row + segments], text)
    return found


def _becomes_one(run: MergeRun) -> str:
    return (
        f"the segment becomes part of offsets {run.base_offset} to {run.next_offset - 1}, merged from "
        f"{run.segments} segments of {run.size_bytes} bytes, once the object store is idle"
    )
