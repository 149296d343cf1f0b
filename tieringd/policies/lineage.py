"""
Leader-epoch lineage: whether the archive's tail still matches the partition leader's log.

After an unclean election, or a crash that lost records not yet on disk, the new leader's log continues
from an earlier offset than the archive ends at. Offsets repeat then, with other records under a newer
epoch. What the archive holds from the point of divergence on is off the lineage: it is replaced from the
leader's log, and the range is reported. What a segment holds below the divergence is good. It stays, because
the leader's log may lose it before it is copied again.

The comparison relies on one property of Kafka's replication: each epoch has one leader, so two logs that
both have an epoch are equal up to where the first of them ends it (KIP-101, KIP-279). Where the two
histories say an epoch *begins* is not compared: compaction and retention move that.

The archived outcome of a transaction may depend on a marker past the tail's end. When that marker is off
the lineage, the records match the leader's but their outcome may not: they are replaced as well.

A policy: it returns a frozen plan and touches neither log nor archive. Whenever it cannot know, it plans
nothing and says why.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from operator import attrgetter

from tieringd.model.local_log import LocalLog
from tieringd.model.manifest import SEGMENTS_REMEMBERED, PartitionManifest
from tieringd.model.partition import LogBounds
from tieringd.model.segment import CrossingTransaction, EpochStart
from tieringd.policies.epoch_history import end_offset_for, epoch_at, newest_shared_epoch
from tieringd.policies.upload_plan import MissingRange


class Lineage(Enum):
    """What is known of the archive's tail. Uploading continues only where `may_append` allows it."""

    HOLDS = "holds"
    """Nothing in the archive contradicts the leader's history."""
    UNKNOWN = "unknown"
    """One side has no history, and another observation will not bring one."""
    UNDECIDED = "undecided"
    """This observation of the broker came too early or too late; the next one may decide."""
    DIVERGES = "diverges"
    """The tail is off the lineage: it is replaced before anything is appended."""
    REOPENED = "reopened"
    """The tail is on the lineage, but the end of a transaction in it is not: it is replaced as well."""

    @property
    def may_append(self) -> bool:
        """Say whether segments may be appended to the archive without a replacement."""
        return self in {Lineage.HOLDS, Lineage.UNKNOWN}


class OperatorReason(StrEnum):
    """Why only an operator can say what becomes of records that are only in the archive."""

    DIVERGENCE_UNKNOWN = "divergence_unknown"
    """The histories of archive and leader have no epoch in common, so nothing tells where the logs part."""
    OUTCOME_LOST = "transaction_outcome_lost"
    """The leader's log no longer has the offsets where a transaction's marker may have been."""
    TRANSACTIONS_FORGOTTEN = "transactions_forgotten"
    """The divergence is so far back that the manifest no longer lists the transactions open there."""
    SEGMENT_UNREADABLE = "segment_unreadable"
    """A stored segment with good records is missing or damaged."""
    LOG_BEGAN_ANEW = "log_began_anew"
    """The leader's log has no epoch in common with the archive, and would replace stored segments."""


@dataclass(frozen=True, slots=True)
class ArchiveTruncation:
    """
    The tail of an archive that must give way to the leader's log.

    Every segment, gap and epoch from `base_offset` on leaves the manifest, and uploading continues from
    there. The offset is a batch boundary in the leader's log too, if that log still reaches back to it:
    up to the divergence the two logs have the same batches.
    """

    base_offset: int
    """The base of the first segment, or gap, that is replaced. All below stays."""
    last_offset: int
    divergence_offset: int
    """
    The first offset that is off the lineage, or the end of a tail that is wholly on it. Between `base_offset`
    and here the records are good.
    """
    segment_count: int
    local_base_offset: int | None
    """The base of the local segment that holds `base_offset`, which may begin before it."""
    missing: MissingRange | None
    """Offsets from `base_offset` on that the local log no longer holds: a gap unless salvaged."""
    good: MissingRange | None
    """
    The offsets below the divergence that are in stored segments. They are durable, and stay so unless nothing
    tells how a transaction among them ends: then the leader's log, which has all of them, replaces them.
    """
    only_archived: MissingRange | None
    """
    The offsets of *missing* that are *good*: the stored segments are their only copy. The replacement must
    keep them, or data is lost that was promised to be durable.
    """


