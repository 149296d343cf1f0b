"""Portions: together they are the offsets that were asked for, whatever the segments are."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieringd.errors import ConfigError
from tieringd.model.manifest_parts import Gap
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import RemoteSegment
from tieringd.spark.jobs.export.plan import LostOffsets, Portion, losses, portions_of, without
from tieringd.spark.jobs.export.state import ExportRules

PARTITION = TopicIdPartition("cluster", "orders", "W1xNUlUlTfigw_K-dvdxsA", 3)


OTHER = TopicIdPartition("cluster", "orders", "W1xNUlUlTfigw_K-dvdxsA", 4)


def segment(base_offset: int, next_offset: int, size_bytes: int) -> RemoteSegment:
    """Return a segment of which only bounds and size matter."""
    return RemoteSegment(base_offset, next_offset - 1, size_bytes, 0, 0, 0, 0, "a1", 0, 0)


@st.composite
def archives(draw):
    """Give segments with gaps in between, a range of offsets that touches them, and the size of a portion."""
    base, segments = draw(st.integers(0, 50)), []
    start = base
    for _ in range(draw(st.integers(0, 8))):
        base += draw(st.sampled_from([0, 0, 0, 7]))
        end = base + draw(st.integers(1, 40))
        segments.append(segment(base, end, draw(st.integers(1, 1000))))
        base = end
    from_offset = draw(st.integers(start, base))
    return segments, from_offset, draw(st.integers(from_offset, base + 5)), draw(st.integers(1, 1500))


@given(archives())
def test_portions_follow_each_other_and_fill_the_range(archive):
    """No offset is in two of them, and none is left out."""
    segments, from_offset, next_offset, portion_bytes = archive

    portions = list(
        portions_of(
            PARTITION, segments, from_offset=from_offset, next_offset=next_offset, portion_bytes=portion_bytes
        )
    )

    bounds = [from_offset, *(one.next_offset for one in portions)]
    assert [(one.from_offset, one.next_offset) for one in portions] == list(pairwise(bounds))
    assert bounds[-1] == next_offset
    assert all(one.from_offset < one.next_offset for one in portions)
    assert all(one.size_bytes <= portion_bytes or one.next_offset - one.from_offset == 1 for one in portions)


def portioned(*sizes: int, portion_bytes: int) -> list[tuple[int, int, int]]:
    """Return the portions of segments of ten offsets each."""
    segments = [segment(10 * number, 10 * number + 10, size) for number, size in enumerate(sizes)]
    return [
        (one.from_offset, one.next_offset, one.size_bytes)
        for one in portions_of(
            PARTITION, segments, from_offset=0, next_offset=10 * len(sizes), portion_bytes=portion_bytes
        )
    ]


def test_small_segments_share_a_portion():
    """A small topic has few files then."""
    assert portioned(30, 30, 30, 30, portion_bytes=100) == [(0, 30, 90), (30, 40, 30)]


def test_large_segment_is_cut_into_even_spans():
    """A gigabyte is not one task."""
    assert portioned(20, 250, 20, portion_bytes=100) == [
        (0, 10, 20),
        (10, 13, 83),
        (13, 16, 83),
        (16, 20, 83),
        (20, 30, 20),
    ]


def test_state_tells_a_portion_from_its_neighbours_by_offsets_alone():
    """Segments may be merged before it is written."""
    merged = [segment(0, 20, 60)]
    (portion,) = portions_of(PARTITION, merged, from_offset=3, next_offset=20, portion_bytes=100)
    assert portion == Portion(PARTITION, 3, 20, 51)


def test_what_the_archive_lacks_is_named():
    """Gaps inside of the range, as far as they are, and what expired before it was exported."""
    gaps = [Gap(5, 9, "disk full", 0), Gap(20, 29, "trimmed by a user", 0)]

    assert losses(PARTITION, gaps, exported_to=2, from_offset=4, next_offset=25) == [
        LostOffsets(PARTITION, 2, 4, "expired in the archive before they were exported"),
        LostOffsets(PARTITION, 5, 10, "a gap in the archive: disk full"),
        LostOffsets(PARTITION, 20, 25, "a gap in the archive: trimmed by a user"),
    ]


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({"portion_bytes": 0}, "portion_bytes: must be at least 1, not 0"),
        ({"round_bytes": -1}, "round_bytes: must be at least 1, not -1"),
        ({"isolation": "serializable"}, "isolation: must be read_committed or read_uncommitted"),
        ({"recreated": "ignore"}, "recreated: must be error or append, not ignore"),
    ],
)
def test_rules_that_are_not_possible_are_refused_by_name(rules, text):
    """A rule that is not possible is refused by name when it is made, before anything is read."""
    with pytest.raises(ConfigError, match=text):
        ExportRules(**rules)


@pytest.mark.parametrize(
    ("known", "left"),
    [
        ([], [(10, 20)]),
        ([(0, 10), (20, 30)], [(10, 20)]),
        ([(12, 14)], [(10, 12), (14, 20)]),
        ([(15, 30), (5, 12)], [(12, 15)]),
        ([(10, 15), (15, 20)], []),
        ([(11, 18), (12, 13)], [(10, 11), (18, 20)]),
    ],
)
def test_lost_offsets_are_told_once(known, left):
    """
    Lost offsets that were reported before are not reported again.

    Those of another partition count for nothing.
    """
    lost = LostOffsets(PARTITION, 10, 20, "why")
    other = LostOffsets(OTHER, 0, 100, "why")
    found = without(lost, [other, *(LostOffsets(PARTITION, *one, reason="before") for one in known)])
    assert [(one.from_offset, one.next_offset) for one in found] == left
    assert {one.reason for one in found} <= {"why"}
