"""`tieringd lag`: how far the archive is behind the broker on this host, partition by partition."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import typer

from tieringd.broker.log_dir import LogDirScan
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
    of them. The active segment counts in the offsets only: it is uploaded when it is closed. What cannot be
    read has no figures; standard error says why, and the exit code is 1. Faults of other topics than TOPICS
    do not count.
    """
    rows, unread = run_async(_lags(loaded(config), topics))
    # The worst first, and before them the unknown.
    rows.sort(
        key=lambda row: (
            row["lag_bytes"] is not None,
            -int(row["lag_bytes"] or 0),
            row["topic"],
            row["partition"],
        )
    )
    print_listing(_COLUMNS, rows, output)
    unread += [f"{row['topic']}-{row['partition']}: {row['problem']}" for row in rows if row["problem"]]
    for problem in unread:
        typer.echo(problem, err=True)
    if unread:
        raise typer.Exit(1)


async def _lags(config: Config, topics: list[str] | None) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows, and what is missing among them: the problems of the log directories' scan."""
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
        return rows, _told(scan, topics)


def _told(scan: LogDirScan, topics: list[str] | None) -> list[str]:
    """Return the problems of *scan* that are of the chosen topics, or concern all topics."""
    found = [(scan.topic_of_problem.get(problem.path), problem) for problem in scan.problems]
    return [str(problem) for topic, problem in found if topic is None or is_chosen(topic, topics)]


def _lag(topic: str, one: PartitionSnapshot) -> dict[str, Any]:
    """Return a partition's row; without figures where its log or its bounds cannot be read."""
    archived = one.manifest.next_offset if one.manifest is not None else None
    row = dict.fromkeys(_COLUMNS) | {
        "topic": topic,
        "partition": one.partition.partition,
        "archived_next_offset": archived,
        "problem": one.problem or None,
    }
    if one.log is None or one.bounds is None:
        return row
    first_pending_offset = max(archived or 0, one.bounds.log_start_offset)
    pending = [
        segment
        for segment in one.log.closed_segments
        if segment.next_offset is not None and segment.next_offset > first_pending_offset
    ]
    oldest_ms = min((segment.modified_ns // 1_000_000 for segment in pending), default=None)
    return row | {
        "log_end_offset": one.bounds.log_end_offset,
        "lag_offsets": max(0, one.bounds.log_end_offset - first_pending_offset),
        "lag_segments": len(pending),
        "lag_bytes": sum(segment.size_bytes for segment in pending),
        "lag_seconds": 0 if oldest_ms is None else max(0, (wall_clock_ms() - oldest_ms) // 1000),
    }
