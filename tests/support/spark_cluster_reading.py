"""
A program that reads tables with a Spark whose executor is another process.

    python -m tests.support.spark_cluster_reading DIRECTORY JSON

JSON has the `executor_environment` and the `readings`, which are the options of one table each. The program
prints one line of JSON: the number of records of each table, or its error.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tests.support.class_data import spark_java_options


def main() -> None:
    """Read the tables that the command line names, and print the results."""
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
        .config("spark.executor.extraJavaOptions", spark_java_options())
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
