"""Recovery of topics into a live cluster: the same records in the same order, each of them once."""

# Long: recoveries are killed and go on, in front of a broker of their own.

from __future__ import annotations

import asyncio
import signal
import subprocess

import pytest
import yaml
from aiokafka import TopicPartition as ClientPartition
from aiokafka.errors import GroupCoordinatorNotAvailableError, GroupLoadInProgressError

from tests.e2e.archives import archived_manifest, closed_segments
from tests.e2e.sample_topics import (
    APPEND_TIME,
    CODECS,
    SAMPLE_TOPICS,
    SEGMENTS,
    TRANSACTIONS,
    codec_topic,
    consumed,
)
from tests.fakes.log_writer import LogWriter
from tests.support.daemon import directory_config, run_command, run_json, run_well, write_config
from tests.support.warm_start import start_command
from tieringd.formats.record_batch import parse_header

_BATCHES = 40
_PER_BATCH = 2_000


@pytest.fixture
def target(fresh):
    """Give a running broker of a cluster of its own."""
    return fresh


def config_for(target, source_config, path):
    """Write a configuration with the bucket of *source_config*, beside the target cluster."""
    config = yaml.safe_load(source_config.read_text())
    config["broker"] = {"kind": "kafka", "log_dirs": [str(target.log_dir())], "bootstrap": [target.bootstrap]}
    return write_config(path, config)


def recover(config, topics, *options):
    return run_json("recover", "cluster", "--topics", topics, "--config", str(config), *options)


def told(config, topics, *options):
    """Return what a recovery says that is refused."""
    done = run_command("recover", "cluster", "--topics", topics, "--config", str(config), *options)
    assert done.returncode in {1, 2}
    return done.stderr.decode()


def content(records):
    """Return all fields of records but their offsets and the kind of their timestamps."""
    return [(one.timestamp_ms, one.key, one.value, one.headers) for one in records]


# Long: every record of every kind of topic, produced anew.
async def test_every_kind_of_topic_is_written_record_by_record(
    kafka, target, samples, sample_objects, tmp_path
):
    """Keys, values, headers and times, committed records only, compressed as they were."""
    config = config_for(target, samples.config, tmp_path / "target.yaml")
    rows = recover(config, "|".join(one.replace(".", r"\.") for one in SAMPLE_TOPICS), "--prefix", "back.")
    assert {row["from_topic"] for row in rows} == set(SAMPLE_TOPICS)
    for row in rows:
        end = archived_manifest(sample_objects, row["from_topic"]).next_offset
        wanted = [
            one for one in await consumed(kafka, row["from_topic"], "read_committed") if one.offset < end
        ]
        await target.produce(row["topic"], [b"end"])
        found = (await consumed(target, row["topic"], "read_committed"))[:-1]
        assert content(found) == content(wanted)
        assert {one.timestamp_type for one in found} == {"CreateTime"}
        assert (row["records"], row["new_records"], row["next_source"]) == (len(wanted), len(wanted), end)
        assert (row["first_source"], row["last_source"]) == (wanted[0].offset, wanted[-1].offset)
        assert (row["first_target"], row["last_target"]) == (found[0].offset, found[-1].offset)
        assert (row["retention_ms"], row["validation"]) == ("-1", "passed")
    for number, codec in enumerate(CODECS):
        log = min((target.log_dir() / f"back.{codec_topic(codec)}-0").glob("*.log"))
        assert parse_header(log.read_bytes()).codec == number


async def test_uncommitted_records_come_where_they_are_asked_for(
    kafka, target, samples, sample_objects, tmp_path
):
    """Aborted ones too then, compressed as told, under a name by a pattern."""
    config = config_for(target, samples.config, tmp_path / "target.yaml")
    (row,) = recover(
        *(config, TRANSACTIONS.replace(".", r"\."), "--isolation", "read_uncommitted"),
        *("--rename", r"tx\.(.*)=all-\1", "--compression", "zstd", "--topic-config", "segment.bytes=1048576"),
    )
    assert row["topic"] == "all-aborted_and-committed"
    end = archived_manifest(sample_objects, TRANSACTIONS).next_offset
    wanted = [one for one in await consumed(kafka, TRANSACTIONS, "read_uncommitted") if one.offset < end]
    await target.produce(row["topic"], [b"end"])
    assert content((await consumed(target, row["topic"], "read_committed"))[:-1]) == content(wanted)
    segments = closed_segments(target.log_dir() / f"{row['topic']}-0")
    assert segments
    assert {parse_header(one).codec for one in segments.values()} == {4}
    again = told(config, TRANSACTIONS.replace(".", r"\."), "--rename", r"tx\.(.*)=all-\1")
    assert "was begun with --isolation read_uncommitted" in again


@pytest.fixture
def large(tmp_path, target, topic):
    """Give the archive of a topic with many records in two partitions, and what they are."""
    values = {}
    for number in range(2):
        writer = LogWriter(tmp_path / "old", topic, number)
        for batch in range(_BATCHES):
            writer.append(*(b"%d-%d-%d " % (number, batch, each) * 10 for each in range(_PER_BATCH)))
            if batch % 10 == 9:
                writer.roll()
        values[number] = list(writer.values().values())
    config = write_config(
        tmp_path / "old.yaml", directory_config([tmp_path / "old"], tmp_path / "bucket", tmp_path / "state")
    )
    assert run_command("run", "--once", "--config", str(config)).returncode == 0
    return config_for(target, config, tmp_path / "new.yaml"), values


