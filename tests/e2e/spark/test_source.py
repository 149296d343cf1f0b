"""The data source on segments of a real broker: record by record what Kafka's own consumer reads."""

from __future__ import annotations

import asyncio
import time
from random import Random

import pytest
import pytest_asyncio
from pyspark.errors import PySparkException
from pyspark.sql import functions

from tests.e2e.archives import archived_manifest, base_of_active
from tests.e2e.conftest import BUCKET
from tests.e2e.sample_topics import (
    FIRST_TIME_MS,
    ISOLATIONS,
    SAMPLE_TOPICS,
    STEP_MS,
    TRANSACTIONS,
    codec_topic,
    consumed,
    offset_for_time,
)
from tests.e2e.spark.rows import frame, s3_options, seen_in
from tests.support.daemon import kafka_config, run_well, write_config

_PATIENCE_SECONDS = 240
_COMPACTED = {
    "cleanup.policy": "compact",
    "segment.bytes": str(1 << 20),
    "delete.retention.ms": "0",
    "min.cleanable.dirty.ratio": "0.01",
}


@pytest.fixture
def options(seaweedfs, samples):
    """Give what a user sets to read the sample archive."""
    return s3_options(seaweedfs, bucket=BUCKET, prefix=samples.prefix)


@pytest.fixture
def consumed_below(kafka, sample_objects):
    """Give a function that returns what a consumer reads of the part of a topic that is archived."""

    async def consume(topic, isolation):
        end = archived_manifest(sample_objects, topic).next_offset
        return [one for one in await consumed(kafka, topic, isolation) if one.offset < end]

    return consume


@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize("topic", SAMPLE_TOPICS)
async def test_source_reads_what_a_consumer_reads(spark, options, consumed_below, topic, isolation):
    """All codecs, transactions, headers, nulls and both kinds of time, however the tasks are cut."""
    wanted = await consumed_below(topic, isolation)
    given = options | {"subscribe": topic, "kafka.isolation.level": isolation}

    assert seen_in(frame(spark, given)) == wanted
    cut = frame(spark, given, minPartitions=7)
    assert cut.rdd.getNumPartitions() == 7
    assert seen_in(cut) == wanted


@pytest_asyncio.fixture
async def compacted(kafka, seaweedfs, prefix, tmp_path, topic):
    """Give how to reach the archive of a topic that the broker has compacted, and what is left there."""
    await kafka.create_topic(topic, configs=_COMPACTED)
    random = Random(1)
    async with kafka.producer(max_batch_size=200_000, linger_ms=20) as producer:
        for number in range(300):
            value = None if number == 7 else random.randbytes(20_000)
            await producer.send(topic, value, key=b"key-%d" % random.randrange(40), partition=0)
        await producer.send_and_wait(topic, b"end", key=b"end", partition=0)
    active = base_of_active(kafka.log_dir() / f"{topic}-0")
    changes = {"topics": {topic: {"redpanda.remote.write": True}}}
    config = kafka_config(kafka, seaweedfs, tmp_path / "state", bucket=BUCKET, prefix=prefix, **changes)
    await asyncio.to_thread(_until_cleaned, kafka, topic, active)
    run_well("run", "--once", "--config", str(write_config(tmp_path / "tieringd.yaml", config)))
    left = [one for one in await consumed(kafka, topic, "read_uncommitted") if one.offset < active]
    assert 0 < len(left) < active / 2
    return s3_options(seaweedfs, bucket=BUCKET, prefix=prefix) | {"subscribe": topic}, left


def test_source_reads_what_is_left_of_a_compacted_topic(spark, compacted):
    """Holes in the offsets, and batches that lost records."""
    options, left = compacted
    assert seen_in(frame(spark, options)) == left
    assert seen_in(frame(spark, options, maxRecordsPerPartition=50)) == left


def _until_cleaned(kafka, topic, active):
    """Return when the broker has compacted all that is closed, as it notes it."""
    path = kafka.log_dir() / "cleaner-offset-checkpoint"
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not path.exists() or f"{topic} 0 {active}" not in path.read_text().splitlines():
        assert time.monotonic() < deadline, "the broker does not compact"
        time.sleep(0.1)


def test_topics_are_read_together(spark, options, sample_objects):
    """A pattern reads several topics, and each row has its topic and partition."""
    table = frame(spark, options, subscribePattern=r"codec\.of_records-.*")
    ends = table.groupBy("topic", "partition").agg(functions.max("offset").alias("end"))
    found = {(row.topic, row.partition): row.end for row in ends.collect()}
    wanted = {
        (topic, 0): archived_manifest(sample_objects, topic).next_offset - 1
        for topic in SAMPLE_TOPICS
        if topic.startswith("codec")
    }
    assert found == wanted


async def test_times_are_found_as_the_broker_finds_them(spark, kafka, options):
    """A time finds the same record as the broker's own search, also inside a compressed batch."""
    topic = codec_topic("zstd")
    begin, end = FIRST_TIME_MS + 11 * STEP_MS + 1, FIRST_TIME_MS + 63 * STEP_MS
    table = frame(spark, options, subscribe=topic, startingTimestamp=begin, endingTimestamp=end)
    offsets = [record.offset for record in seen_in(table)]
    assert offsets[0] == await offset_for_time(kafka, topic, begin)
    assert offsets[-1] == await offset_for_time(kafka, topic, end) - 1


def test_daemon_s_configuration_is_enough(spark, samples, sample_objects):
    """The daemon's configuration file is all that the source needs."""
    table = frame(spark, {"config": str(samples.config), "subscribe": TRANSACTIONS})
    assert seen_in(table)[-1].offset == archived_manifest(sample_objects, TRANSACTIONS).next_offset - 1


def test_columns_follow_a_schema_or_an_option(spark, options):
    """Columns that are not wanted are not decoded, and a schema of the user's does the same."""
    given = options | {"subscribe": TRANSACTIONS}
    by_option = spark.read.format("tieringd").options(**given, columns="offset,key").load()
    by_schema = spark.read.format("tieringd").schema("offset LONG, key BINARY").options(**given).load()
    assert by_option.columns == by_schema.columns == ["offset", "key"]
    assert sorted(by_option.collect()) == sorted(by_schema.collect())


def test_secrets_are_in_no_plan(spark, options):
    """A query's plan and its errors show no secret."""
    given = options | {"subscribe": "no such topic", "secretKey": "hUsH-hUsH"}
    table = spark.read.format("tieringd").options(**given).load()
    explained = table._jdf.queryExecution().toString()
    assert "tieringd" in explained
    assert "hUsH" not in explained
    with pytest.raises(PySparkException) as raised:
        table.count()
    assert "cloud_storage_access_key" in str(raised.value)
    assert "hUsH" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"subscribe": "ordrs"}, "the bucket holds no topic named ordrs", id="topic"),
        pytest.param({"startOffsets": "earliest"}, "Did you mean startingOffsets", id="option"),
        pytest.param({"startingOffsets": "latest"}, "a batch cannot begin at the latest", id="contradiction"),
    ],
)
def test_mistakes_are_told_through_spark(spark, options, changes, message):
    """The exception that a user sees has the words of the source's own error."""
    with pytest.raises(PySparkException) as raised:
        frame(spark, options | {"subscribe": TRANSACTIONS} | changes).count()
    assert message in str(raised.value)
