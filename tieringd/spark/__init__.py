"""
The PySpark data source and its jobs.

In: an archive's objects, by way of `archive` and `storage`. Out: rows of Spark, and archives that jobs
changed. An executor never imports a room of the daemon.

Read `source` (the data source), `decoder` (batches to Arrow) and `jobs`. `bucket` opens an archive on
driver and executors; `worker_daemon` and `worker_process` start the workers. `record_spans`,
`latest_records`, `key_eraser` and `machine_code` take records out of batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Make `format("tieringd")` known to a session that does not find installed data sources by itself."""
    from tieringd.spark.source.data_source import TieringdDataSource  # noqa: PLC0415 without Spark there is none

    spark.dataSource.register(TieringdDataSource)
