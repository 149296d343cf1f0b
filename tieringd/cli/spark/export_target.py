"""The place that `tieringd spark export` writes to, made of its options."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import typer

from tieringd.cli.options import loaded
from tieringd.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tieringd.spark.jobs.export.iceberg_target import IcebergTarget
    from tieringd.spark.jobs.export.parquet_target import ParquetTarget


class TargetFormat(StrEnum):
    """What an export writes."""

    PARQUET = "parquet"
    ICEBERG = "iceberg"


class PartitionBy(StrEnum):
    """What parts the files of a topic."""

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
    Return when all of the options that are *given* have a meaning for *target_format*.

    Raises:
        typer.BadParameter: One is of the other format.
    """
    for name, value in given.items():
        if value is not None and _ONLY_FOR[name] is not target_format:
            raise typer.BadParameter(
                f"{name} is an option of --target-format {_ONLY_FOR[name]}, and not of {target_format}"
            )


def parquet_target(
    url: str | None, config: Path | None, partition_by: PartitionBy | None, *, archive: Path
) -> ParquetTarget:
    """
    Return a directory for Parquet files; *config* is the target's own configuration, if it has one.

    Raises:
        ConfigError: No URL was given, or it cannot be reached with its configuration, or the *archive*'s.
    """
    from tieringd.spark.jobs.export.parquet_target import ParquetTarget  # noqa: PLC0415 - an optional part
    from tieringd.spark.jobs.export.target_store import target_config  # noqa: PLC0415 - likewise

    if url is None:
        raise ConfigError(
            "nothing says where the Parquet files go",
            hint="Give --target, as in --target s3://bucket/prefix",
        )
    own = None if config is None else loaded(config, needs_broker=False)
    # The job looks again; a slip in the URL is not worth the wait for Spark.
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
    Return the tables of a catalogue.

    Raises:
        ConfigError: The configuration of pyiceberg itself is wrong.
        typer.BadParameter: A property is not of the form key=value.
    """
    try:
        from tieringd.spark.jobs.export.iceberg_target import IcebergTarget  # noqa: PLC0415 - an optional part
    except ImportError:
        raise
    # It is read when the package is imported. What is said of it may show a secret.
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
            # What stands there may be a secret.
            raise typer.BadParameter(f"--catalog-property: number {number} of them is not key=value")
        found[key] = value
    return found
