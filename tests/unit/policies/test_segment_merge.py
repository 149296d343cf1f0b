"""Runs of small neighbours: which are merged, which wait, and which never are; against a plain list."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.unit.model.values import PARTITION, remote, stored
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Gap, Replacement
from tieringd.policies.segment_merge import (
    ALONE,
    FAILED,
    FILE_BYTES_MAX,
    LARGE,
    WAITS,
    MergeLimits,
    MergeRun,
    MergeSettings,
    plan_merges,
)

LIMITS = MergeLimits(target_bytes=1000, min_bytes=500)


def of_sizes(*sizes: int, epochs=(), replacements=()) -> PartitionManifest:
    """Return a manifest of segments of ten offsets each."""
    rows = [
        remote(10 * number, 10 * number + 9, size_bytes=size_bytes) for number, size_bytes in enumerate(sizes)
    ]
    return replace(stored(rows), epochs=tuple(epochs), replacements=tuple(replacements))


def runs(manifest: PartitionManifest, **changes) -> list[tuple[int, int]]:
    return [(run.base_offset, run.next_offset) for run in plan_merges(manifest, LIMITS, **changes).runs]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        pytest.param([], [], id="nothing-there"),
        pytest.param([100], [], id="one-segment-waits"),
        pytest.param([100, 100, 100], [], id="small-run-at-the-end-waits"),
        pytest.param([300, 200], [], id="run-at-the-end-that-is-just-the-minimum-waits"),
        pytest.param([300, 201], [(0, 20)], id="run-at-the-end-above-the-minimum"),
        pytest.param([1000, 100, 100, 1000], [(10, 30)], id="small-run-between-large-ones"),
        pytest.param([1000, 100, 1000], [], id="one-small-between-large-ones"),
        pytest.param([100, 100, 1000], [(0, 20)], id="small-run-before-a-large-one"),
        pytest.param([600, 600, 100, 1000], [(10, 30)], id="first-gives-way-to-a-better-run"),
        pytest.param([500, 500, 500, 500, 500], [(0, 20), (20, 40)], id="runs-end-at-the-target"),
        pytest.param([700, 100, 100], [], id="merged-before-waits-until-it-is-full"),
        pytest.param([700, 100, 100, 200], [(0, 30)], id="merged-before-is-full"),
        pytest.param([0, 0, 1000], [(0, 20)], id="segments-without-bytes"),
    ],
)
def test_runs_are_chosen_by_size(sizes, expected):
    """A run is as long as the target allows, and at the end of the archive it waits for the minimum."""
    assert runs(of_sizes(*sizes)) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({"epochs": [(1, 0), (2, 20)]}, [(0, 20), (20, 40)], id="epoch-between"),
        pytest.param({"epochs": [(1, 0), (2, 25)]}, [(0, 20)], id="epoch-inside-a-segment"),
        pytest.param({"epochs": [(1, 0)]}, [(0, 40)], id="epoch-at-the-beginning"),
        pytest.param({"epochs": [(1, 0), (2, 1)]}, [(10, 40)], id="epoch-after-the-first-offset"),
        pytest.param({"epochs": [(1, 0), (2, 39)]}, [(0, 30)], id="epoch-at-the-last-offset"),
        pytest.param({"replacements": [Replacement(20, 99, 3, 0)]}, [(0, 20), (20, 40)], id="replaced-tail"),
        pytest.param({"replacements": [Replacement(0, 9, 3, 0)]}, [(10, 40)], id="replaced-head"),
        pytest.param({"replacements": [Replacement(0, 10, 3, 0)]}, [(20, 40)], id="replaced-into-the-next"),
    ],
)
def test_nothing_is_joined_over_a_border(changes, expected):
    """A leader epoch's first offset and the bounds of what was replaced lie between runs."""
    manifest = of_sizes(200, 200, 200, 200, 1000, **changes)
    assert runs(manifest) == expected


def test_nothing_is_joined_over_a_gap():
    """Segments on both sides of a recorded gap stay apart."""
    manifest = PartitionManifest.begin(PARTITION, start_offset=0).appended(
        [remote(0, 9, size_bytes=300), remote(10, 19, size_bytes=300)]
    )
    manifest = manifest.with_gap(Gap(20, 29, "lost", 0)).appended(
        [remote(30, 39, size_bytes=300), remote(40, 49, size_bytes=300)]
    )
    assert runs(manifest) == [(0, 20), (30, 50)]


