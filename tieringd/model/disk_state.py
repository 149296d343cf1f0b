"""How a disk is doing, as a plain value; what makes it so is in `policies.disk_alert`."""

from __future__ import annotations

from enum import IntEnum


class DiskState(IntEnum):
    """How a disk is doing; the numbers are those of the metric."""

    OK = 0
    LOW = 1
    DEGRADED = 2