@dataclass(frozen=True, slots=True)
class LineagePlan:
    """What to do with the archive's tail before the next upload, and why."""

    lineage: Lineage
    reason: str
    resume_offset: int
    """Exclusive end of what the archive keeps: the next upload begins here."""
    replacement: ArchiveTruncation | None = None
    """Set exactly when the lineage diverges, or a transaction is open again."""
    is_log_anew: bool = False
    """
    Whether stored segments would go for a log that has no epoch in common with the archive, as after a lost
    disk. The archive may have the only copy of all that was written, so only an operator can say so. A part
    that is good and only in the archive makes a case of its own.
    """


def divergence_offset(
    archived_epochs: Sequence[EpochStart],
    local_epochs: Sequence[EpochStart],
    *,
    archived_next_offset: int,
    local_next_offset: int,
) -> int:
    """
    Return the first archived offset that is not on the leader's lineage.

    It is *archived_next_offset* when nothing contradicts that all of it is, or when one of the histories
    is empty. The leader's log may have lost its head to retention, and with it old epochs: their absence
    contradicts nothing below the first offset that the log knows.

    Both histories must come from a checkpoint (`epoch_history.clipped`). The batches of a segment alone
    do not show an epoch whose batches compaction removed.
    """
    if not archived_epochs or not local_epochs:
        return archived_next_offset
    shared = newest_shared_epoch(archived_epochs, local_epochs)
    if shared is not None:
        return min(
            archived_next_offset,
            _end_of(archived_epochs, shared, archived_next_offset),
            _end_of(local_epochs, shared, local_next_offset),
        )
    # The leader knows only epochs that the archive never saw. Everything before the leader's first epoch
    # is older, so newer archived epochs cannot be part of its log.
    first_epoch, first_offset = local_epochs[0]
    newer = [start_offset for epoch, start_offset in archived_epochs if epoch > first_epoch]
    return min(archived_next_offset, first_offset, *newer)


def archived_end(manifest: PartitionManifest | None, log: LocalLog) -> int | None:
    """
    Return the exclusive end of what the archive holds of *log*; None without a manifest.

    *manifest* may be an old copy. Offsets off the lineage of *log* do not count: another leader is about
    to cut them off, or has done so already. The same holds for a transaction whose marker is off the lineage.
    """
    if manifest is None:
        return None
    reopened = _first_reopened(manifest, log)
    if reopened is not None:
        end = _entry_base(manifest, reopened.first_offset)
        return min(end, _lineage_end(manifest, log))
    return _lineage_end(manifest, log)


def _lineage_end(manifest: PartitionManifest, log: LocalLog) -> int:
    if not manifest.epochs or not log.epochs or manifest.epochs[-1] == log.epochs[-1]:
        return manifest.next_offset
    return divergence_offset(
        manifest.epochs,
        log.epochs,
        archived_next_offset=manifest.next_offset,
        # The log's real end is not needed: beyond these offsets it has nothing to protect.
        local_next_offset=max(manifest.next_offset, log.epochs[-1][1]),
    )


