"""Local retention: what may leave the disk, in what order, and why the next one stays."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.model.values import TIME_MS, local_log, remote, stored
from tieringd.model.manifest import Gap
from tieringd.policies.local_retention import (
    LocalRetentionTarget,
    TrimPlan,
    plan_trim,
    retention_time_ms,
)

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
    """In Kafka's own cases, where every closed segment breaches a limit, the same segments remain."""
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
    """Of 50 segments of 1 KiB and 512 active bytes, as many go as leave at least the target."""
    bases = list(range(0, 5001, 100))
    found = plan(bases, LocalRetentionTarget(None, target_bytes), sizes={5000: 512})
    assert trimmed(found) == bases[:expected]


@pytest.mark.parametrize("old", [0, 1, 23, 50])
def test_trim_by_time_takes_the_old_ones_at_the_head(old):
    """Of 50 segments the first few are older than the limit, and exactly those go."""
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
        pytest.param([], "segment 10 is not in the manifest", id="not stored"),
        pytest.param(
            [remote(10, 20)],
            "segment 10 is stored with other bounds (10 to 20), so its copy cannot be compared",
            id="stored longer",
        ),
        pytest.param(
            [remote(10, 18)],
            "segment 10 is stored with other bounds (10 to 18), so its copy cannot be compared",
            id="stored shorter",
        ),
        pytest.param(
            [remote(5, 19)],
            "segment 10 is stored with other bounds (5 to 19), so its copy cannot be compared",
            id="stored with an earlier base",
        ),
        pytest.param(
            [remote(10, 19, size_bytes=1023)],
            "segment 10 has 1024 bytes on disk and 1023 in the archive",
            id="stored with another size",
        ),
    ],
)
def test_trim_keeps_what_is_not_durable(rows, reason):
    """However far past its target, a segment stays without a stored copy of equal bounds and size."""
    found = plan([10, 20, 30], NOTHING_STAYS, manifest=stored(rows))
    assert (trimmed(found), found.kept_because) == ([], reason)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        pytest.param([], "segment 10 is not in the manifest", id="not stored"),
        pytest.param([remote(10, 18), remote(19, 29)], "segment 10 is stored with other bounds", id="bounds"),
        pytest.param([remote(10, 19, size_bytes=1), remote(20, 29)], "segment 10 has 1024 bytes", id="size"),
    ],
)
def test_trim_keeps_all_behind_what_is_not_durable(rows, reason):
    """A durable segment goes from the head, and one behind a segment that must stay does not."""
    found = plan([0, 10, 20, 30], NOTHING_STAYS, manifest=stored([remote(0, 9), *rows]))
    assert trimmed(found) == [0]
    assert found.kept_because.startswith(reason)


def test_trim_keeps_a_segment_that_is_recorded_as_a_gap():
    """A gap stands for bytes that were not archived, so a file with them may be the only copy."""
    manifest = stored([remote(0, 9)]).with_gap(Gap(10, 19, "message format v0/v1 is not archived", 0))
    found = plan([0, 10, 20, 30], NOTHING_STAYS, manifest=manifest.appended([remote(20, 29)]))
    assert (trimmed(found), found.kept_because) == ([0], "segment 10 is not in the manifest")


def test_trim_names_the_stored_copy_of_each_segment():
    """A candidate is the local segment with the manifest's own entry for it."""
    rows = [remote(0, 9, crc32c=1), remote(10, 19, crc32c=2)]
    found = plan([0, 10, 20], NOTHING_STAYS, manifest=stored(rows))
    assert [one.remote for one in found.candidates] == rows
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
    """What the broker is removing already is not named again, and its bytes no longer count."""
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
    """Draw a log and a manifest that agree about some segments and not about others."""
    bases = draw(st.lists(st.integers(0, 100), unique=True, max_size=8).map(sorted))
    sizes = {base: draw(st.integers(1, 3)) for base in bases}
    rows, next_offset = [], None
    for base, end in pairwise(bases):
        kind = draw(st.sampled_from(["same"] * 6 + ["size", "shorter", "none"]))
        last = end - 1 if kind != "shorter" or end - 1 == base else end - 2
        if kind == "none" or next_offset not in (None, base):
            break
        size_bytes = sizes[base] + (kind == "size")
        max_timestamp_ms = TIME_MS + draw(st.integers(-3, 3))
        rows.append(remote(base, last, size_bytes=size_bytes, max_timestamp_ms=max_timestamp_ms))
        next_offset = last + 1
    target = LocalRetentionTarget(
        draw(st.none() | st.integers(0, 5)), draw(st.none() | st.integers(0, 3 * len(bases)))
    )
    return bases, sizes, stored(rows), target, draw(log_starts), TIME_MS + draw(st.integers(-3, 5))


@given(situations())
def test_trim_is_the_longest_durable_prefix_that_breaches_a_limit(situation):
    """Whatever log, manifest and target: all of the durable, superfluous head goes, and no more."""
    bases, sizes, manifest, target, log_start_offset, now_ms = situation
    found = plan(
        bases, target, manifest=manifest, sizes=sizes, log_start_offset=log_start_offset, now_ms=now_ms
    )
    alive = [base for base, end in zip(bases, [*bases[1:], 10**9], strict=False) if end > log_start_offset]
    rows = {segment.base_offset: segment for segment in manifest.segments}
    local_sizes = sum(sizes[base] for base in alive)
    expected = []
    for base, end in pairwise(alive):
        row = rows.get(base)
        if row is None or (row.last_offset, row.size_bytes) != (end - 1, sizes[base]):
            break
        is_old = target.target_ms is not None and now_ms - row.max_timestamp_ms >= target.target_ms
        left = local_sizes - sizes[base]
        if not is_old and (target.target_bytes is None or left < target.target_bytes):
            break
        expected.append((base, end, row))
        local_sizes = left
    assert [
        (one.local.base_offset, one.local.next_offset, one.remote) for one in found.candidates
    ] == expected
    assert found.kept_because
