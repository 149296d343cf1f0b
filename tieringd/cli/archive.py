"""
`tieringd archive`: what the bucket holds. The commands read the bucket alone; no broker is needed.

`init` makes a directory the archive of a file store. `claim` records this cluster as an owner of the
archive. With `delete` an operator orders the deletion of a deleted topic's archive; `undelete` takes the
order back. `describe` also asks the daemon, if one answers, and so does `resolve`, which stores an
operator's decision.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

from tieringd.archive.catalog import OnFault
from tieringd.archive.scrub.segment_inspection import PartitionReport
from tieringd.cli.archive_scrub import quarantine_app, scrub
from tieringd.cli.daemon_status import waiting
from tieringd.cli.human import time_text
from tieringd.cli.move_commands import copy, move
from tieringd.cli.options import (
    NO_MANIFEST,
    ConfigFile,
    DryRun,
    Format,
    FromCluster,
    OutputFormat,
    TopicPatterns,
    counted,
    is_chosen,
    loaded,
    names_noted,
    print_document,
    print_fields,
    print_listing,
    print_rows,
    print_table,
    require_matched,
    run_async,
    show_progress,
    unreadable_topics_reported,
)
from tieringd.cli.recover.recovery_progress import ByteProgress
from tieringd.cli.resolve import resolve
from tieringd.config import Config
from tieringd.daemon.archive import Archive, opened_archive
from tieringd.daemon.file_archive import found_file_root, init_file_root, note_first_start
from tieringd.daemon.local_broker import opened_broker
from tieringd.daemon.ownership_check import claimant_of, cluster_on_disk, owner_record
from tieringd.formats.archive_owners import ArchiveOwners
from tieringd.formats.object_keys import TopicKey, data_key
from tieringd.formats.topic_manifest import TopicManifest
from tieringd.model.manifest import PartitionManifest
from tieringd.policies.archive_ownership import Claimant
from tieringd.policies.topic_lifecycle import ordered_to_go, taken_back
from tieringd.storage.store_opening import place_of

Topic = Annotated[str, typer.Argument(help="The topic's name.")]
TopicId = Annotated[
    str,
    typer.Option(
        "--id", help="The topic's id, as `archive topics` shows it. Several topics can have the same name."
    ),
]

archive_app = typer.Typer(
    help="Show what the bucket holds, delete it, and move it. Needs only the bucket.", no_args_is_help=True
)


def init(config: ConfigFile, dry_run: DryRun = False) -> None:
    """
    Begin an archive in the file store's directory, or accept the archive that is already there.

    Check first that the right disk is mounted. A daemon begins its archive itself at its first start.
    Use this command for every other new directory: another disk, the target of a copy, or jobs without a
    daemon. Restart a daemon that runs on this directory afterwards.
    """
    settings = loaded(config, needs_broker=False)
    if dry_run:
        found = found_file_root(settings)
        what = "a new archive would begin" if found is None else f"the archive {found} would be accepted"
        typer.echo(f"{what} in {settings.cloud_storage_file_root}; nothing was changed")
        return
    root_id, before = init_file_root(settings)
    typer.echo(f"{settings.cloud_storage_file_root} is the archive {root_id}")
    if before not in {None, root_id}:
        typer.echo(f"It replaces {before}, which {settings.state_directory} has named so far.")


def claim(config: ConfigFile, dry_run: DryRun = False) -> None:
    """
    Let this daemon's cluster write to an archive that is recorded as another cluster's or host's.

    Use it when two clusters are to share a bucket and prefix, or when the state directory of a host without
    a broker was lost. First make sure that no other host archives under the same cluster id. Start or
    restart the daemon afterwards.
    """
    settings = loaded(config)
    if dry_run:
        cluster, owners = run_async(_owners(settings))
        recorded = ", ".join(sorted(owners.of_cluster)) or "no cluster"
        typer.echo(
            f"{place_of(settings)} is recorded as that of {recorded}; this host of the cluster {cluster} "
            "would be let in; nothing was changed"
        )
        return
    claimant, before = run_async(_claim(settings))
    typer.echo(f"{place_of(settings)} is an archive of the cluster {claimant.cluster}")
    for cluster, owner in sorted(before.of_cluster.items()):
        if cluster != claimant.cluster:
            typer.echo(f"It is one of the cluster {cluster} as well.")
        elif owner not in {None, claimant.owner}:
            typer.echo(f"The host with the id {owner} may not archive there any more, once it restarts.")


async def _owners(config: Config) -> tuple[str, ArchiveOwners]:
    """Return the cluster of *config*, and the recorded owners of its archive."""
    async with opened_archive(config) as archive, opened_broker(config) as broker:
        return await broker.cluster_id(), await owner_record(archive, config).owners()


async def _claim(config: Config) -> tuple[Claimant, ArchiveOwners]:
    await asyncio.to_thread(note_first_start, config)
    async with opened_archive(config) as archive, opened_broker(config) as broker:
        claimant = await asyncio.to_thread(claimant_of, config, await broker.cluster_id())
        return claimant, await owner_record(archive, config).admit(claimant)


def delete(topic: Topic, topic_id: TopicId, config: ConfigFile, dry_run: DryRun = False) -> None:
    """
    Delete the archive of a topic that was deleted in its cluster, after the grace period.

    A daemon of the topic's cluster deletes it. The daemon first checks whether the cluster still has the
    topic; if so, it deletes nothing.
    """
    settings = loaded(config)
    run_async(_change(settings, topic, topic_id, ordered_to_go, dry_run=dry_run))
    if dry_run:
        typer.echo(f"the archive of {topic} ({topic_id}) would be deleted; nothing was changed")
        return
    grace = settings.cloud_storage_topic_purge_grace_period_ms / 1000
    typer.echo(
        f"the archive of {topic} ({topic_id}) is deleted in {grace:g} s or later, by the next daemon that "
        "does housekeeping; until then `tieringd archive undelete` takes it back"
    )


def undelete(topic: Topic, topic_id: TopicId, config: ConfigFile, dry_run: DryRun = False) -> None:
    """Take back the deletion of a topic's archive, during the grace period."""
    run_async(_change(loaded(config), topic, topic_id, taken_back, dry_run=dry_run))
    if dry_run:
        typer.echo(f"the archive of {topic} ({topic_id}) would be kept; nothing was changed")
        return
    typer.echo(f"the archive of {topic} ({topic_id}) is kept; `tieringd archive delete` deletes it")