def plan_replacement(
    manifest: PartitionManifest,
    log: LocalLog,
    bounds: LogBounds,
    *,
    leader_epoch: int,
    undecided_from: int | None = None,
) -> LineagePlan:
    """
    Judge the tail of *manifest* by the leader's *log*, under the leader's current epoch.

    The archive's indexes record how a transaction ended for the old leader; without that marker it may
    end otherwise for the new one. So all from the first such transaction on is replaced, even where the
    whole tail is on the lineage. The manifest lists the markers that ended transactions across segments,
    for some segments back from its end. *undecided_from* is the first offset of the first transaction
    that, by what is left of the local log, is open at the divergence.

    A gap at the very end of the archive is not judged: it holds no records. Segments uploaded under
    *leader_epoch* itself are compared like all others: that this broker uploaded them does not prove that
    its log is still the same.
    """
    known = _without_comparison(manifest, log, leader_epoch)
    if known is not None:
        return LineagePlan(*known, manifest.next_offset)
    # An archive that retention emptied only has its end and its epochs left.
    last = manifest.segments[len(manifest.segments) - 1] if manifest.segments else None
    tail_end = last.next_offset if last else manifest.start_offset
    divergence = divergence_offset(
        manifest.epochs,
        log.epochs,
        archived_next_offset=tail_end,
        local_next_offset=bounds.log_end_offset,
    )
    newest = manifest.epochs[-1][0]
    reopened = _first_reopened(manifest, log)
    if last is None:
        # An older tieringd left transactions in the list of an archive that an election had emptied.
        reopened = None
    if divergence == tail_end:
        if reopened is None:
            return LineagePlan(Lineage.HOLDS, _why_holds(manifest, log), manifest.next_offset)
        replacement = _replacement(manifest, log, bounds, divergence, reopened.first_offset)
        reason = _why_reopened(reopened, leader_epoch)
        return LineagePlan(Lineage.REOPENED, reason, replacement.base_offset, replacement)
    if newest >= leader_epoch:
        # Then only the log's end contradicts the tail, and the observed end may lag behind.
        reason = (
            f"the archive has leader epoch {newest} up to offset {tail_end - 1}, but the log that leads "
            f"since epoch {leader_epoch} is only known up to offset {bounds.log_end_offset - 1}"
        )
        return LineagePlan(Lineage.UNDECIDED, reason, manifest.next_offset)
    reason = (
        f"offsets {divergence} to {tail_end - 1} were archived from a leader whose records are not in the "
        f"log that leads since epoch {leader_epoch}"
    )
    from_offset = divergence
    if reopened is not None and reopened.first_offset < from_offset:
        from_offset = reopened.first_offset
        reason = f"{reason}; {_why_reopened(reopened, leader_epoch)}"
    if undecided_from is not None and undecided_from < from_offset:
        from_offset = undecided_from
        reason = f"{reason}; a transaction that is open there began at offset {undecided_from}"
    replacement = _replacement(manifest, log, bounds, divergence, from_offset)
    return LineagePlan(
        Lineage.DIVERGES,
        reason,
        replacement.base_offset,
        replacement,
        is_log_anew=replacement.segment_count > 0
        and replacement.only_archived is None
        and not knows_divergence(manifest, log),
    )


def _without_comparison(
    manifest: PartitionManifest, log: LocalLog, leader_epoch: int
) -> tuple[Lineage, str] | None:
    """Return the result that needs no comparison of histories, and why; None when they must be compared."""
    if manifest.leader_epoch > leader_epoch:
        return Lineage.UNDECIDED, (
            f"leader epoch {manifest.leader_epoch} wrote the manifest, but this broker was last seen "
            f"leading since epoch {leader_epoch}"
        )
    too_early = why_too_early(log, leader_epoch) if log.epochs else ""
    if too_early:
        # This also holds without a comparison: the segments to append would be of a log of another epoch.
        return Lineage.UNDECIDED, too_early
    if not manifest.segments and manifest.expired_at_ms is None:
        return Lineage.HOLDS, "the archive holds no segment"
    if not manifest.epochs or not log.epochs:
        side = "archive" if log.epochs else "local log"
        return Lineage.UNKNOWN, f"the {side} has no leader-epoch history"
    return None


def voided_transactions(
    manifest: PartitionManifest, log: LocalLog, divergence: int
) -> tuple[CrossingTransaction, ...]:
    """
    Return the archived transactions that began before *divergence* and whose marker is not in *log*.

    The log of the leader parts from the archive at *divergence*; all of the archive may come before it.
    """
    has_wrong_tail = manifest.segments.row_at_or_after(divergence) < len(manifest.segments)
    return tuple(
        one
        for one in manifest.crossing
        if one.first_offset < divergence <= one.marker_offset and (has_wrong_tail or _lacks_marker(log, one))
    )


def knows_divergence(manifest: PartitionManifest, log: LocalLog) -> bool:
    """
    Say whether the histories of *manifest* and *log* tell where the two part.

    Without an epoch in common the log begins under an epoch that the archive never saw. The two part there
    at the latest, but they may have parted before. A broker that deletes the head of its log lets the first
    epoch of the history begin where the log does then. So not even a history that begins with epoch 1 tells
    that all before it was of epoch 0.
    """
    return newest_shared_epoch(manifest.epochs, log.epochs) is not None


def remembers_transactions_at(manifest: PartitionManifest, offset: int) -> bool:
    """Say whether `crossing` still has all transactions that are open at *offset* and begin before it."""
    rows_after = len(manifest.segments) - manifest.segments.row_at_or_after(offset)
    return rows_after <= SEGMENTS_REMEMBERED


