"""
Make the class data archives for the JVMs of tests: `python -m tests.support.make_class_data`.

A broker and a Spark session do some typical work of tests, and write the archive when they end. Existing
archives are not made again.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.class_data import kafka_archive, spark_archive, spark_environment
from tests.support.kafka import KafkaCluster
from tests.support.kafka_jars import QUICK_JAVA
from tests.support.spark_session import running_spark
from tieringd.cli.logging import configure_logging
from tieringd.config.model import LogConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession


def _make(archive: Path, use: Callable[[Path, str], None]) -> None:
    """Call *use* with a directory and the Java option that makes *archive*; remove older archives."""
    if archive.exists():
        return
    archive.parent.mkdir(parents=True, exist_ok=True)
    # The rename is the last step, so that an existing archive is always complete.
    with tempfile.TemporaryDirectory(dir=archive.parent, prefix="making-") as directory:
        made = Path(directory) / archive.name
        use(Path(directory), f"-XX:ArchiveClassesAtExit={made}")
        assert made.exists(), f"Java has not written {made}"
        for old in archive.parent.glob("class-data-*.jsa"):
            old.unlink(missing_ok=True)
        made.rename(archive)


def _use_kafka(directory: Path, option: str) -> None:
    async def use() -> None:
        cluster = await KafkaCluster.start(directory, java_options=[option])
        try:
            await cluster.create_topic("records")
            async with cluster.producer(transactional_id="one") as producer:
                await producer.begin_transaction()
                await producer.send_and_wait("records", b"value", partition=0)
                await producer.commit_transaction()
            await cluster.until_stable("records")
            await cluster.produce("records", [b"value"] * 100, compression_type="gzip")
            await cluster.delete_topic("records")
        finally:
            await cluster.stop()

    asyncio.run(use())


def _use_spark(directory: Path, option: str) -> None:
    submitted = " ".join([*QUICK_JAVA, "-Xlog:disable", option])
    os.environ |= spark_environment() | {"SPARK_SUBMIT_OPTS": submitted}
    quiet = {"spark.ui.showConsoleProgress": "false", "spark.log.level": "ERROR"}
    with running_spark(directory, options=quiet) as spark:
        assert spark.sparkContext.parallelize([1, 2], 2).map(lambda one: one + 1).sum() == 5
        _query(spark, str(directory / "table"))


def _query(spark: SparkSession, table: str) -> None:
    """
    Group, write Parquet files, and read them.

    Most sessions of the tests need the classes of these operations. Those of streams and of Python's data
    sources take longer to archive than the few sessions that need them would save.
    """
    spark.range(10).groupBy("id").count().collect()
    spark.range(100).write.parquet(table)
    assert spark.read.parquet(table).where("id = 1").count() == 1


def main() -> None:
    """Make missing archives, and print the paths of all."""
    configure_logging(LogConfig(format="console", level="warning"))
    for archive, use in ((kafka_archive(), _use_kafka), (spark_archive(), _use_spark)):
        _make(archive, use)
        sys.stdout.write(f"{archive}\n")


if __name__ == "__main__":
    main()
