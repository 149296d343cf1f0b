"""Total retention: what goes from both tiers together, and why the next segment stays."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.model.values import TIME_MS, local_log, remote, stored
from tieringd.model.manifest_parts import Gap
from tieringd.model.segment import NO_TIMESTAMP
from tieringd.policies.total_retention import (
    TotalRetention,
    TotalRetentionPlan,
    plan_total_retention,
    total_bytes,
)

NO_LOG = local_log([])
NOTHING_STAYS = TotalRetention(limit_ms=0, limit_bytes=0)
FAR_FUTURE_MS = TIME_MS + 10**12


def plan(manifest, limits, *, log=NO_LOG, log_start_offset=0, now_ms=TIME_MS, up_to=None):
    return plan_total_retention(
        manifest, log, limits, log_start_offset=log_start_offset, now_ms=now_ms, up_to=up_to
    )


def fifty(*, old=0):
    """Return Kafka's example: 50 stored segments of 100 records and 1 KiB, the first *old* a ms older."""
    return stored(
        remote(base, base + 99, max_timestamp_ms=TIME_MS - 1 if number < old else TIME_MS)
        for number, base in enumerate(range(0, 5000, 100))
    )


TAIL = local_log([5000], sizes={5000: 512})
"""The active segment behind those fifty: 512 bytes that only the broker has."""


@pytest.mark.parametrize(
    ("limit_bytes", "limit_ms", "old", "deleted"),
    [
        pytest.param(51_712, None, 0, 0, id="exactly as much as there is"),
        pytest.param(50_688, None, 0, 1, id="one segment above"),
        pytest.param(28_160, None, 0, 23, id="23 segments above"),
        pytest.param(512, None, 0, 50, id="only the tail fits"),
        pytest.param(None, 1, 1, 1, id="one is old"),
        pytest.param(None, 1, 50, 50, id="all are old"),
        pytest.param(None, 1, 0, 0, id="none is old"),
        # Kafka stops before it would keep less than the limit; ours is a limit, and is kept.
        pytest.param(51_711, None, 0, 1, id="a byte above"),
        pytest.param(50_687, None, 0, 2, id="a segment and a byte above"),
        pytest.param(511, None, 0, 50, id="the tail alone is above"),
        pytest.param(0, None, 0, 50, id="no byte at all"),
        pytest.param(50_688, 1, 3, 3, id="both, time takes more"),
        pytest.param(28_160, 1, 3, 23, id="both, size takes more"),
        pytest.param(51_712, 1, 0, 0, id="both, neither"),
    ],
)
def test_total_retention_deletes_what_kafka_deletes(limit_bytes, limit_ms, old, deleted):
    """The same segments go as in Kafka's own cases, and no breach of a limit is left between them."""
    found = plan(fifty(old=old), TotalRetention(limit_ms, limit_bytes), log=TAIL)
    assert (found.segments, found.start_offset, found.size_bytes) == (deleted, 100 * deleted, 1024 * deleted)


@pytest.mark.parametrize("limits", [TotalRetention(None, 0), TotalRetention(0, None)], ids=["bytes", "ms"])
def test_total_retention_of_nothing_empties_the_archive(limits):
    """Both of Kafka's two segments go; the archive's next offset is all that is left."""
    manifest = stored([remote(0, 99, max_timestamp_ms=TIME_MS), remote(100, 199, max_timestamp_ms=TIME_MS)])
    assert plan(manifest, limits) == TotalRetentionPlan(200, 2, 2048, "0 bytes are only on the broker")


def test_total_retention_of_an_empty_archive_leaves_its_start():
    """Nothing moves if all segments are deleted already, as in Kafka's case."""
    assert plan(stored([], start_offset=200), NOTHING_STAYS) == TotalRetentionPlan(
        200, 0, 0, "nothing is in the archive"
    )


@pytest.mark.parametrize(
    ("limits", "because"),
    [
        pytest.param(
            TotalRetention(0, 0, deletes=False), "cleanup.policy does not delete", id="compact only"
        ),
        pytest.param(
            TotalRetention(None, None), "retention.ms and retention.bytes are unlimited", id="no limit"
        ),
    ],
)
def test_total_retention_takes_nothing_where_it_has_no_say(limits, because):
    """Nothing goes if total retention does not apply, however old and large the partition is."""
    found = plan(fifty(old=50), limits, log=TAIL, now_ms=FAR_FUTURE_MS)
    assert found == TotalRetentionPlan(0, 0, 0, because)


