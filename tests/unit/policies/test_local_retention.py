"""Local retention: what may leave the disk, in what order, and why the next one stays."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.model.values import TIME_MS, local_log, remote, stored
from tieringd.model.manifest_parts import Gap
from tieringd.policies.local_retention import (
    LocalRetentionTarget,
    TrimPlan,
    plan_trim,
    trim_due_ms,
)
from tieringd.policies.retention_time import retention_time_ms

NOTHING_STAYS = LocalRetentionTarget(target_ms=0, target_bytes=0)
BY_BYTES = LocalRetentionTarget(target_ms=None, target_bytes=3000)
BY_TIME = LocalRetentionTarget(target_ms=1000, target_bytes=None)
NO_LIMIT = LocalRetentionTarget(target_ms=None, target_bytes=None)
FAR_FUTURE_MS = TIME_MS + 10**12


def archived(bases, *, until=None, **fields):
    """Return a manifest of the closed segments of a log, up to *until* exclusive."""
    return stored(
        remote(base, end - 1, **fields) for base, end in pairwise(bases) if until is None or base < until
    )


def plan(bases, target, *, manifest=None, sizes=None, log_start_offset=0, now_ms=FAR_FUTURE_MS) -> TrimPlan:
    log = local_log(bases, sizes=sizes)
    found = archived(bases) if manifest is None else manifest
    return plan_trim(log, found, target, log_start_offset=log_start_offset, now_ms=now_ms)


def trimmed(found: TrimPlan) -> list[int]:
    """Return the base offsets of a plan's segments."""
    return [one.local.base_offset for one in found.candidates]


@pytest.mark.parametrize(
    ("bases", "log_start_offset", "highest_remote", "remaining"),
    [
        pytest.param([0, 1, 2, 3, 4, 5], 0, 1, [2, 3, 4, 5], id="two of five stored"),
        pytest.param([0, 1, 2, 3, 4, 5], 0, -1, [0, 1, 2, 3, 4, 5], id="nothing stored"),
        pytest.param([0, 11, 21, 31, 41], 0, 30, [31, 41], id="three of four stored"),
        pytest.param([0, 4], 3, -1, [0, 4], id="log start inside a segment that is not stored"),
        pytest.param([0, 4], 4, -1, [4], id="log start past a segment that is not stored"),
    ],
)
def test_trim_leaves_what_kafka_leaves(bases, log_start_offset, highest_remote, remaining):
    """A trim leaves the same segments as Kafka, in Kafka's own cases of a breached limit."""
    found = plan(
        bases,
        NOTHING_STAYS,
        manifest=archived(bases, until=highest_remote + 1),
        log_start_offset=log_start_offset,
    )
    on_their_way_out = {base for base, end in pairwise(bases) if end <= log_start_offset}
    assert [base for base in bases if base not in {*trimmed(found), *on_their_way_out}] == remaining


@pytest.mark.parametrize(
    ("target_bytes", "expected"),
    [
        pytest.param(50 * 1024 + 512, 0, id="exactly as much as there is"),
        pytest.param(50 * 1024 + 511, 0, id="less than a segment above the target"),
        pytest.param(49 * 1024 + 513, 0, id="one byte short of a segment above"),
        pytest.param(49 * 1024 + 512, 1, id="one segment above"),
        pytest.param(27 * 1024 + 512, 23, id="23 segments above"),
        pytest.param(512, 50, id="all but the active one above"),
        pytest.param(0, 50, id="no byte stays, but the active segment does"),
    ],
)
def test_trim_by_size_never_goes_below_the_target(target_bytes, expected):
    """A trim leaves at least the target's bytes of 50 segments of 1 KiB and 512 active bytes."""
    bases = list(range(0, 5001, 100))
    found = plan(bases, LocalRetentionTarget(None, target_bytes), sizes={5000: 512})
    assert trimmed(found) == bases[:expected]


@pytest.mark.parametrize("old", [0, 1, 23, 50])
def test_trim_by_time_takes_the_old_ones_at_the_head(old):
    """A trim takes exactly those of 50 segments that are older than the limit."""
    bases = list(range(0, 5001, 100))
    rows = [
        remote(base, base + 99, max_timestamp_ms=TIME_MS - 1 if number < old else TIME_MS)
        for number, base in enumerate(bases[:-1])
    ]
    found = plan(bases, LocalRetentionTarget(1, None), manifest=stored(rows), now_ms=TIME_MS)
    assert trimmed(found) == bases[:old]


