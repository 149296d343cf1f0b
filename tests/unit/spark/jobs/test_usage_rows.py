"""Counting partitions as executors do it, and the report of what they counted."""

from __future__ import annotations

from collections import Counter, namedtuple
from dataclasses import replace
from datetime import UTC, date, datetime

import pytest

from tests.fakes.spilling import make_parts_small
from tests.unit.spark.jobs.shelf import DAY_MS
from tieringd.formats.manifest_codec import encode_manifest
from tieringd.formats.object_keys import manifest_key
from tieringd.model.manifest_parts import Retired
from tieringd.model.segment_table import SegmentTable
from tieringd.model.spilling import spillover_expired
from tieringd.spark.jobs.prices import Prices
from tieringd.spark.jobs.usage import usage_report
from tieringd.spark.jobs.usage_rows import SCHEMA, PartitionDay, count_partitions

NAMES = tuple(column.split()[0] for column in SCHEMA.split(", "))
Row = namedtuple("Row", NAMES)  # noqa: PYI024 - as Spark's own rows are


def counted(shelf, *writers, day_of="upload") -> list[Row]:
    partitions = [one.identified for one in writers]
    return [Row(*row) for row in count_partitions(shelf.config, day_of, partitions)]


def dated(shelf, writer, days: list[int], **changes) -> None:
    """Store a manifest whose segments were uploaded so many days after the first day."""
    manifest = shelf.manifest(writer)
    rows = [
        replace(one, uploaded_at_ms=day * DAY_MS + 5, max_timestamp_ms=(day + 100) * DAY_MS)
        for one, day in zip(manifest.segments, days, strict=True)
    ]
    changed = replace(manifest, segments=SegmentTable.of(rows), **changes)
    shelf.write(manifest_key(writer.identified), encode_manifest(changed))


def test_columns_are_those_of_a_row():
    """The schema names the fields, in their order."""
    assert tuple(PartitionDay.__slots__) == NAMES


def test_segments_count_on_the_day_of_their_upload(shelf):
    """Bytes of data and index, and three requests for each."""
    writer = shelf.fill(segments=4)
    dated(shelf, writer, [0, 0, 3, 3])
    segments = shelf.manifest(writer).segments

    rows = counted(shelf, writer)

    assert [(row.day, row.segments, row.write_requests) for row in rows] == [
        (date(1970, 1, 1), 2, 6),
        (date(1970, 1, 4), 2, 6),
    ]
    assert [row.held_bytes for row in rows] == [
        sum(one.size_bytes for one in list(segments)[begin : begin + 2]) for begin in (0, 2)
    ]
    assert sum(row.index_bytes for row in rows) == sum(segments.column("index_size_bytes"))
    assert [row.day for row in counted(shelf, writer, day_of="record")] == [
        date(1970, 4, 11),
        date(1970, 4, 14),
    ]


def test_records_without_a_usable_time_count_by_their_upload(shelf):
    """No time, and one that no calendar has."""
    writer = shelf.fill(segments=2)
    manifest = shelf.manifest(writer)
    times = (-1, 2**62)
    rows = [
        replace(one, uploaded_at_ms=DAY_MS, max_timestamp_ms=time, base_timestamp_ms=-1)
        for one, time in zip(manifest.segments, times, strict=True)
    ]
    shelf.write(
        manifest_key(writer.identified), encode_manifest(replace(manifest, segments=SegmentTable.of(rows)))
    )
    (row,) = counted(shelf, writer, day_of="record")
    assert (row.day, row.segments) == (date(1970, 1, 2), 2)


def test_retired_segments_count_apart(shelf):
    """Retired segments are still in the bucket, and no reader uses them."""
    writer = shelf.fill(segments=3)
    manifest = shelf.manifest(writer)
    gone = SegmentTable.of([replace(manifest.segments[0], uploaded_at_ms=0)])
    dated(shelf, writer, [0, 0, 0], retired=(Retired(gone, 9),))

    (row,) = counted(shelf, writer)

    assert (row.segments, row.retired_segments, row.retired_bytes) == (3, 1, gone.total_bytes)
    assert row.index_bytes == sum(manifest.segments.column("index_size_bytes")) + gone[0].index_size_bytes


