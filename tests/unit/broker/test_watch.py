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
from tests.support.small_disks import second_mount_at
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


ORDERS = ("orders-0", "orders-1")


def changed_names(watch, log_dir):
    """Return the partitions' directories whose names changed, and those that are watched."""
    changes = watch.since_last(unwritten=())
    return partitions_of(log_dir, changes.renamed), partitions_of(log_dir, changes.watched)


def partitions_of(log_dir, paths):
    """Return the names of the partitions' directories in *paths*."""
    return sorted(path.removeprefix(f"{log_dir}/") for path in paths if path != str(log_dir))


@pytest.mark.parametrize("change", ["create", "delete", "rename", "replace", "move away", "move in"])
async def test_each_change_of_names_is_reported_once(watch, log_dir, change):
    """A name that comes, goes or is replaced makes its directory one that has changed."""
    file, other = log_dir / "orders-1" / "old.index", log_dir / "elsewhere"
    file.touch()
    other.touch()
    assert changed_names(watch, log_dir) == (list(ORDERS), list(ORDERS))
    assert changed_names(watch, log_dir) == ([], list(ORDERS))
    {
        "create": (log_dir / "orders-1" / "new.timeindex").touch,
        "delete": file.unlink,
        "rename": lambda: file.rename(file.with_suffix(".deleted")),
        "replace": lambda: other.rename(file),
        "move away": lambda: file.rename(log_dir / "gone"),
        "move in": lambda: other.rename(log_dir / "orders-1" / "came"),
    }[change]()
    assert changed_names(watch, log_dir) == (["orders-1"], list(ORDERS))
    assert changed_names(watch, log_dir) == ([], list(ORDERS))


async def test_changes_that_the_loop_has_read_before_are_reported(watch, log_dir):
    """A hint does not take a change away from the scan."""
    watch.since_last(unwritten=())
    (log_dir / "orders-1" / _ROLLED).touch()
    await watch.changes()
    assert changed_names(watch, log_dir) == (["orders-1"], list(ORDERS))


async def test_change_that_the_scan_has_read_is_still_a_hint(watch, log_dir):
    """A scan does not take a hint away."""
    (log_dir / "orders-1" / _ROLLED).touch()
    watch.since_last(unwritten=())
    assert await watch.changes() == Hint(frozenset({str(log_dir / "orders-1")}))


async def test_appends_are_no_changes_of_names(watch, log_dir):
    """A write would be reported for each batch."""
    file = log_dir / "orders-0" / _ROLLED
    file.touch()
    watch.since_last(unwritten=())
    file.write_bytes(b"appended")
    assert changed_names(watch, log_dir) == ([], list(ORDERS))


async def test_set_of_watched_directories_is_the_same_object_while_it_is_the_same(watch, log_dir):
    """A scan compares ten thousand paths only when one came or went."""
    first, second = (watch.since_last(unwritten=()).watched for _ in range(2))
    assert first is second
    watch.follow([str(log_dir / "orders-0")])
    assert watch.since_last(unwritten=()).watched == {str(log_dir), str(log_dir / "orders-0")}


async def test_directory_that_is_watched_anew_counts_as_changed(watch, log_dir):
    """What happened while it was not watched is in no report."""
    watch.since_last(unwritten=())
    watch.follow([str(log_dir / "orders-0")])
    watch.follow([str(log_dir / "orders-0"), str(log_dir / "orders-1")])
    assert changed_names(watch, log_dir) == (["orders-1"], list(ORDERS))


async def test_directory_that_was_renamed_or_deleted_is_not_watched(watch, log_dir):
    """A directory that gets the name later is another one."""
    (log_dir / "orders-0").rename(log_dir / "orders-0.abc-delete")
    (log_dir / "orders-1").rmdir()
    (log_dir / "orders-0").mkdir()
    changes = watch.since_last(unwritten=())
    assert partitions_of(log_dir, changes.watched | changes.renamed | changes.unreported_writes) == []


async def test_directory_that_is_still_open_after_its_deletion_is_not_watched(watch, log_dir):
    """The kernel tells of its end when it is closed, and another directory may have the name long before."""
    path = log_dir / "orders-0"
    descriptor = os.open(path, os.O_RDONLY)
    try:
        path.rmdir()
        path.mkdir()
        assert changed_names(watch, log_dir)[1] == ["orders-1"]
        watch.follow([str(log_dir / name) for name in ORDERS])
        assert changed_names(watch, log_dir) == (["orders-0"], list(ORDERS))
    finally:
        os.close(descriptor)
    (path / _ROLLED).touch()
    assert changed_names(watch, log_dir) == (["orders-0"], list(ORDERS))