@pytest.mark.parametrize(
    ("age_ms", "expected"), [(999, []), (1000, [0, 10]), (1001, [0, 10])], ids=["younger", "as old", "older"]
)
def test_trim_by_time_takes_a_segment_exactly_as_old_as_the_target(age_ms, expected):
    """The limit is inclusive: a segment goes in the millisecond in which it reaches the age."""
    now_ms = remote(0, 9).max_timestamp_ms + age_ms
    assert trimmed(plan([0, 10, 20], BY_TIME, now_ms=now_ms)) == expected


def test_trim_stops_at_a_young_segment_before_an_old_one():
    """A segment behind one that must stay is not taken, however old: a trim is a prefix."""
    rows = [remote(0, 9), remote(10, 19, max_timestamp_ms=TIME_MS + 5000), remote(20, 29)]
    manifest = stored(rows)
    now_ms = TIME_MS + 2000
    found = plan([0, 10, 20, 30], BY_TIME, manifest=manifest, now_ms=now_ms)
    assert trimmed(found) == [0]
    assert found.kept_because == "segment 10 is within the local retention target"


@pytest.mark.parametrize(
    ("target_ms", "target_bytes", "now_ms", "expected"),
    [
        pytest.param(None, None, FAR_FUTURE_MS, [], id="no limit keeps everything"),
        pytest.param(1000, 0, TIME_MS, [0, 10], id="by size alone, though young"),
        pytest.param(1000, 10**9, FAR_FUTURE_MS, [0, 10], id="by time alone, though small"),
        pytest.param(1000, 10**9, TIME_MS, [], id="neither"),
        pytest.param(0, None, FAR_FUTURE_MS, [0, 10], id="no time at all"),
        pytest.param(None, 0, 0, [0, 10], id="no byte at all"),
    ],
)
def test_trim_needs_one_of_the_two_limits(target_ms, target_bytes, now_ms, expected):
    """Time and size are each enough; without a limit nothing goes."""
    found = plan([0, 10, 20], LocalRetentionTarget(target_ms, target_bytes), now_ms=now_ms)
    assert trimmed(found) == expected


@pytest.mark.parametrize(
    ("max_timestamp_ms", "uploaded_at_ms", "expected"),
    [
        pytest.param(5000, 9000, 5000, id="newest record"),
        pytest.param(9999, 9000, 9000, id="dated in the future"),
        pytest.param(9000, 9000, 9000, id="at the upload"),
        pytest.param(-1, 9000, 9000, id="without a timestamp"),
        pytest.param(0, 9000, 0, id="1970 is a time"),
    ],
)
def test_retention_time_is_the_newest_record_but_never_after_the_upload(
    max_timestamp_ms, uploaded_at_ms, expected
):
    """A timestamp in the future, or none, counts as the time of the upload."""
    segment = remote(0, 9, max_timestamp_ms=max_timestamp_ms, uploaded_at_ms=uploaded_at_ms)
    assert retention_time_ms(segment) == expected


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        pytest.param([], "offset 10 of segment 10 is not in the archive", id="not stored"),
        pytest.param([remote(10, 18)], "offset 19 of segment 10 is not in the archive", id="stored shorter"),
        pytest.param([remote(0, 9)], "offset 10 of segment 10 is not in the archive", id="stored before it"),
        pytest.param(
            [remote(20, 29)], "offset 10 of segment 10 is not in the archive", id="stored behind it"
        ),
        pytest.param(
            [remote(11, 19)], "offset 10 of segment 10 is not in the archive", id="its head missing"
        ),
        pytest.param(
            [remote(0, 14)], "offset 15 of segment 10 is not in the archive", id="only its head, from before"
        ),
        pytest.param(
            [remote(10, 19, size_bytes=1023)],
            "segment 10 has 1024 bytes on disk and 1023 in the archive",
            id="stored with another size",
        ),
        pytest.param(
            [remote(10, 12, size_bytes=1000), remote(13, 19, size_bytes=25)],
            "segment 10 has 1024 bytes on disk and 1025 in the archive",
            id="pieces of another size together",
        ),
    ],
)
def test_trim_keeps_what_is_not_durable(rows, reason):
    """A segment stays unless the archive has all of its offsets and bytes, however large the log is."""
    found = plan([10, 20, 30], NOTHING_STAYS, manifest=stored(rows))
    assert (trimmed(found), found.kept_because) == ([], reason)


