"""A local Spark for tests and benchmarks: two cores, no web page, no connections to other machines."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pyspark
from pyspark import SparkContext
from pyspark.sql import SparkSession

from tests.support.components import used

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


_END_TIMEOUT_SECONDS = 300
"""Limit for the end of a JVM. One that writes a class data archive takes a minute on a busy machine."""


@contextmanager
def running_spark(
    work_directory: Path, *, cores: int = 2, memory: str = "1g", options: Mapping[str, str] | None = None
) -> Iterator[SparkSession]:
    """Yield a session with *cores* cores and its files in *work_directory*; its JVM ends with the context."""
    if shutil.which("java") is None:
        raise RuntimeError("Spark needs Java 17: apt-get install openjdk-17-jre-headless")
    used(f"PySpark {pyspark.__version__}")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    # Without this, Spark resolves the machine's host name, which fails on some machines.
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, dict.fromkeys(sys.path)))
    builder = (
        SparkSession.builder.master(f"local[{cores}]")
        .appName("tieringd tests")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", memory)
        .config("spark.sql.shuffle.partitions", "4")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.local.dir", str(work_directory / "local"))
        .config("spark.sql.warehouse.dir", str(work_directory / "warehouse"))
        .config("spark.sql.streaming.noDataMicroBatches.enabled", "false")
    )
    for name, value in (options or {}).items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    try:
        yield session
    finally:
        # PySpark would keep the JVM for the next session. Here the JVM ends with the session.
        gateway = SparkContext._gateway
        session.stop()
        if gateway is not None:
            gateway.shutdown()
            gateway.proc.stdin.close()
            gateway.proc.wait(_END_TIMEOUT_SECONDS)
        SparkContext._gateway = SparkContext._jvm = None
