"""
A walk over the cache directory: which of its files are ours, and what else is there.

Symbolic links are not followed, other filesystems not entered, and what vanishes meanwhile has not
been there. Several threads walk at once where the operator allows it: one reading of a directory on
a slow disk does not hold up the others then.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tieringd.cache.part_file import INCOMING
from tieringd.formats.cache_names import parse_cache_name

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_DEPTH = 12
"""Deeper than any name of ours."""
_NS_PER_MS = 1_000_000


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
