"""
An object store in a directory: a mounted disk, a network filesystem, or a trial.

An object is a file that is written outside the tree, flushed, and moved into place in one step. So a key
is absent, old or new, and never half written. Several processes of one machine may share a root: a
conditional write holds a lock file while it checks and moves. A version is the file's modification time
(made to differ from the previous one), inode and size.

This store does not create the root, and does not trust it: each operation reads the root's marker first,
and works relative to the descriptor that it read the marker through (`storage.file_root`).
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from posixpath import dirname
from typing import Self, TypeVar

from crc32c import crc32c as crc32c_of

from tieringd.clock import steady_seconds
from tieringd.errors import (
    BucketNotFound,
    ChecksumRejected,
    ObjectNotFound,
    PreconditionFailed,
    StorageDenied,
    StorageError,
    StorageUnavailable,
    StoreFull,
    TieringError,
)
from tieringd.storage.base import (
    Body,
    Condition,
    FileSlice,
    IfAbsent,
    IfVersion,
    Joined,
    JoinSource,
    ListPage,
    ObjectInfo,
    Take,
)
from tieringd.storage.file_copy import copied, crc32c_of_file
from tieringd.storage.file_directories import DurableDirectories
from tieringd.storage.file_root import FileRoot, filesystem_type, make_work_directory
from tieringd.storage.file_tree import WORK_DIRECTORY, TreeWalk, name_of
from tieringd.storage.ranges import FileReading, Windows
from tieringd.storage.store_times import StoreTimes
from tieringd.storage.threads import finished

T = TypeVar("T")

_THREADS = 8
_LOCK_FILES = 64  # Few enough to stay a handful of inodes, enough that partitions rarely meet.
_LOCK_POLL_SECONDS = 0.005
_PLACE_ATTEMPTS = 100  # Each is lost only to a delete that empties the directory in that instant.
_SAME_CLOCK_NS = 1_000_000_000  # A file's time lags behind the clock by a tick of the kernel.
# Filesystems keep times in nanoseconds, microseconds, seconds or pairs of seconds.
_TIME_STEPS_NS = (1, 1_000, 1_000_000, 1_000_000_000, 2_000_000_000)


def _do_nothing() -> None:
    """Let a short read finish when its caller is cancelled."""


class _PageEnd(str):
    """
    The last key of a page, with the walk that goes on behind it.

    So a listing reads each directory once, and not once for each page. A listing that begins later has a walk
    of its own.
    """

    __slots__ = ("_prefix", "_walk")
    _prefix: str
    _walk: TreeWalk | None

    def __new__(cls, key: str, prefix: str, walk: TreeWalk) -> Self:
        found = super().__new__(cls, key)
        found._prefix, found._walk = prefix, walk
        return found

    def taken(self, prefix: str) -> TreeWalk | None:
        """Return the walk, once. Return None after that, because a page may be asked for twice."""
        walk = self._walk if prefix == self._prefix else None
        self._walk = None
        return walk


class FileStore:
    """
    Objects as files below *root*, whose marker must hold *root_id* if one is given.

    The store has its own threads. Writers in several processes of one host are kept apart. Nothing is
    written to a network file system unless *has_single_writer* is set.

    `head` reads the object: a filesystem keeps no checksum, and computing it anew also shows whether the
    bytes are still readable. The store reports the filesystem's time, taken from the file that a put has
    just written. On a local disk that is this host's clock again.
    """

    has_own_clock = False

    def __init__(
        self,
        root: Path,
        *,
        prefix: str = "",
        root_id: str | None = None,
        has_single_writer: bool = False,
        filesystem_of: Callable[[int], str] = filesystem_type,
    ) -> None:
        prefix = prefix.strip("/")
        self._root = FileRoot(
            root, root_id=root_id, has_single_writer=has_single_writer, filesystem_of=filesystem_of
        )
        self._base = name_of(prefix) if prefix else ""
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="tieringd-file-store")
        # What takes a range may wait for a disk that is not the store's. Puts and lists must not wait for it.
        self._readers = ThreadPoolExecutor(_THREADS, thread_name_prefix="tieringd-file-read")
        self._is_swept = False
        self._times = StoreTimes()
        self._directories = DurableDirectories()
        self._windows = Windows()

    def tell_time_to(self, listener: Callable[[int | None], None]) -> None:
        """Tell *listener* the filesystem's time with each object that is stored."""
        self._times.listen(listener)

    async def put(
        self, key: str, body: Body, *, crc32c: int, condition: Condition | None = None
    ) -> ObjectInfo:
        """Copy an object into place, and check its bytes on the way."""
        target = self._target(key, crc32c, condition)
        stop = threading.Event()

        def put() -> tuple[ObjectInfo, _FilesystemTime]:
            with self._opened("put", key, to_write=True) as root:
                return self._put(root, target, [body], stop)

        info, filesystem_time = await self._in_thread(put, on_cancel=stop.set)
        self._times.note(filesystem_time.now_ms())
        return info

    async def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Return an object whole."""
        name = name_of(key, base=self._base)

        def read(fd: int, status: os.stat_result) -> tuple[bytes, ObjectInfo]:
            data = os.pread(fd, status.st_size, 0)
            return data, _info(key, status, crc32c_of(data))

        return await self._in_thread(lambda: self._read(key, name, read))

    async def get_range(self, key: str, *, position: int, size_bytes: int) -> bytes:
        """Return the bytes of a range."""
        name = name_of(key, base=self._base)
        return await self._in_thread(
            lambda: self._read(key, name, lambda fd, _: os.pread(fd, size_bytes, position))
        )

    async def read_range(self, key: str, *, position: int, size_bytes: int, begin: Callable[[], Take]) -> int:
        """Hand on the bytes of a range; see `RangeStore`."""
        name, take = name_of(key, base=self._base), begin()

        def read(fd: int, status: os.stat_result) -> int:
            found_bytes = max(0, min(size_bytes, status.st_size - position))
            self._windows.pour(found_bytes, FileReading(fd, position).fill, take)
            return found_bytes

        work = self._readers.submit(self._read, key, name, read)
        return await finished(work, on_cancel=_do_nothing)

    async def open_object(self, key: str) -> int | None:
        """Return a descriptor of an object on a disk of this host; see `OpenableStore`."""
        name = name_of(key, base=self._base)

        def opened() -> int | None:
            with self._opened("get", key, to_write=False) as root:
                fd = self._open(root, key, name)
                # Of the object, not of the root: another disk may be mounted below it.
                if self._root.is_on_own_disk(fd):
                    return fd
                os.close(fd)
                return None

        work = self._readers.submit(opened)
        try:
            return await finished(work, on_cancel=_do_nothing)
        except asyncio.CancelledError:
            _close_opened(work)
            raise

    async def head(self, key: str) -> ObjectInfo:
        """Return an object's size, version and checksum. The object is read for its checksum."""
        name = name_of(key, base=self._base)
        return await self._in_thread(
            lambda: self._read(key, name, lambda fd, status: _info(key, status, crc32c_of_file(fd)))
        )

    async def list_page(self, prefix: str, *, start_after: str | None = None, limit: int = 1000) -> ListPage:
        """Return one page of the tree's files."""
        return await self._in_thread(lambda: self._list(prefix, start_after, limit))

    async def delete_many(self, keys: Sequence[str]) -> None:
        """Delete objects, and the directories that this leaves empty."""
        names = [(key, name_of(key, base=self._base)) for key in keys]
        stop = threading.Event()
        await self._in_thread(lambda: self._delete(names, stop), on_cancel=stop.set)

    async def join(
        self, key: str, sources: Sequence[JoinSource], *, crc32c: int, condition: Condition | None = None
    ) -> Joined | None:
        """Copy several objects into place as one. They are on this host's disks anyway."""
        target = self._target(key, crc32c, condition)
        named = [(source, name_of(source.key, base=self._base)) for source in sources]
        stop = threading.Event()

        def join() -> tuple[ObjectInfo, _FilesystemTime]:
            with self._opened("join", key, to_write=True) as root:
                return self._join(root, target, named, stop)

        info, filesystem_time = await self._in_thread(join, on_cancel=stop.set)
        self._times.note(filesystem_time.now_ms())
        return Joined(info, is_proven=True, host_bytes=info.size_bytes)

    async def kept_after_delete(self, _key: str) -> tuple[str, ...]:
        """Return nothing: a deleted file is gone. Snapshots of the filesystem cannot be seen from here."""
        return ()

    async def close(self) -> None:
        """Shut down the threads once they are idle."""
        self._executor.shutdown(wait=False)
        self._readers.shutdown(wait=False)

    async def _in_thread(self, function: Callable[[], T], on_cancel: Callable[[], None] = _do_nothing) -> T:
        return await finished(self._executor.submit(function), on_cancel=on_cancel)

    def _target(self, key: str, crc32c: int, condition: Condition | None) -> _Target:
        name = name_of(key, base=self._base)
        return _Target(key, name, self._root.path / name, crc32c, condition)

    def _put(
        self, root: int, target: _Target, bodies: Sequence[Body], stop: threading.Event
    ) -> tuple[ObjectInfo, _FilesystemTime]:
        """Store an object. Return its description, and the filesystem's time."""
        with self._translated("put", target.key), self._new_file(root) as (fd, temporary):
            actual = copied(bodies, fd, stop, past_page_cache=self._root.is_on_own_disk(root))
            if actual != target.crc32c:
                raise ChecksumRejected(
                    f"put {target.path}: the bytes have the checksum {actual:08x}, not {target.crc32c:08x}",
                    key=target.key,
                )
            os.fsync(fd)
            # Set the time to now, by the filesystem's clock: flushing the bytes may have taken minutes.
            os.utime(fd)
            filesystem_time = _FilesystemTime(os.fstat(fd).st_mtime_ns // 1_000_000, steady_seconds())
            with _locked(root, target.key, stop):
                self._commit(root, target, fd, temporary)
            status = os.fstat(fd)
        try:
            self._directories.flush(root, dirname(target.name))
        except FileNotFoundError:
            pass  # Already deleted again, with its directory.
        except OSError as error:
            raise StorageUnavailable(
                f"put {target.path}: its directory cannot be flushed: {error}", outcome_unknown=True
            ) from error
        return _info(target.key, status, actual), filesystem_time

    def _join(
        self, root: int, target: _Target, named: Sequence[tuple[JoinSource, str]], stop: threading.Event
    ) -> tuple[ObjectInfo, _FilesystemTime]:
        with ExitStack() as files:
            bodies: list[Body] = []
            for source, name in named:
                fd = self._open(root, source.key, name)
                files.callback(os.close, fd)
                status = os.fstat(fd)
                if status.st_size != source.size_bytes:
                    raise ChecksumRejected(
                        f"join {target.path}: {name} has {status.st_size} bytes, not {source.size_bytes}",
                        key=target.key,
                    )
                bodies.append(FileSlice(fd, 0, source.size_bytes))
            return self._put(root, target, bodies, stop)

    def _commit(self, root: int, target: _Target, fd: int, temporary: str) -> None:
        """Check the condition and move the file into place; the caller holds the key's lock."""
        previous = _opened_status(root, target.name)
        if previous is not None and stat.S_ISDIR(previous.st_mode):
            raise IsADirectoryError(errno.EISDIR, "the path is a directory")
        condition = target.condition
        version = _version(previous) if previous is not None else None
        if (isinstance(condition, IfAbsent) and version is not None) or (
            isinstance(condition, IfVersion) and version != condition.version
        ):
            raise PreconditionFailed(f"put {target.path}: another writer came first", key=target.key)
        _stamp(fd, os.fstat(fd).st_mtime_ns, previous)
        # A link refuses to replace a file, even one that a writer without our locks put there.
        move = os.link if isinstance(condition, IfAbsent) else os.replace
        for _ in range(_PLACE_ATTEMPTS):
            try:
                move(temporary, target.name, src_dir_fd=root, dst_dir_fd=root)
            except FileNotFoundError:
                self._make_directories(root, target)
            except FileExistsError as error:
                raise PreconditionFailed(
                    f"put {target.path}: the object exists already", key=target.key
                ) from error
            else:
                return
        raise FileNotFoundError(
            errno.ENOENT, "another process deletes the directory as often as it is created"
        )

    def _make_directories(self, root: int, target: _Target) -> None:
        directory = dirname(target.name)
        try:
            if directory:
                self._directories.make(root, directory)
                return
        except FileNotFoundError:
            pass
        raise BucketNotFound(
            f"{self._root.path} was removed while tieringd used it", hint="Mount the disk of the archive"
        )

    def _read(self, key: str, name: str, use: Callable[[int, os.stat_result], T]) -> T:
        """Open an object and use it. A replacement or deletion meanwhile leaves the open file whole."""
        with self._opened("get", key, to_write=False) as root:
            fd = self._open(root, key, name)
        try:
            with self._translated("get", key):
                return use(fd, os.fstat(fd))
        finally:
            os.close(fd)

    def _open(self, root: int, key: str, name: str) -> int:
        with self._translated("get", key):
            try:
                fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=root)
            except (FileNotFoundError, NotADirectoryError):
                raise ObjectNotFound(f"{self._root.path / name}: there is no such object", key=key) from None
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise ObjectNotFound(f"{self._root.path / name} is not an object", key=key)
            return fd

    def _list(self, prefix: str, start_after: str | None, limit: int) -> ListPage:
        walk = start_after.taken(prefix) if isinstance(start_after, _PageEnd) else None
        with self._opened("list", to_write=False) as root:
            walk = walk or TreeWalk(self._base, prefix, start_after)
            found, has_more = walk.take(root, limit)
        objects = tuple(_info(key, status, None) for key, status in found)
        return ListPage(objects, _PageEnd(objects[-1].key, prefix, walk) if has_more else None)

    def _delete(self, names: Sequence[tuple[str, str]], stop: threading.Event) -> None:
        with self._opened("delete", to_write=True) as root:
            make_work_directory(root)
            for key, name in names:
                with self._translated("delete", key):
                    # The lock keeps a conditional put from seeing a version that is about to be deleted.
                    with _locked(root, key, stop):
                        try:
                            os.unlink(name, dir_fd=root)
                        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                            continue
                    self._prune(root, dirname(name))

    def _prune(self, root: int, directory: str) -> None:
        """Remove empty directories, from *directory* up to the root."""
        while directory:
            try:
                self._directories.remove(root, directory)
            except OSError as error:
                if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.EBUSY}:
                    raise
                return
            directory = dirname(directory)

    @contextmanager
    def _new_file(self, root: int) -> Iterator[tuple[int, str]]:
        """Open a new file outside the tree for writing, and remove its name in the end."""
        make_work_directory(root)
        self._sweep_once(root)
        while True:
            name = f"{WORK_DIRECTORY}/{uuid.uuid4().hex}.part"
            fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666, dir_fd=root)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)  # While we hold it, no sweep removes the file.
                if os.fstat(fd).st_nlink:
                    yield fd, name
                    return
            finally:
                os.close(fd)
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=root)

    def _sweep_once(self, root: int) -> None:
        """Remove temporary files that killed writers left behind: those that no process holds a lock on."""
        if self._is_swept:
            return
        self._is_swept = True
        for name in _names_in(root, WORK_DIRECTORY):
            if not name.endswith(".part"):
                continue
            try:
                fd = os.open(f"{WORK_DIRECTORY}/{name}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=root)
            except FileNotFoundError:
                continue
            try:
                if _try_lock(fd):
                    with suppress(FileNotFoundError):
                        os.unlink(f"{WORK_DIRECTORY}/{name}", dir_fd=root)
            finally:
                os.close(fd)

    @contextmanager
    def _opened(self, operation: str, key: str | None = None, *, to_write: bool) -> Iterator[int]:
        """Open the root for one operation. Errors of the filesystem are raised as errors of our tree."""
        with self._translated(operation, key), self._root.opened(to_write=to_write) as root:
            yield root

    @contextmanager
    def _translated(self, operation: str, key: str | None = None) -> Iterator[None]:
        """Raise errors of the filesystem as errors of our tree."""
        try:
            yield
        except OSError as error:
            path = self._root.path / self._base / (key or "")
            raise self._error(operation, path, key, error) from error

    def _error(self, operation: str, path: Path, key: str | None, error: OSError) -> TieringError:
        text = f"{operation} {path}: {error.strerror or error}"
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            return StoreFull(text, key=key, hint=f"free some space on the disk of {self._root.path}")
        if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
            return StorageDenied(text, key=key, hint="allow the user that runs tieringd to write there")
        if error.errno in {errno.ENOTDIR, errno.EISDIR}:
            return StorageError(
                text, key=key, hint="a file store cannot have both an object `a` and an object `a/b`"
            )
        if error.errno == errno.ENAMETOOLONG:
            return StorageError(text, key=key, hint="file systems take paths of 4095 bytes")
        return StorageUnavailable(text)


@dataclass(frozen=True, slots=True)
class _FilesystemTime:
    """A reading of a filesystem's clock."""

    time_ms: int
    """The filesystem's time in ms since the epoch."""
    read_at: float
    """Time of the reading, by this host's steady clock. A lock or a flush may take minutes after it."""

    def now_ms(self) -> int:
        """Return what the filesystem's clock shows now."""
        return self.time_ms + round((steady_seconds() - self.read_at) * 1000)


@dataclass(frozen=True, slots=True)
class _Target:
    """What a put stores, and where."""

    key: str
    name: str
    """Relative to the root."""
    path: Path
    """The same path in full, for messages."""
    crc32c: int
    condition: Condition | None


def _stamp(fd: int, written_ns: int, previous: os.stat_result | None) -> None:
    """
    Give the file a modification time that differs from its predecessor's on this filesystem.

    The base is the filesystem's own time at which the file was written. Where this host's clock agrees
    with it, that clock is used instead: it is finer, so an object that is deleted and stored again gets
    another version.

    Raises:
        OSError: The filesystem does not keep modification times.
    """
    now_ns = time.time_ns()
    moment_ns = now_ns if abs(now_ns - written_ns) < _SAME_CLOCK_NS else written_ns
    earliest = previous.st_mtime_ns if previous is not None else 0
    for step in _TIME_STEPS_NS:
        moment = max(moment_ns, earliest + step)
        os.utime(fd, ns=(moment, moment))
        if os.fstat(fd).st_mtime_ns > earliest:
            return
    raise OSError(errno.EIO, "the filesystem does not keep modification times")


@contextmanager
def _locked(root: int, key: str, stop: threading.Event) -> Iterator[None]:
    """Hold the key's lock against every thread and process of this machine."""
    name = f"{WORK_DIRECTORY}/{crc32c_of(key.encode()) % _LOCK_FILES:02d}.lock"
    fd = os.open(name, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o666, dir_fd=root)
    try:
        # The lock is polled, so that a stopped process elsewhere cannot hold up a cancelled call.
        while not _try_lock(fd):
            if stop.wait(_LOCK_POLL_SECONDS):
                raise StorageUnavailable(f"{key}: cancelled while another writer held {name}")
        yield
    finally:
        os.close(fd)


def _names_in(root: int, directory: str) -> list[str]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root)
    try:
        with os.scandir(fd) as entries:
            return [entry.name for entry in entries]
    finally:
        os.close(fd)


def _opened_status(root: int, name: str) -> os.stat_result | None:
    """
    Return the status of a file through a freshly opened descriptor; None without such a file.

    The status of a path may come from a cache, which a network file system keeps for seconds. Opening
    the file asks the server.
    """
    try:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=root)
    except FileNotFoundError:
        return None
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)


def _close_opened(work: Future[int | None]) -> None:
    """Close what *work*, which has ended, has opened for a caller that was cancelled."""
    if not work.cancelled() and work.exception() is None and (fd := work.result()) is not None:
        os.close(fd)


def _version(status: os.stat_result) -> str:
    return f"{status.st_mtime_ns}-{status.st_ino}-{status.st_size}"


def _info(key: str, status: os.stat_result, crc32c: int | None) -> ObjectInfo:
    return ObjectInfo(key, status.st_size, _version(status), crc32c, status.st_mtime_ns // 1_000_000)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
