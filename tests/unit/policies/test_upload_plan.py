"""Upload planning: what goes next, what waits and why, and what is missing."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.model.values import PARTITION, TIME_MS, local, local_log, remote, stored
from tieringd.formats.manifest_codec import decode_manifest, encode_manifest
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Gap
from tieringd.model.partition import LogBounds
from tieringd.model.segment import SegmentSlice
from tieringd.policies.upload_plan import (
    MissingRange,
    UploadLimits,
    UploadPlan,
    admissible_prefix,
    plan_uploads,
    upload_due_ms,
)

ALL = UploadLimits(segments_per_step=1000)


def plan_of(
    log, *, next_offset, last_stable_offset=10**9, high_watermark=10**9, limits=ALL, is_overdue=False
) -> UploadPlan:
    bounds = LogBounds(log.first_offset or 0, min(last_stable_offset, high_watermark), high_watermark)
    return plan_uploads(log, bounds, next_offset=next_offset, limits=limits, is_overdue=is_overdue)


def plan(bases, *, sizes=None, **facts) -> UploadPlan:
    return plan_of(local_log(bases, sizes=sizes), **facts)


def chosen(found: UploadPlan) -> list[tuple[int, int]]:
    """Return the first and last offset of each slice of a plan; none of them may be open."""
    assert not any(part.is_open for part in found.slices)
    return [(part.base_offset, part.next_offset - 1) for part in found.slices]


def parts(found: UploadPlan) -> list[tuple[int, int, int, bool]]:
    """Return the segment's base, the bounds and the openness of each slice of a plan."""
    return [
        (part.segment.base_offset, part.base_offset, part.next_offset, part.is_open) for part in found.slices
    ]


@pytest.mark.parametrize(
    ("bases", "next_offset", "last_stable_offset", "expected"),
    [
        pytest.param([5, 10, 15], 5, 20, [(5, 9), (10, 14)], id="the active segment never"),
        pytest.param([5, 10, 15, 20], 5, 15, [(5, 9), (10, 14)], id="up to the last stable offset"),
        pytest.param([0, 150], 0, 250, [(0, 149)], id="one long segment"),
    ],
)
def test_upload_plan_takes_the_candidates_that_kafka_takes(bases, next_offset, last_stable_offset, expected):
    """The same segments with the same ends are chosen as in the cases of Kafka's own copy task."""
    found = plan(bases, next_offset=next_offset, last_stable_offset=last_stable_offset)
    assert chosen(found) == expected


@pytest.mark.parametrize(
    ("bases", "next_offset", "last_stable_offset", "expected", "words"),
    [
        pytest.param([0, 10, 20], None, 99, [(0, 9), (10, 19)], "segment 20 is active", id="nothing stored"),
        pytest.param([7, 10, 20], None, 99, [(7, 9), (10, 19)], "segment 20 is active", id="not from zero"),
        pytest.param([0, 10, 20], 0, 99, [(0, 9), (10, 19)], "segment 20 is active", id="nothing yet"),
        pytest.param([0, 10, 20], 10, 99, [(10, 19)], "segment 20 is active", id="goes on"),
        pytest.param([0, 10, 20], 20, 99, [], "segment 20 is active", id="nothing left"),
        pytest.param([0, 10, 20], 25, 99, [], "segment 20 is active", id="ahead of the closed ones"),
        pytest.param([20], None, 99, [], "segment 20 is active", id="only the active one"),
        pytest.param([], None, 0, [], "", id="empty log"),
        pytest.param([], 7, 0, [], "", id="empty log of which something is stored"),
        pytest.param(
            [0, 10, 20, 30],
            0,
            19,
            [(0, 9)],
            "segment 10 ends past the last stable offset 19: a transaction is open",
            id="unstable",
        ),
        pytest.param([0, 10, 20, 30], 0, 20, [(0, 9), (10, 19)], "segment 20 ends past", id="just stable"),
        pytest.param([0, 10], 0, 9, [], "segment 0 ends past the last stable offset 9", id="nothing stable"),
        pytest.param([0, 10, 20], 5, 99, [(5, 9), (10, 19)], "segment 20 is active", id="inside a segment"),
        pytest.param([0, 10, 20], 11, 99, [(11, 19)], "segment 20 is active", id="one offset into it"),
        pytest.param([0, 10, 20], 19, 99, [(19, 19)], "segment 20 is active", id="its last offset"),
        pytest.param([0, 10, 20], 15, 19, [], "segment 10 ends past", id="inside one that is unstable"),
    ],
)
def test_upload_plan_stops_at_the_first_segment_that_waits(
    bases, next_offset, last_stable_offset, expected, words
):
    """The plan ends before the first segment that must wait, and says why it waits."""
    found = plan(bases, next_offset=next_offset, last_stable_offset=last_stable_offset)
    assert chosen(found) == expected
    assert found.waits_because.startswith(words)
    assert bool(found.waits_because) == bool(words)
    assert found.missing is None


