"""One local Spark for all tests that need one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from benchmarks.kafka_connector import connector_jars
from tests.support.class_data import spark_environment
from tests.support.spark_session import running_spark
from tests.support.spark_workers import warm_runners

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession


@pytest.fixture(scope="session", autouse=True)
def quick_java() -> None:
    """Have every JVM of Spark start quickly, those of commands among them."""
    os.environ |= spark_environment()


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Give a session on two cores."""
    # Spark's own Kafka source is there as well, for tests that compare with it.
    options = {"spark.jars": connector_jars()}
    # A server of Spark Connect, which its tests start in this JVM, takes a port that is free.
    options |= {"spark.connect.grpc.binding.address": "127.0.0.1", "spark.connect.grpc.binding.port": "0"}
    with warm_runners(), running_spark(tmp_path_factory.mktemp("spark"), options=options) as session:
        yield session
