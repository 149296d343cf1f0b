"""Exports of a real archive, by Spark: what is in the target is what Kafka's consumer reads, once."""

# Long: each export is a job on Spark, and several run in processes that are killed.

from __future__ import annotations

import asyncio
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from pyspark.sql import functions

from tests.e2e.archives import archived_manifest, segment_keys
from tests.e2e.conftest import BUCKET
from tests.e2e.sample_topics import (
    APPEND_TIME,
    CODECS,
    FIRST_TIME_MS,
    SEGMENTS,
    TRANSACTIONS,
    SeenRecord,
    codec_topic,
    consumed,
)
from tests.support.daemon import endpoint_properties, run_command, write_config
from tests.support.fault_proxy import StallRequest, fault_proxy
from tests.support.iceberg import catalog_properties, rows_of_table, running_catalog
from tests.support.processes import Server, wait_until_ended
from tieringd.config import load_config
from tieringd.errors import RetryableError, StorageUnavailable, TieringError
from tieringd.spark.jobs.export.iceberg_target import IcebergTarget
from tieringd.spark.jobs.export.job import export
from tieringd.spark.jobs.export.parquet_target import ParquetTarget
from tieringd.spark.jobs.export.state import ExportRules
from tieringd.spark.jobs.export.work import on_spark
from tieringd.spark.jobs.job_progress import silent

SMALL = ExportRules(portion_bytes=300_000, round_bytes=2_000_000)
TOPICS = (codec_topic("zstd"), APPEND_TIME, TRANSACTIONS)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MILLISECOND = timedelta(milliseconds=1)


def config_at(path):
    return load_config(Path(path), environ=os.environ, needs_broker=False)


def count_of_parquet_files(lake):
    """Return how many data files a target has. A directory may be removed meanwhile."""
    return sum(name.endswith(".parquet") for _, _, names in os.walk(lake) for name in names)


def seen_record(row):
    """Return a row of a target as a reader of Kafka sees the record."""
    return SeenRecord(
        row["offset"],
        (row["timestamp"] - EPOCH) // MILLISECOND,
        ("CreateTime", "LogAppendTime")[row["timestampType"]],
        None if row["key"] is None else bytes(row["key"]),
        None if row["value"] is None else bytes(row["value"]),
        tuple(
            (one["key"], None if one["value"] is None else bytes(one["value"]))
            for one in row["headers"] or ()
        ),
    )


async def expected(kafka, objects, topic, *, number=0, isolation="read_committed"):
    """Return what Kafka's consumer reads of the part of a log that is archived."""
    end = archived_manifest(objects, topic, number).next_offset
    return [one for one in await consumed(kafka, topic, isolation, number) if one.offset < end]


def spark_rows(spark, url, topic, number=0):
    """Return what plain Spark reads of a partition, sorted by offset, with times that Python has."""
    frame = spark.read.parquet(url).where(
        (functions.col("topic") == topic) & (functions.col("partition") == number)
    )
    micros = functions.unix_micros("timestamp").alias("timestamp")
    names = ("partition", "offset", "timestampType", "key", "value", "headers", "date")
    rows = [row.asDict(recursive=True) for row in frame.select(micros, *names).collect()]
    for row in rows:
        row["timestamp"] = EPOCH + timedelta(microseconds=row["timestamp"])
        assert row["timestamp"].date() == row["date"]
    return sorted(rows, key=lambda row: row["offset"])


async def fill(kafka, topic, times, *, partitions=2, since=0):
    """Append some segments to each partition, hours apart, and a last record."""
    for number in range(partitions):
        for turn in range(since, since + times):
            values = [os.urandom(20_000) for _ in range(60)]
            time_ms = FIRST_TIME_MS + turn * 3_600_000
            await kafka.produce(topic, values, partition=number, timestamp_ms=time_ms)


def archive(path):
    """Archive all that is closed."""
    done = run_command("run", "--once", "--config", str(path))
    assert done.returncode == 0, done.stderr.decode()


@pytest.fixture
async def growing(kafka, topic, write_kafka_config):
    """Give the configuration of a topic with two partitions of which something is archived."""
    await kafka.create_topic(topic, partitions=2, configs=SEGMENTS)
    await fill(kafka, topic, 3)
    path = write_kafka_config(topics={topic: {"redpanda.remote.write": True}})
    archive(path)
    return path


