"""What the file store does beyond the contract: disks, other processes, crashes and odd keys."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from crc32c import crc32c

from tieringd.errors import (
    BucketNotFound,
    ConfigError,
    ObjectNotFound,
    PreconditionFailed,
    StorageDenied,
    StorageError,
    StoreFull,
)
from tieringd.storage.base import IfAbsent, IfVersion
from tieringd.storage.file import _LOCK_FILES, _THREADS, FileStore
from tieringd.storage.file_directories import DurableDirectories
from tieringd.storage.file_root import create_root, make_marker
from tieringd.storage.file_tree import ROOT_MARKER, WORK_DIRECTORY

REPOSITORY = Path(__file__).parents[3]

COUNT_IN_ANOTHER_PROCESS = """
import asyncio, sys
from pathlib import Path
from crc32c import crc32c
from tieringd.errors import PreconditionFailed
from tieringd.storage.base import IfVersion
from tieringd.storage.file import FileStore
from tieringd.storage.file_root import make_marker
from tieringd.storage.file_tree import ROOT_MARKER

async def main():
    store, done = FileStore(Path(sys.argv[1])), 0
    while done < 50:
        data, info = await store.get("counter")
        new = b"%d" % (int(data) + 1)
        try:
            await store.put("counter", new, crc32c=crc32c(new), condition=IfVersion(info.version))
        except PreconditionFailed:
            continue
        done += 1
    await store.close()

asyncio.run(main())
"""


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "archive"
    root.mkdir()
    make_marker(root)
    return root


@pytest.fixture
async def store(root):
    store = FileStore(root)
    yield store
    await store.close()


@pytest.fixture
def small_disk(tmp_path):
    """Mount a filesystem of 4 MiB."""
    root = tmp_path / "small"
    root.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(root)]
    done = subprocess.run(mount, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.fail(f"this test mounts a small tmpfs, for which it must run as root: {done.stderr}")
    make_marker(root)
    yield root
    subprocess.run(["umount", str(root)], check=True)


@pytest.fixture
def on_audit_event():
    """Return a function that lets a listener hear the interpreter's audit events, until the test ends."""
    listeners = []

    def hear(event: str, arguments: tuple[object, ...]) -> None:
        for listener in listeners:
            listener(event, arguments)

    sys.addaudithook(hear)  # It cannot be removed; without listeners it does nothing.
    yield listeners.append
    listeners.clear()


@pytest.fixture
def flushed(root, monkeypatch):
    """Return the list of flushed directories, as paths below the root; a test may replace `flushed.wait`."""

    class Flushed(list):
        wait = staticmethod(lambda _: None)

    found, fsync = Flushed(), os.fsync

    def noted_fsync(fd):
        path = Path(f"/proc/self/fd/{fd}").readlink()
        if path.is_dir():
            found.wait(str(path.relative_to(root)))
        fsync(fd)
        if path.is_dir():
            found.append(str(path.relative_to(root)))

    monkeypatch.setattr(os, "fsync", noted_fsync)
    return found


async def put(store: FileStore, key: str, data: bytes, **conditions):
    return await store.put(key, data, crc32c=crc32c(data), **conditions)


def files_of(root: Path) -> list[str]:
    """Return what is below the root, without its marker and the lock files."""
    paths = (path for path in root.rglob("*") if path.suffix != ".lock" and path.name != ROOT_MARKER)
    return sorted(str(path.relative_to(root)) for path in paths)


@pytest.mark.parametrize(
    "key",
    ["", "/a", "a/", "a//b", "..", "a/../b", "./a", "a/.", "a\0b", ".tieringd-tmp/x", ROOT_MARKER],
)
async def test_key_that_is_no_path_below_the_root_is_refused(store, key):
    """Such a key is a programmer's mistake, whatever the operation, and touches nothing."""
    calls = [
        lambda: put(store, key, b""),
        lambda: store.get(key),
        lambda: store.get_range(key, position=0, size_bytes=1),
        lambda: store.head(key),
        lambda: store.delete_many(["fine", key]),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="cannot be a name"):
            await call()


