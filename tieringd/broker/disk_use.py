"""
Disk use: the space that the files of a log directory take on their filesystem.

Allocated blocks are counted, since a preallocated index takes no space before it is filled. Files that
the broker has marked for deletion are not counted, because the broker deletes them itself.

`DiskUseMeter` measures the same directories repeatedly, at a cost that depends on the changes. It relies
on two facts. A name cannot come or go without a change of its directory's modification time. And in a
partition's directory only the active segment is appended to, its indexes together with its log: Kafka
begins, deletes, replaces and renames all other files, which changes the directory's time. So a directory
is listed again when its time or its active segment has changed. Some changes show in neither: minutes
after the last write a filesystem frees blocks that it had reserved, or a file is edited by hand. The next
full scan of the directory finds them, after `FULL_SCAN_EVERY` measurements at the latest, and after
`OLD_SCAN_EVERY` where the last write was so long ago that no block is reserved. These figures alone trim
nothing: they tell how much room is needed, and archivers prove what may be trimmed.

The daemon's scan of the logs reads the same times. A log that the newest scan found unchanged is not
inspected again: its figure is then as old as that scan, which runs every ten seconds by default.

`Filesystems` reports the size and the free space of filesystems, by the directories that are on them. It
is a port with one implementation, so that services can be tested with fake disks. Free space is what the
broker can still write, without the part that is reserved for the superuser.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Protocol

from tieringd.broker.log_dir import is_settled
from tieringd.errors import LocalFileError
from tieringd.formats.log_names import LogFileKind, parse_file_name
from tieringd.model.local_log import LocalLog
from tieringd.policies.disk_areas import DirectoryUse

FULL_SCAN_EVERY: Final = 20
"""One in this many measurements of a directory is a full scan: every ten minutes by default."""
OLD_SCAN_EVERY: Final = 120
"""The same where nothing was written for `OLD_NS`: every hour by default."""
OLD_NS: Final = 600_000_000_000
"""
Within this time after the last write a filesystem gives reserved blocks back. The files of a copy have older
times, and gave them back when they were closed.
"""
_BLOCK_BYTES = 512  # The unit of `st_blocks`, whatever the filesystem's own block size.
_LEAVING_SUFFIXES = (".deleted", "-delete")


@dataclass(frozen=True, slots=True)
class FilesystemReading:
    """The state of one filesystem."""

    device: int
    """Its `st_dev`."""
    paths: tuple[str, ...]
    """The requested directories on it, in the order of the request."""
    total_bytes: int
    free_bytes: int

    @property
    def name(self) -> str:
        """Return its name in metrics and in the log: its first directory."""
        return self.paths[0]


@dataclass(frozen=True, slots=True)
class FilesystemMeasurement:
    """The states of all requested filesystems."""

    readings: tuple[FilesystemReading, ...]
    problems: dict[str, LocalFileError] = field(default_factory=dict)
    """The directories that could not be inspected, and why."""


class Filesystems(Protocol):
    """The filesystems of directories, and how full they are."""

    async def measure(self, paths: Sequence[str]) -> FilesystemMeasurement:
        """Return the filesystems that *paths* are on, each once, in the order of *paths*."""


class LocalFilesystems:
    """The filesystems of this host. A mount that hangs blocks one thread, not the caller's loop."""

    async def measure(self, paths: Sequence[str]) -> FilesystemMeasurement:
        """Return the filesystems that *paths* are on, each once, in the order of *paths*."""
        return await asyncio.to_thread(measure_filesystems, paths)


def measure_filesystems(paths: Sequence[str]) -> FilesystemMeasurement:
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
                f"the filesystem of {path} cannot be inspected: {error.strerror}", path=path
            )
            continue
        by_device.setdefault(device, []).append(path)
        sizes[device] = (found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)
    readings = (FilesystemReading(device, tuple(held), *sizes[device]) for device, held in by_device.items())
    return FilesystemMeasurement(tuple(readings), problems)


def directory_uses(paths: Sequence[str]) -> tuple[DirectoryUse, ...]:
    """
    Measure directories; this blocks.

    Raises:
        OSError: One of them is missing or cannot be read.
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
    """
    Yield the size of each file below *path* on the same filesystem.

    Files that vanish meanwhile count as 0.
    """
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
        for entry in entries:
            if entry.name.endswith(_LEAVING_SUFFIXES):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _file_bytes(entry.path, device)
                continue
            yield _entry_bytes(entry, device)


@dataclass(frozen=True, slots=True)
class ScannedLogs:
    """The logs that a scan of the log directories read (`log_dir.LogDirRescan`)."""

    scan_number: int
    """It grows with each scan."""
    by_path: Mapping[str, LocalLog]
    """By the partition's directory. An unchanged log is the same object as in the scan before."""


NO_SCAN: Final = ScannedLogs(0, {})