def test_merged_segment_is_no_longer_than_a_file_can_be():
    """A broker's index counts offsets from the segment's base in 31 bits."""
    long = [remote(0, 2**30 - 1, size_bytes=1), remote(2**30, 2**31 - 1, size_bytes=1)]
    assert runs(stored([*long, remote(2**31, 2**31, size_bytes=1000)])) == [(0, 2**31)]
    longer = [*long, remote(2**31, 2**31, size_bytes=1), remote(2**31 + 1, 2**31 + 1, size_bytes=1000)]
    assert runs(stored(longer)) == [(0, 2**31)]


def test_what_failed_before_is_never_proposed_again():
    """Segments of a run that could not be merged are passed over, and those beside it are not."""
    manifest = of_sizes(300, 300, 300, 300, 300, 300, 1000)
    (first, *_) = plan_merges(manifest, LIMITS).runs
    plan = plan_merges(manifest, LIMITS, failed=[first])
    assert [run.base_offset for run in plan.runs] == [30]
    assert [(one.base_offset, one.segments, one.reason) for one in plan.passed] == [
        (0, 3, FAILED),
        (60, 1, LARGE),
    ]


def test_reasons_name_what_stays():
    """Each segment that is not merged is in one entry, with the reason."""
    plan = plan_merges(of_sizes(1000, 1200, 100, 1000, 200), LIMITS)
    assert [(one.base_offset, one.last_offset, one.reason) for one in plan.passed] == [
        (0, 19, LARGE),
        (20, 29, ALONE),
        (30, 39, LARGE),
        (40, 49, WAITS),
    ]


def test_segments_past_the_bound_may_still_follow():
    """A segment that ends after the bound is not merged, and the run before it waits as at the end."""
    manifest = of_sizes(100, 100, 100, 1000)
    assert runs(manifest, up_to=39) == []
    assert plan_merges(manifest, LIMITS, up_to=39).resume_offset == 0
    assert runs(manifest, up_to=40) == [(0, 30)]


def test_one_call_plans_so_many_runs():
    """A call plans at most so many runs, and the next call goes on behind the last of them."""
    manifest = of_sizes(*[500] * 20)
    limits = replace(LIMITS, runs_max=3)
    plan = plan_merges(manifest, limits)
    assert [run.base_offset for run in plan.runs] == [0, 20, 40]
    assert (plan.resume_offset, plan.is_complete) == (60, False)
    assert plan_merges(manifest, limits, from_offset=60).runs[0].base_offset == 60


def test_one_call_reads_so_many_segments():
    """A long walk is cut where it is no loss: the run that can still grow begins the next call."""
    limits = replace(LIMITS, rows_max=4, run_segments_max=3)
    manifest = of_sizes(1000, 1000, 1000, 300, 300, 300, 1000)
    first = plan_merges(manifest, limits)
    assert (first.runs, first.resume_offset, first.is_complete) == ((), 30, False)
    second = plan_merges(manifest, limits, from_offset=first.resume_offset)
    assert second.runs == (MergeRun(30, 60, 3, 900),)
    assert second.is_complete


def test_cursor_behind_an_archive_that_was_cut_back_begins_anew():
    """A walk begins anew if the archive ends before the cursor: other segments have come there."""
    assert runs(of_sizes(300, 300), from_offset=1000) == [(0, 20)]
    assert runs(of_sizes(300, 300), from_offset=20) == []


