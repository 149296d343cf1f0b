"""The rules between the properties of the chunk cache: what contradicts, and what is hardly meant."""

from __future__ import annotations

from os.path import realpath
from typing import TYPE_CHECKING

from tieringd.config.cache import Cache
from tieringd.config.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tieringd.config.model import Config
    from tieringd.config.yaml_source import Place

_WHOLE_PERCENT = 100
_SIZE: Place = ("cloud_storage_cache_size",)
_PERCENT: Place = ("cloud_storage_cache_size_percent",)
_CHUNK: Place = ("cloud_storage_cache_chunk_size",)


def find_cache_contradictions(config: Config) -> Iterator[Finding]:
    """Yield what keeps the cache from holding anything."""
    directory = config.cloud_storage_cache_directory
    if directory is not None:
        for place, other in (
            (("state_directory",), config.state_directory),
            (("broker", "pin_directory"), config.broker.pin_directory),
            (("ballast_file_path",), config.ballast_file_path),
        ):
            if other is not None and realpath(directory) == realpath(other):
                yield Finding(
                    (("cloud_storage_cache_directory",), place),
                    f"{directory} is {'.'.join(place)} as well; give the cache a directory of its own",
                )
    limit, chunk = config.cloud_storage_cache_size, config.cloud_storage_cache_chunk_size
    if limit and chunk > limit and not config.cloud_storage_disable_chunk_reads:
        yield Finding(
            (_SIZE, _CHUNK),
            f"is {limit} bytes: no room for one chunk of cloud_storage_cache_chunk_size, {chunk}",
        )


def find_cache_doubts(config: Config) -> Iterator[Finding]:
    """Yield what has no effect as things are, and what leaves less than it says."""
    if not config.cloud_storage_enabled:
        for name in Cache.model_fields:
            if _is_cache_changed(config, name):
                yield Finding(
                    ((name,), ("cloud_storage_enabled",)),
                    "has no effect while cloud_storage_enabled is false",
                )
        return
    if not (config.cloud_storage_cache_size or config.cloud_storage_cache_size_percent):
        yield Finding(
            (_PERCENT, _SIZE),
            "is 0 as cloud_storage_cache_size is: nothing is cached, every read is a download",
        )
    strategy: Place = ("cloud_storage_chunk_eviction_strategy",)
    if config.cloud_storage_chunk_eviction_strategy == "eager":
        for name in (
            "cloud_storage_hydrated_chunks_per_segment_ratio",
            "cloud_storage_min_chunks_per_segment_threshold",
        ):
            if _is_cache_changed(config, name):
                yield Finding(((name,), strategy), f"has no effect while {strategy[0]} is eager")
    yield from _areas(config)


def _areas(config: Config) -> Iterator[Finding]:
    """Yield where the cache's percentage cannot be had, because the log's area comes first."""
    log_place: Place = ("retention_local_target_capacity_percent",)
    reserved, log = config.disk_reservation_percent, config.retention_local_target_capacity_percent or 0
    left, wanted = max(0.0, _WHOLE_PERCENT - reserved - log), config.cloud_storage_cache_size_percent
    if log and left < wanted and config.cloud_storage_cache_directory is None:
        yield Finding(
            (_PERCENT, log_place, ("disk_reservation_percent",)),
            f"is {wanted:g}, and on a disk with logs {log_place[0]} {log:g} and disk_reservation_percent "
            f"{reserved:g} leave {left:g}",
        )


def _is_cache_changed(config: Config, name: str) -> bool:
    """Say whether the file sets something else than the default."""
    return bool(getattr(config, name) != Cache.model_fields[name].default)
