"""How the archive is written: connections, retries, pace, and what is held back meanwhile."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel

from tieringd.config.fields import LIVE, MAX_INT64, Decimal, Flag, Number, duration, seconds, size
from tieringd.config.topic_properties import STRICT

_SECOND_MS = 1_000
_DAY_MS = 86_400_000
_DAY_SEC = 86_400
_RATE_MIN = 64 * 1024


class Transfers(BaseModel):
    """How segments and manifests are sent."""

    model_config = STRICT

    cloud_storage_max_connections: Annotated[int, Number(1, 1024)] = 20
    """Connections to the object store for each processor that tieringd may use, by affinity and quota."""
    cloud_storage_initial_backoff_ms: Annotated[int, duration(1, 60 * _SECOND_MS), LIVE] = 100
    """The first pause before a request is tried again; it doubles from there."""
    cloud_storage_segment_upload_timeout_ms: Annotated[int, duration(1, _DAY_MS), LIVE] = 30 * _SECOND_MS
    """The longest that uploading one segment may take, retries included."""
    cloud_storage_manifest_upload_timeout_ms: Annotated[int, duration(1, _DAY_MS), LIVE] = 10 * _SECOND_MS
    """The longest that storing one manifest may take, retries included."""
    cloud_storage_max_connection_idle_time_ms: Annotated[int, duration(1, _DAY_MS)] = 5 * _SECOND_MS
    """An unused connection is closed after this long."""
    cloud_storage_reconciliation_interval_ms: Annotated[int, duration(1, _DAY_MS), LIVE] = 10 * _SECOND_MS
    """How often the log directories and the cluster are looked at without being asked to."""
    cloud_storage_segment_max_upload_interval_sec: Annotated[
        Annotated[int, seconds(1, _DAY_SEC * 365)] | None, LIVE
    ] = None
    """No record waits longer than this for its segment to close: its stable part is uploaded. 10m or more."""

    cloud_storage_upload_ctrl_update_interval_ms: Annotated[int, duration(1, _DAY_MS)] = 60 * _SECOND_MS
    """How often the shares of uploads are set by the backlog."""
    cloud_storage_upload_ctrl_p_coeff: Annotated[float, Decimal(-1_000_000, 0)] = -2.0
    """Shares for each thousandth of the disk that waits to be uploaded; negative, as the error is."""
    cloud_storage_upload_ctrl_d_coeff: Annotated[float, Decimal(0, 1_000_000)] = 0.0
    """How much a growing backlog counts on top of its size."""
    cloud_storage_upload_ctrl_min_shares: Annotated[int, Number(1, 1000)] = 100
    """The part, in thousandths, that catching up takes of a machine that others want, when little waits."""
    cloud_storage_upload_ctrl_max_shares: Annotated[int, Number(1, 1000)] = 1000
    """The same when half of the free disk waits: from here on uploads have no brake at all."""
    cloud_storage_upload_bytes_per_second: Annotated[
        Annotated[int, size(_RATE_MIN, MAX_INT64)] | None, LIVE
    ] = None
    """The most that uploads send in a second at any time, for a link that costs; null is without limit."""

    pin_segments: Annotated[bool, Flag()] = True
    """Hold closed segments by hard links until they are durable, against the broker's own retention."""
    pin_max_bytes: Annotated[int, size(0, MAX_INT64)] = 10 * 2**30
    """How many bytes pins may hold that the broker has deleted, for each log directory."""
