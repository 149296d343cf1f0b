"""The commands of `tieringd recover`."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tieringd.archive.catalog import ArchivedTopic, OnFault
from tieringd.broker.stopped_broker import kept_stopped
from tieringd.cli.options import (
    NO_MANIFEST,
    ConfigFile,
    DryRun,
    Format,
    OutputFormat,
    TopicPatterns,
    loaded,
    names_noted,
    print_listing,
    run_async,
    unreadable_topics_reported,
)
from tieringd.cli.read import Isolation
from tieringd.cli.recover import cluster as into_cluster
from tieringd.cli.recover import directory as into_directory
from tieringd.cli.recover.options import (
    DEFAULT_DEPTH,
    FromCluster,
    LastBytes,
    LastMs,
    TopicId,
    Topics,
    Validate,
    Validation,
    ValidationDepth,
    checked_pattern,
    chosen_topics,
)
from tieringd.cli.recover.selection import LISTED, TopicSelection, listing, matching
from tieringd.config import Config
from tieringd.daemon.archive import opened_archive
from tieringd.policies.recovery import Renaming, RestoreLimits

recover_app = typer.Typer(
    help="Restore topics from the bucket, into a cluster or into the log directory of a stopped broker.",
    no_args_is_help=True,
)

_NUMBERS = {"retention.ms": "milliseconds", "retention.bytes": "bytes"}
"""The topic settings that a recovery compares with the archive, and their units."""


class Compression(StrEnum):
    """The compression of records that are written to a cluster."""

    ARCHIVED = "archived"
    """The codec of the partition's archived batches."""
    NONE = "none"
    GZIP = "gzip"
    SNAPPY = "snappy"
    LZ4 = "lz4"
    ZSTD = "zstd"


