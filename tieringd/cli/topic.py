"""`tieringd topic`: an operator's decisions about one topic, stored in the bucket for every daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from tieringd.archive.catalog import ArchivedTopic
from tieringd.broker.local_errors import named_errors
from tieringd.broker.log_dir import read_local_log, scan_log_dirs
from tieringd.broker.pins import PinDirectory, with_true_ends
from tieringd.cli.delete_records import delete_records
from tieringd.cli.describe_storage import describe_storage
from tieringd.cli.options import (
    ConfigFile,
    DryRun,
    Format,
    FromCluster,
    OutputFormat,
    loaded,
    print_document,
    print_fields,
    print_listing,
    run_async,
)
from tieringd.config import Config
from tieringd.daemon.archive import opened_archive
from tieringd.daemon.local_broker import opened_broker
from tieringd.daemon.ownership_check import cluster_on_disk, own_cluster
from tieringd.errors import ConfigError, CorruptDataError, LocalFileError
from tieringd.formats.topic_manifest import Archiving, OriginalRetention, TopicManifest
from tieringd.model.local_log import LocalLog, LocalPartition
from tieringd.policies.pinning import Pin, PinnedLog, judged, with_pins
from tieringd.topics.retention_manager import release as release_retention

topic_app = typer.Typer(
    help="Show a topic, pause and resume its archiving, delete its records, and release its retention.",
    no_args_is_help=True,
)
topic_app.command()(describe_storage)
topic_app.command()(delete_records)

Topic = Annotated[str, typer.Argument(help="The topic's name.")]
_COVERAGE = ("partition", "archive_next_offset", "local_first_offset", "pinned_offsets", "missing_offsets")


@topic_app.command()
def show(
    topic: Topic, config: ConfigFile, from_cluster: FromCluster = None, output: Format = OutputFormat.TABLE
) -> None:
    """Show what the bucket records about a topic: its state, and its original retention."""
    found = run_async(_found(loaded(config), topic, from_cluster)).topic
    original = found.original_retention
    document = {
        "topic": found.key.topic,
        "topic_id": found.key.topic_id,
        "partitions": found.partition_count,
        "archiving": found.archiving.value,
        "retention": "managed" if original else "released" if found.retention_released else "broker",
        "original_retention_ms": original.retention_ms if original else None,
        "original_retention_bytes": original.retention_bytes if original else None,
    }
    if output.is_data:
        print_document(document, output)
    else:
        print_fields(list(document.items()))


@topic_app.command()
def pause(topic: Topic, config: ConfigFile, dry_run: DryRun = False) -> None:
    """Stop uploading and trimming a topic on every broker, until it is resumed."""
    settings = loaded(config)
    found = run_async(
        _change(
            settings,
            topic,
            lambda known: replace(known, archiving=Archiving.PAUSED),
            dry_run=dry_run,
        )
    )
    if dry_run:
        typer.echo(
            f"{topic} would be paused; archiving is {found.topic.archiving.value}; nothing was changed"
        )
        return
    is_pinned = settings.broker.kind == "kafka" and settings.pin_segments
    what = (
        "what it deletes stays in pins up to pin_max_bytes, and more than that"
        if is_pinned
        else "what it deletes"
    )
    typer.echo(
        f"{topic} is paused: every daemon stops archiving it within a round. The broker's own retention "
        f"continues; {what} before `tieringd topic resume` becomes a gap in the archive."
    )


@topic_app.command()
def resume(
    topic: Topic, config: ConfigFile, dry_run: DryRun = False, output: Format = OutputFormat.TABLE
) -> None:
    """Resume uploading a paused topic, and compare the archive with the local log on this host."""
    loaded_config = loaded(config)
    found = run_async(
        _change(loaded_config, topic, lambda known: replace(known, archiving=Archiving.ON), dry_run=dry_run)
    )
    rows, unread = _coverage(loaded_config, found)
    print_listing(_COVERAGE, rows, output)
    for problem in unread:
        typer.echo(problem, err=True)
    if unread:
        what = "would be resumed; nothing was changed" if dry_run else "is resumed"
        typer.echo(
            f"{topic} {what}. The missing offsets of the logs above are not known: they cannot be read",
            err=True,
        )
        raise typer.Exit(1)
    if output.is_data:
        return
    missing = sum(row["missing_offsets"] or 0 for row in rows)
    if dry_run:
        typer.echo(
            f"{topic} would be resumed; {missing} offsets would become gaps in the archive; nothing was "
            "changed"
        )
        return
    typer.echo(
        f"{topic} is resumed: {missing} offsets were deleted while it was paused, and become gaps in the "
        "archive"
        if missing
        else f"{topic} is resumed: the partitions on this broker's disk have no gap"
    )


@topic_app.command()
def release(topic: Topic, config: ConfigFile, dry_run: DryRun = False) -> None:
    """Give a topic's retention back to the broker, as it was before tieringd managed it."""
    original = run_async(_release(loaded(config), topic, dry_run=dry_run))
    if dry_run:
        typer.echo(
            f"{topic}: the broker would get retention.ms={_limit(original.retention_ms)} and "
            f"retention.bytes={_limit(original.retention_bytes)}; nothing was changed"
        )
        return
    typer.echo(f"{topic}: the broker has its original retention again")


@topic_app.command()
def manage(topic: Topic, config: ConfigFile, dry_run: DryRun = False) -> None:
    """Let daemons manage a topic's retention again after a release, if the configuration says so."""
    change = partial(replace, retention_released=False)
    run_async(_change(loaded(config), topic, change, dry_run=dry_run))
    if dry_run:
        typer.echo(f"{topic}: daemons would manage its retention again; nothing was changed")
        return
    typer.echo(f"{topic}: daemons manage its retention again if tieringd.managed.retention is set")