@pytest.mark.parametrize(
    ("limits", "now_ms", "because"),
    [
        pytest.param(
            TotalRetention(None, 60_000),
            TIME_MS,
            "segment 0 stays: the partition has 51712 of at most 60000 bytes",
            id="bytes",
        ),
        pytest.param(
            TotalRetention(100, None),
            TIME_MS + 99,
            "segment 0 stays: its newest record is 99 ms of at most 100 ms old",
            id="time",
        ),
        pytest.param(
            TotalRetention(100, 60_000),
            TIME_MS + 5,
            "segment 0 stays: the partition has 51712 of at most 60000 bytes, "
            "and its newest record is 5 ms of at most 100 ms old",
            id="both",
        ),
        pytest.param(
            TotalRetention(100, None),
            TIME_MS,
            "segment 0 stays: its newest record is 0 s of at most 100 ms old",
            id="brand new",
        ),
        pytest.param(
            TotalRetention(100, None),
            TIME_MS - 7,
            "segment 0 stays: its newest record is dated 7 ms in the future",
            id="dated in the future",
        ),
    ],
)
def test_total_retention_says_why_the_oldest_stays(limits, now_ms, because):
    """The reason has the numbers that were compared."""
    assert plan(fifty(), limits, log=TAIL, now_ms=now_ms).kept_because == because


def test_total_retention_goes_no_further_than_the_archive():
    """Segments that only the broker has stay, however old they are and however far above the limit."""
    manifest = stored([remote(0, 9), remote(10, 19)])
    log = local_log([10, 20, 30, 40])
    found = plan(manifest, NOTHING_STAYS, log=log, now_ms=FAR_FUTURE_MS)
    assert found == TotalRetentionPlan(20, 2, 2048, "3072 bytes are only on the broker")


@pytest.mark.parametrize(
    ("age_ms", "segments"), [(999, 0), (1000, 2), (1001, 2)], ids=["younger", "as old", "older"]
)
def test_total_retention_takes_a_segment_exactly_as_old_as_the_limit(age_ms, segments):
    """The limit is inclusive, to the millisecond."""
    manifest = stored([remote(0, 9), remote(10, 19)])
    now_ms = manifest.segments[0].max_timestamp_ms + age_ms
    assert plan(manifest, TotalRetention(1000, None), now_ms=now_ms).segments == segments


def test_total_retention_stops_at_a_young_segment_before_an_old_one():
    """Retention takes a prefix, however old the segments behind it are."""
    manifest = stored(
        [
            remote(0, 9),
            remote(10, 19, max_timestamp_ms=TIME_MS + 5000, uploaded_at_ms=TIME_MS + 6000),
            remote(20, 29),
        ]
    )
    found = plan(manifest, TotalRetention(1000, None), now_ms=TIME_MS + 3000)
    assert (found.segments, found.start_offset) == (1, 10)
    assert found.kept_because.startswith("segment 10 stays")


def test_total_retention_by_time_goes_on_where_size_ended():
    """A segment that is young goes by size, and the old one behind it by time."""
    manifest = stored([remote(0, 9, max_timestamp_ms=TIME_MS), remote(10, 19, max_timestamp_ms=0)])
    assert plan(manifest, TotalRetention(1000, 1024), now_ms=TIME_MS).segments == 2


@pytest.mark.parametrize(
    ("record_ms", "uploaded_ms", "broker_ms", "due_ms"),
    [
        pytest.param(500, 900, None, 500, id="the newest record"),
        pytest.param(500, 900, 700, 700, id="the broker's timestamp, which is newer"),
        pytest.param(800, 900, 700, 700, id="the broker's timestamp, which is older"),
        pytest.param(5000, 900, None, 900, id="a record dated in the future counts from the upload"),
        pytest.param(5000, 900, 700, 700, id="the same where the broker keeps its own"),
        pytest.param(NO_TIMESTAMP, 900, None, 900, id="records without a timestamp count from the upload"),
        pytest.param(NO_TIMESTAMP, 900, 700, 700, id="and from the broker's where there is one"),
        pytest.param(0, 900, None, 0, id="1970 is a time"),
        pytest.param(500, 900, 0, 0, id="1970 is a time of the broker's, too"),
    ],
)
def test_total_retention_counts_age_from_the_broker_s_timestamp_or_the_newest_record(
    record_ms, uploaded_ms, broker_ms, due_ms
):
    """The segment stays until that time is as long ago as the limit, and goes then."""
    broker_timestamp_ms = NO_TIMESTAMP if broker_ms is None else broker_ms
    segment = remote(0, 9, max_timestamp_ms=record_ms, uploaded_at_ms=uploaded_ms)
    manifest = stored([replace(segment, broker_timestamp_ms=broker_timestamp_ms)])
    segments = [
        plan(manifest, TotalRetention(100, None), now_ms=now_ms).segments
        for now_ms in (due_ms + 99, due_ms + 100)
    ]
    assert segments == [0, 1]


