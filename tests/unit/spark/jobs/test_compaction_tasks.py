"""The report of a compaction task on its segments, and its rewritten segments."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import DEFAULT_TIME_MS
from tests.fakes.archive import archive_in, archived
from tests.fakes.log_writer import LogWriter
from tieringd.archive.segment_swap import Successor
from tieringd.formats.history_link import HistoryLink, encode_history_link
from tieringd.formats.object_keys import TopicKey, data_key, history_link_key, index_key, topic_key
from tieringd.spark.jobs.chosen import shares
from tieringd.spark.jobs.compaction_range import CompactOptions, compaction_range, compaction_ranges
from tieringd.spark.jobs.compaction_tasks import (
    BITMAP_OFFSETS,
    CompactionRun,
    KeyReader,
    KeyRow,
    RunRewriter,
    offsets_in,
)
from tieringd.spark.latest_records import CompactionRules
from tieringd.storage.file import FileStore

RULES = CompactionRules(0, None)
LATER_MS = DEFAULT_TIME_MS + 86_400_000


@pytest.fixture
async def manifest(tmp_path, config):
    """Give the manifest of three segments with keys, a tombstone, and a record without a key."""
    writer = LogWriter(tmp_path / "log")
    for keys in ([b"a", b"b", b"a"], [b"b", None, b"c"], [b"a", b"a", b"d"]):
        writer.append(b"1", None, b"3", keys=keys)
        writer.roll()
    return await archived(writer, archive_in(FileStore(config.cloud_storage_file_root)))


def rows_of(config, manifest, *, keys_held_max=100, rules=RULES) -> list[KeyRow]:
    reader = KeyReader(config, {4: rules}, keys_held_max=keys_held_max)
    (share,) = shares(manifest.partition, manifest.segments)
    return list(reader((4, share)))


def summary(row: int, records: int, keyless: int = 0, fault: str | None = None) -> KeyRow:
    return KeyRow(4, row, None, -1, row, records=records, keyless=keyless, fault=fault)


def test_task_tells_the_latest_of_each_key_and_sums_up(config, manifest):
    """A task reports the latest record of each key in each of its segments. Spark finds the latest of all."""
    rules = CompactionRules(0, LATER_MS)
    assert rows_of(config, manifest, rules=rules) == [
        KeyRow(4, -1, b"a", 2, 0),
        KeyRow(4, -1, b"b", 1, 0, is_due=True),
        summary(0, 3),
        KeyRow(4, -1, b"b", 3, 1),
        KeyRow(4, -1, b"c", 5, 1),
        summary(1, 3, keyless=1),
        KeyRow(4, -1, b"a", 7, 2, is_due=True),
        KeyRow(4, -1, b"d", 8, 2),
        summary(2, 3),
    ]


async def test_keys_are_handed_on_before_they_are_too_many(tmp_path, config):
    """A key is reported several times then, and the last time is right."""
    writer = LogWriter(tmp_path / "many")
    for number in range(20):
        writer.append(b"x", keys=[b"%d" % (number % 5)])
    writer.roll()
    manifest = await archived(writer, archive_in(FileStore(config.cloud_storage_file_root)))
    rows = rows_of(config, manifest, keys_held_max=2)
    told = defaultdict(list)
    for row in rows[:-1]:
        told[row.key].append(row.offset)
    assert {key: max(offsets) for key, offsets in told.items()} == {b"%d" % n: 15 + n for n in range(5)}
    assert max(len(offsets) for offsets in told.values()) > 1
    assert rows[-1] == summary(0, 20)


@pytest.mark.parametrize("name", [data_key, index_key])
@pytest.mark.parametrize("data", [None, b"damaged"])
def test_segment_that_cannot_be_read_is_told(config, manifest, name, data):
    """The others are read all the same; the driver leaves the partition alone."""
    path = config.cloud_storage_file_root / name(manifest.partition, manifest.segments[1])
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)
    found = [row for row in rows_of(config, manifest) if row.summary_of >= 0]
    assert [bool(row.fault) for row in found] == [False, True, False]
    assert path.name.removesuffix(".index") in found[1].fault


def rewritten(config, manifest, offsets, rules=RULES, *, removed_records):
    run = CompactionRun(manifest.partition, tuple(manifest.segments)[:2], rules, removed_records)
    runs = SimpleNamespace(value=[None, run])
    rows = [
        SimpleNamespace(run=1, bucket=bucket, bits=bits)
        for bucket, bits in [(None, None), *sorted(bitmaps_of(offsets))]
    ]
    (done,) = RunRewriter(config, runs, "rewritten-0a")(iter(rows))
    return done


def test_run_becomes_what_the_winners_say(config, manifest):
    """A run without winners keeps only what has no key."""
    number, successor = rewritten(config, manifest, [2, 3], removed_records=3)
    assert (number, type(successor)) == (1, Successor)
    assert (successor.removed_records, successor.segment.last_offset) == (3, 5)
    _, keyless = rewritten(config, manifest, [], removed_records=5)
    assert keyless.removed_records == 5
    _, nothing = rewritten(
        config, manifest, [], CompactionRules(0, None, drops_keyless=True), removed_records=6
    )
    assert (nothing.removed_records, nothing.segment.size_bytes) == (6, 0)


def test_run_that_cannot_be_read_is_told(config, manifest):
    """The partition of an unreadable run stays as it is."""
    path = config.cloud_storage_file_root / data_key(manifest.partition, manifest.segments[0])
    path.unlink()
    number, fault = rewritten(config, manifest, [2, 3], removed_records=3)
    assert number == 1
    assert path.name in fault


@pytest.mark.parametrize("offsets", [[], [2], [1, 2, 3]])
def test_run_loses_what_was_counted_and_nothing_else(config, manifest, offsets):
    """Spark reads keys again where it has lost some: what it finds then may be less."""
    number, fault = rewritten(config, manifest, offsets, removed_records=3)
    assert number == 1
    assert "instead of the planned 3. Run the job again" in fault


def bitmaps_of(offsets) -> list[tuple[int, bytes]]:
    """Return bitmaps as Spark makes them of offsets plus one: buckets from 1 on, and bits from the lowest."""
    buckets = defaultdict(lambda: bytearray(BITMAP_OFFSETS // 8))
    for offset in offsets:
        position = offset % BITMAP_OFFSETS
        buckets[offset // BITMAP_OFFSETS + 1][position // 8] |= 1 << position % 8
    return [(bucket, bytes(bits)) for bucket, bits in buckets.items()]


@given(
    st.sets(
        st.integers(0, 70_000) | st.sampled_from([0, 7, 8, BITMAP_OFFSETS - 1, BITMAP_OFFSETS, 2**40, 2**62])
    )
)
def test_offsets_come_out_of_bitmaps_ascending(offsets):
    """All that went in, and nothing else."""
    assert offsets_in(reversed(bitmaps_of(offsets))).tolist() == sorted(offsets)


@pytest.mark.parametrize(("lag_ms", "segments"), [(0, 3), (1, 3), (2, 2), (5, 1), (8, 0)])
def test_young_segments_and_what_follows_stay(manifest, lag_ms, segments):
    """The three end 6, 3 and 0 milliseconds before the newest record's time."""
    now_ms = manifest.segments[2].max_timestamp_ms + 1
    options = CompactOptions(min_compaction_lag_ms=lag_ms)
    found = compaction_range(manifest, options, now_ms=now_ms, has_history=False)
    assert len(found.segments) == segments


