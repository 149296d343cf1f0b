"""The commands that look into a bucket, compared with what Kafka's own clients and files say."""

from __future__ import annotations

import pytest

from tests.e2e.archives import (
    archived_bytes,
    archived_manifest,
    assert_whole,
    base_of_active,
    closed_segments,
    read_records,
    segment_keys,
)
from tests.e2e.sample_topics import (
    APPEND_TIME,
    FIRST_TIME_MS,
    ISOLATIONS,
    SAMPLE_TOPICS,
    STEP_MS,
    TRANSACTIONS,
    codec_topic,
    consumed,
    offset_for_time,
)
from tests.support.daemon import run_command, run_json


@pytest.mark.parametrize(
    ("topic", "isolation"),
    [
        *((topic, "read_uncommitted") for topic in SAMPLE_TOPICS),
        (TRANSACTIONS, "read_committed"),
        (APPEND_TIME, "read_committed"),
    ],
)
async def test_read_gives_what_a_consumer_reads(kafka, samples, sample_objects, topic, isolation):
    """Offsets, times, keys, values and headers are those that a consumer of the same isolation gets."""
    next_offset = archived_manifest(sample_objects, topic).next_offset
    expected = [one for one in await consumed(kafka, topic, isolation) if one.offset < next_offset]

    assert read_records(samples.config, topic, "--isolation", isolation) == expected
    assert len(expected) > 50


async def test_isolation_levels_differ_on_the_transactional_sample(samples):
    """The sample has aborted records, which only the uncommitted reader sees."""
    both = [set(read_records(samples.config, TRANSACTIONS, "--isolation", one)) for one in ISOLATIONS]
    assert both[0] > both[1]


@pytest.mark.parametrize("offset", [1, 60])
async def test_read_begins_at_an_offset_and_ends_after_a_count(kafka, samples, offset):
    """An offset in the middle of a batch or segment is where reading begins, and the count is kept."""
    topic = codec_topic("lz4")
    expected = [one for one in await consumed(kafka, topic, "read_uncommitted") if one.offset >= offset]
    found = read_records(samples.config, topic, "--offset", str(offset), "--count", "23")
    assert found == expected[:23]


@pytest.mark.parametrize("step_ms", [-1, 40 * STEP_MS, 60 * STEP_MS + 1])
async def test_read_begins_at_the_offset_that_the_broker_gives_for_a_time(kafka, samples, step_ms):
    """The first record of a time is the one that the broker itself finds."""
    topic = codec_topic("zstd")
    timestamp_ms = FIRST_TIME_MS + step_ms
    expected = await offset_for_time(kafka, topic, timestamp_ms)

    found = read_records(samples.config, topic, "--timestamp", str(timestamp_ms), "--count", "1")

    assert [one.offset for one in found] == [expected]


def test_read_past_the_end_prints_nothing(samples):
    """An offset or a time after the archive's end is no error and has no records."""
    topic = codec_topic("none")
    assert read_records(samples.config, topic, "--offset", "999999") == []
    assert read_records(samples.config, topic, "--timestamp", "99999999999999") == []


@pytest.mark.parametrize("topic", [codec_topic("none"), codec_topic("zstd"), TRANSACTIONS])
def test_cat_writes_the_closed_segments(kafka, samples, topic):
    """The raw output is the concatenation of the closed segments, byte for byte."""
    closed = closed_segments(kafka.log_dir() / f"{topic}-0")
    assert archived_bytes(samples.config, topic) == b"".join(closed.values())


def test_topics_lists_every_archived_topic(kafka, samples):
    """The bucket alone says which topics it holds, with sizes, and under which cluster and id."""
    rows = {row["topic"]: row for row in run_json("archive", "topics", "-c", str(samples.config))}

    assert rows.keys() == set(SAMPLE_TOPICS)
    for topic, row in rows.items():
        closed = closed_segments(kafka.log_dir() / f"{topic}-0")
        metadata = (kafka.log_dir() / f"{topic}-0" / "partition.metadata").read_text()
        assert f"topic_id: {row['topic_id']}" in metadata
        assert (row["cluster"], row["partitions"]) == (kafka.cluster_id, 1)
        assert (row["segments"], row["size_bytes"]) == (len(closed), sum(map(len, closed.values())))


