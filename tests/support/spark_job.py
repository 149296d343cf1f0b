"""A compaction as a process of its own: `python -m tests.support.spark_job WORK CONFIG TOPIC`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.support.spark_session import running_spark
from tieringd.config import load_config
from tieringd.spark.jobs.compact import compact


def main() -> None:
    """Compact a topic and print the report."""
    work, config, topic = sys.argv[1:]
    with running_spark(Path(work), cores=1) as spark:
        report = compact(spark, load_config(Path(config), environ=os.environ), topics=[topic])
    sys.stdout.write(report.as_json())


if __name__ == "__main__":
    main()
