"""
The one rule for dropping a record from an archive. The daemon's re-upload and Spark's compaction keep it.

A record is dropped because of another one, its winner: a later record of its key, or a later tombstone.
Without the winner the record would be the latest of its key again. So the rule is:

1. A record may be dropped only if its winner cannot be lost any more, or if the record can be brought
   back until then. A winner cannot be lost once it lies below the start of every replica's log: no
   election cuts an archive back to there. Until then the replaced segments are held: their objects stay,
   and they replace the compacted segments again when an election cuts a winner off. Where every replica's
   log has the record itself and is never trimmed, the log brings it back: the archive is cut back as far
   as compactions reached.
2. A tombstone may be dropped only if no older record of its key can be read any more. So a job that drops
   one has read all that can be read before it, and drops what the tombstone hides in the same commit or
   earlier.
3. Compacted segments replace others only while the archive has all segments that their winners came from.
4. A transaction's marker may be dropped only if no record of the transaction can be read any more. Without
   it, the producer's next marker seems to end both transactions.

The rule does not cover erasure: an erased record has no winner, and must not come back. Segments that an
erasure covers are no longer held (`PartitionManifest.released`).

The manifest keeps what the rule needs: `Retired.winners_end` for held segments, and `unsettled` for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from tieringd.model.local_log import LocalLog
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Replacement, Retired
from tieringd.model.segment_table import SegmentTable


@dataclass(frozen=True, slots=True)
class LogObservation:
    """One observation of a leader's log, as far as it shows what can still be lost."""

    log_start_offset: int
    keeps_all: bool
    """
    Whether the log is never trimmed on any replica: its topic is compacted and has no other cleanup policy.
    """


@dataclass(frozen=True, slots=True)
class RetiredRelease:
    """Held segments that may be released."""

    settled: tuple[Retired, ...] = ()
    """Segments of compactions whose winners cannot be lost any more."""
    in_log: tuple[Retired, ...] = ()
    """Segments whose records are in the log of every replica."""
    is_all_settled: bool = False
    """Whether `PartitionManifest.unsettled` is settled as well."""

    def __bool__(self) -> bool:
        """Say whether there is anything to release."""
        return bool(self.settled or self.in_log or self.is_all_settled)


@dataclass(frozen=True, slots=True)
class CompactionBasis:
    """What a compaction has read: all segments that its winners came from."""

    segments: SegmentTable
    """Ascending, from the first one that can be read. Recorded gaps may lie between them."""
    replacements: tuple[Replacement, ...]
    """The replacements that the manifest listed at that time."""
    has_log: bool
    """Whether a broker may still have the partition's log, so that an election may cut the archive back."""

    @property
    def next_offset(self) -> int:
        """Return the first offset after all winners."""
        return self.segments[len(self.segments) - 1].next_offset if self.segments else 0

    @property
    def winners_end(self) -> int:
        """Return the offset up to which winners may be lost; 0 where none can be."""
        return self.next_offset if self.has_log else 0


def winners_end_of(log: LocalLog) -> int:
    """Return the end of possible winners over records of *log*; cleaners skip the active segment."""
    return max((one.next_offset for one in log.segments if one.next_offset is not None), default=0)


def may_drop_tombstones(*, read_from: int, readable_from: int | None) -> bool:
    """
    Say whether tombstones may be dropped after all records from *read_from* on were read.

    *readable_from* is the first offset that can be read; None where an older archive comes before this one.
    """
    return readable_from is not None and read_from <= readable_from


def why_winners_may_be_gone(basis: CompactionBasis, manifest: PartitionManifest, *, base_offset: int) -> str:
    """
    Say why *manifest* may lack a winner of a compaction whose first segment begins at *base_offset*.

    Empty where it has them all. A winner lies after what it wins over. Segments may have been merged or
    rewritten since, which loses no winner: each of those changes keeps this rule. A cut of the archive
    loses winners.

    An offset that no segment has counts only where the basis had a segment: recorded gaps have none.

    *manifest* must list all segments from *base_offset* on.
    """
    known = len(basis.replacements)
    later = manifest.replacements[known:]
    if manifest.replacements[:known] != basis.replacements or any(
        one.base_offset < basis.next_offset for one in later
    ):
        return "an election has removed segments that the job had read"
    lost = _first_lost(basis, manifest, from_offset=max(base_offset, manifest.start_offset))
    return "" if lost is None else f"the archive no longer has offset {lost}, which the job had read"


def _first_lost(basis: CompactionBasis, manifest: PartitionManifest, *, from_offset: int) -> int | None:
    """Return the first offset from *from_offset* on that segments of *basis* have and *manifest* lacks."""
    expected, end = from_offset, basis.next_offset
    held = ((one.base_offset, one.next_offset) for one in manifest.segments.overlapping(expected, end))
    for base_offset, next_offset in chain(held, [(end, end)]):
        if expected < base_offset and (read := basis.segments.overlapping(expected, base_offset)):
            return max(expected, read[0].base_offset)
        expected = next_offset
    return None


def plan_release(manifest: PartitionManifest, observations: Sequence[LogObservation]) -> RetiredRelease:
    """
    Return what of *manifest* may be released, as all *observations* (observations of its leader's log) agree.

    The oldest are released first: a later compaction cannot be undone alone (`model.tail_cut.undone`).
    Without an observation nothing is released. A leader's log begins at or after every live replica's
    once a trim was acknowledged. A log start may come back lower after a crash, so callers pass two
    observations at least.
    """
    if not observations:
        return RetiredRelease()
    log_start_offset = min(one.log_start_offset for one in observations)
    keeps_all = all(one.keeps_all for one in observations)
    # A log start that moved between the observations shows that the log was trimmed after all.
    keeps_all = keeps_all and len({one.log_start_offset for one in observations}) == 1
    settled: list[Retired] = []
    in_log: list[Retired] = []
    for one in manifest.retired:
        if not one.is_held:
            continue
        if one.winners_end <= log_start_offset or one.next_offset <= manifest.start_offset:
            settled.append(one)
        elif keeps_all and one.base_offset >= log_start_offset:
            in_log.append(one)
        else:
            break
    unsettled = manifest.unsettled
    is_settled = unsettled is not None and unsettled.winners_end <= log_start_offset and not in_log
    return RetiredRelease(tuple(settled), tuple(in_log), is_settled)


def cut_for_unsettled(
    manifest: PartitionManifest, next_offset: int, *, log_start_offset: int
) -> tuple[int, str]:
    """
    Return where to cut an archive that is to end at *next_offset*, and what cannot be brought back.

    Winners at *next_offset* and after it are lost. Where their compactions are not held, the new leader's
    log replaces what they left, as far as that log reaches: from *log_start_offset* on. *manifest* must
    list all segments from there, or from `unsettled` on.
    """
    unsettled = manifest.unsettled
    if unsettled is None or not unsettled.base_offset < next_offset < unsettled.winners_end:
        return next_offset, ""
    wanted = max(unsettled.base_offset, log_start_offset)
    bases = manifest.segments.column("base_offset")
    row = manifest.segments.row_at_or_after(wanted)
    if row < len(bases) and bases[row] < wanted:
        row += 1
    cut_offset = min(bases[row], next_offset) if row < len(bases) else next_offset
    if cut_offset <= unsettled.base_offset:
        return cut_offset, ""
    return cut_offset, (
        f"compactions removed records from offsets {unsettled.base_offset} to {cut_offset - 1}, and their "
        f"later versions, up to offset {unsettled.winners_end - 1}, may be cut off with the tail; the "
        "removed records are neither in the bucket nor in the leader's log, which begins at offset "
        f"{log_start_offset}"
    )