@recover_app.command(name="list")
def list_topics(
    config: ConfigFile,
    patterns: TopicPatterns = None,
    topics: Topics = None,
    from_cluster: FromCluster = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """List the topics that can be restored: topics of all clusters, their sizes and time ranges."""
    chosen = {} if not patterns and topics is None else chosen_topics(patterns, topics)
    wanted = TopicSelection(chosen, from_cluster)
    names: set[str] = set()
    with unreadable_topics_reported() as on_fault:
        work = _listed(loaded(config, needs_broker=False), wanted, names_noted(on_fault, names))
        found = run_async(work)
        print_listing(LISTED, [listing(one) for one in found], output)
        lost = [partition for one in found for partition in one.without_manifest]
        for partition in lost:
            typer.echo(f"{partition}: {NO_MANIFEST}", err=True)
        wanted.require_matched(names.union(one.topic.key.topic for one in found))
        if lost:
            raise typer.Exit(1)


@recover_app.command()
def directory(
    log_dir: Annotated[Path, typer.Argument(help="The broker's log directory.", file_okay=False)],
    config: ConfigFile,
    patterns: TopicPatterns = None,
    topics: Topics = None,
    from_cluster: FromCluster = None,
    topic_id: TopicId = None,
    last_bytes: LastBytes = None,
    last_ms: LastMs = None,
    staging: Annotated[
        Path | None,
        typer.Option(
            help="The directory to build in, on the log directory's filesystem. Default: a hidden directory "
            "beside it."
        ),
    ] = None,
    shallow: Annotated[
        bool,
        typer.Option(
            "--shallow",
            help="Download nothing: the logs begin where the archive ends, and the archive stays their "
            "history.",
        ),
    ] = False,
    validate: Validate = Validation.CHECK_MANIFEST_EXISTENCE,
    validation_depth: ValidationDepth = DEFAULT_DEPTH,
    dry_run: DryRun = False,
    output: Format = OutputFormat.TABLE,
) -> None:
    """
    Restore topics with their offsets into the log directory of a stopped broker.

    First create the topics on the new broker, with one replica and the archived number of partitions,
    and stop the broker. The next attempt continues the work of an interrupted one.

    --validate is check_manifest_existence (the default), check_manifest_and_segment_metadata, or no_check.
    """
    if shallow and (last_bytes is not None or last_ms is not None):
        raise typer.BadParameter("--shallow downloads nothing: leave out --last-bytes and --last-ms")
    asked = into_directory.DirectoryRecovery(
        TopicSelection(chosen_topics(patterns, topics), from_cluster, topic_id),
        log_dir=log_dir,
        staging=staging or log_dir.parent / f".{log_dir.name}.tieringd-restore",
        limits=RestoreLimits(last_bytes, last_ms),
        validate=validate,
        depth=validation_depth,
        is_shallow=shallow,
        is_dry_run=dry_run,
    )
    with unreadable_topics_reported() as on_fault:
        with kept_stopped(log_dir):
            rows = run_async(
                into_directory.restored_into_directory(
                    loaded(config, needs_broker=False), asked, on_fault=on_fault
                )
            )
        print_listing(into_directory.REPORTED, rows, output)
    if dry_run:
        typer.echo("nothing was changed", err=True)
    if any(row["failure"] for row in rows):
        raise typer.Exit(1)


@recover_app.command()
def cluster(
    config: ConfigFile,
    patterns: TopicPatterns = None,
    topics: Topics = None,
    from_cluster: FromCluster = None,
    topic_id: TopicId = None,
    last_bytes: LastBytes = None,
    last_ms: LastMs = None,
    rename: Annotated[
        str | None,
        typer.Option(help="REGEX=REPLACEMENT: rename each topic whose whole name matches; \\1 is a group."),
    ] = None,
    prefix: Annotated[str, typer.Option(help="Text to put before each name.")] = "",
    suffix: Annotated[str, typer.Option(help="Text to put after each name.")] = "",
    replication_factor: Annotated[
        int,
        typer.Option(
            help="Replication factor of the topics that are created; -1 is the cluster's default.", min=-1
        ),
    ] = -1,
    topic_config: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=VALUE, a setting of the topics that are created. May be given several times."
        ),
    ] = None,
    compression: Annotated[
        Compression,
        typer.Option(help="Compression of the written records; `archived` keeps that of the archive."),
    ] = Compression.ARCHIVED,
    isolation: Annotated[
        Isolation, typer.Option(help="read_committed leaves out aborted transactions.")
    ] = Isolation.READ_COMMITTED,
    into_existing: Annotated[
        bool, typer.Option("--into-existing", help="Append to topics that the cluster already has.")
    ] = False,
    parallel: Annotated[int, typer.Option(help="How many partitions to write at once.", min=1, max=64)] = 4,
    validate: Validate = Validation.CHECK_MANIFEST_EXISTENCE,
    validation_depth: ValidationDepth = DEFAULT_DEPTH,
    dry_run: DryRun = False,
    output: Format = OutputFormat.TABLE,
) -> None:
    """
    Write topics into the live cluster of the configuration's broker section; records get new offsets.

    The command creates the topics with a retention that keeps records of any age. Run the same command
    again after an interruption: it continues, without duplicates and without omissions.

    --validate is check_manifest_existence (the default), check_manifest_and_segment_metadata, or no_check.
    """
    asked = into_cluster.ClusterRecovery(
        TopicSelection(chosen_topics(patterns, topics), from_cluster, topic_id),
        limits=RestoreLimits(last_bytes, last_ms),
        renaming=Renaming(*_renamed(rename), prefix=prefix, suffix=suffix),
        settings=dict(_setting(one) for one in topic_config or ()),
        replication_factor=replication_factor,
        compression=None if compression is Compression.ARCHIVED else compression.value,
        isolation=isolation.value,
        into_existing=into_existing,
        parallel=parallel,
        validate=validate,
        depth=validation_depth,
        is_dry_run=dry_run,
    )
    with unreadable_topics_reported() as on_fault:
        rows = run_async(into_cluster.recovered_into_cluster(loaded(config), asked, on_fault=on_fault))
        print_listing(into_cluster.REPORTED, rows, output)
    if dry_run:
        typer.echo("nothing was changed", err=True)


def _renamed(text: str | None) -> tuple[str | None, str]:
    if text is None:
        return None, ""
    pattern, separator, replacement = text.partition("=")
    if not separator:
        raise typer.BadParameter(f"--rename {text!r} is not REGEX=REPLACEMENT")
    return checked_pattern(pattern), replacement


def _setting(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise typer.BadParameter(f"--topic-config {text!r} is not NAME=VALUE")
    if name in _NUMBERS and not re.fullmatch("-?[0-9]+", value):
        raise typer.BadParameter(
            f"--topic-config {name}: {value!r} is not a whole number ({_NUMBERS[name]}, or -1 for no limit)"
        )
    return name, value


async def _listed(config: Config, wanted: TopicSelection, on_fault: OnFault) -> list[ArchivedTopic]:
    async with opened_archive(config) as archive:
        return await matching(archive, wanted, on_fault=on_fault)
