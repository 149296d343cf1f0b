"""
The cache keeper: keeps the chunk cache within its limits, and makes room for hydrated chunks.

The keeper checks the cache every interval, at once when the disk's areas leave the cache less than it
holds, and whenever a put needs room. `policies.cache_trim` decides which files are evicted. A put is
refused if the cache is full of files that are being read, or if its disk is full, read-only or missing.
The reason is counted in a metric, and the reader is served without the cache.

`OpenChunks` holds the cached files that are being read, and those that stay open for the next reader.
Each chunk has one descriptor, and all its readers read by position. It closes a chunk without readers
when the eviction strategy says so, when the file is evicted, or when the file changes on disk. The object
itself is such a file where it is read in place. `OpenChunks` belongs to one event loop and never blocks it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import structlog

from tieringd.cache.cache_directory import CacheDirectory, OpenFile, PartFile
from tieringd.cache.faults import reason_of
from tieringd.errors import LocalFileError
from tieringd.metrics import CacheMetrics
from tieringd.policies.cache_trim import (
    CachedFile,
    CacheUse,
    ChunkEvictionLimits,
    EvictionPlan,
    OpenChunk,
    ReleasePlan,
    TrimDemand,
    TrimLimits,
    fits_at_all,
    has_room,
    plan_cache_trim,
    plan_releases,
    trim_demand,
)
from tieringd.storage.threads import in_thread, in_thread_or

log = structlog.get_logger(__name__)

PAUSE_SECONDS = 5.0
"""How long puts are paused after the disk refused one, and evictions after one freed too little room."""
SAVE_SECONDS = 60.0
COMPARE_SECONDS = 3600.0
_FULL = ("enospc", "edquot")


@dataclass(eq=False, slots=True)
class OpenEntry:
    """An open file and its readers."""

    file: OpenFile
    segment: str
    number: int
    chunk_count: int
    """Number of chunks of the whole segment."""
    used_at: float
    readers: int = 0
    is_listed: bool = True
    """Whether new readers may take it. If not, its last reader closes it."""


class OpenChunks:
    """
    The open chunks of a hydrator.

    The keeper shares it, as it must not evict chunks that are being read.
    """

    def __init__(
        self, limits: ChunkEvictionLimits, *, now: Callable[[], float], metrics: CacheMetrics
    ) -> None:
        """Keep the limits. *now* is a monotonic clock in seconds."""
        self.limits = limits
        self._now = now
        self._metrics = metrics
        self._entries: dict[str, OpenEntry] = {}

    def in_use(self) -> frozenset[str]:
        """Return the names of files that have a reader now."""
        return frozenset(name for name, entry in self._entries.items() if entry.readers)

    def holds(self, name: str) -> bool:
        """Say whether a chunk of this name is open."""
        return name in self._entries

    def add(self, file: OpenFile, *, segment: str, number: int, chunk_count: int) -> None:
        """
        List a file for readers.

        An older file of the same name stays only with the readers that have it.
        """
        self._unlist(file.name)
        self._entries[file.name] = OpenEntry(file, segment, number, chunk_count, self._now())
        self._metrics.open_chunks.set(len(self._entries))

    def take(self, name: str, size_bytes: int) -> OpenEntry | None:
        """
        Return a chunk for one more reader, which must give it back; None if the chunk is not open.

        A file that was changed, deleted or truncated on the disk does not count as open: the caller
        opens and checks it again.
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
        """Hide these files, which were deleted or are wrong, from new readers."""
        for name in names:
            self._unlist(name)

    def sweep(self) -> ReleasePlan:
        """
        Close the chunks that the eviction strategy does not keep open, and those whose file is gone.

        Returns the strategy's plan.
        """
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
        # A deleted object frees its room on the disk only when it is closed.
        self.forget([name for name, entry in self._entries.items() if not entry.file.is_intact])
        return plan

    def close(self) -> None:
        """Close the chunks without readers. Readers close the rest."""
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