@pytest.mark.parametrize(
    ("target", "minimum", "segment_bytes", "expected"),
    [
        pytest.param(None, None, 1 << 30, (1 << 30, 1 << 29), id="topic's-own"),
        pytest.param(1000, 400, 1 << 30, (1000, 400), id="both-set"),
        pytest.param(1000, None, 1 << 30, (1000, 800), id="half-a-segment-is-no-minimum"),
        pytest.param(1000, 1000, 1 << 30, (1000, 800), id="minimum-is-the-target"),
        pytest.param(1000, 2000, 1 << 30, (1000, 800), id="minimum-above-the-target"),
        pytest.param(1 << 40, 1, 1 << 30, (FILE_BYTES_MAX, 1), id="larger-than-a-file"),
    ],
)
def test_sizes_follow_from_the_segment_size(target, minimum, segment_bytes, expected):
    """The target is the topic's segment size and the minimum half of it, and always below the target."""
    limits = MergeSettings(target_bytes=target, min_bytes=minimum).limits(segment_bytes=segment_bytes)
    assert (limits.target_bytes, limits.min_bytes) == expected


@dataclass
class Row:
    """A segment of the plain list."""

    base_offset: int
    next_offset: int
    size_bytes: int
    moves: int = 0
    is_after_border: bool = False
    """Whether it may not be joined to the one before."""
    is_hopeless: bool = False


class PlainList:
    """Segments as a list, next to the manifest that should say the same."""

    def __init__(self, limits: MergeLimits) -> None:
        self.limits = limits
        self.rows: list[Row] = []
        self.manifest = PartitionManifest.begin(PARTITION, start_offset=0)
        self.cursor = 0
        self.failed: list[MergeRun] = []
        self.epoch = 0

    def append(self, size_bytes: int, before: str) -> None:
        next_offset = self.manifest.next_offset
        if before == "gap":
            self.manifest = self.manifest.with_gap(Gap(next_offset, next_offset + 4, "lost", 0))
        base_offset = self.manifest.next_offset
        epochs = []
        if before == "epoch":
            self.epoch += 1
            epochs = [(self.epoch, base_offset)]
        if before == "replacement":
            replacement = Replacement(base_offset, base_offset + 6, 0, 0)
            self.manifest = replace(self.manifest, replacements=(*self.manifest.replacements, replacement))
        segment = remote(base_offset, base_offset + 6, size_bytes=size_bytes)
        self.manifest = self.manifest.appended([segment], epochs)
        # A replacement ends as the segment does, so that both its bounds are borders.
        after_replacement = bool(self.manifest.replacements) and (
            self.manifest.replacements[-1].last_offset + 1 == base_offset
        )
        self.rows.append(
            Row(base_offset, base_offset + 7, size_bytes, is_after_border=before != "" or after_replacement)
        )

    def expire(self) -> None:
        if self.rows:
            self.manifest = self.manifest.expired(1, now_ms=0)
            self.rows.pop(0)

    def step(self, *, fails: bool, from_start: bool) -> bool:
        """Plan, check and merge; say whether there was anything to merge, or to pass over."""
        cursor = 0 if from_start else self.cursor
        plan = plan_merges(self.manifest, self.limits, from_offset=cursor, failed=self.failed)
        assert len(plan.runs) <= self.limits.runs_max
        before = self.cursor
        for run in plan.runs:
            self._check(run)
            if fails:
                self.failed.append(run)
                for row in self._rows_of(run):
                    row.is_hopeless = True
            else:
                self._merge(run)
        self.cursor = plan.resume_offset
        assert plan.resume_offset >= (0 if cursor > self.manifest.next_offset else cursor)
        return bool(plan.runs) or not plan.is_complete or self.cursor != before

    def _rows_of(self, run: MergeRun) -> list[Row]:
        return [row for row in self.rows if run.base_offset <= row.base_offset < run.next_offset]

    def _check(self, run: MergeRun) -> None:
        rows = self._rows_of(run)
        assert len(rows) == run.segments >= 2
        assert (rows[0].base_offset, rows[-1].next_offset) == (run.base_offset, run.next_offset)
        assert sum(row.size_bytes for row in rows) == run.size_bytes <= self.limits.target_bytes
        assert len(rows) <= self.limits.run_segments_max
        assert all(row.size_bytes < self.limits.target_bytes for row in rows)
        assert not any(row.is_hopeless for row in rows)
        assert not any(row.is_after_border for row in rows[1:])

    def _merge(self, run: MergeRun) -> None:
        rows = self._rows_of(run)
        self.manifest = self.manifest.merged(
            remote(run.base_offset, run.next_offset - 1, size_bytes=run.size_bytes, crc32c=1), now_ms=0
        )
        at = self.rows.index(rows[0])
        merged = Row(
            run.base_offset,
            run.next_offset,
            run.size_bytes,
            moves=1 + max(row.moves for row in rows),
            is_after_border=rows[0].is_after_border,
        )
        self.rows[at : at + len(rows)] = [merged]

    def require_same(self) -> None:
        assert [(row.base_offset, row.next_offset, row.size_bytes) for row in self.rows] == [
            (one.base_offset, one.next_offset, one.size_bytes) for one in self.manifest.segments
        ]
        assert self.manifest.faults() == ()

    def require_done(self) -> None:
        """See that no two neighbours are left that could be one, except at the end."""
        *settled, _ = self.rows or [None]
        for one, other in pairwise(settled):
            assert (
                other.is_after_border
                or one.is_hopeless
                or other.is_hopeless
                or one.size_bytes + other.size_bytes > self.limits.target_bytes
                or self._is_in_waiting_run(one)
            ), (one, other)

    def _is_in_waiting_run(self, row: Row) -> bool:
        """Say whether all from *row* to the end is one run that may still grow."""
        rest = [one for one in self.rows if one.base_offset >= row.base_offset]
        size_bytes = sum(one.size_bytes for one in rest)
        return (
            not any(one.is_after_border or one.is_hopeless for one in rest[1:])
            and size_bytes <= self.limits.target_bytes
            and (
                size_bytes <= self.limits.min_bytes
                or any(one.size_bytes > self.limits.min_bytes for one in rest)
            )
        )


