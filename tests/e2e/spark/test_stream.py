"""Streaming queries over an archive: limits, restarts, crashes, new partitions, a reader that is too slow."""

# Long: each streaming query starts, runs several triggers, stops and starts again.

from __future__ import annotations

import json
import time

import pytest
import pytest_asyncio
from pyspark.errors import PySparkException

from tests.e2e.archives import archived_manifest
from tests.e2e.conftest import BUCKET
from tests.e2e.sample_topics import TRANSACTIONS, consumed
from tests.e2e.spark.rows import s3_options
from tests.fakes.file_archive import FileArchive

_PATIENCE_SECONDS = 240


@pytest.fixture
def archive(tmp_path):
    """Give an archive in a directory."""
    return FileArchive(tmp_path / "archive")


class Sink:
    """What a query has brought, and a table of it that survives the query."""

    def __init__(self, spark, directory, **options):
        self._spark = spark
        self._options = {"startingOffsets": "earliest", "refreshInterval": "50ms"} | options
        self._checkpoint, self._table = str(directory / "checkpoint"), str(directory / "table")

    def started(self, **trigger):
        """Start the query, or go on with it."""
        source = self._spark.readStream.format("tieringd").options(**self._options).load()
        rows = source.select("topic", "partition", "offset", "value")
        writer = rows.writeStream.format("parquet").option("checkpointLocation", self._checkpoint)
        return writer.trigger(**trigger).start(self._table)

    def run(self):
        """Read all that is there now; return how many records each batch had."""
        query = self.started(availableNow=True)
        try:
            query.awaitTermination()
            return [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]
        finally:
            query.stop()

    def rows(self):
        """Return every record that has arrived."""
        table = self._spark.read.schema("topic STRING, partition INT, offset LONG, value BINARY").parquet(
            self._table
        )
        return sorted(
            (row.topic, row.partition, row.offset, row.value and bytes(row.value)) for row in table.collect()
        )

    def until_rows(self, query, count):
        """Return when so many have arrived; fail when the query ends first, or it takes too long."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while sum(progress["numInputRows"] for progress in query.recentProgress) < count:
            assert query.exception() is None, query.exception()
            assert time.monotonic() < deadline, query.status
            time.sleep(0.05)


def written(*writers, from_offset=0):
    return sorted(
        (writer.name.topic, writer.name.partition, offset, value)
        for writer in writers
        for offset, value in writer.values().items()
        if offset >= from_offset
    )


# Long: many small batches, each with its checkpoint.
def test_stream_takes_what_its_limit_lets_and_goes_on_after_a_restart(spark, archive, tmp_path):
    """Every record arrives once, over several batches and two lives of the query."""
    writers = [archive.filled(partition=0, segments=2), archive.filled(partition=1, segments=1)]
    sink = Sink(spark, tmp_path, path=archive.url, subscribe="orders", maxOffsetsPerTrigger="12")
    assert sink.run() == [12, 12, 12]
    assert sink.rows() == written(*writers)
    assert sink.run() == []

    writers[0].closed_segment(b"later")
    writers.append(archive.filled(partition=2, segments=1))
    archive.add(writers[0])
    assert sum(sink.run()) == 13
    assert sink.rows() == written(*writers)


class Batches:
    """A query whose batches end up here; its sink fails where a test says so."""

    def __init__(self, spark, directory, **options):
        self._spark = spark
        self._options = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "12"} | options
        self._checkpoint = str(directory / "checkpoint")
        self.done = []

    def run(self, *, fails_at=None, **changes):
        """Read all that is there now; the batch *fails_at* is begun, and not done."""

        def take(rows, number):
            found = sorted((row.offset, bytes(row.value)) for row in rows.select("offset", "value").collect())
            if number == fails_at:
                raise RuntimeError("the sink is away")
            self.done.append((number, found))

        source = self._spark.readStream.format("tieringd").options(**self._options | changes).load()
        writer = source.writeStream.foreachBatch(take).option("checkpointLocation", self._checkpoint)
        writer.trigger(availableNow=True).start().awaitTermination()


def test_crash_in_a_batch_neither_loses_nor_repeats(spark, archive, tmp_path):
    """The batch is done again, of the same records, although more have come by then."""
    writer = archive.filled()
    batches = Batches(spark, tmp_path, path=archive.url, subscribe="orders")
    with pytest.raises(PySparkException, match="the sink is away"):
        batches.run(fails_at=1)
    writer.closed_segment(b"later")
    archive.add(writer)
    archive.merge(writer)
    batches.run()

    assert [(number, len(found)) for number, found in batches.done] == [(0, 12), (1, 12), (2, 12), (3, 1)]
    assert [one for _, found in batches.done for one in found] == sorted(writer.values().items())


def test_new_partitions_and_topics_are_read_by_a_running_query(spark, archive, tmp_path):
    """
    A running query reads new partitions and topics from their first offset on, without a restart.

    It reports its progress as the Kafka source does.
    """
    writers = [archive.filled("orders.a", 0, segments=1)]
    least = {"minOffsetsPerTrigger": "5", "maxTriggerDelay": "1h"}
    sink = Sink(spark, tmp_path, path=archive.url, subscribePattern="orders.*", **least)
    query = sink.started(processingTime="0 seconds")
    try:
        sink.until_rows(query, 12)
        writers.append(archive.filled("orders.a", 1, segments=1))
        sink.until_rows(query, 24)
        writers.append(archive.filled("orders.b", 0, segments=1))
        sink.until_rows(query, 36)
        source = query.lastProgress["sources"][0]
    finally:
        query.stop()
    assert sink.rows() == written(*writers)
    wanted = {"orders.a": {"0": 12, "1": 12}, "orders.b": {"0": 12}}
    assert wanted.items() <= _parsed(source["endOffset"]).items()
    assert _parsed(source["latestOffset"]) == wanted


def _parsed(offset):
    return json.loads(offset) if isinstance(offset, str) else offset


def test_reader_that_retention_overtakes(spark, archive, tmp_path):
    """The query fails with the offsets that it has missed, and goes on when told that this is all right."""
    writer = archive.filled()
    batches = Batches(spark, tmp_path, path=archive.url, subscribe="orders")
    with pytest.raises(PySparkException, match="the sink is away"):
        batches.run(fails_at=1)
    archive.expire(writer, 2)
    with pytest.raises(PySparkException, match="offsets 12 to 23 of orders-0: the archive begins at offset"):
        batches.run()

    batches.run(failOnDataLoss="false")
    values = sorted(writer.values().items())
    assert [one for _, found in batches.done for one in found] == values[:12] + values[24:]


@pytest.fixture
def options(seaweedfs, samples):
    """Give what a user sets to read the sample archive."""
    return s3_options(seaweedfs, bucket=BUCKET, prefix=samples.prefix)


@pytest_asyncio.fixture
async def transactions(kafka, sample_objects):
    """Give what a consumer reads of the archived part of the topic with transactions."""
    end = archived_manifest(sample_objects, TRANSACTIONS).next_offset
    return [one for one in await consumed(kafka, TRANSACTIONS, "read_committed") if one.offset < end]


def test_stream_reads_what_a_consumer_reads(spark, options, transactions, tmp_path):
    """Transactions of a real broker, cut at any offset by the limit, in a real bucket."""
    sink = Sink(
        spark,
        tmp_path,
        **options,
        subscribe=TRANSACTIONS,
        isolationLevel="read_committed",
        maxOffsetsPerTrigger="37",
    )
    sink.run()
    found = [(offset, value) for _, _, offset, value in sink.rows()]
    assert found == [(one.offset, one.value) for one in transactions]


def test_stream_has_no_end(spark, archive):
    """An ending offset is refused for a stream, as with the Kafka source."""
    archive.filled()
    options = {"path": archive.url, "subscribe": "orders", "endingOffsets": "latest"}
    with pytest.raises(PySparkException, match="a streaming query has no end"):
        spark.readStream.format("tieringd").options(**options).load().writeStream.format("noop").trigger(
            availableNow=True
        ).start().awaitTermination()