# Long: it is the first export of its session.
@pytest.mark.timeout(900)
async def test_parquet_holds_what_a_consumer_reads(spark, kafka, samples, sample_objects, tmp_path):
    """Every codec, transactions, tombstones, headers, both kinds of timestamps; read by plain Spark."""
    topics = [*map(codec_topic, CODECS), APPEND_TIME, TRANSACTIONS]
    told = []

    report = export(
        spark,
        config_at(samples.config),
        topics=topics,
        target=ParquetTarget(f"file://{tmp_path}/lake"),
        rules=SMALL,
        progress=lambda what, done, total: told.append((what, done, total)),
    )

    records = 0
    for topic in topics:
        wanted = await expected(kafka, sample_objects, topic)
        rows = spark_rows(spark, f"file://{tmp_path}/lake", topic)
        assert [seen_record(row) for row in rows] == wanted
        records += len(wanted)
    assert report.figures["records"] == records > 0
    assert {what for what, _, _ in told} == {f"export {topic}" for topic in topics}
    assert all(done <= total for _, done, total in told)


async def test_uncommitted_parquet_in_s3_holds_aborted_records(  # noqa: PLR0917 - fixtures
    spark, kafka, samples, sample_objects, objects, prefix, tmp_path
):
    """Export works in the archive's own store, by the archive's credentials."""
    export(
        spark,
        config_at(samples.config),
        topics=[TRANSACTIONS],
        target=ParquetTarget(f"s3://{BUCKET}/{prefix}", partition_by="none"),
        rules=ExportRules(isolation="read_uncommitted", portion_bytes=500_000),
    )

    for key in objects.keys():  # noqa: SIM118 a method, not a mapping's
        path = tmp_path / "lake" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(objects.read(key))
    frame = spark.read.parquet(f"file://{tmp_path}/lake")
    wanted = await expected(kafka, sample_objects, TRANSACTIONS, isolation="read_uncommitted")
    found = [(row["offset"], bytes(row["value"] or b"")) for row in frame.sort("offset").collect()]
    assert found == [(one.offset, one.value or b"") for one in wanted]


async def test_iceberg_holds_what_a_consumer_reads(spark, kafka, samples, sample_objects, tmp_path):
    """Tables have Redpanda's layout, one for each topic, and pyiceberg reads them."""
    warehouse = tmp_path / "warehouse"
    with running_catalog(warehouse) as catalog:
        target = IcebergTarget("test", catalog_properties(warehouse))
        report = export(spark, config_at(samples.config), topics=TOPICS, target=target, rules=SMALL)

        for topic in TOPICS:
            rows = rows_of_table(catalog.load_table(("redpanda", topic)))
            assert [seen_record(row) for row in rows] == await expected(kafka, sample_objects, topic)
    assert report.figures["commits"] >= len(TOPICS)


# Long: two exports, and a daemon between them.
async def test_second_run_adds_only_what_is_new(  # noqa: PLR0917 - fixtures
    spark, kafka, growing, topic, objects, seaweedfs, prefix, tmp_path
):
    """
    The second run adds only new records, to Parquet and to a table in S3.

    Executors write to S3 with the credentials of the catalogue.
    """
    parquet = ParquetTarget(f"file://{tmp_path}/lake", partition_by="day")
    properties = catalog_properties(tmp_path) | {
        "warehouse": f"s3://{BUCKET}/{prefix}-warehouse",
        "s3.endpoint": seaweedfs.endpoint_url,
        "s3.access-key-id": seaweedfs.access_key,
        "s3.secret-access-key": seaweedfs.secret_key,
        "s3.region": seaweedfs.region,
    }
    iceberg = IcebergTarget("test", properties, partition_by="day")
    config = config_at(growing)
    first = [export(spark, config, topics=[topic], target=one, rules=SMALL) for one in (parquet, iceberg)]
    await fill(kafka, topic, 2, since=3)
    archive(growing)

    second = [export(spark, config, topics=[topic], target=one, rules=SMALL) for one in (parquet, iceberg)]

    wanted = [await expected(kafka, objects, topic, number=number) for number in range(2)]
    with iceberg.opened(config) as place_of:
        rows = rows_of_table(place_of(topic).checkpoint().version)
    for number in range(2):
        plain = spark_rows(spark, f"file://{tmp_path}/lake", topic, number)
        assert [seen_record(row) for row in plain] == wanted[number]
        in_table = [row for row in rows if row["partition"] == number]
        assert [seen_record(row) for row in in_table] == wanted[number]
    for begin, end in zip(first, second, strict=True):
        assert begin.figures["records"] > 0
        assert end.figures["records"] > 0
        assert begin.figures["records"] + end.figures["records"] == sum(map(len, wanted))
        assert [row[2] for row in end.tables[0].rows] == [row[3] for row in begin.tables[0].rows]


