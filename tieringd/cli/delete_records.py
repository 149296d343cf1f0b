"""`tieringd topic delete-records`: delete the records of a topic before an offset, in both tiers."""

from __future__ import annotations

import getpass
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated

import typer

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
)
from tieringd.config import Config
from tieringd.daemon.archive import opened_archive
from tieringd.daemon.local_broker import kafka_settings
from tieringd.errors import ConfigError
from tieringd.topics.record_deleter import DeletedRecords, RecordDeleter

if TYPE_CHECKING:
    # An ordinary import would load the protocol's schema at each start of `tieringd topic`.
    from tieringd.broker.kafka_deletion import LedLog

_COLUMNS = ("partition", "log_start_offset", "archive_start_offset", "fault")


def delete_records(
    topic: Annotated[str, typer.Argument(help="The topic's name.")],
    before: Annotated[
        int, typer.Option("--before", help="The first offset that stays; the records before it go.", min=1)
    ],
    config: ConfigFile,
    partition: Annotated[
        list[int] | None,
        typer.Option("--partition", help="This partition only; may be given several times.", min=0),
    ] = None,
    requested_by: Annotated[
        str | None,
        typer.Option("--requested-by", help="Who asks for it; by default this user and this host."),
    ] = None,
    dry_run: DryRun = False,
    output: Format = OutputFormat.TABLE,
) -> None:
    """
    Delete the records of a topic before an offset, on the broker and in the archive, for good.

    The bucket keeps a record of the deletion and its result. A run that failed half way is repeated.
    """
    if dry_run:
        logs = run_async(_checked(loaded(config), topic, partition, before))
        columns = ("partition", "log_start_offset", "high_watermark", "would_begin_at")
        documents = [
            {
                "partition": one.name.partition,
                "log_start_offset": one.log_start_offset,
                "high_watermark": one.high_watermark,
                "would_begin_at": before,
            }
            for one in logs
        ]
        print_listing(columns, documents, output)
        return
    done = run_async(
        _delete(loaded(config), topic, partition, before, requested_by=requested_by or _this_user())
    )
    rows = [
        {
            "partition": one.partition,
            "log_start_offset": one.log_start_offset,
            "archive_start_offset": one.archive_start_offset,
            "fault": one.fault or None,
        }
        for one in done.results
    ]
    if output.is_data:
        print_document(
            {"topic": topic, "before_offset": before, "partitions": rows, "record": done.record}, output
        )
    else:
        print_rows(_COLUMNS, rows)
    faulty = [one.partition for one in done.results if one.fault]
    if faulty:
        typer.echo(
            f"error: the records of {len(faulty)} of {len(rows)} partitions are not deleted in both tiers. "
            "Run the command again: it is safe to repeat, unless a fault says that the topic was deleted and "
            "created again",
            err=True,
        )
        raise typer.Exit(1)
    if not output.is_data:
        typer.echo(
            f"The records of {topic} before offset {before} are deleted. The bucket's record: {done.record}"
        )


@asynccontextmanager
async def _deleter(config: Config, writer_id: str) -> AsyncIterator[RecordDeleter]:
    if config.broker.kind == "none":
        raise ConfigError(
            "broker.kind is none: there is no broker that deletes records",
            hint="Name the cluster's broker in the configuration",
        )
    from tieringd.broker.kafka_deletion import KafkaRecordDeleter  # noqa: PLC0415 slow to import

    async with (
        opened_archive(config, writer_id=writer_id) as archive,
        KafkaRecordDeleter(kafka_settings(config)) as cluster,
    ):
        yield RecordDeleter(cluster, archive.store, archive.manifests, now_ms=archive.clock)


async def _checked(
    config: Config, topic: str, partitions: list[int] | None, before: int
) -> tuple[LedLog, ...]:
    async with _deleter(config, secrets.token_hex(8)) as deleter:
        return await deleter.check(topic, partitions, before)


async def _delete(
    config: Config, topic: str, partitions: list[int] | None, before: int, *, requested_by: str
) -> DeletedRecords:
    job_id = secrets.token_hex(8)
    async with _deleter(config, job_id) as deleter:
        return await deleter.delete(topic, partitions, before, requested_by=requested_by, job_id=job_id)


def _this_user() -> str:
    return f"{getpass.getuser()}@{socket.gethostname()}"