async def test_partitions_of_a_log_directory_that_was_replaced_are_not_watched(tmp_path):
    """An operator may move a log directory away and put a copy in its place."""
    log_dir, partition = tmp_path / "data", tmp_path / "data" / "orders-0"
    partition.mkdir(parents=True)
    watch = DirectoryWatch([str(log_dir)])
    watch.follow([str(partition)])
    log_dir.rename(tmp_path / "old")
    partition.mkdir(parents=True)
    assert watch.since_last(unwritten=()).watched == frozenset()
    assert watch.follow([str(partition)])
    await watch.changes()
    (partition / _ROLLED).touch()
    assert str(partition) in (await watch.changes()).paths
    watch.close()


async def test_directory_that_is_mounted_twice_is_watched_once(watch, log_dir, tmp_path):
    """Its events name one of the paths, so the other one does not count as watched. Nothing is done twice."""
    with second_mount_at(log_dir / "orders-2", log_dir / "orders-1"):
        followed = [str(log_dir / f"orders-{number}") for number in range(3)]
        watch.follow(followed)
        assert not watch.follow(followed)
        assert changed_names(watch, log_dir)[1] == list(ORDERS)
        unreported(watch, log_dir, unwritten=ORDERS)
        watch.follow(followed)
        assert unreported(watch, log_dir) == ["orders-1"], "asking for the other path has ended these reports"


async def test_directories_that_come_and_go_take_no_memory(watch, log_dir):
    """A daemon that asks for no changes, as beside Redpanda, does not gather them."""
    for number in range(50):
        path = log_dir / f"other-{number}"
        path.mkdir()
        watch.follow([str(path)])
        (path / _ROLLED).touch()
        await watch.changes()
    changes = watch.since_last(unwritten=())
    assert changes.renamed | changes.unreported_writes <= changes.watched


async def test_directory_that_is_watched_under_an_earlier_name_is_not_counted(watch, log_dir):
    """Its reports would name the directory that it was."""
    (log_dir / "orders-0").rename(log_dir / "orders-2")
    followed = [str(log_dir / f"orders-{number}") for number in range(3)]
    watch.follow(followed)
    assert changed_names(watch, log_dir)[1] == ["orders-1"]
    watch.follow(followed)
    assert changed_names(watch, log_dir) == (["orders-2"], ["orders-1", "orders-2"])


async def test_no_directory_counts_as_watched_after_an_overflow(watch, log_dir):
    """Events that the kernel lost may be of any directory. They are watched anew then."""
    paths = tuple(str(log_dir / name) for name in ORDERS)
    watch.follow(paths)
    watch.since_last(unwritten=())
    for number in range(_QUEUED_EVENTS + 10):
        os.close(os.open(log_dir / "orders-0" / f"{number}.index", os.O_CREAT | os.O_WRONLY))
    # The end of a watch may be among the events that are lost.
    (log_dir / "orders-1").rmdir()
    (log_dir / "orders-1").mkdir()
    assert changed_names(watch, log_dir)[1] == []
    assert (await watch.changes()).rescan
    assert changed_names(watch, log_dir)[1] == []
    assert watch.follow(paths)
    assert changed_names(watch, log_dir) == (list(ORDERS), list(ORDERS))
    (log_dir / "orders-1" / _ROLLED).touch()
    assert changed_names(watch, log_dir) == (["orders-1"], list(ORDERS))


async def test_hints_that_wait_behind_many_events_come(watch, log_dir):
    """A scan that does not read all events leaves the others to the loop."""
    for number in range(3000):
        os.close(os.open(log_dir / "orders-0" / f"{number}.index", os.O_CREAT | os.O_WRONLY))
    (log_dir / "orders-1" / _ROLLED).touch()
    assert changed_names(watch, log_dir)[1] == []
    async with asyncio.timeout(60):
        assert str(log_dir / "orders-1") in (await watch.changes()).paths


def unreported(watch, log_dir, *, unwritten=()):
    """Say that nothing was written to *unwritten*; return whose writes are not reported."""
    paths = {str(log_dir / name) for name in unwritten}
    return partitions_of(log_dir, watch.since_last(unwritten=paths).unreported_writes)


@pytest.fixture
def logs(log_dir):
    """Give an open segment in each partition."""
    for name in ORDERS:
        (log_dir / name / _ROLLED).write_bytes(b"before")
    return [log_dir / name / _ROLLED for name in ORDERS]


async def test_writes_are_reported_where_the_scan_found_none(watch, log_dir, logs):
    """A directory that is idle is watched for a write, any other is not."""
    assert unreported(watch, log_dir) == list(ORDERS)
    assert unreported(watch, log_dir, unwritten=["orders-1"]) == ["orders-0"]
    assert unreported(watch, log_dir) == ["orders-0"]