async def test_listing_does_not_leave_the_root(store, root):
    """A prefix cannot climb, and the store's own files are not objects."""
    (root.parent / "outside").write_bytes(b"x")
    await put(store, "key", b"content")
    with pytest.raises(ValueError, match="cannot be a name"):
        await store.list_page("../")
    assert [each.key for each in (await store.list_page("")).objects] == ["key"]
    assert (await store.list_page(".tieringd")).objects == ()


async def test_object_is_a_plain_file_under_its_key(store, root):
    """The tree can be copied to a bucket as it is."""
    await put(store, "topic/0_id/10-19.log", b"content")
    assert (root / "topic" / "0_id" / "10-19.log").read_bytes() == b"content"
    assert files_of(root) == [".tieringd-tmp", "topic", "topic/0_id", "topic/0_id/10-19.log"]


@pytest.mark.parametrize("condition", [None, IfAbsent()], ids=["plain", "if-absent"])
@pytest.mark.parametrize(("first", "second"), [("a", "a/b"), ("a/b", "a"), ("a", "a/b/c")])
async def test_key_below_another_is_refused_clearly(store, first, second, condition):
    """Objects `a` and `a/b` cannot both exist, in either order, and the error names the reason."""
    await put(store, first, b"first")
    with pytest.raises(StorageError, match="cannot have both") as caught:
        await put(store, second, b"second", condition=condition)
    assert not isinstance(caught.value, PreconditionFailed)
    with pytest.raises(ObjectNotFound):
        await store.get(second)
    await store.delete_many([second])
    assert (await store.get(first))[0] == b"first"


async def test_path_that_is_too_long_is_refused_clearly(store):
    """A filesystem's limit is named. Parts of a key that are too long for a name are in test_long_names."""
    with pytest.raises(StorageError, match="4095 bytes"):
        await put(store, "x/" * 2500 + "x", b"content")


def test_first_marker_makes_the_name_of_the_root_durable(root, flushed):
    """A root that the daemon has made is flushed in its parent before it has a marker."""
    made = root / "archive"
    create_root(made)
    make_marker(made)
    assert [one for one in flushed if one in (".", "archive")] == [".", "archive"]


async def test_full_disk_is_told_and_left_clean(small_disk, slice_of):
    """A full disk stores nothing and keeps no temporary file, and the error names the disk."""
    store = FileStore(small_disk)
    data = bytes(6 << 20)
    for body in (data, slice_of(data)):
        with pytest.raises(StoreFull, match=str(small_disk)):
            await store.put("dir/key", body, crc32c=crc32c(data))
    assert files_of(small_disk) == [".tieringd-tmp"]
    await put(store, "dir/key", b"small enough")
    assert (await store.get("dir/key"))[0] == b"small enough"
    await store.close()


async def test_read_only_disk_denies_writes(small_disk):
    """A disk that may not be written to is an operator's matter; reading goes on."""
    store = FileStore(small_disk)
    await put(store, "key", b"content")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)  # noqa: ASYNC221
    with pytest.raises(StorageDenied):
        await put(store, "key", b"other")
    with pytest.raises(StorageDenied):
        await store.delete_many(["key"])
    assert (await store.get("key"))[0] == b"content"
    await store.close()


async def test_root_that_goes_away_is_not_made_again(store, root):
    """A root that is unmounted or removed under the store is reported, with the way to create it."""
    await put(store, "dir/key", b"content")
    root.rename(root.parent / "gone")
    with pytest.raises(BucketNotFound, match="Mount the disk of the archive"):
        await put(store, "dir/other", b"content")
    with pytest.raises(BucketNotFound):
        await store.get("dir/key")
    assert not root.exists()


