"""The PySpark data source and its jobs. Imports model, formats, storage and config only."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Make `format("tieringd")` known to a session that does not find installed data sources by itself."""
    from tieringd.spark.source.data_source import TieringdDataSource  # noqa: PLC0415 without Spark there is none

    spark.dataSource.register(TieringdDataSource)