@dataclass(slots=True)
class _Measured:
    """
    A partition's directory and its active segment at the last full scan.

    There are ten thousand, so the fields of both are here and not in objects of their own.
    """

    size_bytes: int
    inode: int
    modified_ns: int
    active_path: str
    active_inode: int
    active_bytes: int
    active_modified_ns: int
    measurements_left: int
    """Measurements until the next full scan."""
    is_old: bool
    """Whether the last write was at least `OLD_NS` ago then."""
    log: LocalLog | None
    """The log that a scan had read before the directory was inspected for the last time."""

    def is_current(self, path: str) -> bool:
        """Say whether the directory *path* and its active segment are as they were."""
        try:
            # The directory comes last, so that its time shows a name added while the file was inspected.
            active, directory = os.stat(self.active_path), os.stat(path)  # noqa: PTH116 - paths are text here
        except OSError:
            return False
        return (
            active.st_mtime_ns == self.active_modified_ns
            and active.st_size == self.active_bytes
            and active.st_ino == self.active_inode
            and directory.st_mtime_ns == self.modified_ns
            and directory.st_ino == self.inode
        )


class DiskUseMeter:
    """Measures directories as `directory_uses` does, with a memory. Used by one thread at a time."""

    def __init__(self, scanned: Callable[[], ScannedLogs] = lambda: NO_SCAN) -> None:
        """Keep *scanned*, which returns the logs of the newest scan."""
        self._scanned = scanned
        self._measured: dict[str, dict[str, _Measured]] = {}
        """The partitions' directories in each measured path."""
        self._scan_numbers: dict[str, int] = {}
        """The newest scan at the last measurement of each path."""
        self._full_scans = 0

    def __call__(self, paths: Sequence[str]) -> tuple[DirectoryUse, ...]:
        """
        Measure directories; this blocks.

        Raises:
            OSError: One of them is missing or cannot be read.
        """
        scanned = self._scanned()
        return _uses(paths, lambda path, device: self._bytes_in(path, device, scanned))

    def _bytes_in(self, path: str, device: int, scanned: ScannedLogs) -> int:
        known, found = self._measured.pop(path, {}), dict[str, _Measured]()
        # While the scans stand still, nothing but an inspection shows a change.
        is_newer = scanned.scan_number > self._scan_numbers.get(path, 0)
        self._scan_numbers[path] = scanned.scan_number
        total_bytes = 0
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
            for entry in entries:
                if entry.name.endswith(_LEAVING_SUFFIXES):
                    continue
                if not entry.is_dir(follow_symlinks=False):
                    total_bytes += _entry_bytes(entry, device)
                    continue
                directory = entry.path
                log = scanned.by_path.get(directory)
                measured = _again(directory, known.get(directory), log, is_newer=is_newer)
                if measured is None:
                    size_bytes, measured = self._whole(directory, device, known.get(directory), log)
                    total_bytes += size_bytes
                else:
                    total_bytes += measured.size_bytes
                if measured is not None:
                    found[directory] = measured
        self._measured[path] = found
        return total_bytes

    def _whole(
        self, path: str, device: int, known: _Measured | None, log: LocalLog | None
    ) -> tuple[int, _Measured | None]:
        """Scan a directory. Return its bytes, and the measurement to remember, if it is reliable."""
        # If the times are old enough, any change from here on changes one of them.
        now_ns, directory = time.time_ns(), _status(path)
        size_bytes, active_path = 0, ""
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
            for entry in entries:
                if entry.name.endswith(_LEAVING_SUFFIXES):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    # This is no partition of Kafka's, and its times do not show changes below it.
                    return sum(_file_bytes(path, device)), None
                size_bytes += _entry_bytes(entry, device)
                name = parse_file_name(entry.name)
                if name is not None and name.kind is LogFileKind.LOG:
                    active_path = max(active_path, entry.path)
        active = _status(active_path) if active_path else None
        if directory is None or active is None:
            return size_bytes, None
        changed_ns = max(directory.st_mtime_ns, active.st_mtime_ns)
        if not is_settled(changed_ns, now_ns=now_ns):
            return size_bytes, None
        is_old = now_ns - changed_ns >= OLD_NS
        every = OLD_SCAN_EVERY if is_old else FULL_SCAN_EVERY
        self._full_scans += 1
        # The first turns of ten thousand directories are spread over the measurements.
        has_turn = known is not None and known.is_old >= is_old
        return size_bytes, _Measured(
            size_bytes,
            directory.st_ino,
            directory.st_mtime_ns,
            active_path,
            active.st_ino,
            active.st_size,
            active.st_mtime_ns,
            every - 1 if has_turn else self._full_scans % every,
            is_old,
            log,
        )


def _again(path: str, known: _Measured | None, log: LocalLog | None, *, is_newer: bool) -> _Measured | None:
    """
    Return the known measurement of an unchanged directory; None if it must be scanned again.

    *log* is what the newest scan read there, and *is_newer* says whether that scan is newer than the last
    measurement.
    """
    if known is None or not known.measurements_left:
        return None
    # One scan read `known.log` before the last inspection, and this one reads it after: nothing has changed.
    if not (is_newer and log is not None and log is known.log):
        if not known.is_current(path):
            return None
        known.log = log
    known.measurements_left -= 1
    return known


def _status(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)  # noqa: PTH116 - paths are text here
    except OSError:
        return None


def _entry_bytes(entry: os.DirEntry[str], device: int) -> int:
    """Return the space that a file takes; 0 if it vanished meanwhile or is on another filesystem."""
    with suppress(FileNotFoundError):
        found = entry.stat(follow_symlinks=False)
        if found.st_dev == device:
            return found.st_blocks * _BLOCK_BYTES
    return 0
