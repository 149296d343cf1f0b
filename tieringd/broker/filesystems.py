"""
Filesystems: how large they are and how much is free, by the directories that are on them.

A port with one implementation, so that services can be tested with disks that do as they are
told. Free is what the broker can still write, without the part that is kept for the superuser.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from tieringd.errors import LocalFileError

if TYPE_CHECKING:
    from collections.abc import Sequence


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
