"""How long records are kept in all, and how the archive lets go of them."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from tieringd.config.fields import LIVE, MAX_INT64, UNLIMITED, duration, size
from tieringd.config.topic_properties import STRICT

_KIB = 2**10
_SECOND_MS = 1_000
_HOUR_MS = 3_600_000
_DAY_MS = 86_400_000


class Retention(BaseModel):
    """Total retention: of both tiers together."""

    model_config = STRICT

    log_retention_ms: Annotated[Annotated[int, duration(1, MAX_INT64, UNLIMITED)] | None, LIVE] = None
    """Keep records this long in all, where neither topic nor broker says; null or -1 is without limit."""
    delete_retention_ms: Annotated[Annotated[int, duration(1, MAX_INT64, UNLIMITED)] | None, LIVE] = None
    """Another name of `log_retention_ms`."""
    kafka_log_retention_ms: Annotated[Annotated[int, duration(1, MAX_INT64, UNLIMITED)] | None, LIVE] = Field(
        default=None, alias="log.retention.ms"
    )
    """Kafka's name of `log_retention_ms`."""
    retention_bytes: Annotated[Annotated[int, size(1, MAX_INT64, UNLIMITED)] | None, LIVE] = None
    """Keep this many bytes of each partition in all, where neither a topic nor its broker says."""
    kafka_log_retention_bytes: Annotated[Annotated[int, size(1, MAX_INT64, UNLIMITED)] | None, LIVE] = Field(
        default=None, alias="log.retention.bytes"
    )
    """Kafka's name of `retention_bytes`."""
    cloud_storage_housekeeping_interval_ms: Annotated[int, duration(1, _DAY_MS), LIVE] = 300 * _SECOND_MS
    """How often total retention looks, and two looks have to agree; other housekeeping waits no longer."""
    archive_delete_delay_ms: Annotated[int, duration(0, 365 * _DAY_MS), LIVE] = _HOUR_MS
    """Objects go this long after their segment left the manifest: longer than the longest reader takes."""
    cloud_storage_topic_purge_grace_period_ms: Annotated[int, duration(0, 365 * _DAY_MS), LIVE] = (
        30 * _SECOND_MS
    )
    """The archive of a deleted topic goes this long after the deletion was noted, where it goes."""
    cloud_storage_target_manifest_size_bytes: Annotated[int, size(4 * _KIB, 64 * _KIB * _KIB), LIVE] = (
        64 * _KIB
    )
    """A partition's manifest that is larger gives its oldest segments to spillover manifests."""

    @property
    def total_ms(self) -> int | None:
        """Return the cluster's limit by time under whichever name it has; None where none is set."""
        names = (self.kafka_log_retention_ms, self.log_retention_ms, self.delete_retention_ms)
        return next((limit for limit in names if limit is not None), None)

    @property
    def total_bytes(self) -> int | None:
        """Return the cluster's limit by size, likewise."""
        names = (self.kafka_log_retention_bytes, self.retention_bytes)
        return next((limit for limit in names if limit is not None), None)
