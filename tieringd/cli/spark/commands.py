"""The commands of `tieringd spark`: each runs a job of `tieringd.spark.jobs`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tieringd.cli.options import TopicPatterns
from tieringd.cli.spark.export import export
from tieringd.cli.spark.options import (
    DeleteAfter,
    DryRun,
    NamedTopics,
    NoBroker,
    Topics,
    duration,
)
from tieringd.cli.spark.running import Job, job_command
from tieringd.cli.spark.session import optional_parts
from tieringd.errors import ConfigError
from tieringd.spark.jobs.erased_keys import KeyEncoding, decoded_key, read_keys

spark_app = typer.Typer(
    help="Run jobs on the archive with Spark, on this machine or on a cluster. Needs only the bucket, and "
    "the package's spark extra.",
    no_args_is_help=True,
)


@spark_app.command()
@job_command
def scrub(
    topics: TopicPatterns = None,
    topic: Topics = None,
    orphans: Annotated[
        bool, typer.Option(help="List the whole bucket, and report the objects that no manifest names.")
    ] = True,
) -> Job:
    """
    Read every object of the archive and compare it with the manifests; exit 1 when anything is wrong.

    Checks every batch's checksum, every offset, every index and every manifest. Nothing is changed:
    `tieringd archive scrub --fix` repairs faults, and `tieringd spark rebuild` rebuilds lost manifests.
    """
    with optional_parts():
        from tieringd.spark.jobs import scrub as job  # noqa: PLC0415 - commands that need no Spark begin sooner

    return partial(job.scrub, topics=[*(topics or ()), *(topic or ())], with_orphans=orphans)


class DayOf(StrEnum):
    """Which of a segment's times decides about its day."""

    UPLOAD = "upload"
    RECORD = "record"


@spark_app.command()
@job_command
def usage(
    topics: TopicPatterns = None,
    topic: Topics = None,
    by: Annotated[
        DayOf, typer.Option(help="Count by the day of the upload, or of each segment's newest record.")
    ] = DayOf.UPLOAD,
    days: Annotated[int | None, typer.Option(help="Show only this many of the last days.", min=1)] = None,
    prices: Annotated[
        Path | None,
        typer.Option(
            help="A YAML file with storage_gib_month and writes_1000; without it, the store's list prices.",
            show_default=False,
        ),
    ] = None,
) -> Job:
    """
    Count bytes, objects and requests by topic and UTC day, with an estimate of what they cost.

    Reads manifests only.
    """
    with optional_parts():
        from tieringd.spark.jobs import usage as job  # noqa: PLC0415 - commands that need no Spark begin sooner
    from tieringd.spark.jobs.prices import read_prices  # noqa: PLC0415 - likewise

    own = None if prices is None else read_prices(prices)
    return partial(
        job.usage, topics=[*(topics or ()), *(topic or ())], day_of=by.value, days=days, prices=own
    )


@spark_app.command()
@job_command
def rebuild(
    topics: TopicPatterns = None,
    topic: Topics = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write the manifests. Without it, nothing is changed.")
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Rebuild manifests that can be read, too.")
    ] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every data object completely, and leave out damaged ones.")
    ] = False,
) -> Job:
    """
    Rebuild lost or damaged manifests from the objects in the bucket; a dry run without --write.

    Stop the daemons that archive these topics first. Nothing is deleted, and a copy of each damaged
    manifest is kept. Exit 1 when offsets are lost, or a manifest could not be written.
    """
    with optional_parts():
        from tieringd.spark.jobs import rebuild as job  # noqa: PLC0415 - commands that need no Spark begin sooner

    return partial(
        job.rebuild, topics=[*(topics or ()), *(topic or ())], write=write, replace=replace, deep=deep
    )


@spark_app.command()
@job_command
def compact(
    topics: NamedTopics,
    delete_retention: Annotated[
        int | None,
        typer.Option(
            parser=duration,
            metavar="DURATION",
            help="Remove tombstones whose own timestamp is older; tombstones without a timestamp stay. A "
            "stream or consumer that is further behind misses the deletion: give more than the slowest lag.",
            show_default="1d",
        ),
    ] = None,
    min_compaction_lag: Annotated[
        int | None,
        typer.Option(
            parser=duration,
            metavar="DURATION",
            help="Leave alone each segment with a record younger than this, and all later segments.",
            show_default="0",
        ),
    ] = None,
    drop_keyless: Annotated[
        bool, typer.Option("--drop-keyless", help="Drop records without a key, as Kafka's cleaner does.")
    ] = False,
    no_broker: NoBroker = False,
    delete_after: DeleteAfter = None,
    dry_run: DryRun = False,
) -> Job:
    """
    Keep the latest committed record of each key, and delete the others permanently.

    Try it with --dry-run first. Use it for topics that the broker does not compact: the archive of a
    topic that the broker compacts follows the broker's cleaner. Exit 1 when a partition could not be
    compacted.
    """
    with optional_parts():
        from tieringd.spark.jobs import compact as job  # noqa: PLC0415 - commands that need no Spark begin sooner
        from tieringd.spark.jobs.compaction_range import CompactOptions  # noqa: PLC0415 - likewise

    options = CompactOptions(drops_keyless=drop_keyless)
    if delete_retention is not None:
        options = replace(options, delete_retention_ms=delete_retention)
    if min_compaction_lag is not None:
        options = replace(options, min_compaction_lag_ms=min_compaction_lag)
    return partial(
        job.compact,
        topics=topics,
        options=options,
        has_broker=not no_broker,
        delete_after_ms=delete_after,
        is_dry_run=dry_run,
    )


