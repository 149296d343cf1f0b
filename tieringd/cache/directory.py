"""
The cache directory: crash-safe files under their objects' names.

    {name}                  a whole file, see `formats.cache_names`
    incoming/*.part         a file that is being written; locked for as long as somebody writes it
    access_times            when each file was last read

A file gets its name when it is whole and never changes afterwards, so a crash leaves parts, and
parts are removed at the next start. What a name promises is not trusted: a file is handed out as
checked only when its bytes were checked by this process and it was not touched since.

Whatever is found and is not ours by its name is left alone. All methods block: call them in a thread.
They may be called from several. Errors of the disk are `LocalFileError`; the caller does without.

`Tree` is a directory tree that nothing leads out of. Every name is followed part by part from the root, and
none of the parts may be a symbolic link: a link inside is an error of that name, never a way to a file
elsewhere. The root itself may be one, as an operator chose it. `Tree` blocks, and raises `OSError`.

A `PartFile` holds the bytes of a cached file until it is whole. All parts lie in one directory of the
cache, so that leftovers are found without a walk. Each is locked by the process that writes it; the kernel
lets go when that process ends, so a part without a lock is a leftover. A part is never read under any other
name than its own.

`scan` walks over the directory at the start. Symbolic links are not followed, other filesystems not
entered, and a file that vanishes meanwhile has not been there. Several threads walk at once where the
operator allows it: one reading of a directory on a slow disk does not hold up the others then.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from tieringd.cache.accounts import Accounts, Identity, identity_of
from tieringd.cache.faults import located, translated
from tieringd.errors import CorruptDataError
from tieringd.formats.access_times import decode_access_times, encode_access_times
from tieringd.formats.cache_names import parse_cache_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path


_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE_MODE, _DIRECTORY_MODE = 0o640, 0o750
_CREATE_ATTEMPTS = 8

INCOMING = "incoming"
SUFFIX = ".part"

_MAX_DEPTH = 12
"""Deeper than any name of ours."""
_NS_PER_MS = 1_000_000

_ACCESS_TIMES = "access_times"
_NO_SUCH_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR)
"""Also where something stands in the way that is not ours: it is not deleted, and not read."""


class Tree:
    """Files below *root*, by names with slashes; safe for threads, as it has no state."""

    def __init__(self, root: str) -> None:
        self.root = root

    def open(self, name: str) -> int:
        """Open a file for reading; anything but an ordinary file is an error."""
        *above, last = name.split("/")
        with self._directory(above) as directory:
            # Nobody waits here for the other end of a pipe.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            fd = os.open(last, flags, dir_fd=directory)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise FileNotFoundError(2, "it is no ordinary file", name)
        return fd

    def create(self, name: str) -> int:
        """Create a file for reading and writing that must not exist, and the directories that it takes."""
        *above, last = name.split("/")
        with self._directory(above, create=True) as directory:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            return os.open(last, flags, _FILE_MODE, dir_fd=directory)

    def rename(self, name: str, new_name: str) -> None:
        """Give a file another name in the tree; an ordinary file of that name is replaced, nothing else."""
        *above, last = name.split("/")
        *new_above, new_last = new_name.split("/")
        with self._directory(above) as source, self._directory(new_above, create=True) as target:
            with suppress(FileNotFoundError):
                found = os.stat(new_last, dir_fd=target, follow_symlinks=False)
                if not stat.S_ISREG(found.st_mode):
                    raise FileExistsError(17, "something else is there", new_name)
            os.rename(last, new_last, src_dir_fd=source, dst_dir_fd=target)

    def unlink(self, name: str) -> None:
        """Delete an ordinary file, and the directories above it that are empty then."""
        parts = name.split("/")
        with self._directory(parts[:-1]) as directory:
            found = os.stat(parts[-1], dir_fd=directory, follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode):
                raise FileNotFoundError(2, "it is no ordinary file", name)
            os.unlink(parts[-1], dir_fd=directory)
        with suppress(OSError):  # The first one that is not empty, or gone.
            for depth in range(len(parts) - 1, 0, -1):
                with self._directory(parts[: depth - 1]) as directory:
                    os.rmdir(parts[depth - 1], dir_fd=directory)

    def free_bytes(self) -> int:
        """Return how much of its filesystem may still be written."""
        found = os.statvfs(self.root)
        return found.f_bavail * found.f_frsize

    @contextmanager
    def _directory(self, parts: list[str], *, create: bool = False) -> Iterator[int]:
        """Open the directory that *parts* lead to."""
        fd = os.open(self.root, _DIRECTORY)
        try:
            for part in parts:
                below = _below(fd, part, create=create)
                os.close(fd)
                fd = below
            yield fd
        finally:
            os.close(fd)


def _below(fd: int, part: str, *, create: bool) -> int:
    for attempt in range(_CREATE_ATTEMPTS):
        try:
            return os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
        except FileNotFoundError:
            # Between the making and the opening, another process may find it empty and remove it.
            if not create or attempt == _CREATE_ATTEMPTS - 1:
                raise
            with suppress(FileExistsError):
                os.mkdir(part, _DIRECTORY_MODE, dir_fd=fd)
    raise AssertionError("the last attempt returns or raises")


class PartFile:
    """
    A file that is being written, and not yet seen by anybody.

    Whoever has one ends it: with `rename` and `detach`, or with `abandon`, which may be called at any
    time and more than once. All of it blocks and raises `OSError`.
    """

    def __init__(self, tree: Tree, part_name: str, fd: int, name: str, size_bytes: int) -> None:
        self._tree = tree
        self._part_name: str | None = part_name
        self._fd: int | None = fd
        self.name = name
        """Which it gets once it is whole."""
        self.size_bytes = size_bytes

    @classmethod
    def create(cls, tree: Tree, name: str, size_bytes: int) -> PartFile:
        """Make an empty part, and take its whole size from the disk."""
        part_name = f"{INCOMING}/{os.getpid()}-{secrets.token_hex(8)}{SUFFIX}"
        part = cls(tree, part_name, tree.create(part_name), name, size_bytes)
        try:
            fcntl.flock(part.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if size_bytes:
                os.posix_fallocate(part.fd, 0, size_bytes)
        except BaseException:
            part.abandon()
            raise
        return part

    @property
    def fd(self) -> int:
        """Return its descriptor, for reading what was written."""
        assert self._fd is not None, "a part that was ended is used"
        return self._fd

    def write(self, position: int, data: bytes | memoryview) -> None:
        """Write bytes at *position*."""
        view = memoryview(data)
        while view:
            written = os.pwrite(self.fd, view, position)
            view, position = view[written:], position + written

    def rename(self) -> None:
        """Give it its name."""
        assert self._part_name is not None, "a part is renamed once"
        self._tree.rename(self._part_name, self.name)
        self._part_name = None

    def detach(self) -> int:
        """Return the descriptor, which is the caller's from here on, without its lock."""
        fd, self._fd = self.fd, None
        fcntl.flock(fd, fcntl.LOCK_UN)
        return fd

    def abandon(self) -> None:
        """Close it, and remove what has no name yet."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        if self._part_name is not None:
            with suppress(OSError):  # On a disk that takes nothing any more, the next start removes it.
                self._tree.unlink(self._part_name)
            self._part_name = None


def remove_leftovers(tree: Tree) -> int:
    """Remove the parts that nobody writes any more; return how many there were."""
    removed = 0
    try:
        names = os.listdir(f"{tree.root}/{INCOMING}")  # noqa: PTH208 - paths are text in this layer
    except FileNotFoundError:
        return 0
    for name in names:
        if name.endswith(SUFFIX):
            with suppress(OSError):  # In use, not ours to delete, or on a disk that is read-only.
                fd = tree.open(f"{INCOMING}/{name}")
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    tree.unlink(f"{INCOMING}/{name}")
                    removed += 1
                finally:
                    os.close(fd)
    return removed


@dataclass(frozen=True, slots=True)
class ScanReport:
    """What one walk found."""

    files: tuple[tuple[str, int, int], ...]
    """Name, size and time of last write in milliseconds of each file that is ours."""
    foreign: int
    """Files and links that are not; they stay."""


@dataclass(frozen=True, slots=True)
class _Level:
    """What one directory held."""

    files: Sequence[tuple[str, int, int]]
    below: Sequence[str]
    foreign: int


def scan(root: str, *, buckets: int, threads: int) -> ScanReport:
    """
    Walk *root* with so many *threads*; this blocks.

    Raises:
        OSError: The root itself cannot be read.
    """
    device = os.stat(root).st_dev  # noqa: PTH116 - paths are text in this layer
    top = _look(root, "", device, buckets)
    files, foreign, waiting = list(top.files), top.foreign, deque(top.below)
    with ThreadPoolExecutor(threads, thread_name_prefix="cache-walk") as executor:
        running: set[Future[_Level]] = set()
        while waiting or running:
            while waiting and len(running) < threads:
                running.add(executor.submit(_look_again, root, waiting.popleft(), device, buckets))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for level in (future.result() for future in done):
                files += level.files
                foreign += level.foreign
                waiting.extendleft(level.below)
    return ScanReport(tuple(files), foreign)


def _look_again(root: str, name: str, device: int, buckets: int) -> _Level:
    """Look at one directory below the root; at none if it has gone or cannot be read."""
    with suppress(OSError):
        return _look(root, name, device, buckets)
    return _Level((), (), 0)


def _look(root: str, name: str, device: int, buckets: int) -> _Level:
    files: list[tuple[str, int, int]] = []
    below: list[str] = []
    foreign = 0
    prefix = f"{name}/" if name else ""
    with os.scandir(f"{root}/{name}") as entries:
        for entry in entries:
            own_name = prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                if own_name != INCOMING and own_name.count("/") < _MAX_DEPTH:
                    below.append(own_name)
                continue
            is_named = parse_cache_name(own_name, buckets=buckets) is not None
            if not (is_named and entry.is_file(follow_symlinks=False)):
                foreign += bool(prefix)  # Directly in the root lie our own access times.
                continue
            with suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                if found.st_dev == device:
                    files.append((own_name, found.st_size, found.st_mtime_ns // _NS_PER_MS))
    return _Level(files, below, foreign)


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A cached file that somebody reads; whoever has it closes *fd*."""

    name: str
    fd: int
    size_bytes: int
    identity: Identity
    is_checked: bool
    """Whether this process has checked its bytes, and it was not touched since."""

    @property
    def is_intact(self) -> bool:
        """Say whether it is still what it was when it was opened, and still has a name."""
        found = os.fstat(self.fd)
        return bool(found.st_nlink) and identity_of(found) == self.identity

    def close(self) -> None:
        """Close it; once."""
        os.close(self.fd)


