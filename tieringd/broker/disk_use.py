"""
Disk use: what the files of a log directory take of their filesystem.

Counted are allocated blocks, as a preallocated index takes no space before it is filled. Files
that the broker has marked for deletion are not counted: they go by themselves.

`DiskUseMeter` measures the same directories again and again, at the price of what has changed. It relies
on two things. A name cannot come or go without the modification time of its directory moving. And in a
partition's directory only the active segment is appended to, its indexes together with its log: Kafka
begins, deletes, replaces and renames all other files, which moves the directory's time. So a directory is
listed again when its time or its active segment has changed. What neither of them shows (a filesystem that
gives back blocks it had reserved, a file that someone changes by hand) is found by the next whole look at
the directory, which comes after `WHOLE_LOOK_EVERY` measurements at the latest. Nothing is trimmed by these
figures alone: they say how much room is needed, and archivers prove what may go.

`Filesystems` tells how large filesystems are and how much is free, by the directories that are on them. It
is a port with one implementation, so that services can be tested with fake disks. Free is what the broker
can still write, without the part that is kept for the superuser.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from tieringd.broker.log_dir import is_settled
from tieringd.errors import LocalFileError
from tieringd.formats.log_names import FileKind, parse_file_name
from tieringd.policies.disk_areas import DirectoryUse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


WHOLE_LOOK_EVERY: Final = 20
"""Measurements of a directory, of which one lists it whatever its times say: every ten minutes by default."""
_BLOCK_BYTES = 512  # What `st_blocks` counts, whatever the filesystem's own blocks are.
_LEAVING_SUFFIXES = (".deleted", "-delete")


@dataclass(frozen=True, slots=True)
class FilesystemReading:
    """One look at one filesystem."""

    device: int
    """What `stat` calls it."""
    paths: tuple[str, ...]
    """The directories on it that were asked for, in that order."""
    total_bytes: int
    free_bytes: int

    @property
    def name(self) -> str:
        """Return what it is called in metrics and in the log: its first directory."""
        return self.paths[0]


@dataclass(frozen=True, slots=True)
class FilesystemLook:
    """One look at all of them."""

    readings: tuple[FilesystemReading, ...]
    problems: dict[str, LocalFileError] = field(default_factory=dict)
    """The directories that could not be looked at, and why."""


class Filesystems(Protocol):
    """Where directories are, and how full it is there."""

    async def look(self, paths: Sequence[str]) -> FilesystemLook:
        """Return the filesystems that *paths* are on, each once, in the order of *paths*."""


class LocalFilesystems:
    """The filesystems of this host. A mount that hangs holds up one thread, and no caller's loop."""

    async def look(self, paths: Sequence[str]) -> FilesystemLook:
        """Return the filesystems that *paths* are on, each once, in the order of *paths*."""
        return await asyncio.to_thread(look_at, paths)


def look_at(paths: Sequence[str]) -> FilesystemLook:
    """Return the filesystems that *paths* are on; this blocks."""
    by_device: dict[int, list[str]] = {}
    sizes: dict[int, tuple[int, int]] = {}
    problems: dict[str, LocalFileError] = {}
    for path in paths:
        try:
            device = os.stat(path).st_dev  # noqa: PTH116 - paths are text throughout this layer
            found = os.statvfs(path)
        except OSError as error:
            problems[path] = LocalFileError(
                f"{path}: its filesystem cannot be looked at: {error.strerror}", path=path
            )
            continue
        by_device.setdefault(device, []).append(path)
        sizes[device] = (found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)
    readings = (FilesystemReading(device, tuple(held), *sizes[device]) for device, held in by_device.items())
    return FilesystemLook(tuple(readings), problems)


def directory_uses(paths: Sequence[str]) -> tuple[DirectoryUse, ...]:
    """
    Measure directories; this blocks.

    Raises:
        OSError: One of them is not there or cannot be read.
    """
    return _uses(paths, lambda path, device: sum(_file_bytes(path, device)))


def _uses(paths: Sequence[str], measure: Callable[[str, int], int]) -> tuple[DirectoryUse, ...]:
    found = []
    for path in paths:
        device, filesystem = os.stat(path).st_dev, os.statvfs(path)  # noqa: PTH116 - paths are text here
        total_bytes = filesystem.f_blocks * filesystem.f_frsize
        found.append(DirectoryUse(path, device, total_bytes, measure(path, device)))
    return tuple(found)


