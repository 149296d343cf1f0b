"""
What the records of erasures say of a partition whose manifest is lost.

An erasure stores a record of the rewriting for each partition that it changes, and a rebuild goes by these
(`valid_rewritings`). The record of the erasure itself is a second witness:

* It names what it replaced as well, in case the record of the rewriting is lost.
* It tells where a partition began when the erasure went over it. Objects before that had expired and were not
  searched. They may have the erased keys, and a rebuild must not bring them back.
* It tells which partitions it has not gone over, because their manifests were missing at that time, or
  because it was killed. What a rebuild brings back of them has to be searched by another erasure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from tieringd.formats.job_records import RecordedErasure
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import RemoteSegment
from tieringd.policies.valid_rewritings import RecordedRewriting


@dataclass(frozen=True, slots=True)
class KnownBegin:
    """Where an archive began at a time."""

    start_offset: int
    at_ms: int

    def has_expired(self, segment: RemoteSegment) -> bool:
        """Say whether *segment* was stored before that time, and had expired by then."""
        return segment.last_offset < self.start_offset and segment.uploaded_at_ms < self.at_ms


@dataclass(slots=True)
class ErasureEvidence:
    """What the records of erasures say of one partition. Take them in the order in which they began."""

    begins: tuple[KnownBegin, ...] = ()
    rewritings: list[RecordedRewriting] = field(default_factory=list)
    missed_by: list[RecordedErasure] = field(default_factory=list)
    """Erasures that have not gone over the partition, and no later one with all of their keys has."""

    def take(self, erasure: RecordedErasure, partition: TopicIdPartition) -> None:
        """Take an erasure that was to go over *partition*."""
        self.rewritings += [
            RecordedRewriting(one.rewriting, one.retired_at_ms)
            for one in erasure.rewritten
            if one.partition == partition
        ]
        if erasure.gone_over is None:
            return
        begin = next(
            (
                KnownBegin(one.start_offset, erasure.begun_at_ms)
                for one in erasure.gone_over
                if one.partition == partition
            ),
            None,
        )
        if begin is None:
            self.missed_by.append(erasure)
            return
        # A later erasure tells of all that had expired before an earlier one, unless the archive began anew.
        kept = [one for one in self.begins if one.start_offset > begin.start_offset]
        self.begins = (*kept, begin)
        self.missed_by = [one for one in self.missed_by if not one.key_sha256 <= erasure.key_sha256]

    def unrecorded(self, recorded: Iterable[RecordedRewriting]) -> list[RecordedRewriting]:
        """Return the rewritings of erasures that *recorded*, the records of rewritings, do not have."""
        known = {identity for one in recorded for identity in one.rewriting.stored}
        return [one for one in self.rewritings if not known.issuperset(one.rewriting.stored)]

    def unsearched(self, segments: Collection[RemoteSegment]) -> list[RecordedErasure]:
        """Return the erasures that have not gone over one of *segments*, which was there when they began."""
        oldest_ms = min((one.uploaded_at_ms for one in segments), default=None)
        return [one for one in self.missed_by if oldest_ms is not None and oldest_ms < one.begun_at_ms]
