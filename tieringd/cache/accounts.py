"""
The accounts of the chunk cache: which files exist, their sizes, and when each was last read.

The accounts are in memory, and only as true as their owner keeps them; `cache.cache_directory` compares them
with the disk. Methods may be called from several threads. Reservations of puts under way are counted
beside the files, so that two puts never get the same room.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from threading import Lock
from typing import TypeAlias, TypeVar

from tieringd.formats.cache_names import CacheFileKind, parse_cache_name
from tieringd.policies.cache_trim import CachedFile, CacheUse

T = TypeVar("T")

Identity: TypeAlias = tuple[int, int, int, int]
"""A value that changes when a file's bytes may have changed: inode, size, times of write and of change."""


def identity_of(found: os.stat_result) -> Identity:
    """Return the identity of a file, from its stat result."""
    return (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@dataclass(slots=True)
class _Account:
    size_bytes: int
    accessed_ms: int
    kind: CacheFileKind
    segment: str
    seen: int
    """The last comparison with the disk that saw the file."""
    checked: Identity | None = None
    """The file's identity when its batches were checked; None if this process has not checked them."""


_FILES_AT_ONCE = 200
_PAUSE_SECONDS = 0.000_05


def batched(items: Iterable[T], count: int) -> Iterator[list[T]]:
    """Yield *items* in lists of up to *count*."""
    rest = iter(items)
    while some := list(islice(rest, count)):
        yield some


class Accounts:
    """Counts files by name. Only names that parse are counted."""

    def __init__(self, *, buckets: int) -> None:
        self._buckets = buckets
        self._lock = Lock()
        self._files: dict[str, _Account] = {}
        self._size_bytes = 0
        self._reserved_bytes = 0
        self._reserved_objects = 0
        self._round = 0

    def use(self) -> CacheUse:
        """Return what is held and reserved now."""
        with self._lock:
            return CacheUse(self._size_bytes, len(self._files), self._reserved_bytes, self._reserved_objects)

    def files(self) -> tuple[CachedFile, ...]:
        """Return every file."""
        return tuple(
            CachedFile(name, one.size_bytes, one.accessed_ms, one.kind, one.segment)
            for name, one in self._items()
        )

    def unchanged(self, files: Iterable[CachedFile]) -> tuple[CachedFile, ...]:
        """Return those of *files* that still exist and were not read since."""
        return tuple(
            file
            for file in files
            if (one := self._files.get(file.name)) is not None and one.accessed_ms == file.accessed_ms
        )

    def access_times(self) -> dict[str, int]:
        """Return when each file was last read."""
        return {name: one.accessed_ms for name, one in self._items()}

    def _items(self) -> list[tuple[str, _Account]]:
        """Return the files at one moment. The lock is held for the copy only, of a few milliseconds."""
        with self._lock:
            return list(self._files.items())

    def holds(self, name: str) -> bool:
        """Say whether a file of this name is known."""
        return name in self._files

    def reserve(self, size_bytes: int) -> None:
        """Reserve room for one more file."""
        with self._lock:
            self._reserved_bytes += size_bytes
            self._reserved_objects += 1

    def release(self, size_bytes: int) -> None:
        """End a reservation: the file was counted, or will not come."""
        with self._lock:
            self._reserved_bytes -= size_bytes
            self._reserved_objects -= 1

    def add(self, name: str, size_bytes: int, *, accessed_ms: int, checked: Identity | None = None) -> None:
        """Count a file. It replaces an older file of the same name."""
        with self._lock:
            self._add(name, size_bytes, accessed_ms, checked)

    def touch(self, name: str, *, accessed_ms: int) -> None:
        """Record that a file is read now."""
        one = self._files.get(name)
        if one is not None:
            one.accessed_ms = accessed_ms

    def checked(self, name: str) -> Identity | None:
        """Return the file's identity when it was last checked, or None."""
        one = self._files.get(name)
        return one.checked if one else None

    def set_checked(self, name: str, identity: Identity | None) -> None:
        """Record that the bytes of a file with this *identity* are right; None: they are unchecked."""
        one = self._files.get(name)
        if one is not None:
            one.checked = identity

    def remove(self, name: str) -> int:
        """Stop counting a file. Return its size, or 0 if it was not counted."""
        with self._lock:
            return self._remove(name)

    def begin_comparison(self) -> int:
        """Begin a comparison with the disk. It will not remove files that are added from now on."""
        with self._lock:
            self._round += 1
            return self._round

    def compare(
        self, round_number: int, found: Iterable[tuple[str, int, int]], times: Mapping[str, int]
    ) -> None:
        """
        Make the accounts match the disk. *found* has the name, size and time of last write of each file.

        *times* are saved access times, for files that are not counted yet.
        """
        for some in batched(found, _FILES_AT_ONCE):
            # The event loop takes the lock for every chunk that it serves, so it is never held for long.
            with self._lock:
                for name, size_bytes, written_ms in some:
                    one = self._files.get(name)
                    if one is None or (one.size_bytes != size_bytes and one.seen < round_number):
                        self._add(name, size_bytes, times.get(name, written_ms), None)
                    else:
                        one.seen = self._round
            # A thread that waits gets the lock only if this one pauses.
            time.sleep(_PAUSE_SECONDS)
        for name in [name for name, one in self._items() if one.seen < round_number]:
            with self._lock:
                # A file that was written meanwhile is there again, under the same name.
                if name in self._files and self._files[name].seen < round_number:
                    self._remove(name)

    def _add(self, name: str, size_bytes: int, accessed_ms: int, checked: Identity | None) -> None:
        said = parse_cache_name(name, buckets=self._buckets)
        assert said is not None, "each caller that adds a file has made or parsed its name"
        self._remove(name)
        # A file named for another number of buckets is never read again, so it is the first to be evicted.
        since = accessed_ms if said.is_reachable else 0
        self._files[name] = _Account(size_bytes, since, said.kind, said.segment, self._round, checked)
        self._size_bytes += size_bytes

    def _remove(self, name: str) -> int:
        one = self._files.pop(name, None)
        size_bytes = one.size_bytes if one else 0
        self._size_bytes -= size_bytes
        return size_bytes