def why_too_early(log: LocalLog, leader_epoch: int) -> str:
    """Return why *log* cannot be the log of the leader since *leader_epoch* yet; empty when it can."""
    if not log.segments:
        return "the local log has no segment yet"
    # A leader's epoch enters its history before the first record under it is appended. Until then the
    # history does not show where the previous epoch ends.
    newest = log.epochs[-1][0]
    if newest != leader_epoch:
        return (
            f"the local leader-epoch history ends with epoch {newest}, but this broker was last seen "
            f"leading since epoch {leader_epoch}"
        )
    return ""


def _why_holds(manifest: PartitionManifest, log: LocalLog) -> str:
    shared = newest_shared_epoch(manifest.epochs, log.epochs)
    if shared is None:
        return (
            f"the archive ends before offset {log.epochs[0][1]}, the first offset of the local leader-epoch "
            "history"
        )
    return f"the local log has leader epoch {shared} up to the end of the archive"


def _first_reopened(manifest: PartitionManifest, log: LocalLog) -> CrossingTransaction | None:
    """
    Return the first archived transaction whose marker is not in *log*.

    Where the history of *log* begins later than the marker, nothing contradicts the marker.
    """
    if not manifest.crossing or not log.epochs:
        return None
    newest = log.epochs[-1][0]
    reopened = (
        one
        for one in manifest.crossing
        # Mostly all markers are of the newest leader, and every round asks, so this check comes first.
        if one.leader_epoch != newest and _lacks_marker(log, one)
    )
    return min(reopened, key=attrgetter("first_offset"), default=None)


def _lacks_marker(log: LocalLog, transaction: CrossingTransaction) -> bool:
    epoch = epoch_at(log.epochs, transaction.marker_offset)
    return epoch not in {None, transaction.leader_epoch}


def _why_reopened(transaction: CrossingTransaction, leader_epoch: int) -> str:
    return (
        f"the transaction of producer {transaction.producer_id} that began at offset "
        f"{transaction.first_offset} was archived with a marker of leader epoch {transaction.leader_epoch} "
        f"at offset {transaction.marker_offset}; the log that leads since epoch {leader_epoch} lacks that "
        "marker"
    )


def _replacement(
    manifest: PartitionManifest, log: LocalLog, bounds: LogBounds, divergence: int, from_offset: int
) -> ArchiveTruncation:
    local_first = log.segments[0].base_offset
    if divergence < manifest.start_offset:
        # The archive is empty, and from the divergence on it never held this leader's records.
        base_offset = min(manifest.start_offset, max(divergence, _first_kept(log, bounds)))
    else:
        base_offset = _entry_base(manifest, from_offset)
    # The replacement may begin with a gap, and the first stored segment comes after it.
    stored = manifest.segments.overlapping(base_offset, divergence)
    first_good = max(base_offset, stored[0].base_offset) if stored else divergence
    # A broker deletes the files before its log start at any moment: they are no copy.
    only_archived_end = min(divergence, max(local_first, _first_kept(log, bounds)))
    row = bisect_right([segment.base_offset for segment in log.segments], base_offset) - 1
    return ArchiveTruncation(
        base_offset=base_offset,
        last_offset=manifest.next_offset - 1,
        divergence_offset=divergence,
        segment_count=len(manifest.segments) - manifest.segments.row_at_or_after(base_offset),
        local_base_offset=log.segments[row].base_offset if row >= 0 else None,
        missing=MissingRange(base_offset, local_first - 1) if base_offset < local_first else None,
        good=_range(first_good, divergence),
        only_archived=_range(first_good, only_archived_end),
    )


def _range(base_offset: int, next_offset: int) -> MissingRange | None:
    return MissingRange(base_offset, next_offset - 1) if base_offset < next_offset else None


def _first_kept(log: LocalLog, bounds: LogBounds) -> int:
    """Return the base of the first local segment that the broker is not deleting."""
    return next(
        segment.base_offset
        for segment in log.segments
        if segment.next_offset is None or segment.next_offset > bounds.log_start_offset
    )


def _entry_base(manifest: PartitionManifest, offset: int) -> int:
    """Return the base of the segment or gap that holds *offset*; else the archive's start."""
    segment = manifest.segments.covering(offset)
    if segment is not None:
        return segment.base_offset
    return next(
        (gap.base_offset for gap in manifest.gaps if gap.base_offset <= offset < gap.next_offset),
        manifest.start_offset,
    )


def _end_of(history: Sequence[EpochStart], epoch: int, log_end_offset: int) -> int:
    answer = end_offset_for(history, epoch, log_end_offset=log_end_offset)
    assert answer is not None, "the epoch is in the history"
    return answer[1]
