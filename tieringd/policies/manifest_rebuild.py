"""
Which stored segments make up a partition's archive, where its manifest is lost.

Several objects may hold the same offsets: merged segments and their parts, compacted segments and their
originals, what a crash left behind, and what a deposed leader stored. They are chosen by these rules, in
this order.

1. A segment is off the lineage where a segment of a newer leader shows that it cannot be right: its
   leader knew no epoch newer than x, and the segment has offsets at or past the first one that was
   written under an epoch after x. Only a segment on the lineage counts as evidence, the newest first.
2. Of the rest, segments that a job replaced are out, and segments that a job that died left behind are
   out where any other object has their offsets (`valid_rewritings`).
3. Of the rest, the choice is those that together hold most offsets, without an overlap; of several such
   choices the one with the fewest segments, so merged ones rather than their parts; then the one with the
   newer leader epochs; then the one that was stored later, so compacted ones rather than their originals.
4. Where the epochs of two neighbours in that choice go back, the one that the older leader stored is left
   out, and the choice is made again.

Offsets between two chosen segments that no object holds are holes: they become recorded gaps.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from operator import attrgetter, itemgetter
from typing import TypeAlias

from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Gap
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import (
    AbortedTransaction,
    CrossingTransaction,
    EpochStart,
    RemoteSegment,
    SegmentIdentity,
)
from tieringd.policies.epoch_history import epoch_at
from tieringd.policies.erasure_evidence import KnownBegin
from tieringd.policies.valid_rewritings import (
    Candidate,
    RecordedRewriting,
    ValidRewritings,
    valid_rewritings,
)

OFF_LINEAGE = "a newer leader wrote other records at these offsets"
NOT_CHOSEN = "other objects hold these offsets"
EPOCHS_GO_BACK = "its leader epochs do not follow those of the neighbouring segments"
EXPIRED = "it is before the start of the archive"
SUPERSEDED = "a job has replaced it with other objects"
UNFINISHED = (
    "a job that removed records stored it, but no record shows that the job stored all of its objects"
)

_Worth: TypeAlias = tuple[int, int, int, int]
_NOTHING: _Worth = (0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class StoredSegment:
    """A data object that matches its name, and the contents of its index."""

    segment: RemoteSegment
    """The segment, with the object's storage time as its upload time."""
    epochs: tuple[EpochStart, ...]
    """The leader epochs of the batches inside."""
    aborted: tuple[AbortedTransaction, ...] = ()
    has_index: bool = True
    """Whether its index exists and is sound."""

    @property
    def identity(self) -> SegmentIdentity:
        """Return the identity that its name gives."""
        return SegmentIdentity.of(self.segment)

    @property
    def known_epoch(self) -> int:
        """Return the newest leader epoch that its uploader knew of."""
        return max([self.segment.leader_epoch, *(epoch for epoch, _ in self.epochs[-1:])])


@dataclass(frozen=True, slots=True)
class RebuildPlan:
    """The parts of a rebuilt manifest."""

    chosen: tuple[StoredSegment, ...]
    """Ascending."""
    left_out: tuple[tuple[StoredSegment, str], ...]
    """The segments that were not chosen, each with the reason."""
    holes: tuple[tuple[int, int], ...]
    """First and last offsets of the ranges between chosen segments that no chosen one holds."""
    unfinished: tuple[StoredSegment, ...] = ()
    """Chosen segments of a job that may have died half way; nothing else holds their offsets."""
    unrecorded: tuple[StoredSegment, ...] = ()
    """
    Segments that a job stored and that were not chosen, because no record shows that the job finished.

    The job died, or its record is lost.
    """
    brought_back: tuple[tuple[str, tuple[StoredSegment, ...]], ...] = ()
    """
    Chosen segments that a job had replaced, by job, where its replacements do not count any more: records
    that the job removed may be in them.
    """


