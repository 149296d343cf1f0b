"""
What a run exports: ranges of offsets, cut into portions that one task writes each.

Pure. A portion is named by its offsets alone, so it stays what it is when segments are merged, split or
compacted between a run that was killed and the one that goes on.
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
    """Exclusive."""
    size_bytes: int
    """About what is stored of them in the archive."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Offsets that were to be exported, and that the archive does not have."""

    partition: TopicIdPartition
    from_offset: int
    next_offset: int
    """Exclusive."""
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
    Yield portions of about *portion_bytes* that together are all offsets from *from_offset* to *next_offset*.

    *segments* ascend. Small ones share a portion, large ones are cut into even spans of offsets.
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


def without(lost: Lost, known: Iterable[Lost]) -> list[Lost]:
    """Return what of *lost* is in none of *known*."""
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
) -> list[Lost]:
    """
    Return what the archive, which begins at *from_offset* or before it, lacks up to *next_offset*.

    *exported_to* is where the export stands. It begins where the archive does: what had expired before that
    is not missed.
    """
    found = []
    if exported_to < from_offset:
        reason = "expired in the archive before they were exported"
        found.append(Lost(partition, exported_to, from_offset, reason))
    for gap in gaps:
        base, stop = max(gap.base_offset, from_offset), min(gap.next_offset, next_offset)
        if base < stop:
            found.append(Lost(partition, base, stop, f"a gap in the archive: {gap.reason}"))
    return found


def require_reached(
    manifest: PartitionManifest | None, partition: TopicIdPartition, next_offset: int
) -> PartitionManifest:
    """
    Return the manifest of an archive that still has an end at *next_offset*, or after it.

    Raises:
        TieringError: It ends earlier, or is gone.
    """
    if manifest is None or manifest.next_offset < next_offset:
        raise TieringError(
            f"the archive of {partition} no longer reaches offset {next_offset - 1}, as it did when the "
            "export was planned",
            hint="It was cut back, moved or deleted; `tieringd archive topics` shows what is left, and the "
            "next run exports that",
        )
    return manifest