def _file_bytes(path: str, device: int) -> Iterable[int]:
    """Yield the size of each file below *path* on the same filesystem; what vanishes meanwhile has none."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
        for entry in entries:
            if entry.name.endswith(_LEAVING_SUFFIXES):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _file_bytes(entry.path, device)
                continue
            yield _entry_bytes(entry, device)


_Identity = tuple[int, int, int]
"""A file's inode, size and modification time."""


@dataclass(slots=True)
class _Measured:
    """A partition's directory as it was measured."""

    size_bytes: int
    directory: _Identity
    active_path: str
    active: _Identity
    looks_left: int
    """Measurements until the next whole look."""


class DiskUseMeter:
    """Measure directories as `directory_uses` does, with a memory. Used by one thread at a time."""

    def __init__(self) -> None:
        self._measured: dict[str, dict[str, _Measured]] = {}
        """For each path that was measured, the partitions' directories in it."""
        self._looks = 0

    def __call__(self, paths: Sequence[str]) -> tuple[DirectoryUse, ...]:
        """
        Measure directories; this blocks.

        Raises:
            OSError: One of them is not there or cannot be read.
        """
        return _uses(paths, self._bytes_in)

    def _bytes_in(self, path: str, device: int) -> int:
        known, found = self._measured.pop(path, {}), dict[str, _Measured]()
        total_bytes = 0
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
            for entry in entries:
                if entry.name.endswith(_LEAVING_SUFFIXES):
                    continue
                if not entry.is_dir(follow_symlinks=False):
                    total_bytes += _entry_bytes(entry, device)
                    continue
                directory = entry.path
                measured = self._again(directory, known.get(directory))
                if measured is None:
                    size_bytes, measured = self._whole(directory, device, known.get(directory))
                    total_bytes += size_bytes
                else:
                    total_bytes += measured.size_bytes
                if measured is not None:
                    found[directory] = measured
        self._measured[path] = found
        return total_bytes

    def _again(self, path: str, known: _Measured | None) -> _Measured | None:
        """Return what is known of a directory, where it has not changed; None where it is to be listed."""
        if known is None or not known.looks_left:
            return None
        # The directory last: a name that came while the file was looked at shows here.
        if _identity(known.active_path) != known.active or _identity(path) != known.directory:
            return None
        known.looks_left -= 1
        return known

    def _whole(self, path: str, device: int, known: _Measured | None) -> tuple[int, _Measured | None]:
        """List a directory; return its bytes, and what to remember of it, if that may be relied upon."""
        # What changes from here on shows in a time, where the times are old enough.
        now_ns, directory = time.time_ns(), _identity(path)
        size_bytes, active_path = 0, ""
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
            for entry in entries:
                if entry.name.endswith(_LEAVING_SUFFIXES):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    # It is no partition of Kafka's, and nothing is known of what changes below it.
                    return sum(_file_bytes(path, device)), None
                size_bytes += _entry_bytes(entry, device)
                name = parse_file_name(entry.name)
                if name is not None and name.kind is FileKind.LOG:
                    active_path = max(active_path, entry.path)
        active = _identity(active_path) if active_path else None
        if directory is None or active is None:
            return size_bytes, None
        if not is_settled(max(directory[2], active[2]), now_ns=now_ns):
            return size_bytes, None
        # Not all ten thousand are to have their whole look in the same measurement.
        self._looks += 1
        looks_left = WHOLE_LOOK_EVERY - 1 if known else self._looks % WHOLE_LOOK_EVERY
        return size_bytes, _Measured(size_bytes, directory, active_path, active, looks_left)


def _identity(path: str) -> _Identity | None:
    try:
        status = os.stat(path)  # noqa: PTH116 - paths are text here
    except OSError:
        return None
    return (status.st_ino, status.st_size, status.st_mtime_ns)


def _entry_bytes(entry: os.DirEntry[str], device: int) -> int:
    """Return what a file takes; nothing where it vanished meanwhile or lies on another filesystem."""
    with suppress(FileNotFoundError):
        found = entry.stat(follow_symlinks=False)
        if found.st_dev == device:
            return found.st_blocks * _BLOCK_BYTES
    return 0