@dataclass(frozen=True, slots=True)
class KeeperSettings:
    """How large the cache may be, and how often that is checked."""

    limits: TrimLimits
    check_interval_seconds: float = 30.0
    """`cloud_storage_cache_check_interval_ms`."""


class CacheKeeper:
    """Keep one cache directory. Belongs to one event loop; the blocking work runs in threads."""

    def __init__(
        self,
        directory: CacheDirectory,
        open_chunks: OpenChunks,
        *,
        settings: KeeperSettings,
        metrics: CacheMetrics,
    ) -> None:
        self.directory = directory
        self._accounts = directory.accounts
        self.open_chunks = open_chunks
        self._settings = settings
        self._metrics = metrics
        self._space_bytes: int | None = None
        self._trimming = asyncio.Lock()
        self._starting = asyncio.Lock()
        self._hurry = asyncio.Event()
        self._is_started = False
        self._carry_over: tuple[CachedFile, ...] = ()
        self._no_room_until = 0.0
        self._disk_refuses_until = 0.0
        self._saved_at = self._compared_at = 0.0
        self._problem = ""
        self.on_evicted: Callable[[Sequence[str]], None] = lambda _: None
        """Gets the names of files that were evicted: other processes may have them open."""

    @property
    def _is_paused(self) -> bool:
        """Say whether puts pause because the disk refused one."""
        return asyncio.get_running_loop().time() < self._disk_refuses_until

    @property
    def is_started(self) -> bool:
        """Say whether the directory was read, and so is in use."""
        return self._is_started

    @property
    def limits(self) -> TrimLimits:
        """Return the limits that hold now: the settings, lowered to the size that the disk's areas leave."""
        limits = self._settings.limits
        if self._space_bytes is None:
            return limits
        return replace(limits, size_bytes=min(limits.size_bytes, self._space_bytes))

    def set_settings(self, settings: KeeperSettings) -> None:
        """Use *settings* from now on."""
        self._settings = settings
        self._check_soon()

    def set_space(self, limit_bytes: int | None) -> None:
        """
        Set the limit from `DiskSpace.cache_limit_bytes`, or None. Files above it are evicted at once.

        The cache shrinks before the log does: the space planner sets this limit before it trims the log.
        """
        self._space_bytes = limit_bytes
        self._check_soon()

    async def run(self) -> None:
        """Check every interval, until cancelled. The access times are saved at the end."""
        try:
            while True:
                await self.step()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._settings.check_interval_seconds):
                        await self._hurry.wait()
                self._hurry.clear()
        finally:
            await self._save()

    async def step(self) -> EvictionPlan | None:
        """Check once, and evict the excess. Returns None while the directory cannot be used."""
        now = asyncio.get_running_loop().time()
        if not await self._start(now):
            return None
        if now - self._compared_at >= COMPARE_SECONDS:
            self._compared_at = now
            with suppress(LocalFileError):  # The next use of the directory reports the fault, if it persists.
                await in_thread(self.directory.compare)
        async with self._trimming:
            plan = await self._trim(await self._use())
        if now - self._saved_at >= SAVE_SECONDS:
            self._saved_at = now
            await self._save()
        self._publish()
        return plan

    async def begin(self, name: str, size_bytes: int) -> PartFile | None:
        """
        Begin a file of *size_bytes*, or return None if the cache does not take it.

        The caller must end the part in every case: with `settle` once it is published, else with `abandon`.
        """
        if not await self.reserve(size_bytes):
            return None
        try:
            part = await self._part(name, size_bytes)
        except BaseException:
            self.release(size_bytes)
            raise
        if part is None:
            self.release(size_bytes)
        return part

    async def reserve(self, size_bytes: int) -> bool:
        """Reserve room for a file of *size_bytes*, or return False if the cache does not take it."""
        now = asyncio.get_running_loop().time()
        reason = ""
        if not await self._start(now):
            reason = "unusable"
        elif self._is_paused:
            reason = "disk"
        elif not await self._reserve(size_bytes):
            reason = "full"
        if reason:
            self._refuse(reason)
        return not reason

    def release(self, size_bytes: int) -> None:
        """End a reservation."""
        self._accounts.release(size_bytes)
        self._publish()

    async def make_room(self, size_bytes: int) -> None:
        """Evict as many bytes, because another program filled the disk."""
        async with self._trimming:
            await self._evict(await self._plan(TrimDemand(size_bytes, 1, "its disk is full")))

    async def publish(self, part: PartFile) -> OpenFile | None:
        """Give a part its final name, or return None if the disk refuses."""
        try:
            opened = await in_thread_or(_close, partial(self.directory.publish, part))
        except LocalFileError as error:
            self.note_refusal(error)
            return None
        return opened

    def settle(self, part: PartFile) -> None:
        """End a part that was published."""
        self.release(part.size_bytes)

    async def abandon(self, part: PartFile) -> None:
        """Remove a part that was not published, and release its reservation."""
        try:
            await in_thread(part.abandon)
        finally:
            self.release(part.size_bytes)

    async def discard(self, name: str) -> None:
        """Delete a file whose bytes are wrong."""
        self.open_chunks.forget((name,))
        await in_thread(self.directory.discard, name)
        self._publish()

    def mistrust(self, name: str) -> None:
        """Have a file checked again before the next reader gets it."""
        self.open_chunks.forget((name,))
        self._accounts.set_checked(name, None)

    def touch(self, name: str) -> None:
        """Record that a file is read now."""
        self._accounts.touch(name, accessed_ms=self.directory.now_ms())

    def note_published(self, name: str, size_bytes: int) -> None:
        """Count a file for which room was reserved, and to which another process has given its name."""
        self._accounts.add(name, size_bytes, accessed_ms=self.directory.now_ms())
        self.release(size_bytes)

    def note_discarded(self, name: str) -> None:
        """Stop counting a file that another process has deleted because its bytes are wrong."""
        self.open_chunks.forget((name,))
        self._accounts.remove(name)
        self._publish()

    def compare_soon(self) -> None:
        """Compare the accounts with the disk at once: a process ended that may have left files uncounted."""
        self._compared_at = -math.inf
        self._hurry.set()

    def note_refusal(self, error: LocalFileError) -> None:
        """Record that the disk refused a put: puts pause for a while."""
        self._disk_refuses_until = asyncio.get_running_loop().time() + PAUSE_SECONDS
        self._refuse(reason_of(error))
        self._say(str(error))

    async def _start(self, now: float) -> bool:
        """Read the directory once. A directory that cannot be used is tried again at each check."""
        if self._is_started:
            return True
        async with self._starting:
            if self.is_started:  # Another caller started it while this one waited.
                return True
            if now < self._disk_refuses_until:
                return False
            try:
                report = await in_thread(self.directory.start)
            except LocalFileError as error:
                self._disk_refuses_until = now + PAUSE_SECONDS
                self._say(str(error))
                return False
            self._is_started = True
            self._saved_at = self._compared_at = now
            if report.foreign:
                log.warning(
                    "the cache directory holds files that are not the cache's; they stay",
                    path=str(self.directory.path),
                    files=report.foreign,
                )
        self._publish()
        return True

    async def _reserve(self, size_bytes: int) -> bool:
        """Reserve room for one file, and evict others if that is necessary."""
        if await self._reserved_now(size_bytes):
            return True
        now = asyncio.get_running_loop().time
        if now() < self._no_room_until:
            return False
        async with self._trimming:
            # An eviction while this call waited may have freed enough.
            if await self._reserved_now(size_bytes):
                return True
            use = await self._use(size_bytes)
            if not fits_at_all(use, self.limits):
                return False
            await self._trim(use)
            if await self._reserved_now(size_bytes):
                return True
        self._no_room_until = now() + PAUSE_SECONDS
        return False

    async def _reserved_now(self, size_bytes: int) -> bool:
        use = await self._use(size_bytes)
        if not has_room(use, self.limits):
            return False
        self._accounts.reserve(size_bytes)
        return True

    async def _part(self, name: str, size_bytes: int) -> PartFile | None:
        for attempt in (1, 2):
            try:
                return await in_thread_or(
                    lambda part: part.abandon(), partial(self.directory.part, name, size_bytes)
                )
            except LocalFileError as error:
                if attempt == 1 and reason_of(error) in _FULL:
                    await self.make_room(size_bytes)
                    continue
                self.note_refusal(error)
                return None
        raise AssertionError("the last attempt returns")

    async def _use(self, wanted_bytes: int = 0) -> CacheUse:
        free_bytes: int | None = None
        if self.limits.min_free_bytes:
            with suppress(LocalFileError):  # Then the put itself reports the fault of the disk.
                free_bytes = await in_thread(self.directory.free_bytes)
        return replace(
            self._accounts.use(),
            free_bytes=free_bytes,
            wanted_bytes=wanted_bytes,
            wanted_objects=1 if wanted_bytes else 0,
        )

    async def _trim(self, use: CacheUse) -> EvictionPlan:
        demand = trim_demand(use, self.limits)
        if use.wanted_bytes and self._carry_over:
            # The files that the last plan listed next are enough for one put, so no plan over all files
            # is made.
            least = replace(self.limits, low_watermark=1.0)
            candidates = self._accounts.unchanged(self._carry_over)
            self._carry_over = ()
            plan = await self._plan(trim_demand(use, least), candidates)
            if not (plan.short_by_bytes or plan.short_by_objects):
                await self._evict(plan)
                return plan
        plan = await self._plan(demand)
        self._carry_over = plan.carry_over
        await self._evict(plan)
        return plan

    async def _plan(
        self, demand: TrimDemand, candidates: tuple[CachedFile, ...] | None = None
    ) -> EvictionPlan:
        """Plan over *candidates*, or over all files by default. Runs in a thread, as many files take time."""
        in_use, carryover_bytes = self.open_chunks.in_use(), self.limits.carryover_bytes

        def plan() -> EvictionPlan:
            files = self._accounts.files() if candidates is None else candidates
            return plan_cache_trim(files, demand, in_use=in_use, carryover_bytes=carryover_bytes)

        if not (demand.size_bytes or demand.objects):
            return plan_cache_trim((), demand, in_use=in_use)
        return await in_thread(plan)

    async def _evict(self, plan: EvictionPlan) -> None:
        in_use = self.open_chunks.in_use()
        files = [one.file for one in plan.evictions if one.file.name not in in_use]
        if not files:
            return
        names = [file.name for file in files]
        # A deleted file frees its space on the disk only when it is closed.
        self.open_chunks.forget(names)
        evicted_bytes = await in_thread(self.directory.evict, names)
        self.on_evicted(names)
        self._metrics.evicted_bytes.inc(evicted_bytes)
        for file in files:
            if not self._accounts.holds(file.name):
                self._metrics.evictions.labels(file.kind.value).inc()
        log.info(
            "chunks are evicted from the cache",
            because=plan.demand.because,
            files=len(files),
            size_bytes=evicted_bytes,
            short_by_bytes=plan.short_by_bytes,
        )
        self._no_room_until = 0.0
        self._publish()

    async def _save(self) -> None:
        if not self._is_started:
            return
        with suppress(LocalFileError):  # They are only advice. Puts report a disk that accepts no writes.
            await in_thread(self.directory.save_access_times)

    def _check_soon(self) -> None:
        use = replace(self._accounts.use(), wanted_bytes=0)
        self._metrics.limit_bytes.set(self.limits.size_bytes)
        if not has_room(use, self.limits):
            self._hurry.set()

    def _refuse(self, reason: str) -> None:
        self._metrics.put_failures.labels(reason).inc()

    def _say(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            log.warning("the cache does not take files; readers are served without it", error=problem)

    def _publish(self) -> None:
        use = self._accounts.use()
        self._metrics.size_bytes.set(use.size_bytes)
        self._metrics.objects.set(use.objects)
        self._metrics.limit_bytes.set(self.limits.size_bytes)


def _close(opened: OpenFile) -> None:
    opened.close()
