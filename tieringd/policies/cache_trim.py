"""
Cache trim: which files of the chunk cache are evicted when it is over a limit, and which stay.

Chunks are evicted first, the least recently used before the others. An index is evicted with the last
chunk of its segment. Other indexes and manifests are evicted only where all chunks are not enough. A file
that is being read is never evicted. Eviction ends as soon as the cache is at its target: a fraction (the
low watermark) of the limit that was passed, so that the next put does not start it again.

A cache is over when it holds more than its limit (or a threshold below it), including what is asked for,
or when its disk has less free space than a fifth above `storage_min_free_bytes`: more than ends the
degraded state of a disk. Each trim checks both bytes and objects, and lowers only the one that is over.

`plan_releases` decides which open chunks without readers to close. A chunk stays open when its reader
leaves, so that the next one needs no access to the disk. Each open chunk costs a descriptor, and a file
that is evicted meanwhile keeps its disk space until it is closed. Three strategies decide how many stay:

* eager: none;
* capped: of each segment as many as may be hydrated, the most recently used;
* predictive: as many, and preferably those that the most readers of the segment come to.

Closing concerns open files only; trimming decides which files leave the disk. Redpanda divides the work in
the same way: its strategies close files, and a chunk counts as hydrated while its file is open
(`segment_chunks::trim_chunk_files`). `predictive` sorts as Redpanda does (`segment_chunk::operator<=>`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from tieringd.formats.cache_names import CacheFileKind

NOBODY_READS = "the chunk has no reader"
OVER_SHARE = "its segment has more open chunks than allowed, and the others are needed sooner"
OVER_TOTAL = "too many chunks are open in all, and this is the least recently used"

_ROUNDING = 1e-9  # 0.29 * 100 is 28.999999999999996, and means 29.

LEAST_USED = "least recently used"
WITH_ITS_CHUNKS = "the last chunk of its segment was evicted"
CHUNKS_NOT_ENOUGH = "evicting every chunk without a reader was not enough"
BEING_READ = "the chunk is being read"
WITHIN_LIMITS = "the cache is within its limits"

LOW_WATERMARK = 0.8


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
    """
    `cloud_storage_min_chunks_per_segment_threshold`: a segment with at most this many chunks may keep all of
    them open.
    """
    max_open: int = 1024
    """The bound on descriptors, for all segments together."""


@dataclass(frozen=True, slots=True)
class OpenChunk:
    """A chunk whose file is open."""

    segment: str
    number: int
    readers: int
    used_at: float
    """Time of the last start or end of a read, on any clock that does not go back."""


@dataclass(frozen=True, slots=True)
class ChunkDecision:
    """An open chunk, and why it is closed or stays open."""

    chunk: OpenChunk
    because: str


@dataclass(frozen=True, slots=True)
class ReleasePlan:
    """Which open chunks to close, and why the others stay open."""

    releases: tuple[ChunkDecision, ...]
    held: tuple[ChunkDecision, ...]


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
    releases: list[ChunkDecision] = []
    held: list[ChunkDecision] = []
    for segment, chunks in by_segment.items():
        gone, kept = _plan_segment(chunks, chunk_counts[segment], limits)
        releases += gone
        held += kept
    return _within_total(releases, held, limits.max_open)


def _plan_segment(
    chunks: Sequence[OpenChunk], chunk_count: int, limits: ChunkEvictionLimits
) -> tuple[list[ChunkDecision], list[ChunkDecision]]:
    read = [chunk for chunk in chunks if chunk.readers]
    idle = [chunk for chunk in chunks if not chunk.readers]
    held = [ChunkDecision(chunk, f"the chunk is being read ({chunk.readers})") for chunk in read]
    if limits.strategy is EvictionStrategy.EAGER:
        return [ChunkDecision(chunk, NOBODY_READS) for chunk in idle], held
    is_predictive = limits.strategy is EvictionStrategy.PREDICTIVE
    # Each reader counts: several may read the same chunk.
    positions = [chunk.number for chunk in read for _ in range(chunk.readers)] if is_predictive else []

    def worth(chunk: OpenChunk) -> tuple[float, ...]:
        distances = _distances(chunk, positions)
        return len(distances), -sum(distances), chunk.used_at, chunk.number

    # Worst first: fewer readers to come, then readers farther away, then the least recently used.
    idle.sort(key=worth)
    most = max_hydrated(chunk_count, limits)
    over = min(len(idle), max(0, len(chunks) - most))
    held += [ChunkDecision(chunk, _why_held(chunk, positions, most)) for chunk in idle[over:]]
    return [ChunkDecision(chunk, OVER_SHARE) for chunk in idle[:over]], held


def _distances(chunk: OpenChunk, positions: Sequence[int]) -> list[int]:
    """Return for each reader to come how many chunks it is before this one."""
    return [chunk.number - position for position in positions if position < chunk.number]


def _why_held(chunk: OpenChunk, positions: Sequence[int], most: int) -> str:
    distances = _distances(chunk, positions)
    if distances:
        return f"readers to come: {len(distances)}; the nearest is {min(distances)} chunks before it"
    return f"its segment may have {most} open chunks"


def _within_total(releases: list[ChunkDecision], held: list[ChunkDecision], max_open: int) -> ReleasePlan:
    over = len(held) - max_open
    if over <= 0:
        return ReleasePlan(tuple(releases), tuple(held))
    idle = sorted((one.chunk for one in held if not one.chunk.readers), key=lambda chunk: chunk.used_at)
    gone = set(idle[:over])
    return ReleasePlan(
        (*releases, *(ChunkDecision(chunk, OVER_TOTAL) for chunk in idle[:over])),
        tuple(one for one in held if one.chunk not in gone),
    )


@dataclass(frozen=True, slots=True)
class CachedFile:
    """A file of the cache, as the cache's accounting knows it."""

    name: str
    size_bytes: int
    accessed_ms: int
    """Wall-clock time of the last read; 0 where it will not be read again."""
    kind: CacheFileKind
    segment: str
    """The data object that a chunk or an index belongs to; empty for a manifest."""


