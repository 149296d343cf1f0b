"""
Open chunks: cached files that are being read, and those kept open for the next reader.

One descriptor for each chunk, however many readers it has: they all read by position. It is closed
when nobody reads and the eviction strategy, an evicted file or a change on the disk says so; a reader
that is still at it keeps its bytes. Belongs to one event loop, which never waits here: to look at
an open file takes no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tieringd.policies.chunk_eviction import OpenChunk, ReleasePlan, plan_releases

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tieringd.cache.directory import OpenFile
    from tieringd.metrics import CacheMetrics
    from tieringd.policies.chunk_eviction import ChunkEvictionLimits


@dataclass(eq=False, slots=True)
class OpenEntry:
    """An open file and its readers."""

    file: OpenFile
    segment: str
    number: int
    chunk_count: int
    """Of the whole segment."""
    used_at: float
    readers: int = 0
    is_listed: bool = True
    """Whether the next reader may have it; without that the last one closes it."""


class OpenChunks:
    """The open chunks of one hydrator, and of the keeper that must not evict what is read."""

    def __init__(
        self, limits: ChunkEvictionLimits, *, now: Callable[[], float], metrics: CacheMetrics
    ) -> None:
        """Take the limits; *now* is a clock in seconds that never goes back."""
        self.limits = limits
        self._now = now
        self._metrics = metrics
        self._entries: dict[str, OpenEntry] = {}

    def in_use(self) -> frozenset[str]:
        """Return the names of files that somebody reads now."""
        return frozenset(name for name, entry in self._entries.items() if entry.readers)

    def holds(self, name: str) -> bool:
        """Say whether a chunk of this name is open."""
        return name in self._entries

    def add(self, file: OpenFile, *, segment: str, number: int, chunk_count: int) -> None:
        """List a file for readers; another one of its name is theirs only who read it already."""
        self._unlist(file.name)
        self._entries[file.name] = OpenEntry(file, segment, number, chunk_count, self._now())
        self._metrics.open_chunks.set(len(self._entries))

    def take(self, name: str, size_bytes: int) -> OpenEntry | None:
        """
        Return a chunk for one reader more, who gives it back; None when it is not open.

        One that was changed, deleted or cut on the disk is not: it has to be looked at again.
        """
        entry = self._entries.get(name)
        if entry is None:
            return None
        if entry.file.size_bytes != size_bytes or not entry.file.is_intact:
            self._unlist(name)
            return None
        entry.readers += 1
        entry.used_at = self._now()
        return entry

    def give_back(self, entry: OpenEntry) -> None:
        """Count one reader less."""
        entry.readers -= 1
        entry.used_at = self._now()
        self._close_unused(entry)

    def forget(self, names: Iterable[str]) -> None:
        """Let no new reader have these, whose files are gone or wrong."""
        for name in names:
            self._unlist(name)

    def sweep(self) -> ReleasePlan:
        """Close what the eviction strategy does not keep open, and return the plan."""
        by_place = {(entry.segment, entry.number): name for name, entry in self._entries.items()}
        counts = {entry.segment: entry.chunk_count for entry in self._entries.values()}
        plan = plan_releases(
            (
                OpenChunk(entry.segment, entry.number, entry.readers, entry.used_at)
                for entry in self._entries.values()
            ),
            counts,
            self.limits,
        )
        self.forget(by_place[release.chunk.segment, release.chunk.number] for release in plan.releases)
        return plan

    def close(self) -> None:
        """Close what nobody reads; readers close the rest."""
        self.forget(list(self._entries))

    def _unlist(self, name: str) -> None:
        entry = self._entries.pop(name, None)
        if entry is not None:
            entry.is_listed = False
            self._close_unused(entry)
            self._metrics.open_chunks.set(len(self._entries))

    def _close_unused(self, entry: OpenEntry) -> None:
        if not entry.readers and not entry.is_listed:
            entry.file.close()