@pytest.mark.parametrize(
    ("log_start_offset", "segments"),
    [
        pytest.param(0, 0, id="the broker has all"),
        pytest.param(99, 0, id="the broker has the first's last offset"),
        pytest.param(100, 1, id="the broker dropped the first"),
        pytest.param(250, 2, id="the broker is inside the third"),
        pytest.param(9999, 50, id="the broker has none"),
    ],
)
def test_total_retention_of_a_write_only_topic_waits_for_the_broker(log_start_offset, segments):
    """Nothing goes that the broker still has, as clients read nothing else."""
    limits = replace(NOTHING_STAYS, is_read_remotely=False)
    found = plan(fifty(), limits, log_start_offset=log_start_offset, now_ms=FAR_FUTURE_MS)
    assert (found.segments, found.start_offset) == (segments, 100 * segments)
    if segments < 50:
        assert found.kept_because == (
            f"segment {100 * segments} stays: remote read is off for the topic, and the broker's own "
            "retention has not deleted the segment yet"
        )


def test_total_retention_of_a_write_only_topic_keeps_what_its_limits_keep():
    """A segment that the broker dropped is not deleted from the archive for that."""
    limits = TotalRetention(1000, None, is_read_remotely=False)
    for log_start_offset in (0, 9999):
        found = plan(fifty(), limits, log_start_offset=log_start_offset)
        assert found.segments == 0
        assert found.kept_because == "segment 0 stays: its newest record is 0 s of at most 1 s old"


@pytest.mark.parametrize(
    ("rows", "bases", "log_start_offset", "expected"),
    [
        pytest.param([], [], 0, 0, id="nothing"),
        pytest.param([remote(0, 9), remote(10, 19)], [], 0, 2048, id="only in the archive"),
        pytest.param([], [0, 10, 20], 0, 3072, id="only on the broker"),
        pytest.param([remote(0, 9), remote(10, 19)], [0, 10, 20], 0, 3072, id="all closed in both"),
        pytest.param([remote(0, 9), remote(10, 19)], [10, 20, 30], 10, 4096, id="tiers overlap in one"),
        pytest.param([remote(0, 9), remote(10, 19)], [20, 30], 20, 4096, id="tiers meet"),
        pytest.param(
            [remote(0, 9), remote(10, 14, size_bytes=400)], [0, 10, 20], 0, 3072, id="a part stored"
        ),
        pytest.param(
            [remote(0, 9), remote(10, 14, size_bytes=9999)], [0, 10, 20], 0, 12047, id="other bytes"
        ),
        pytest.param([remote(0, 14, size_bytes=900)], [0, 10, 20], 0, 900 + 124 + 1024, id="cut elsewhere"),
        pytest.param(
            [remote(0, 9), remote(10, 12, size_bytes=100)], [0, 10], 0, 2048, id="a part of the active"
        ),
        pytest.param([remote(0, 9)], [0, 10, 20], 10, 3072, id="the first is on its way out"),
        pytest.param([], [0, 10, 20, 30], 20, 2048, id="deleted before it was stored"),
        pytest.param([remote(20, 29)], [0, 10, 20, 30], 0, 2048, id="what the archive let go is on its way"),
    ],
)
def test_total_bytes_count_each_offset_once(rows, bases, log_start_offset, expected):
    """Stored offsets count as they are stored, the others as they are on the broker."""
    found = total_bytes(stored(rows), local_log(bases), log_start_offset=log_start_offset)
    assert found == expected


def test_total_bytes_count_what_the_broker_has_in_a_gap():
    """A gap holds no bytes, so a local segment in its place counts."""
    manifest = stored([remote(0, 9)]).with_gap(Gap(10, 19, "", 0)).appended([remote(20, 29)])
    assert total_bytes(manifest, local_log([0, 10, 20, 30]), log_start_offset=0) == 4096
    assert total_bytes(manifest, local_log([20, 30]), log_start_offset=20) == 3072
    in_part = stored([remote(0, 9)]).with_gap(Gap(10, 14, "", 0)).appended([remote(15, 29, size_bytes=500)])
    assert total_bytes(in_part, local_log([0, 10, 30]), log_start_offset=0) == 1024 + 500 + 524 + 1024


def test_total_bytes_of_a_reframed_log_take_a_stored_segment_as_it_is_stored():
    """A stored segment counts with its stored size. The size of its reframed file adds nothing."""
    manifest = stored([remote(0, 9, size_bytes=1000)])
    log = replace(local_log([0, 10]), is_reframed=True)
    assert total_bytes(manifest, log, log_start_offset=0) == 2024
    in_between = manifest.with_gap(Gap(10, 19, "", 0)).appended([remote(20, 29, size_bytes=1000)])
    log = replace(local_log([0, 10, 20, 30]), is_reframed=True)
    assert total_bytes(in_between, log, log_start_offset=0) == 2000 + 2048, "the gap's and the active one"


