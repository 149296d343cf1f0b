"""How often the archive is compared with its manifests, and what becomes of objects that none names."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel

from tieringd.config.fields import LIVE, Flag, duration
from tieringd.config.topic_properties import STRICT
from tieringd.policies.scrub import ScrubPace

_SECOND_MS = 1_000
_MINUTE_MS = 60_000
_HOUR_MS = 3_600_000
_DAY_MS = 86_400_000


class Scrubbing(BaseModel):
    """Scrubbing: faults are found, and mended where the bytes are still somewhere."""

    model_config = STRICT

    cloud_storage_enable_scrubbing: Annotated[bool, Flag(), LIVE] = False
    """Compare the manifests of the partitions that this broker leads with the bucket, again and again."""
    cloud_storage_partial_scrub_interval_ms: Annotated[int, duration(1, 365 * _DAY_MS), LIVE] = _HOUR_MS
    """How long after a look at a partition that was cut short the next one goes on."""
    cloud_storage_full_scrub_interval_ms: Annotated[int, duration(1, 365 * _DAY_MS), LIVE] = 12 * _HOUR_MS
    """How long after a whole look at a partition, and at the whole bucket, the next one begins."""
    cloud_storage_scrubbing_interval_jitter_ms: Annotated[int, duration(0, 365 * _DAY_MS), LIVE] = (
        10 * _MINUTE_MS
    )
    """Up to this much is added to each of these intervals, and comes before the first look."""
    archive_orphan_grace_ms: Annotated[int, duration(_SECOND_MS, 365 * _DAY_MS), LIVE] = _DAY_MS
    """An object that no manifest names is left alone for this long: longer than any upload takes."""
    archive_quarantine_ms: Annotated[int, duration(_SECOND_MS, 3650 * _DAY_MS), LIVE] = 7 * _DAY_MS
    """After that it lies in quarantine for this long, and is deleted then."""

    @property
    def scrub_pace(self) -> ScrubPace:
        """Return the intervals, for the policy."""
        return ScrubPace(
            is_enabled=self.cloud_storage_enable_scrubbing,
            partial_interval_ms=self.cloud_storage_partial_scrub_interval_ms,
            full_interval_ms=self.cloud_storage_full_scrub_interval_ms,
            jitter_ms=self.cloud_storage_scrubbing_interval_jitter_ms,
            orphan_grace_ms=self.archive_orphan_grace_ms,
            quarantine_ms=self.archive_quarantine_ms,
        )
