"""
What the records of erasures say of a partition whose manifest is lost.

An erasure stores a record of the rewriting for each partition that it changes, and a rebuild goes by these
(`valid_rewritings`). The record of the erasure itself is a second witness:

* It names what it replaced as well, in case the record of the rewriting is lost.
* It tells where a partition began when the erasure went over it. Objects before that were not searched, and
  may have the erased keys. If they had expired, a rebuild must not bring them back. If not, the manifest may
  have begun anew after another was lost: then they are part of the archive, and must not be left out.
* It tells which partitions it has not gone over, because their manifests were missing at that time, or
  because it was killed. What a rebuild brings back without a search has to be searched by another erasure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter
from typing import Final

from tieringd.formats.job_records import RecordedErasure
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import RemoteSegment
from tieringd.policies.valid_rewritings import RecordedRewriting

_BASE: Final = attrgetter("base_offset")


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
    missed_by: list[tuple[RecordedErasure, int | None]] = field(default_factory=list)
    """
    Erasures that have not gone over the partition before an offset, or not at all (None).

    An erasure is left out if a later one with all of its keys has gone over the partition.
    """

    def take(self, erasure: RecordedErasure, partition: TopicIdPartition) -> None:
        """Take an erasure that was to go over *partition*."""
        self.rewritings += [
            RecordedRewriting(one.rewriting, one.retired_at_ms)
            for one in erasure.rewritten
            if one.partition == partition
        ]
        if erasure.gone_over is None:
            return
        searched = next((one for one in erasure.gone_over if one.partition == partition), None)
        if searched is None:
            self.missed_by.append((erasure, None))
            return
        self.missed_by = [one for one in self.missed_by if not one[0].key_sha256 <= erasure.key_sha256]
        if not searched.has_expired:
            # Nothing can be older than offset 0.
            self.missed_by += [(erasure, searched.start_offset)] if searched.start_offset else []
            return
        begin = KnownBegin(searched.start_offset, erasure.begun_at_ms)
        # A later erasure tells of all that had expired before an earlier one, unless the archive began anew.
        kept = [one for one in self.begins if one.start_offset > begin.start_offset]
        self.begins = (*kept, begin)

    def unrecorded(self, recorded: Iterable[RecordedRewriting]) -> list[RecordedRewriting]:
        """Return the rewritings of erasures that *recorded*, the records of rewritings, do not have."""
        known = {identity for one in recorded for identity in one.rewriting.stored}
        return [one for one in self.rewritings if not known.issuperset(one.rewriting.stored)]

    def unsearched(self, segments: Collection[RemoteSegment]) -> list[RecordedErasure]:
        """Return the erasures that have not gone over one of *segments*, which was there when they began."""
        ascending = sorted(segments, key=_BASE)
        oldest_ms = list(accumulate((one.uploaded_at_ms for one in ascending), min))
        """The time of the oldest segment of each row and all before it."""
        found: list[RecordedErasure] = []
        for erasure, before in self.missed_by:
            rows = len(ascending) if before is None else bisect_left(ascending, before, key=_BASE)
            if rows and oldest_ms[rows - 1] < erasure.begun_at_ms:
                found.append(erasure)
        return found
