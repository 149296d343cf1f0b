"""
The accounts of the chunk cache: which files there are, how large, and when each was last read.

In memory, and only as true as its owner keeps them; `cache.directory` compares them with the disk.
Methods may be called from several threads. Promises to puts under way (reservations) are counted
beside the files, so that two puts are never given the same room.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, TypeAlias

from tieringd.formats.cache_names import FileKind, parse_cache_name
from tieringd.policies.cache_trim import CachedFile, CacheUse

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

Identity: TypeAlias = tuple[int, int, int, int]
"""A value that changes when a file's bytes may have changed: inode, size, times of write and of change."""


def identity_of(found: os.stat_result) -> Identity:
    """Return the identity that a look at a file gives."""
    return (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@dataclass(slots=True)
class _Account:
    size_bytes: int
    accessed_ms: int
    kind: FileKind
    segment: str
    seen: int
    """In which round of comparisons with the disk it was seen last."""
    checked: Identity | None = None
    """What the file was when its batches were checked; None when nobody did since the start."""


class Accounts:
    """Counts files by name. Only names that parse are ever counted."""

    def __init__(self, *, buckets: int) -> None:
        self._buckets = buckets
        self._lock = Lock()
        self._files: dict[str, _Account] = {}
        self._size_bytes = 0
        self._reserved_bytes = 0
        self._reserved_objects = 0
        self._round = 0

    def use(self) -> CacheUse:
        """Return what is held and promised now."""
        with self._lock:
            return CacheUse(self._size_bytes, len(self._files), self._reserved_bytes, self._reserved_objects)

    def files(self) -> tuple[CachedFile, ...]:
        """Return every file."""
        with self._lock:
            return tuple(
                CachedFile(name, one.size_bytes, one.accessed_ms, one.kind, one.segment)
                for name, one in self._files.items()
            )

    def unchanged(self, files: Iterable[CachedFile]) -> tuple[CachedFile, ...]:
        """Return those of *files* that are still there and were not read since."""
        with self._lock:
            return tuple(
                file
                for file in files
                if (one := self._files.get(file.name)) is not None and one.accessed_ms == file.accessed_ms
            )

    def access_times(self) -> dict[str, int]:
        """Return when each file was last read."""
        with self._lock:
            return {name: one.accessed_ms for name, one in self._files.items()}

    def holds(self, name: str) -> bool:
        """Say whether a file of this name is known."""
        return name in self._files

    def reserve(self, size_bytes: int) -> None:
        """Promise room for one file more."""
        with self._lock:
            self._reserved_bytes += size_bytes
            self._reserved_objects += 1

    def release(self, size_bytes: int) -> None:
        """Take a promise back, or count it as kept."""
        with self._lock:
            self._reserved_bytes -= size_bytes
            self._reserved_objects -= 1

    def add(self, name: str, size_bytes: int, *, accessed_ms: int, checked: Identity | None = None) -> None:
        """Count a file; one of the same name before it is gone."""
        with self._lock:
            self._add(name, size_bytes, accessed_ms, checked)

    def touch(self, name: str, *, accessed_ms: int) -> None:
        """Note that a file is read now."""
        one = self._files.get(name)
        if one is not None:
            one.accessed_ms = accessed_ms

    def checked(self, name: str) -> Identity | None:
        """Return what the file was when it was last checked."""
        one = self._files.get(name)
        return one.checked if one else None

    def set_checked(self, name: str, identity: Identity | None) -> None:
        """Note that the bytes of a file as *identity* says are right; with None, that nobody knows."""
        one = self._files.get(name)
        if one is not None:
            one.checked = identity

    def remove(self, name: str) -> int:
        """Count a file no more; return its size, 0 when there was none."""
        with self._lock:
            return self._remove(name)

    def begin_comparison(self) -> int:
        """Begin a comparison with the disk; what is added from here on is not in question."""
        with self._lock:
            self._round += 1
            return self._round

    def compare(
        self, round_number: int, found: Iterable[tuple[str, int, int]], times: Mapping[str, int]
    ) -> None:
        """
        Take over what the disk holds: name, size and time of last write of each file.

        *times* are access times from before, for files that are new here.
        """
        with self._lock:
            for name, size_bytes, written_ms in found:
                one = self._files.get(name)
                if one is None or (one.size_bytes != size_bytes and one.seen < round_number):
                    self._add(name, size_bytes, times.get(name, written_ms), None)
                else:
                    one.seen = self._round
            for name in [name for name, one in self._files.items() if one.seen < round_number]:
                self._remove(name)

    def _add(self, name: str, size_bytes: int, accessed_ms: int, checked: Identity | None) -> None:
        said = parse_cache_name(name, buckets=self._buckets)
        assert said is not None, "whoever adds a file has made or parsed its name"
        self._remove(name)
        # What lies under another number of buckets will not be looked for again, so it goes first.
        since = accessed_ms if said.is_reachable else 0
        self._files[name] = _Account(size_bytes, since, said.kind, said.segment, self._round, checked)
        self._size_bytes += size_bytes

    def _remove(self, name: str) -> int:
        one = self._files.pop(name, None)
        size_bytes = one.size_bytes if one else 0
        self._size_bytes -= size_bytes
        return size_bytes