@spark_app.command()
@job_command
def erase(
    topics: NamedTopics,
    requested_by: Annotated[
        str,
        typer.Option(
            help="The person who requested the erasure; stored in the bucket with the record of the erasure."
        ),
    ],
    key: Annotated[
        list[str] | None,
        typer.Option(
            help="A key; '' is the empty one. May be given several times. Other users of this machine may "
            "see it in the list of processes, and under spark-submit in Spark's pages and logs; use "
            "--keys-file to hide it.",
            show_default=False,
        ),
    ] = None,
    keys_file: Annotated[
        Path | None, typer.Option(help="A file with one key per line.", show_default=False)
    ] = None,
    key_encoding: Annotated[
        KeyEncoding, typer.Option(help="The encoding of the keys, in the options and in the file.")
    ] = KeyEncoding.TEXT,
    reason: Annotated[
        str, typer.Option(help="The reason; stored with the record of the erasure.", show_default=False)
    ] = "",
    delete_after: DeleteAfter = None,
    dry_run: DryRun = False,
) -> Job:
    """
    Remove every record with one of the given keys from the archives of topics, permanently.

    This includes old versions, tombstones, and records of aborted transactions. Try it with --dry-run
    first, which stores no record of the erasure. Brokers, exports and copies of the bucket are not
    changed: see the documentation. Exit 1 when an object of these topics may still have a record with
    one of the keys.
    """
    if not requested_by.strip():
        raise ConfigError(
            "--requested-by is empty",
            hint="The record of the erasure needs the name of the person who requested it",
        )
    keys = _keys(key or (), keys_file, key_encoding)
    with optional_parts():
        from tieringd.spark.jobs import erase as job  # noqa: PLC0415 - commands that need no Spark begin sooner
        from tieringd.spark.jobs import key_search  # noqa: PLC0415 - likewise

    return (
        partial(key_search.search, topics=topics, keys=keys)
        if dry_run
        else partial(
            job.erase,
            topics=topics,
            keys=keys,
            requested_by=requested_by,
            reason=reason,
            delete_after_ms=delete_after,
        )
    )


def _keys(texts: Sequence[str], path: Path | None, encoding: KeyEncoding) -> frozenset[bytes]:
    """
    Return the keys of the command line and of the file *path*, if there is one.

    Raises:
        ConfigError: No key was given, or one that is not valid in *encoding*.
    """
    keys = {decoded_key(text, encoding) for text in texts}
    if path is not None:
        keys |= read_keys(path, encoding)
    if not keys:
        raise ConfigError(
            "no key is given: nothing can be erased",
            hint="Give one or more keys with --key, or a file with one key per line with --keys-file",
        )
    return frozenset(keys)


@spark_app.command()
@job_command
def merge(
    topics: NamedTopics,
    no_broker: NoBroker = False,
    delete_after: DeleteAfter = None,
) -> Job:
    """
    Make one object of adjacent small segments, in whole archives; the records stay as they are.

    By cloud_storage_segment_size_target and cloud_storage_segment_size_min, as the daemon merges. Of a live
    topic what lies before the last trim. Topics that the configuration knows to be compacted are left alone.
    """
    with optional_parts():
        from tieringd.spark.jobs import merge as job  # noqa: PLC0415 - commands that need no Spark begin sooner

    return partial(job.merge, topics=topics, has_broker=not no_broker, delete_after_ms=delete_after)


spark_app.command()(export)


@spark_app.command()
def offsets(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            help="The checkpoint of a query on the archive, or of Spark's Kafka source: a directory on this "
            "machine."
        ),
    ],
    partitions: Annotated[
        int,
        typer.Option(
            min=0,
            help="How many partitions each topic has. Those of which nothing is archived begin at offset 0.",
        ),
    ] = 0,
    last_ended: Annotated[
        bool,
        typer.Option(
            help="Leave out a batch that has begun and not ended. Use it only if the sink has nothing of it.",
        ),
    ] = False,
) -> None:
    """
    Print where a streaming query ended, as startingOffsets of the next one.

    After a query on the archive, a query of Spark's Kafka source that begins there reads exactly what the
    first one has not read. After a query of the Kafka source, one on the archive does.
    """
    with optional_parts():
        from tieringd.spark.source.query_checkpoint import ended_at  # noqa: PLC0415 - as for the jobs

    typer.echo(json.dumps(ended_at(checkpoint, partitions=partitions, last_ended=last_ended)))


@spark_app.command()
def submit_file() -> None:
    """
    Print the path of the file that `spark-submit` runs for these commands.

    As in: spark-submit --master yarn "$(tieringd spark submit-file)" scrub --config tieringd.yaml
    """
    typer.echo(Path(__file__).with_name("submitted.py"))
