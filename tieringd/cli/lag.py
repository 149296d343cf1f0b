"""`tieringd lag`: how far the archive is behind the broker on this host, partition by partition."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from tieringd.cli.options import (
    ConfigFile,
    Format,
    OutputFormat,
    TopicPatterns,
    is_chosen,
    loaded,
    print_listing,
    run_async,
)
from tieringd.cli.topic_snapshot import PartitionSnapshot, topic_snapshot_with
from tieringd.clock import wall_clock_ms
from tieringd.config import Config
from tieringd.daemon.archive import opened_archive
from tieringd.daemon.local_broker import opened_broker

_COLUMNS: Final = (
    "topic",
    "partition",
    "log_end_offset",
    "archived_next_offset",
    "lag_offsets",
    "lag_segments",
    "lag_bytes",
    "lag_seconds",
)


def lag(config: ConfigFile, topics: TopicPatterns = None, output: Format = OutputFormat.TABLE) -> None:
    """
    Show how far the archive is behind the broker on this host, for the partitions that it leads.

    Segments and bytes are those of closed segments that are not archived; seconds is the age of the oldest
    of them. The active segment counts in the offsets only: it is uploaded when it is closed.
    """
    rows = run_async(_lags(loaded(config), topics))
    # The worst first.
    rows.sort(key=lambda row: (-int(row["lag_bytes"]), row["topic"], row["partition"]))
    print_listing(_COLUMNS, rows, output)


async def _lags(config: Config, topics: list[str] | None) -> list[dict[str, Any]]:
    async with opened_archive(config) as archive, opened_broker(config) as broker:
        log_dirs = [str(path) for path in config.broker.log_dirs]
        scan = await asyncio.to_thread(archive.layout.scan, log_dirs)
        names = sorted({one.topic_partition.topic for one in scan.partitions})
        rows = []
        for name in names:
            if not is_chosen(name, topics):
                continue
            snapshot = await topic_snapshot_with(config, archive, broker, name)
            if snapshot.config.remote_write:
                rows += [_lag(name, one) for one in snapshot.partitions if one.is_led]
        return rows


def _lag(topic: str, one: PartitionSnapshot) -> dict[str, Any]:
    archived = one.manifest.next_offset if one.manifest is not None else None
    end = one.bounds.log_end_offset if one.bounds is not None else None
    begin = one.bounds.log_start_offset if one.bounds is not None else 0
    pending = [
        segment
        for segment in (one.log.closed_segments if one.log is not None else ())
        if segment.next_offset is not None and segment.next_offset > max(archived or 0, begin)
    ]
    oldest_ms = min((segment.modified_ns // 1_000_000 for segment in pending), default=None)
    return {
        "topic": topic,
        "partition": one.partition.partition,
        "log_end_offset": end,
        "archived_next_offset": archived,
        "lag_offsets": None if end is None else max(0, end - max(archived or 0, begin)),
        "lag_segments": len(pending),
        "lag_bytes": sum(segment.size_bytes for segment in pending),
        "lag_seconds": 0 if oldest_ms is None else max(0, (wall_clock_ms() - oldest_ms) // 1000),
    }
