"""Which compacted local segments take the place of archived ones, and why the others do not."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.model.values import TIME_MS, local_log, remote, stored
from tieringd.model.manifest_parts import Gap
from tieringd.model.partition import LogBounds
from tieringd.model.segment import NO_TIMESTAMP, FilePart
from tieringd.model.spilling import part_to_spill, spilled
from tieringd.policies.compacted_reupload import (
    ACTIVE,
    AS_LARGE,
    BEHIND,
    FAILED,
    LARGER,
    LEAVING,
    NOT_ALIGNED,
    NOT_COVERED,
    NOT_TOUCHED,
    PART_IS_MISSING,
    REWRITTEN,
    RUN_SEGMENTS_MAX,
    SPILLED,
    UNSTABLE,
    Reupload,
    Tombstones,
    parts_to_go,
    plan_reuploads,
    reuploaded_segment,
    same_sized_head,
)
from tieringd.policies.retention_time import retention_time_ms

THREE = stored([remote(0, 99), remote(100, 199), remote(200, 299)])
"""Segments of 1024 bytes each."""


def bounds(*, log_start=0, stable=1000) -> LogBounds:
    return LogBounds(log_start, stable, stable)


def planned(log, manifest=THREE, *, at=None, failed=()):
    """Return the runs as (local bases, archived bases), and the reason for each other segment by its base."""
    plan = plan_reuploads(log, manifest, at or bounds(), failed=failed)
    runs = [
        ([one.base_offset for one in run.segments], [one.base_offset for one in run.replaced])
        for run in plan.reuploads
    ]
    return runs, {one.base_offset: one.reason for one in plan.passed}


@pytest.mark.parametrize(
    ("bases", "sizes", "runs", "passed"),
    [
        pytest.param(
            [0, 100, 200, 300],
            {100: 1000},
            [([100], [100])],
            {0: AS_LARGE, 200: AS_LARGE, 300: ACTIVE},
            id="one that is smaller",
        ),
        pytest.param(
            [0, 200, 300],
            {0: 1500, 200: 10},
            [([0], [0, 100]), ([200], [200])],
            {300: ACTIVE},
            id="one file for two segments, and one for one",
        ),
        pytest.param([0, 300], {0: 0}, [([0], [0, 100, 200])], {300: ACTIVE}, id="all is compacted away"),
        pytest.param(
            [0, 50, 100, 200, 300],
            {0: 512, 50: 511},
            [([0, 50], [0])],
            {100: AS_LARGE, 200: AS_LARGE, 300: ACTIVE},
            id="a broker that cut its log elsewhere",
        ),
        pytest.param(
            [0, 150, 300],
            {0: 1500, 150: 1500},
            [([0, 150], [0, 100, 200])],
            {300: ACTIVE},
            id="nothing but the ends in common",
        ),
        pytest.param(
            [50, 100, 200, 300],
            {50: 1, 100: 1},
            [([100], [100])],
            {50: NOT_ALIGNED, 200: AS_LARGE, 300: ACTIVE},
            id="the log begins inside an archived segment",
        ),
        pytest.param(
            [0, 100, 250],
            {100: 1},
            [],
            {0: AS_LARGE, 100: NOT_ALIGNED, 250: ACTIVE},
            id="the last one ends inside an archived segment",
        ),
        pytest.param(
            [0, 100, 400, 500],
            {100: 1, 400: 1},
            [],
            {0: BEHIND, 100: BEHIND, 400: BEHIND, 500: BEHIND},
            id="closed segments are not archived yet",
        ),
        pytest.param(
            [0, 100, 200, 300],
            {0: 1025},
            [],
            {0: LARGER, 100: AS_LARGE, 200: AS_LARGE, 300: ACTIVE},
            id="another broker had already compacted the segment further",
        ),
        pytest.param(
            [0, 200, 300],
            {0: 1024},
            [],
            {0: PART_IS_MISSING, 200: AS_LARGE, 300: ACTIVE},
            id="the file behind it may be lost",
        ),
        pytest.param([], {}, [], {}, id="no log"),
    ],
)
def test_runs_begin_and_end_with_archived_segments(bases, sizes, runs, passed):
    """Local segments replace archived ones of just the same offsets, and only where they are smaller."""
    log = local_log(bases, sizes=sizes)
    assert planned(log) == (runs, passed)


@pytest.mark.parametrize("is_trimmed", [False, True])
@pytest.mark.parametrize("size_bytes", [1, 1024, 5000])
def test_what_a_job_rewrote_is_never_replaced(size_bytes, is_trimmed):
    """
    A segment that a job rewrote is not replaced, and joins no run.

    The local file may hold records that the job took out, whatever its size.
    """
    rows = [remote(0, 99), remote(100, 199, size_bytes=500, writer_id="rewritten-0a"), remote(200, 299)]
    log = local_log([0, 100, 200, 300], sizes={100: size_bytes, 200: 1})
    found = plan_reuploads(
        log, stored(rows), bounds(), is_trimmed=is_trimmed, differing=[(log.segments[1].identity,)]
    )
    assert [one.base_offset for one in found.reuploads] == [200]
    assert {one.base_offset: one.reason for one in found.passed}[100] == REWRITTEN
    joined = local_log([0, 200, 300], sizes={0: 1})
    passed = plan_reuploads(joined, stored(rows), bounds(), is_trimmed=is_trimmed).passed
    assert {one.base_offset: one.reason for one in passed}[0] == REWRITTEN


def test_file_beside_a_rewritten_segment_is_named_where_parts_may_go():
    """One file for several archived segments, not all of them rewritten, of a log that is trimmed."""
    rows = [remote(0, 99), remote(100, 199, writer_id="rewritten-0a"), remote(200, 299), remote(300, 399)]
    manifest = stored(rows)
    log = local_log([0, 300, 400], sizes={0: 1})

    def named(log, **rules):
        plan = plan_reuploads(log, manifest, bounds(), **({"is_trimmed": True} | rules))
        return [(one.base_offset, one.next_offset) for one in plan.beside_rewritten]

    assert named(log) == [(0, 300)]
    assert named(log, is_trimmed=False) == []
    assert named(log, failed={(log.segments[0].identity,)}) == []
    assert named(replace(log, is_reframed=True)) == []
    assert named(local_log([0, 150, 300, 400])) == [], "it is of two files"
    assert named(local_log([0, 100, 200, 300, 400])) == [], "nothing is beside it in its file"


def test_part_takes_the_place_of_a_segment_that_it_was_compacted_from():
    """
    A part takes a segment's place only if it has bytes, fewer than the segment, and another checksum.

    An equal part has nothing to give. A larger or empty one belongs to another file, or has erased records.
    """
    parts = [
        (FilePart(1024, 7), False),
        (FilePart(1024, 8), True),
        (FilePart(1023, 8), True),
        (FilePart(1025, 8), False),
        (FilePart(0, 0), False),
    ]
    rows = [remote(base, base + 9, crc32c=7) for base in range(0, 50, 10)]
    rows.append(remote(50, 59, crc32c=7, writer_id="rewritten-0a"))
    (file, _) = local_log([0, 60]).segments
    found = parts_to_go(Reupload((file,), tuple(rows)), [*(part for part, _ in parts), FilePart(1000, 8)])
    assert [one.replaced for one in found] == [
        (row,) for row, (_, goes) in zip(rows[:-1], parts, strict=True) if goes
    ]
    assert {one.segments for one in found} == {(file,)}


@pytest.mark.parametrize(
    ("size_bytes", "is_known_to_differ", "is_replaced"),
    [(1023, False, True), (1024, False, False), (1024, True, True), (1025, False, True)],
)
def test_log_that_is_trimmed_is_followed_whatever_the_size(size_bytes, is_known_to_differ, is_replaced):
    """Nothing is trimmed that is not what the archive has, so there what differs goes into the archive."""
    log = local_log([0, 100, 200, 300], sizes={100: size_bytes})
    differing = {(log.segments[1].identity,)} if is_known_to_differ else ()
    plan = plan_reuploads(log, THREE, bounds(), is_trimmed=True, differing=differing)
    assert [run.base_offset for run in plan.reuploads] == ([100] if is_replaced else [])


@pytest.mark.parametrize(
    ("bases", "sizes", "log_start", "expected"),
    [
        pytest.param([0, 100, 200, 300], {}, 0, ([0], [0]), id="the first"),
        pytest.param([0, 100, 200, 300], {}, 100, ([100], [100]), id="the first that is not leaving"),
        pytest.param([0, 200, 300], {0: 2048}, 0, ([0], [0, 100]), id="one for two"),
        pytest.param([0, 100, 200, 300], {0: 1}, 0, None, id="another size"),
        pytest.param([0, 100, 200, 300], {}, 50, None, id="the log begins inside"),
        pytest.param([50, 100, 200, 300], {}, 0, None, id="not aligned"),
        pytest.param([300, 400], {}, 0, None, id="not archived"),
        pytest.param([0], {}, 0, None, id="active"),
        pytest.param([0, 2000], {0: 3072}, 0, None, id="unstable"),
        pytest.param([], {}, 0, None, id="no log"),
    ],
)
def test_head_is_what_a_trim_would_take_next(bases, sizes, log_start, expected):
    """Only the first segment of the log is compared, and only where the sizes leave it open."""
    head = same_sized_head(local_log(bases, sizes=sizes), THREE, bounds(log_start=log_start))
    found = head and ([one.base_offset for one in head.segments], [one.base_offset for one in head.replaced])
    assert found == expected


@pytest.mark.parametrize(
    ("at", "reasons"),
    [
        pytest.param(bounds(stable=299), {200: UNSTABLE}, id="past the last stable offset"),
        pytest.param(bounds(stable=300), {}, id="up to the last stable offset"),
        pytest.param(bounds(log_start=1), {0: LEAVING}, id="records inside it were deleted"),
        pytest.param(bounds(log_start=200), {0: LEAVING, 100: LEAVING}, id="trimmed"),
    ],
)
def test_what_the_broker_may_still_change_is_left_alone(at, reasons):
    """A segment that is unstable, or on its way out, replaces nothing."""
    log = local_log([0, 100, 200, 300], sizes={0: 1, 100: 1, 200: 1})
    runs, passed = planned(log, at=at)
    assert passed == reasons | {300: ACTIVE}
    assert [local for local, _ in runs] == [[base] for base in (0, 100, 200) if base not in reasons]


def test_nothing_is_replaced_over_a_recorded_gap():
    """A file that covers a gap would make it look archived."""
    manifest = stored([remote(0, 99)]).with_gap(Gap(100, 199, "gone", 1)).appended([remote(200, 299)])
    runs, passed = planned(local_log([0, 300], sizes={0: 1}), manifest)
    assert (runs, passed[0]) == ([], NOT_COVERED)


def test_what_is_spilled_is_passed_over():
    """Only rows of the live manifest are replaced."""
    part = part_to_spill(THREE, 1)
    manifest = spilled(THREE, part, part.name(7))
    log = local_log([0, 100, 200, 300], sizes={0: 1, 100: 1})
    assert planned(log, manifest) == ([([100], [100])], {0: SPILLED, 200: AS_LARGE, 300: ACTIVE})


def test_what_has_expired_is_not_uploaded_again():
    """A file whose archived segment has expired replaces nothing."""
    manifest = THREE.expired(1, now_ms=5)
    log = local_log([0, 100, 200, 300], sizes={0: 1, 100: 1})
    runs, passed = planned(log, manifest)
    assert (runs, passed[0]) == ([([100], [100])], NOT_COVERED)


def test_files_that_failed_are_tried_again_when_they_change():
    """Files that could not be read are known by their identity, not by their offsets."""
    log = local_log([0, 100, 200, 300], sizes={0: 1})
    (run,) = plan_reuploads(log, THREE, bounds()).reuploads
    assert planned(log, failed={run.identity})[1][0] == FAILED
    again = local_log([0, 100, 200, 300], sizes={0: 2})
    assert planned(again, failed={run.identity})[0] == [([0], [0])]


def test_reframed_files_count_as_smaller_when_they_are_newer():
    """A reframed file written after its upload is read to find out: its size says nothing."""
    log = replace(local_log([0, 100, 200, 300], sizes={0: 10**6}), is_reframed=True)
    touched = replace(log.segments[0], modified_ns=(TIME_MS + 2001) * 1_000_000)
    log = replace(log, segments=(touched, *log.segments[1:]))
    assert planned(log) == ([([0], [0])], {100: NOT_TOUCHED, 200: NOT_TOUCHED, 300: ACTIVE})


def test_run_does_not_grow_for_ever():
    """A run is given up after so many segments without a shared bound, and the plan goes on behind it."""
    count = RUN_SEGMENTS_MAX + 10
    manifest = stored([remote(0, 10 * count - 1), remote(10 * count, 10 * count + 9)])
    log = local_log([10 * number for number in range(count + 2)], sizes=dict.fromkeys(range(0, 10**4, 10), 1))
    runs, passed = planned(log, manifest)
    assert runs == [([10 * count], [10 * count])]
    assert set(passed.values()) == {NOT_ALIGNED, ACTIVE}


cuts = st.lists(st.integers(1, 60), unique=True, max_size=12).map(sorted)


@given(archived=cuts, local=cuts, sizes=st.lists(st.integers(0, 3000), min_size=13, max_size=13))
def test_planned_runs_are_what_the_archive_can_take(archived, local, sizes):
    """Every planned run is aligned and smaller, the manifest accepts all of them, and none is left then."""
    archived_bounds, bases = [0, *archived, 61], [0, *local, 61]
    rows = [remote(begin, end - 1) for begin, end in pairwise(archived_bounds)]
    manifest = stored(rows)
    log = local_log(bases, sizes=dict(zip(bases, sizes, strict=False)))
    plan = plan_reuploads(log, manifest, bounds())
    told = [one.base_offset for one in plan.passed]
    planned_bases = [one.base_offset for run in plan.reuploads for one in run.segments]
    assert sorted(told + planned_bases) == bases
    before = manifest
    for run in plan.reuploads:
        assert (run.base_offset, run.next_offset) == (
            run.segments[0].base_offset,
            run.segments[-1].next_offset,
        )
        new = [
            reuploaded_segment(
                remote(one.base_offset, one.next_offset - 1, size_bytes=one.size_bytes), run.replaced
            )
            for one in run.segments
        ]
        manifest = manifest.compacted(new, now_ms=1)
        assert manifest.faults() == ()
    assert manifest.next_offset == before.next_offset
    assert plan_reuploads(log, manifest, bounds()).reuploads == ()
    if plan.reuploads:
        assert manifest.size_bytes < before.size_bytes


def test_copy_keeps_the_age_of_what_it_replaces():
    """Retention counts from the newest record that was there, and the upload is the first one."""
    old = [
        remote(0, 99, max_timestamp_ms=TIME_MS + 500, uploaded_at_ms=TIME_MS + 900),
        remote(100, 199, max_timestamp_ms=TIME_MS + 400, uploaded_at_ms=TIME_MS + 1000),
        remote(200, 299, max_timestamp_ms=TIME_MS + 950, uploaded_at_ms=TIME_MS + 1000),
    ]
    copied = remote(
        0,
        199,
        size_bytes=7,
        max_timestamp_ms=NO_TIMESTAMP,
        base_timestamp_ms=NO_TIMESTAMP,
        uploaded_at_ms=10**15,
    )
    row = reuploaded_segment(copied, old)
    assert row.uploaded_at_ms == TIME_MS + 1000
    assert retention_time_ms(row) == TIME_MS + 1000
    newer = reuploaded_segment(replace(copied, max_timestamp_ms=TIME_MS + 100), old)
    assert newer.max_timestamp_ms == TIME_MS + 100
    assert retention_time_ms(newer) == TIME_MS + 500
    same = reuploaded_segment(replace(copied, max_timestamp_ms=TIME_MS + 500), old)
    assert same.broker_timestamp_ms == NO_TIMESTAMP


GO, WAIT, STAY = Tombstones


@pytest.mark.parametrize(
    ("sizes", "start_offset", "expected"),
    [
        ((10, 10, 10), 0, {0: GO, 100: WAIT, 200: WAIT}),
        ((1024, 10, 1024), 0, {100: GO}),
        ((1024, 10, 10), 0, {100: GO, 200: WAIT}),
        ((2048, 10, 10), 0, {100: STAY, 200: STAY}),
        ((2048, 10, 10), 100, {100: GO, 200: WAIT}),
        ((10, 2048, 10), 0, {0: GO, 200: STAY}),
    ],
)
def test_tombstones_go_where_the_archive_is_what_the_log_is(sizes, start_offset, expected):
    """
    Tombstones go if no file from the log's first readable offset up to them is larger than its archived copy.

    They wait for the upload of earlier files of the same plan, and they stay behind a file that is larger.
    """
    log = local_log([0, 100, 200, 300], sizes=dict(zip([0, 100, 200], sizes, strict=True)))
    manifest = THREE.expired(1, now_ms=1) if start_offset else THREE
    plan = plan_reuploads(log, manifest, bounds())
    assert {run.base_offset: run.tombstones for run in plan.reuploads} == expected


def test_tombstones_stay_where_older_segments_were_trimmed():
    """The archive has what the log has not any more."""
    log = local_log([100, 200, 300], sizes={100: 10, 200: 10})
    plan = plan_reuploads(log, THREE, bounds(log_start=100))
    assert [run.tombstones for run in plan.reuploads] == [STAY, STAY]
