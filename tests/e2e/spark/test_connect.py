"""The source through Spark Connect: a client without a JVM, and a server in the JVM of the tests' session."""

# Long: the server plans its first queries, each in a new process of Python, and a stream starts twice.

from __future__ import annotations

import pytest
from pyspark.errors import PySparkException
from pyspark.sql.connect.session import SparkSession

from tests.fakes.file_archive import FileArchive

COLUMNS = ("topic", "partition", "offset", "timestamp", "timestampType", "key", "value")


@pytest.fixture(scope="module")
def client(spark):
    """Give a session of a client."""
    jvm = spark._jvm
    service = getattr(getattr(jvm.org.apache.spark.sql.connect.service, "SparkConnectService$"), "MODULE$")
    service.start(spark.sparkContext._jsc.sc())
    session = SparkSession.builder.remote(f"sc://127.0.0.1:{service.localPort()}").getOrCreate()
    yield session
    session.stop()
    service.stop(jvm.scala.Option.empty(), jvm.scala.Option.empty())


@pytest.fixture
def archive(tmp_path):
    """Give an archive in a directory."""
    return FileArchive(tmp_path / "archive")


def rows(table):
    return sorted(tuple(row) for row in table.select(*COLUMNS).collect())


def test_batch_has_the_rows_of_a_session_with_a_jvm(client, spark, archive):
    """Options, a choice of columns and SQL are taken as they are there."""
    writer = archive.filled(segments=3, batches=4)
    given = {"subscribe": "orders", "startingOffsets": '{"orders": {"0": 5}}', "minPartitions": "3"}
    tables = [one.read.format("tieringd").options(**given).load(archive.url) for one in (client, spark)]
    assert rows(tables[0]) == rows(tables[1])
    assert len(rows(tables[0])) == len(writer.values()) - 5

    some = client.read.format("tieringd").options(**given, columns="partition,offset").load(archive.url)
    assert some.columns == ["partition", "offset"]
    some.createOrReplaceTempView("connected_orders")
    (found,) = client.sql("SELECT count(*), max(offset) FROM connected_orders GROUP BY partition").collect()
    assert tuple(found) == (len(writer.values()) - 5, writer.next_offset - 1)


def test_stream_goes_on_from_its_checkpoint(client, archive, tmp_path):
    """Each record is read once, by the first query or by the second."""
    writer = archive.filled(segments=2, batches=4)

    def read():
        given = {"subscribe": "orders", "startingOffsets": "earliest", "maxOffsetsPerTrigger": "20"}
        stream = client.readStream.format("tieringd").options(**given).load(archive.url)
        sink = stream.select("offset").writeStream.format("parquet").trigger(availableNow=True)
        query = sink.option("checkpointLocation", str(tmp_path / "checkpoint")).start(str(tmp_path / "rows"))
        assert query.awaitTermination(300)
        return sorted(row.offset for row in client.read.parquet(str(tmp_path / "rows")).collect())

    assert read() == sorted(writer.values())
    writer.append()
    writer.roll()
    archive.add(writer)
    assert read() == sorted(writer.values())


def test_mistake_is_told_to_the_client(client, archive):
    """The client gets the words of the source's own error."""
    archive.filled()
    table = client.read.format("tieringd").option("subscribe", "absent").load(archive.url)
    with pytest.raises(PySparkException, match="absent"):
        table.collect()
