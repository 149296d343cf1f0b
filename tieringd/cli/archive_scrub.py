"""`tieringd archive scrub` and `archive quarantine`: find a bucket's faults and orphans, and mend them."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import typer

from tieringd.archive.scrub.partition_scrub import ScrubStretch
from tieringd.cli.human import time_text
from tieringd.cli.options import (
    ConfigFile,
    DryRun,
    Format,
    OutputFormat,
    loaded,
    print_document,
    print_listing,
    print_table,
    run_async,
    show_progress,
)
from tieringd.config import Config
from tieringd.daemon.archive import Archive, opened_archive
from tieringd.daemon.scrubbing import LocalLogs, scrub_parts
from tieringd.errors import ConfigError, ObjectNotFound
from tieringd.formats.object_keys import owner_of
from tieringd.housekeeping.bucket_quarantine import Expired, QuarantinedObject
from tieringd.housekeeping.scrub import ScrubParts, ScrubReport, WholeScrub
from tieringd.policies.scrub import Finding, Orphan

quarantine_app = typer.Typer(
    help="List the objects that a scrub moved into quarantine, put them back, or delete them.",
    no_args_is_help=True,
)

_PROGRESS_SEGMENTS = 1000
"""Segments of a partition between two lines of progress."""

Json = Annotated[bool, typer.Option("--json", help="The same as --format json.")]
Keys = Annotated[list[str] | None, typer.Argument(help="Object keys, as `list` prints them.")]


def scrub(
    config: ConfigFile,
    topic: Annotated[str | None, typer.Argument(help="Scrub this topic only.")] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every byte: batch checksums, offsets, indexes.")
    ] = False,
    fix: Annotated[
        bool,
        typer.Option(
            "--fix",
            help="Repair what can be repaired, move orphans into quarantine, and delete objects whose time "
            "in quarantine is over.",
        ),
    ] = False,
    output: Format = OutputFormat.TABLE,
    json: Json = False,
) -> None:
    """
    Compare the manifests with the bucket while daemons work on it; exit 1 when a fault remains.

    Faults are missing or wrong objects. Orphans are objects that no manifest names. They are not faults:
    a crash leaves some.
    """
    report = run_async(_scrub(loaded(config, needs_broker=False), topic, deep=deep, fix=fix))
    if json or output.is_data:
        print_document(_document(report, deep=deep), output)
    else:
        _print(report)
    if report.faults:
        raise typer.Exit(1)


@quarantine_app.command(name="list")
def list_objects(config: ConfigFile, output: Format = OutputFormat.TABLE, json: Json = False) -> None:
    """List the objects in quarantine."""
    rows = [
        {"key": one.key, "size_bytes": one.size_bytes, "quarantined_at": time_text(one.quarantined_at_ms)}
        for one in run_async(_quarantined(loaded(config, needs_broker=False)))
    ]
    columns = ("key", "size_bytes", "quarantined_at")
    print_listing(columns, rows, OutputFormat.JSON if json else output)


@quarantine_app.command()
def restore(
    config: ConfigFile,
    keys: Keys = None,
    everything: Annotated[bool, typer.Option("--all", help="All objects in quarantine.")] = False,
    dry_run: DryRun = False,
) -> None:
    """
    Put objects back in their original places.

    A later scrub moves them into quarantine again unless a manifest names them.
    """
    if dry_run:
        _print_chosen("put back", loaded(config, needs_broker=False), _wanted(keys, everything=everything))
        return
    restored = run_async(_restore(loaded(config, needs_broker=False), _wanted(keys, everything=everything)))
    typer.echo(f"{len(restored)} objects were put back in their original places")


@quarantine_app.command()
def purge(
    config: ConfigFile,
    keys: Keys = None,
    everything: Annotated[bool, typer.Option("--all", help="All objects in quarantine.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Delete objects in quarantine permanently. An object that a manifest names is put back instead."""
    if dry_run:
        _print_chosen("deleted", loaded(config, needs_broker=False), _wanted(keys, everything=everything))
        return
    expired = run_async(_purge(loaded(config, needs_broker=False), _wanted(keys, everything=everything)))
    typer.echo(f"{len(expired.deleted)} objects were deleted permanently")
    for key in expired.put_back:
        typer.echo(f"put back, because a manifest names it: {key}")
    for key, reason in expired.left:
        typer.echo(f"not deleted: {key}: {reason}")
    if expired.left:
        raise typer.Exit(1)


@asynccontextmanager
async def _opened(config: Config) -> AsyncIterator[tuple[Archive, ScrubParts]]:
    """Open the bucket and the scrub's parts, which read this host's log directories if it has any."""
    writer_id = secrets.token_hex(8)
    async with opened_archive(config, writer_id=writer_id) as archive:
        logs = LocalLogs(config, archive.layout)
        yield (
            archive,
            scrub_parts(
                config,
                archive,
                writer_id=writer_id,
                local_log=logs,
                on_segment=_show_segments,
            ),
        )


async def _scrub(config: Config, topic: str | None, *, deep: bool, fix: bool) -> ScrubReport:
    async with _opened(config) as (archive, parts):
        whole = WholeScrub(parts, archive.store, archive.manifests, topic=topic, on_progress=show_progress)
        report = await whole.run(
            deep=deep,
            fix=fix,
            expire_before_ms=lambda: archive.clock.ages_ms() - config.archive_quarantine_ms,
        )
        if topic is not None and not (report.partitions or report.orphans or report.findings):
            raise ObjectNotFound(
                f"the bucket holds nothing of a topic named {topic}",
                hint="`tieringd archive topics` lists what it holds",
            )
        return report


