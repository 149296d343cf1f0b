"""The commands of the jobs that write: what they print, how they end, what is in the bucket."""

# Long: each command is a job on Spark.

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import load_catalog

from tests.e2e.archives import (
    FileObjects,
    archived_bytes,
    archived_manifest,
    assert_whole,
    read_records,
    segment_keys,
    unreferenced,
)
from tests.e2e.conftest import BUCKET
from tests.e2e.log_files import RECORDS, write_partition
from tests.e2e.spark.keyed_topics import (
    SECRET,
    KeyedTopic,
    archive_once,
    archived_records,
    assert_sound,
    without,
)
from tests.support.command_here import run_here
from tests.support.daemon import command, directory_config, run_command, s3_properties, write_config
from tests.support.fault_proxy import StallRequest, fault_proxy
from tests.support.iceberg import catalog_properties, rows_of_table
from tests.support.s3_bucket import S3Bucket

SEGMENTS = 4
PARTITIONS = range(2)


@pytest.fixture
def archive(tmp_path):
    """Give the configuration of a small archive in a directory: three keys, written over and over."""
    for number in PARTITIONS:
        write_partition(tmp_path / "logs", f"orders-{number}", segments=SEGMENTS)
    (tmp_path / "archive").mkdir()
    properties = directory_config(
        [tmp_path / "logs"],
        tmp_path / "archive",
        tmp_path / "state",
        cloud_storage_segment_size_target="1MiB",
        cloud_storage_segment_size_min="4KiB",
    )
    path = write_config(tmp_path / "tieringd.yaml", properties)
    archive_once(path)
    return path


@pytest.fixture
def keyed(kafka, topic, objects):
    return KeyedTopic(kafka, topic, objects)


@pytest.fixture
def ran(spark):
    """Give a function that runs a job on the tests' Spark, and returns its report; it says nothing else."""

    def run(path, job, *arguments, exit_code=0):
        options = ("--config", str(path), "--format", "json")
        done = run_here("spark", job, *map(str, arguments), *options)
        assert done.returncode == exit_code, done.stderr.decode()
        assert said(done) == []
        return json.loads(done.stdout)

    return run


def said(done):
    """Return what a command has said beside its report, but for the lines of progress of a slow machine."""
    return [line for line in done.stderr.decode().splitlines() if " tasks (" not in line]


def test_compact_does_what_a_dry_run_tells(archive, ran):
    """The same segments and records; before that nothing is changed."""
    objects = FileObjects(archive.parent / "archive")
    stored = objects.keys()

    # No broker has a log of it, so nothing that was replaced is held.
    tried = ran(archive, "compact", "ord*", "--no-broker", "--dry-run", "--delete-after", "0")
    assert tried["figures"]["mode"].startswith("dry run")
    assert objects.keys() == stored

    done = ran(archive, "compact", "ord*", "--no-broker", "--min-compaction-lag", "1d", "--delete-after", "0")
    told = ("topic", "partition", "topic_id", "segments_before", "segments_after", "records_removed")
    rows = [
        [{name: row[name] for name in told} for row in one["tables"]["partitions"]] for one in (tried, done)
    ]
    assert rows[0] == rows[1]
    assert done["figures"]["records_removed"] == len(PARTITIONS) * (SEGMENTS * RECORDS - 3)
    assert done["figures"]["deleted_segments"] == len(PARTITIONS) * SEGMENTS
    end = SEGMENTS * RECORDS
    for number in PARTITIONS:
        left = read_records(archive, "orders", number=number)
        assert [(one.offset, one.key) for one in left] == [(end - 3 + key, b"k%d" % key) for key in range(3)]
    assert_whole(archive)


