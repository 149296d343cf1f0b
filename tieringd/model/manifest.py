"""
The partition manifest: which segments of one partition are in the object store.

A manifest is a value. Every change returns a new manifest and keeps these rules:

1. segments ascend and never overlap;
2. between two neighbours there is either nothing, or a recorded gap that fills it exactly;
3. `next_offset` is the end of the last segment or gap, and only `tail_cut.cut_back` moves it back;
4. leader epochs ascend, and so do their start offsets;
5. a retired segment, whose objects are still to be deleted, is not among the held segments as well;
6. a crossing transaction begins below `next_offset`, and before its marker;
7. the winner of every compacted record lies below `next_offset`: cutting the tail undoes compactions.

A recorded deletion by a user (`deletions`) is followed in the same commit that records it, and in each
commit that appends segments (`following_deletion`). So no reader ever sees a manifest that has archived
more of the deleted records than it hides. Where older segments are spilled, `archive.record_deletion`
takes those out first.

`start_offset` is the base of the first segment or gap. If a user deleted records up to the middle of a
segment, it lies inside that segment. Only that segment may begin before `start_offset`.

The oldest part of a long history lies in spillover manifests (`model.spillover`). Rules 1 and 2 then
hold from `live_offset` on, and in each spillover manifest. The newest segment never spills.

Segments are held as columns, not as objects: a long history stays small in memory and is searched by
bisection. Bytes live in `formats.manifest_codec`; reading and conditional writing in
`archive.manifest_store`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from tieringd.model.manifest_parts import Gap, RecordDeletion, Replacement, Retired, Unsettled, furthest
from tieringd.model.offset_translation import OffsetTranslation
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import CrossingTransaction, EpochStart, RemoteSegment
from tieringd.model.segment_table import SegmentTable
from tieringd.model.spillover import Spillover, span_faults

SEGMENTS_REMEMBERED = 32
"""
How many of its last segments a manifest remembers crossing transactions for.

A transaction is remembered if its marker is in one of these segments, or after them. An unclean election
loses the offsets by which a follower lagged, which is seldom a whole segment.
"""

CLOSED_EPOCH = 2**31 - 1
"""
The epoch under which a manifest is closed for good: no leader reaches it, so all leaders are fenced.

