"""Disks whose fill level a test sets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tieringd.broker.disk_use import FilesystemMeasurement, FilesystemReading
from tieringd.errors import LocalFileError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass
class FakeDisk:
    """One filesystem, with the directories that are on it."""

    paths: tuple[str, ...]
    total_bytes: int
    free_bytes: int
    is_readable: bool = True


class FakeFilesystems:
    """The filesystems of a host. Every reading of them is counted."""

    def __init__(self, *disks: FakeDisk) -> None:
        self.disks = list(disks)
        self.measurements = 0

    async def measure(self, paths: Sequence[str]) -> FilesystemMeasurement:
        """Return the readings of the disks that *paths* are on, and problems by path."""
        self.measurements += 1
        readings: dict[int, FilesystemReading] = {}
        problems = {}
        for path in paths:
            device, disk = next((n, one) for n, one in enumerate(self.disks) if path in one.paths)
            if not disk.is_readable:
                problems[path] = LocalFileError(
                    f"the filesystem of {path} cannot be inspected: gone", path=path
                )
                continue
            found = readings.get(device)
            readings[device] = (
                replace(found, paths=(*found.paths, path))
                if found
                else FilesystemReading(device, (path,), disk.total_bytes, disk.free_bytes)
            )
        return FilesystemMeasurement(tuple(readings.values()), problems)