def pieces_of(found: TrimPlan) -> list[tuple[list[int], bool]]:
    """Return the bases of each candidate's pieces, and whether they begin and end where it does."""
    return [([one.base_offset for one in each.pieces], each.has_checksums) for each in found.candidates]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        pytest.param([remote(10, 19)], ([10], True), id="one of the same bounds"),
        pytest.param(
            [remote(10, 12, size_bytes=24), remote(13, 19, size_bytes=1000)],
            ([10, 13], True),
            id="two pieces",
        ),
        pytest.param(
            [remote(10, 12, size_bytes=4, writer_id="rewritten-0a"), remote(13, 19, size_bytes=1000)],
            ([10, 13], False),
            id="two pieces, of which a job rewrote one",
        ),
        pytest.param(
            [remote(at, at, size_bytes=1024 if at == 14 else 0) for at in range(10, 20)],
            (list(range(10, 20)), True),
            id="a piece for each offset",
        ),
        pytest.param([remote(10, 20)], ([10], False), id="stored longer"),
        pytest.param([remote(5, 19)], ([5], False), id="stored with an earlier base"),
        pytest.param([remote(0, 99, size_bytes=7)], ([0], False), id="inside a larger one"),
        pytest.param(
            [remote(5, 14, size_bytes=1), remote(15, 25, size_bytes=1)], ([5, 15], False), id="cut elsewhere"
        ),
        pytest.param(
            [remote(5, 9), remote(10, 14), remote(15, 25), remote(26, 30)],
            ([10, 15], False),
            id="only the pieces that reach into it",
        ),
        pytest.param(
            [remote(5, 11, size_bytes=1024), remote(12, 19)], ([5, 12], False), id="aligned at its end only"
        ),
    ],
)
def test_trim_takes_a_segment_that_the_archive_covers_however_it_is_cut(rows, expected):
    """One piece or several, of the same bounds or others: all pieces are named, and no others."""
    found = plan([10, 20], NOTHING_STAYS, manifest=replace(stored(rows), epochs=((0, 0),)))
    assert trimmed(found) == [10]
    assert pieces_of(found) == [expected]
    assert found.candidates[0].next_offset == 20


@pytest.mark.parametrize("size_bytes", [1, 1023, 1024, 10**9])
def test_trim_of_pieces_cut_elsewhere_leaves_the_size_to_the_comparison(size_bytes):
    """Sizes say nothing if pieces have other bounds than the segment: the trimmer reads the bytes."""
    found = plan([10, 20], NOTHING_STAYS, manifest=stored([remote(5, 30, size_bytes=size_bytes)]))
    assert pieces_of(found) == [([5], False)]


def test_trim_of_a_reframed_log_leaves_the_size_to_the_comparison():
    """Sizes of a reframed log say nothing, even with equal bounds: its files are not the stored bytes."""
    log = local_log([10, 20])
    manifest = stored([remote(10, 19, size_bytes=999)])
    kept = plan_trim(log, manifest, NOTHING_STAYS, log_start_offset=0, now_ms=FAR_FUTURE_MS)
    found = plan_trim(
        replace(log, is_reframed=True), manifest, NOTHING_STAYS, log_start_offset=0, now_ms=FAR_FUTURE_MS
    )
    assert (trimmed(kept), trimmed(found)) == ([], [10])
    short = stored([remote(10, 18, size_bytes=999)])
    found = plan_trim(
        replace(log, is_reframed=True), short, NOTHING_STAYS, log_start_offset=0, now_ms=FAR_FUTURE_MS
    )
    assert found.kept_because == "offset 19 of segment 10 is not in the archive"


@pytest.mark.parametrize(
    ("gap", "rows", "missing"),
    [
        pytest.param(Gap(10, 19, "", 0), [remote(20, 29)], 10, id="the whole segment"),
        pytest.param(Gap(10, 14, "", 0), [remote(15, 29)], 10, id="its head"),
        pytest.param(Gap(15, 19, "", 0), [remote(20, 29)], 15, id="its tail"),
        pytest.param(Gap(13, 14, "", 0), [remote(15, 29)], 13, id="its middle"),
    ],
)
def test_trim_keeps_a_segment_with_an_offset_in_a_gap(gap, rows, missing):
    """A gap stands for bytes that were not archived, so a file with them may be the only copy."""
    before = [remote(0, gap.base_offset - 1)]
    manifest = stored(before).with_gap(gap).appended(rows)
    found = plan([10, 20, 30], NOTHING_STAYS, manifest=manifest)
    assert (trimmed(found), found.kept_because) == (
        [],
        f"offset {missing} of segment 10 is not in the archive",
    )


