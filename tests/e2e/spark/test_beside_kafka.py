"""The data source beside Spark's own Kafka source, on one broker: the same options give the same rows."""

# Long: each case is a query on a broker and one on its archive, and streams start and stop.

from __future__ import annotations

import json

import pytest

from tests.e2e.archives import archived_manifest
from tests.e2e.conftest import BUCKET
from tests.e2e.sample_topics import APPEND_TIME, FIRST_TIME_MS, ISOLATIONS, STEP_MS, TRANSACTIONS, codec_topic
from tests.e2e.spark.rows import s3_options
from tieringd.spark.source.query_checkpoint import ended_at

COLUMNS = ("topic", "partition", "offset", "timestamp", "timestampType", "key", "value")
PLAIN = codec_topic("none")
MIDDLE_MS = FIRST_TIME_MS + 40 * STEP_MS


@pytest.fixture
def places(kafka, seaweedfs, samples):
    """Give what leads each source to its data."""
    return {
        "kafka": {"kafka.bootstrap.servers": kafka.bootstrap},
        "tieringd": s3_options(seaweedfs, bucket=BUCKET, prefix=samples.prefix),
    }


@pytest.fixture
def ends(sample_objects):
    """Give a function that returns where the archive of a topic ends, as an option has it."""
    return lambda *topics: json.dumps(
        {topic: {"0": archived_manifest(sample_objects, topic).next_offset} for topic in topics}
    )


def rows(table, *, headers=False):
    columns = (*COLUMNS, "headers") if headers else COLUMNS
    found = [tuple(_plain(row[name]) for name in columns) for row in table.select(*columns).collect()]
    return sorted(found, key=lambda row: (row[0], row[1], row[2]))


def _plain(value):
    if isinstance(value, list):
        return tuple((one["key"], _plain(one["value"])) for one in value)
    return bytes(value) if isinstance(value, bytearray) else value


def table_of(spark, places, source, given):
    return spark.read.format(source).options(**places[source] | given).load()


CASES = {
    "all": {"startingOffsets": "earliest"},
    "from an offset": {"startingOffsets": json.dumps({PLAIN: {"0": 17}})},
    "between offsets": {
        "startingOffsets": json.dumps({PLAIN: {"0": 5}}),
        "endingOffsets": json.dumps({PLAIN: {"0": 23}}),
    },
    "the earliest by number": {"startingOffsets": json.dumps({PLAIN: {"0": -2}})},
    "from a time": {"startingTimestamp": str(MIDDLE_MS)},
    "to a time": {"endingTimestamp": str(MIDDLE_MS)},
    "between times": {
        "startingTimestamp": str(FIRST_TIME_MS + 5 * STEP_MS),
        "endingTimestamp": str(MIDDLE_MS),
    },
    "from a time by partition": {"startingOffsetsByTimestamp": json.dumps({PLAIN: {"0": MIDDLE_MS}})},
    "headers": {"includeHeaders": "true"},
    "more tasks": {"minPartitions": "7"},
    "small tasks": {"maxRecordsPerPartition": "10"},
}


# Long: the first of a worker's tests starts the session and writes the sample topics.
@pytest.mark.parametrize("given", CASES.values(), ids=CASES.keys())
async def test_batch_has_the_rows_of_the_kafka_source(spark, places, ends, given):
    """Offsets, times, headers and the sizes of tasks."""
    given = {"subscribe": PLAIN, "endingOffsets": ends(PLAIN)} | given
    headers = "includeHeaders" in given
    wanted = rows(table_of(spark, places, "kafka", given), headers=headers)
    assert wanted
    assert rows(table_of(spark, places, "tieringd", given), headers=headers) == wanted


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_transactions_are_read_as_the_kafka_source_reads_them(spark, places, ends, isolation):
    """Both isolation levels work under the name that the Kafka client gives the option."""
    given = {
        "subscribe": TRANSACTIONS,
        "endingOffsets": ends(TRANSACTIONS),
        "kafka.isolation.level": isolation,
    }
    wanted = rows(table_of(spark, places, "kafka", given))
    assert wanted
    assert rows(table_of(spark, places, "tieringd", given)) == wanted


