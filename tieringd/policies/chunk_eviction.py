"""
Chunk eviction: which open chunks to close that nobody reads just now.

A chunk stays open when its reader leaves, so that the next one needs no look at the disk. Each costs a
descriptor, and a file that is evicted meanwhile keeps its room until it is closed. Three strategies
decide how many stay:

1. eager: none;
2. capped: of each segment as many as may be hydrated, the most recently used;
3. predictive: as many, and those stay that a reader of the segment gets to next.

This is about open files only. Which files leave the disk is decided in `policies.cache_trim`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

NOBODY_READS = "nobody reads it"
OVER_SHARE = "its segment has more chunks open than it may, and others are nearer to a reader"
OVER_TOTAL = "too many chunks are open in all, and it is the least recently used"

_NEVER = 1 << 62
_ROUNDING = 1e-9  # 0.29 * 100 is 28.999999999999996, and means 29.


class EvictionStrategy(Enum):
    """`cloud_storage_chunk_eviction_strategy`."""

    EAGER = "eager"
    CAPPED = "capped"
    PREDICTIVE = "predictive"


@dataclass(frozen=True, slots=True)
class ChunkEvictionLimits:
    """How many chunks stay open."""

    strategy: EvictionStrategy = EvictionStrategy.EAGER
    hydrated_ratio: float = 0.7
    """`cloud_storage_hydrated_chunks_per_segment_ratio`."""
    min_chunks_threshold: int = 5
    """`cloud_storage_min_chunks_per_segment_threshold`: of a segment with no more all may stay."""
    max_open: int = 1024
    """Of all segments together: the bound on descriptors."""


@dataclass(frozen=True, slots=True)
class OpenChunk:
    """A chunk whose file is open."""

    segment: str
    number: int
    readers: int
    used_at: float
    """When a reader last came or left; any clock that does not go back."""


@dataclass(frozen=True, slots=True)
class Release:
    """An open chunk to close."""

    chunk: OpenChunk
    because: str


@dataclass(frozen=True, slots=True)
class Held:
    """An open chunk that stays open."""

    chunk: OpenChunk
    because: str


@dataclass(frozen=True, slots=True)
class ReleasePlan:
    """What to close, and why the rest stays open."""

    releases: tuple[Release, ...]
    held: tuple[Held, ...]


def max_hydrated(chunk_count: int, limits: ChunkEvictionLimits) -> int:
    """Return how many of a segment's *chunk_count* chunks may stay open; one at least."""
    if chunk_count <= limits.min_chunks_threshold:
        return chunk_count
    return max(1, int(chunk_count * limits.hydrated_ratio + _ROUNDING))


def plan_releases(
    open_chunks: Iterable[OpenChunk], chunk_counts: dict[str, int], limits: ChunkEvictionLimits
) -> ReleasePlan:
    """
    Choose which open chunks to close; never one that has a reader.

    *chunk_counts* says for each segment how many chunks it has in all.
    """
    by_segment: dict[str, list[OpenChunk]] = {}
    for chunk in open_chunks:
        by_segment.setdefault(chunk.segment, []).append(chunk)
    releases: list[Release] = []
    held: list[Held] = []
    for segment, chunks in by_segment.items():
        gone, kept = _plan_segment(chunks, chunk_counts[segment], limits)
        releases += gone
        held += kept
    return _within_total(releases, held, limits.max_open)


def _plan_segment(
    chunks: Sequence[OpenChunk], chunk_count: int, limits: ChunkEvictionLimits
) -> tuple[list[Release], list[Held]]:
    read = [chunk for chunk in chunks if chunk.readers]
    idle = [chunk for chunk in chunks if not chunk.readers]
    held = [Held(chunk, f"it is being read ({chunk.readers})") for chunk in read]
    if limits.strategy is EvictionStrategy.EAGER:
        return [Release(chunk, NOBODY_READS) for chunk in idle], held
    positions = [chunk.number for chunk in read] if limits.strategy is EvictionStrategy.PREDICTIVE else []
    # The worst first: needed last or never, then used longest ago.
    idle.sort(key=lambda chunk: (-_needed_after(chunk, positions), chunk.used_at, chunk.number))
    most = max_hydrated(chunk_count, limits)
    over = min(len(idle), max(0, len(chunks) - most))
    held += [Held(chunk, _why_held(chunk, positions, most)) for chunk in idle[over:]]
    return [Release(chunk, OVER_SHARE) for chunk in idle[:over]], held


def _needed_after(chunk: OpenChunk, positions: Sequence[int]) -> int:
    """Return how many chunks the nearest reader is before this one; a large number when none is."""
    return min((chunk.number - position for position in positions if position < chunk.number), default=_NEVER)


def _why_held(chunk: OpenChunk, positions: Sequence[int], most: int) -> str:
    after = _needed_after(chunk, positions)
    if after != _NEVER:
        return f"a reader is {after} chunks before it"
    return f"its segment may have {most} chunks open"


def _within_total(releases: list[Release], held: list[Held], max_open: int) -> ReleasePlan:
    over = len(held) - max_open
    if over <= 0:
        return ReleasePlan(tuple(releases), tuple(held))
    idle = sorted((one.chunk for one in held if not one.chunk.readers), key=lambda chunk: chunk.used_at)
    gone = set(idle[:over])
    return ReleasePlan(
        (*releases, *(Release(chunk, OVER_TOTAL) for chunk in idle[:over])),
        tuple(one for one in held if one.chunk not in gone),
    )