class CacheDirectory:
    """One cache. Several processes may share it: what another one put is found when it is asked for."""

    def __init__(
        self, path: Path, *, now_ms: Callable[[], int], buckets: int = 0, walk_concurrency: int = 1
    ) -> None:
        self.path = path
        self.buckets = buckets
        self.accounts = Accounts(buckets=buckets)
        self.walk_concurrency = walk_concurrency
        self.now_ms = now_ms
        self._tree = Tree(str(path))
        # A file's name and its account change together.
        self._lock = Lock()
        self._saved: dict[str, int] = {}

    def start(self) -> ScanReport:
        """
        Remove what a crash has left, and count what there is.

        A directory that can only be read serves what it holds.

        Raises:
            LocalFileError: It is not there and cannot be made, or cannot be read.
        """
        with translated(self.path, "be used as the cache"):
            self.path.mkdir(mode=0o750, parents=True, exist_ok=True)
            remove_leftovers(self._tree)
        return self.compare(self._load_access_times())

    def compare(self, times: dict[str, int] | None = None) -> ScanReport:
        """
        Compare the accounts with the disk, and take over what it holds.

        Raises:
            LocalFileError: The directory cannot be read.
        """
        number = self.accounts.begin_comparison()
        with translated(self.path, "be read"):
            report = scan(str(self.path), buckets=self.buckets, threads=self.walk_concurrency)
        self.accounts.compare(number, report.files, times or {})
        return report

    def free_bytes(self) -> int:
        """
        Return how much of the directory's filesystem may still be written.

        Raises:
            LocalFileError: It cannot be looked at.
        """
        with translated(self.path, "be looked at"):
            return self._tree.free_bytes()

    def open(self, name: str, size_bytes: int) -> OpenFile | None:
        """
        Open a file that is to have *size_bytes*; None when there is no such file.

        One of another size is not what it should be, and is removed.

        Raises:
            LocalFileError: It is there and cannot be read.
        """
        with self._lock:
            try:
                fd = self._tree.open(name)
            except OSError as error:
                if error.errno in _NO_SUCH_FILE:
                    self.accounts.remove(name)
                    return None
                raise located(self.path / name, "be read", error) from error
            found = os.fstat(fd)
            if found.st_size != size_bytes:
                os.close(fd)
                self._discard(name)
                return None
            identity = identity_of(found)
            if not self.accounts.holds(name):
                self.accounts.add(name, size_bytes, accessed_ms=self.now_ms())
            return OpenFile(name, fd, size_bytes, identity, self.accounts.checked(name) == identity)

    def part(self, name: str, size_bytes: int) -> PartFile:
        """
        Begin a file; the room for it has been reserved in the accounts.

        Its size is taken from the disk at once, so that a full disk is noticed before the download.

        Raises:
            LocalFileError: The disk does not take it; nothing is left of it.
        """
        with translated(self.path / name, "be cached"):
            return PartFile.create(self._tree, name, size_bytes)

    def publish(self, part: PartFile) -> OpenFile:
        """
        Give a part, whose bytes were checked, its name; return it open. The part is used up.

        Raises:
            LocalFileError: The disk does not take it; the caller abandons the part.
        """
        with self._lock, translated(self.path / part.name, "be cached"):
            part.rename()
            fd = part.detach()
            # The renaming itself has changed it; from here on nobody does.
            identity = identity_of(os.fstat(fd))
            self.accounts.add(part.name, part.size_bytes, accessed_ms=self.now_ms(), checked=identity)
            return OpenFile(part.name, fd, part.size_bytes, identity, is_checked=True)

    def evict(self, names: Iterable[str]) -> int:
        """Delete files; return the bytes that this freed. What cannot be deleted stays counted."""
        evicted_bytes = 0
        for name in names:
            with self._lock:
                evicted_bytes += self._discard(name)
        return evicted_bytes

    def discard(self, name: str) -> None:
        """Delete a file whose bytes are not what they should be."""
        self.evict((name,))

    def save_access_times(self) -> None:
        """
        Write the access times, if they changed.

        Raises:
            LocalFileError: The disk does not take them; the old ones stay.
        """
        times = self.accounts.access_times()
        if times == self._saved:
            return
        data = encode_access_times(times)
        with translated(self.path / _ACCESS_TIMES, "be written"):
            part = PartFile.create(self._tree, _ACCESS_TIMES, len(data))
            try:
                part.write(0, data)
                part.rename()
            finally:
                part.abandon()
        self._saved = times

    def _discard(self, name: str) -> int:
        try:
            self._tree.unlink(name)
        except OSError as error:
            if error.errno not in _NO_SUCH_FILE:
                return 0
            self.accounts.remove(name)
            return 0
        return self.accounts.remove(name)

    def _load_access_times(self) -> dict[str, int]:
        """Return the access times of before; none when they cannot be read, as they are only advice."""
        try:
            fd = self._tree.open(_ACCESS_TIMES)
        except OSError:
            return {}
        with os.fdopen(fd, "rb") as file:
            try:
                self._saved = decode_access_times(file.read())
            except (OSError, CorruptDataError):
                return {}
        return self._saved