def test_merge_joins_small_segments(archive, ran):
    """
    Small segments become one with the same bytes, and an unknown topic is an error.

    The merge runs in a process with its own Spark.
    """
    objects = FileObjects(archive.parent / "archive")
    before = [archived_bytes(archive, "orders", number) for number in PARTITIONS]

    assert ran(archive, "merge", "orders")["figures"]["runs"] == 0, "a log may hold the same"
    done = merged_by_a_process(archive, "orders", "--no-broker", "--delete-after", "0")

    assert (done["figures"]["runs"], done["figures"]["segments_after"]) == (len(PARTITIONS), len(PARTITIONS))
    assert [archived_bytes(archive, "orders", number) for number in PARTITIONS] == before
    manifests = [archived_manifest(objects, "orders", number) for number in PARTITIONS]
    assert [len(one.segments) for one in manifests] == [1] * len(PARTITIONS)
    assert unreferenced(objects, manifests) == []
    missing = run_here("spark", "merge", "clicks", "--config", str(archive))
    assert (missing.returncode, missing.stdout) == (1, b"")
    assert missing.stderr.startswith(b"error: the bucket holds no topic named clicks.")


def merged_by_a_process(path, *arguments):
    """Merge with a command that has its own Spark, and return its report; it says nothing else."""
    options = ("--config", str(path), "--master", "local[2]", "--conf", "spark.driver.memory=1g")
    done = run_command("spark", "merge", *arguments, *options, "--format", "json")
    assert done.returncode == 0, done.stderr.decode()
    # Java says that Spark asks for an unfinished part of it.
    assert said(done) == ["WARNING: Using incubator modules: jdk.incubator.vector"]
    return json.loads(done.stdout)


def test_master_that_spark_does_not_know_exits_2(archive):
    """The error has Spark's own words, without its stack."""
    done = run_command("spark", "merge", "orders", "--config", str(archive), "--master", "local[many]")
    errors = done.stderr.decode()
    assert (done.returncode, done.stdout) == (2, b""), errors
    assert "error: Spark does not start: " in errors
    assert "local[many]" in errors
    assert "Traceback" not in errors


def is_of_data(exchange) -> bool:
    """Say whether a request reads a data object: what tasks do, and the driver does not."""
    return exchange.method == "GET" and exchange.path.partition("?")[0].endswith(".log")