def plan_rebuild(
    stored: Collection[StoredSegment],
    *,
    start_offset: int = 0,
    begins: Sequence[KnownBegin] = (),
    recorded: Sequence[RecordedRewriting] = (),
) -> RebuildPlan:
    """
    Choose the segments that make up the archive from *start_offset* on.

    *begins* tell where the archive began at earlier times. *recorded* are the rewritings that jobs have
    recorded.
    """
    on_lineage, off, epoch_starts = _by_lineage(stored)
    left_out = [(one, OFF_LINEAGE) for one in off]
    sound: list[StoredSegment] = []
    for one in on_lineage:
        if one.segment.last_offset < start_offset or any(begin.has_expired(one.segment) for begin in begins):
            left_out.append((one, EXPIRED))
        else:
            sound.append(one)
    there = sound
    valid = valid_rewritings(
        recorded,
        {one.identity: one.known_epoch for one in stored},
        [Candidate(one.identity, one.segment.uploaded_at_ms) for one in sound],
        epoch_starts,
    )
    left_out += [(one, SUPERSEDED) for one in sound if one.identity in valid.superseded]
    sound = [one for one in sound if one.identity not in valid.superseded]
    left = [one for one in sound if one.segment.is_rewritten and one.identity not in valid.named]
    others = {id(one) for one in left}
    chosen, wrong = _settled(one for one in sound if id(one) not in others)
    if left:
        chosen, more = _settled([*chosen, *(one for one in left if not _is_held(one, chosen))])
        wrong += more
    left_out += [(one, EPOCHS_GO_BACK) for one in wrong]
    used = {id(one) for one in (*chosen, *wrong)}
    left_out += [
        (one, UNFINISHED if id(one) in others else NOT_CHOSEN) for one in sound if id(one) not in used
    ]
    holes = tuple(
        (before.segment.next_offset, after.segment.base_offset - 1)
        for before, after in pairwise(chosen)
        if before.segment.next_offset < after.segment.base_offset
    )
    unfinished = tuple(one for one in chosen if id(one) in others)
    unrecorded = _unrecorded([one for one in there if id(one) not in used], recorded)
    brought_back = _brought_back(valid, chosen)
    return RebuildPlan(tuple(chosen), tuple(left_out), holes, unfinished, unrecorded, brought_back)


def kept_from(known: PartitionManifest | None) -> int:
    """Return the first offset that may be in the archive, according to the last *known* manifest."""
    # A manifest that began anew after another was lost begins where the broker's log did then, which says
    # nothing about older objects.
    return known.start_offset if known is not None and known.expired_at_ms is not None else 0


def rebuilt_manifest(
    partition: TopicIdPartition,
    plan: RebuildPlan,
    *,
    gap_reason: str,
    now_ms: int,
    known: PartitionManifest | None = None,
) -> PartitionManifest:
    """
    Return the manifest of the chosen segments, of which there is at least one.

    It takes over from the *known* manifest that it replaces: where the archive begins and ends, why
    offsets are missing, and what only the daemon can know. All archived offsets count as trimmed by
    tieringd: if the local log was cut meanwhile, the archive must not follow.
    """
    segments = [one.segment for one in plan.chosen]
    epochs = [epoch for one in plan.chosen for epoch in one.epochs]
    holes = dict(plan.holes)
    reasons = {(gap.base_offset, gap.last_offset): gap for gap in known.gaps} if known else {}
    manifest = PartitionManifest.begin(partition, start_offset=segments[0].base_offset, now_ms=now_ms)
    run: list[RemoteSegment] = []
    for segment in segments:
        run.append(segment)
        last_missing = holes.get(segment.next_offset)
        if last_missing is not None:
            gap = Gap(segment.next_offset, last_missing, gap_reason, now_ms)
            known_gap = reasons.get((gap.base_offset, gap.last_offset))
            manifest = manifest.appended(run).with_gap(known_gap or gap)
            run = []
    manifest = manifest.appended(run, epochs, _crossing(plan, epochs))
    if known is not None:
        manifest = _gone_on(manifest, known, gap_reason=gap_reason, now_ms=now_ms)
    return replace(manifest, trimmed_offset=manifest.next_offset)


