"""
Verifying an archive against its manifests: every object there, whole, and saying what it should.

What a look at a segment sees is told in `archive.scrub.segment_look`. A manifest is given here, and is
taken for what it is: for one that may change meanwhile there is `archive.scrub.partition_scrub`.
Nothing is changed; what is wrong is returned in words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tieringd.archive.scrub.segment_look import SegmentLooker
from tieringd.errors import CorruptDataError, ObjectNotFound

if TYPE_CHECKING:
    from tieringd.archive.spillover_manifests import SpilloverManifests
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.partition import TopicIdPartition
    from tieringd.storage.base import ObjectStore


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """What was found of one partition."""

    partition: TopicIdPartition
    segments: int
    size_bytes: int
    records: int | None
    """None after a shallow look."""
    gap_offsets: int
    faults: tuple[str, ...]


class Verifier:
    """Compare manifests with objects. Reads only; one partition at a time."""

    def __init__(self, store: ObjectStore, spillovers: SpilloverManifests) -> None:
        self._looker = SegmentLooker(store)
        self._spillovers = spillovers

    async def verify(
        self, manifest: PartitionManifest, *, deep: bool, newest: int | None = None
    ) -> PartitionReport:
        """
        Return what is right and wrong with one partition's objects.

        *newest* looks only at the objects of so many segments at the archive's end.
        """
        faults = list(manifest.faults())
        try:
            wanted = manifest.live_offset if newest is not None and newest <= len(manifest.segments) else None
            manifest = await self._spillovers.with_history(manifest, from_offset=wanted)
        except (ObjectNotFound, CorruptDataError) as error:
            faults.append(f"its older segments cannot be looked at: {error}")
        records = 0
        rows = len(manifest.segments)
        first = 0 if newest is None else max(0, rows - newest)
        for segment in (manifest.segments[row] for row in range(first, rows)):
            look = await self._looker.look(manifest.partition, segment, deep=deep)
            records += look.records
            faults += [str(finding) for finding in look.findings]
        return PartitionReport(
            partition=manifest.partition,
            segments=manifest.segment_count,
            size_bytes=manifest.size_bytes,
            records=records if deep else None,
            gap_offsets=manifest.gap_offsets,
            faults=tuple(faults),
        )