def test_trim_by_time_goes_by_the_newest_piece():
    """A segment is as old as the newest record in any of its pieces."""
    rows = [remote(10, 12, size_bytes=512), remote(13, 19, size_bytes=512, max_timestamp_ms=TIME_MS + 1500)]
    newest_first = [
        remote(10, 12, size_bytes=512, max_timestamp_ms=TIME_MS + 1500),
        remote(13, 19, size_bytes=512),
    ]
    for each in (rows, newest_first):
        assert trimmed(plan([10, 20], BY_TIME, manifest=stored(each), now_ms=TIME_MS + 2499)) == []
        assert trimmed(plan([10, 20], BY_TIME, manifest=stored(each), now_ms=TIME_MS + 2500)) == [10]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        pytest.param([], "offset 10 of segment 10 is not", id="not stored"),
        pytest.param([remote(10, 18)], "offset 19 of segment 10 is not", id="shorter"),
        pytest.param([remote(10, 19, size_bytes=1), remote(20, 29)], "segment 10 has 1024 bytes", id="size"),
    ],
)
def test_trim_keeps_all_behind_what_is_not_durable(rows, reason):
    """A durable segment goes from the head, and one behind a segment that must stay does not."""
    found = plan([0, 10, 20, 30], NOTHING_STAYS, manifest=stored([remote(0, 9), *rows]))
    assert trimmed(found) == [0]
    assert found.kept_because.startswith(reason)


def test_trim_names_the_stored_copy_of_each_segment():
    """A candidate is the local segment with the manifest's own entry for it."""
    rows = [remote(0, 9, crc32c=1), remote(10, 19, crc32c=2)]
    found = plan([0, 10, 20], NOTHING_STAYS, manifest=stored(rows))
    assert [one.pieces for one in found.candidates] == [(row,) for row in rows]
    assert [one.local for one in found.candidates] == list(local_log([0, 10, 20]).closed_segments)


@pytest.mark.parametrize(
    ("bases", "reason"),
    [
        pytest.param([0, 10, 20], "the active segment always stays", id="all closed ones go"),
        pytest.param([20], "the active segment always stays", id="only the active one"),
        pytest.param([], "there is no active segment yet", id="no segment"),
    ],
)
def test_trim_says_why_it_ends(bases, reason):
    """A plan that takes every closed segment still says why the last one stays."""
    found = plan(bases, NOTHING_STAYS)
    assert trimmed(found) == bases[:-1]
    assert found.kept_because == reason


@pytest.mark.parametrize(
    ("log_start_offset", "expected"),
    [
        pytest.param(0, [0], id="none gone"),
        pytest.param(9, [0], id="inside the first"),
        pytest.param(10, [], id="the first is gone"),
        pytest.param(11, [], id="inside the second"),
        pytest.param(20, [], id="two are gone"),
    ],
)
def test_trim_counts_segments_below_the_log_start_as_gone(log_start_offset, expected):
    """Segments that the broker is already removing are not named again, and their bytes do not count."""
    # Four segments of 1024 bytes and the active one: 3000 bytes need three of them to stay.
    found = plan([0, 10, 20, 30], BY_BYTES, log_start_offset=log_start_offset)
    assert trimmed(found) == expected


def test_trim_below_the_log_start_needs_no_stored_copy():
    """Segments on their way out are passed over, stored or not, and the walk goes on behind them."""
    bases = [0, 10, 20, 30]
    manifest = stored([remote(10, 19), remote(20, 29)])
    found = plan(bases, NOTHING_STAYS, manifest=manifest, log_start_offset=10)
    assert trimmed(found) == [10, 20]


def test_trim_without_a_limit_says_so_of_the_first_segment():
    """A topic that keeps everything has a reason for its oldest segment."""
    found = plan([0, 10, 20], NO_LIMIT)
    assert (trimmed(found), found.kept_because) == ([], "segment 0 is within the local retention target")


log_starts = st.just(0) | st.integers(0, 110)


@st.composite
def situations(draw: st.DrawFn):
    """Draw a log, and an archive of other cuts, with gaps and wrong sizes here and there."""
    bases = draw(st.lists(st.integers(0, 60), unique=True, min_size=1, max_size=7).map(sorted))
    sizes = {base: draw(st.integers(1, 3)) for base in bases}
    cuts = sorted(
        set(bases) - set(draw(st.lists(st.sampled_from(bases), max_size=2)))
        | draw(st.sets(st.integers(0, 65), max_size=2))
    )
    manifest = stored([], start_offset=cuts[0]) if cuts else stored([])
    for base, end in pairwise(cuts):
        if draw(st.integers(0, 9)) == 0:
            manifest = manifest.with_gap(Gap(base, end - 1, "", 0))
            continue
        size_bytes = sizes.get(base, 1) + draw(st.sampled_from([0] * 6 + [1]))
        row = remote(
            base, end - 1, size_bytes=size_bytes, max_timestamp_ms=TIME_MS + draw(st.integers(-3, 3))
        )
        manifest = manifest.appended([row])
    target = LocalRetentionTarget(
        draw(st.none() | st.integers(0, 5)), draw(st.none() | st.integers(0, 3 * len(bases)))
    )
    return bases, sizes, manifest, target, draw(log_starts), TIME_MS + draw(st.integers(-3, 5))


