"""
`tieringd read`: print a partition's records, one a line, from the archive and then from the broker.

`ReadProgress` prints the progress of a long read on standard error, a line every few seconds.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import time
from collections.abc import Callable
from contextlib import aclosing
from enum import StrEnum
from typing import Annotated, Any

import typer

from tieringd.cli.human import human_size
from tieringd.cli.options import ConfigFile, FromCluster, loaded, moment, run_async
from tieringd.cli.partition_log import PartitionReading
from tieringd.config import Config
from tieringd.daemon.archive import opened_archive
from tieringd.daemon.ownership_check import cluster_on_disk
from tieringd.formats.records import Record
from tieringd.model.manifest_parts import Gap

SECONDS_BETWEEN = 2.0
_CHECK_EVERY = 256
"""Records between two reads of the clock."""

_TIMESTAMP_TYPES = ("CreateTime", "LogAppendTime")


class ReadProgress:
    """Count records and print progress. Silent unless *is_shown*, and for reads of less than 2 seconds."""

    def __init__(self, *, is_shown: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_shown = is_shown
        self._clock = clock
        self._began = self._said = clock()
        self._first_offset: int | None = None
        self._has_said = False
        self.records = 0
        self.size_bytes = 0
        """Bytes of keys and values."""

    def note(self, record: Record, *, end_offset: int | None) -> None:
        """
        Count a record, and print a line if the last one is SECONDS_BETWEEN old.

        *end_offset* is exclusive, and gives the share and the time left; None where the end is unknown.
        """
        if not self._is_shown:
            return
        if self._first_offset is None:
            self._first_offset = record.offset
        self.records += 1
        self.size_bytes += len(record.key or b"") + len(record.value or b"")
        if self.records % _CHECK_EVERY and end_offset is not None:
            return
        now = self._clock()
        if now - self._said >= SECONDS_BETWEEN:
            self._said = now
            self._has_said = True
            typer.echo(self._line(record.offset, end_offset, now - self._began), err=True)

    def end(self) -> None:
        """Print the totals, if any progress was printed before."""
        if self._has_said:
            seconds = max(1e-3, self._clock() - self._began)
            read = f"{self.records} records, {human_size(self.size_bytes)}"
            typer.echo(f"{read}, in {seconds:.0f} s", err=True)

    def _line(self, offset: int, end_offset: int | None, seconds: float) -> str:
        rate = f"{self.records} records, {human_size(round(self.size_bytes / seconds))}/s"
        if end_offset is None:
            return f"offset {offset}: {rate}"
        first = self._first_offset or 0
        share = (offset + 1 - first) / max(1, end_offset - first)
        left_seconds = seconds * (1 - share) / max(share, 1e-9)
        return f"offset {offset} of {end_offset} ({share:.0%}): {rate}, about {left_seconds:.0f} s left"


class Isolation(StrEnum):
    """Which records are visible."""

    READ_COMMITTED = "read_committed"
    READ_UNCOMMITTED = "read_uncommitted"


class RecordFormat(StrEnum):
    """How records are printed."""

    JSON = "json"
    TEXT = "text"


def read(
    topic: Annotated[str, typer.Argument(help="The topic's name.")],
    config: ConfigFile,
    partition: Annotated[int, typer.Option("--partition", "-p", help="The partition's number.", min=0)],
    offset: Annotated[int | None, typer.Option(help="Begin at this offset.", min=0)] = None,
    timestamp: Annotated[
        int | None,
        typer.Option(
            help="Begin at the first record of this time: 2026-01-31T12:00Z, or ms since the epoch.",
            parser=moment,
            metavar="TIME",
        ),
    ] = None,
    count: Annotated[int | None, typer.Option(help="Print at most this many records.", min=0)] = None,
    isolation: Annotated[
        Isolation,
        typer.Option(
            metavar="LEVEL", help="read_committed leaves out aborted transactions; or read_uncommitted."
        ),
    ] = Isolation.READ_UNCOMMITTED,
    output: Annotated[
        RecordFormat, typer.Option("--format", "-f", help="json prints keys and values in base64.")
    ] = RecordFormat.JSON,
    follow: Annotated[
        bool, typer.Option("--follow", help="Continue with new records until interrupted.")
    ] = False,
    archive_only: Annotated[
        bool,
        typer.Option("--archive-only", help="Do not use the broker, and stop at the end of the archive."),
    ] = False,
    from_cluster: FromCluster = None,
    progress: Annotated[
        bool | None, typer.Option(help="Show the progress on standard error; the default on a terminal.")
    ] = None,
) -> None:
    """
    Print a partition's records, one per line, from the first archived or the given offset.

    After the end of the archive, the records are read from the broker.
    """
    if offset is not None and timestamp is not None:
        raise typer.BadParameter("give --offset or --timestamp, not both")
    is_shown = progress if progress is not None else sys.stderr.isatty() and not sys.stdout.isatty()
    run_async(
        _read(
            loaded(config, needs_broker=False),
            topic,
            partition,
            from_cluster,
            offset=offset,
            timestamp_ms=timestamp,
            count=count,
            read_committed=isolation is Isolation.READ_COMMITTED,
            as_json=output is RecordFormat.JSON,
            follow=follow,
            archive_only=archive_only,
            progress=ReadProgress(is_shown=is_shown),
        )
    )


async def _read(
    config: Config,
    topic: str,
    partition: int,
    cluster: str | None,
    *,
    offset: int | None,
    timestamp_ms: int | None,
    count: int | None,
    read_committed: bool,
    as_json: bool,
    follow: bool,
    archive_only: bool,
    progress: ReadProgress,
) -> None:
    async with opened_archive(config) as archive:
        own = await asyncio.to_thread(cluster_on_disk, config)
        manifest = await archive.catalog.partition(topic, partition, cluster=cluster, own_cluster=own)
        if count == 0:
            return
        reading = PartitionReading(
            config,
            archive,
            manifest.partition,
            read_committed=read_committed,
            on_gap=_report_gap,
            archive_only=archive_only,
        )
        left = count
        is_escaped = sys.stdout.isatty()
        records = reading.records(offset=offset, timestamp_ms=timestamp_ms, follow=follow)
        async with aclosing(records):
            async for record in records:
                document = _document(topic, partition, record)
                sys.stdout.write(
                    json.dumps(document) + "\n" if as_json else _line(record, is_escaped=is_escaped)
                )
                if follow:
                    sys.stdout.flush()
                progress.note(record, end_offset=None if follow else reading.end_offset)
                if left is not None:
                    left -= 1
                    if left == 0:
                        break
        sys.stdout.flush()
        progress.end()


def _document(topic: str, partition: int, record: Record) -> dict[str, Any]:
    return {
        "topic": topic,
        "partition": partition,
        "offset": record.offset,
        "timestamp": record.timestamp_ms,
        "timestamp_type": _TIMESTAMP_TYPES[record.timestamp_type],
        "key": _base64(record.key),
        "value": _base64(record.value),
        "headers": [[name, _base64(value)] for name, value in record.headers],
    }


def _line(record: Record, *, is_escaped: bool) -> str:
    """Return a record as a line of text; *is_escaped* leaves out what a terminal would obey."""

    def text(data: bytes | None) -> str:
        if data is None:
            return "null"
        found = data.decode(errors="backslashreplace")
        if not is_escaped or found.isprintable():
            return found
        return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in found)

    return f"{record.offset}\t{record.timestamp_ms}\t{text(record.key)}\t{text(record.value)}\n"


def _base64(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()


def _report_gap(gap: Gap) -> None:
    typer.echo(
        f"gap: offsets {gap.base_offset} to {gap.last_offset} are not archived: {gap.reason}", err=True
    )