@st.composite
def partitions(draw: st.DrawFn):
    """Draw an archive, and a local log of the same cuts that overlaps it, or begins where it ends."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=9))
    ages = draw(st.lists(st.integers(-3, 9), min_size=len(sizes), max_size=len(sizes)))
    bases = [10 * number for number in range(len(sizes) + 1)]
    archived = draw(st.integers(0, len(sizes)))
    first_local = draw(st.integers(0, archived))
    manifest = stored([], start_offset=0).appended(
        remote(base, base + 9, size_bytes=size, max_timestamp_ms=TIME_MS - age)
        for base, size, age in zip(bases[:archived], sizes, ages, strict=False)
    )
    active_bytes = draw(st.integers(0, 5))
    log = local_log(
        bases[first_local:], sizes={**dict(zip(bases, sizes, strict=False)), bases[-1]: active_bytes}
    )
    limits = TotalRetention(
        draw(st.none() | st.integers(0, 10)),
        draw(st.none() | st.integers(0, 60)),
        deletes=draw(st.booleans() | st.just(value=True)),
        is_read_remotely=draw(st.booleans() | st.just(value=True)),
    )
    return manifest, log, limits, sizes, ages, active_bytes, archived, bases[first_local]


@given(partitions())
def test_total_retention_takes_the_shortest_prefix_that_meets_both_limits(partition):
    """No segment goes that need not, and none stays that must go, as far as the archive reaches."""
    manifest, log, limits, sizes, ages, active_bytes, archived, local_start = partition
    found = plan(manifest, limits, log=log, log_start_offset=local_start)
    # Found another way: the removals of each limit by itself, as rounds that repeat until nothing goes.
    gone = 0
    while True:
        by_time = by_size = gone
        while limits.limit_ms is not None and by_time < archived and ages[by_time] >= limits.limit_ms:
            by_time += 1
        while (
            limits.limit_bytes is not None
            and by_size < archived
            and sum(sizes[by_size:]) + active_bytes > limits.limit_bytes
        ):
            by_size += 1
        if max(by_time, by_size) == gone:
            break
        gone = max(by_time, by_size)
    if not limits.deletes:
        gone = 0
    if not limits.is_read_remotely:
        gone = min(gone, local_start // 10)
    assert (found.segments, found.start_offset, found.size_bytes) == (gone, 10 * gone, sum(sizes[:gone]))
    assert found.kept_because
    kept = stored(list(manifest.segments)[gone:], start_offset=10 * gone)
    kept = replace(kept, next_offset=manifest.next_offset)
    again = plan(kept, limits, log=log, log_start_offset=max(local_start, 10 * gone))
    assert (again.segments, again.start_offset) == (0, 10 * gone) or not limits.is_read_remotely


@given(partitions(), st.integers(0, 5), st.integers(0, 5))
def test_total_retention_never_takes_less_later_or_under_a_smaller_limit(partition, passed_ms, less):
    """Time and smaller limits move the start forward only; and it never passes the archive's end."""
    manifest, log, limits, *_, local_start = partition

    def start(these, now_ms):
        return plan(manifest, these, log=log, log_start_offset=local_start, now_ms=now_ms).start_offset

    first = start(limits, TIME_MS)
    assert manifest.start_offset <= first <= manifest.next_offset
    assert start(limits, TIME_MS + passed_ms) >= first
    if limits.limit_bytes is not None:
        assert start(replace(limits, limit_bytes=max(0, limits.limit_bytes - less)), TIME_MS) >= first
    if limits.limit_ms is not None:
        assert start(replace(limits, limit_ms=max(0, limits.limit_ms - less)), TIME_MS) >= first


@given(partitions())
def test_total_bytes_are_the_bytes_of_every_segment_once(partition):
    """The sum is that of one log, wherever the two tiers overlap."""
    manifest, log, _, sizes, _, active_bytes, _, local_start = partition
    assert total_bytes(manifest, log, log_start_offset=local_start) == sum(sizes) + active_bytes


def test_total_retention_of_a_manifest_with_a_gap_ends_before_it():
    """The start is where the last segment that went ended; a gap that follows stays recorded."""
    manifest = stored([remote(0, 9)]).with_gap(Gap(10, 19, "", 0)).appended([remote(20, 29)])
    assert plan(manifest, TotalRetention(None, 1024)).start_offset == 10
    assert plan(manifest, NOTHING_STAYS, now_ms=FAR_FUTURE_MS).start_offset == 30


def test_total_retention_limits_do_not_add_up():
    """Two segments are old and two are too many: they are the same two."""
    bases = [0, 10, 20, 30, 40]
    manifest = stored(
        remote(base, end - 1, max_timestamp_ms=TIME_MS - 10 if base < 20 else TIME_MS)
        for base, end in pairwise(bases)
    )
    assert plan(manifest, TotalRetention(10, 2048)).segments == 2
