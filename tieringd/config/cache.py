"""
The chunk cache: how large it is, how it is trimmed, and what is hydrated.

Only the properties themselves. Which of them belong together is in `config.cache_checks`, what they
do in `policies.disk_areas`, `policies.cache_trim` and `policies.reading`.
"""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 pydantic reads the annotations
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel

from tieringd.config.fields import (
    LIVE,
    MAX_INT64,
    AbsolutePath,
    Choice,
    Decimal,
    Flag,
    Number,
    duration,
    size,
)
from tieringd.config.topic_properties import STRICT
from tieringd.formats.cache_names import MAX_BUCKETS
from tieringd.policies.cache_trim import ChunkEvictionLimits, EvictionStrategy

StrategyName: TypeAlias = Literal["eager", "capped", "predictive"]

_SECOND_MS = 1_000
_DAY_MS = 86_400_000
_KIB = 2**10
_MIB = 2**20
_GIB = 2**30


class Cache(BaseModel):
    """What is kept of the archive on this host, for readers."""

    model_config = STRICT

    cloud_storage_cache_directory: Annotated[Path, AbsolutePath()] | None = None
    """Where archived chunks are cached; null is `cloud_storage_cache` in `state_directory`."""
    cloud_storage_cache_size: Annotated[int, size(0, MAX_INT64), LIVE] = 0
    """How many bytes the cache may hold; 0 leaves it to the percentage, else the smaller one counts."""
    cloud_storage_cache_size_percent: Annotated[float, Decimal(0, 100), LIVE] = 20.0
    """Part of its disk that the cache may take; 0 leaves it to the bytes. Both 0: nothing is cached."""
    cloud_storage_cache_max_objects: Annotated[int, Number(1, 100_000_000), LIVE] = 100_000
    """How many files the cache may hold."""
    cloud_storage_cache_num_buckets: Annotated[int, Number(0, MAX_BUCKETS)] = 0
    """Into so many directories the cache's files are put; 0 names them as the objects are named."""
    cloud_storage_cache_check_interval_ms: Annotated[int, duration(1, _DAY_MS), LIVE] = 30 * _SECOND_MS
    """How often the cache is looked at for what is too much."""
    cloud_storage_cache_trim_carryover_bytes: Annotated[int, size(0, MAX_INT64), LIVE] = 0
    """So many bytes of candidates are kept from a trim, for one that cannot wait."""
    cloud_storage_cache_trim_threshold_percent_size: Annotated[
        Annotated[float, Decimal(1, 100)] | None, LIVE
    ] = None
    """Trim when the cache is fuller than this, of the bytes it may hold; null waits until it is full."""
    cloud_storage_cache_trim_threshold_percent_objects: Annotated[
        Annotated[float, Decimal(1, 100)] | None, LIVE
    ] = None
    """The same of the files it may hold; 70 of either leaves room for what comes during the trim."""
    cloud_storage_cache_trim_walk_concurrency: Annotated[int, Number(1, 1000), LIVE] = 1
    """How many directories of the cache are read at once, at the start and hourly."""
    cloud_storage_cache_chunk_size: Annotated[int, size(4 * _KIB, _GIB), LIVE] = 16 * _MIB
    """About how many bytes of a segment are fetched at once; chunks end where batches end."""
    cloud_storage_disable_chunk_reads: Annotated[bool, Flag(), LIVE] = False
    """Fetch whole segments; for readers that read everything."""
    cloud_storage_chunk_eviction_strategy: Annotated[StrategyName, Choice(), LIVE] = "eager"
    """Which chunks stay open when nobody reads them: none, some of each segment, or those needed next."""
    cloud_storage_hydrated_chunks_per_segment_ratio: Annotated[float, Decimal(0, 1), LIVE] = 0.7
    """Part of a segment's chunks that may stay open, with `capped` and `predictive`."""
    cloud_storage_min_chunks_per_segment_threshold: Annotated[int, Number(0, 2**31 - 1), LIVE] = 5
    """Of a segment with no more chunks than this all of them may."""

    cloud_storage_readreplica_manifest_sync_timeout_ms: Annotated[int, duration(1, _DAY_MS)] = 30 * _SECOND_MS
    """How old an archive may be known that another cluster writes, to `tieringd gateway --archive-only`."""

    kafka_enable_describe_log_dirs_remote_storage: Annotated[bool, Flag()] = True
    """Whether the gateway and `logdirs describe` show the bucket as a log directory, `remote://...`."""

    @property
    def chunk_eviction(self) -> ChunkEvictionLimits:
        """Return which chunks stay open."""
        return ChunkEvictionLimits(
            strategy=EvictionStrategy(self.cloud_storage_chunk_eviction_strategy),
            hydrated_ratio=self.cloud_storage_hydrated_chunks_per_segment_ratio,
            min_chunks_threshold=self.cloud_storage_min_chunks_per_segment_threshold,
        )
