"""`tieringd spark compact`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

import typer

from tieringd.cli.spark.options import (
    Conf,
    ConfigFile,
    DeleteAfter,
    DryRun,
    Format,
    Master,
    NamedTopics,
    NoBroker,
    OutputFormat,
    ReportFile,
    duration,
)
from tieringd.cli.spark.running import run_job
from tieringd.cli.spark.session import optional_parts


def compact(
    topics: NamedTopics,
    config: ConfigFile,
    delete_retention: Annotated[
        int | None,
        typer.Option(
            parser=duration,
            metavar="DURATION",
            help="Remove tombstones whose own timestamp is older; tombstones without a timestamp stay.",
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
    master: Master = None,
    conf: Conf = None,
    output: Format = OutputFormat.TEXT,
    report: ReportFile = None,
) -> None:
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
    run_job(
        partial(
            job.compact,
            topics=topics,
            options=options,
            has_broker=not no_broker,
            delete_after_ms=delete_after,
            is_dry_run=dry_run,
        ),
        config=config,
        master=master,
        conf=conf,
        output=output,
        report=report,
    )