async def test_ranges_that_are_not_taken_hold_up_no_other_request(store):
    """A put and a get end while all readers of ranges wait for a cache disk that hangs."""
    await store.put("key", b"value", crc32c=crc32c(b"value"))
    disk_is_back, waiting = threading.Event(), threading.Semaphore(0)

    def take(_: memoryview) -> None:
        waiting.release()
        disk_is_back.wait()

    reads = [
        asyncio.create_task(store.read_range("key", position=0, size_bytes=5, begin=lambda: take))
        for _ in range(2 * _THREADS)
    ]
    try:
        for _ in range(_THREADS):
            await asyncio.to_thread(waiting.acquire)
        async with asyncio.timeout(60):
            await store.put("another", b"", crc32c=0)
            assert (await store.get("key"))[0] == b"value"
    finally:
        disk_is_back.set()
    assert await asyncio.gather(*reads) == [5] * len(reads)


async def test_version_changes_with_the_same_bytes(store):
    """Each write has another version, even of the same bytes at the same moment."""
    versions = {(await put(store, "key", b"same")).version for _ in range(50)}
    assert len(versions) == 50


async def test_version_changes_after_a_clock_that_went_back(store, root):
    """A file from the future is followed by a later one, so that its version cannot return."""
    old = await put(store, "key", b"same")
    future_ns = (old.modified_ms + 3_600_000) * 1_000_000
    os.utime(root / "key", ns=(future_ns, future_ns))
    new = await put(store, "key", b"same")
    assert (root / "key").stat().st_mtime_ns > future_ns
    with pytest.raises(PreconditionFailed):
        await put(store, "key", b"same", condition=IfVersion(old.version))
    await put(store, "key", b"same", condition=IfVersion(new.version))


async def test_processes_lose_no_update_of_each_other(store, root):
    """Four processes that swap the same object, again and again, count to their sum."""
    await put(store, "counter", b"0")
    command = (sys.executable, "-c", COUNT_IN_ANOTHER_PROCESS, str(root))
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    processes = [await asyncio.create_subprocess_exec(*command, env=environment) for _ in range(4)]
    assert [await process.wait() for process in processes] == [0] * 4
    assert (await store.get("counter"))[0] == b"200"


async def test_create_does_not_replace_what_appears_meanwhile(store, root, on_audit_event):
    """A file that a writer without our locks puts there at the last moment wins against a create."""

    def place(event: str, _: object) -> None:
        if event == "os.utime":  # After the check of the key, before the move.
            (root / "key").write_bytes(b"foreign")

    on_audit_event(place)
    with pytest.raises(PreconditionFailed):
        await put(store, "key", b"ours", condition=IfAbsent())
    assert (root / "key").read_bytes() == b"foreign"


async def test_delete_prunes_directories_up_to_the_root(store, root):
    """A directory goes with its last object, and so do those above it; others stay."""
    for key in ("a/b/c/1", "a/b/c/2", "a/x"):
        await put(store, key, b"x")
    await store.delete_many(["a/b/c/1"])
    assert (root / "a" / "b" / "c").is_dir()
    await store.delete_many(["a/b/c/2"])
    assert files_of(root) == [".tieringd-tmp", "a", "a/x"]
    await store.delete_many(["a/x"])
    assert files_of(root) == [".tieringd-tmp"]


async def test_puts_survive_the_pruning_of_their_directory(store):
    """Puts and deletes in one directory at the same time all succeed."""

    async def come_and_go(number: int) -> None:
        for _ in range(40):
            await put(store, f"deep/er/dir/{number}", b"x")
            await store.delete_many([f"deep/er/dir/{number}"])
        await put(store, f"deep/er/dir/{number}", b"last")

    await asyncio.gather(*(come_and_go(number) for number in range(6)))
    assert len((await store.list_page("deep/er/dir/")).objects) == 6


async def test_put_flushes_names_that_a_killed_writer_made(store, root, flushed):
    """A directory that exists may have been made by a process that was killed before it flushed the name."""
    (root / "a" / "b").mkdir(parents=True)
    await put(store, "a/b/1", b"x")
    assert sorted(flushed) == [".", "a", "a/b"]