async def values_of(target, topic, number):
    await target.produce(topic, [b"end"], partition=number)
    return [one.value for one in (await consumed(target, topic, "read_committed", number))[:-1]]


def killed_after(seconds, arguments):
    """Run a command for so long at most; return its exit code, or None when it was killed."""
    process = start_command(*arguments)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


async def mark_of(target, topic, name):
    """Return how far *topic* is written to partition 0 of *name*, as the target cluster knows; -1 before."""
    async with target.admin() as admin:
        try:
            listed = await admin.list_consumer_groups()
        except (GroupCoordinatorNotAvailableError, GroupLoadInProgressError):
            return -1  # The recovery is the first to use groups of this cluster.
        groups = [group for group, *_ in listed if f"-{topic}-" in group]
        partition = ClientPartition(name, 0)
        offsets = [(await admin.list_consumer_group_offsets(group)).get(partition) for group in groups]
        return max([one.offset for one in offsets if one is not None], default=-1)


async def killed_in_between(target, topic, name, arguments):
    """Run a recovery until it has written a part of *name*, and kill it; return whether it was in time."""
    process = start_command(*arguments)
    while process.poll() is None:
        if 0 < await mark_of(target, topic, name) < _BATCHES * _PER_BATCH:
            break
        await asyncio.sleep(0.02)
    process.kill()
    code = process.wait()
    assert code in {0, -signal.SIGKILL}
    return code != 0


async def test_killed_recovery_goes_on_where_it_ended(target, large, topic):
    """Each record is there once, in its order, however often and whenever the recovery is killed."""
    config, values = large
    for attempt in range(20):
        name = f"{topic}.{attempt}"
        options = ("--suffix", f".{attempt}", "--config", str(config))
        arguments = ("recover", "cluster", "--topics", topic.replace(".", r"\."), *options)
        if await killed_in_between(target, topic, name, arguments):
            break
        # On a busy machine a recovery may end before its marks are seen.
    else:
        pytest.fail("each recovery ended before it was killed")
    seconds = 0.5
    while (ended := killed_after(seconds, arguments)) is None:
        seconds *= 1.25
    assert ended == 0
    rows = run_json(*arguments)
    assert [(row["records"], row["new_records"]) for row in rows] == [(_BATCHES * _PER_BATCH, 0)] * 2
    for number, wanted in values.items():
        assert await values_of(target, name, number) == wanted


async def test_newest_part_is_written(target, large, topic):
    """The limits are those of a restore; the records before them stay in the archive."""
    config, values = large
    rows = recover(config, topic.replace(".", r"\."), "--last-bytes", "1", "--suffix", ".newest")
    assert [row["first_source"] for row in rows] == [_BATCHES * _PER_BATCH * 3 // 4] * 2
    newest = values[1][_BATCHES * _PER_BATCH * 3 // 4 :]
    assert await values_of(target, f"{topic}.newest", 1) == newest


async def test_topic_that_is_not_ours_is_left_alone(target, large, topic):
    """An option allows it, but not where the topic would not keep the written records."""
    config, values = large
    pattern = topic.replace(".", r"\.")
    await target.create_topic(topic, partitions=2, configs=SEGMENTS)
    await target.produce(topic, [b"mine"])
    assert "no recovery of this archive created" in told(config, pattern)
    recover(config, pattern, "--into-existing")
    assert await values_of(target, topic, 0) == [b"mine", *values[0]]
    await target.create_topic(f"{topic}.few", configs=SEGMENTS)
    assert "has 1 partitions, and the archived topic has 2" in told(
        config, pattern, "--into-existing", "--suffix", ".few"
    )
    await target.create_topic(f"{topic}.short", partitions=2)
    assert "retention.ms=604800000" in told(config, pattern, "--into-existing", "--suffix", ".short")
    assert "retention.bytes=5" in told(
        config, pattern, "--suffix", ".new", "--topic-config", "retention.bytes=5"
    )
    await target.create_topic(
        f"{topic}.stamped", partitions=2, configs=SEGMENTS | {"message.timestamp.type": "LogAppendTime"}
    )
    assert "would replace the timestamps of the records" in told(
        config, pattern, "--into-existing", "--suffix", ".stamped"
    )


async def test_topic_that_was_deleted_since_is_written_anew(target, large, topic):
    """The marks of an earlier topic of that name do not count for the new one."""
    config, values = large
    pattern = topic.replace(".", r"\.")
    recover(config, pattern)
    await target.delete_topic(topic)
    rows = recover(config, pattern)
    assert [row["new_records"] for row in rows] == [_BATCHES * _PER_BATCH] * 2
    assert await values_of(target, topic, 0) == values[0]


def test_cluster_that_cannot_be_reached_is_said(samples, target, tmp_path):
    """The error names the address of the cluster, and nothing is read or written."""
    config = yaml.safe_load(config_for(target, samples.config, tmp_path / "t.yaml").read_text())
    config["broker"]["bootstrap"] = ["127.0.0.1:1"]
    path = write_config(tmp_path / "unreachable.yaml", config)
    assert "127.0.0.1:1" in told(path, APPEND_TIME.replace(".", r"\."))
    assert run_well("recover", "list", "--config", str(path))
