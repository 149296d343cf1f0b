"""DirectoryWatch on real directories and the kernel's real inotify."""

from __future__ import annotations

import asyncio
import os
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.support.file_calls import counted_file_calls
from tieringd.broker.watch import DirectoryWatch, Hint

pytestmark = pytest.mark.timeout(300)

_ROLLED = "00000000000000000100.log"
_QUEUED_EVENTS = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())


@pytest.fixture
def log_dir(tmp_path):
    (tmp_path / "orders-0").mkdir()
    (tmp_path / "orders-1").mkdir()
    return tmp_path


@pytest.fixture
async def watch(log_dir):
    watch = DirectoryWatch([str(log_dir)])
    watch.follow([str(log_dir / "orders-0"), str(log_dir / "orders-1")])
    yield watch
    watch.close()


async def test_watch_hints_at_the_partition_whose_segment_rolled(watch, log_dir):
    """A new segment file names its partition, and no other."""
    (log_dir / "orders-1" / _ROLLED).touch()

    assert await watch.changes() == Hint(frozenset({str(log_dir / "orders-1")}))


async def test_watch_hints_at_a_changed_leader_epoch(watch, log_dir):
    """A checkpoint renamed into place is a hint: the leader may have changed."""
    temporary = log_dir / "orders-0" / "leader-epoch-checkpoint.tmp"
    temporary.write_text("0\n0\n")
    temporary.rename(temporary.with_suffix(""))

    assert await watch.changes() == Hint(frozenset({str(log_dir / "orders-0")}))


async def test_watch_hints_at_a_new_partition(watch, log_dir):
    """A new directory in a log directory is a hint at its own path."""
    (log_dir / "orders-2").mkdir()

    assert await watch.changes() == Hint(frozenset({str(log_dir / "orders-2")}))


async def test_watch_is_silent_about_writes_and_side_files(watch, log_dir):
    """Appends, index files and the broker's own checkpoints are no hints."""
    segment = log_dir / "orders-0" / _ROLLED
    segment.touch()
    await watch.changes()

    segment.write_bytes(b"appended")
    segment.with_suffix(".index").touch()
    (log_dir / "recovery-point-offset-checkpoint").touch()
    (log_dir / "orders-1" / _ROLLED).touch()

    assert await watch.changes() == Hint(frozenset({str(log_dir / "orders-1")}))


async def test_watch_gathers_changes_until_they_are_asked_for(watch, log_dir):
    """Changes between two calls come together, once."""
    (log_dir / "orders-0" / _ROLLED).touch()
    (log_dir / "orders-1" / _ROLLED).touch()

    both = frozenset({str(log_dir / "orders-0"), str(log_dir / "orders-1")})
    assert await watch.changes() == Hint(both)
    (log_dir / "orders-2").mkdir()
    assert await watch.changes() == Hint(frozenset({str(log_dir / "orders-2")}))


