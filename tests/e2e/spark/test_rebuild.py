"""Rebuild on real executors: a real archive without one of its manifests reads back as before."""

from __future__ import annotations

import json
import os

import pytest

from tests.e2e.archives import FileObjects, archived_manifest, assert_whole, read_records
from tests.e2e.log_files import write_partition
from tests.e2e.sample_topics import CODECS, ISOLATIONS, SAMPLE_TOPICS, TRANSACTIONS
from tests.e2e.spark.copies import copied_archive
from tests.support.command_here import run_here
from tests.support.daemon import directory_config, run_command, run_json, write_config
from tieringd.config import load_config
from tieringd.spark.jobs.rebuild import UNDECIDED, rebuild
from tieringd.spark.jobs.scrub import scrub

DESCRIBED = ("topic", "partition", "start_offset", "next_offset", "segments", "size_bytes", "leader_epoch")


def loaded(path):
    return load_config(path, environ=os.environ, needs_broker=False)


def lose_manifests(root) -> None:
    """Remove everything but data objects and their indexes."""
    for path in root.rglob("*"):
        if path.is_file() and "meta" in path.relative_to(root).parts:
            path.unlink()


def described(config, topic):
    rows = run_json("archive", "describe", topic, "--config", str(config))
    return [{name: row[name] for name in DESCRIBED} | {"gaps": row["gap_offsets"]} for row in rows]


def test_archive_of_a_broker_comes_back(spark, samples, sample_objects, tmp_path):
    """Every codec, transactions and append times: the same records, in both isolation levels."""
    config, root = copied_archive(sample_objects, tmp_path)
    topics = (*SAMPLE_TOPICS[: len(CODECS) : 2], *SAMPLE_TOPICS[len(CODECS) :])
    before = {topic: (read_records(config, topic), described(config, topic)) for topic in topics}
    committed = read_records(config, TRANSACTIONS, "--isolation", ISOLATIONS[1])
    times = [row.timestamp_ms for row in before[topics[0]][0]]
    lose_manifests(root)
    assert run_json("archive", "topics", "--config", str(config)) == []

    told = []
    report = rebuild(spark, loaded(config), write=True, progress=lambda *one: told.append(one))

    assert report.faults == ()
    assert report.figures["partitions_written"] == len(SAMPLE_TOPICS)
    assert told[-1] == ("read what is stored", len(SAMPLE_TOPICS), len(SAMPLE_TOPICS))
    assert {topic: (read_records(config, topic), described(config, topic)) for topic in topics} == before
    assert read_records(config, TRANSACTIONS, "--isolation", ISOLATIONS[1]) == committed
    assert committed != before[TRANSACTIONS][0]
    middle = times[len(times) // 2]
    assert read_records(config, topics[0], "--timestamp", str(middle))[0].timestamp_ms == middle
    assert_whole(config)
    assert scrub(spark, loaded(config)).faults == ()


def test_lost_indexes_come_back_with_their_transactions(spark, samples, sample_objects, tmp_path):
    """Aborted records stay hidden without any index of the transactional topic."""
    config, root = copied_archive(sample_objects, tmp_path)
    before = {one: read_records(config, TRANSACTIONS, "--isolation", one) for one in ISOLATIONS}
    lose_manifests(root)
    indexes = [path for path in root.rglob("*.index") if TRANSACTIONS in path.parts]
    for path in indexes:
        path.unlink()

    report = rebuild(spark, loaded(config), topics=[TRANSACTIONS], write=True)

    # Transactions at the end may end in what was never archived: their segments are told of, and left out.
    found = {one: read_records(config, TRANSACTIONS, "--isolation", one) for one in ISOLATIONS}
    for level, records in found.items():
        assert records == before[level][: len(records)]
    assert all(UNDECIDED in fault for fault in report.faults)
    # The long transaction that goes on past the first segment ends in the second one.
    first = archived_manifest(sample_objects, TRANSACTIONS).segments[0]
    assert found["read_uncommitted"][-1].offset >= first.last_offset - 1, "it may end in a marker"
    assert found["read_uncommitted"] != found["read_committed"]
    assert scrub(spark, loaded(config), topics=[TRANSACTIONS]).faults == ()


@pytest.fixture
def archive(tmp_path):
    """Give the configuration of a small archive in a directory."""
    write_partition(tmp_path / "logs", "orders-0", segments=4)
    (tmp_path / "archive").mkdir()
    properties = directory_config([tmp_path / "logs"], tmp_path / "archive", tmp_path / "state")
    path = write_config(tmp_path / "tieringd.yaml", properties)
    done = run_command("run", "--once", "--config", str(path))
    assert done.returncode == 0, done.stderr.decode()
    return path


def test_command_is_a_dry_run_until_it_is_told_to_write(spark, archive):
    """The command writes only with `--write`, and a daemon goes on from the written manifest."""
    root = archive.parent / "archive"
    before = described(archive, "orders")
    lose_manifests(root)
    stored = FileObjects(root).keys()
    options = ("--config", str(archive), "--format", "json")

    done = run_here("spark", "rebuild", *options)
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(done.stdout)["tables"]["partitions"][0]["outcome"] == "would be written"
    assert FileObjects(root).keys() == stored

    done = run_here("spark", "rebuild", *options, "--write")
    assert done.returncode == 0, done.stderr.decode()
    assert described(archive, "orders") == before
    done = run_command("run", "--once", "--config", str(archive))
    assert done.returncode == 0, done.stderr.decode()
    assert_whole(archive)
