"""What the files of log directories take, measured whole, and again and again at the price of the changes."""

from __future__ import annotations

import itertools
import os
import time

import pytest

from tests.support.file_calls import counted_file_calls
from tieringd.broker.disk_use import (
    FULL_SCAN_EVERY,
    NO_SCAN,
    OLD_SCAN_EVERY,
    DiskUseMeter,
    ScannedLogs,
    directory_uses,
)
from tieringd.broker.log_dir import LogDirRescan

LONG_AGO_NS = 1_700_000_000_000_000_000
PARTITIONS = 5
_ticks = itertools.count()


def settle(path, *, since_ns=LONG_AGO_NS):
    """Let what is in *path*, and the directory, be as if it was changed long ago, and later than before."""
    for each in (*path.iterdir(), path):
        time_ns = since_ns + next(_ticks) * 1_000_000
        os.utime(each, ns=(time_ns, time_ns))


@pytest.fixture
def log_dir(tmp_path):
    """Give a log directory with some partitions that nothing was written to for long."""
    log_dir = tmp_path / "log"
    for number in range(PARTITIONS):
        path = log_dir / f"orders-{number}"
        path.mkdir(parents=True)
        for base in (0, 7):
            (path / f"{base:020d}.log").write_bytes(bytes(5000))
            (path / f"{base:020d}.index").write_bytes(b"")
        settle(path)
    (log_dir / "meta.properties").write_text("version=1\nnode.id=1\ncluster.id=c1\n")
    return log_dir


@pytest.fixture
def meter(log_dir):
    """Give a meter that has measured the log directory once."""
    meter = DiskUseMeter()
    assert meter([str(log_dir)]) == directory_uses([str(log_dir)])
    return meter


class Scans:
    """The scans of one log directory, and a meter that knows the newest one."""

    def __init__(self, log_dir):
        self.paths = [str(log_dir)]
        self._rescan = LogDirRescan()
        self.newest = NO_SCAN
        self.meter = DiskUseMeter(lambda: self.newest)

    def scan(self):
        """Read all logs."""
        logs = map(self._rescan.read, self._rescan.scan(self.paths).partitions)
        self.newest = ScannedLogs(self.newest.scan_number + 1, {log.partition.path: log for log in logs})

    def measured(self):
        """Return what the meter says, and the number of stats that it took."""
        with counted_file_calls() as calls:
            found = self.meter(self.paths)
        return found, calls["stat"]


@pytest.fixture
def scans(log_dir):
    """Give scans of the log directory: one was made, and the meter has measured twice since."""
    for number in range(PARTITIONS):
        (log_dir / f"orders-{number}" / "partition.metadata").write_text(
            "version: 0\ntopic_id: AAAAAAAAAAAAAAAAAAAAEg\n"
        )
        settle(log_dir / f"orders-{number}")
    scans = Scans(log_dir)
    scans.scan()
    assert len(scans.newest.by_path) == PARTITIONS
    assert scans.measured()[0] == scans.measured()[0] == tuple(directory_uses(scans.paths))
    return scans


def append(path):
    with (path / f"{7:020d}.log").open("ab") as file:
        file.write(bytes(50_000))


def roll(path):
    (path / f"{9:020d}.log").write_bytes(bytes(9000))


def delete(path):
    (path / f"{0:020d}.log").rename(path / f"{0:020d}.log.deleted")


def compact(path):
    swap = path / f"{0:020d}.log.swap"
    swap.write_bytes(bytes(100))
    swap.rename(path / f"{0:020d}.log")


def vanish(path):
    path.rename(path.with_name(f"{path.name}.abc-delete"))


@pytest.mark.parametrize("change", [append, roll, delete, compact, vanish])
def test_meter_sees_what_a_broker_changes(meter, log_dir, change):
    """The meter agrees with a whole measurement, at once and when the files are old again."""
    change(log_dir / "orders-1")
    changed = directory_uses([str(log_dir)])
    assert meter([str(log_dir)]) == changed
    for path in log_dir.glob("orders-?"):
        settle(path)
    assert meter([str(log_dir)]) == meter([str(log_dir)]) == changed


def test_meter_sees_a_new_partition(meter, log_dir):
    """A new partition is measured when it comes."""
    (log_dir / "orders-9").mkdir()
    roll(log_dir / "orders-9")
    assert meter([str(log_dir)]) == directory_uses([str(log_dir)])


def test_meter_checks_directory_and_active_segment_of_what_did_not_change(meter, log_dir):
    """Each partition is read whole once in so many measurements, and not all in the same one."""
    listings = []
    for _ in range(OLD_SCAN_EVERY):
        with counted_file_calls() as calls:
            meter([str(log_dir)])
        listings.append(calls["scandir"] - 1)
        # For the log directory itself one; a listed directory and its active segment have it twice.
        assert calls["stat"] <= 1 + 2 * PARTITIONS + 2 * listings[-1]
    assert sum(listings) == PARTITIONS
    assert max(listings) == 1


def test_meter_takes_unchanged_logs_from_a_newer_scan(scans):
    """A newer scan has found every log unchanged: the meter asks for the log directory alone."""
    for _ in range(3):
        scans.scan()
        found, stats = scans.measured()
        # A directory is listed whole now and then, with two stats.
        assert stats <= 1 + 2
        assert found == directory_uses(scans.paths)