def test_segment_without_times_is_as_old_as_its_upload(manifest):
    """The age of such a segment counts from its upload, so it is compacted neither never nor too early."""
    for now_ms, segments in [(DEFAULT_TIME_MS + 9, 0), (DEFAULT_TIME_MS + 10, 1)]:
        (first, *_) = manifest.segments
        timeless = manifest.compacted([replace(first, max_timestamp_ms=-1, writer_id="0c")], now_ms=0)
        options = CompactOptions(min_compaction_lag_ms=10)
        found = compaction_range(timeless, options, now_ms=now_ms, has_history=False)
        assert len(found.segments) == segments


@pytest.mark.parametrize(("lag_ms", "segments"), [(0, 3), (10, 3), (21, 0)])
def test_segment_from_the_future_is_as_old_as_its_upload(manifest, lag_ms, segments):
    """One record of a client whose clock was wrong keeps nothing from being compacted, now or for ever."""
    now_ms = DEFAULT_TIME_MS + 20
    first = manifest.segments[0]
    ahead = replace(first, max_timestamp_ms=now_ms * 1_000, writer_id="0c")
    found = compaction_range(
        manifest.compacted([ahead], now_ms=0),
        CompactOptions(min_compaction_lag_ms=lag_ms),
        now_ms=now_ms,
        has_history=False,
    )
    assert len(found.segments) == segments


def test_tombstones_stay_where_the_topic_goes_on_from_an_older_archive(bucket, manifest):
    """The records that they hide may lie in the older archive."""
    options = CompactOptions(delete_retention_ms=5)
    (found,) = bucket.run(compaction_ranges(bucket, [manifest], options, now_ms=100))
    assert found.rules == CompactionRules(0, 95)

    partition = manifest.partition
    key = topic_key(partition)
    link = encode_history_link(HistoryLink(key, TopicKey("old", "orders", "A" * 22), ((0, 0),)))
    path = bucket.config.cloud_storage_file_root / history_link_key(key)
    path.parent.mkdir(parents=True)
    path.write_bytes(link)
    (found,) = bucket.run(compaction_ranges(bucket, [manifest], options, now_ms=100))
    assert found.rules == CompactionRules(0, None)
