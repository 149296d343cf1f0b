"""Which open chunks are closed: by strategy, by share, and never one that is read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieringd.policies.cache_trim import (
    NOBODY_READS,
    OVER_SHARE,
    OVER_TOTAL,
    ChunkEvictionLimits,
    EvictionStrategy,
    OpenChunk,
    max_hydrated,
    plan_releases,
)

EAGER, CAPPED, PREDICTIVE = EvictionStrategy


def limits(strategy, **changes):
    return ChunkEvictionLimits(strategy=strategy, **changes)


def chunks(readers_by_number, *, segment="s"):
    """Return open chunks; each was used later than the one before it in the mapping."""
    return [
        OpenChunk(segment, number, readers, float(at))
        for at, (number, readers) in enumerate(readers_by_number.items())
    ]


def released(open_chunks, chunk_count, settings):
    counts = dict.fromkeys({chunk.segment for chunk in open_chunks}, chunk_count)
    return [one.chunk.number for one in plan_releases(open_chunks, counts, settings).releases]


@pytest.mark.parametrize(
    ("chunk_count", "ratio", "threshold", "expected"),
    [
        (1, 0.7, 5, 1),
        (5, 0.7, 5, 5),
        (6, 0.7, 5, 4),
        (10, 0.7, 5, 7),
        (100, 0.29, 5, 29),
        (100, 0.0, 5, 1),
        (7, 1.0, 0, 7),
        (64, 0.7, 5, 44),
        (0, 0.7, 5, 0),
    ],
)
def test_share_of_a_segment_is_its_ratio_or_all_of_a_small_one(chunk_count, ratio, threshold, expected):
    """A segment may keep at least one chunk open, and rounding errors take none away."""
    settings = ChunkEvictionLimits(hydrated_ratio=ratio, min_chunks_threshold=threshold)
    assert max_hydrated(chunk_count, settings) == expected


def test_eager_closes_all_unread_chunks():
    """The plan gives as its reason that no reader uses the chunk."""
    open_chunks = chunks({0: 0, 1: 2, 2: 0})
    plan = plan_releases(open_chunks, {"s": 3}, limits(EAGER))
    assert [(one.chunk.number, one.because) for one in plan.releases] == [
        (0, NOBODY_READS),
        (2, NOBODY_READS),
    ]
    assert [(one.chunk.number, one.because) for one in plan.held] == [(1, "the chunk is being read (2)")]


@pytest.mark.parametrize("strategy", [CAPPED, PREDICTIVE])
def test_within_its_share_a_segment_keeps_all_open(strategy):
    """Seven of ten may."""
    plan = plan_releases(chunks(dict.fromkeys(range(7), 0)), {"s": 10}, limits(strategy))
    assert plan.releases == ()
    assert {one.because for one in plan.held} == {"its segment may have 7 open chunks"}


def test_capped_closes_the_least_recently_used_over_the_share():
    """Chunks with readers count, and stay."""
    open_chunks = chunks({8: 0, 3: 1, 1: 0, 0: 0, 2: 0, 4: 0, 5: 0, 6: 0, 7: 0})
    assert released(open_chunks, 10, limits(CAPPED)) == [8, 1]


def test_predictive_keeps_what_a_reader_gets_to_next():
    """Chunks behind every reader go first, and then those that are farthest ahead."""
    open_chunks = chunks({4: 0, 5: 0, 0: 0, 1: 0, 3: 1, 9: 0, 8: 0, 7: 0, 6: 0})
    assert released(open_chunks, 10, limits(PREDICTIVE)) == [0, 1]
    plan = plan_releases(open_chunks, {"s": 10}, limits(PREDICTIVE, hydrated_ratio=0.3))
    assert [one.chunk.number for one in plan.releases] == [0, 1, 9, 8, 7, 6]
    assert {one.chunk.number: one.because for one in plan.held} == {
        3: "the chunk is being read (1)",
        4: "readers to come: 1; the nearest is 1 chunks before it",
        5: "readers to come: 1; the nearest is 2 chunks before it",
    }
    assert {one.because for one in plan.releases} == {OVER_SHARE}


def test_predictive_sorts_by_the_number_of_readers_to_come():
    """The second key is the sum of their distances. Each reader of a chunk counts."""
    # One reader is at 0, three are at 4: chunk 1 is near to one reader, and 9 is far from four.
    open_chunks = chunks({0: 1, 1: 0, 2: 0, 4: 3, 5: 0, 8: 0, 9: 0})
    assert released(open_chunks, 10, limits(PREDICTIVE, hydrated_ratio=0.2)) == [2, 1, 9, 8, 5]
    assert released(open_chunks, 10, limits(PREDICTIVE, hydrated_ratio=0.5)) == [2, 1]


def test_predictive_without_readers_is_as_capped():
    """No chunk is needed sooner than another."""
    open_chunks = chunks(dict.fromkeys((5, 3, 9, 1, 2, 7, 0, 8, 4, 6), 0))
    assert released(open_chunks, 10, limits(PREDICTIVE)) == released(open_chunks, 10, limits(CAPPED))


def test_more_readers_than_the_share_keep_their_chunks():
    """All other chunks go."""
    open_chunks = chunks(dict.fromkeys(range(8), 1) | {8: 0, 9: 0})
    assert released(open_chunks, 10, limits(CAPPED)) == [8, 9]


def test_segments_do_not_share_their_shares_but_the_total():
    """The least recently used chunks go, of any segment, when too many are open in total."""
    first, second = chunks({0: 0, 1: 1}), [OpenChunk("t", 0, 0, -1.0), OpenChunk("t", 1, 0, 7.0)]
    plan = plan_releases([*first, *second], {"s": 2, "t": 2}, limits(CAPPED, max_open=2))
    assert [(one.chunk.segment, one.chunk.number, one.because) for one in plan.releases] == [
        ("t", 0, OVER_TOTAL),
        ("s", 0, OVER_TOTAL),
    ]
    assert {(one.chunk.segment, one.chunk.number) for one in plan.held} == {("s", 1), ("t", 1)}


OPEN = st.dictionaries(
    st.tuples(st.sampled_from("stu"), st.integers(0, 19)), st.tuples(st.integers(0, 2), st.floats(0, 9))
)


@given(OPEN, st.sampled_from(EvictionStrategy), st.floats(0, 1), st.integers(0, 9), st.integers(0, 30))
def test_any_plan_accounts_for_every_chunk_and_closes_none_that_is_read(
    found, strategy, ratio, threshold, max_open
):
    """Each chunk is closed or held, once; a segment is over its share only by chunks that are read."""
    open_chunks = [OpenChunk(*place, *rest) for place, rest in found.items()]
    settings = ChunkEvictionLimits(strategy, ratio, threshold, max_open)
    plan = plan_releases(open_chunks, dict.fromkeys("stu", 20), settings)
    gone, stay = [one.chunk for one in plan.releases], [one.chunk for one in plan.held]
    assert sorted([*gone, *stay], key=repr) == sorted(open_chunks, key=repr)
    assert not any(chunk.readers for chunk in gone)
    idle = [chunk for chunk in stay if not chunk.readers]
    assert len(stay) <= max_open or not idle
    for segment in "stu":
        held = [chunk for chunk in stay if chunk.segment == segment]
        if strategy is EAGER:
            assert all(chunk.readers for chunk in held)
        elif any(not chunk.readers for chunk in held):
            assert len(held) <= max_hydrated(20, settings)