async def test_directory_is_flushed_once_until_it_is_made_anew(store, flushed):
    """Later PUTs flush the file's own name alone. A directory that went and came back is flushed again."""
    await put(store, "a/b/1", b"x")
    flushed.clear()
    await put(store, "a/b/2", b"x")
    assert flushed == ["a/b"]
    await store.delete_many(["a/b/1", "a/b/2"])
    flushed.clear()
    await put(store, "a/b/1", b"x")
    assert sorted(flushed) == [".", "a", "a/b"]


async def test_put_does_not_rely_on_a_name_that_another_put_is_about_to_flush(store, flushed):
    """Two puts need one new directory. The machine may crash before the first has flushed its name."""
    reached, go_on = threading.Event(), threading.Event()

    def wait(directory: str) -> None:
        if directory == "." and not reached.is_set():
            reached.set()
            assert go_on.wait(120)

    flushed.wait = wait
    first = asyncio.create_task(put(store, "a/1", b"x"))
    assert await asyncio.to_thread(reached.wait, 120)
    flushed.clear()
    await put(store, "a/2", b"x")
    assert sorted(flushed) == [".", "a"]
    go_on.set()
    await first


async def test_each_missing_directory_is_made_by_one_call(store, on_audit_event):
    """A key of a new partition needs five directories."""
    made = []
    on_audit_event(lambda event, arguments: made.append(arguments[0]) if event == "os.mkdir" else None)
    await put(store, "a/b/c/d/e/1", b"x")
    assert made == [".tieringd-tmp", "a", "a/b", "a/b/c", "a/b/c/d", "a/b/c/d/e"]
    made.clear()
    await put(store, "a/b/c/d/e/2", b"x")
    assert made == [".tieringd-tmp"]


async def test_forgotten_directories_are_flushed_again(root, flushed):
    """Only so many are remembered, and the oldest are forgotten first."""
    directories, descriptor = DurableDirectories(remembered=2), os.open(root, os.O_RDONLY)
    try:
        for name in ("a", "b", "c", "a"):
            directories.make(descriptor, name)
            directories.flush(descriptor, name)
    finally:
        os.close(descriptor)
    assert flushed == ["a", ".", "b", ".", "c", ".", "a", "."]


async def test_directory_that_appears_while_it_is_made_is_flushed(store, root, flushed, on_audit_event):
    """Another thread has made it, and has not flushed it yet."""

    def appear(event: str, arguments: tuple) -> None:
        if event == "os.mkdir" and arguments[0] == "a":
            with suppress(FileExistsError):
                (root / "a" / "b").mkdir(parents=True)

    on_audit_event(appear)
    await put(store, "a/b/1", b"x")
    assert set(flushed) == {".", "a", "a/b"}


async def test_directory_that_is_made_again_is_flushed_again(store, flushed):
    """The new directory may have the inode of the old one."""
    for _ in range(20):
        await put(store, "a/b/1", b"x")
        assert set(flushed) == {".", "a", "a/b"}
        await store.delete_many(["a/b/1"])
        flushed.clear()


async def test_directory_that_another_process_made_again_is_flushed_again(store, root, flushed):
    """The other process may have been killed before it flushed the name."""
    await put(store, "a/b/1", b"x")
    (root / "a/b/1").unlink()
    (root / "a/b").rename(root / "gone")
    (root / "a/b").mkdir()
    flushed.clear()
    await put(store, "a/b/2", b"x")
    assert sorted(flushed) == ["a", "a/b"]


async def test_leftovers_of_killed_writers_are_swept(root):
    """A new store removes half-written files that no living writer holds, and only those."""
    work = root / ".tieringd-tmp"
    (work / "dead.part").write_bytes(b"half")
    with (work / "alive.part").open("wb") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        store = FileStore(root)
        await put(store, "key", b"content")
        await store.close()
        assert sorted(path.name for path in work.glob("*.part")) == ["alive.part"]


