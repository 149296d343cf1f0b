"""What the cache evicts: when, how much, in which order, and what never."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieringd.formats.cache_names import CacheFileKind
from tieringd.policies.cache_trim import (
    BEING_READ,
    CHUNKS_NOT_ENOUGH,
    LEAST_USED,
    WITH_ITS_CHUNKS,
    WITHIN_LIMITS,
    CachedFile,
    CacheUse,
    TrimDemand,
    TrimLimits,
    fits_at_all,
    has_room,
    plan_cache_trim,
    trim_demand,
)

MANY = 10**9
OBJECT_TOO_MANY = "the cache holds 9 objects of 9, and 1 more are needed"


def chunk(name, accessed_ms, size_bytes=10, segment="s"):
    return CachedFile(name, size_bytes, accessed_ms, CacheFileKind.CHUNK, segment)


def index(segment, accessed_ms=0, size_bytes=1):
    return CachedFile(f"{segment}.index", size_bytes, accessed_ms, CacheFileKind.INDEX, segment)


def manifest(name, accessed_ms=0, size_bytes=1):
    return CachedFile(name, size_bytes, accessed_ms, CacheFileKind.MANIFEST, "")


def went(plan):
    return [(one.file.name, one.because) for one in plan.evictions]


def bytes_demand(size_bytes):
    return TrimDemand(size_bytes, 0, "asked for")


@pytest.mark.parametrize(
    ("use", "limits", "size_bytes", "objects"),
    [
        pytest.param(CacheUse(100, 5), TrimLimits(100, 5), 0, 0, id="full-is-not-over"),
        pytest.param(CacheUse(101, 5), TrimLimits(100, 5), 21, 0, id="bytes-to-the-low-watermark"),
        pytest.param(CacheUse(100, 6), TrimLimits(100, 5), 0, 2, id="objects-to-the-low-watermark"),
        pytest.param(CacheUse(101, 6), TrimLimits(100, 5), 21, 2, id="both"),
        pytest.param(CacheUse(90, 1, 20, 1), TrimLimits(100, 9), 30, 0, id="promises-count"),
        pytest.param(CacheUse(90, 1, 0, 0, None, 10, 1), TrimLimits(100, 9), 0, 0, id="just-fits"),
        pytest.param(CacheUse(90, 1, 0, 0, None, 11, 1), TrimLimits(100, 9), 10, 0, id="low-watermark-fits"),
        pytest.param(CacheUse(90, 1, 0, 0, None, 50, 1), TrimLimits(100, 9), 40, 0, id="large-put"),
        pytest.param(CacheUse(90, 9, 0, 0, None, 5, 1), TrimLimits(100, 9), 0, 2, id="one-object-more"),
        pytest.param(CacheUse(90, 1, 0, 0, None, 101, 1), TrimLimits(100, 9), 0, 0, id="never-fits"),
        pytest.param(CacheUse(71, 1), TrimLimits(100, 9, 0, 70), 15, 0, id="over-the-threshold"),
        pytest.param(CacheUse(70, 1), TrimLimits(100, 9, 0, 70), 0, 0, id="at-the-threshold"),
        pytest.param(CacheUse(71, 1), TrimLimits(100, 9), 0, 0, id="without-threshold"),
        pytest.param(CacheUse(9, 8), TrimLimits(100, 10, 0, None, 70), 0, 3, id="threshold-of-objects"),
        pytest.param(
            CacheUse(75, 1, 0, 0, None, 20, 1), TrimLimits(100, 9, 0, 70), 0, 0, id="put-goes-by-the-limit"
        ),
        pytest.param(CacheUse(50, 1, 0, 0, 30), TrimLimits(100, 9, 40), 10, 0, id="disk-lacks-ten"),
        pytest.param(CacheUse(50, 1, 0, 0, 30, 5, 1), TrimLimits(100, 9, 40), 15, 0, id="and-the-put"),
        pytest.param(CacheUse(50, 1, 0, 0, 0), TrimLimits(100, 9, 900), 50, 0, id="no-more-than-there-is"),
        pytest.param(CacheUse(50, 3), TrimLimits(0, 9), 50, 0, id="a-cache-of-nothing-empties"),
        pytest.param(CacheUse(0, 0, 120, 1), TrimLimits(100, 9), 0, 0, id="promises-cannot-be-evicted"),
    ],
)
def test_demand_is_what_brings_the_cache_to_its_target(use, limits, size_bytes, objects):
    """Only a dimension that is over is lowered, to the low watermark of what it passed."""
    demand = trim_demand(use, limits)
    assert (demand.size_bytes, demand.objects) == (size_bytes, objects)


@pytest.mark.parametrize(
    ("use", "limits", "because"),
    [
        (CacheUse(1, 1), TrimLimits(9, 9), WITHIN_LIMITS),
        (CacheUse(101, 1), TrimLimits(100, 9), "the cache holds 101 bytes of 100"),
        (
            CacheUse(90, 9, 0, 0, None, 11, 1),
            TrimLimits(100, 9),
            f"the cache holds 90 bytes of 100, and 11 more are needed; {OBJECT_TOO_MANY}",
        ),
        (CacheUse(1, 1, 0, 0, 3), TrimLimits(9, 9, 5), "its disk has 2 bytes less free space than required"),
        (
            CacheUse(1, 1, 0, 0, 3, 10, 1),
            TrimLimits(9, 9),
            "10 bytes are more than the limit of the whole cache",
        ),
    ],
)
def test_demand_says_why(use, limits, because):
    """A demand gives its reason in words and figures that an operator can compare."""
    assert trim_demand(use, limits).because == because


@pytest.mark.parametrize(
    ("use", "limits", "expected"),
    [
        (CacheUse(90, 1, 0, 0, None, 10, 1), TrimLimits(100, 2), True),
        (CacheUse(90, 1, 1, 0, None, 10, 1), TrimLimits(100, 2), False),
        (CacheUse(90, 1, 0, 1, None, 10, 1), TrimLimits(100, 2), False),
        (CacheUse(0, 0, 0, 0, 50, 10, 1), TrimLimits(100, 2, 40), True),
        (CacheUse(0, 0, 0, 0, 49, 10, 1), TrimLimits(100, 2, 40), False),
    ],
)
def test_room_is_counted_with_every_promise_and_the_disk(use, limits, expected):
    """One byte or object too much is too much."""
    assert has_room(use, limits) is expected


def test_what_is_larger_than_the_cache_evicts_nothing():
    """Such an object would not fit afterwards either."""
    use = CacheUse(90, 1, 0, 0, None, 101, 1)
    assert not fits_at_all(use, TrimLimits(100, 9))
    assert fits_at_all(use, TrimLimits(101, 9))


def test_least_recently_used_chunks_go_until_it_is_enough():
    """The cache evicts no more chunks than it has to. Chunks of equal age go in the order of their names."""
    files = [chunk("c", 3), chunk("a", 1), chunk("d", 4), chunk("b", 1)]
    assert went(plan_cache_trim(files, bytes_demand(11), in_use=())) == [("a", LEAST_USED), ("b", LEAST_USED)]
    assert went(plan_cache_trim(files, bytes_demand(10), in_use=())) == [("a", LEAST_USED)]
    assert went(plan_cache_trim(files, TrimDemand(0, 3, ""), in_use=()))[-1] == ("c", LEAST_USED)
    assert went(plan_cache_trim(files, TrimDemand(0, 0, ""), in_use=())) == []


def test_index_goes_with_the_last_chunk_of_its_segment():
    """An index stays while one chunk of its segment is left, however long the index was unused."""
    files = [index("s"), chunk("a", 1), chunk("b", 2), index("t"), chunk("c", 3, segment="t")]
    assert went(plan_cache_trim(files, bytes_demand(10), in_use=())) == [("a", LEAST_USED)]
    assert went(plan_cache_trim(files, bytes_demand(20), in_use=())) == [
        ("a", LEAST_USED),
        ("b", LEAST_USED),
        ("s.index", WITH_ITS_CHUNKS),
    ]


def test_index_stays_while_the_last_chunk_is_read():
    """Another reader of the same segment comes soon."""
    files = [index("s"), chunk("a", 1), chunk("b", 2)]
    plan = plan_cache_trim(files, bytes_demand(15), in_use={"b"})
    assert went(plan) == [("a", LEAST_USED), ("s.index", CHUNKS_NOT_ENOUGH)]


def test_indexes_and_manifests_go_when_chunks_are_not_enough():
    """The least recently used of both."""
    files = [chunk("a", 9), index("x", 3), manifest("m", 2), index("y", 4), index("s", 1)]
    plan = plan_cache_trim(files, bytes_demand(13), in_use=())
    assert went(plan) == [
        ("a", LEAST_USED),
        ("s.index", WITH_ITS_CHUNKS),
        ("m", CHUNKS_NOT_ENOUGH),
        ("x.index", CHUNKS_NOT_ENOUGH),
    ]


def test_what_is_read_stays_and_a_plan_that_falls_short_says_so():
    """How much is missing, and what held it up."""
    files = [chunk("a", 1), chunk("b", 2), index("s")]
    plan = plan_cache_trim(files, TrimDemand(25, 3, "x"), in_use={"a", "s.index"})
    assert went(plan) == [("b", LEAST_USED)]
    assert {(one.file.name, one.because) for one in plan.kept} == {
        ("a", BEING_READ),
        ("s.index", BEING_READ),
    }
    assert (plan.size_bytes, plan.short_by_bytes, plan.short_by_objects) == (10, 15, 2)
    enough = plan_cache_trim(files, bytes_demand(5), in_use={"a"})
    assert (enough.kept, enough.short_by_bytes, enough.short_by_objects) == ((), 0, 0)


def test_carry_over_is_what_would_go_next():
    """The carry-over lists the chunks that would go next, up to its bytes, and none that is being read."""
    files = [chunk(name, at) for at, name in enumerate("abcdef")]
    plan = plan_cache_trim(files, bytes_demand(10), in_use={"c"}, carryover_bytes=29)
    assert [file.name for file in plan.carry_over] == ["b", "d"]
    assert plan_cache_trim(files, bytes_demand(10), in_use=()).carry_over == ()


FILES = st.dictionaries(
    st.tuples(st.sampled_from("stuv"), st.integers(0, 5)), st.tuples(st.integers(0, 5), st.integers(0, 40))
)


@given(
    FILES,
    st.sets(st.sampled_from("stuv")),
    st.sets(st.tuples(st.sampled_from("stuv"), st.integers(0, 5))),
    st.integers(0, 300),
    st.integers(0, 12),
)
def test_any_trim_keeps_the_rules(found, indexed, read, size_bytes, objects):
    """
    A plan is enough or takes all that may go.

    Nothing read goes; no chunk goes before a chunk used longer ago; no index outlives its chunks'
    going or goes before it must; without the last unit that went it would not have been enough.
    """
    chunks = [chunk(f"{place[0]}/{place[1]}", *rest, segment=place[0]) for place, rest in found.items()]
    files = [*chunks, *(index(segment) for segment in indexed)]
    in_use = {f"{segment}/{number}" for segment, number in read}
    demand = TrimDemand(size_bytes, objects, "x")
    plan = plan_cache_trim(files, demand, in_use=in_use)
    gone = [one.file for one in plan.evictions]
    names = {file.name for file in gone}
    assert len(names) == len(gone)
    assert not names & in_use
    is_short = bool(plan.short_by_bytes or plan.short_by_objects)
    if is_short:
        assert names == {file.name for file in files} - in_use
    gone_chunks = [file for file in gone if file.kind is CacheFileKind.CHUNK]
    stay = [file for file in chunks if file.name not in names | in_use]
    assert all(a.accessed_ms <= b.accessed_ms for a in gone_chunks for b in stay)
    left = Counter(file.segment for file in chunks if file.name not in names)
    for one in plan.evictions:
        if one.because == WITH_ITS_CHUNKS:
            assert not left[one.file.segment]
        if one.because == CHUNKS_NOT_ENOUGH:
            assert not stay
    for segment in {file.segment for file in gone_chunks} & indexed:
        assert left[segment] or f"{segment}.index" in names
    if gone:
        before = gone[:-2] if plan.evictions[-1].because == WITH_ITS_CHUNKS else gone[:-1]
        assert sum(file.size_bytes for file in before) < size_bytes or len(before) < objects


@given(
    st.builds(
        CacheUse,
        size_bytes=st.integers(0, 500),
        objects=st.integers(0, 50),
        reserved_bytes=st.integers(0, 100),
        free_bytes=st.one_of(st.none(), st.integers(0, 400)),
        wanted_bytes=st.integers(0, 200),
        wanted_objects=st.just(1),
    ),
    st.builds(TrimLimits, st.integers(1, 300), st.just(MANY), st.integers(0, 300)),
)
def test_any_demand_that_is_met_makes_the_room(use, limits):
    """
    A trim of the demanded size makes room for what waits.

    Space promised to others never counts as room.
    """
    demand = trim_demand(use, limits)
    gone = demand.size_bytes
    assert 0 <= gone <= use.size_bytes
    if not fits_at_all(use, limits):
        assert gone == 0
        return
    free_bytes = None if use.free_bytes is None else use.free_bytes + gone
    after = replace(use, size_bytes=use.size_bytes - gone, free_bytes=free_bytes)
    assert has_room(after, limits) or gone == use.size_bytes
    assert gone == 0 or not has_room(use, limits)
