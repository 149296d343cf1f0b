"""What the files of log directories take, measured whole, and again and again at the price of the changes."""

from __future__ import annotations

import itertools
import os

import pytest

from tests.support.file_calls import counted_file_calls
from tieringd.broker.disk_use import FULL_SCAN_EVERY, DiskUseMeter, directory_uses

LONG_AGO_NS = 1_700_000_000_000_000_000
PARTITIONS = 5
_ticks = itertools.count()


def settle(path):
    """Let what is in *path*, and the directory, be as if it was changed long ago, and later than before."""
    for each in (*path.iterdir(), path):
        time_ns = LONG_AGO_NS + next(_ticks) * 1_000_000
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
    (log_dir / "meta.properties").write_text("version=1\n")
    return log_dir


@pytest.fixture
def meter(log_dir):
    """Give a meter that has measured the log directory once."""
    meter = DiskUseMeter()
    assert meter([str(log_dir)]) == directory_uses([str(log_dir)])
    return meter


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
    for _ in range(FULL_SCAN_EVERY):
        with counted_file_calls() as calls:
            meter([str(log_dir)])
        listings.append(calls["scandir"] - 1)
        # For the log directory itself one; a listed directory and its active segment have it twice.
        assert calls["stat"] <= 1 + 2 * PARTITIONS + 2 * listings[-1]
    assert sum(listings) == PARTITIONS
    assert max(listings) == 1


def test_meter_finds_in_time_what_no_time_shows(meter, log_dir):
    """A closed segment that grew in its place is no broker's doing, and is found by the whole measurement."""
    path = log_dir / "orders-1"
    before = path.stat()
    with (path / f"{0:020d}.log").open("ab") as file:
        file.write(bytes(50_000))
    os.utime(path, ns=(before.st_mtime_ns, before.st_mtime_ns))
    measured = [meter([str(log_dir)]) for _ in range(FULL_SCAN_EVERY)]
    assert measured[-1] == directory_uses([str(log_dir)]) != measured[0]


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
