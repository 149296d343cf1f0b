"""Spark SQL over a million archived records in a directory, with answers that Python has counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import pytest

from tests.builders import DEFAULT_TIME_MS
from tests.fakes.file_archive import FileArchive

_PARTITIONS = 4
_SEGMENTS = 5
_BATCHES = 50
_RECORDS = 1_000
_USERS = 97


@dataclass
class Answers:
    """What Python found out while it wrote."""

    records: int = 0
    spent: Counter = field(default_factory=Counter)
    purchases: Counter = field(default_factory=Counter)
    latest: dict = field(default_factory=dict)
    """Each user's last purchase in partition 0."""
    late: int = 0
    """Records in the second half of the offsets."""


@pytest.fixture(scope="module")
def million(tmp_path_factory):
    """Give an archive of a million purchases, and the answers."""
    archive, answers, random = FileArchive(tmp_path_factory.mktemp("million")), Answers(), Random(7)
    per_partition = _SEGMENTS * _BATCHES * _RECORDS
    for partition in range(_PARTITIONS):
        writer = archive.writer("purchases", partition)
        for number in range(_SEGMENTS * _BATCHES):
            values = []
            for _ in range(_RECORDS):
                user, amount = random.randrange(_USERS), random.randrange(10_000)
                answers.records += 1
                answers.spent[user] += amount
                answers.purchases[user] += 1
                answers.late += writer.next_offset + len(values) >= per_partition // 2
                if partition == 0:
                    answers.latest[user] = amount
                values.append(b"%d,%d" % (user, amount))
            writer.append(*values)
            if number % _BATCHES == _BATCHES - 1:
                writer.roll()
        archive.add(writer)
    return archive, answers


@pytest.fixture(scope="module")
def purchases(spark, million):
    """Give the name of a view over the archive."""
    archive, _ = million
    spark.sql(
        f"""
        CREATE OR REPLACE TEMPORARY VIEW archived USING tieringd
        OPTIONS (path '{archive.url}', subscribe 'purchases', minPartitions '6')
        """
    )
    spark.sql(
        """
        CREATE OR REPLACE TEMPORARY VIEW purchases AS
        SELECT partition, offset, timestamp, CAST(split(CAST(value AS STRING), ',')[0] AS INT) AS user,
               CAST(split(CAST(value AS STRING), ',')[1] AS INT) AS amount
        FROM archived
        """
    )
    return "purchases"


def test_million_records_are_counted(spark, million, purchases):
    """All records are counted, in each partition from its first offset to its last."""
    _, answers = million
    rows = spark.sql(
        f"SELECT partition, count(*) AS n, count(DISTINCT offset) AS d, min(offset) AS a, max(offset) AS b "
        f"FROM {purchases} GROUP BY partition"
    ).collect()
    each = answers.records // _PARTITIONS
    assert answers.records == 1_000_000
    assert sorted(tuple(row) for row in rows) == [
        (partition, each, each, 0, each - 1) for partition in range(_PARTITIONS)
    ]


def test_sums_by_key_are_right(spark, million, purchases):
    """Sums by key are those that Python has counted."""
    _, answers = million
    rows = spark.sql(f"SELECT user, sum(amount) AS spent, count(*) AS n FROM {purchases} GROUP BY user")
    found = {row.user: (row.spent, row.n) for row in rows.collect()}
    assert found == {user: (answers.spent[user], answers.purchases[user]) for user in answers.spent}


def test_latest_by_key_is_right(spark, million, purchases):
    """The latest value of each key is the one with the highest offset."""
    _, answers = million
    rows = spark.sql(
        f"SELECT user, max_by(amount, offset) AS amount FROM {purchases} WHERE partition = 0 GROUP BY user"
    )
    assert {row.user: row.amount for row in rows.collect()} == answers.latest


def test_one_table_may_be_used_in_many_ways(spark, million, purchases):
    """Each use filters for itself, also within one query."""
    _, answers = million
    half = answers.records // _PARTITIONS // 2
    rows = spark.sql(
        f"""
        SELECT 'late' AS what, count(*) AS n FROM {purchases} WHERE offset >= {half}
        UNION ALL SELECT 'early', count(*) FROM {purchases} WHERE offset < {half}
        UNION ALL SELECT 'all', count(*) FROM {purchases}
        """
    )
    assert {row.what: row.n for row in rows.collect()} == {
        "late": answers.late,
        "early": answers.records - answers.late,
        "all": answers.records,
    }


def test_range_of_time_is_read_alone(spark, million):
    """A start time in the middle gives the second half, without the tasks for the first half."""
    archive, answers = million
    half = answers.records // _PARTITIONS // 2
    given = {"path": archive.url, "subscribe": "purchases", "startingTimestamp": DEFAULT_TIME_MS + half}
    table = spark.read.format("tieringd").options(**given).option("columns", "offset").load()
    assert table.count() == answers.late
    assert table.agg({"offset": "min"}).first()[0] == half
