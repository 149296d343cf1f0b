"""What Spark makes of the keys of a compaction: by hash and not by sort, and in small rows."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from tieringd.spark.jobs.compact import bitmaps_of_runs, latest_rows
from tieringd.spark.jobs.compaction_tasks import BITMAP_OFFSETS, KEY_SCHEMA, KeyRow, offsets_in


@pytest.fixture(scope="module")
def rows():
    """Give keys of two partitions, reported by each segment, and summaries; one of them has a fault."""
    random = Random(1)
    rows = [
        KeyRow(partition, -1, b"key-%d" % random.randrange(40), row * 100 + at, row, random.random() < 0.3)
        for partition in range(2)
        for row in range(5)
        for at in range(60)
    ]
    rows += [KeyRow(0, row, None, -1, row, records=100 + row, keyless=row) for row in range(5)]
    return [*rows, KeyRow(1, 0, None, -1, 0, fault="the object is gone")]


def test_latest_of_each_key_is_found_by_hash(spark, rows):
    """A maximum over a struct with a string made Spark sort all keys."""
    found = latest_rows(spark.createDataFrame(rows, KEY_SCHEMA))
    latest = {}
    for row in rows:
        name = row.partition, row.summary_of, row.key, row.fault
        if name not in latest or latest[name].offset < row.offset:
            latest[name] = row

    fields = [name for name in KeyRow._fields if name != "key"]
    assert set(found.columns) == set(fields)
    assert sorted(map(repr, (tuple(row[name] for name in fields) for row in found.collect()))) == sorted(
        repr(tuple(getattr(row, name) for name in fields)) for row in latest.values()
    )
    plan = found._jdf.queryExecution().toString()
    assert "HashAggregate" in plan
    assert "SortAggregate" not in plan
    assert "ObjectHashAggregate" not in plan


def test_survivors_that_are_far_apart_come_in_small_rows(spark):
    """A run of 2^31 offsets had all its bitmaps in one row: 256 MiB for some thousand offsets."""
    runs, apart = 3, 40
    expected = {run: [run + apart * BITMAP_OFFSETS * number for number in range(20)] for run in (0, 2)}
    winners = [(run, offset) for run, offsets in expected.items() for offset in offsets]
    todo = bitmaps_of_runs(spark.createDataFrame(winners, "run int, offset bigint"), runs=runs)

    found = {run: [] for run in range(runs)}
    for rows in todo.rdd.glom().collect():
        assert [row.run for row in rows] == sorted(row.run for row in rows)
        for row in rows:
            found[row.run].append(row)
    assert all(len(row.bits) == BITMAP_OFFSETS // 8 for some in found.values() for row in some if row.bits)
    for run, some in found.items():
        assert [row.bits for row in some].count(None) == 1
        offsets = offsets_in((row.bucket, row.bits) for row in some if row.bits is not None)
        assert np.array_equal(offsets, expected.get(run, []))
