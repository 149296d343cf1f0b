"""Runs of segments that lose records: what is joined, up to which size, and how old it counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.model.values import remote, stored
from tieringd.formats.segment_scan import SegmentScanner
from tieringd.model.manifest_parts import Gap, Replacement
from tieringd.model.segment import NO_TIMESTAMP
from tieringd.policies.retention_time import retention_time_ms
from tieringd.policies.rewriting import Remainder, plan_rewrites, rewritten_segment
from tieringd.policies.segment_merge import FILE_BYTES_MAX, RUN_SEGMENTS_MAX

RECORDS = 10


def rows(count):
    return [remote(100 * number, 100 * number + 99, size_bytes=1000) for number in range(count)]


def planned(kept, *, target_bytes=10**9, manifest=None, segments=None, joined_up_to=None):
    """Return the bases of the segments of each run, given how many of ten records each one keeps."""
    segments = segments or rows(len(kept))
    remainders = [Remainder(one, RECORDS, count) for one, count in zip(segments, kept, strict=True)]
    found = plan_rewrites(
        manifest or stored(segments), remainders, target_bytes=target_bytes, joined_up_to=joined_up_to
    )
    return [[one.segment.base_offset for one in run] for run in found]


@pytest.mark.parametrize(
    ("kept", "target_bytes", "expected"),
    [
        pytest.param([10, 10, 10], 10**9, [], id="nothing goes"),
        pytest.param([], 10**9, [], id="no segments"),
        pytest.param([5, 5, 5], 10**9, [[0, 100, 200]], id="all in one"),
        pytest.param([5, 5, 5], 1000, [[0, 100], [200]], id="up to the target"),
        pytest.param([5, 5, 5], 999, [[0], [100], [200]], id="one byte less"),
        pytest.param([10, 5, 10, 5, 10], 10**9, [[100, 200, 300]], id="what stays is joined between two"),
        pytest.param([10, 5, 10, 10], 10**9, [[100]], id="and at no end"),
        pytest.param([5, 10, 5], 1500, [[0], [200]], id="nor where it does not fit"),
        pytest.param([0, 0, 0], 1, [[0, 100, 200]], id="nothing is left"),
        pytest.param([9, 10, 10, 9], 2000, [[0], [300]], id="run that ends in what stays is cut"),
    ],
)
def test_runs_are_as_long_as_the_target_lets_them(kept, target_bytes, expected):
    """
    A run is as long as the expected remainder allows.

    A segment that loses nothing only joins between two that do.
    """
    assert planned(kept, target_bytes=target_bytes) == expected


def test_nothing_is_joined_over_a_border():
    """No run crosses the first offset of a leader epoch, or one where another leader's log took over."""
    segments = rows(4)
    parted = replace(stored(segments), epochs=((1, 0), (2, 200)))
    assert planned([5] * 4, manifest=parted, segments=segments) == [[0, 100], [200, 300]]
    replaced = replace(stored(segments), replacements=(Replacement(100, 199, 3, 0),))
    assert planned([5] * 4, manifest=replaced, segments=segments) == [[0], [100], [200, 300]]


def test_what_a_log_may_still_hold_is_rewritten_and_not_joined():
    """An unclean election could cut the archive inside of what was joined, from before the log's start."""
    assert planned([5] * 5, joined_up_to=300) == [[0, 100, 200], [300], [400]]
    assert planned([5] * 3, joined_up_to=299) == [[0, 100], [200]]
    assert planned([5, 10, 5], joined_up_to=0) == [[0], [200]]


def test_nothing_is_joined_over_a_gap():
    """Offsets that are not archived stay a gap."""
    segments = rows(2)
    later = remote(300, 399, size_bytes=1000)
    manifest = stored(segments).with_gap(Gap(200, 299, "lost", 0)).appended([later])
    assert planned([5] * 3, manifest=manifest, segments=[*segments, later]) == [[0, 100], [300]]


class CountedRemainder(Remainder):
    """A segment of which each look at its expected size is counted."""

    looks = 0

    @property
    def expected_bytes(self):
        type(self).looks += 1
        return super().expected_bytes


def test_long_runs_are_added_up_once():
    """A long run is added up once, not for each segment. A plan of a million small segments took minutes."""
    segments = rows(RUN_SEGMENTS_MAX)
    remainders = [CountedRemainder(one, RECORDS, 1) for one in segments]
    (run,) = plan_rewrites(stored(segments), remainders, target_bytes=10**9)
    assert len(run) == RUN_SEGMENTS_MAX
    assert CountedRemainder.looks <= 2 * RUN_SEGMENTS_MAX


def test_run_has_no_more_segments_than_one_task_can_hold():
    """A run has no more offsets than a broker's index can express from its base."""
    kept = [0] * (RUN_SEGMENTS_MAX + 1)
    assert [len(run) for run in planned(kept)] == [RUN_SEGMENTS_MAX, 1]
    wide = [remote(0, FILE_BYTES_MAX - 1), remote(FILE_BYTES_MAX, FILE_BYTES_MAX + 9)]
    assert planned([0, 0], segments=wide) == [[0], [FILE_BYTES_MAX]]
    narrow = [remote(0, FILE_BYTES_MAX - 1), remote(FILE_BYTES_MAX, FILE_BYTES_MAX)]
    assert planned([0, 0], segments=narrow) == [[0, FILE_BYTES_MAX]]


def test_joined_segments_fit_into_a_file_whatever_is_left():
    """Records that stay may be the large ones: a few of them may be nearly all bytes of their segments."""
    half = FILE_BYTES_MAX // 2
    large = [remote(at, at, size_bytes=half) for at in range(4)]
    assert planned([1] * 4, segments=large) == [[0, 1], [2, 3]]
    larger = [remote(at, at, size_bytes=half + 1) for at in range(2)]
    assert planned([1] * 2, segments=larger) == [[0], [1]]


def test_segment_without_records_is_expected_to_be_empty():
    """A segment without records has markers or nothing at all, and loses no record."""
    one = Remainder(remote(0, 9, size_bytes=78), 0, 0)
    assert (one.is_changed, one.expected_bytes) == (False, 0)


times = st.just(NO_TIMESTAMP) | st.integers(0, 100)


@given(st.lists(st.tuples(times, times, st.integers(0, 100)), min_size=1, max_size=4))
def test_what_is_left_goes_no_earlier(values):
    """Retention counts its age from no earlier than that of any part; the row is the job's own."""
    parts = [
        remote(
            10 * at,
            10 * at + 9,
            max_timestamp_ms=newest,
            broker_timestamp_ms=noted,
            uploaded_at_ms=uploaded,
            leader_epoch=at % 3,
        )
        for at, (newest, noted, uploaded) in enumerate(values)
    ]
    scan = SegmentScanner(0, parts[-1].next_offset).finish()
    row = rewritten_segment(parts, scan, sidecar_bytes=77, sidecar_crc32c=5, writer_id="rewritten-0a")

    assert retention_time_ms(row) >= max(retention_time_ms(part) for part in parts)
    assert row.uploaded_at_ms == max(part.uploaded_at_ms for part in parts)
    assert (row.base_offset, row.last_offset) == (0, parts[-1].last_offset)
    assert (row.size_bytes, row.crc32c, row.max_timestamp_ms) == (0, 0, NO_TIMESTAMP)
    assert (row.index_size_bytes, row.index_crc32c) == (77, 5)
    assert row.leader_epoch == max(part.leader_epoch for part in parts)
    assert row.is_rewritten
