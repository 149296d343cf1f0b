"""Rows into files: one for each place, in order, whatever the batches, the limits and the times are."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tieringd.spark.jobs.export.places import HOUR_US, hours_of, split_by_place, utc
from tieringd.spark.jobs.export.row_files import Limits, RowFiles

SCHEMA = pa.schema([("offset", pa.int64()), ("timestamp", pa.timestamp("us", "UTC")), ("value", pa.binary())])
INT64 = st.integers(1 - 2**63, 2**63 - 1)
TIMES = st.lists(st.integers(-3, 3).map(lambda hour: hour * HOUR_US) | INT64 | st.none(), max_size=40)


def batch_of(times: list[int], *, first: int = 0) -> pa.RecordBatch:
    """Return records with these times and ascending offsets."""
    values = [b"%d" % (first + number) for number in range(len(times))]
    offsets = list(range(first, first + len(times)))
    return pa.RecordBatch.from_arrays(
        [pa.array(offsets), pa.array(times, pa.timestamp("us", "UTC")), pa.array(values, pa.binary())],
        schema=SCHEMA,
    )


@given(TIMES, st.integers(1, 4))
def test_split_gives_each_row_to_its_place_in_order(times, hours_in_a_place):
    """The split gives the same as a look at each row by itself."""
    batch = batch_of(times)
    found = {}

    def place_of(hour):
        return None if hour is None else hour // hours_in_a_place

    for place, rows in split_by_place(batch, place_of):
        assert place not in found
        found[place] = rows.column("offset").to_pylist()

    expected = {}
    for offset, micros in enumerate(times):
        expected.setdefault(place_of(hour_of(micros)), []).append(offset)
    assert found == expected


def hour_of(micros: int | None) -> int | None:
    """Return the hour of a time, one that calendars have."""
    if micros is None:
        return None
    return max(min(micros, 253_402_300_799_999_999), -62_135_596_800_000_000) // HOUR_US


@given(st.lists(INT64, min_size=1))
def test_every_hour_has_a_date(times):
    """An hour long before or after the present has a date too."""
    for hour, micros in zip(hours_of(pa.array(times, pa.timestamp("us"))), times, strict=True):
        assert int(hour) == hour_of(micros)
        assert 1 <= utc(int(hour)).year <= 9999


@dataclass
class Kept:
    """A sink that keeps the rows of each file."""

    hours: int = 1
    files: dict[int, pa.Table] = field(default_factory=dict)
    row_groups: dict[int, int] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)
    schema = SCHEMA
    clipped_times = 0

    def place_of(self, hour):
        return None if hour is None else hour // self.hours

    def arranged(self, batch):
        return batch

    def store(self, place, path, metadata):
        assert place not in self.files, "a place has one file"
        self.files[place] = pq.read_table(path)
        self.row_groups[place] = metadata.num_row_groups
        self.paths.append(path.name)
        return metadata.num_rows


@settings(deadline=None)  # it writes files
@given(
    st.lists(TIMES, max_size=6),
    st.builds(
        Limits,
        row_group_rows=st.integers(1, 50),
        row_group_bytes=st.integers(1, 2000),
        held_bytes=st.integers(1, 2000),
        open_files=st.integers(1, 4),
    ),
)
def test_files_hold_each_row_once_in_order_whatever_the_limits(tmp_path_factory, batches, limits):
    """Files hold each row once, even if there are more places than files may be open."""
    sink, directory = Kept(), tmp_path_factory.mktemp("files")
    files = RowFiles(sink, directory, limits)
    first = 0
    expected = {}
    for times in batches:
        files.write(batch_of(times, first=first))
        for offset, micros in enumerate(times, first):
            expected.setdefault(hour_of(micros), []).append(offset)
        first += len(times)

    stored = files.finish()

    assert {place: rows["offset"].to_pylist() for place, rows in sink.files.items()} == expected
    assert sum(stored) == first
    assert {rows["value"][0].as_py() for rows in sink.files.values()} == {
        b"%d" % offsets[0] for offsets in expected.values()
    }
    assert {path.name for path in directory.iterdir()} <= {"overflow.arrow"}


def test_row_groups_are_as_large_as_they_may_be(tmp_path):
    """A row group is as large as its limit allows, not as small as the batches that come in."""
    sink = Kept()
    files = RowFiles(sink, tmp_path, Limits(row_group_rows=100))
    for number in range(25):
        files.write(batch_of([0] * 10, first=number * 10))
    files.finish()
    assert sink.row_groups == {0: 3}


def test_memory_is_bounded_over_all_files(tmp_path):
    """The fullest one gives way."""
    sink = Kept()
    row_bytes = batch_of([0] * 100).nbytes
    files = RowFiles(sink, tmp_path, Limits(held_bytes=3 * row_bytes))
    for number in range(40):
        files.write(batch_of([(number % 4) * HOUR_US] * 100, first=number * 100))
        assert sum(file.held_bytes for file in files._open.values()) <= 3 * row_bytes
    files.finish()
    assert sum(sink.row_groups.values()) > len(sink.row_groups)


def test_files_are_compressed_with_zstd(tmp_path):
    """Each column chunk is compressed with zstd."""
    sink = Kept()
    codecs = []
    sink.store = lambda _place, _path, metadata: codecs.append(metadata.row_group(0).column(2).compression)
    files = RowFiles(sink, tmp_path)
    files.write(batch_of([0] * 10))
    files.finish()
    assert codecs == ["ZSTD"]


@pytest.mark.parametrize("rows", [0, 1])
def test_hours_of_few_rows(rows):
    """A batch may be empty."""
    assert hours_of(pa.array([5] * rows, pa.timestamp("us"))).dtype == np.int64
    assert len(list(split_by_place(batch_of([5] * rows), int))) == rows
