"""
`tieringd spark export`, and the export's target, which is made from the command's options.

An option that belongs to the other target format is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tieringd.cli.options import ConfigFile, loaded
from tieringd.cli.spark.options import (
    NamedTopics,
    size,
)
from tieringd.cli.spark.running import Job, job_command
from tieringd.cli.spark.session import optional_parts
from tieringd.errors import ConfigError

if TYPE_CHECKING:
    # An ordinary import would load pyspark and pyiceberg into processes that do not need them.
    from tieringd.spark.jobs.export.iceberg_target import IcebergTarget
    from tieringd.spark.jobs.export.parquet_target import ParquetTarget


class TargetFormat(StrEnum):
    """The format that an export writes."""

    PARQUET = "parquet"
    ICEBERG = "iceberg"


class PartitionBy(StrEnum):
    """The period by which the files of a topic are partitioned."""

    NONE = "none"
    DAY = "day"
    HOUR = "hour"


_ONLY_FOR: Final = {
    "--target": TargetFormat.PARQUET,
    "--target-config": TargetFormat.PARQUET,
    "--catalog": TargetFormat.ICEBERG,
    "--catalog-property": TargetFormat.ICEBERG,
    "--namespace": TargetFormat.ICEBERG,
    "--dot-replacement": TargetFormat.ICEBERG,
}


def refuse_other_options(target_format: TargetFormat, given: Mapping[str, object]) -> None:
    """
    Check that no option was given that belongs to another target format.

    *given* has values by option name; None is an option that was not given.

    Raises:
        typer.BadParameter: An option belongs to another format.
    """
    for name, value in given.items():
        if value is not None and _ONLY_FOR[name] is not target_format:
            raise typer.BadParameter(
                f"{name} is an option of --target-format {_ONLY_FOR[name]}, not of {target_format}"
            )


def parquet_target(
    url: str | None, config: Path | None, partition_by: PartitionBy | None, *, archive: Path
) -> ParquetTarget:
    """
    Return the target for Parquet files at *url*.

    Args:
        url: Where the files go.
        config: The target's own configuration file; None uses the archive's.
        partition_by: By what the files are partitioned; None is the target's default.
        archive: The archive's configuration file.

    Raises:
        ConfigError: No URL was given, or the configuration does not say how to reach it.
    """
    from tieringd.spark.jobs.export.parquet_target import ParquetTarget  # noqa: PLC0415 - an optional part
    from tieringd.spark.jobs.export.target_store import target_config  # noqa: PLC0415 - likewise

    if url is None:
        raise ConfigError(
            "no place is given for the Parquet files",
            hint="Give --target, as in --target s3://bucket/prefix",
        )
    own = None if config is None else loaded(config, needs_broker=False)
    # The job checks this again. Checked here, a mistyped URL fails before Spark starts.
    target_config(url, own or loaded(archive, needs_broker=False))
    if partition_by is None:
        return ParquetTarget(url, config=own)
    return ParquetTarget(url, partition_by.value, own)


def iceberg_target(
    catalog: str | None,
    properties: Sequence[str],
    namespace: str | None,
    dot_replacement: str | None,
    partition_by: PartitionBy | None,
) -> IcebergTarget:
    """
    Return the target for Iceberg tables. Arguments that are None get the target's defaults.

    Raises:
        ConfigError: The configuration of pyiceberg itself is wrong.
        typer.BadParameter: A property is not of the form key=value.
    """
    try:
        from tieringd.spark.jobs.export.iceberg_target import IcebergTarget  # noqa: PLC0415 - an optional part
    except ImportError:
        raise
    # pyiceberg reads its configuration at import. Its error text may show a secret, so it is not repeated.
    except Exception as error:
        raise ConfigError(
            f"pyiceberg's own configuration cannot be read ({type(error).__name__})",
            hint="Look at .pyiceberg.yaml and at the variables PYICEBERG_...; "
            "`python -c 'import pyiceberg.catalog'` says what is wrong",
        ) from error

    given: dict[str, Any] = {
        "catalog": catalog,
        "namespace": namespace,
        "partition_by": None if partition_by is None else partition_by.value,
    }
    return IcebergTarget(
        properties=_parsed(properties),
        dot_replacement=dot_replacement,
        **{name: value for name, value in given.items() if value is not None},
    )


def _parsed(properties: Sequence[str]) -> dict[str, str]:
    found = {}
    for number, one in enumerate(properties, 1):
        key, separator, value = one.partition("=")
        if not key or not separator:
            # The message gives the number only: the text may be a secret.
            raise typer.BadParameter(f"--catalog-property: value {number} is not key=value")
        found[key] = value
    return found


class IsolationLevel(StrEnum):
    """Which records are exported."""

    READ_COMMITTED = "read_committed"
    READ_UNCOMMITTED = "read_uncommitted"


class Recreated(StrEnum):
    """What the export does if the target holds an earlier incarnation of the topic."""

    ERROR = "error"
    APPEND = "append"


@job_command
def export(
    topics: NamedTopics,
    config: ConfigFile,
    target_format: Annotated[TargetFormat, typer.Option(help="The format of the target.")],
    target: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Parquet: where to write. file:///directory, s3://bucket/prefix, gs://bucket/prefix or "
            "azure://bucket/prefix, with the access settings of the archive's bucket.",
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
            help="Iceberg: a property of the catalogue, which overrides pyiceberg's configuration. May be "
            "given several times. Put secrets into environment variables of pyiceberg's, where the list "
            "of processes does not show them.",
            show_default=False,
        ),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help="Iceberg: the namespace of the tables.", show_default="redpanda")
    ] = None,
    dot_replacement: Annotated[
        str | None,
        typer.Option(help="Iceberg: the replacement for a dot in a topic's name.", show_default="the dot"),
    ] = None,
    partition_by: Annotated[
        PartitionBy | None,
        typer.Option(
            help="Partition by the records' timestamps, in UTC.",
            show_default="day for Parquet, hour for Iceberg",
        ),
    ] = None,
    isolation: Annotated[
        IsolationLevel,
        typer.Option(
            help="The isolation of a consumer. A target keeps the isolation that it was begun with."
        ),
    ] = IsolationLevel.READ_COMMITTED,
    allow_gaps: Annotated[
        bool,
        typer.Option(
            "--allow-gaps",
            help="Export the rest if records are missing in the archive, and list the gaps in the report.",
        ),
    ] = False,
    recreated: Annotated[
        Recreated,
        typer.Option(
            help="What to do if the target holds an earlier topic of the same name, whose offsets began at "
            "0 as well."
        ),
    ] = Recreated.ERROR,
    portion_size: Annotated[
        int | None,
        typer.Option(
            parser=size,
            metavar="SIZE",
            help="Approximate amount of archived data for each file.",
            show_default="128MiB",
        ),
    ] = None,
    round_size: Annotated[
        int | None,
        typer.Option(
            parser=size,
            metavar="SIZE",
            help="Approximate amount of archived data for each commit.",
            show_default="16GiB",
        ),
    ] = None,
) -> Job:
    """
    Copy topics to Parquet files or Iceberg tables: each archived record once.

    Of several topics of one name the one that was created last is exported, and the report lists the others.
    Run it again to bring the target up to date, also after it was killed. Exit 1 when a topic was not
    exported completely, or when exported records have since been replaced in the archive by another
    leader's.
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
    return partial(job.export, topics=topics, target=destination, rules=rules)
