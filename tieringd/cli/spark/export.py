"""`tieringd spark export`."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tieringd.cli.spark.export_target import (
    PartitionBy,
    TargetFormat,
    iceberg_target,
    parquet_target,
    refuse_other_options,
)
from tieringd.cli.spark.options import (
    Conf,
    ConfigFile,
    Format,
    Master,
    NamedTopics,
    OutputFormat,
    ReportFile,
    size,
)
from tieringd.cli.spark.running import run_job
from tieringd.cli.spark.session import optional_parts


class IsolationLevel(StrEnum):
    """Which records are exported."""

    READ_COMMITTED = "read_committed"
    READ_UNCOMMITTED = "read_uncommitted"


class Recreated(StrEnum):
    """What to do about an earlier incarnation of the topic."""

    ERROR = "error"
    APPEND = "append"


def export(
    topics: NamedTopics,
    config: ConfigFile,
    target_format: Annotated[TargetFormat, typer.Option(help="What is written.")],
    target: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Parquet: where to. file:///directory, s3://bucket/prefix, gs://bucket/prefix or "
            "azure://container/prefix, as the tieringd configuration reaches its own bucket.",
            show_default=False,
        ),
    ] = None,
    target_config: Annotated[
        Path | None,
        typer.Option(
            help="Parquet: a tieringd configuration file that says how to reach the target.",
            show_default=False,
        ),
    ] = None,
    catalog: Annotated[
        str | None,
        typer.Option(
            help="Iceberg: the name of a catalogue in pyiceberg's configuration.", show_default="default"
        ),
    ] = None,
    catalog_property: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Iceberg: a property of the catalogue, over what its configuration says. May be given "
            "several times. Secrets are better in PYICEBERG_CATALOG__NAME__KEY, where the list of "
            "processes does not show them.",
            show_default=False,
        ),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help="Iceberg: of the tables.", show_default="redpanda")
    ] = None,
    dot_replacement: Annotated[
        str | None,
        typer.Option(help="Iceberg: what stands for a dot in a topic's name.", show_default="the dot"),
    ] = None,
    partition_by: Annotated[
        PartitionBy | None,
        typer.Option(
            help="By the records' timestamps in UTC.", show_default="day for Parquet, hour for Iceberg"
        ),
    ] = None,
    isolation: Annotated[
        IsolationLevel,
        typer.Option(help="As of a consumer. A target is begun with one, and stays with it."),
    ] = IsolationLevel.READ_COMMITTED,
    allow_gaps: Annotated[
        bool,
        typer.Option(
            "--allow-gaps", help="Go on where the archive lacks something, and list it in the report."
        ),
    ] = False,
    recreated: Annotated[
        Recreated,
        typer.Option(
            help="What to do where the target holds an earlier topic of the same name: offsets begin again."
        ),
    ] = Recreated.ERROR,
    portion_size: Annotated[
        int | None,
        typer.Option(
            parser=size,
            metavar="SIZE",
            help="About how much of the archive goes into a file.",
            show_default="128MiB",
        ),
    ] = None,
    round_size: Annotated[
        int | None,
        typer.Option(
            parser=size,
            metavar="SIZE",
            help="About how much of the archive goes into a commit.",
            show_default="16GiB",
        ),
    ] = None,
    master: Master = None,
    conf: Conf = None,
    output: Format = OutputFormat.TEXT,
    report: ReportFile = None,
) -> None:
    """
    Copy topics to Parquet files or Iceberg tables: what is in the archive and not yet there, each once.

    Run it again to bring the target up to date, also after it was killed. Exit 1 when some of the topics
    were not exported to their end, and when records that were exported have been replaced in the archive
    since, by another leader's.
    """
    refuse_other_options(
        target_format,
        {
            "--target": target,
            "--target-config": target_config,
            "--catalog": catalog,
            "--catalog-property": catalog_property or None,
            "--namespace": namespace,
            "--dot-replacement": dot_replacement,
        },
    )
    with optional_parts():
        from tieringd.spark.jobs.export import job  # noqa: PLC0415 - commands that need no Spark begin sooner
        from tieringd.spark.jobs.export.state import (  # noqa: PLC0415 - likewise
            PORTION_BYTES,
            ROUND_BYTES,
            ExportRules,
        )

        destination = (
            parquet_target(target, target_config, partition_by, archive=config)
            if target_format is TargetFormat.PARQUET
            else iceberg_target(catalog, catalog_property or (), namespace, dot_replacement, partition_by)
        )
    rules = ExportRules(
        isolation.value,
        fails_on_gap=not allow_gaps,
        recreated=recreated.value,
        portion_bytes=PORTION_BYTES if portion_size is None else portion_size,
        round_bytes=ROUND_BYTES if round_size is None else round_size,
    )
    run_job(
        partial(job.export, topics=topics, target=destination, rules=rules),
        config=config,
        master=master,
        conf=conf,
        output=output,
        report=report,
    )