def _gone_on(
    manifest: PartitionManifest, known: PartitionManifest, *, gap_reason: str, now_ms: int
) -> PartitionManifest:
    if manifest.next_offset < known.next_offset:
        # Uploads continue from the known end: what was reported as archived cannot be taken back.
        end = known.gaps[-1] if known.gaps else None
        gap = Gap(manifest.next_offset, known.next_offset - 1, gap_reason, now_ms)
        is_same = end is not None and (end.base_offset, end.last_offset) == (gap.base_offset, gap.last_offset)
        manifest = manifest.with_gap(end if end is not None and is_same else gap)
    return replace(
        manifest,
        start_offset=max(manifest.start_offset, kept_from(known)),
        began_at_ms=known.began_at_ms,
        replacements=known.replacements,
        translation=known.translation,
        allowed_local_start_offset=known.allowed_local_start_offset,
        expired_at_ms=known.expired_at_ms,
        # The list of held objects is not kept: only a log can bring back what compactions removed.
        unsettled=known.released([one for one in known.retired if one.is_held], is_settled=False).unsettled,
        deletions=known.deletions,
    )


def _by_lineage(
    stored: Iterable[StoredSegment],
) -> tuple[list[StoredSegment], list[StoredSegment], dict[int, int]]:
    """
    Return the segments on the lineage, as far as that can be told, and those that are off it.

    The third result is the first offset of each leader epoch.
    """
    starts: dict[int, int] = {}
    on: list[StoredSegment] = []
    off: list[StoredSegment] = []
    newest_first = sorted(stored, key=attrgetter("known_epoch"), reverse=True)
    for known_epoch, group in groupby(newest_first, key=attrgetter("known_epoch")):
        end = min((start for epoch, start in starts.items() if epoch > known_epoch), default=None)
        for one in list(group):
            if end is not None and one.segment.last_offset >= end:
                off.append(one)
                continue
            on.append(one)
            for epoch, start in one.epochs:
                starts[epoch] = min(start, starts.get(epoch, start))
    return on, off, starts


def _settled(stored: Iterable[StoredSegment]) -> tuple[list[StoredSegment], list[StoredSegment]]:
    """Return the best choice in which epochs do not go back, and the segments left out for that."""
    sound, wrong = list(stored), list[StoredSegment]()
    while True:
        chosen = _choose(sound)
        first = _first_wrong(chosen)
        if first is None:
            return chosen, wrong
        sound.remove(first)
        wrong.append(first)


def _is_held(one: StoredSegment, chosen: Sequence[StoredSegment]) -> bool:
    """Say whether any of a segment's offsets are in *chosen*, which ascend."""
    row = bisect_left(chosen, one.segment.base_offset, key=attrgetter("segment.last_offset"))
    return row < len(chosen) and chosen[row].segment.base_offset <= one.segment.last_offset


def _brought_back(
    valid: ValidRewritings, chosen: Sequence[StoredSegment]
) -> tuple[tuple[str, tuple[StoredSegment, ...]], ...]:
    """Return, by job, which of *chosen* (ascending) it had stored replacements for."""
    rows: defaultdict[str, set[int]] = defaultdict(set)
    for one, recorded_at_ms in valid.fallen:
        row = bisect_left(chosen, one.base_offset, key=attrgetter("segment.last_offset"))
        while row < len(chosen) and chosen[row].segment.base_offset <= one.last_offset:
            # A later run of the job has removed the same records; an earlier one has not.
            is_older = valid.named.get(chosen[row].identity, recorded_at_ms) <= recorded_at_ms
            if is_older and chosen[row].segment.writer_id != one.writer_id:
                rows[one.writer_id].add(row)
            row += 1
    return tuple((job, tuple(chosen[row] for row in sorted(some))) for job, some in sorted(rows.items()))