def test_describe_gives_offsets_and_sizes(kafka, samples):
    """A topic's partitions are described with the bounds of what is stored of them."""
    closed = closed_segments(kafka.log_dir() / f"{APPEND_TIME}-0")
    active = base_of_active(kafka.log_dir() / f"{APPEND_TIME}-0")

    (row,) = run_json("archive", "describe", APPEND_TIME, "-c", str(samples.config))

    assert (row["partition"], row["start_offset"], row["next_offset"]) == (0, 0, active)
    assert (row["segments"], row["size_bytes"]) == (len(closed), sum(map(len, closed.values())))
    assert (row["leader_epoch"], row["gap_offsets"]) == (0, 0)


def test_manifest_shows_every_segment(samples, sample_objects):
    """The manifest is shown as it is stored, with the key of each object."""
    topic = codec_topic("none")
    stored = archived_manifest(sample_objects, topic)

    shown = run_json("archive", "manifest", topic, "0", "--config", str(samples.config))

    assert [one["key"] for one in shown["segments"]] == segment_keys(stored)
    assert [one["crc32c"] for one in shown["segments"]] == [f"{one.crc32c:08x}" for one in stored.segments]
    assert (shown["topic"], shown["next_offset"]) == (topic, stored.next_offset)
    assert (shown["writer_id"], shown["gaps"]) == (stored.writer_id, [])


def test_deep_verify_counts_every_record(samples, sample_objects):
    """A deep scrub of everything finds no fault, and as many records and markers as there are offsets."""
    report = assert_whole(samples.config)

    assert {one["topic"] for one in report["partitions"]} == set(SAMPLE_TOPICS)
    for one in report["partitions"]:
        assert one["records"] == archived_manifest(sample_objects, one["topic"]).next_offset


def test_verify_fails_on_a_changed_byte_and_names_the_object(samples, sample_objects):
    """One byte that is not what it was makes a deep scrub exit 1 and name the object; put back, exit 0."""
    topic = codec_topic("gzip")
    key = segment_keys(archived_manifest(sample_objects, topic))[0]
    data = sample_objects.read(key)
    changed = bytearray(data)
    changed[len(data) // 2] ^= 1
    sample_objects.write(key, bytes(changed))
    try:
        done = run_command("archive", "verify", "--deep", "--topic", topic, "-c", str(samples.config))
    finally:
        sample_objects.write(key, data)

    assert done.returncode == 1
    assert key in done.stdout.decode()
    assert_whole(samples.config)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("archive", "describe", "never.archived"), id="describe"),
        pytest.param(("archive", "verify", "--topic", "never.archived"), id="verify"),
        pytest.param(("archive", "cat", "never.archived", "0"), id="cat"),
        pytest.param(("read", "never.archived", "--partition", "0"), id="read"),
    ],
)
def test_unknown_topic_is_an_error_that_names_it(samples, arguments):
    """A topic that the bucket does not hold ends a command with exit 1 and one line on standard error."""
    done = run_command(*arguments, "--config", str(samples.config))

    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode().startswith("error: the bucket holds no topic named never.archived")
    assert "Traceback" not in done.stderr.decode()


def test_unknown_partition_is_an_error_that_names_the_known_ones(samples):
    """A partition that is not archived is an error that lists those that are."""
    topic = codec_topic("none")
    done = run_command("archive", "manifest", topic, "7", "--config", str(samples.config))

    assert done.returncode == 1
    assert f"holds nothing of {topic}-7; partitions archived: 0" in done.stderr.decode()