def test_meter_that_measured_before_the_first_scan_takes_logs_from_later_ones(scans):
    """An inspection that finds nothing changed is reason enough to rely on the scans from then on."""
    scans.meter = DiskUseMeter(lambda: scans.newest)
    scans.newest = NO_SCAN
    scans.measured()
    for _ in range(2):
        scans.scan()
        found, stats = scans.measured()
    assert stats <= 1 + 2
    assert found == directory_uses(scans.paths)


@pytest.mark.parametrize("change", [append, roll, delete, compact, vanish])
def test_meter_sees_what_changed_before_a_newer_scan(scans, log_dir, change):
    """A scan that finds a change lets the meter inspect that directory again."""
    change(log_dir / "orders-1")
    scans.scan()
    assert scans.measured()[0] == directory_uses(scans.paths)


@pytest.mark.parametrize("change", [append, roll, delete, compact, vanish])
def test_meter_inspects_logs_itself_while_scans_stand_still(scans, log_dir, change):
    """A scan that is as old as the last measurement proves nothing about what came later."""
    scans.scan()
    scans.measured()
    change(log_dir / "orders-1")
    assert scans.measured()[0] == directory_uses(scans.paths)
    # The next scan shows the change, so it is not taken for a log that stays as it was measured.
    scans.scan()
    assert scans.measured()[0] == directory_uses(scans.paths)


@pytest.mark.parametrize("change", [append, roll, delete, compact, vanish])
def test_meter_is_not_misled_by_a_change_between_scan_and_measurement(scans, log_dir, change):
    """A change that came after the newest scan is measured after the next one at the latest."""
    scans.scan()
    change(log_dir / "orders-1")
    scans.measured()
    for path in log_dir.glob("orders-?"):
        settle(path)
    scans.scan()
    assert scans.measured()[0] == directory_uses(scans.paths)


def test_meter_lists_each_directory_in_time_beside_scans(scans, log_dir):
    """What no time shows is found by the full scan, also where scans find every log unchanged."""
    path = log_dir / "orders-1"
    scans.scan()
    before = (path / f"{0:020d}.index").stat(), path.stat()
    (path / f"{0:020d}.index").write_bytes(bytes(50_000))
    for one, status in zip((path / f"{0:020d}.index", path), before, strict=True):
        os.utime(one, ns=(status.st_mtime_ns, status.st_mtime_ns))
    measured = []
    for _ in range(OLD_SCAN_EVERY):
        scans.scan()
        measured.append(scans.measured()[0])
    assert measured[-1] == directory_uses(scans.paths) != measured[0]


def test_meter_finds_in_time_what_no_time_shows(meter, log_dir):
    """A closed segment that grew in its place is no broker's doing, and is found by the whole measurement."""
    path = log_dir / "orders-1"
    before = path.stat()
    with (path / f"{0:020d}.log").open("ab") as file:
        file.write(bytes(50_000))
    os.utime(path, ns=(before.st_mtime_ns, before.st_mtime_ns))
    measured = [meter([str(log_dir)]) for _ in range(OLD_SCAN_EVERY)]
    assert measured[-1] == directory_uses([str(log_dir)]) != measured[0]


def test_meter_reads_a_partition_that_was_written_to_lately_whole_more_often(log_dir):
    """A filesystem gives reserved blocks back minutes after the last write, which no time shows."""
    a_minute_ago_ns = time.time_ns() - 60_000_000_000
    lately = log_dir / "orders-1"
    settle(lately, since_ns=a_minute_ago_ns)
    meter = DiskUseMeter()
    meter([str(log_dir)])
    for _ in range(2):
        with counted_file_calls() as calls:
            for _ in range(FULL_SCAN_EVERY):
                meter([str(log_dir)])
        # The log directory in each measurement, and `orders-1`; the others are read in their hour.
        assert FULL_SCAN_EVERY + 1 <= calls["scandir"] <= FULL_SCAN_EVERY + PARTITIONS
    # Nothing was written to it for long by now, and it is read whole as seldom as the others.
    settle(lately)
    meter([str(log_dir)])
    with counted_file_calls() as calls:
        for _ in range(OLD_SCAN_EVERY):
            meter([str(log_dir)])
    assert calls["scandir"] == OLD_SCAN_EVERY + PARTITIONS


def test_meter_walks_directories_that_are_no_partitions(tmp_path):
    """Nothing is known of what changes in them: every measurement goes through them."""
    deep = tmp_path / "kafka" / "orders" / "0_1"
    deep.mkdir(parents=True)
    file = deep / "0-1-v1.log"
    file.write_bytes(bytes(5000))
    meter = DiskUseMeter()
    meter([str(tmp_path)])
    file.write_bytes(bytes(50_000))
    assert meter([str(tmp_path)]) == directory_uses([str(tmp_path)])


def test_directory_that_is_not_there_cannot_be_measured(meter, tmp_path):
    """A missing directory is an error, as with a whole measurement."""
    with pytest.raises(FileNotFoundError):
        meter([str(tmp_path / "missing")])