async def test_watch_cancelled_wait_loses_nothing(watch, log_dir):
    """A wait that was cancelled leaves the change to the next one."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await watch.changes()
    (log_dir / "orders-0" / _ROLLED).touch()

    assert await watch.changes() == Hint(frozenset({str(log_dir / "orders-0")}))


async def test_watch_forgets_partitions_that_are_no_longer_followed(watch, log_dir):
    """A partition that is not followed any more gives no hint, and a newly followed one does."""
    (log_dir / "orders-2").mkdir()
    await watch.changes()
    watch.follow([str(log_dir / "orders-2")])

    (log_dir / "orders-0" / _ROLLED).touch()
    (log_dir / "orders-2" / _ROLLED).touch()

    assert await watch.changes() == Hint(frozenset({str(log_dir / "orders-2")}))


async def test_watch_follows_a_directory_that_was_created_again(watch, log_dir):
    """A partition deleted and created again under its name is watched again."""
    orders = log_dir / "orders-0"
    orders.rename(log_dir / "orders-0.f00d-delete")
    orders.mkdir()
    await watch.changes()
    watch.follow([str(orders)])

    (orders / _ROLLED).touch()

    assert await watch.changes() == Hint(frozenset({str(orders)}))


async def test_watch_survives_the_deletion_of_what_it_follows(watch, log_dir):
    """A directory that was deleted is followed again when it is back."""
    orders = log_dir / "orders-0"
    orders.rmdir()
    (log_dir / "orders-1" / _ROLLED).touch()
    await watch.changes()
    watch.follow([str(orders)])
    orders.mkdir()
    assert str(orders) in (await watch.changes()).paths
    watch.follow([str(orders)])

    (orders / _ROLLED).touch()

    assert await watch.changes() == Hint(frozenset({str(orders)}))


async def test_watch_asks_for_a_rescan_after_an_overflow(watch, log_dir):
    """Events are lost if the kernel's queue overflows, and the hint is to scan everything."""
    for number in range(_QUEUED_EVENTS + 10):
        os.close(os.open(log_dir / "orders-0" / f"{number}.index", os.O_CREAT | os.O_WRONLY))

    assert await watch.changes() == Hint(rescan=True)


async def test_watch_asks_for_a_rescan_when_too_many_paths_changed(watch, log_dir):
    """The set of changed paths is bounded: past the bound the hint is to scan everything."""
    for number in range(5000):
        (log_dir / f"many-{number}").mkdir()

    # More turns of the event loop than reading 5,000 events takes, without a request meanwhile.
    for _ in range(200):
        await asyncio.sleep(0)

    assert await watch.changes() == Hint(rescan=True)


async def test_watch_without_inotify_warns_once_and_waits(log_dir):
    """A host without inotify gives no hints, one warning, and no error."""
    watch = DirectoryWatch([str(log_dir)])
    with capture_logs() as logs, no_descriptors_left():
        watch.follow([str(log_dir / "orders-0")])
        watch.follow([str(log_dir / "orders-1")])

    (log_dir / "orders-0" / _ROLLED).touch()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await watch.changes()
    watch.close()
    assert [each["reason"] for each in logs] == ["inotify is not available"]


async def test_watch_of_a_directory_that_vanished_is_no_error(watch, log_dir):
    """A partition that went between scan and watch is left to the next scan."""
    with capture_logs() as logs:
        watch.follow([str(log_dir / "gone-0"), str(log_dir / "orders-0")])

    (log_dir / "orders-0" / _ROLLED).touch()
    assert await watch.changes() == Hint(frozenset({str(log_dir / "orders-0")}))
    assert logs == []


async def test_watch_closes_its_descriptors_and_ignores_what_follows(log_dir):
    """Closing gives every descriptor back; later calls do nothing."""
    before = open_descriptors()
    watch = DirectoryWatch([str(log_dir)])
    watch.follow([str(log_dir / "orders-0")])
    assert open_descriptors() != before

    watch.close()
    watch.close()
    watch.follow([str(log_dir / "orders-0")])

    # Garbage of other tests may be collected meanwhile, with descriptors of its own.
    assert set(open_descriptors()) <= set(before)


def open_descriptors():
    return sorted(each.name for each in Path("/proc/self/fd").iterdir())


@contextmanager
def no_descriptors_left():
    """Make every new descriptor fail, as at the process's limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.dup(0)
    os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_same_directories_are_followed_at_no_cost_until_one_is_lost(watch, log_dir):
    """A directory that came again under its name is another one, and is watched anew."""
    paths = tuple(str(path) for path in sorted(log_dir.iterdir()))
    watch.follow(paths)
    with counted_file_calls() as calls:
        assert not watch.follow(paths)
    assert not calls
    path = log_dir / "orders-0"
    path.rename(log_dir / "orders-0.abc-delete")
    await watch.changes()
    path.mkdir()
    assert watch.follow(paths)
    await watch.changes()
    (path / _ROLLED).touch()
    assert str(path) in (await watch.changes()).paths