@pytest.mark.parametrize(
    ("last_stable_offset", "next_offset", "expected"),
    [
        pytest.param(35, 0, False, id="inside the active segment"),
        pytest.param(30, 0, False, id="at its base"),
        pytest.param(29, 0, True, id="inside the last closed one"),
        pytest.param(5, 0, True, id="inside the first"),
        pytest.param(5, 30, False, id="behind an archive that has all closed ones"),
    ],
)
def test_upload_plan_knows_what_a_transaction_holds_back(last_stable_offset, next_offset, expected):
    """A closed segment that is not stable is held back; an active one only waits to be closed."""
    found = plan([0, 10, 20, 30], next_offset=next_offset, last_stable_offset=last_stable_offset)
    assert found.held_by_transaction is expected


@pytest.mark.parametrize(
    ("last_stable_offset", "next_offset", "expected"),
    [
        pytest.param(30, 0, (321, 0), id="all are stable"),
        pytest.param(29, 0, (21, 300), id="the last"),
        pytest.param(5, 0, (0, 321), id="all"),
        pytest.param(15, 12, (0, 320), id="of which a part is durable"),
    ],
)
def test_upload_plan_counts_the_bytes_that_a_transaction_holds_back(
    last_stable_offset, next_offset, expected
):
    """The closed segments from the first that is held are not pending; the active one is neither."""
    found = plan(
        [0, 10, 20, 30],
        next_offset=next_offset,
        last_stable_offset=last_stable_offset,
        sizes={0: 1, 10: 20, 20: 300, 30: 4000},
    )
    assert (found.pending_bytes, found.held_bytes) == expected


@pytest.mark.parametrize(
    ("last_stable_offset", "high_watermark", "expected", "because"),
    [
        pytest.param(19, 19, (1, 0), "10 ends past the high watermark 19: its end is", id="no transaction"),
        pytest.param(20, 20, (21, 0), "20 ends past the high watermark 20: its end is", id="one of two is"),
        pytest.param(10, 19, (1, 0), "10 ends past the high watermark 19: its end is", id="both"),
        pytest.param(
            19, 20, (1, 20), "10 ends past the last stable offset 19: a transaction", id="a transaction"
        ),
        pytest.param(
            19, 29, (1, 20), "10 ends past the last stable offset 19: a transaction", id="the next is both"
        ),
    ],
)
def test_upload_plan_does_not_take_a_replica_that_lags_for_a_transaction(
    last_stable_offset, high_watermark, expected, because
):
    """A closed segment past the high watermark waits for its replicas, whatever transactions are open."""
    found = plan(
        [0, 10, 20, 30],
        next_offset=0,
        last_stable_offset=last_stable_offset,
        high_watermark=high_watermark,
        sizes={0: 1, 10: 20, 20: 300, 30: 4000},
    )
    assert (found.pending_bytes, found.held_bytes) == expected
    assert found.held_by_transaction is bool(expected[1])
    assert found.waits_because.startswith(f"segment {because}")


