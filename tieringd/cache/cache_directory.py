"""
The cache directory: crash-safe files under their objects' names.

    {name}                  a whole file, see `formats.cache_names`
    incoming/*.part         a file that is being written; its writer holds a lock on it
    access_times            when each file was last read

A file gets its name when it is whole, and never changes afterwards. So a crash leaves only parts behind,
which the next start or comparison removes. A name proves nothing about the bytes: a file counts as checked
only if this process checked its bytes and the file was not changed since.

Files with names that are not the cache's are left alone. All methods block: call them in a thread. Several
threads may call them. Errors of the disk are `LocalFileError`; the caller goes on without the cache.

`Tree` is a directory tree that no name leads out of. Every name is followed part by part from the root,
and no part may be a symbolic link: a link inside is an error of that name, never a way to a file
elsewhere. The root itself may be a link, as an operator chose it. `Tree` blocks, and raises `OSError`.

A `PartFile` holds the bytes of a cached file until it is whole. All parts lie in one directory of the
cache, so that leftovers are found without a walk. Each is locked by the process that writes it. The
kernel releases the lock when that process ends, so a part without a lock is a leftover. A part is never
read under any name but its own.

`scan` walks over the directory at the start. It does not follow symbolic links, does not count files on
other filesystems, and ignores a file that vanishes meanwhile. Several threads may walk at once, if the
operator allows it: then reading one directory on a slow disk does not delay the others.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from tieringd.cache.accounts import Accounts, Identity, identity_of
from tieringd.cache.faults import located, translated
from tieringd.errors import CorruptDataError
from tieringd.formats.access_times import decode_access_times, encode_access_times
from tieringd.formats.cache_names import parse_cache_name

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE_MODE, _DIRECTORY_MODE = 0o640, 0o750
_CREATE_ATTEMPTS = 8

INCOMING = "incoming"
SUFFIX = ".part"

_MAX_DEPTH = 12
"""Deeper than any name of the cache."""
_NS_PER_MS = 1_000_000

_ACCESS_TIMES = "access_times"
_NO_SUCH_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR)
"""Errors of a missing file, or of something else in its place, which is neither deleted nor read."""


class Tree:
    """Files below *root*, by names with slashes. Stateless, and so safe for threads."""

    def __init__(self, root: str) -> None:
        self.root = root

    def open(self, name: str) -> int:
        """Open a file for reading. Anything but a regular file is an error."""
        *above, last = name.split("/")
        with self._directory(above) as directory:
            # O_NONBLOCK: opening a named pipe must not wait for its other end.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            fd = os.open(last, flags, dir_fd=directory)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise FileNotFoundError(2, "not an ordinary file", name)
        return fd

    def create(self, name: str) -> int:
        """Create a file that must not exist yet, for reading and writing, with its missing directories."""
        *above, last = name.split("/")
        with self._directory(above, create=True) as directory:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            return os.open(last, flags, _FILE_MODE, dir_fd=directory)

    def rename(self, name: str, new_name: str) -> None:
        """Rename a file within the tree. It may replace a regular file, and nothing else."""
        *above, last = name.split("/")
        *new_above, new_last = new_name.split("/")
        with self._directory(above) as source, self._directory(new_above, create=True) as target:
            with suppress(FileNotFoundError):
                found = os.stat(new_last, dir_fd=target, follow_symlinks=False)
                if not stat.S_ISREG(found.st_mode):
                    raise FileExistsError(17, "another file is there", new_name)
            os.rename(last, new_last, src_dir_fd=source, dst_dir_fd=target)

    def unlink(self, name: str) -> None:
        """Delete a regular file, and the directories above it that this leaves empty."""
        parts = name.split("/")
        with self._directory(parts[:-1]) as directory:
            found = os.stat(parts[-1], dir_fd=directory, follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode):
                raise FileNotFoundError(2, "not an ordinary file", name)
            os.unlink(parts[-1], dir_fd=directory)
        with suppress(OSError):  # Stop at the first directory that is not empty, or is gone.
            for depth in range(len(parts) - 1, 0, -1):
                with self._directory(parts[: depth - 1]) as directory:
                    os.rmdir(parts[depth - 1], dir_fd=directory)

    def free_bytes(self) -> int:
        """Return how many bytes of its filesystem may still be written."""
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
            # Another process may find the new directory empty and remove it before it is opened.
            if not create or attempt == _CREATE_ATTEMPTS - 1:
                raise
            with suppress(FileExistsError):
                os.mkdir(part, _DIRECTORY_MODE, dir_fd=fd)
    raise AssertionError("the last attempt returns or raises")


class PartFile:
    """
    A file that is being written and has no final name yet.

    Its owner ends it: with `rename` and `detach`, or with `abandon`, which may be called at any time and
    more than once. All methods block and raise `OSError`.
    """

    def __init__(self, tree: Tree, part_name: str, fd: int, name: str, size_bytes: int) -> None:
        self._tree = tree
        self._part_name: str | None = part_name
        self._fd: int | None = fd
        self.name = name
        """The name that the file gets once it is whole."""
        self.size_bytes = size_bytes

    @classmethod
    def create(cls, tree: Tree, name: str, size_bytes: int) -> PartFile:
        """Create an empty part, and allocate its whole size on the disk."""
        part_name, fd = _locked_part(tree)
        part = cls(tree, part_name, fd, name, size_bytes)
        try:
            if size_bytes:
                os.posix_fallocate(part.fd, 0, size_bytes)
        except BaseException:
            part.abandon()
            raise
        return part

    @property
    def fd(self) -> int:
        """Return its descriptor, for reading the written bytes."""
        assert self._fd is not None, "a part that was ended is used"
        return self._fd

    def write(self, position: int, data: bytes | memoryview) -> None:
        """Write bytes at *position*."""
        view = memoryview(data)
        while view:
            written = os.pwrite(self.fd, view, position)
            view, position = view[written:], position + written

    def rename(self) -> None:
        """Give the part its final name."""
        assert self._part_name is not None, "a part is renamed once"
        self._tree.rename(self._part_name, self.name)
        self._part_name = None

    def detach(self) -> int:
        """Release the lock and return the descriptor, which belongs to the caller from then on."""
        fd, self._fd = self.fd, None
        fcntl.flock(fd, fcntl.LOCK_UN)
        return fd

    def abandon(self) -> None:
        """Close the part, and remove its file unless it was renamed."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        if self._part_name is not None:
            with suppress(OSError):  # On a disk that refuses writes, a later comparison removes it.
                self._tree.unlink(self._part_name)
            self._part_name = None