The archive was moved to another bucket, or its topic is being purged. The topic manifest says which.
"""


@dataclass(frozen=True, slots=True)
class PartitionManifest:
    """What the object store holds of one partition, and which writer committed it last."""

    partition: TopicIdPartition
    start_offset: int
    """The first readable offset. At first it is the offset at which archiving began."""
    next_offset: int
    """Exclusive end of the archive: the next upload begins here."""
    leader_epoch: int = -1
    """The epoch of the last writer. A writer with a lower one is fenced."""
    writer_id: str = ""
    """The daemon process that wrote this version. After a job's edit, the id with a suffix."""
    commit_number: int = 0
    """Unique per writer, so that a writer recognises its own commits."""
    committed_at_ms: int = 0
    began_at_ms: int = 0
    """Time of the first version in ms since the epoch."""
    epochs: tuple[EpochStart, ...] = ()
    segments: SegmentTable = field(default_factory=SegmentTable.of)
    gaps: tuple[Gap, ...] = ()
    replacements: tuple[Replacement, ...] = ()
    translation: OffsetTranslation | None = None
    """A point of Redpanda's offset translation, at the archive's end or before it; None without one."""
    allowed_local_start_offset: int | None = None
    """The local retention hint: where local retention lets the local log begin; None if it sets no limit."""
    expired_at_ms: int | None = None
    """Time in ms since the epoch of the last move of `start_offset` by retention or a user; None if none."""
    retired: tuple[Retired, ...] = ()
    """Segments removed by retention, merges and compaction, oldest first."""
    crossing: tuple[CrossingTransaction, ...] = ()
    """
    Transactions with records in one of the segments and a marker after it.

    The marker is in the archive or past its end. The segment's index tells how each transaction ended, which
    holds while the leader's log has that marker. Transactions with a marker far from the end are forgotten.
    """
    spillover: Spillover | None = None
    """The spilled part; None if `segments` are all."""
    trimmed_offset: int = 0
    """
    The record of the daemon's own trims: none went further than this.

    It is stored before a trim is requested. The log start at the time when a leader claimed the
    partition counts as a trim of the daemon's. A log that begins after this offset was trimmed by a user or
    by the broker's own retention.
    """
    unsettled: Unsettled | None = None
    """What only a leader's log can restore if winners of compactions are cut off; None if nothing."""
    deletions: tuple[RecordDeletion, ...] = ()
    """
    The furthest deletions by users that are recorded, the furthest one first.

    There is mostly one. A deletion that ends earlier is kept beside one of an older leader epoch: a later
    epoch may turn out to begin before the end of the older one, and end only that.
    """

    @classmethod
    def begin(cls, partition: TopicIdPartition, *, start_offset: int, now_ms: int = 0) -> PartitionManifest:
        """Return the manifest of a partition without stored segments."""
        return cls(
            partition,
            start_offset=start_offset,
            next_offset=start_offset,
            began_at_ms=now_ms,
            trimmed_offset=start_offset,
        )

    @property
    def last_offset(self) -> int | None:
        """Return the highest offset that is stored or recorded as lost; None if there is none yet."""
        return self.next_offset - 1 if self.next_offset > self.start_offset else None

    @property
    def is_unused(self) -> bool:
        """Say whether nothing was ever stored or recorded as lost here."""
        has_held = self.segments or self.gaps or self.retired or self.spillover or self.replacements
        return not has_held and self.expired_at_ms is None and self.next_offset == self.start_offset

    @property
    def deleted_before(self) -> int:
        """
        Return the offset before which a user deleted the records; 0 if no deletion is recorded.

        Where a leader of a later epoch has replaced records, the deletion ends there.
        """
        return max((self._end_of(one) for one in self.deletions), default=0)

    def _end_of(self, deletion: RecordDeletion) -> int:
        """Return where *deletion* ends: at its offset, or where the records of a later epoch begin."""
        later = (start for epoch, start in self.epochs if epoch > deletion.leader_epoch)
        return min(deletion.before_offset, min(later, default=deletion.before_offset))

    @property
    def live_offset(self) -> int:
        """Return the first offset that `segments` and `gaps` cover. Earlier offsets are spilled."""
        spillover = self.spillover
        return spillover.next_offset if spillover and spillover.segments else self.start_offset

    @property
    def live_base(self) -> int:
        """
        Return where the first of `segments` and `gaps` begins.

        This is `live_offset`, unless that is inside a segment.
        """
        first = self.segments.covering(self.start_offset) if self.live_offset == self.start_offset else None
        return first.base_offset if first else self.live_offset

    @property
    def records_end(self) -> int:
        """
        Return the offset before which the records of `segments` count.

        It is inside the last segment only in a part of an older archive (`chunk_layout.history_part`).
        """
        last = self.segments[len(self.segments) - 1].base_offset if self.segments else 0
        return next((gap.base_offset for gap in self.gaps if gap.base_offset > last), self.next_offset)

    @property
    def segment_count(self) -> int:
        """Return how many segments are held, including spilled ones."""
        return len(self.segments) + (self.spillover.segments if self.spillover else 0)

    @property
    def size_bytes(self) -> int:
        """Return the size of the data objects of all held segments."""
        return self.segments.total_bytes + (self.spillover.size_bytes if self.spillover else 0)

    @property
    def gap_offsets(self) -> int:
        """Return how many offsets are in its gaps."""
        return sum(gap.offsets for gap in self.gaps) + (self.spillover.gap_offsets if self.spillover else 0)

    def appended(
        self,
        segments: Iterable[RemoteSegment],
        epochs: Iterable[EpochStart] = (),
        crossing: Iterable[CrossingTransaction] = (),
    ) -> PartitionManifest:
        """
        Return a manifest with *segments* at its end, and *epochs* added to the history.

        *crossing* are the transactions over the end of each of *segments*.

        Raises:
            ValueError: A segment does not begin where the one before it ends, or is empty, or an epoch
                goes back.
        """
        added = tuple(segments)
        next_offset = self.next_offset
        for segment in added:
            if segment.base_offset != next_offset or segment.last_offset < segment.base_offset:
                raise ValueError(
                    f"segment {segment.base_offset} to {segment.last_offset} cannot follow offset "
                    f"{next_offset - 1} of {self.partition}"
                )
            next_offset = segment.next_offset
        table = self.segments.appended(added)
        return replace(
            self,
            segments=table,
            next_offset=next_offset,
            epochs=_extended(self.epochs, epochs),
            crossing=_remembered((*self.crossing, *crossing), table),
        )

    def with_gap(self, gap: Gap) -> PartitionManifest:
        """
        Return a manifest in which *gap* is recorded at the end.

        A transaction whose marker is in the gap is removed from `crossing`: no log decides it any more.

        Raises:
            ValueError: The gap does not begin at `next_offset`, or is empty.
        """
        if gap.base_offset != self.next_offset or gap.last_offset < gap.base_offset:
            raise ValueError(
                f"gap {gap.base_offset} to {gap.last_offset} cannot follow offset {self.next_offset - 1}"
            )
        return replace(
            self,
            gaps=(*self.gaps, gap),
            next_offset=gap.next_offset,
            crossing=tuple(
                one for one in self.crossing if not gap.base_offset <= one.marker_offset < gap.next_offset
            ),
        )

    def released(self, held: Collection[Retired], *, is_settled: bool = True) -> PartitionManifest:
        """
        Return a manifest that no longer holds the objects of *held*: they are to be deleted.

        If that is not settled for good, `unsettled` covers them from now on.
        """
        chosen = {id(one) for one in held}
        unsettled = self.unsettled
        if not is_settled:
            for one in held:
                unsettled = Unsettled(one.base_offset, one.winners_end).joined(unsettled)
        return replace(
            self,
            retired=tuple(replace(one, winners_end=0) if id(one) in chosen else one for one in self.retired),
            unsettled=unsettled,
        )

    def expired(self, segments: int, *, now_ms: int) -> PartitionManifest:
        """
        Return a manifest without its first *segments* rows. Their objects are to be deleted later.

        Raises:
            ValueError: There are fewer segments, or older ones are spilled.
        """
        if not 0 < segments <= len(self.segments) or self.live_offset > self.start_offset:
            raise ValueError(f"{segments} of {len(self.segments)} segments of {self.partition} cannot expire")
        gone = self.segments.head(segments)
        start_offset = gone[segments - 1].next_offset
        kept = self.segments.without_head(segments)
        return replace(
            self,
            start_offset=start_offset,
            segments=kept,
            gaps=tuple(gap for gap in self.gaps if gap.base_offset >= start_offset),
            expired_at_ms=now_ms,
            retired=(*self.retired, Retired(gone, now_ms)),
            crossing=tuple(one for one in self.crossing if kept and one.marker_offset >= start_offset),
        )

    def starting_inside(self, segment: RemoteSegment, offset: int, *, now_ms: int) -> PartitionManifest:
        """
        Return a manifest that hides offsets before *offset*, which is inside its first *segment*.

        Raises:
            ValueError: *offset* is outside of the segment, or the archive begins there already, or
                another segment is the first.
        """
        is_spilled = self.live_offset > self.start_offset
        is_first = is_spilled or self.segments.row_at_or_after(segment.base_offset) == 0
        if not is_first or not self.hides_part_of(segment, offset):
            raise ValueError(
                f"the archive of {self.partition} cannot begin at {offset}, inside its segment "
                f"{segment.base_offset} to {segment.last_offset}"
            )
        spillover = self.spillover
        if spillover is not None and is_spilled:
            passed = max(0, segment.base_offset - self.start_offset)
            spillover = replace(spillover, gap_offsets=spillover.gap_offsets - passed)
        return replace(
            self,
            start_offset=offset,
            gaps=tuple(gap for gap in self.gaps if gap.base_offset >= offset),
            spillover=spillover,
            expired_at_ms=now_ms,
        )

    def with_deletion(self, deletion: RecordDeletion) -> PartitionManifest:
        """
        Return a manifest that records *deletion*, unless one that it has reaches as far in every case.

        Its start does not move: see `following_deletion`.
        """
        deletions = furthest([*self.deletions, deletion])
        return self if deletions == self.deletions else replace(self, deletions=deletions)

    def following_deletion(self, *, now_ms: int) -> PartitionManifest:
        """
        Return a manifest that begins where the recorded deletion ends, or at its own end if that is first.

        Whole segments expire. Of the first one that stays, only the records before the deletion's end are
        hidden. While deleted segments are spilled, the manifest stays as it is.
        """
        before_offset = self.deleted_before
        if before_offset <= self.start_offset or self.live_offset > self.start_offset:
            return self
        rows = self.segments.row_at_or_after(before_offset)
        left = self.expired(rows, now_ms=now_ms) if rows else self
        if left.segments and left.hides_part_of(left.segments[0], before_offset):
            left = left.starting_inside(left.segments[0], before_offset, now_ms=now_ms)
        return left

    def hides_part_of(self, segment: RemoteSegment, offset: int) -> bool:
        """Say whether *offset* is inside *segment*, and past the archive's start."""
        return max(self.start_offset, segment.base_offset) < offset <= segment.last_offset

    def seen_from(self, offset: int) -> PartitionManifest:
        """Return the manifest that readers may see when offsets before *offset* are hidden; never stored."""
        if offset <= self.start_offset:
            return self
        offset = min(offset, self.next_offset)
        covering = self.segments.covering(offset)
        first = self.segments.row_at_or_after(covering.base_offset if covering else offset)
        return replace(
            self,
            start_offset=offset,
            segments=self.segments.without_head(first),
            gaps=tuple(gap for gap in self.gaps if gap.next_offset > offset),
            spillover=self.spillover if offset < self.live_offset else None,
        )

    def with_segments(self, segments: SegmentTable) -> PartitionManifest:
        """
        Return a manifest with corrected rows for its live segments.

        Raises:
            ValueError: The rows are of other offsets or leader epochs.
        """
        for name in ("base_offset", "last_offset", "leader_epoch"):
            if list(segments.column(name)) != list(self.segments.column(name)):
                raise ValueError(f"the new rows of {self.partition} describe other segments: {name} differs")
        return replace(self, segments=segments)

    def with_hint(self, offset: int | None, *, trims_to: int = 0) -> PartitionManifest:
        """
        Return a manifest with another local retention hint, and a record of the trim that follows from it.

        So most trims need no commit of their own to be recorded. *trims_to* is 0 if nothing is trimmed:
        the log then begins at or after the hint already.
        """
        return replace(self.with_trim(trims_to), allowed_local_start_offset=offset)

    def with_trim(self, offset: int) -> PartitionManifest:
        """Return a manifest that records a trim up to *offset*, as far as that is archived."""
        return replace(self, trimmed_offset=max(self.trimmed_offset, min(offset, self.next_offset)))

    def merged(self, segment: RemoteSegment, *, now_ms: int) -> PartitionManifest:
        """
        Return a manifest with *segment* in the place of those that it was merged from.

        Their objects are to be deleted later, like those of expired segments. A transaction that begins
        and ends inside no longer crosses the end of a segment.

        Raises:
            ValueError: By its bounds and its size, *segment* is not made of two or more neighbours.
        """
        table = self.segments
        first, last = table.row_at_or_after(segment.base_offset), table.row_at_or_after(segment.next_offset)
        parts = table.head(last).without_head(first)
        spans = [(part.base_offset, part.next_offset) for part in parts]
        if (
            len(parts) < 2  # noqa: PLR2004 - one is not merged
            or (spans[0][0], spans[-1][1]) != (segment.base_offset, segment.next_offset)
            or any(begin != end for (_, end), (begin, _) in pairwise(spans))
            or parts.total_bytes != segment.size_bytes
        ):
            raise ValueError(
                f"offsets {segment.base_offset} to {segment.last_offset} of {self.partition}, with "
                f"{segment.size_bytes} bytes, do not match the manifest: {spans}"
            )
        return replace(
            self,
            segments=table.replaced(first, last, segment),
            retired=(*self.retired, Retired(parts, now_ms)),
            crossing=tuple(
                one
                for one in self.crossing
                if one.first_offset < segment.base_offset or one.marker_offset >= segment.next_offset
            ),
        )

    def compacted(
        self,
        segments: Sequence[RemoteSegment],
        *,
        now_ms: int,
        crossing: Iterable[CrossingTransaction] = (),
        winners_end: int = 0,
        is_held: bool = True,
    ) -> PartitionManifest:
        """
        Return a manifest with compacted *segments* in the place of those that they came from.

        The objects of the replaced segments are to be deleted later, like those of expired ones.
        *crossing* are the transactions over the end of each of *segments*; known transactions stay.

        All winners lie below *winners_end*. It is 0 if none of them can be lost, or if no record was removed
        because of another one. Otherwise the objects are held until that is settled. With *is_held* false
        they are not held, because a leader's log has all of their records, and `unsettled` covers them.

        Raises:
            ValueError: By their bounds, the segments do not replace one or more neighbours exactly. Or
                one of them was there before, and its objects will be deleted.
        """
        table, base_offset, next_offset = self.segments, segments[0].base_offset, segments[-1].next_offset
        first, last = table.row_at_or_after(base_offset), table.row_at_or_after(next_offset)
        parts = table.head(last).without_head(first)
        if (
            not parts
            or span_faults(parts, (), begin=base_offset, end=next_offset)
            or span_faults(SegmentTable.of(segments), (), begin=base_offset, end=next_offset)
            or any(
                one == gone.covering(one.base_offset)
                for one in segments
                for gone in (parts, *(retired.segments for retired in self.retired))
            )
        ):
            raise ValueError(
                f"offsets {base_offset} to {next_offset - 1} of {self.partition} cannot be replaced by "
                f"compacted segments: the manifest has {len(parts)} segments there"
            )
        replaced = table.replaced(first, last, *segments)
        kept = (
            one
            for one in self.crossing
            # If a compaction is undone one day, the segments have their old ends again.
            if winners_end
            or not any(
                new.base_offset <= one.first_offset and one.marker_offset < new.next_offset
                for new in segments
            )
        )
        return replace(
            self,
            segments=replaced,
            retired=(*self.retired, Retired(parts, now_ms, winners_end if is_held else 0)),
            crossing=_remembered((*kept, *crossing), replaced),
            unsettled=(
                Unsettled(base_offset, winners_end).joined(self.unsettled)
                if winners_end and not is_held
                else self.unsettled
            ),
        )

    def forgotten(self, segments: int) -> PartitionManifest:
        """Return a manifest without its first *segments* retired ones that are not held: they are deleted."""
        left: list[Retired] = []
        for one in self.retired:
            rows = 0 if one.is_held else min(segments, len(one.segments))
            segments -= rows
            if rows < len(one.segments):
                left.append(replace(one, segments=one.segments.without_head(rows)))
        return replace(self, retired=tuple(left))

    @property
    def is_closed(self) -> bool:
        """Say whether no archiver may ever write it again."""
        return self.leader_epoch == CLOSED_EPOCH

    def committed(
        self, *, writer_id: str, leader_epoch: int, commit_number: int, now_ms: int
    ) -> PartitionManifest:
        """Return this manifest signed by the writer that is about to store it."""
        return replace(
            self,
            writer_id=writer_id,
            leader_epoch=leader_epoch,
            commit_number=commit_number,
            committed_at_ms=now_ms,
        )

    def faults(self) -> tuple[str, ...]:
        """Return every broken rule of the module's list, in words; empty for a sound manifest."""
        found = list(span_faults(self.segments, self.gaps, begin=self.live_base, end=self.next_offset))
        if self.spillover is not None:
            found += self.spillover.faults(start_offset=self.start_offset)
            if self.spillover.segments and not self.segments:
                found.append("there are spilled segments, but no live ones")
        found += [
            f"segment {segment.base_offset} is both held and retired"
            for one in self.retired
            for segment in one.segments
            if self.segments.covering(segment.base_offset) == segment
        ]
        for (epoch, start), (later_epoch, later_start) in pairwise(self.epochs):
            if later_epoch <= epoch or later_start < start:
                found.append(f"leader epoch {later_epoch} at {later_start} follows {epoch} at {start}")
        found += [
            f"the transaction from {one.first_offset} to {one.marker_offset} crosses no segment's end"
            for one in self.crossing
            if one.first_offset >= min(self.next_offset, one.marker_offset)
        ]
        winners_end = max(
            (one.winners_end for one in (*self.retired, self.unsettled) if one is not None), default=0
        )
        if winners_end > self.next_offset:
            found.append(
                f"a record up to offset {winners_end - 1}, past the end of the archive, replaced an older one"
            )
        return tuple(found)


