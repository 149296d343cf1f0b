"""Which runs a merge does at once: those of later portions are planned when their turn comes."""

from __future__ import annotations

import pytest

from tests.fakes.local_spark import LocalSpark
from tieringd.formats.object_keys import manifest_key
from tieringd.spark.bucket import Bucket
from tieringd.spark.jobs.chosen import chosen_partitions
from tieringd.spark.jobs.merge import merge, portions

SEGMENTS = 8
RUN_OFFSETS = 6
"""Two segments of three records each."""


@pytest.fixture
def writers(shelf):
    return [shelf.fill(partition=number, segments=SEGMENTS) for number in range(2)]


@pytest.fixture
def bucket(shelf, writers):
    """Give the bucket, of which two segments fit into one."""
    size_bytes = max(one.size_bytes for one in shelf.manifest(writers[0]).segments)
    sizes = {
        "cloud_storage_segment_size_target": 2 * size_bytes,
        "cloud_storage_segment_size_min": size_bytes,
    }
    bucket = Bucket(shelf.config.model_copy(update=sizes))
    yield bucket
    bucket.close()


def planned(bucket, faults, *, runs_max):
    partitions = bucket.run(chosen_partitions(bucket, ["orders"])).partitions
    return portions(bucket, partitions, faults, with_log=(), runs_max=runs_max)


def runs(some):
    """Return where runs begin, as numbers of runs, each with its partition."""
    return [(one.partition.partition, one.parts[0].base_offset // RUN_OFFSETS) for one in some]


@pytest.mark.parametrize("runs_max", [1, 3, 4, 8, 9])
def test_portions_are_all_runs_in_order(bucket, runs_max):
    """All portions together are all runs in order, however many runs a portion has."""
    faults = []
    found = [runs(some) for some in planned(bucket, faults, runs_max=runs_max)]
    assert [len(some) for some in found[:-1]] == [runs_max] * (len(found) - 1)
    assert [one for some in found for one in some] == [(part, run) for part in range(2) for run in range(4)]
    assert faults == []


def test_report_names_the_partitions_that_are_left_out(shelf, writers):
    """A partition without a manifest is new, or its manifest is lost: it is no fault, and is named."""
    assert [one.title for one in merge(LocalSpark(), shelf.config, topics=["orders"]).tables] == [
        "partitions"
    ]
    shelf.remove(manifest_key(writers[1].identified))

    report = merge(LocalSpark(), shelf.config, topics=["orders"])

    assert (report.faults, report.figures["partitions"]) == ((), 1)
    (row,) = report.tables[-1].rows
    assert (report.tables[-1].title, row[:2]) == ("partitions left out", ("orders", 1))


def test_later_portions_are_planned_of_what_there_is_by_then(shelf, bucket, writers):
    """Here a partition has grown; as well it could have been merged, or expired."""
    found = planned(bucket, [], runs_max=3)
    some = [runs(next(found))]
    shelf.fill(partition=1, segments=2)
    some += map(runs, found)
    assert some == [
        [(0, 0), (0, 1), (0, 2)],
        [(0, 3), (1, 0), (1, 1)],
        [(1, 2), (1, 3), (1, 4)],
    ]


def test_partition_that_cannot_be_read_by_then_is_told(shelf, bucket, writers):
    """The others are merged."""
    faults = []
    found = planned(bucket, faults, runs_max=3)
    next(found)
    shelf.write(manifest_key(writers[0].identified), b"damaged")
    assert [one for some in found for one in runs(some)] == [(1, run) for run in range(4)]
    (fault,) = faults
    assert fault.startswith("orders-0: ")