async def _quarantined(config: Config) -> list[QuarantinedObject]:
    async with _opened(config) as (_, parts):
        return [one async for one in parts.quarantine.objects()]


async def _restore(config: Config, keys: list[str] | None) -> list[str]:
    async with _opened(config) as (_, parts):
        wanted = [one.key async for one in parts.quarantine.objects()] if keys is None else keys
        for key in wanted:
            await parts.quarantine.restore(key)
        return wanted


async def _purge(config: Config, keys: list[str] | None) -> Expired:
    async with _opened(config) as (_, parts):
        there = {one.key async for one in parts.quarantine.objects()}
        wanted = there if keys is None else set(keys)
        if missing := sorted(wanted - there):
            raise ObjectNotFound(f"{missing[0]} is not in quarantine", key=missing[0])
        expired = Expired()
        for partition in sorted({one for key in wanted if (one := owner_of(key)) is not None}):
            of_partition = sorted(key for key in wanted if owner_of(key) == partition)
            expired = expired.joined(await parts.expiry.delete(partition, of_partition))
        return expired


def _print_chosen(verb: str, config: Config, keys: list[str] | None) -> None:
    """
    Print which objects in quarantine a command would change.

    Raises:
        ObjectNotFound: One of *keys* is not in quarantine.
    """
    there = {one.key: one.size_bytes for one in run_async(_quarantined(config))}
    wanted = sorted(there) if keys is None else keys
    for key in wanted:
        if key not in there:
            raise ObjectNotFound(f"{key} is not in quarantine", key=key)
        typer.echo(f"would be {verb}: {key} ({there[key]} bytes)")
    typer.echo(f"{len(wanted)} objects would be {verb}; nothing was changed")


def _wanted(keys: list[str] | None, *, everything: bool) -> list[str] | None:
    """
    Return the keys that the command line names; None for all that is in quarantine.

    Raises:
        ConfigError: Neither keys nor --all were given, or both.
    """
    if bool(keys) == everything:
        raise ConfigError("no keys are given: name the keys, or give --all")
    return None if everything else keys


def _show_segments(stretch: ScrubStretch) -> None:
    if stretch.segments % _PROGRESS_SEGMENTS == 0:
        show_progress(f"{stretch.partition}: {stretch.segments} segments")


def _print(report: ScrubReport) -> None:
    columns = ("topic", "partition", "segments", "size_bytes", "records", "faults")
    print_table(
        columns,
        [
            [
                one.partition.topic,
                one.partition.partition,
                one.segments,
                one.inspected_bytes,
                one.records or None,
                len(one.findings),
            ]
            for one in report.partitions
        ],
    )
    for finding in report.findings:
        typer.echo(f"{'mended' if finding in report.mended else 'fault'}: {finding.kind}: {finding}")
        typer.echo(f"  {report.mended.get(finding, finding.action)}")
    for partition, why in report.uncertain.items():
        typer.echo(f"orphans of {partition} cannot be identified: {why}")
    moved = set(report.moved)
    for orphan in report.orphans:
        where = "in quarantine" if orphan in moved else "orphan"
        typer.echo(f"{where}: {orphan.stored.key} ({orphan.stored.size_bytes} bytes): {orphan.detail}")
    for key, reason in report.left:
        typer.echo(f"unchanged: {key}: {reason}")
    typer.echo(
        f"{len(report.faults)} faults, {len(report.mended)} mended, {len(report.orphans)} orphans, "
        f"{len(moved)} of them put into quarantine, {len(report.expired.deleted)} deleted from there"
    )


def _document(report: ScrubReport, *, deep: bool) -> dict[str, Any]:
    moved = set(report.moved)
    return {
        "deep": deep,
        "faults": len(report.faults),
        "partitions": [
            {
                "topic": one.partition.topic,
                "partition": one.partition.partition,
                "segments": one.segments,
                "size_bytes": one.inspected_bytes,
                "records": one.records if deep else None,
            }
            for one in report.partitions
        ],
        "findings": [_finding_row(one, report.mended.get(one)) for one in report.findings],
        "orphans": [_orphan_row(one, is_moved=one in moved) for one in report.orphans],
        "not_judged": [
            {"topic": one.topic, "partition": one.partition, "reason": why}
            for one, why in report.uncertain.items()
        ],
        "left": [{"key": key, "reason": reason} for key, reason in report.left],
        "deleted": list(report.expired.deleted),
        "put_back": list(report.expired.put_back),
        "listed_objects": report.listed_objects,
    }


def _finding_row(finding: Finding, mended: str | None) -> dict[str, Any]:
    segment, partition = finding.segment, finding.partition
    return {
        "kind": finding.kind.value,
        "key": finding.key,
        "topic": partition.topic if partition else None,
        "partition": partition.partition if partition else None,
        "base_offset": segment.base_offset if segment else None,
        "last_offset": segment.last_offset if segment else None,
        "fault": finding.detail,
        "action": None if mended else finding.action,
        "mended": mended,
    }


def _orphan_row(orphan: Orphan, *, is_moved: bool) -> dict[str, Any]:
    return {
        "key": orphan.stored.key,
        "topic": orphan.partition.topic,
        "partition": orphan.partition.partition,
        "size_bytes": orphan.stored.size_bytes,
        "modified_at": time_text(orphan.stored.modified_ms),
        "reason": orphan.detail,
        "in_quarantine": is_moved,
    }