def lifecycle_remark(topic: TopicManifest) -> str | None:
    """Return a remark for people on a topic's lifecycle: moved, deleted, purged; None for a live topic."""
    remarks = [f"moved to {topic.moved_to}"] if topic.moved_to else []
    if topic.deletion is not None:
        ended_ms = topic.deletion.purged_at_ms
        remarks.append(f"since {time_text(topic.deletion.noted_at_ms)}: {topic.deletion.reason}")
        if ended_ms is not None:
            remarks.append(
                f"purged {time_text(ended_ms)}: {topic.deletion.segments} segments, "
                f"{topic.deletion.size_bytes} bytes"
            )
    return "; ".join(remarks) or None


async def _change(
    config: Config, topic: str, topic_id: str, change: Callable[..., TopicManifest], *, dry_run: bool
) -> None:
    """
    Apply *change* to a topic's manifest; with *dry_run* only see that it can be applied.

    *change* is called with *now_ms* from the archive's clock: the store's time where this host's is wrong.
    """
    async with opened_archive(config) as archive:
        found = await archive.catalog.incarnation(topic, topic_id)
        if dry_run:
            change(found, now_ms=archive.clock())
            return
        await archive.manifests.change_topic(found.key, partial(change, now_ms=archive.clock()))


for _command in (init, claim, delete, undelete, copy, move, resolve):
    archive_app.command()(_command)
archive_app.command()(scrub)
archive_app.add_typer(quarantine_app, name="quarantine")
Partition = Annotated[int, typer.Argument(help="The partition's number.", min=0)]


@archive_app.command()
def topics(config: ConfigFile, patterns: TopicPatterns = None, output: Format = OutputFormat.TABLE) -> None:
    """List the topics in the bucket."""
    columns = (
        "cluster",
        "topic",
        "topic_id",
        "partitions",
        "segments",
        "size_bytes",
        "lifecycle",
        "remark",
    )
    names: set[str] = set()
    with unreadable_topics_reported() as on_fault:
        work = _topics(loaded(config, needs_broker=False), patterns, names_noted(on_fault, names))
        rows = run_async(work)
        print_listing(columns, rows, output)
        require_matched(patterns, names.union(row["topic"] for row in rows))


@archive_app.command()
def describe(
    topic: Topic, config: ConfigFile, from_cluster: FromCluster = None, output: Format = OutputFormat.TABLE
) -> None:
    """
    Show each partition of a topic: offsets, sizes, last commit, gaps, and what it waits for.

    The command asks the daemon that runs with this configuration what a partition waits for, if the
    daemon answers: for example an open transaction, or a fault.
    """
    rows = run_async(_describe(loaded(config, needs_broker=False), topic, from_cluster))
    columns = (
        "partition",
        "start_offset",
        "next_offset",
        "segments",
        "size_bytes",
        "leader_epoch",
        "committed_at",
        "gap_offsets",
        "waits_because",
    )
    print_listing(columns, rows, output)