def _locked_part(tree: Tree) -> tuple[str, int]:
    """
    Create an empty part and lock it. Return its name in *tree* and its descriptor.

    Between the two, `remove_leftovers` of another process may take it for a leftover: another one is created
    then. A part that has the lock and a name keeps both.
    """
    for _ in range(_CREATE_ATTEMPTS):
        part_name = f"{INCOMING}/{os.getpid()}-{secrets.token_hex(8)}{SUFFIX}"
        fd = tree.create(part_name)
        is_ours = False
        try:
            with suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_ours = os.fstat(fd).st_nlink > 0
        except BaseException:
            with suppress(OSError):
                tree.unlink(part_name)
            raise
        finally:
            if not is_ours:
                os.close(fd)
        if is_ours:
            return part_name, fd
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), part_name)


def remove_leftovers(tree: Tree) -> int:
    """Remove the parts that no process writes any more. Return how many were removed."""
    removed = 0
    try:
        names = os.listdir(f"{tree.root}/{INCOMING}")  # noqa: PTH208 - paths are text in this layer
    except FileNotFoundError:
        return 0
    for name in names:
        if name.endswith(SUFFIX):
            with suppress(OSError):  # In use, not deletable by this user, or on a read-only disk.
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
    """The result of one walk."""

    files: tuple[tuple[str, int, int], ...]
    """Name, size and time of last write in milliseconds of each file of the cache."""
    foreign: int
    """How many files and links are not the cache's. They stay."""


@dataclass(frozen=True, slots=True)
class _Level:
    """The content of one directory."""

    files: Sequence[tuple[str, int, int]]
    below: Sequence[str]
    foreign: int


def scan(root: str, *, buckets: int, threads: int) -> ScanReport:
    """
    Walk *root* with this many *threads*. This blocks.

    Raises:
        OSError: The root itself cannot be read.
    """
    device = os.stat(root).st_dev  # noqa: PTH116 - paths are text in this layer
    top = _read_level(root, "", device, buckets)
    files, foreign, waiting = list(top.files), top.foreign, deque(top.below)
    with ThreadPoolExecutor(threads, thread_name_prefix="cache-walk") as executor:
        running: set[Future[_Level]] = set()
        while waiting or running:
            while waiting and len(running) < threads:
                running.add(executor.submit(_read_level_below, root, waiting.popleft(), device, buckets))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for level in (future.result() for future in done):
                files += level.files
                foreign += level.foreign
                waiting.extendleft(level.below)
    return ScanReport(tuple(files), foreign)


