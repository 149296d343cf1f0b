"""
The PySpark data source and its jobs.

In: an archive's objects, by way of `archive` and `storage`. Out: rows of Spark, and archives that jobs
changed. An executor never imports a package of the daemon.

Read `source` (the data source), `decoder` (batches to Arrow) and `jobs`. `bucket` opens an archive on the
driver and on executors. `worker_daemon` starts Spark's Python workers, and `worker_process` keeps their
garbage collections short. `record_spans`, `latest_records` and `key_eraser` take records out of batches;
`machine_code` compiles functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Register `format("tieringd")` with a session that does not find installed data sources by itself."""
    from tieringd.spark.source.data_source import TieringdDataSource  # noqa: PLC0415 without Spark there is none

    spark.dataSource.register(TieringdDataSource)