# Long: a JVM is killed at each of several files.
@pytest.mark.timeout(900)
async def test_killed_process_leaves_nothing_twice_and_the_next_run_nothing_out(  # noqa: PLR0917 - fixtures
    spark, kafka, growing, topic, objects, seaweedfs, tmp_path
):
    """
    The process is killed with SIGKILL at its first, fourth and seventh file, and so on.

    The last run ends.
    """
    lake = tmp_path / "lake"
    command = [sys.executable, "-m", "tests.support.export_process"]
    for round_ in range(2):
        output = tmp_path / f"output-{round_}"
        wanted_files = count_of_parquet_files(lake) + 1 + 3 * round_

        def is_time(wanted_files=wanted_files):
            return count_of_parquet_files(lake) >= wanted_files

        def stalls_then(exchange, is_time=is_time):
            """Let nothing more be read at that time. The export cannot end before it is killed."""
            is_of_data = exchange.method == "GET" and exchange.path.partition("?")[0].endswith(".log")
            return StallRequest() if is_of_data and is_time() else None

        async with fault_proxy(seaweedfs.endpoint_url) as proxy:
            proxy.weather = stalls_then
            through = tmp_path / "through.yaml"
            write_config(through, yaml.safe_load(growing.read_text()) | endpoint_properties(proxy.url))
            server = Server(
                [*command, str(through), topic, f"file://{lake}", str(tmp_path / f"spark-{round_}")],
                output=output,
            )
            server.launch()
            try:
                await asyncio.to_thread(server.wait_until, is_time, timeout_seconds=240)
            finally:
                server.kill()
        jvm = next(int(line) for line in output.read_text().splitlines() if line.isdigit())
        await asyncio.to_thread(wait_until_ended, [jvm])
        for number in range(2):
            offsets = [row["offset"] for row in spark_rows(spark, f"file://{lake}", topic, number)]
            wanted = {one.offset for one in await expected(kafka, objects, topic, number=number)}
            assert len(set(offsets)) == len(offsets)
            assert set(offsets) <= wanted

    export(spark, config_at(growing), topics=[topic], target=ParquetTarget(f"file://{lake}"), rules=SMALL)

    for number in range(2):
        rows = spark_rows(spark, f"file://{lake}", topic, number)
        assert [seen_record(row) for row in rows] == await expected(kafka, objects, topic, number=number)


async def test_damaged_object_stops_the_export_and_what_it_wrote_does_not_count(
    spark, growing, topic, objects, tmp_path
):
    """The error of the executor names the object; once that is mended, the export goes on."""
    lake = f"file://{tmp_path}/lake"
    key = segment_keys(archived_manifest(objects, topic, 1))[-1]
    data = objects.read(key)
    objects.write(key, data[:-1] + bytes([data[-1] ^ 0xFF]))

    with pytest.raises(TieringError, match=f"CRC.*{re.escape(key)}"):
        export(spark, config_at(growing), topics=[topic], target=ParquetTarget(lake))
    objects.write(key, data)

    export(spark, config_at(growing), topics=[topic], target=ParquetTarget(lake))
    for number in range(2):
        offsets = [row["offset"] for row in spark_rows(spark, lake, topic, number)]
        assert offsets == list(range(archived_manifest(objects, topic, number).next_offset))


def test_task_that_fails_whenever_it_is_tried_is_an_error_to_try_again_later(spark):
    """The error says why in one line, without two stack traces."""

    def work(_portion):
        raise StorageUnavailable("the store does not answer")

    with pytest.raises(RetryableError, match=r"attempts: the store does not answer\. Its"):
        on_spark(spark, "export", silent)(work, [1, 2])


# Long: two exports run round by round, for each kind of target.
@pytest.mark.timeout(900)
async def test_exports_at_once_count_each_record_once(spark, kafka, growing, topic, objects, tmp_path):  # noqa: PLR0917 - fixtures
    """Two runs of each kind, round by round against each other."""
    warehouse = tmp_path / "warehouse"
    config = config_at(growing)
    # There are four rounds. A run may lose two for each round of the other one, and gives up after ten.
    rules = ExportRules(portion_bytes=300_000, round_bytes=2_000_000)
    with running_catalog(warehouse) as catalog:
        targets = [
            ParquetTarget(f"file://{tmp_path}/lake"),
            IcebergTarget("test", catalog_properties(warehouse) | {"init_catalog_tables": "false"}),
        ]
        with ThreadPoolExecutor(4) as threads:
            runs = [
                threads.submit(export, spark, config, topics=[topic], target=target, rules=rules)
                for target in targets
                for _ in range(2)
            ]
            reports = [run.result() for run in runs]

        rows = rows_of_table(catalog.load_table(("redpanda", topic)))
        wanted = [await expected(kafka, objects, topic, number=number) for number in range(2)]
    for number in range(2):
        in_table = [row["offset"] for row in rows if row["partition"] == number]
        plain = [row["offset"] for row in spark_rows(spark, f"file://{tmp_path}/lake", topic, number)]
        assert in_table == plain == [one.offset for one in wanted[number]]
    for one, other in [reports[:2], reports[2:]]:
        assert one.figures["records"] + other.figures["records"] == sum(map(len, wanted))