def test_spilled_segments_count(shelf, monkeypatch):
    """Held ones as all others; expired ones that are not deleted yet as retired."""
    make_parts_small(monkeypatch)
    writer = shelf.fill(segments=6)
    whole = shelf.manifest(writer)
    for _ in range(4):
        writer.drop_head()
    shelf.archive(writer, spill=True)
    manifest = shelf.manifest(writer)
    assert manifest.spillover.segments == 4

    (row,) = counted(shelf, writer)
    assert (row.segments, row.held_bytes, row.retired_segments) == (6, whole.size_bytes, 0)

    expired = expired_spilled(shelf, writer, 2)
    shelf.write(manifest_key(writer.identified), encode_manifest(expired))
    (row,) = counted(shelf, writer)
    assert (row.segments, row.retired_segments) == (4, 2)
    assert row.held_bytes + row.retired_bytes == whole.size_bytes


def expired_spilled(shelf, writer, segments: int):
    gone = shelf.whole_manifest(writer).segments.head(segments)
    return spillover_expired(shelf.manifest(writer), gone, now_ms=9)


def test_partition_that_cannot_be_counted_is_a_fault(shelf):
    """The others are counted all the same; one without a manifest has nothing."""
    good, bad = shelf.fill("good", segments=1), shelf.fill("bad", segments=1)
    shelf.write(manifest_key(bad.identified), b"rubbish")

    rows = counted(shelf, bad, good, shelf.writer("empty"))

    assert [(row.topic, row.day is None) for row in rows] == [("bad", True), ("good", False)]
    assert rows[0].fault.startswith("bad-0 cannot be counted: ")
    assert manifest_key(bad.identified) in rows[0].fault


Summed = namedtuple("Summed", (*NAMES, "stored_bytes"))  # noqa: PYI024 - as Spark's own rows are


def summed(topic, day, stored_bytes, **counts) -> Summed:
    whole = Counter(dict.fromkeys(NAMES, 0)) | counts
    fields = {name: counts.get(name, 0) for name in whole} | {"topic": topic, "day": day}
    return Summed(**fields | {"stored_bytes": stored_bytes})


def test_report_sums_up_and_prices():
    """The report sums up all segments by topic, and the days that were asked for."""
    first, second = date(2026, 1, 1), date(2026, 1, 5)
    gib = 1 << 30
    rows = [
        summed("a", first, gib, segments=2, held_bytes=gib, index_bytes=7, write_requests=1000),
        summed("a", second, 3 * gib, segments=1, held_bytes=gib, retired_segments=1, retired_bytes=gib),
        summed("b", second, 5, segments=1, held_bytes=5, write_requests=3),
    ]
    prices = Prices("test", "EUR", 0.5, 2.0)

    report = usage_report(rows, ["lost"], prices=prices, partitions=9, since=second, seconds=1.0)

    assert report.faults == ("lost",)
    assert (report.figures["topics"], report.figures["partitions"]) == (2, 9)
    assert (report.figures["segments"], report.figures["objects"]) == (4, 10)
    assert report.figures["write_cost"] == pytest.approx(2 * 1003 / 1000)
    assert report.figures["storage_cost_month"] == pytest.approx(1.5, abs=1e-6)
    topics, days = report.tables
    assert [row[:3] for row in topics.rows] == [("a", 3, 2 * gib), ("b", 1, 5)]
    assert [row[:6] for row in days.rows] == [
        ("a", "2026-01-05", 2, 2 * gib, gib, 3 * gib),
        ("b", "2026-01-05", 1, 5, 0, 5),
    ]
    assert days.rows[0][-1] == pytest.approx(1.5)


def test_report_without_prices_has_no_costs():
    """Nothing is made up."""
    rows = [summed("a", datetime.now(UTC).date(), 1, segments=1, held_bytes=1)]
    report = usage_report(rows, [], prices=None, partitions=1, since=None, seconds=1.0)
    assert report.figures["write_cost"] is None
    assert [row[-2:] for table in report.tables for row in table.rows] == [(None, None)] * 2