@pytest.mark.parametrize(
    ("given", "topics"),
    [
        pytest.param({"subscribePattern": r"codec\.of_records-(gzip|zstd)"}, ["gzip", "zstd"], id="pattern"),
        pytest.param({"subscribePattern": r"\Qcodec.of_records-\E(?<codec>lz4)"}, ["lz4"], id="of Java"),
        pytest.param({"assign": json.dumps({codec_topic("snappy"): [0]})}, ["snappy"], id="assign"),
    ],
)
async def test_topics_are_chosen_as_the_kafka_source_chooses_them(spark, places, ends, given, topics):
    """Topics are chosen by a pattern of Java, or by partition, as with the Kafka source."""
    given |= {"endingOffsets": ends(*map(codec_topic, topics))}
    wanted = rows(table_of(spark, places, "kafka", given))
    assert {row[0] for row in wanted} == set(map(codec_topic, topics))
    assert rows(table_of(spark, places, "tieringd", given)) == wanted


async def test_times_of_the_broker_are_told_as_the_kafka_source_tells_them(spark, places, ends):
    """Times that the broker set have the same value and type as with the Kafka source."""
    given = {"subscribe": APPEND_TIME, "endingOffsets": ends(APPEND_TIME)}
    wanted = rows(table_of(spark, places, "kafka", given))
    assert {row[4] for row in wanted} == {1}
    assert rows(table_of(spark, places, "tieringd", given)) == wanted


def run_stream(spark, source, given, directory):
    """Run a query until it has read what there is; return its rows, of all its runs."""
    stream = spark.readStream.format(source).options(**given).load().select(*COLUMNS)
    writer = stream.writeStream.format("parquet").option("checkpointLocation", str(directory / "checkpoint"))
    writer.option("path", str(directory / "rows")).trigger(availableNow=True).start().awaitTermination()
    return rows(spark.read.parquet(str(directory / "rows")))


def ends_of_batches(checkpoint):
    """Return where each batch of a query on one partition ended."""
    files = sorted((checkpoint / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))
    return [json.loads(path.read_text().splitlines()[-1])[PLAIN]["0"] for path in files]


async def test_batches_of_a_stream_are_those_of_the_kafka_source(spark, places, tmp_path):
    """Batches are as large as the limit has them. The archive's last one ends before the broker's."""
    given = {"subscribe": PLAIN, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "30"}
    ends = {}
    for source in ("kafka", "tieringd"):
        run_stream(spark, source, places[source] | given, tmp_path / source)
        ends[source] = ends_of_batches(tmp_path / source / "checkpoint")
    *whole, _ = ends["tieringd"]
    assert whole == ends["kafka"][: len(whole)]
    assert whole[:2] == [30, 60]


async def test_history_and_present_are_every_record_once(spark, places, ends, tmp_path):
    """A query on the archive, and then one on the broker from where it ended; both are stopped and go on."""
    given = {"subscribe": PLAIN, "maxOffsetsPerTrigger": "30"}
    everything = rows(table_of(spark, places, "kafka", given))
    history, present = tmp_path / "history", tmp_path / "present"
    for _ in range(2):
        read = run_stream(
            spark, "tieringd", places["tieringd"] | given | {"startingOffsets": "earliest"}, history
        )
    assert 0 < len(read) < len(everything)

    next_offsets = json.dumps(ended_at(history / "checkpoint"))
    assert next_offsets == ends(PLAIN)
    for _ in range(2):
        later = run_stream(
            spark, "kafka", places["kafka"] | given | {"startingOffsets": next_offsets}, present
        )
    assert read + later == everything
