"""
Amazon MSK's example of a topic's life, on virtual time.

Retention is five days and local retention two. The topic has two segments, of which segment 1 is
active. Everything is decided by the policies; this page only does what they say, hour by hour.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from tests.unit.model.values import TIME_MS, local_log, remote, stored
from tieringd.model.partition import LogBounds
from tieringd.policies.local_hint import HintMemory, HintShape, StorageMode, plan_hint
from tieringd.policies.local_retention import ClusterLocalTarget, LocalSettings, resolve_local_target
from tieringd.policies.total_retention import TotalRetention, plan_total_retention
from tieringd.policies.trim_target import TrimWishes, plan_trim_to_target
from tieringd.policies.upload_plan import UploadLimits, plan_uploads

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
T0_MS = TIME_MS
T1_MS, T2_MS, T3_MS = T0_MS + DAY_MS, T0_MS + 2 * DAY_MS, T0_MS + 5 * DAY_MS
END_MS = T0_MS + 30 * DAY_MS

BROKER = LocalSettings("the broker", kafka_ms=2 * DAY_MS)
TARGET = resolve_local_target(
    [BROKER],
    cluster=ClusterLocalTarget(target_ms=None, target_bytes=None, is_strict=False),
    total_ms=5 * DAY_MS,
    total_bytes=None,
).enforced
SHAPE = HintShape(StorageMode.TIERED_CLOUD, is_compacted=False, target=TARGET)
TOTAL = TotalRetention(limit_ms=5 * DAY_MS, limit_bytes=None)


@dataclass
class Partition:
    """One partition on both tiers, and when something happened to it."""

    local: tuple[int, ...] = (0, 100)
    """The bases of the segments on disk."""
    log_start_offset: int = 0
    archive: object = field(default_factory=lambda: stored([], start_offset=0))
    hint: int | None = None
    memory: HintMemory | None = None
    events: list[tuple[int, str]] = field(default_factory=list)

    def upload(self, now_ms):
        log = local_log(self.local)
        bounds = LogBounds(self.log_start_offset, last_stable_offset=150, log_end_offset=150)
        plan = plan_uploads(log, bounds, next_offset=self.archive.next_offset, limits=UploadLimits())
        for one in plan.slices:
            self.archive = self.archive.appended(
                # Its newest record was written when segment 1 became the active one, at T0.
                [remote(one.base_offset, one.next_offset - 1, max_timestamp_ms=T0_MS, uploaded_at_ms=now_ms)]
            )
            self.events.append((now_ms, f"segment {one.base_offset} copied"))

    def trim(self, now_ms):
        log = local_log(self.local)
        plan = plan_hint(
            log,
            self.archive,
            SHAPE,
            self.memory,
            stored=self.hint,
            segment_bytes=1024,
            log_start_offset=self.log_start_offset,
            now_ms=now_ms,
        )
        self.hint, self.memory = plan.offset, plan.memory
        wishes = TrimWishes(self.hint, awaits_hint=SHAPE.has_hint)
        _, trim = plan_trim_to_target(log, self.archive, wishes, log_start_offset=self.log_start_offset)
        for one in trim.candidates:
            self.local = self.local[1:]
            self.log_start_offset = one.next_offset
            self.events.append((now_ms, f"segment {one.local.base_offset} left the disk"))

    def retain(self, now_ms):
        plan = plan_total_retention(
            self.archive,
            local_log(self.local),
            TOTAL,
            log_start_offset=self.log_start_offset,
            now_ms=now_ms,
        )
        rows = list(self.archive.segments)
        for row in rows[: plan.segments]:
            self.events.append((now_ms, f"segment {row.base_offset} left the archive"))
        if plan.segments:
            left = stored(rows[plan.segments :], start_offset=plan.start_offset)
            self.archive = replace(left, next_offset=self.archive.next_offset)


def run(*, tiered_from_ms, step_ms=HOUR_MS, until_ms=END_MS):
    """Live through the example; what the policies say is done every *step_ms*."""
    partition = Partition()
    for now_ms in range(T0_MS, until_ms + 1, step_ms):
        if now_ms >= tiered_from_ms:
            partition.upload(now_ms)
            partition.trim(now_ms)
            partition.retain(now_ms)
    return partition


def test_msk_example_happens_at_its_times():
    """Copied when tiering is on, off the disk at two days, off the archive at five; segment 1 stays."""
    partition = run(tiered_from_ms=T1_MS)
    assert partition.events == [
        (T1_MS, "segment 0 copied"),
        (T2_MS, "segment 0 left the disk"),
        (T3_MS, "segment 0 left the archive"),
    ]
    assert partition.local == (100,)
    assert len(partition.archive.segments) == 0
    assert (partition.archive.start_offset, partition.archive.next_offset) == (100, 100)


@pytest.mark.parametrize(
    ("at_ms", "local", "archived"),
    [
        pytest.param(T0_MS, (0, 100), [], id="T0: tiering is off"),
        pytest.param(T1_MS - HOUR_MS, (0, 100), [], id="before T1"),
        pytest.param(T1_MS, (0, 100), [0], id="T1: copied, and still on disk"),
        pytest.param(T2_MS - HOUR_MS, (0, 100), [0], id="before T2"),
        pytest.param(T2_MS, (100,), [0], id="T2: only in the archive"),
        pytest.param(T3_MS - HOUR_MS, (100,), [0], id="before T3"),
        pytest.param(T3_MS, (100,), [], id="T3: gone"),
        pytest.param(END_MS, (100,), [], id="long after"),
    ],
)
def test_msk_example_has_each_segment_where_it_belongs(at_ms, local, archived):
    """Both tiers hold what the example says at each of the four times, and just before."""
    partition = run(tiered_from_ms=T1_MS, until_ms=at_ms)
    assert partition.local == local
    assert [one.base_offset for one in partition.archive.segments] == archived


def test_msk_example_is_exact_to_the_minute_in_which_a_hint_is_due():
    """Checked each minute, the segment goes in the minute in which it is two days old."""
    partition = run(tiered_from_ms=T1_MS + 7 * 60_000, step_ms=60_000, until_ms=T2_MS + HOUR_MS)
    assert partition.events[-1] == (T2_MS, "segment 0 left the disk")


def test_msk_example_tiered_late_loses_nothing_of_the_archive_s_time():
    """Tiering turned on after two days copies first, trims in the same round, and keeps to five days."""
    late_ms = T0_MS + 3 * DAY_MS
    assert run(tiered_from_ms=late_ms).events == [
        (late_ms, "segment 0 copied"),
        (late_ms, "segment 0 left the disk"),
        (T3_MS, "segment 0 left the archive"),
    ]


def test_msk_example_without_tiering_touches_nothing():
    """Both segments stay as they are while tiering is off, whatever their age."""
    partition = run(tiered_from_ms=END_MS + 1)
    assert (partition.local, partition.events) == ((0, 100), [])