@dataclass(frozen=True, slots=True)
class TrimLimits:
    """How large the cache may be."""

    size_bytes: int
    """`cloud_storage_cache_size` and `_percent`, and what the disk's areas leave; 0 holds nothing."""
    objects: int
    """`cloud_storage_cache_max_objects`."""
    min_free_bytes: int = 0
    """The bytes of the disk that stay free: see `disk_alert.cache_min_free_bytes`."""
    threshold_percent_size: float | None = None
    """`cloud_storage_cache_trim_threshold_percent_size`; None trims when the cache is full."""
    threshold_percent_objects: float | None = None
    """`cloud_storage_cache_trim_threshold_percent_objects`, likewise."""
    carryover_bytes: int = 0
    """
    `cloud_storage_cache_trim_carryover_bytes`: total size of the candidates to remember for the next trim.
    """
    low_watermark: float = LOW_WATERMARK


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What the cache holds, and what a put asks for."""

    size_bytes: int
    """The size of all files."""
    objects: int
    reserved_bytes: int = 0
    """Promised to puts under way: counted as used, and not evictable."""
    reserved_objects: int = 0
    free_bytes: int | None = None
    """Free bytes of its disk, with reservations already deducted; None where not known."""
    wanted_bytes: int = 0
    """Bytes of a put that waits for room; 0 for a periodic check."""
    wanted_objects: int = 0


@dataclass(frozen=True, slots=True)
class TrimDemand:
    """How much to evict, and why."""

    size_bytes: int
    objects: int
    because: str


@dataclass(frozen=True, slots=True)
class FileDecision:
    """A file whose turn to be evicted came, and why it is evicted or stays."""

    file: CachedFile
    because: str


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """What to evict."""

    demand: TrimDemand
    evictions: tuple[FileDecision, ...] = ()
    kept: tuple[FileDecision, ...] = ()
    carry_over: tuple[CachedFile, ...] = ()
    """The next files in turn, for a trim that cannot wait for a plan over all files."""

    @property
    def size_bytes(self) -> int:
        """Return how many bytes are evicted."""
        return sum(one.file.size_bytes for one in self.evictions)

    @property
    def short_by_bytes(self) -> int:
        """Return how many bytes are still missing although nothing more may be evicted."""
        return max(0, self.demand.size_bytes - self.size_bytes)

    @property
    def short_by_objects(self) -> int:
        """Return how many objects are still missing although nothing more may be evicted."""
        return max(0, self.demand.objects - len(self.evictions))


def has_room(use: CacheUse, limits: TrimLimits) -> bool:
    """Say whether the wanted bytes and objects can be put without evicting anything."""
    if use.size_bytes + use.reserved_bytes + use.wanted_bytes > limits.size_bytes:
        return False
    if use.objects + use.reserved_objects + use.wanted_objects > limits.objects:
        return False
    return _disk_deficit(use, limits) <= 0


def fits_at_all(use: CacheUse, limits: TrimLimits) -> bool:
    """Say whether the wanted bytes could be put in an empty cache; if not, nothing is evicted for them."""
    return use.wanted_bytes <= limits.size_bytes and use.wanted_objects <= limits.objects


def trim_demand(use: CacheUse, limits: TrimLimits) -> TrimDemand:
    """Return how much to evict; nothing while the cache is within its limits."""
    if not fits_at_all(use, limits):
        return TrimDemand(0, 0, f"{use.wanted_bytes} bytes are more than the limit of the whole cache")
    size_bytes, size_reason = _demand(
        use.size_bytes + use.reserved_bytes,
        wanted=use.wanted_bytes,
        limit=limits.size_bytes,
        threshold_percent=limits.threshold_percent_size,
        low_watermark=limits.low_watermark,
        unit="bytes",
    )
    objects, object_reason = _demand(
        use.objects + use.reserved_objects,
        wanted=use.wanted_objects,
        limit=limits.objects,
        threshold_percent=limits.threshold_percent_objects,
        low_watermark=limits.low_watermark,
        unit="objects",
    )
    reasons = [reason for reason in (size_reason, object_reason) if reason]
    deficit = _disk_deficit(use, limits)
    if deficit > 0:
        reasons.append(f"its disk has {deficit} bytes less free space than required")
    because = "; ".join(reasons) or WITHIN_LIMITS
    return TrimDemand(min(max(size_bytes, deficit, 0), use.size_bytes), min(objects, use.objects), because)


def plan_cache_trim(
    files: Iterable[CachedFile], demand: TrimDemand, *, in_use: Collection[str], carryover_bytes: int = 0
) -> EvictionPlan:
    """Choose which of *files* to evict to meet *demand*; *in_use* are the names of files being read."""
    if demand.size_bytes <= 0 and demand.objects <= 0:
        return EvictionPlan(demand)
    trim = _Trim(demand, in_use)
    chunks, others = _in_turn(files)
    indexes = {file.segment: file for file in others if file.kind is CacheFileKind.INDEX}
    chunks_left = Counter(file.segment for file in chunks)
    turn = 0
    while turn < len(chunks) and not trim.is_met:
        file = chunks[turn]
        turn += 1
        if trim.take(file, LEAST_USED):
            chunks_left[file.segment] -= 1
            index = indexes.get(file.segment)
            if not chunks_left[file.segment] and index is not None:
                trim.take(index, WITH_ITS_CHUNKS)
    gone = trim.names
    for file in others:
        if trim.is_met:
            break
        if file.name not in gone:
            trim.take(file, CHUNKS_NOT_ENOUGH)
    return EvictionPlan(
        demand,
        tuple(trim.evictions),
        # Only reported when it matters: otherwise the rest is kept because nothing more has to go.
        () if trim.is_met else tuple(trim.kept),
        _carry_over(chunks[turn:], in_use, carryover_bytes),
    )


class _Trim:
    """A plan under construction."""

    def __init__(self, demand: TrimDemand, in_use: Collection[str]) -> None:
        self._in_use = in_use
        self._bytes_left = demand.size_bytes
        self._objects_left = demand.objects
        self.evictions: list[FileDecision] = []
        self.kept: list[FileDecision] = []

    @property
    def is_met(self) -> bool:
        """Say whether the evictions meet the demand."""
        return self._bytes_left <= 0 and self._objects_left <= 0

    @property
    def names(self) -> set[str]:
        """Return the names of the evicted files."""
        return {one.file.name for one in self.evictions}

    def take(self, file: CachedFile, because: str) -> bool:
        """Evict *file* unless it is being read; return whether it is evicted."""
        if file.name in self._in_use:
            self.kept.append(FileDecision(file, BEING_READ))
            return False
        self.evictions.append(FileDecision(file, because))
        self._bytes_left -= file.size_bytes
        self._objects_left -= 1
        return True


def _demand(
    used: int, *, wanted: int, limit: int, threshold_percent: float | None, low_watermark: float, unit: str
) -> tuple[int, str]:
    """Return how much of one dimension to evict, and why."""
    # A put that waits for room may fill the cache to the limit; only the periodic check keeps below a
    # threshold.
    bound = limit if wanted or threshold_percent is None else int(limit * threshold_percent / 100)
    if used + wanted <= bound:
        return 0, ""
    target = min(int(bound * low_watermark), bound - wanted)
    asked = f", and {wanted} more are needed" if wanted else ""
    return used - target, f"the cache holds {used} {unit} of {bound}{asked}"


def _disk_deficit(use: CacheUse, limits: TrimLimits) -> int:
    """Return how many bytes the disk lacks to have the minimum free after the wanted put."""
    if use.free_bytes is None:
        return 0
    return limits.min_free_bytes + use.wanted_bytes - use.free_bytes


def _in_turn(files: Iterable[CachedFile]) -> tuple[list[CachedFile], list[CachedFile]]:
    """Return the chunks and the others, each in eviction order."""
    chunks: list[CachedFile] = []
    others: list[CachedFile] = []
    for file in files:
        (chunks if file.kind is CacheFileKind.CHUNK else others).append(file)
    for each in (chunks, others):
        each.sort(key=lambda file: (file.accessed_ms, file.name))
    return chunks, others


def _carry_over(
    left: Sequence[CachedFile], in_use: Collection[str], carryover_bytes: int
) -> tuple[CachedFile, ...]:
    """Return the first of *left* that together have no more than *carryover_bytes*."""
    found: list[CachedFile] = []
    for file in left:
        if file.name in in_use:
            continue
        if file.size_bytes > carryover_bytes:
            break
        carryover_bytes -= file.size_bytes
        found.append(file)
    return tuple(found)
