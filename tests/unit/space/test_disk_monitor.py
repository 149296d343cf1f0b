"""The disk monitor: metrics, the alert line and the calls after a change, on a virtual clock."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest
from structlog.testing import capture_logs

from tests.fakes.filesystems import FakeDisk, FakeFilesystems
from tieringd.model.disk_state import DiskState
from tieringd.policies.disk_alert import AlertSettings
from tieringd.space.disk_monitor import DiskMonitor

pytestmark = pytest.mark.looptime

GIB = 2**30
SETTINGS = AlertSettings(alert_free_bytes=0, alert_free_percent=10, min_free_bytes=2 * GIB)
"""On a disk of 100 GiB: low at 10 and until 11, degraded at 2 and until 2.2."""


@pytest.fixture
def data():
    return FakeDisk(("/data/a", "/data/b"), 100 * GIB, 50 * GIB)


@pytest.fixture
def other():
    return FakeDisk(("/other",), 100 * GIB, 50 * GIB)


@pytest.fixture
def cache():
    return FakeDisk(("/cache",), 100 * GIB, 50 * GIB)


@pytest.fixture
def disks(data, other, cache):
    return FakeFilesystems(data, other, cache)


@pytest.fixture
def make_monitor(disks, metrics):
    """Give a function that returns a monitor on the running loop's clock."""

    def make(log_dirs=("/data/a", "/other", "/data/b"), cache_dir="/cache"):
        return DiskMonitor(
            disks,
            log_dirs=log_dirs,
            cache_dir=cache_dir,
            settings=SETTINGS,
            metrics=metrics,
            now=asyncio.get_running_loop().time,
        )

    return make


def shown(metrics, name, directory):
    return metrics.registry.get_sample_value(name, {"directory": directory})


def errors(lines):
    return [line["event"] for line in lines if line["log_level"] == "error"]


@asynccontextmanager
async def running(monitor, **options):
    task = asyncio.create_task(monitor.run(**options))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_monitor_shows_each_filesystem_once(make_monitor, metrics, data, cache):
    """Two directories on one disk are one series, by the first; the cache's disk has names of its own."""
    data.free_bytes, cache.free_bytes = 9 * GIB, GIB
    await make_monitor().step()
    for prefix in ("redpanda_storage_disk", "tieringd_disk"):
        assert shown(metrics, f"{prefix}_total_bytes", "/data/a") == 100 * GIB
        assert shown(metrics, f"{prefix}_free_bytes", "/data/a") == 9 * GIB
        assert shown(metrics, f"{prefix}_free_space_alert", "/data/a") == 1
        assert shown(metrics, f"{prefix}_free_space_alert", "/other") == 0
        assert shown(metrics, f"{prefix}_free_bytes", "/data/b") is None
        assert shown(metrics, f"{prefix}_free_bytes", "/cache") is None
    assert shown(metrics, "redpanda_storage_cache_disk_free_space_alert", "/cache") == 2
    assert shown(metrics, "redpanda_storage_cache_disk_free_space_alert", "/data/a") is None


async def test_measurement_that_misses_a_disk_is_no_success(make_monitor, metrics, cache):
    """The time of the last success stands still until every disk can be measured again."""

    def succeeded():
        return metrics.registry.get_sample_value(
            "tieringd_loop_last_success_timestamp_seconds", {"loop": "disks"}
        )

    monitor = make_monitor()
    cache.is_readable = False
    await monitor.step()
    assert succeeded() is None
    cache.is_readable = True
    await monitor.step()
    assert succeeded() > 0


async def test_monitor_has_the_worst_state_of_the_logs_and_not_the_cache(make_monitor, data, other, cache):
    """A full cache disk is no reason to refuse writes; before the first measurement nothing is known."""
    monitor = make_monitor()
    assert monitor.state is None
    cache.free_bytes = 0
    await monitor.step()
    assert monitor.state is DiskState.OK
    other.free_bytes = 5 * GIB
    await monitor.step()
    assert monitor.state is DiskState.LOW
    data.free_bytes = GIB
    await monitor.step()
    assert monitor.state is DiskState.DEGRADED


async def test_monitor_without_a_cache_measures_the_logs_only(make_monitor, disks, metrics):
    """A daemon without a cache directory makes no measurement of one, and has no series of one."""
    await make_monitor(cache_dir=None).step()
    assert disks.measurements == 1
    assert shown(metrics, "redpanda_storage_cache_disk_total_bytes", "/cache") is None


