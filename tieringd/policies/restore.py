"""
What of a partition's archive is brought back: all of it, or its newest part.

Whole segments, from the end backwards, without leaving one out. The newest segment always comes: a
partition without a record would begin its offsets anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tieringd.policies.retention_time import retention_time_ms

if TYPE_CHECKING:
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.manifest_parts import Gap
    from tieringd.model.segment import RemoteSegment


@dataclass(frozen=True, slots=True)
class RestoreLimits:
    """How much is wanted of each partition; None means no limit of that kind."""

    last_bytes: int | None = None
    last_ms: int | None = None
    """Counted back from the partition's newest record: an archive may be years old."""


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """The segments that are brought back, and what is lost between them."""

    segments: tuple[RemoteSegment, ...]
    """Ascending, without a hole but for *gaps*."""
    gaps: tuple[Gap, ...]
    """Inside of what is brought back: offsets that nobody has any more."""
    left_segments: int
    """The older ones that stay in the archive."""

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the segments."""
        return sum(segment.size_bytes for segment in self.segments)

    @property
    def start_offset(self) -> int | None:
        """Return the first offset; None when there is nothing."""
        return self.segments[0].base_offset if self.segments else None


def plan_restore(manifest: PartitionManifest, limits: RestoreLimits) -> RestorePlan:
    """Choose what is brought back of *manifest*: the larger limit does not matter, the smaller one holds."""
    table = manifest.segments
    newest_ms = max((retention_time_ms(segment) for segment in table), default=0)
    first, size_bytes = len(table), 0
    for row in range(len(table) - 1, -1, -1):
        segment = table[row]
        size_bytes += segment.size_bytes
        is_newest = row == len(table) - 1
        if not is_newest and limits.last_bytes is not None and size_bytes > limits.last_bytes:
            break
        is_old = limits.last_ms is not None and retention_time_ms(segment) < newest_ms - limits.last_ms
        if not is_newest and is_old:
            break
        first = row
    segments = tuple(table[row] for row in range(first, len(table)))
    start_offset = segments[0].base_offset if segments else manifest.next_offset
    return RestorePlan(
        segments,
        gaps=tuple(gap for gap in manifest.gaps if segments and gap.base_offset >= start_offset),
        left_segments=first,
    )
