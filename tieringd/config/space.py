"""
Disk space: the areas of a disk, when it is low, and what happens then.

Only the properties themselves. Which of them belong together is in `config.space_checks`, what
they do in `policies.disk_areas` and `policies.disk_alert`.
"""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 pydantic reads the annotations
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel

from tieringd.config.fields import LIVE, MAX_INT64, AbsolutePath, Choice, Decimal, Flag, duration, size
from tieringd.config.topic_properties import STRICT
from tieringd.policies.disk_alert import AlertSettings

DegradedAction: TypeAlias = Literal["refuse_writes", "throttle_producers", "alert"]

_SECOND_MS = 1_000
_DAY_MS = 86_400_000
_KIB = 2**10
_GIB = 2**30


class Space(BaseModel):
    """How the disks are divided and watched."""

    model_config = STRICT

    retention_local_strict: Annotated[bool, Flag(), LIVE] = False
    """Enforce the local targets; false lets local data grow until the space is needed."""
    space_management_enable: Annotated[bool, Flag(), LIVE] = True
    """Trim durable segments when the logs are over their area of the disk."""
    retention_local_trim_interval: Annotated[int, duration(1, _DAY_MS), LIVE] = 30 * _SECOND_MS
    """How often the disks' areas are looked at; a bare number is in milliseconds."""
    disk_reservation_percent: Annotated[float, Decimal(0, 100), LIVE] = 20.0
    """Part of each disk that neither the log nor the cache may use."""
    retention_local_target_capacity_percent: Annotated[Annotated[float, Decimal(0, 100)] | None, LIVE] = None
    """Part of each disk that is the log's area; null or 0 is what the reservation and the cache leave."""
    retention_local_target_capacity_bytes: Annotated[Annotated[int, size(0, MAX_INT64)] | None, LIVE] = None
    """The log's area of each disk in bytes; of this and the percentage the smaller one counts."""

    storage_space_alert_free_threshold_percent: Annotated[float, Decimal(0, 100), LIVE] = 5.0
    """A disk is low on space when no more of it than this is free; 0 leaves it to the bytes."""
    storage_space_alert_free_threshold_bytes: Annotated[int, size(0, MAX_INT64), LIVE] = 0
    """The same in bytes; of this and the percentage the larger one counts."""
    storage_min_free_bytes: Annotated[int, size(0, MAX_INT64), LIVE] = 5 * _GIB
    """When no more than this is free a disk is degraded, and `storage_degraded_action` is taken."""
    storage_degraded_action: Annotated[DegradedAction, Choice(), LIVE] = "refuse_writes"
    """What a degraded disk of any broker does to all of them; `alert` changes nothing."""
    storage_degraded_producer_byte_rate: Annotated[int, size(1, MAX_INT64), LIVE] = 64 * _KIB
    """Bytes a second that each producer may then write on each broker, until the disk has room again."""

    tune_ballast_file: Annotated[bool, Flag()] = False
    """Keep a file that can be deleted when the disk is full."""
    ballast_file_path: Annotated[Path, AbsolutePath()] | None = None
    """Where: on a log directory's filesystem, not inside one; null looks for a place beside the first."""
    ballast_file_size: Annotated[int, size(1, MAX_INT64)] = _GIB
    """How large it is."""
    ballast_release_when_degraded: Annotated[bool, Flag(), LIVE] = False
    """Delete it when its disk is degraded; false leaves that to `tieringd space ballast release`."""

    @property
    def disk_alerts(self) -> AlertSettings:
        """Return when a disk is low, and when it is degraded."""
        return AlertSettings(
            alert_free_bytes=self.storage_space_alert_free_threshold_bytes,
            alert_free_percent=self.storage_space_alert_free_threshold_percent,
            min_free_bytes=self.storage_min_free_bytes,
        )
