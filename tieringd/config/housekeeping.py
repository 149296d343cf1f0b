"""When there is time for work on the archive that can wait."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel

from tieringd.config.fields import LIVE, Number, duration
from tieringd.config.topic_properties import STRICT

_SECOND_MS = 1_000
_HOUR_MS = 3_600_000


class HousekeepingTimes(BaseModel):
    """Housekeeping waits for an object store that is idle, and no longer than its interval."""

    model_config = STRICT

    cloud_storage_idle_timeout_ms: Annotated[int, duration(100, _HOUR_MS), LIVE] = 10 * _SECOND_MS
    """Whether the object store is idle is told from its requests over this time."""
    cloud_storage_idle_threshold_rps: Annotated[int, Number(0, 1_000_000), LIVE] = 1
    """Idle is a store with at most so many requests a second over that time, housekeeping's own left out."""