async def test_alert_line_comes_at_once_and_then_once_an_hour(make_monitor, data, disks):
    """A disk that stays low has one line an hour, though it is measured every second."""
    data.free_bytes = 9 * GIB
    with capture_logs() as lines:
        async with running(make_monitor()):
            await asyncio.sleep(0.5)
            assert len(errors(lines)) == 1
            await asyncio.sleep(3599)
            assert len(errors(lines)) == 1
            assert disks.measurements == 2 * 3600
            await asyncio.sleep(1)
            assert len(errors(lines)) == 2
            await asyncio.sleep(3600)
            assert len(errors(lines)) == 3
    first, *later = errors(lines)
    assert first == (
        "storage space alert: free space at 9.000% on /data/a: 100.000GiB total, 9.000GiB free, "
        "min. free 10.000GiB. Be sure to adjust retention policies as needed to avoid running out of space."
    )
    assert all("min. free 11.000GiB" in line for line in later)


async def test_change_of_state_has_a_line_at_once(make_monitor, data):
    """Worse and better are both said when they happen, with the threshold that decided, and so is room."""
    monitor = make_monitor()
    with capture_logs() as lines:
        for free_gib in (9, 1, 1, 5, 5, 50, 50, 9):
            data.free_bytes = free_gib * GIB
            await monitor.step()
            await asyncio.sleep(1)
    found = [line["event"].partition("GiB free, ")[2][:20] or line["event"] for line in lines]
    assert found == [
        "min. free 10.000GiB.",
        "min. free 2.000GiB. ",
        "min. free 11.000GiB.",
        "storage space is enough again",
        "min. free 10.000GiB.",
    ]


async def test_disk_that_hovers_at_the_threshold_does_not_flap(make_monitor, data):
    """The known state of a disk goes into the next judgement."""
    monitor = make_monitor()
    heard = []
    monitor.listen(lambda: heard.append(monitor.state))
    for free_bytes in (10 * GIB, 10 * GIB + 1, 11 * GIB, 10 * GIB, 11 * GIB + 1):
        data.free_bytes = free_bytes
        await monitor.step()
    assert heard == [DiskState.LOW, DiskState.OK]


async def test_each_filesystem_has_lines_of_its_own(make_monitor, data, other, cache):
    """One disk's line does not use up another's."""
    data.free_bytes = other.free_bytes = cache.free_bytes = 9 * GIB
    with capture_logs() as lines:
        monitor = make_monitor()
        await monitor.step()
        await monitor.step()
    assert [line.partition(" on ")[2].partition(":")[0] for line in errors(lines)] == [
        "/data/a",
        "/other",
        "/cache",
    ]


async def test_listeners_hear_of_the_first_measurement_and_of_each_change(make_monitor, data, cache):
    """Listeners hear when the new state can be read, and of nothing else."""
    monitor = make_monitor()
    heard = []
    monitor.listen(lambda: heard.append(monitor.state))
    monitor.listen(lambda: heard.append("second"))
    await monitor.step()
    await monitor.step()
    data.free_bytes = GIB
    await monitor.step()
    await monitor.step()
    assert heard == [DiskState.OK, "second", DiskState.DEGRADED, "second"]


async def test_new_thresholds_hold_from_the_next_measurement_on(make_monitor, data):
    """A reload needs no restart."""
    monitor = make_monitor()
    await monitor.step()
    monitor.set_settings(AlertSettings(alert_free_bytes=60 * GIB, alert_free_percent=0, min_free_bytes=0))
    await monitor.step()
    assert monitor.state is DiskState.LOW


async def test_directory_that_cannot_be_measured_is_said_once_and_the_others_go_on(
    make_monitor, metrics, data, other
):
    """A disk that is gone has no series and no state; when it comes back it has both."""
    other.free_bytes = GIB
    monitor = make_monitor()
    await monitor.step()
    other.is_readable = False
    data.free_bytes = 9 * GIB
    with capture_logs() as lines:
        await monitor.step()
        await monitor.step()
    warnings = [line for line in lines if line["event"] == "disk is not watched"]
    assert [line["path"] for line in warnings] == ["/other"]
    assert monitor.state is DiskState.LOW
    assert shown(metrics, "redpanda_storage_disk_free_bytes", "/other") is None
    assert shown(metrics, "redpanda_storage_disk_free_bytes", "/data/a") == 9 * GIB
    other.is_readable = True
    await monitor.step()
    assert monitor.state is DiskState.DEGRADED


async def test_monitor_knows_nothing_when_no_disk_can_be_read(make_monitor, data, other):
    """The monitor does not guess: its state is unknown."""
    monitor = make_monitor()
    await monitor.step()
    data.is_readable = other.is_readable = False
    await monitor.step()
    assert monitor.state is None
