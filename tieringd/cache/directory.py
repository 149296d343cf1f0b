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
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from tieringd.cache.accounts import Accounts, Identity, identity_of
from tieringd.cache.faults import located, translated
from tieringd.cache.part_file import PartFile, remove_leftovers
from tieringd.cache.scan import ScanReport, scan
from tieringd.cache.tree import Tree
from tieringd.errors import CorruptDataError
from tieringd.formats.access_times import decode_access_times, encode_access_times

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

_ACCESS_TIMES = "access_times"
_NO_SUCH_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR)
"""Also where something stands in the way that is not ours: it is not deleted, and not read."""


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