def _unrecorded(
    left_out: Iterable[StoredSegment], recorded: Sequence[RecordedRewriting]
) -> tuple[StoredSegment, ...]:
    """
    Return the rewritten ones of *left_out* that no record names.

    A record that was stored after such a segment, and names others with its offsets, is of a job that did
    the work again.
    """
    told = {identity for one in recorded for identity in one.rewriting.stored}
    unknown = [one for one in left_out if one.segment.is_rewritten and one.identity not in told]
    # Jobs store segments of the same offsets again and again: the last time of each range is enough.
    stored_ms: dict[tuple[int, int], int] = {}
    for record in recorded if unknown else ():
        for each in record.rewriting.stored:
            span = each.base_offset, each.last_offset
            stored_ms[span] = max(record.stored_at_ms, stored_ms.get(span, record.stored_at_ms))
    spans = sorted(stored_ms)
    reach = list(accumulate((last for _, last in spans), max))
    """The greatest last offset of each span and all before it."""

    def is_done_again(one: StoredSegment) -> bool:
        segment = one.segment
        row = bisect_right(spans, segment.last_offset, key=itemgetter(0)) - 1
        while row >= 0 and reach[row] >= segment.base_offset:
            span = spans[row]
            if span[1] >= segment.base_offset and stored_ms[span] >= segment.uploaded_at_ms:
                return True
            row -= 1
        return False

    return tuple(one for one in unknown if not is_done_again(one))


def _choose(stored: Sequence[StoredSegment]) -> list[StoredSegment]:
    """Return the best choice without an overlap, ascending."""
    ordered = sorted(stored, key=_order)
    ends = [one.segment.last_offset for one in ordered]
    worths: list[_Worth] = [_NOTHING]
    """The worth of the best choice among the first n segments, by n."""
    before: list[int | None] = [None]
    """
    For each n, how many of the first segments precede the nth one in its best choice; None where the best
    choice does not contain it.
    """
    for count, one in enumerate(ordered):
        follows = bisect_right(ends, one.segment.base_offset - 1)
        worth = _sum(worths[follows], _worth(one))
        is_better = worth > worths[count]
        worths.append(worth if is_better else worths[count])
        before.append(follows if is_better else None)
    chosen: list[StoredSegment] = []
    count = len(ordered)
    while count:
        follows_or_none = before[count]
        if follows_or_none is None:
            count -= 1
            continue
        chosen.append(ordered[count - 1])
        count = follows_or_none
    return chosen[::-1]


def _order(one: StoredSegment) -> tuple[int, int, int, str, int]:
    """Return the sort key of a segment; no two objects have the same."""
    segment = one.segment
    return (
        segment.last_offset,
        segment.base_offset,
        segment.leader_epoch,
        segment.writer_id,
        segment.index_crc32c,
    )


def _worth(one: StoredSegment) -> _Worth:
    segment = one.segment
    offsets = segment.next_offset - segment.base_offset
    return offsets, -1, segment.leader_epoch, segment.uploaded_at_ms


def _sum(one: _Worth, other: _Worth) -> _Worth:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2], one[3] + other[3]


def _first_wrong(chosen: Iterable[StoredSegment]) -> StoredSegment | None:
    """Return the segment to leave out where epochs go back; None where they do not."""
    newest: StoredSegment | None = None
    for one in chosen:
        if not one.epochs:
            continue
        if newest is not None and one.epochs[0][0] < newest.epochs[-1][0]:
            return min((one, newest), key=lambda each: each.segment.leader_epoch)
        newest = one
    return None


def _crossing(plan: RebuildPlan, epochs: Sequence[EpochStart]) -> Iterable[CrossingTransaction]:
    """
    Yield the aborted transactions across segment ends whose markers are in the archive.

    Indexes do not list committed transactions.
    """
    ends = [one.segment.last_offset for one in plan.chosen]
    for stored in plan.chosen:
        for one in stored.aborted:
            row = bisect_left(ends, one.last_offset)
            is_stored = row < len(ends) and plan.chosen[row].segment.base_offset <= one.last_offset
            if is_stored and one.first_offset <= stored.segment.last_offset < one.last_offset:
                epoch = epoch_at(epochs, one.last_offset)
                if epoch is not None:
                    yield CrossingTransaction(one.producer_id, one.first_offset, one.last_offset, epoch)