def children_of(pid: int) -> list[int]:
    """Return the processes that any thread of a process has started."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for one in lists for child in one.read_text().split()]


async def test_spark_that_dies_is_told_in_a_line(seaweedfs, prefix, tmp_path):
    """The command ends with one line of error if Spark's JVM is killed, for example for its memory."""
    write_partition(tmp_path / "logs", "orders-0", segments=SEGMENTS)
    config = directory_config([tmp_path / "logs"], tmp_path, tmp_path / "state")
    config |= s3_properties(seaweedfs, bucket=BUCKET, prefix=prefix)
    del config["cloud_storage_file_root"]
    archive_once(write_config(tmp_path / "tieringd.yaml", config))

    async with fault_proxy(seaweedfs.endpoint_url) as proxy:
        config["cloud_storage_api_endpoint_port"] = int(proxy.url.rpartition(":")[2])
        path = write_config(tmp_path / "through.yaml", config)
        proxy.spoil(StallRequest(), where=is_of_data)
        process = await asyncio.create_subprocess_exec(
            *command("spark", "compact", "orders", "--config", str(path), "--master", "local[1]"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        async with asyncio.timeout(300):
            await proxy.stalled.wait()
        (java,) = children_of(process.pid)
        os.kill(java, signal.SIGKILL)
        output, errors = (text.decode() for text in await process.communicate())

    assert (process.returncode, output) == (1, ""), errors
    assert "\nerror: Spark gave up: " in errors
    assert "Traceback" not in errors


@pytest.mark.leaves_damage("the damaged object stays")
def test_damage_is_a_fault_and_exit_1(archive, ran):
    """The damaged partition stays as it is. An erasure says that the key may be in it."""
    objects = FileObjects(archive.parent / "archive")
    before = archived_manifest(objects, "orders")
    path = archive.parent / "archive" / segment_keys(before)[0]
    path.write_bytes(path.read_bytes()[:-1])

    (fault,) = ran(archive, "compact", "orders", exit_code=1)["faults"]

    assert "not compacted" in fault
    assert archived_manifest(objects, "orders") == before
    for extra in ((), ("--dry-run",)):
        report = ran(archive, "erase", "orders", "--key", "k0", "--requested-by", "me", *extra, exit_code=1)
        (fault,) = report["faults"]
        assert "have one of the keys" in fault


async def test_erase_does_what_a_dry_run_tells(ran, keyed, write_kafka_config, tmp_path):
    """The first run only reports; then no byte of the key is left, and the record names the requester."""
    await keyed.create()
    await keyed.write(seed=5)
    path = write_kafka_config(topics={keyed.name: {"redpanda.remote.write": True}})
    archive_once(path)
    records = archived_records(path, keyed.name)
    expected = without(records, {SECRET})
    keys = tmp_path / "keys"
    keys.write_text(f"{SECRET.hex()}\n")
    asked = (keyed.name, "--keys-file", keys, "--key", "00", "--key-encoding", "hex", "--requested-by", "me")
    holding = [key for key in keyed.objects.keys() if SECRET in keyed.objects.read(key)]  # noqa: SIM118
    stored = keyed.objects.keys()

    tried = ran(path, "erase", *asked, "--dry-run")
    assert (tried["figures"]["keys"], tried["figures"]["segments_to_rewrite"]) == (2, len(holding))
    assert keyed.objects.keys() == stored

    done = ran(path, "erase", *asked, "--reason", "request 4711", "--delete-after", "0s")
    assert done["figures"]["segments_before"] == len(holding) > 0
    assert SECRET.decode() not in json.dumps(done)
    assert SECRET.hex() not in json.dumps(done)
    assert not [key for key in keyed.objects.keys() if SECRET in keyed.objects.read(key)]  # noqa: SIM118
    record = json.loads(keyed.objects.read(done["figures"]["record"]))
    assert (record["requested_by"], record["reason"]) == ("me", "request 4711")
    assert archived_records(path, keyed.name) == expected
    assert_sound(path)


@pytest.mark.timeout(600)
async def test_exports_are_brought_up_to_date(  # noqa: PLR0917 - fixtures
    ran, keyed, write_kafka_config, seaweedfs, prefix, tmp_path
):
    """Two exports to Parquet files and to a table, both in S3, have each readable record once."""
    await keyed.create()
    path = write_kafka_config(topics={keyed.name: {"redpanda.remote.write": True}})
    store = {
        "s3.endpoint": seaweedfs.endpoint_url,
        "s3.access-key-id": seaweedfs.access_key,
        "s3.secret-access-key": seaweedfs.secret_key,
        "s3.region": seaweedfs.region,
    }
    properties = catalog_properties(tmp_path) | {"warehouse": f"s3://{BUCKET}/{prefix}-tables"} | store
    given = [text for item in properties.items() for text in ("--catalog-property", "=".join(item))]
    targets = {
        "parquet": ("--target", f"s3://{BUCKET}/{prefix}-lake", "--partition-by", "none"),
        "iceberg": ("--catalog", "test", *given, "--namespace", "lake.kafka", "--dot-replacement", "_"),
    }
    exported = {"parquet": 0, "iceberg": 0}
    for seed in range(2):
        await keyed.write(seed=seed)
        archive_once(path)
        for name, options in targets.items():
            report = ran(path, "export", f"{keyed.name[:-1]}?", "--target-format", name, *options)
            assert report["figures"]["records"] > 0
            exported[name] += report["figures"]["records"]

    seen = (await keyed.consumed(keyed.manifest.next_offset))["read_committed"]
    wanted = [(one.offset, one.key, one.value) for one in seen]
    assert exported == {"parquet": len(wanted), "iceberg": len(wanted)}
    rows = []
    with S3Bucket(seaweedfs.endpoint_url, bucket=BUCKET, prefix=f"{prefix}-lake") as lake:
        for key in lake.keys():  # noqa: SIM118 a method, not a mapping's
            if key.endswith(".parquet"):
                rows += pq.read_table(io.BytesIO(lake.read(key))).to_pylist()
    assert sorted((row["offset"], row["key"], row["value"]) for row in rows) == sorted(wanted)
    with load_catalog("test", **properties) as catalog:
        table = catalog.load_table(("lake", "kafka", keyed.name.replace(".", "_")))
        assert [(row["offset"], row["key"], row["value"]) for row in rows_of_table(table)] == wanted