async def test_cancelled_put_does_not_wait_for_a_lock(store, root):
    """A put that waits for a stopped process's lock can be cancelled, and stores nothing."""
    await put(store, "key", b"before")
    (lock,) = (root / ".tieringd-tmp").glob("*.lock")
    with lock.open("rb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        task = asyncio.create_task(put(store, "key", b"after"))
        await asyncio.wait({task}, timeout=0.05)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (await store.get("key"))[0] == b"before"
    await put(store, "key", b"after")


async def test_version_is_not_taken_from_a_stale_cache(store, root, monkeypatch):
    """A network file system answers for a path from its cache; a compare-and-swap asks an opened file."""
    old = await put(store, "manifest", b"first")
    stale, real = (root / "manifest").stat(), os.stat
    await put(store, "manifest", b"by another host", condition=IfVersion(old.version))

    def cached(path, **options):
        is_cached = not isinstance(path, int) and os.fsdecode(path).endswith("manifest")
        return stale if is_cached else real(path, **options)

    # A cache of attributes that is out of date needs a network file system and a second host.
    monkeypatch.setattr(os, "stat", cached)
    with pytest.raises(PreconditionFailed):
        await put(store, "manifest", b"by us", condition=IfVersion(old.version))
    assert (await store.get("manifest"))[0] == b"by another host"


@pytest.mark.parametrize("type_name", ["nfs4", "cifs", "fuse.sshfs"])
async def test_network_file_system_is_written_to_by_a_single_writer_only(root, type_name):
    """Reading goes on; the refusal names the type, the setting and what it asks for."""
    (root / "key").write_bytes(b"content")
    store = FileStore(root, filesystem_of=lambda _: type_name)
    calls = [lambda: put(store, "key", b"other"), lambda: store.delete_many(["key"])]
    for call in calls:
        with pytest.raises(ConfigError, match=rf"{type_name}.*only one daemon.*cloud_storage_single_writer"):
            await call()
    assert (await store.get("key"))[0] == b"content"
    await store.close()
    alone = FileStore(root, has_single_writer=True, filesystem_of=lambda _: type_name)
    await put(alone, "key", b"other")
    await alone.close()


async def test_head_tells_what_is_really_on_disk(store, root):
    """The checksum is of the bytes that are there now, so rot shows."""
    await put(store, "key", b"content")
    (root / "key").write_bytes(b"cOntent")
    assert (await store.head("key")).crc32c == crc32c(b"cOntent")


async def test_page_reads_only_the_directories_it_needs(store, on_audit_event):
    """Directories outside the prefix, before the page's start or after its end are not read."""
    for directory in ("l/a", "l/b", "l/c", "l/d", "m"):
        for number in range(3):
            await put(store, f"{directory}/{number}", b"x")
    read: list[str] = []

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if event == "os.scandir":
            read.append(Path(f"/proc/self/fd/{arguments[0]}").readlink().name)

    on_audit_event(note)
    page = await store.list_page("l/", start_after="l/b/1", limit=2)
    assert [each.key for each in page.objects] == ["l/b/2", "l/c/0"]
    assert read == ["l", "b", "c"]


async def test_page_that_is_asked_for_again_is_read_anew(store):
    """Only the listing that a page belongs to goes on from it, and only once."""
    for number in range(20):
        await put(store, f"{number:02d}/object", b"x")
    first = await store.list_page("", limit=3)
    second = await store.list_page("", start_after=first.next_start_after, limit=3)
    await put(store, "04/new", b"x")
    again = await store.list_page("", start_after=first.next_start_after, limit=3)
    other = await store.list_page("", start_after=str(first.next_start_after), limit=3)
    assert [one.key for one in second.objects] == ["03/object", "04/object", "05/object"]
    assert [one.key for one in again.objects] == ["03/object", "04/new", "04/object"]
    assert again.objects == other.objects


async def test_listing_reads_each_directory_once(store, on_audit_event):
    """A listing reads each directory once, however many pages it has."""
    for number in range(20):
        await put(store, f"{number:02d}/object", b"x")
    count = 0

    def note(event: str, _: tuple[object, ...]) -> None:
        nonlocal count
        count += event == "os.scandir"

    on_audit_event(note)
    start_after, keys = None, []
    while True:
        page = await store.list_page("", start_after=start_after, limit=2)
        keys += [one.key for one in page.objects]
        start_after = page.next_start_after
        if start_after is None:
            break
    assert keys == [f"{number:02d}/object" for number in range(20)]
    assert count == 21


async def test_foreign_names_are_not_listed(store, root):
    """A file whose name is no UTF-8, a link and a pipe are not objects."""
    await put(store, "key", b"content")
    (root / os.fsdecode(b"\xff\xfe")).write_bytes(b"x")
    (root / "link").symlink_to(root / "key")
    os.mkfifo(root / "pipe")
    assert [each.key for each in (await store.list_page("")).objects] == ["key"]


async def test_unknown_trouble_is_worth_another_try(store, root):
    """An error of the filesystem that has no class of its own is StorageUnavailable."""
    error = store._error("put", root / "key", "key", OSError(errno.EIO, "Input/output error"))
    assert type(error).__name__ == "StorageUnavailable"
    assert "Input/output error" in str(error)


def files_open():
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a path of the kernel


async def test_object_is_opened_where_it_lies(root):
    """What replaces or deletes it meanwhile leaves the open file as it is."""
    store = FileStore(root, prefix="east", filesystem_of=lambda _: "xfs")
    await store.put("a/b", b"content", crc32c=crc32c(b"content"))
    before = files_open()
    fd = await store.open_object("a/b")
    await store.put("a/b", b"another", crc32c=crc32c(b"another"))
    await store.delete_many(["a/b"])
    assert os.pread(fd, 100, 0) == b"content"
    os.close(fd)
    for missing in ("a/b", "a"):
        with pytest.raises(ObjectNotFound):
            await store.open_object(missing)
    assert files_open() == before
    await store.close()


@pytest.mark.parametrize("filesystem", ["nfs4", "fuse.sshfs", "overlay", ""])
async def test_object_that_is_on_no_disk_of_this_host_is_not_opened(root, filesystem):
    """The caller reads it as an object of any store."""
    store = FileStore(root, has_single_writer=True, filesystem_of=lambda _: filesystem)
    await store.put("a", b"content", crc32c=crc32c(b"content"))
    before = files_open()
    assert await store.open_object("a") is None
    assert files_open() == before
    await store.close()


async def test_object_of_another_archive_is_not_opened(root):
    """A disk that was mounted in place of the archive's may have a file of the same name."""
    (root / "a").write_bytes(b"another archive's")
    store = FileStore(root, root_id="the one that is expected", filesystem_of=lambda _: "ext4")
    with pytest.raises(BucketNotFound):
        await store.open_object("a")
    await store.close()


async def test_object_is_opened_while_all_writers_wait(root):
    """Readers do not wait for the disk's flushes, or for a lock that another process holds."""
    store = FileStore(root, filesystem_of=lambda _: "ext4")
    await store.put("a", b"content", crc32c=crc32c(b"content"))
    with ExitStack() as locks:
        for number in range(_LOCK_FILES):
            lock = locks.enter_context((root / WORK_DIRECTORY / f"{number:02d}.lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        puts = [
            asyncio.create_task(store.put(f"b{number}", b"content", crc32c=crc32c(b"content")))
            for number in range(2 * _THREADS)
        ]
        await asyncio.sleep(0)  # Each put has handed its work to a thread now.
        async with asyncio.timeout(5):
            os.close(await store.open_object("a"))
        assert not any(task.done() for task in puts)
    await asyncio.gather(*puts)
    await store.close()


async def test_object_on_another_disk_below_the_root_is_asked_for_its_own(root, tmp_path):
    """A disk may be mounted, or linked, below the root of the archive."""

    def filesystem_of(fd: int) -> str:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        return "tmpfs" if path.is_relative_to("/dev/shm") else "ext4"

    store = FileStore(root, filesystem_of=filesystem_of)
    await store.put("a", b"content", crc32c=crc32c(b"content"))
    os.close(await store.open_object("a"))
    with TemporaryDirectory(dir="/dev/shm") as directory:
        (Path(directory) / "b").write_bytes(b"content")
        (root / "below").symlink_to(directory)
        assert await store.open_object("below/b") is None
    await store.close()