async def _found(config: Config, topic: str, cluster: str | None) -> ArchivedTopic:
    async with opened_archive(config) as archive:
        own = await asyncio.to_thread(cluster_on_disk, config)
        return await archive.catalog.topic(topic, cluster=cluster, own_cluster=own)


async def _change(
    config: Config, topic: str, change: Callable[[TopicManifest], TopicManifest], *, dry_run: bool
) -> ArchivedTopic:
    """Change the manifest of this cluster's topic, unless *dry_run*. Return the topic as it was before."""
    async with opened_archive(config) as archive:
        found = await archive.catalog.topic(topic, cluster=await own_cluster(config))
        if not dry_run:
            await archive.manifests.change_topic(found.topic.key, change)
        return found


async def _release(config: Config, topic: str, *, dry_run: bool) -> OriginalRetention:
    """Release a topic's retention, unless *dry_run*. Return what the broker gets back."""
    async with opened_archive(config) as archive, opened_broker(config) as broker:
        found = (await archive.catalog.topic(topic, cluster=await broker.cluster_id())).topic
        if found.original_retention is None:
            raise ConfigError(
                f"the retention of topic {topic} is not managed by tieringd: there is nothing to release"
            )
        if dry_run:
            return found.original_retention
        # The order lets a call that is interrupted be repeated. First no daemon may manage the retention
        # again; then the broker gets it back; then the original values are removed from the manifest.
        await archive.manifests.change_topic(found.key, lambda known: replace(known, retention_released=True))
        await release_retention(broker, found.key, found.original_retention)
        await archive.manifests.change_topic(found.key, lambda known: replace(known, original_retention=None))
        return found.original_retention


def _limit(value: str | None) -> str:
    """Return a limit as the broker's own or the topic's value; None is that the topic had none of its own."""
    return "the broker's default" if value is None else value


def _coverage(config: Config, found: ArchivedTopic) -> tuple[list[dict[str, Any]], list[str]]:
    """
    Return one row for each partition, and what cannot be read on this host's disks, with the reasons.

    A row has the archive's end, the local log's start, and the offsets between. Of those, pins hold some, and
    the others are missing. Values are None where the archive or this host's disks do not have the partition,
    or its log cannot be read.
    """
    # An ordinary import would load the whole daemon at each start of `tieringd topic`.
    from tieringd.daemon.assembly import left_pin_directories  # noqa: PLC0415

    ends = {one.partition.partition: one.next_offset for one in found.partitions}
    pin_directories = left_pin_directories(config, ())
    rows: list[dict[str, Any]] = []
    scan = scan_log_dirs([str(path) for path in config.broker.log_dirs])
    # A problem without a topic is one of a whole log directory, which may have partitions of this topic.
    unread = [
        str(problem)
        for problem in scan.problems
        if scan.topic_of_problem.get(problem.path, found.topic.key.topic) == found.topic.key.topic
    ]
    for local in scan.partitions:
        name = local.topic_partition
        if name.topic != found.topic.key.topic or local.topic_id != found.topic.key.topic_id:
            continue
        try:
            log, pins = _read_with_pins(local, pin_directories)
        except (LocalFileError, CorruptDataError) as error:
            unread.append(f"{name}: {error}")
            continue
        end = ends.pop(name.partition, None)
        row: dict[str, Any] = {
            "partition": name.partition,
            "archive_next_offset": end,
            "local_first_offset": log.first_offset,
            "pinned_offsets": None,
            "missing_offsets": None,
        }
        if end is not None and log.first_offset is not None:
            missing = _missing_offsets(log, pins, end)
            row["missing_offsets"] = missing
            row["pinned_offsets"] = max(0, log.first_offset - end) - missing
        rows.append(row)
    rows.extend(
        dict.fromkeys(_COVERAGE) | {"partition": number, "archive_next_offset": end}
        for number, end in ends.items()
    )
    return sorted(rows, key=lambda row: int(row["partition"])), unread


def _read_with_pins(
    partition: LocalPartition, directories: Sequence[PinDirectory]
) -> tuple[LocalLog, tuple[Pin, ...]]:
    """
    Return a partition's log, and its pins in any of *directories*.

    Raises:
        LocalFileError: A file cannot be read.
        CorruptDataError: The pins may be those of the log before this one.
    """
    found = PinnedLog(
        elsewhere=tuple(
            replace(directory.found(partition), is_elsewhere=not _is_on_one_filesystem(directory, partition))
            for directory in directories
        )
    )
    # The log is read after its pins, so what the broker deletes in between is in one of them at least.
    log = read_local_log(partition)
    return judged(log, with_true_ends(log, found))


def _is_on_one_filesystem(directory: PinDirectory, partition: LocalPartition) -> bool:
    """Return whether numbers of files in both places are of one filesystem."""
    with named_errors(directory.root, "be read"):
        return Path(directory.root).stat().st_dev == Path(partition.log_dir).stat().st_dev


def _missing_offsets(log: LocalLog, pins: Sequence[Pin], next_offset: int) -> int:
    """Return how many offsets from *next_offset* to the start of *log* no pin holds."""
    missing = 0
    for segment in with_pins(log, pins):
        missing += max(0, segment.base_offset - next_offset)
        if segment.next_offset is None or segment.base_offset == log.first_offset:
            break
        next_offset = max(next_offset, segment.next_offset)
    return missing