@pytest.mark.parametrize("change", ["append", "truncate", "set time"])
async def test_first_write_to_an_idle_directory_is_reported(watch, log_dir, logs, change):
    """The answer after a write says that writes are not reported, and so does each one until it is idle."""
    unreported(watch, log_dir, unwritten=ORDERS)
    {
        "append": lambda: logs[1].write_bytes(b"x"),
        "truncate": lambda: os.truncate(logs[1], 2),
        "set time": lambda: os.utime(logs[1], (1, 1)),
    }[change]()
    assert unreported(watch, log_dir) == ["orders-1"]
    assert unreported(watch, log_dir) == ["orders-1"]
    assert unreported(watch, log_dir, unwritten=["orders-1"]) == []
    assert unreported(watch, log_dir) == []


async def test_second_write_is_no_event(watch, log_dir, logs):
    """A directory that is written to costs one event, and not one for each append."""
    unreported(watch, log_dir, unwritten=ORDERS)
    logs[0].write_bytes(b"first")
    unreported(watch, log_dir)
    # The kernel makes one event of equal ones that follow each other, so two files are written to in turns.
    index = logs[0].with_suffix(".index")
    index.touch()
    with logs[0].open("ab", buffering=0) as log, index.open("ab", buffering=0) as beside:
        for _ in range(_QUEUED_EVENTS // 2 + 10):
            log.write(b"x")
            beside.write(b"y")
    answer = watch.since_last(unwritten=())
    assert partitions_of(log_dir, answer.watched) == list(ORDERS), (
        "an overflow would say that events were lost"
    )


async def test_directory_that_takes_the_place_of_a_written_one_is_not_watched(watch, log_dir, logs):
    """The watch for writes ends with the first write, by a path that is another directory's by then."""
    unreported(watch, log_dir, unwritten=ORDERS)
    logs[0].write_bytes(b"first")
    (log_dir / "orders-0").rename(log_dir / "orders-0.abc-delete")
    (log_dir / "orders-0").mkdir()
    assert changed_names(watch, log_dir)[1] == ["orders-1"]
    await watch.changes()
    (log_dir / "orders-0" / _ROLLED).touch()
    (log_dir / "orders-1" / "00000000000000000200.log").touch()
    assert await watch.changes() == Hint(frozenset({str(log_dir / "orders-1")}))


async def test_writes_are_no_hints_and_no_changes_of_names(watch, log_dir, logs):
    """A scan is brought forward by what can close a segment."""
    unreported(watch, log_dir, unwritten=ORDERS)
    await watch.changes()
    logs[0].write_bytes(b"appended")
    (log_dir / "orders-1" / "new-0000000000000000200.log").touch()
    assert await watch.changes() == Hint(frozenset({str(log_dir / "orders-1")}))
    assert changed_names(watch, log_dir)[0] == ["orders-1"]


async def test_segment_that_goes_is_no_hint(watch, log_dir, logs):
    """A deletion closes no segment."""
    await watch.changes()
    logs[0].unlink()
    logs[1].rename(logs[1].with_suffix(".deleted"))
    (log_dir / "orders-1" / "00000000000000000200.log").touch()
    assert await watch.changes() == Hint(frozenset({str(log_dir / "orders-1")}))


async def test_names_are_reported_while_writes_are(watch, log_dir, logs):
    """Watching for writes changes nothing of the rest."""
    unreported(watch, log_dir, unwritten=ORDERS)
    logs[0].rename(logs[0].with_suffix(".deleted"))
    assert changed_names(watch, log_dir) == (["orders-0"], list(ORDERS))
    logs[1].write_bytes(b"more")
    unreported(watch, log_dir)
    logs[1].unlink()
    assert changed_names(watch, log_dir) == (["orders-1"], list(ORDERS))


async def test_directory_that_takes_the_place_of_an_idle_one_is_not_watched(watch, log_dir, logs):
    """A request to watch its writes does not watch it by accident."""
    (log_dir / "orders-0").rename(log_dir / "orders-0.abc-delete")
    (log_dir / "orders-0").mkdir()
    answer = watch.since_last(unwritten={str(log_dir / "orders-0")})
    assert partitions_of(log_dir, answer.watched) == ["orders-1"]
    assert partitions_of(log_dir, answer.unreported_writes) == ["orders-1"]


async def test_directory_that_is_watched_anew_has_unreported_writes(watch, log_dir, logs):
    """An earlier watch for writes ended with the watch."""
    unreported(watch, log_dir, unwritten=ORDERS)
    watch.follow([str(log_dir / "orders-0")])
    watch.follow([str(log_dir / name) for name in ORDERS])
    assert unreported(watch, log_dir) == ["orders-1"]