def _read_level_below(root: str, name: str, device: int, buckets: int) -> _Level:
    """Read one directory below the root. The result is empty if it is gone or cannot be read."""
    with suppress(OSError):
        return _read_level(root, name, device, buckets)
    return _Level((), (), 0)


def _read_level(root: str, name: str, device: int, buckets: int) -> _Level:
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
                foreign += bool(prefix)  # The access times lie in the root.
                continue
            with suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                if found.st_dev == device:
                    files.append((own_name, found.st_size, found.st_mtime_ns // _NS_PER_MS))
    return _Level(files, below, foreign)


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A chunk in a file that is open for reading. Its owner closes *fd*."""

    name: str
    """The chunk's name in the cache."""
    fd: int
    size_bytes: int
    """Size of the chunk."""
    identity: Identity
    """The file's identity when it was opened."""
    is_checked: bool
    """Whether this process has checked its bytes, and it was not changed since."""
    position: int = 0
    """Where the chunk begins in the file: at 0 in the cache, anywhere in an object that is read in place."""

    @property
    def is_intact(self) -> bool:
        """Say whether the file is unchanged since it was opened, and still has a name."""
        found = os.fstat(self.fd)
        return bool(found.st_nlink) and identity_of(found) == self.identity

    def close(self) -> None:
        """Close the file. May be called only once."""
        os.close(self.fd)


class CacheDirectory:
    """One cache. Several processes may share it: each finds the others' files when it opens them by name."""

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
        Create the directory if it is missing, remove what a crash left behind, and count the files.

        A read-only directory still serves the files that it holds.

        Raises:
            LocalFileError: The directory is missing and cannot be made, or cannot be read.
        """
        with translated(self.path, "be used as the cache"):
            self.path.mkdir(mode=0o750, parents=True, exist_ok=True)
        return self.compare(self._load_access_times())

    def compare(self, times: dict[str, int] | None = None) -> ScanReport:
        """
        Make the accounts match the disk, and remove what processes that have ended left unfinished.

        Raises:
            LocalFileError: The directory cannot be read.
        """
        number = self.accounts.begin_comparison()
        with translated(self.path, "be read"):
            remove_leftovers(self._tree)
            report = scan(str(self.path), buckets=self.buckets, threads=self.walk_concurrency)
        self.accounts.compare(number, report.files, times or {})
        return report

    def free_bytes(self) -> int:
        """
        Return how many bytes of the directory's filesystem may still be written.

        Raises:
            LocalFileError: The filesystem cannot be inspected.
        """
        with translated(self.path, "be inspected"):
            return self._tree.free_bytes()

    def open(self, name: str, size_bytes: int) -> OpenFile | None:
        """
        Open a file of *size_bytes*, or return None if there is no such file.

        A file of another size is wrong, and is removed.

        Raises:
            LocalFileError: The file exists and cannot be read.
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
        Begin a file. The caller has reserved its room in the accounts.

        Its size is allocated on the disk at once, so that a full disk is noticed before the download.

        Raises:
            LocalFileError: The disk does not take it. Nothing is left of it.
        """
        with translated(self.path / name, "be cached"):
            return PartFile.create(self._tree, name, size_bytes)

    def publish(self, part: PartFile) -> OpenFile:
        """
        Give a part, whose bytes were checked, its final name, and return it open. The part is used up.

        Raises:
            LocalFileError: The disk refuses. The caller abandons the part.
        """
        with self._lock, translated(self.path / part.name, "be cached"):
            part.rename()
            fd = part.detach()
            # The rename itself changed the identity. From here on nothing changes the file.
            identity = identity_of(os.fstat(fd))
            self.accounts.add(part.name, part.size_bytes, accessed_ms=self.now_ms(), checked=identity)
            return OpenFile(part.name, fd, part.size_bytes, identity, is_checked=True)

    def evict(self, names: Iterable[str]) -> int:
        """Delete files and return the bytes that this freed. A file that cannot be deleted stays counted."""
        evicted_bytes = 0
        for name in names:
            with self._lock:
                evicted_bytes += self._discard(name)
        return evicted_bytes

    def discard(self, name: str) -> None:
        """Delete a file whose bytes are wrong."""
        self.evict((name,))

    def save_access_times(self) -> None:
        """
        Write the access times, if they changed.

        Raises:
            LocalFileError: The disk refuses them. The old ones stay.
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
        """Return the saved access times, or none if they cannot be read: they are only advice."""
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
