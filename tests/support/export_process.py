"""
An export to Parquet as a process of its own, which a test may kill.

    python -m tests.support.export_process CONFIG TOPIC URL DIRECTORY

Portions and rounds are small, so that a test can kill the process within a round. The first line of output is
the process id of the JVM. The JVM ends by itself some time after this process.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pyspark import SparkContext

from tests.support.spark_session import running_spark
from tieringd.config import load_config
from tieringd.spark.jobs.export.job import export
from tieringd.spark.jobs.export.parquet_target import ParquetTarget
from tieringd.spark.jobs.export.state import ExportRules


def main() -> None:
    """Export the topic."""
    config, topic, url, directory = sys.argv[1:]
    rules = ExportRules(portion_bytes=100_000, round_bytes=1_000_000)
    with running_spark(Path(directory)) as spark:
        print(SparkContext._gateway.proc.pid, flush=True)  # noqa: T201 - the starting process reads it
        export(
            spark,
            load_config(Path(config), environ=os.environ, needs_broker=False),
            topics=[topic],
            target=ParquetTarget(url),
            rules=rules,
        )


if __name__ == "__main__":
    main()
