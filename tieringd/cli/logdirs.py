"""
`tieringd logdirs`: the partitions and their sizes in every broker's log directories, and in the bucket.

As with Redpanda, each broker that has a replica of an archived partition also has a row for the partition's
archived bytes, under `remote://<bucket>`. The objects exist once, however many brokers list them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import groupby
from typing import Annotated

import typer

from tieringd.archive.catalog import OnFault
from tieringd.cli.human import human_size
from tieringd.cli.options import (
    ConfigFile,
    Format,
    OutputFormat,
    counted,
    loaded,
    print_document,
    print_table,
    run_async,
    unreadable_topics_reported,
)
from tieringd.config import Config
from tieringd.daemon.archive import opened_archive
from tieringd.daemon.local_broker import opened_broker
from tieringd.formats.topic_manifest import TopicManifest
from tieringd.model.local_log import NO_BROKER, LogDirSizes
from tieringd.model.partition import TopicPartition
from tieringd.storage.store_opening import bucket_name

logdirs_app = typer.Typer(
    help="Show the log directories of all brokers, with the bucket as one of them.", no_args_is_help=True
)


class Aggregate(StrEnum):
    """What the rows are summed into."""

    BROKER = "broker"
    DIR = "dir"
    TOPIC = "topic"


@dataclass(frozen=True, slots=True)
class Row:
    """A partition in one place, or a sum. Fields that a sum or an error row does not have are None."""

    broker: int
    """NO_BROKER for a partition that only the bucket has."""
    dir: str | None
    topic: str | None
    partition: int | None
    size: int
    error: str | None = None


_COLUMNS = {
    None: ("broker", "dir", "topic", "partition", "size", "error"),
    Aggregate.BROKER: ("broker", "size", "error"),
    Aggregate.DIR: ("broker", "dir", "size", "error"),
    Aggregate.TOPIC: ("broker", "dir", "topic", "size", "error"),
}


@logdirs_app.command()
def describe(
    config: ConfigFile,
    broker: Annotated[int | None, typer.Option("--broker", "-b", help="Only this broker.", min=0)] = None,
    topics: Annotated[
        list[str] | None,
        typer.Option(help="Only these topics: repeat the option, or separate names by commas."),
    ] = None,
    aggregate_into: Annotated[
        Aggregate | None, typer.Option(help="Sum up the rows of each broker, directory or topic.")
    ] = None,
    human_readable: Annotated[
        bool, typer.Option("--human-readable", "-H", help="Print sizes in readable units.")
    ] = False,
    sort_by_size: Annotated[bool, typer.Option("--sort-by-size", help="Print the smallest first.")] = False,
    output: Format = OutputFormat.TABLE,
) -> None:
    """
    List what each broker holds of each partition, on its disks and in the bucket.

    A broker that cannot answer has a row with the error. Archived topics that no broker has any more are
    listed without a broker. If kafka_enable_describe_log_dirs_remote_storage is false, only data on the
    brokers' disks is listed.
    """
    with unreadable_topics_reported() as on_fault:
        rows = run_async(_rows(loaded(config), on_fault))
        wanted = frozenset(name for names in topics or () for name in names.split(",") if name)
        rows = aggregated(selected(rows, broker=broker, topics=wanted), aggregate_into)
        if sort_by_size:
            rows.sort(key=lambda row: row.size)
        columns = _COLUMNS[aggregate_into]
        if output.is_data:
            print_document([{name: _field(row, name) for name in columns} for row in rows], output)
            return
        shown = [
            [
                human_size(row.size) if name == "size" and human_readable else _field(row, name)
                for name in columns
            ]
            for row in rows
        ]
        print_table([name.upper() for name in columns], shown)


def selected(rows: Iterable[Row], *, broker: int | None, topics: frozenset[str]) -> list[Row]:
    """
    Return the rows of one broker and of some topics; None and an empty set select all.

    Error rows stay whatever the topics, as an error may hide any of them.
    """
    return [
        row
        for row in rows
        if (broker is None or row.broker == broker) and (not topics or row.error or row.topic in topics)
    ]


def aggregated(rows: Sequence[Row], into: Aggregate | None) -> list[Row]:
    """Sum up *rows*, which must be in the order of `_order`. A row with an error stays by itself."""
    if into is None:
        return list(rows)

    def group(row: Row) -> Row:
        return replace(
            row,
            dir=None if into is Aggregate.BROKER else row.dir,
            topic=row.topic if into is Aggregate.TOPIC else None,
            partition=None,
            size=0,
        )

    return [replace(key, size=sum(row.size for row in same)) for key, same in groupby(rows, key=group)]


async def _rows(config: Config, on_fault: OnFault) -> list[Row]:
    if not config.kafka_enable_describe_log_dirs_remote_storage:
        async with opened_broker(config) as broker:
            directories = await broker.log_dir_sizes()
        return sorted(local_and_remote_rows(directories, {}, bucket=""), key=_order)
    async with opened_archive(config) as archive, opened_broker(config) as broker:
        directories = await broker.log_dir_sizes()
        cluster = await broker.cluster_id()
        stored: dict[TopicPartition, int] = {}
        former: list[Row] = []
        bucket = f"remote://{bucket_name(config)}"
        of_cluster = archive.catalog.archived_topics(lambda key: key.cluster == cluster, on_fault=on_fault)
        archived = [one async for one in counted(of_cluster, "topics")]
        latest = _latest(one.topic for one in archived)
        held = {each.topic_partition for one in directories for each in one.replicas}
        for topic, partitions in ((one.topic, one.partitions) for one in archived):
            for manifest in partitions:
                name, size_bytes = manifest.partition.topic_partition, manifest.size_bytes
                if latest[topic.key.topic] is topic and name in held:
                    stored[name] = size_bytes
                else:
                    former.append(Row(NO_BROKER, bucket, name.topic, name.partition, size_bytes))
    return sorted((*local_and_remote_rows(directories, stored, bucket=bucket), *former), key=_order)


def _latest(topics: Iterable[TopicManifest]) -> dict[str, TopicManifest]:
    """Return the latest incarnation of each topic, which is the one in the brokers' directories."""
    ascending = sorted(topics, key=lambda topic: topic.created_at_ms)
    return {topic.key.topic: topic for topic in ascending}


def local_and_remote_rows(
    directories: Iterable[LogDirSizes], stored: Mapping[TopicPartition, int], *, bucket: str
) -> list[Row]:
    """
    Return a row for each replica and each error in *directories*, and rows for the archived bytes.

    *stored* has the archived bytes by partition. A broker gets a remote row for each partition in *stored*
    of which it has a replica.
    """
    rows: list[Row] = []
    remote: set[Row] = set()
    for one in directories:
        if one.error:
            rows.append(Row(one.broker, one.path or None, None, None, 0, one.error))
        for replica in one.replicas:
            name = replica.topic_partition
            rows.append(Row(one.broker, one.path, name.topic, name.partition, replica.size_bytes))
            if name in stored:
                # A set: a replica that moves is in two directories of its broker, and counts once.
                remote.add(Row(one.broker, bucket, name.topic, name.partition, stored[name]))
    return [*rows, *remote]


def _order(row: Row) -> tuple[bool, int, str, str, int]:
    partition = -1 if row.partition is None else row.partition
    return row.broker == NO_BROKER, row.broker, row.dir or "", row.topic or "", partition


def _field(row: Row, name: str) -> int | str | None:
    value: int | str | None = asdict(row)[name]
    return None if name == "broker" and value == NO_BROKER else value
