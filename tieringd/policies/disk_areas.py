"""
Disk areas: how one filesystem is divided between the reserve, the cache and the log.

Percentages are of the whole disk. Where both a percentage and a number of bytes are set, the smaller one
counts. null and 0 both mean "not set". Two rules keep the cache from taking the log's space:

1. where both do not fit, the log's area is filled first and the cache gets the rest;
2. bytes that the log uses now are not the cache's, even while the log is over its own area.

So the cache gives way first on a disk that shrinks. `policies.space_plan` plans what the log has to give up
then; this module only divides the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_LEAST_LOG_SHARE = 0.25
"""
The log's minimum share of what the reserve leaves, where the log has no target of its own and the cache wants
more.
"""


@dataclass(frozen=True, slots=True)
class AreaSettings:
    """How large the areas may be on each filesystem; None and 0 set nothing."""

    reservation_percent: float
    """`disk_reservation_percent`: left to everything that is neither log nor cache."""
    log_percent: float | None = None
    """`retention_local_target_capacity_percent`."""
    log_bytes: int | None = None
    """`retention_local_target_capacity_bytes`."""
    cache_percent: float | None = None
    """`cloud_storage_cache_size_percent`."""
    cache_bytes: int | None = None
    """`cloud_storage_cache_size`."""


@dataclass(frozen=True, slots=True)
class DirectoryUse:
    """A log directory or the cache directory, as one scan of the disk found it."""

    path: str
    filesystem: int
    """The device number from `stat`: directories with the same number share one space."""
    total_bytes: int
    """The size of the filesystem."""
    used_bytes: int
    """Bytes of the files in this directory."""


@dataclass(frozen=True, slots=True)
class DiskAreas:
    """The division of one filesystem's bytes. Together the areas are never more than the disk."""

    reserved_bytes: int
    cache_bytes: int
    log_bytes: int


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """One filesystem: its areas, the directories on it, and what they use."""

    filesystem: int
    total_bytes: int
    areas: DiskAreas
    log_dirs: tuple[str, ...]
    """The directories that share the log's area; empty on a disk that holds only the cache."""
    log_used_bytes: int
    cache_dir: str | None
    cache_used_bytes: int

    @property
    def log_excess_bytes(self) -> int:
        """Return by how much the logs are over their area."""
        return max(0, self.log_used_bytes - self.areas.log_bytes)

    @property
    def cache_limit_bytes(self) -> int:
        """Return what the cache may use now: its area, less what the logs have taken of it."""
        left_by_logs = self.total_bytes - self.areas.reserved_bytes - self.log_used_bytes
        return max(0, min(self.areas.cache_bytes, left_by_logs))

    @property
    def cache_excess_bytes(self) -> int:
        """Return what the cache has to evict, at once and before any log is trimmed for space."""
        return max(0, self.cache_used_bytes - self.cache_limit_bytes)


def plan_spaces(
    log_dirs: Sequence[DirectoryUse], cache: DirectoryUse | None, settings: AreaSettings
) -> tuple[DiskSpace, ...]:
    """
    Return one space for each filesystem that holds a log directory or the cache, in order of appearance.

    Each is divided by itself: limits in bytes hold for each filesystem, not for their sum. A cache on a
    filesystem of its own is sized there and takes nothing from the logs.
    """
    everyone = [*log_dirs, *([cache] if cache else [])]
    return tuple(
        _space(
            [one for one in log_dirs if one.filesystem == filesystem],
            cache if cache and cache.filesystem == filesystem else None,
            settings,
        )
        for filesystem in dict.fromkeys(one.filesystem for one in everyone)
    )


def divide_disk(total_bytes: int, settings: AreaSettings, *, has_logs: bool, has_cache: bool) -> DiskAreas:
    """
    Divide a disk of *total_bytes* between the reserve and the directories on it.

    A log without a target gets what the reserve and the cache leave, and a cache without a size gets nothing.
    """
    reserved_bytes = _share(total_bytes, settings.reservation_percent)
    usable_bytes = total_bytes - reserved_bytes
    log_target = _smaller(total_bytes, settings.log_percent, settings.log_bytes)
    log_bytes = 0
    if has_logs and log_target is not None:
        log_bytes = min(log_target, usable_bytes)
    elif has_logs and has_cache:
        log_bytes = int(usable_bytes * _LEAST_LOG_SHARE)
    cache_bytes = 0
    if has_cache:
        cache_size = _smaller(total_bytes, settings.cache_percent, settings.cache_bytes) or 0
        cache_bytes = min(cache_size, usable_bytes - log_bytes)
    if has_logs and log_target is None:
        log_bytes = usable_bytes - cache_bytes
    return DiskAreas(reserved_bytes, cache_bytes, log_bytes)


def _space(logs: Sequence[DirectoryUse], cache: DirectoryUse | None, settings: AreaSettings) -> DiskSpace:
    directories = [*logs, *([cache] if cache else [])]
    # A disk that is resized between two measurements has two sizes: the smaller one is safe.
    total_bytes = min(one.total_bytes for one in directories)
    return DiskSpace(
        filesystem=directories[0].filesystem,
        total_bytes=total_bytes,
        areas=divide_disk(total_bytes, settings, has_logs=bool(logs), has_cache=cache is not None),
        log_dirs=tuple(one.path for one in logs),
        log_used_bytes=sum(one.used_bytes for one in logs),
        cache_dir=cache.path if cache else None,
        cache_used_bytes=cache.used_bytes if cache else 0,
    )


def _smaller(total_bytes: int, percent: float | None, size_bytes: int | None) -> int | None:
    """Return the smaller of the limits that are set; None when neither is."""
    limits = [_share(total_bytes, percent)] if percent else []
    return min([*limits, *([size_bytes] if size_bytes else [])], default=None)


def _share(total_bytes: int, percent: float) -> int:
    return int(total_bytes * percent / 100)