appends = st.tuples(
    st.just("append"),
    st.integers(0, 130),
    st.sampled_from(["", "", "", "", "", "", "gap", "epoch", "replacement"]),
)
steps = st.tuples(st.just("step"), st.just(False), st.booleans())
failures = st.tuples(st.just("step"), st.just(True), st.booleans())
expiries = st.tuples(st.just("expire"), st.none(), st.none())


@settings(max_examples=examples(400))
@given(
    st.lists(st.one_of(appends, appends, appends, steps, failures, expiries), max_size=80),
    st.integers(1, 4),
)
def test_archive_that_grows_is_merged_as_a_plain_list_is(operations, runs_max):
    """
    Runs keep the rules whatever is appended, expires or fails.

    What can be one object becomes one in the end.
    """
    plain = PlainList(MergeLimits(100, 50, runs_max=runs_max, run_segments_max=1000))
    for operation, first, second in operations:
        match operation:
            case "append":
                plain.append(first, second)
            case "step":
                plain.step(fails=first, from_start=second)
            case "expire":
                plain.expire()
        plain.require_same()
    for _ in range(200):
        if not plain.step(fails=False, from_start=False):
            break
    else:
        pytest.fail("merging does not come to an end")
    plain.cursor = 0
    while plain.step(fails=False, from_start=False):
        pass
    plain.require_same()
    plain.require_done()


@settings(max_examples=examples(300))
@given(st.lists(st.integers(1, 130), max_size=120))
def test_no_byte_is_moved_more_than_twice(sizes):
    """A byte is copied at most twice: to a segment of acceptable size, and to a full one."""
    plain = PlainList(MergeLimits(100, 50))
    for size_bytes in sizes:
        plain.append(size_bytes, "")
        plain.step(fails=False, from_start=True)
        assert max(row.moves for row in plain.rows) <= 2


@settings(max_examples=examples(200))
@given(st.lists(st.integers(1, 1200), max_size=40), st.integers(3, 9))
def test_bounded_calls_find_what_one_call_finds(sizes, rows_max):
    """Short steps find the same runs as one walk over all segments, however short they are."""
    manifest = of_sizes(*sizes)
    whole = replace(LIMITS, runs_max=1000, run_segments_max=2)
    steps_of = replace(whole, rows_max=rows_max, runs_max=2)
    found, cursor = [], 0
    for _ in range(200):
        plan = plan_merges(manifest, steps_of, from_offset=cursor)
        found += plan.runs
        cursor = plan.resume_offset
        if plan.is_complete:
            break
    assert tuple(found) == plan_merges(manifest, whole).runs