@archive_app.command()
def manifest(
    topic: Topic,
    partition: Partition,
    config: ConfigFile,
    from_cluster: FromCluster = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Show one partition's manifest, every field and every segment."""
    found = run_async(_manifest(loaded(config, needs_broker=False), topic, partition, from_cluster))
    document = _manifest_document(found)
    if output.is_data:
        print_document(document, output)
        return
    print_fields([(name, value) for name, value in document.items() if name not in ("segments", "gaps")])
    typer.echo()
    columns = ("base_offset", "last_offset", "size_bytes", "crc32c", "max_timestamp", "leader_epoch", "key")
    print_rows(columns, document["segments"])
    for gap in document["gaps"]:
        typer.echo(f"gap: offsets {gap['base_offset']} to {gap['last_offset']}: {gap['reason']}")


@archive_app.command()
def verify(
    config: ConfigFile,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every byte: batch checksums, offsets, indexes.")
    ] = False,
    topics: TopicPatterns = None,
    topic: Annotated[str | None, typer.Option(help="The former way to name one topic.")] = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Compare the manifests with the objects; exit 1 when anything is wrong."""
    chosen = [*(topics or ()), *([topic] if topic is not None else ())]
    with unreadable_topics_reported() as on_fault:
        reports = run_async(_verify(loaded(config, needs_broker=False), chosen, on_fault, deep=deep))
        rows = [_report_row(report) for report in reports]
        faults = sum(len(report.faults) for report in reports)
        if output.is_data:
            print_document({"deep": deep, "faults": faults, "partitions": rows}, output)
        else:
            columns = ("topic", "partition", "segments", "size_bytes", "records", "gap_offsets", "faults")
            print_table(
                columns, [[*(row[column] for column in columns[:-1]), len(row["faults"])] for row in rows]
            )
            for row in rows:
                for fault in row["faults"]:
                    typer.echo(f"fault: {row['topic']}-{row['partition']}: {fault}")
        if faults:
            raise typer.Exit(1)


@archive_app.command()
def cat(topic: Topic, partition: Partition, config: ConfigFile, from_cluster: FromCluster = None) -> None:
    """Write the archived batches, raw and in offset order, to standard output."""
    if sys.stdout.isatty():
        raise typer.BadParameter(
            "standard output is a terminal, and batches are bytes; redirect it to a file or a program"
        )
    run_async(_cat(loaded(config, needs_broker=False), topic, partition, from_cluster))


async def _topics(config: Config, patterns: list[str] | None, on_fault: OnFault) -> list[dict[str, Any]]:
    def is_wanted(key: TopicKey) -> bool:
        return is_chosen(key.topic, patterns)

    async with opened_archive(config) as archive:
        return [
            {
                "cluster": found.topic.key.cluster,
                "topic": found.topic.key.topic,
                "topic_id": found.topic.key.topic_id,
                "partitions": found.topic.partition_count,
                "segments": sum(one.segment_count for one in found.partitions),
                "size_bytes": sum(one.size_bytes for one in found.partitions),
                "lifecycle": found.topic.lifecycle.value,
                "remark": lifecycle_remark(found.topic),
            }
            async for found in counted(
                archive.catalog.archived_topics(is_wanted, on_fault=on_fault), "topics"
            )
        ]


async def _describe(config: Config, topic: str, cluster: str | None) -> list[dict[str, Any]]:
    async with opened_archive(config) as archive:
        own = await asyncio.to_thread(cluster_on_disk, config)
        chosen = await archive.catalog.topic(topic, cluster=cluster, own_cluster=own)
        found = await archive.catalog.with_history(chosen)
        # The daemon knows nothing of another cluster's topic, and may have one of the same name.
        waits = await waiting(config, topic) if own in {None, found.topic.key.cluster} else {}
        return [
            {
                "topic": one.partition.topic,
                "partition": one.partition.partition,
                "start_offset": one.start_offset,
                "next_offset": one.next_offset,
                "segments": one.segment_count,
                "size_bytes": one.size_bytes,
                "leader_epoch": one.leader_epoch,
                "committed_at": time_text(one.committed_at_ms),
                "gap_offsets": one.gap_offsets,
                "waits_because": waits.get(one.partition.partition),
            }
            for one in found.partitions
        ]


async def _manifest(config: Config, topic: str, partition: int, cluster: str | None) -> PartitionManifest:
    async with opened_archive(config) as archive:
        own = await asyncio.to_thread(cluster_on_disk, config)
        manifest = await archive.catalog.partition(topic, partition, cluster=cluster, own_cluster=own)
        return await archive.manifests.spillovers.with_history(manifest)


async def _verify(
    config: Config, topics: list[str], on_fault: OnFault, *, deep: bool
) -> list[PartitionReport]:
    def is_wanted(key: TopicKey) -> bool:
        return is_chosen(key.topic, topics)

    async with opened_archive(config) as archive:
        names: set[str] = set()
        wanted = archive.catalog.archived_topics(is_wanted, on_fault=names_noted(on_fault, names))
        chosen = [one async for one in counted(wanted, "topics")]
        # A purged topic has nothing to verify.
        names |= {one.topic.key.topic for one in chosen if one.partitions or one.without_manifest}
        require_matched(topics, names)
        manifests = [found for one in chosen for found in one.partitions]
        reports = []
        for number, found in enumerate(manifests, 1):
            reports.append(await archive.verifier.verify(found, deep=deep))
            show_progress(f"{number} of {len(manifests)} partitions verified: {found.partition}")
        reports += [
            PartitionReport(
                lost, segments=0, size_bytes=0, records=None, gap_offsets=0, faults=(NO_MANIFEST,)
            )
            for one in chosen
            for lost in one.without_manifest
        ]
        return reports


async def _cat(config: Config, topic: str, partition: int, cluster: str | None) -> None:
    async with opened_archive(config) as archive:
        own = await asyncio.to_thread(cluster_on_disk, config)
        live = await archive.catalog.partition(topic, partition, cluster=cluster, own_cluster=own)
        found = await archive.manifests.spillovers.with_history(live)
        for gap in found.gaps:
            typer.echo(
                f"gap: offsets {gap.base_offset} to {gap.last_offset} are not archived: {gap.reason}",
                err=True,
            )
        await _write_batches(archive, found)
        sys.stdout.buffer.flush()


async def _write_batches(archive: Archive, found: PartitionManifest) -> None:
    # On a terminal standard output is refused, so a person who watches has sent it to a file or a pipe.
    progress = ByteProgress(sum(segment.size_bytes for segment in found.segments), "written")
    for segment in found.segments:
        index = await archive.remote_log.index_of(found.partition, segment)
        key = data_key(found.partition, segment)
        async for batch in archive.reader.batches(key, index, from_offset=segment.base_offset):
            sys.stdout.buffer.write(batch.data)
            progress.note(len(batch.data))


def _manifest_document(found: PartitionManifest) -> dict[str, Any]:
    partition = found.partition
    return {
        "cluster": partition.cluster,
        "topic": partition.topic,
        "topic_id": partition.topic_id,
        "partition": partition.partition,
        "start_offset": found.start_offset,
        "next_offset": found.next_offset,
        "leader_epoch": found.leader_epoch,
        "writer_id": found.writer_id,
        "commit_number": found.commit_number,
        "committed_at": time_text(found.committed_at_ms),
        "epochs": [{"epoch": epoch, "start_offset": start} for epoch, start in found.epochs],
        "segments": [
            {
                "base_offset": segment.base_offset,
                "last_offset": segment.last_offset,
                "size_bytes": segment.size_bytes,
                "crc32c": f"{segment.crc32c:08x}",
                "base_timestamp": time_text(segment.base_timestamp_ms),
                "max_timestamp": time_text(segment.max_timestamp_ms),
                "leader_epoch": segment.leader_epoch,
                "writer_id": segment.writer_id,
                "uploaded_at": time_text(segment.uploaded_at_ms),
                "index_size_bytes": segment.index_size_bytes,
                "key": data_key(partition, segment),
            }
            for segment in found.segments
        ],
        "gaps": [
            {
                "base_offset": gap.base_offset,
                "last_offset": gap.last_offset,
                "reason": gap.reason,
                "recorded_at": time_text(gap.recorded_at_ms),
            }
            for gap in found.gaps
        ],
    }


def _report_row(report: PartitionReport) -> dict[str, Any]:
    return {
        "topic": report.partition.topic,
        "partition": report.partition.partition,
        "segments": report.segments,
        "size_bytes": report.size_bytes,
        "records": report.records,
        "gap_offsets": report.gap_offsets,
        "faults": list(report.faults),
    }