@pytest.mark.parametrize(
    ("bases", "next_offset", "last_stable_offset", "expected"),
    [
        pytest.param([20], None, 25, [(20, 20, 25, True)], id="active and first of all"),
        pytest.param([20], 22, 25, [(20, 22, 25, True)], id="goes on where the last one ended"),
        pytest.param([20], 25, 25, [], id="no new record"),
        pytest.param([20], 24, 25, [(20, 24, 25, True)], id="one new record"),
        pytest.param([20], 30, 25, [], id="the archive is ahead of what is stable"),
        pytest.param([20], None, 20, [], id="nothing stable in it"),
        pytest.param(
            [0, 10, 20], 0, 25, [(0, 0, 10, False), (10, 10, 20, False), (20, 20, 25, True)], id="last"
        ),
        pytest.param(
            [0, 10, 20], 5, 20, [(0, 5, 10, False), (10, 10, 20, False)], id="none of the active one"
        ),
        pytest.param(
            [0, 10, 20], 0, 13, [(0, 0, 10, False), (10, 10, 13, True)], id="a closed one held back"
        ),
        pytest.param([0, 10, 20], 12, 13, [(10, 12, 13, True)], id="the rest of a closed one held back"),
        pytest.param([0, 10, 20], 0, 10, [(0, 0, 10, False)], id="held back at its first offset"),
        pytest.param([0, 10, 20], 0, 0, [], id="nothing stable"),
        pytest.param([], None, 0, [], id="empty log"),
    ],
)
def test_overdue_upload_takes_the_stable_part_of_the_segment_that_waits(
    bases, next_offset, last_stable_offset, expected
):
    """The first segment that waits gives its stable part when the interval is over. No other segment does."""
    facts = {"next_offset": next_offset, "last_stable_offset": last_stable_offset}
    found = plan(bases, is_overdue=True, **facts)
    assert parts(found) == expected
    in_time = plan(bases, **facts)
    assert parts(in_time) == [part for part in expected if not part[3]]
    assert replace(found, slices=()) == replace(in_time, slices=()), "an open slice is not pending"


def test_overdue_upload_waits_for_the_closed_segments_before_it():
    """The oldest segments go first if one step cannot take all. The open slice is left for a later step."""
    limits = UploadLimits(segments_per_step=2)
    found = plan([0, 10, 20], next_offset=0, last_stable_offset=25, limits=limits, is_overdue=True)
    assert parts(found) == [(0, 0, 10, False), (10, 10, 20, False)]


@pytest.mark.parametrize(
    ("bases", "next_offset", "missing", "expected"),
    [
        pytest.param([10, 20, 30], 9, MissingRange(9, 9), [(10, 19), (20, 29)], id="one offset"),
        pytest.param([10, 20, 30], 0, MissingRange(0, 9), [(10, 19), (20, 29)], id="several"),
        pytest.param([10, 20, 30], 10, None, [(10, 19), (20, 29)], id="none"),
        pytest.param([10, 20, 30], None, None, [(10, 19), (20, 29)], id="nothing was ever stored"),
        pytest.param([30], 5, MissingRange(5, 29), [], id="all but the active segment"),
    ],
)
def test_upload_plan_reports_what_is_missing(bases, next_offset, missing, expected):
    """The missing range begins where the archive goes on and ends before the oldest local offset."""
    found = plan(bases, next_offset=next_offset)
    assert found.missing == missing
    assert chosen(found) == expected


def test_upload_plan_reports_what_is_missing_before_an_unstable_segment():
    """A missing range is known at once, though what follows it must wait."""
    found = plan([10, 20, 30], next_offset=4, last_stable_offset=15)
    assert (found.missing, found.slices) == (MissingRange(4, 9), ())
    assert found.waits_because.startswith("segment 10 ends past")


def with_hole(*spans):
    """Return a log of segments with these bounds, as pins and files can leave it."""
    return replace(local_log([]), segments=tuple(local(base, end) for base, end in spans))


@pytest.mark.parametrize(
    ("next_offset", "missing", "expected", "words"),
    [
        pytest.param(None, None, [(0, 9)], "offsets 10 to 19 are missing on disk", id="nothing stored"),
        pytest.param(0, None, [(0, 9)], "offsets 10 to 19 are missing on disk", id="before the hole"),
        pytest.param(4, None, [(4, 9)], "offsets 10 to 19 are missing on disk", id="inside a segment"),
        pytest.param(10, MissingRange(10, 19), [(20, 29)], "segment 30 is active", id="at the hole"),
        pytest.param(15, MissingRange(15, 19), [(20, 29)], "segment 30 is active", id="inside the hole"),
        pytest.param(20, None, [(20, 29)], "segment 30 is active", id="behind the hole"),
    ],
)
def test_upload_plan_ends_before_a_hole_and_reports_it_when_it_gets_there(
    next_offset, missing, expected, words
):
    """Segments before a hole go first. The hole is reported as missing only once it is next."""
    log = with_hole((0, 10), (20, 30), (30, None))
    found = plan_of(log, next_offset=next_offset)
    assert (found.missing, chosen(found)) == (missing, expected)
    assert found.waits_because == words