def _remembered(
    transactions: Iterable[CrossingTransaction], segments: SegmentTable
) -> tuple[CrossingTransaction, ...]:
    """
    Return those of *transactions* that are not forgotten yet, each once, ascending by marker.

    A transaction is identified by its marker. Each segment reports it from its first record in that
    segment; the smallest first offset is kept.
    """
    rows_forgotten = len(segments) - SEGMENTS_REMEMBERED
    begin = segments.column("base_offset")[rows_forgotten] if rows_forgotten > 0 else 0
    found: dict[tuple[int, int], CrossingTransaction] = {}
    for one in transactions:
        marker = (one.marker_offset, one.leader_epoch)
        if one.marker_offset >= begin and one.first_offset <= found.get(marker, one).first_offset:
            found[marker] = one
    return tuple(found[marker] for marker in sorted(found))


def _extended(history: tuple[EpochStart, ...], epochs: Iterable[EpochStart]) -> tuple[EpochStart, ...]:
    """Return *history* with those of *epochs* that it does not have yet."""
    result = list(history)
    for epoch, start_offset in epochs:
        known, known_start = result[-1] if result else (epoch - 1, start_offset)
        if epoch < known or (epoch > known and start_offset < known_start):
            raise ValueError(
                f"leader epoch {epoch} at offset {start_offset} follows epoch {known} at {known_start}"
            )
        if epoch > known:
            result.append((epoch, start_offset))
    return tuple(result)
