"""Two queries read the archive and then the broker: every record once, while a daemon trims the broker."""

# Long: a daemon archives and trims a topic while streaming queries start, stop and go on.

from __future__ import annotations

import json
import time

import pytest
from aiokafka.admin import NewPartitions
from pyspark.errors import StreamingQueryException

from tests.e2e.archives import base_of_active
from tests.e2e.conftest import BUCKET
from tests.e2e.sample_topics import SEGMENTS
from tests.e2e.spark.rows import s3_options
from tests.support.daemon import run_well, running_daemon

_PATIENCE_SECONDS = 240
_VALUE_BYTES = 100_000
_PARTITIONS = 2
_LOST = r"(?i)out of range|data loss|may have been lost"


class Query:
    """A streaming query into files of its own, with the trigger that a test wants."""

    def __init__(self, spark, source, options, directory):
        self._spark = spark
        self._source = source
        self._options = options
        self.checkpoint = directory / "checkpoint"
        self._table = str(directory / "rows")

    def started(self, *, starts, **trigger):
        """Start the query, or go on with it from its checkpoint. *starts* are its startingOffsets."""
        given = self._options | {"startingOffsets": starts}
        rows = self._spark.readStream.format(self._source).options(**given).load()
        rows = rows.selectExpr("partition", "offset", "cast(substring(value, 1, 10) AS STRING) AS number")
        writer = rows.writeStream.format("parquet").option("checkpointLocation", str(self.checkpoint))
        return writer.trigger(**trigger).start(self._table)

    def run(self, *, starts):
        """Read all that is there now."""
        query = self.started(starts=starts, availableNow=True)
        try:
            query.awaitTermination()
        finally:
            query.stop()

    def rows(self):
        """Return partition, offset and number of each record that has arrived."""
        table = self._spark.read.schema("partition INT, offset LONG, number STRING")
        return sorted(tuple(row) for row in table.parquet(self._table).collect())

    def until_rows(self, query, count):
        """Return when *count* records have arrived from this run of the query."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while sum(progress["numInputRows"] for progress in query.recentProgress) < count:
            assert query.exception() is None, query.exception()
            assert time.monotonic() < deadline, query.status
            time.sleep(0.05)

    def ended_at(self, *options, partitions=_PARTITIONS):
        """Return what the command prints of the checkpoint."""
        options = ("--partitions", str(partitions), *options)
        printed = run_well("spark", "offsets", str(self.checkpoint), *options)
        return printed.decode().strip()


class TrimmedTopic:
    """A topic with numbered records on a broker, and the daemon that archives and trims it."""

    def __init__(self, kafka, daemon, name):
        self._kafka = kafka
        self._daemon = daemon
        self.name = name
        self.written = []

    async def add_partition(self):
        """Give the topic a second partition."""
        async with self._kafka.admin() as admin:
            await admin.create_partitions({self.name: NewPartitions(_PARTITIONS)})
        async with self._kafka.producer() as producer:
            while len(await producer.partitions_for(self.name)) < _PARTITIONS:
                await producer.client.force_metadata_update()

    async def write(self, count, *, partition=0):
        """Append *count* records of a tenth of a segment each."""
        numbers = [f"{len(self.written) + one:010d}" for one in range(count)]
        values = [number.encode() + bytes(_VALUE_BYTES) for number in numbers]
        last = await self._kafka.produce(self.name, values, partition=partition, max_batch_size=200_000)
        offsets = range(last - count + 1, last + 1)
        self.written += zip([partition] * count, offsets, numbers, strict=True)

    def until_trimmed_past(self, offset, *, partition=0):
        """
        Return when the broker no longer has *offset*, and the archive has all that is closed.

        From there on the daemon trims nothing that a query on the archive does not read.
        """
        active = base_of_active(self._kafka.log_dir() / f"{self.name}-{partition}")
        self._daemon.until_next_offset(self.name, active, partition)
        wanted = {"topic": self.name, "partition": partition}
        self._daemon.until(
            lambda: any(
                one["log_start_offset"] > offset for one in self._daemon.events("local log trimmed", **wanted)
            ),
            f"{self.name}-{partition} is trimmed past {offset}",
        )


@pytest.fixture
async def trimmed(kafka, write_kafka_config, topic):
    """Give a topic of one partition; a daemon leaves two segments of each partition on the broker."""
    await kafka.create_topic(topic, configs=SEGMENTS)
    config = write_kafka_config(
        topics={topic: {"redpanda.remote.write": True, "retention.local.target.bytes": 2 << 20}}
    )
    with running_daemon(config) as daemon:
        yield TrimmedTopic(kafka, daemon, topic)


@pytest.fixture
def queries(spark, kafka, seaweedfs, prefix, topic, tmp_path):  # noqa: PLR0917 - fixtures
    """Give a function that makes a query of the archive, or of the broker, with a name."""
    places = {
        "tieringd": s3_options(seaweedfs, bucket=BUCKET, prefix=prefix) | {"refreshInterval": "50ms"},
        "kafka": {"kafka.bootstrap.servers": kafka.bootstrap},
    }

    def made(source, name):
        options = places[source] | {"subscribe": topic, "maxOffsetsPerTrigger": "10"}
        return Query(spark, source, options, tmp_path / name)

    return made


# Long: a daemon trims what a job of Spark reads.
async def test_every_record_comes_once_while_the_broker_trims(trimmed, queries):
    """The broker trims under the first query, between both and under the second. Each restarts."""
    history = queries("tieringd", "history")
    await trimmed.write(40)
    trimmed.until_trimmed_past(0)
    query = history.started(starts="earliest", processingTime="0 seconds")
    history.until_rows(query, 10)
    await trimmed.write(40)
    trimmed.until_trimmed_past(40)
    query.stop()
    # Nothing of the new partition is archived yet, so the first query does not know it when it ends.
    await trimmed.add_partition()
    await trimmed.write(5, partition=1)
    history.run(starts="earliest")
    assert "1" not in json.loads(history.ended_at(partitions=0))[trimmed.name]
    assert json.loads(history.ended_at())[trimmed.name]["0"] > 40

    # The broker trims past where the second query is to begin, first in the partition that was not archived.
    for partition in (1, 0):
        starts = history.ended_at()
        past = max(0, json.loads(starts)[trimmed.name][str(partition)])
        await trimmed.write(40, partition=partition)
        trimmed.until_trimmed_past(past, partition=partition)
        with pytest.raises(StreamingQueryException, match=_LOST):
            queries("kafka", f"too late in {partition}").run(starts=starts)
        history.run(starts="earliest")
    begin = history.ended_at()

    present = queries("kafka", "present")
    query = present.started(starts=begin, processingTime="0 seconds")
    present.until_rows(query, 5)
    # What the query has not read yet is always less than what the daemon leaves on the broker.
    for _ in range(4):
        before = len(trimmed.written)
        await trimmed.write(10)
        present.until_rows(query, before + 10 - len(history.rows()))
    trimmed.until_trimmed_past(json.loads(begin)[trimmed.name]["0"])
    query.stop()
    await trimmed.write(5)
    await trimmed.write(5, partition=1)
    present.run(starts=begin)

    assert sorted(history.rows() + present.rows()) == sorted(trimmed.written)


async def test_archive_takes_over_where_a_stopped_query_on_the_broker_was_overtaken(trimmed, queries):
    """A query on the archive reads what the broker has trimmed, and another one on the broker goes on."""
    present = queries("kafka", "present")
    await trimmed.add_partition()
    for partition in range(_PARTITIONS):
        await trimmed.write(5, partition=partition)
    present.run(starts="earliest")
    for partition in range(_PARTITIONS):
        await trimmed.write(40, partition=partition)
        trimmed.until_trimmed_past(5, partition=partition)
    with pytest.raises(StreamingQueryException, match=_LOST):
        present.run(starts="earliest")

    history = queries("tieringd", "history")
    history.run(starts=present.ended_at("--last-ended"))
    later = queries("kafka", "later")
    later.run(starts=history.ended_at())

    assert sorted(present.rows() + history.rows() + later.rows()) == sorted(trimmed.written)