@pytest.mark.parametrize(("limit", "expected"), [(0, 0), (1, 1), (3, 3), (4, 4), (5, 4)])
def test_upload_plan_counts_all_that_is_eligible(limit, expected):
    """The limit cuts what is chosen; pending counts every eligible segment, and no other."""
    sizes = {0: 1, 10: 20, 20: 300, 30: 4000, 40: 50_000, 50: 600_000, 60: 7_000_000}
    limits = UploadLimits(segments_per_step=limit)
    found = plan(list(sizes), next_offset=10, last_stable_offset=59, limits=limits, sizes=sizes)
    assert (found.pending_segments, found.pending_bytes) == (4, 54_320)
    assert [part.base_offset for part in found.slices] == [10, 20, 30, 40][:expected]


def test_upload_plan_takes_four_segments_unless_told_otherwise():
    """One step pays one commit for up to four segments."""
    found = plan([0, 1, 2, 3, 4, 5], next_offset=0, limits=UploadLimits())
    assert [part.base_offset for part in found.slices] == [0, 1, 2, 3]


@st.composite
def logs(draw: st.DrawFn):
    """Draw a log as pins and files leave it: ascending, mostly contiguous, its last segment active."""
    spans, base_offset = [], draw(st.integers(0, 10))
    for hole in draw(st.lists(st.sampled_from([0, 0, 0, 0, 1, 5]), max_size=8)):
        base_offset += hole
        spans.append((base_offset, base_offset + draw(st.integers(1, 8))))
        base_offset = spans[-1][1]
    return with_hole(*spans, (base_offset, None)) if draw(st.booleans()) else with_hole(*spans)


@given(
    log=logs(),
    next_offset=st.none() | st.integers(0, 70),
    last_stable_offset=st.integers(0, 80),
    limit=st.integers(0, 5),
    is_overdue=st.booleans(),
)
def test_upload_plan_is_contiguous_stable_and_ends_where_it_must(
    log, next_offset, last_stable_offset, limit, is_overdue
):
    """A plan leaves no hole and touches nothing that may still change, for any log, bounds and archive."""
    found = plan_of(
        log,
        next_offset=next_offset,
        last_stable_offset=last_stable_offset,
        limits=UploadLimits(segments_per_step=limit),
        is_overdue=is_overdue,
    )
    for part in found.slices:
        assert part.segment in log.segments
        assert part.segment.base_offset <= part.base_offset < part.next_offset <= last_stable_offset
        assert part.is_open or part.next_offset == part.segment.next_offset
    assert all(one.next_offset == following.base_offset for one, following in pairwise(found.slices))

    open_slices = [part for part in found.slices if part.is_open]
    assert open_slices in ([], [found.slices[-1]] if is_overdue and found.slices else [])
    assert found.pending_segments >= len(found.slices) - len(open_slices)
    assert len(found.slices) <= limit

    if found.slices and next_offset is not None:
        begins_at = found.missing.last_offset + 1 if found.missing else next_offset
        assert found.slices[0].base_offset == begins_at
    if found.missing:
        assert found.missing.base_offset == next_offset
        # What is said to be missing is in no file, and a file follows it.
        lost = range(found.missing.base_offset, found.missing.last_offset + 1)
        assert lost
        assert not any(
            each.base_offset in lost or (each.next_offset and each.next_offset - 1 in lost)
            for each in log.segments
        )
        assert found.missing.last_offset + 1 in [each.base_offset for each in log.segments]


@given(
    log=logs(),
    start=st.integers(0, 60),
    last_stable_offset=st.integers(0, 80),
    limit=st.integers(1, 3),
    is_overdue=st.booleans(),
)
def test_upload_plans_one_after_another_take_every_stable_offset_once(
    log, start, last_stable_offset, limit, is_overdue
):
    """Carrying out plan after plan takes each offset that may be taken, in order."""
    held = {
        offset
        for each in log.segments
        for offset in range(each.base_offset, min(each.next_offset or 10**9, last_stable_offset))
        if offset >= start and (is_overdue or (each.next_offset or 10**9) <= last_stable_offset)
    }
    taken: list[int] = []
    at = start
    for _ in range(100):
        found = plan_of(
            log,
            next_offset=at,
            last_stable_offset=last_stable_offset,
            limits=UploadLimits(segments_per_step=limit),
            is_overdue=is_overdue,
        )
        if not found.slices:
            break
        for part in found.slices:
            taken.extend(range(part.base_offset, part.next_offset))
        at = found.slices[-1].next_offset
    assert taken == sorted(held)


