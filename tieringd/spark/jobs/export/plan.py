"""
Divide the offsets that a run exports into portions. One task writes each portion.

This is pure. Only offsets identify a portion. So a portion stays the same if segments are merged or compacted
between a run that was killed and the run that continues.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Final

from tieringd.errors import TieringError
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Gap
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import RemoteSegment

ALLOW_GAPS: Final = "Allow gaps (`--allow-gaps`) to export the rest"


@dataclass(frozen=True, slots=True)
class Portion:
    """The offsets of one partition that one task writes."""

    partition: TopicIdPartition
    from_offset: int
    next_offset: int
    """The end of the offsets, exclusive."""
    size_bytes: int
    """The estimated size of these offsets in the archive."""


@dataclass(frozen=True, slots=True)
class LostOffsets:
    """Offsets to export that the archive does not have."""

    partition: TopicIdPartition
    from_offset: int
    next_offset: int
    """The end of the offsets, exclusive."""
    reason: str

    def __str__(self) -> str:
        return f"{self.partition} offsets {self.from_offset} to {self.next_offset - 1}: {self.reason}"


def portions_of(
    partition: TopicIdPartition,
    segments: Iterable[RemoteSegment],
    *,
    from_offset: int,
    next_offset: int,
    portion_bytes: int,
) -> Iterator[Portion]:
    """
    Yield portions of about *portion_bytes* that cover all offsets from *from_offset* to *next_offset*.

    *next_offset* is exclusive. *segments* are in ascending order. Small segments share a portion. Large
    ones are cut into equal spans of offsets.
    """
    begin, held_bytes = from_offset, 0
    for segment in segments:
        base, stop = max(segment.base_offset, begin), min(segment.next_offset, next_offset)
        if stop <= base:
            continue
        size_bytes = segment.size_bytes * (stop - base) // (segment.next_offset - segment.base_offset)
        if held_bytes and held_bytes + size_bytes > portion_bytes:
            yield Portion(partition, begin, base, held_bytes)
            begin, held_bytes = base, 0
        cuts = max(1, -(-size_bytes // portion_bytes))
        for number in range(1, cuts):
            cut = base + (stop - base) * number // cuts
            if cut > begin:
                yield Portion(partition, begin, cut, size_bytes // cuts)
                begin = cut
        held_bytes += size_bytes // cuts
    if begin < next_offset:
        yield Portion(partition, begin, next_offset, held_bytes)


def without(lost: LostOffsets, known: Iterable[LostOffsets]) -> list[LostOffsets]:
    """Return the parts of *lost* that are in none of *known*."""
    left, begin = [], lost.from_offset
    of_partition = (one for one in known if one.partition == lost.partition)
    for one in sorted(of_partition, key=attrgetter("from_offset")):
        if begin < min(one.from_offset, lost.next_offset):
            left.append(replace(lost, from_offset=begin, next_offset=min(one.from_offset, lost.next_offset)))
        begin = max(begin, one.next_offset)
    if begin < lost.next_offset:
        left.append(replace(lost, from_offset=begin))
    return left


def losses(
    partition: TopicIdPartition,
    gaps: Iterable[Gap],
    *,
    exported_to: int,
    from_offset: int,
    next_offset: int,
) -> list[LostOffsets]:
    """
    Return the offsets up to *next_offset*, exclusive, that the archive lacks.

    Args:
        partition: The partition of the losses.
        gaps: The archive's recorded gaps.
        exported_to: The first offset that is not exported yet. A new export begins at the archive's start, so
            offsets that had expired before are not lost.
        from_offset: The first offset that the archive has and that is to be exported.
        next_offset: The end of the offsets to export.
    """
    found = []
    if exported_to < from_offset:
        reason = "expired in the archive before they were exported"
        found.append(LostOffsets(partition, exported_to, from_offset, reason))
    for gap in gaps:
        base, stop = max(gap.base_offset, from_offset), min(gap.next_offset, next_offset)
        if base < stop:
            found.append(LostOffsets(partition, base, stop, f"a gap in the archive: {gap.reason}"))
    return found


def require_reached(
    manifest: PartitionManifest | None, partition: TopicIdPartition, next_offset: int
) -> PartitionManifest:
    """
    Return *manifest* if its archive still reaches *next_offset*.

    Raises:
        TieringError: The archive ends earlier, or *manifest* is None.
    """
    if manifest is None:
        raise TieringError(
            f"the archive no longer has a manifest of {partition}, as it did when the export was planned",
            hint="The archive was moved or deleted, or its manifest is lost; `tieringd archive scrub` shows "
            "what is left",
        )
    if manifest.next_offset < next_offset:
        raise TieringError(
            f"the archive of {partition} no longer reaches offset {next_offset - 1}, as it did when the "
            "export was planned",
            hint="The archive was cut back to the log of another leader; the next run exports what is left, "
            "or says what it lacks",
        )
    return manifest
