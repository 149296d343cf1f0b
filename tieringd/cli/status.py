"""`tieringd status`: the status page of the running daemon, on one screen of a terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from textwrap import wrap
from typing import Any, Final

import typer

from tieringd.cli.daemon_status import asked, why_silent, why_unknown
from tieringd.cli.options import ConfigFile, Format, OutputFormat, loaded, print_document
from tieringd.config import Config
from tieringd.daemon.operator_tasks import Task
from tieringd.daemon.overview import DiskLine, Overview, PartitionLine, UploadLine
from tieringd.daemon.recent_errors import FoldedError
from tieringd.daemon.status_page import at_least, scaled, times, until_loss
from tieringd.daemon.workers.worker_status import WorkerStatus
from tieringd.model.human_units import duration, size

_COLUMNS: Final = 79
_BAR: Final = 24
_MOST_LINES: Final = 5


def status(
    config: ConfigFile = Path("/etc/tieringd/tieringd.yaml"), output: Format = OutputFormat.TABLE
) -> None:
    """
    Show the running daemon on one screen, and what to do about it.

    Exits 1 when the daemon is not ready or does not answer.
    """
    settings = loaded(config)
    found = asyncio.run(_overview(settings))
    try:
        seen = overview_of(found)
    except (AttributeError, KeyError, TypeError):
        typer.echo(why_unknown(settings), err=True)
        raise typer.Exit(1) from None
    if output.is_data:
        print_document(found, output)
    else:
        for line in screen(seen):
            typer.echo(line)
    if found["reasons"]:
        raise typer.Exit(1)


async def _overview(config: Config) -> dict[str, Any]:
    found: dict[str, Any] | None = await asked(config, "/status/overview")
    if found is None:
        typer.echo(why_silent(config), err=True)
        raise typer.Exit(1)
    return found


def overview_of(document: Mapping[str, Any]) -> Overview:
    """Return the overview that a daemon sent as JSON; fields that this version does not know are left out."""
    known = {one.name: document[one.name] for one in fields(Overview)}
    kinds = {
        "tasks": Task,
        "partitions": PartitionLine,
        "disks": DiskLine,
        "uploads": UploadLine,
        "errors": FoldedError,
        "workers": WorkerStatus,
    }
    for name, kind in kinds.items():
        names = [one.name for one in fields(kind)]
        known[name] = tuple(kind(**{key: one[key] for key in names}) for one in document[name])
    return Overview(**known)


def screen(seen: Overview) -> Iterator[str]:
    """Yield the lines, none of which is wider than a terminal of 80 columns."""
    state = "NOT READY" if seen.reasons else "needs a person" if seen.tasks else "well"
    yield f"tieringd {seen.version}: {state}, up {duration(seen.uptime_seconds)}"
    yield from _wrapped("", f"cluster {seen.cluster or 'unknown'}, broker {seen.broker}, store {seen.store}")
    for name, why in seen.reasons.items():
        yield from _wrapped("  ", f"{name}: {why}")
    yield ""
    yield (
        f"partitions: {seen.led_partitions} led, {seen.followed_partitions} followed, "
        f"{sum(seen.faults.values())} in error"
    )
    yield (
        f"waiting {at_least(size(seen.pending_bytes), seen)} in {seen.pending_segments} segments, "
        f"oldest {duration(seen.lag_seconds)}"
    )
    sizes = f"archive {size(seen.archived_bytes)}, local {size(seen.local_bytes)}"
    yield from _wrapped("", f"until loss: {until_loss(seen)}; {sizes}")
    yield from _section("What needs a person", [f"{one.what}\n  {one.command}" for one in seen.tasks])
    yield from _section(
        "Worst partitions (= archive, - local log, # both)",
        list(_partitions(seen.partitions[:_MOST_LINES])),
    )
    yield from _section("Disks", [line for one in seen.disks for line in _disk(one)])
    if seen.workers:
        yield from _section("Workers of the gateway", [_worker(one) for one in seen.workers])
    yield from _section(
        "Uploads in flight",
        [f"{duration(one.seconds)}, attempt {one.attempts}: {one.key}" for one in seen.uploads[:_MOST_LINES]],
    )
    yield from _section(
        "Warnings and errors",
        [
            f"{one.event}{f' ({one.where})' if one.where else ''}, {times(one.times)}\n  {one.remedy}"
            for one in seen.errors[:_MOST_LINES]
        ],
    )


def _section(title: str, texts: Sequence[str]) -> Iterator[str]:
    yield ""
    yield f"{title}:" if texts else f"{title}: none"
    for text in texts:
        first, *rest = text.split("\n")
        yield from _wrapped("  ", first)
        for line in rest:
            yield from _wrapped("  ", line)


def _partitions(lines: Sequence[PartitionLine]) -> Iterator[str]:
    before = ""
    for line in lines:
        late = f"lag {duration(line.lag_seconds)}, {size(line.pending_bytes)} waiting"
        yield f"{_bar(line)} {line.topic}-{line.partition}: {late}"
        because = f"{f'{line.fault}: ' if line.fault else ''}{line.because}"
        if because:
            # An outage has the same reason for each partition, and this is one screen.
            yield "  as above" if because == before else f"  {because}"
        before = because


def _bar(line: PartitionLine) -> str:
    """Return both ranges of offsets on one scale."""
    cells = [" "] * _BAR
    for mark, (left, width) in zip("=-", scaled(line), strict=True):
        begin = min(_BAR - 1, int(left * _BAR))
        end = max(begin + 1, round((left + width) * _BAR)) if width else begin
        for cell in range(begin, min(_BAR, end)):
            cells[cell] = "#" if cells[cell] == "=" else mark
    return f"[{''.join(cells)}]"


def _worker(one: WorkerStatus) -> str:
    """Return what a worker does, and since when."""
    state = f"serves {one.connections} connections" if one.is_serving else "does not serve"
    ended = f", {one.restarts} restarts, the last one after it ended {one.last_end}" if one.restarts else ""
    return f"worker {one.number}: {state}, for {duration(one.seconds)}{ended}"


def _disk(line: DiskLine) -> Iterator[str]:
    yield f"{line.directories}: {line.state}, {size(line.free_bytes)} free of {size(line.total_bytes)}"
    if line.log_bytes is not None:
        yield f"  logs {size(line.log_bytes)} of their {size(line.log_area_bytes or 0)}"
    if line.phase:
        yield f"  phase {line.phase}"


def _wrapped(indent: str, text: str) -> Iterator[str]:
    """Yield *text* in lines of a terminal's width; a word that is longer is cut."""
    words = text.lstrip()
    begin = indent + " " * (len(text) - len(words))
    yield from wrap(words, _COLUMNS, initial_indent=begin, subsequent_indent=f"{begin}  ")
