"""
A program for a process of its own: a Spark whose executor is another process, and what it reads.

    python -m tests.support.spark_cluster_reading DIRECTORY JSON

JSON has the `executor_environment`, and the `readings`, each the options of a table. One line of JSON is
printed: how many records each table has, or what went wrong.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tests.support.class_data import options_with, spark_archive


def main() -> None:
    """Read what the command line says."""
    directory, wanted = sys.argv[1], json.loads(sys.argv[2])
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = (
        SparkSession.builder.master("local-cluster[1,1,640]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "512m")
        .config("spark.executor.memory", "512m")
        .config("spark.local.dir", directory)
        .config("spark.task.maxFailures", "2")
        .config("spark.executor.extraJavaOptions", " ".join(options_with(spark_archive())))
    )
    for name, value in wanted["executor_environment"].items():
        builder = builder.config(f"spark.executorEnv.{name}", value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    try:
        answers = [_read(session, options) for options in wanted["readings"]]
        sys.stdout.write(f"{json.dumps(answers)}\n")
    finally:
        session.stop()


def _read(session: SparkSession, options: dict[str, str]) -> dict[str, Any]:
    try:
        return {"records": session.read.format("tieringd").options(**options).load().count()}
    except PySparkException as error:
        return {"error": str(error)}


if __name__ == "__main__":
    main()
