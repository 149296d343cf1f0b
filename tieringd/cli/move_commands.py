"""`tieringd archive copy` and `move`: bring an archive into another bucket, prefix or provider."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from tieringd.archive.catalog import OnFault
from tieringd.archive.owner_record import require_two_places
from tieringd.cli.human import human_size
from tieringd.cli.options import (
    ConfigFile,
    DryRun,
    Format,
    OutputFormat,
    loaded,
    print_document,
    print_listing,
    print_rows,
    run_async,
    show_progress,
    unreadable_topics_reported,
)
from tieringd.config import Config
from tieringd.daemon.archive import Archive, opened_archive
from tieringd.daemon.ownership_check import owner_record
from tieringd.errors import ConfigError
from tieringd.formats.object_keys import TopicKey
from tieringd.formats.topic_manifest import TopicManifest
from tieringd.housekeeping.topic_purge import TopicObjectDeleter
from tieringd.metrics import Metrics
from tieringd.policies import topic_lifecycle
from tieringd.recovery.archive_mover import ArchiveMover, MovedPartition, Site
from tieringd.recovery.partition_mover import COPY_WRITER, ObjectCopier, PartitionCopy, PartitionMover
from tieringd.storage.store_opening import place_of

_COLUMNS = (
    "topic",
    "topic_id",
    "partition",
    "state",
    "next_offset",
    "segments",
    "size_bytes",
    "copied_objects",
    "copied_bytes",
    "fault",
)

_PREVIEWED = ("topic", "topic_id", "partition", "next_offset", "size_bytes", "target_next_offset")

To = Annotated[Path, typer.Option("--to", help="The configuration file of the target bucket.")]
Topics = Annotated[
    list[str] | None, typer.Argument(help="Names of topics; without any, all topics in the bucket.")
]
Verify = Annotated[
    bool,
    typer.Option(
        "--verify", help="Check at the end that each object is in the target, by size and checksum."
    ),
]
Deep = Annotated[bool, typer.Option("--deep", help="Verify by reading every byte of the target.")]
DeleteSource = Annotated[
    bool,
    typer.Option(
        "--delete-source",
        help="Delete the moved objects in the source, after they were verified in the target.",
    ),
]


def copy(
    to: To,
    config: ConfigFile,
    topics: Topics = None,
    verify: Verify = False,
    deep: Deep = False,
    dry_run: DryRun = False,
    output: Format = OutputFormat.TABLE,
) -> None:
    """
    Copy archives to another bucket, and leave everything here as it is.

    Called again, it brings the copy up to date.
    """
    _preview_or_run(config, to, topics, dry_run=dry_run, output=output, verify=verify, deep=deep)


def move(
    to: To,
    config: ConfigFile,
    topics: Topics = None,
    verify: Verify = False,
    deep: Deep = False,
    delete_source: DeleteSource = False,
    dry_run: DryRun = False,
    output: Format = OutputFormat.TABLE,
) -> None:
    """
    Move archives to another bucket, while daemons go on uploading.

    Copies until little is left, then closes the topics here. From then on daemons archive them only with
    a configuration that names the other bucket: restart them with it. Called again after it was interrupted,
    it goes on.
    """
    _preview_or_run(
        config,
        to,
        topics,
        dry_run=dry_run,
        output=output,
        verify=verify or delete_source,
        deep=deep,
        is_move=True,
        deletes_source=delete_source,
    )


def _preview_or_run(
    config: Path, to: Path, topics: list[str] | None, *, dry_run: bool, output: OutputFormat, **work: bool
) -> None:
    """Print what the target lacks, or do the *work*: the keyword arguments of `_run`."""
    with unreadable_topics_reported() as on_fault:
        source, target = loaded(config), loaded(to, needs_broker=False)
        if dry_run:
            _preview(source, target, topics or [], on_fault, output)
        else:
            _print(run_async(_run(source, target, topics or [], on_fault, **work)), output)


async def _run(
    source_config: Config,
    target_config: Config,
    names: Sequence[str],
    on_fault: OnFault,
    *,
    verify: bool,
    deep: bool,
    is_move: bool = False,
    deletes_source: bool = False,
) -> dict[str, Any]:
    writer_id = f"{COPY_WRITER}{secrets.token_hex(8)}"
    async with _opened(source_config, target_config, writer_id, on_fault) as (source, target, mover):
        half_purged = await mover.half_purged(names) if deletes_source else []
        topics = await mover.topics(names, half_purged=half_purged)
        await _admit(source, target, topics, (source_config, target_config))
        moved = await (mover.move(topics) if is_move else mover.copy(topics))
        has_failed = any(one.fault for one in moved)
        faults = await mover.verify(topics, deep=deep) if (verify or deep) and not has_failed else []
        purged = 0
        if deletes_source and not has_failed and not faults:
            purged = await _purge(source, topics, half_purged, writer_id)
        return {
            "source": place_of(source_config),
            "target": place_of(target_config),
            "partitions": [_row(one, is_move=is_move) for one in moved],
            "verified": (verify or deep) and not has_failed,
            "faults": faults,
            "purged_topics": purged,
        }


def _preview(
    source: Config, target: Config, names: Sequence[str], on_fault: OnFault, output: OutputFormat
) -> None:
    """Print for each partition what the target has of it, and what the source has."""
    rows = run_async(_compared(source, target, names, on_fault))
    print_listing(_PREVIEWED, rows, output)
    if not output.is_data:
        typer.echo(f"from {place_of(source)} to {place_of(target)}; nothing was changed")


async def _compared(
    source_config: Config, target_config: Config, names: Sequence[str], on_fault: OnFault
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    writer_id = f"{COPY_WRITER}{secrets.token_hex(8)}"
    opened = _opened(source_config, target_config, writer_id, on_fault, writes=False)
    async with opened as (source, target, mover):
        for topic in await mover.topics(names):
            for partition in topic.partitions():
                here, there = [
                    found.manifest if (found := await one.manifests.load(partition)) is not None else None
                    for one in (source, target)
                ]
                if here is not None:
                    rows.append(
                        {
                            "topic": partition.topic,
                            "topic_id": partition.topic_id,
                            "partition": partition.partition,
                            "next_offset": here.next_offset,
                            "size_bytes": here.size_bytes,
                            "target_next_offset": None if there is None else there.next_offset,
                        }
                    )
    return rows


@asynccontextmanager
async def _opened(
    source_config: Config, target_config: Config, writer_id: str, on_fault: OnFault, *, writes: bool = True
) -> AsyncIterator[tuple[Archive, Archive, ArchiveMover]]:
    """Open both places; only if *writes* is the target tried, which stores an object there for a moment."""
    place, target_place = place_of(source_config), place_of(target_config)
    if place == target_place:
        raise ConfigError(f"both configurations name {place}: there is nothing to copy")
    async with (
        opened_archive(source_config, Metrics(), writer_id=writer_id) as source,
        opened_archive(target_config, Metrics(), writer_id=writer_id) as target,
    ):
        if writes:
            await require_two_places(source.store, target.store, names=(place, target_place))
            await target.check_store()
        directory = source_config.state_directory
        copier = ObjectCopier(
            source.store, target.store, work_directory=directory if directory.is_dir() else None
        )
        partitions = PartitionMover(
            source.manifests, target.manifests, source_store=source.store, copier=copier
        )
        mover = ArchiveMover(
            _site(source, place),
            _site(target, target_place),
            partitions,
            on_progress=_tell,
            on_fault=on_fault,
        )
        yield source, target, mover


async def _admit(
    source: Archive, target: Archive, topics: Sequence[TopicManifest], configs: tuple[Config, Config]
) -> None:
    """
    Let the clusters of *topics* write to the target, where their daemons go on.

    Raises:
        ConfigError: The target is that of another host with the same cluster id.
    """
    owners = (await owner_record(source, configs[0]).owners()).of_cluster
    clusters = {one.key.cluster: owners.get(one.key.cluster) for one in topics}
    if clusters:
        await owner_record(target, configs[1]).admit_moved(clusters)


def _site(archive: Archive, place: str) -> Site:
    return Site(archive.store, archive.manifests, archive.catalog, archive.history, archive.verifier, place)


async def _purge(
    source: Archive, topics: Sequence[TopicManifest], half_purged: Sequence[TopicManifest], by: str
) -> int:
    """
    Delete moved topics from the source, and finish the purges that an interrupted call began.

    Args:
        source: The archive that the topics were moved from.
        topics: Topics whose archives were moved.
        half_purged: Topics that an earlier call left partly deleted.
        by: The writer id that takes the leases of the purges.

    Returns:
        How many topics were purged.

    Raises:
        ConfigError: A topic that stays in the source has one of *topics* as its history, or a daemon holds
            the lease of one of *half_purged*.
    """
    going = {one.key for one in (*topics, *half_purged)}
    users = await source.history.users() if topics else {}
    for one in topics:
        user = next((key for key in users.get(one.key, ()) if key not in going), None)
        if user is not None:
            raise ConfigError(
                f"topic {user.topic} ({user.topic_id}) in the source continues the archive of "
                f"{one.key.topic} ({one.key.topic_id}) and is not moved with it: nothing was deleted",
                hint=f"Move {user.topic} as well, or leave out --delete-source",
            )
    purger = TopicObjectDeleter(source.store, source.manifests, metrics=Metrics().purge)

    async def count(key: TopicKey, segments: int, size_bytes: int) -> None:
        await source.manifests.change_topic(
            key, partial(topic_lifecycle.counted, by=by, segments=segments, size_bytes=size_bytes)
        )

    claimed = [
        await source.manifests.change_topic(
            one.key, partial(topic_lifecycle.moved_away, now_ms=source.clock(), by=by)
        )
        for one in topics
    ]
    claimed += [
        await source.manifests.change_topic(
            one.key,
            partial(topic_lifecycle.purge_resumed, now_ms=source.clock(), by=by, also_from=COPY_WRITER),
        )
        for one in half_purged
    ]
    claimed = [one for one in claimed if topic_lifecycle.holds_lease(one, by=by)]
    async with aclosing(purger.purge(claimed, count=count)) as work:
        async for _ in work:
            pass
    for one in claimed:
        await source.manifests.change_topic(
            one.key, partial(topic_lifecycle.finished, now_ms=source.clock(), by=by)
        )
    return len(claimed)


def _tell(step: str, copied: PartitionCopy) -> None:
    """Tell on standard error that a partition was switched; on a terminal also what each step has copied."""
    line = (
        f"{step}: {copied.partition}: {copied.copied_objects} objects, "
        f"{human_size(copied.copied_bytes)}; the target ends before offset {copied.next_offset}"
    )
    if step == "switch":
        typer.echo(line, err=True)
    elif copied.copied_objects:
        show_progress(line)


def _row(moved: MovedPartition, *, is_move: bool) -> dict[str, Any]:
    copied = moved.copy
    state = "copied"
    if moved.fault:
        state = "failed"
    elif copied.has_gone_on:
        state = "taken over"
    elif is_move:
        state = "moved" if moved.is_switched else "not moved"
    return {
        "topic": copied.partition.topic,
        "topic_id": copied.partition.topic_id,
        "partition": copied.partition.partition,
        "state": state,
        "next_offset": copied.next_offset,
        "segments": copied.segments,
        "size_bytes": copied.size_bytes,
        "copied_objects": copied.copied_objects,
        "copied_bytes": copied.copied_bytes,
        "fault": moved.fault or None,
    }


def _print(outcome: dict[str, Any], output: OutputFormat) -> None:
    rows = outcome["partitions"]
    if output.is_data:
        print_document(outcome, output)
    else:
        print_rows(_COLUMNS, rows)
        for fault in outcome["faults"]:
            typer.echo(f"fault: {fault}")
    if outcome["faults"] or any(row["fault"] for row in rows):
        raise typer.Exit(1)
