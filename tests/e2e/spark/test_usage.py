"""Usage on real executors: the figures are those that the manifests give by hand."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from datetime import UTC, datetime

import pytest

from tests.e2e.archives import FileObjects, archived_manifest, archived_manifests
from tests.e2e.log_files import write_partition
from tests.e2e.sample_topics import FIRST_TIME_MS, SAMPLE_TOPICS
from tests.support.command_here import run_here
from tests.support.daemon import directory_config, run_command, write_config
from tieringd.config import load_config
from tieringd.errors import ObjectNotFound
from tieringd.formats.object_keys import manifest_key
from tieringd.spark.jobs.prices import LIST_PRICES
from tieringd.spark.jobs.usage import by_topic_and_day, usage, usage_frame
from tieringd.spark.jobs.usage_rows import SCHEMA


def loaded(path):
    return load_config(path, environ=os.environ, needs_broker=False)


def day_of(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, tz=UTC).date().isoformat()


def test_archive_of_a_broker_is_counted(spark, samples, sample_objects):
    """Each segment's bytes, objects, requests and cost are counted by topic and by day of upload."""
    report = usage(spark, loaded(samples.config))
    document = json.loads(report.as_json())
    wanted = defaultdict(lambda: [0, 0, 0])
    whole = {}
    for topic in SAMPLE_TOPICS:
        manifest = archived_manifest(sample_objects, topic)
        whole[topic] = manifest
        for segment in manifest.segments:
            count = wanted[topic, day_of(segment.uploaded_at_ms)]
            count[0] += 1
            count[1] += segment.size_bytes
            count[2] += 3

    assert report.faults == ()
    assert {
        (row["topic"], row["day"]): [row["segments"], row["added_bytes"], row["write_requests"]]
        for row in document["tables"]["days"]
    } == wanted
    for row in document["tables"]["topics"]:
        manifest = whole[row["topic"]]
        index_bytes = sum(manifest.segments.column("index_size_bytes"))
        assert (row["segments"], row["held_bytes"]) == (len(manifest.segments), manifest.size_bytes)
        assert row["index_bytes"] == index_bytes
        assert row["storage_cost_month"] == pytest.approx(
            LIST_PRICES["aws"].storage_cost(manifest.size_bytes + index_bytes)
        )
    last = {row["topic"]: row["stored_bytes"] for row in document["tables"]["days"]}
    assert last == {
        row["topic"]: row["held_bytes"] + row["index_bytes"] for row in document["tables"]["topics"]
    }
    listed = [key for key in sample_objects.keys() if ".log" in key]  # noqa: SIM118 a method
    assert document["figures"]["objects"] == len(listed)


def test_days_may_be_those_of_records(spark, samples):
    """Records with a time of their own count on the day of that time."""
    document = json.loads(usage(spark, loaded(samples.config), topics=["codec*"], day_of="record").as_json())
    assert {row["day"] for row in document["tables"]["days"]} == {day_of(FIRST_TIME_MS)}


def test_frame_is_for_notebooks(spark, samples):
    """A row for each partition and day, and the same sums."""
    frame = usage_frame(spark, loaded(samples.config), topics=["codec*"])
    assert frame.schema.simpleString() == spark.createDataFrame([], SCHEMA).schema.simpleString()
    assert {row.topic for row in frame.collect()} == {one for one in SAMPLE_TOPICS if one.startswith("codec")}
    assert by_topic_and_day(frame).count() == frame.count()


@pytest.fixture
def archive(tmp_path):
    """Give the configuration of an archive in a directory; one of two partitions has lost its manifest."""
    for number in range(2):
        write_partition(tmp_path / "logs", f"orders-{number}", segments=3)
    (tmp_path / "archive").mkdir()
    properties = directory_config([tmp_path / "logs"], tmp_path / "archive", tmp_path / "state")
    path = write_config(tmp_path / "tieringd.yaml", properties)
    done = run_command("run", "--once", "--config", str(path))
    assert done.returncode == 0, done.stderr.decode()
    return path


@pytest.mark.leaves_damage("the damaged manifest stays")
def test_command_counts_and_exits_by_faults(spark, archive, tmp_path):
    """Prices of a file, for a store without any; 1 where a manifest cannot be read."""
    prices = tmp_path / "prices.yaml"
    prices.write_text("storage_gib_month: 1000000\nwrites_1000: 5\ncurrency: EUR\n")
    options = ("--config", str(archive), "--prices", str(prices), "--format", "json")
    done = run_here("spark", "usage", *options)
    assert done.returncode == 0, done.stderr.decode()
    figures = json.loads(done.stdout)["figures"]
    (orders,) = archived_manifests(FileObjects(tmp_path / "archive"), "orders").values()
    assert (figures["partitions"], figures["segments"], figures["write_requests"]) == (2, 6, 18)
    assert (figures["currency"], figures["write_cost"]) == ("EUR", pytest.approx(0.09))
    assert figures["storage_cost_month"] > 0

    (tmp_path / "archive" / manifest_key(orders.partition)).write_bytes(b"rubbish")
    done = run_here("spark", "usage", *options)
    document = json.loads(done.stdout)
    assert (done.returncode, document["figures"]["segments"]) == (1, 3)
    assert document["faults"][0].startswith("orders-0 cannot be counted")


def test_topic_that_is_not_there_is_an_error(spark, archive):
    """The error names the missing topic."""
    with pytest.raises(ObjectNotFound, match="no topic that matches paymnets"):
        usage(spark, loaded(archive), topics=["orders", "paymnets"])