def test_upload_plan_takes_the_whole_of_a_segment_by_default():
    """A slice that is a closed segment from end to end says so."""
    found = plan([0, 10, 20], next_offset=0)
    assert found.slices == tuple(SegmentSlice.whole(each) for each in local_log([0, 10, 20]).closed_segments)


INTERVAL_MS = 60_000
BEGUN = PartitionManifest.begin(PARTITION, start_offset=0, now_ms=TIME_MS)
UPLOADED_MS = TIME_MS + 500_000
LATELY = stored(
    [remote(0, 9, uploaded_at_ms=UPLOADED_MS - 70_000), remote(10, 19, uploaded_at_ms=UPLOADED_MS)]
)


@pytest.mark.parametrize(
    ("manifest", "since_ms"),
    [
        pytest.param(BEGUN, TIME_MS, id="nothing stored"),
        pytest.param(LATELY, UPLOADED_MS, id="the newest segment"),
        pytest.param(LATELY.with_gap(Gap(20, 29, "gone", UPLOADED_MS + 9)), UPLOADED_MS, id="not the gap"),
        pytest.param(
            LATELY.committed(writer_id="b", leader_epoch=9, commit_number=7, now_ms=UPLOADED_MS + 50_000),
            UPLOADED_MS,
            id="not the commit of a new leader",
        ),
        pytest.param(
            replace(LATELY, began_at_ms=UPLOADED_MS + 40_000),
            UPLOADED_MS,
            id="not the beginning of the manifest",
        ),
        pytest.param(decode_manifest(encode_manifest(LATELY)), UPLOADED_MS, id="after a restart"),
        pytest.param(
            decode_manifest(encode_manifest(BEGUN)), TIME_MS, id="after a restart with nothing stored"
        ),
    ],
)
def test_upload_is_overdue_when_the_newest_segment_is_an_interval_old(manifest, since_ms):
    """The interval counts from the newest stored segment, or else from the manifest's beginning."""
    assert upload_due_ms(manifest, interval_ms=INTERVAL_MS, now_ms=since_ms) == since_ms + INTERVAL_MS


@pytest.mark.parametrize("manifest", [BEGUN, LATELY])
def test_upload_is_overdue_when_the_last_one_is_dated_in_the_future(manifest):
    """A time that a clock years ahead has noted does not put uploads off by years."""
    now_ms = TIME_MS - 1000 * INTERVAL_MS
    assert upload_due_ms(manifest, interval_ms=INTERVAL_MS, now_ms=now_ms) < now_ms


@pytest.mark.parametrize("manifest", [BEGUN, LATELY])
def test_upload_is_never_overdue_without_an_interval(manifest):
    """Every record waits for its segment to close if the interval is None, however long that takes."""
    assert upload_due_ms(manifest, interval_ms=None, now_ms=0) == math.inf


SOLID = (remote(10, 19), remote(20, 29), remote(30, 39))


@pytest.mark.parametrize(
    ("uploaded", "next_offset", "expected"),
    [
        pytest.param((), 10, 0, id="nothing"),
        pytest.param(SOLID, 10, 3, id="all"),
        pytest.param((None, *SOLID[1:]), 10, 0, id="the first failed"),
        pytest.param((SOLID[0], None, SOLID[2]), 10, 1, id="the second failed"),
        pytest.param((*SOLID, None), 10, 3, id="the last failed"),
        pytest.param(SOLID, 9, 0, id="gap before"),
        pytest.param(SOLID, 11, 0, id="overlap before"),
        pytest.param((SOLID[0], SOLID[2]), 10, 1, id="gap inside"),
        pytest.param((SOLID[0], remote(19, 29)), 10, 1, id="overlap inside"),
        pytest.param((SOLID[0], SOLID[0]), 10, 1, id="twice"),
        pytest.param((SOLID[0], remote(20, 19), remote(20, 29)), 10, 1, id="empty"),
        pytest.param((remote(10, 10),), 10, 1, id="one offset"),
    ],
)
def test_admissible_prefix_ends_at_the_first_failure_or_hole(uploaded, next_offset, expected):
    """Uploads are committed if they are contiguous from the archive's end, and none after a failure is."""
    assert admissible_prefix(uploaded, next_offset=next_offset) == expected
