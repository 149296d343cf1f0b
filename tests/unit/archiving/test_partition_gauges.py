"""One partition's gauges: what is true after a step, in numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.fakes.topics import topic_config
from tests.unit.model.values import PARTITION, TIME_MS, local_log, remote, stored
from tieringd.archiving.observer import Observation
from tieringd.archiving.partition_status import PartitionGauges
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Gap
from tieringd.model.partition import LogBounds
from tieringd.policies.upload_plan import UploadLimits, plan_uploads

TOPIC = topic_config()
BEGUN = PartitionManifest.begin(PARTITION, start_offset=0)


@pytest.fixture
def gauges(metrics):
    return PartitionGauges(PARTITION, metrics=metrics)


@pytest.fixture
def publish(gauges):
    """Give a function that publishes how a log of three closed segments stands."""

    def publish(
        manifest=BEGUN,
        *,
        stable=35,
        at_ms=TIME_MS,
        set_by_ms=0,
        ages_ms=(3000, 2000, 1000, 0),
        overdue=False,
        loss=math.inf,
        held=0,
    ):
        log = local_log([0, 10, 20, 30], sizes={0: 1, 10: 20, 20: 300, 30: 4000})
        segments = tuple(
            replace(each, modified_ns=(TIME_MS - age_ms) * 1_000_000)
            for each, age_ms in zip(log.segments, ages_ms, strict=True)
        )
        seen = Observation(replace(log, segments=segments), LogBounds(0, stable, 40), TOPIC, scan_number=1)
        plan = plan_uploads(
            seen.uploadable,
            seen.bounds,
            next_offset=manifest.next_offset,
            limits=UploadLimits(),
            is_overdue=overdue,
        )
        now_ms = at_ms + set_by_ms
        gauges.publish(
            manifest, seen, plan, trim_held_bytes=held, seconds_to_loss=loss, now_ms=now_ms, steady_ms=at_ms
        )

    return publish


@pytest.fixture
def value(metrics):
    def value(name: str) -> float | None:
        labels = {"topic": "orders", "partition": "3"}
        return metrics.registry.get_sample_value(f"tieringd_{name}", labels)

    return value


@pytest.mark.parametrize(
    ("manifest", "pending", "lag_seconds"),
    [
        pytest.param(BEGUN, (321, 3), 3.0, id="nothing stored"),
        pytest.param(stored([remote(0, 9)]), (320, 2), 2.0, id="one stored"),
        pytest.param(stored([remote(0, 19)]), (300, 1), 1.0, id="two stored"),
        pytest.param(stored([remote(0, 29)]), (0, 0), 0.0, id="all closed ones stored"),
        pytest.param(stored([remote(0, 32)]), (0, 0), 0.0, id="some of the active one too"),
    ],
)
def test_gauges_tell_what_waits(publish, value, manifest, pending, lag_seconds):
    """Bytes, segments and the age of the oldest of them; the active segment is not late."""
    publish(manifest)
    assert (value("upload_pending_bytes"), value("upload_pending_segments")) == pending
    assert value("upload_lag_seconds") == pytest.approx(lag_seconds)
    assert value("archive_next_offset") == manifest.next_offset


def test_gauges_of_an_open_slice_show_no_lag(publish, value):
    """A segment that is still written to is young, however long ago an upload was."""
    publish(stored([remote(0, 29)]), overdue=True, ages_ms=(3000, 2000, 1000, 900))
    assert (value("upload_lag_seconds"), value("upload_pending_segments")) == (0, 0)


def test_gauges_of_a_file_from_the_future_show_no_lag(publish, value):
    """A clock that was set back makes no negative age."""
    publish(ages_ms=(-5000, -5000, -5000, 0))
    assert value("upload_lag_seconds") == 0


@pytest.mark.parametrize(
    ("stable", "next_offset", "expected"), [(35, 0, 35), (35, 30, 5), (35, 35, 0), (20, 30, 0)]
)
def test_gauge_of_redpanda_counts_the_stable_offsets_that_are_not_archived(
    publish, metrics, stable, next_offset, expected
):
    """The gauge is never below zero, even if the stable offset has gone back."""
    publish(stored([remote(0, next_offset - 1)]) if next_offset else BEGUN, stable=stable)
    labels = {"namespace": "kafka", "topic": "orders", "partition": "3"}
    assert metrics.registry.get_sample_value("vectorized_ntp_archiver_pending", labels) == expected


def test_gauges_count_the_offsets_of_every_gap(publish, value):
    """A gap of one offset counts one."""
    publish(stored([remote(0, 9)]).with_gap(Gap(10, 10, "", 0)).with_gap(Gap(11, 14, "", 0)))
    assert value("archive_gap_offsets") == 5
    publish(BEGUN)
    assert value("archive_gap_offsets") == 0


@pytest.mark.parametrize("seconds", [0.0, 17.5, math.inf])
def test_gauge_of_loss_is_what_was_computed(publish, value, seconds):
    """Infinity is a number that a dashboard can compare with."""
    publish(loss=seconds)
    assert value("seconds_to_loss") == seconds


def test_held_seconds_count_while_the_stable_offset_stands_still(publish, value):
    """The seconds count from the first scan in which a closed segment waits, until the transaction moves."""
    publish(stable=15, at_ms=TIME_MS)
    assert value("upload_held_by_transaction_seconds") == 0
    publish(stable=15, at_ms=TIME_MS + 4500)
    assert value("upload_held_by_transaction_seconds") == 4.5
    publish(stable=15, at_ms=TIME_MS + 90_000)
    assert value("upload_held_by_transaction_seconds") == 90
    publish(stable=17, at_ms=TIME_MS + 91_000)
    assert value("upload_held_by_transaction_seconds") == 0, "another transaction, or the next part of one"
    publish(stable=17, at_ms=TIME_MS + 93_000)
    assert value("upload_held_by_transaction_seconds") == 2


@pytest.mark.parametrize("set_by_ms", [10**10, -(10**10)])
def test_held_seconds_pass_by_no_clock_that_can_be_set(publish, value, set_by_ms):
    """A clock that jumps by months raises no alert about a transaction that has been open for a second."""
    publish(stable=15, at_ms=TIME_MS)
    publish(stable=15, at_ms=TIME_MS + 1000, set_by_ms=set_by_ms)
    assert value("upload_held_by_transaction_seconds") == 1


def test_held_bytes_are_those_of_closed_segments_behind_the_transaction(publish, value):
    """The segments from the stable offset on are held, and are not pending."""
    publish(stable=15)
    assert (value("upload_held_by_transaction_bytes"), value("upload_pending_bytes")) == (320, 1)
    publish(stable=35)
    assert (value("upload_held_by_transaction_bytes"), value("upload_pending_bytes")) == (0, 321)


def test_held_seconds_end_with_the_transaction(publish, value):
    """A transaction that holds nothing back counts for nothing, and the next hold counts anew."""
    publish(stable=15, at_ms=TIME_MS)
    publish(stable=35, at_ms=TIME_MS + 5000)
    assert value("upload_held_by_transaction_seconds") == 0
    publish(stable=15, at_ms=TIME_MS + 6000)
    publish(stable=15, at_ms=TIME_MS + 7000)
    assert value("upload_held_by_transaction_seconds") == 1


def test_held_seconds_are_not_those_of_the_active_segment(publish, value):
    """A transaction that is open only in the active segment holds back nothing that could go."""
    publish(stored([remote(0, 29)]), stable=31, at_ms=TIME_MS)
    publish(stored([remote(0, 29)]), stable=31, at_ms=TIME_MS + 60_000)
    assert value("upload_held_by_transaction_seconds") == 0


def test_gauges_of_two_partitions_are_apart(metrics, publish, value):
    """Each partition has its own series, and forgetting one leaves the other."""
    publish()
    other = replace(PARTITION, partition=4)
    log = local_log([0])
    seen = Observation(log, LogBounds(0, 0, 0), TOPIC, scan_number=1)
    plan = plan_uploads(log, seen.bounds, next_offset=0, limits=UploadLimits())
    PartitionGauges(other, metrics=metrics).publish(
        BEGUN, seen, plan, trim_held_bytes=0, seconds_to_loss=math.inf, now_ms=TIME_MS, steady_ms=0
    )
    assert value("upload_pending_segments") == 3
    metrics.forget_partition(PARTITION.topic_partition)
    assert value("upload_pending_segments") is None
    labels = {"topic": "orders", "partition": "4"}
    assert metrics.registry.get_sample_value("tieringd_upload_pending_segments", labels) == 0