@given(situations())
def test_trim_is_the_longest_durable_prefix_that_breaches_a_limit(situation):
    """
    A trim takes the whole durable head that breaches a limit, and no more.

    This holds for any log and target.
    """
    bases, sizes, manifest, target, log_start_offset, now_ms = situation
    found = plan(
        bases, target, manifest=manifest, sizes=sizes, log_start_offset=log_start_offset, now_ms=now_ms
    )
    alive = [base for base, end in zip(bases, [*bases[1:], 10**9], strict=False) if end > log_start_offset]
    # Found another way: offset by offset, from a table of who holds what.
    holders = {offset: row for row in manifest.segments for offset in range(row.base_offset, row.next_offset)}
    left = sum(sizes[base] for base in alive)
    expected = []
    for base, end in pairwise(alive):
        held_by = [holders.get(offset) for offset in range(base, end)]
        if None in held_by:
            break
        pieces = tuple(row for row in manifest.segments if row in held_by)
        same_cuts = pieces[0].base_offset == base and pieces[-1].last_offset == end - 1
        if same_cuts and sum(row.size_bytes for row in pieces) != sizes[base]:
            break
        newest_ms = max(row.max_timestamp_ms for row in pieces)
        is_old = target.target_ms is not None and now_ms - newest_ms >= target.target_ms
        left -= sizes[base]
        if not is_old and (target.target_bytes is None or left < target.target_bytes):
            break
        expected.append((base, end, pieces, same_cuts))
    assert [
        (one.local.base_offset, one.next_offset, one.pieces, one.has_checksums) for one in found.candidates
    ] == expected
    assert found.kept_because


@given(situations())
def test_trim_is_due_from_when_on_a_plan_names_a_segment(situation):
    """Every plan before the due time is empty, and no plan from then on is, if nothing else changes."""
    bases, sizes, manifest, target, log_start_offset, _ = situation
    log = local_log(bases, sizes=sizes)
    due_ms = trim_due_ms(log, manifest, target, log_start_offset=log_start_offset)
    for now_ms in (0, *range(TIME_MS - 10, TIME_MS + 20), FAR_FUTURE_MS):
        found = plan_trim(log, manifest, target, log_start_offset=log_start_offset, now_ms=now_ms)
        assert bool(found.candidates) == (now_ms >= due_ms)


@pytest.mark.parametrize(
    ("target", "rows", "due_ms"),
    [
        pytest.param(BY_TIME, [remote(10, 19)], TIME_MS + 1999, id="by time"),
        pytest.param(
            BY_TIME,
            [remote(10, 14, size_bytes=1000, max_timestamp_ms=TIME_MS + 5), remote(15, 19, size_bytes=24)],
            TIME_MS + 1999,
            id="by the newest piece",
        ),
        pytest.param(BY_TIME, [remote(10, 18)], math.inf, id="not durable"),
        pytest.param(NO_LIMIT, [remote(10, 19)], math.inf, id="no limit"),
        pytest.param(NOTHING_STAYS, [remote(10, 19)], -math.inf, id="by size"),
        pytest.param(BY_BYTES, [remote(10, 19)], math.inf, id="small enough"),
    ],
)
def test_trim_is_due_to_the_millisecond(target, rows, due_ms):
    """A trim by time is due at the newest record's age, one by size at once, one without limits never."""
    log = local_log([10, 20])
    assert trim_due_ms(log, stored(rows), target, log_start_offset=0) == due_ms
    assert trim_due_ms(log, stored(rows), target, log_start_offset=20) == math.inf, "it is gone already"


@pytest.mark.parametrize("is_reframed", [False, True])
def test_trim_of_a_reframed_log_is_due_whatever_its_sizes(is_reframed):
    """The time and the plan go by the same rule."""
    log = replace(local_log([10, 20]), is_reframed=is_reframed)
    manifest = stored([remote(10, 19, size_bytes=999)])
    due_ms = trim_due_ms(log, manifest, NOTHING_STAYS, log_start_offset=0)
    assert due_ms == (-math.inf if is_reframed else math.inf)
