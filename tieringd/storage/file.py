"""
An object store in a directory: a mounted disk, a network filesystem, or a trial.

An object is a file, written beside the tree, flushed, and moved into place in one step; so a
key is absent, old or new, and never half written. Several processes of one machine may share a
root: a conditional write holds a lock file while it looks and moves. A version is the file's
modification time (made to differ from the one before), inode and size.

The root is not created here: only the daemon does that, and only where its parent directory
exists (`storage.opening`). A missing parent is more likely a disk that is not mounted.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from crc32c import crc32c as crc32c_of

from tieringd.errors import (
    BucketNotFound,
    ChecksumRejected,
    ObjectNotFound,
    PreconditionFailed,
    StorageDenied,
    StorageError,
    StorageUnavailable,
    StoreFull,
)
from tieringd.storage.base import FileSlice, IfAbsent, IfVersion, Joined, ListPage, ObjectInfo
from tieringd.storage.file_bytes import copied, crc32c_of_file
from tieringd.storage.file_tree import WORK_DIRECTORY, path_of, walk
from tieringd.storage.store_times import StoreTimes
from tieringd.storage.threads import finished

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tieringd.errors import TieringError
    from tieringd.storage.base import Body, Condition, JoinSource

T = TypeVar("T")

_THREADS = 8
_LOCK_FILES = 64  # Few enough to stay a handful of inodes, enough that partitions rarely meet.
_LOCK_POLL_SECONDS = 0.005
_PLACE_ATTEMPTS = 100  # Each is lost only to a delete that empties the directory in that instant.
_SAME_CLOCK_NS = 1_000_000_000  # A file's time lags behind the clock by a tick of the kernel.
# Filesystems keep times in nanoseconds, microseconds, seconds or pairs of seconds.
_TIME_STEPS_NS = (1, 1_000, 1_000_000, 1_000_000_000, 2_000_000_000)


def _do_nothing() -> None:
    """Let a short read run to its end when its caller is cancelled."""


class FileStore:
    """
    Objects as files below *root*, in threads of its own.

    `head` reads the object: a filesystem keeps no checksum, and one that is computed anew also
    says whether the bytes are still readable. The time that it tells is the filesystem's, by the file that a
    put has just written: of a local disk that is this host's clock again.
    """

    has_own_clock = False

    def __init__(self, root: Path, *, prefix: str = "") -> None:
        prefix = prefix.strip("/")
        self._root = root
        self._base = path_of(root, prefix) if prefix else root
        self._work = root / WORK_DIRECTORY
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="tieringd-file-store")
        self._is_swept = False
        self._times = StoreTimes()

    def tell_time_to(self, listener: Callable[[int], None]) -> None:
        """Let *listener* hear the filesystem's time with each object that is stored."""
        self._times.listen(listener)

    async def put(
        self, key: str, body: Body, *, crc32c: int, condition: Condition | None = None
    ) -> ObjectInfo:
        """Copy an object into place, checking its bytes on the way."""
        path = path_of(self._base, key)
        stop = threading.Event()
        info, written_ms = await self._in_thread(
            lambda: self._put(_Target(key, path, crc32c, condition), [body], stop), on_cancel=stop.set
        )
        self._times.note(written_ms)
        return info

    async def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Return an object whole."""
        path = path_of(self._base, key)

        def read(fd: int, status: os.stat_result) -> tuple[bytes, ObjectInfo]:
            data = os.pread(fd, status.st_size, 0)
            return data, _info(key, status, crc32c_of(data))

        return await self._in_thread(lambda: self._read(key, path, read))

    async def get_range(self, key: str, *, position: int, size_bytes: int) -> bytes:
        """Return the bytes of a range."""
        path = path_of(self._base, key)
        return await self._in_thread(
            lambda: self._read(key, path, lambda fd, _: os.pread(fd, size_bytes, position))
        )

    async def head(self, key: str) -> ObjectInfo:
        """Return an object's size and version, and its checksum, for which it is read."""
        path = path_of(self._base, key)
        return await self._in_thread(
            lambda: self._read(key, path, lambda fd, status: _info(key, status, crc32c_of_file(fd)))
        )

    async def list_page(self, prefix: str, *, start_after: str | None = None, limit: int = 1000) -> ListPage:
        """Return one page of the tree's files."""
        return await self._in_thread(lambda: self._list(prefix, start_after, limit))

    async def delete_many(self, keys: Sequence[str]) -> None:
        """Delete objects, and the directories that they leave empty."""
        paths = [(key, path_of(self._base, key)) for key in keys]
        stop = threading.Event()
        await self._in_thread(lambda: self._delete(paths, stop), on_cancel=stop.set)

    async def join(
        self, key: str, sources: Sequence[JoinSource], *, crc32c: int, condition: Condition | None = None
    ) -> Joined | None:
        """Copy several objects into place as one: they are on this host's disks anyway."""
        target = _Target(key, path_of(self._base, key), crc32c, condition)
        paths = [(source, path_of(self._base, source.key)) for source in sources]
        stop = threading.Event()
        info, written_ms = await self._in_thread(lambda: self._join(target, paths, stop), on_cancel=stop.set)
        self._times.note(written_ms)
        return Joined(info, is_proven=True, host_bytes=info.size_bytes)

    async def close(self) -> None:
        """Let the threads end."""
        self._executor.shutdown(wait=False)

    async def _in_thread(self, function: Callable[[], T], on_cancel: Callable[[], None] = _do_nothing) -> T:
        return await finished(self._executor.submit(function), on_cancel=on_cancel)

    def _put(self, target: _Target, bodies: Sequence[Body], stop: threading.Event) -> tuple[ObjectInfo, int]:
        """Store an object; return what there is to say of it, and the filesystem's time in milliseconds."""
        with self._translated("put", target.path, target.key), self._new_file() as (fd, temporary):
            actual = copied(bodies, fd, stop)
            if actual != target.crc32c:
                raise ChecksumRejected(
                    f"put {target.path}: the bytes have the checksum {actual:08x}, not {target.crc32c:08x}",
                    key=target.key,
                )
            os.fsync(fd)
            written_ms = os.fstat(fd).st_mtime_ns // 1_000_000
            with self._locked(target.key, stop):
                self._commit(target, fd, temporary)
            status = os.fstat(fd)
        try:
            _sync_directory(target.path.parent)
        except FileNotFoundError:
            pass  # Deleted again already, directory and all.
        except OSError as error:
            raise StorageUnavailable(
                f"put {target.path}: its directory cannot be flushed: {error}", outcome_unknown=True
            ) from error
        return _info(target.key, status, actual), written_ms

    def _join(
        self, target: _Target, paths: Sequence[tuple[JoinSource, Path]], stop: threading.Event
    ) -> tuple[ObjectInfo, int]:
        with ExitStack() as files:
            bodies: list[Body] = []
            for source, path in paths:
                fd = self._open(source.key, path)
                files.callback(os.close, fd)
                status = os.fstat(fd)
                if status.st_size != source.size_bytes:
                    raise ChecksumRejected(
                        f"join {target.path}: {path} has {status.st_size} bytes, not {source.size_bytes}",
                        key=target.key,
                    )
                bodies.append(FileSlice(fd, 0, source.size_bytes))
            return self._put(target, bodies, stop)

    def _commit(self, target: _Target, fd: int, temporary: Path) -> None:
        """Check the condition and move the file into place; the caller holds the key's lock."""
        previous = _status_of(target.path)
        if previous is not None and stat.S_ISDIR(previous.st_mode):
            raise IsADirectoryError(errno.EISDIR, "it is a directory")
        condition = target.condition
        version = _version(previous) if previous is not None else None
        if (isinstance(condition, IfAbsent) and version is not None) or (
            isinstance(condition, IfVersion) and version != condition.version
        ):
            raise PreconditionFailed(f"put {target.path}: another writer came first", key=target.key)
        _stamp(fd, os.fstat(fd).st_mtime_ns, previous)
        # A link refuses to replace, even what a writer without our locks has put there.
        move = os.link if isinstance(condition, IfAbsent) else os.replace
        for _ in range(_PLACE_ATTEMPTS):
            try:
                move(temporary, target.path)
            except FileNotFoundError:
                self._make_directory(target.path.parent)
            except FileExistsError as error:
                raise PreconditionFailed(f"put {target.path}: it exists", key=target.key) from error
            else:
                return
        raise FileNotFoundError(errno.ENOENT, "its directory goes as often as it is made")

    def _make_directory(self, directory: Path) -> None:
        """Make a directory below the root, durably; one that a delete removes meanwhile is no error."""
        self._require_root()
        try:
            directory.mkdir()
            _sync_directory(directory.parent)
        except FileExistsError:
            return
        except FileNotFoundError:
            if not directory.parent.exists():
                self._make_directory(directory.parent)

    def _read(self, key: str, path: Path, use: Callable[[int, os.stat_result], T]) -> T:
        """Open an object and use it; what is open stays whole, whoever replaces or deletes it."""
        fd = self._open(key, path)
        try:
            with self._translated("get", path, key):
                return use(fd, os.fstat(fd))
        finally:
            os.close(fd)

    def _open(self, key: str, path: Path) -> int:
        with self._translated("get", path, key):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                self._require_root()
                raise ObjectNotFound(f"{path}: there is no such object", key=key) from None
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise ObjectNotFound(f"{path} is not an object", key=key)
            return fd

    def _list(self, prefix: str, start_after: str | None, limit: int) -> ListPage:
        with self._translated("list", self._base):
            self._require_root()
            found = list(islice(walk(self._base, prefix, start_after), limit + 1))
        objects = tuple(_info(key, status, None) for key, status in found[:limit])
        return ListPage(objects, objects[-1].key if len(found) > limit else None)

    def _delete(self, paths: Sequence[tuple[str, Path]], stop: threading.Event) -> None:
        with self._translated("delete", self._base):
            self._require_root()
            self._work.mkdir(exist_ok=True)
        for key, path in paths:
            with self._translated("delete", path, key):
                # The lock keeps a conditional put from seeing a version that is about to go.
                with self._locked(key, stop):
                    try:
                        path.unlink()
                    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                        continue
                self._prune(path.parent)

    def _prune(self, directory: Path) -> None:
        """Remove empty directories, upwards, to the root."""
        while directory != self._root:
            try:
                directory.rmdir()
            except OSError as error:
                if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.EBUSY}:
                    raise
                return
            directory = directory.parent

    @contextmanager
    def _new_file(self) -> Iterator[tuple[int, Path]]:
        """Open a file to write to, outside the tree, and remove its name in the end."""
        self._require_root()
        self._work.mkdir(exist_ok=True)
        self._sweep_once()
        while True:
            path = self._work / f"{uuid.uuid4().hex}.part"
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)  # As long as we hold it, nobody sweeps the file away.
                if os.fstat(fd).st_nlink:
                    yield fd, path
                    return
            finally:
                os.close(fd)
                path.unlink(missing_ok=True)

    def _sweep_once(self) -> None:
        """Remove what writers left behind that were killed: files that nobody holds a lock on."""
        if self._is_swept:
            return
        self._is_swept = True
        for path in self._work.glob("*.part"):
            try:
                with path.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
            except (BlockingIOError, FileNotFoundError):
                continue

    @contextmanager
    def _locked(self, key: str, stop: threading.Event) -> Iterator[None]:
        """Hold the key's lock against every thread and process of this machine."""
        path = self._work / f"{crc32c_of(key.encode()) % _LOCK_FILES:02d}.lock"
        with path.open("ab") as file:
            # Asked for again and again, so that a stopped process elsewhere cannot keep a cancelled call.
            while not _try_lock(file.fileno()):
                if stop.wait(_LOCK_POLL_SECONDS):
                    raise StorageUnavailable(f"{key}: cancelled while another writer held {path}")
            yield

    def _require_root(self) -> None:
        if not self._root.is_dir():
            raise BucketNotFound(
                f"{self._root} is not a directory",
                hint=f"mount its disk, or create it for the user that runs tieringd: mkdir -p {self._root}",
            )

    @contextmanager
    def _translated(self, operation: str, path: Path, key: str | None = None) -> Iterator[None]:
        """Raise what the filesystem answers as errors of our tree."""
        try:
            yield
        except OSError as error:
            raise self._error(operation, path, key, error) from error

    def _error(self, operation: str, path: Path, key: str | None, error: OSError) -> TieringError:
        text = f"{operation} {path}: {error.strerror or error}"
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            return StoreFull(text, key=key, hint=f"make room on the disk of {self._root}")
        if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
            return StorageDenied(text, key=key, hint="let the user that runs tieringd write there")
        if error.errno in {errno.ENOTDIR, errno.EISDIR}:
            return StorageError(text, key=key, hint="a file store cannot hold both `a` and `a/b`")
        if error.errno == errno.ENAMETOOLONG:
            return StorageError(text, key=key, hint="a file store's names end at 255 bytes")
        return StorageUnavailable(text)


@dataclass(frozen=True, slots=True)
class _Target:
    """What a put is to store, and where."""

    key: str
    path: Path
    crc32c: int
    condition: Condition | None


def _stamp(fd: int, written_ns: int, previous: os.stat_result | None) -> None:
    """
    Give the file a time that differs from its predecessor's as this filesystem keeps times.

    It is the filesystem's own time, at which the file was written. Where this host's clock agrees, that
    counts instead: it is finer, so an object that is deleted and stored again has another version.
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


def _status_of(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


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


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
