"""
The cache keeper: keeps the chunk cache within its limits, and finds room for what is hydrated.

It looks every interval, at once when the disk's areas leave the cache less than it holds, and whenever
a put needs room. What goes is decided in `policies.cache_trim`. A put that the cache does not take,
because it is full of what is being read, or its disk is full, read-only or gone, is refused with
the reason in a metric, and its reader is served without the cache.

`OpenChunks` holds the cached files that are being read, and those that stay open for the next reader. Each
chunk has one descriptor, and all its readers read by position. It closes a chunk without readers when the
eviction strategy says so, when the file is evicted, or when the disk changes. It belongs to one event loop
and never blocks it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import structlog

from tieringd.cache.faults import reason_of
from tieringd.errors import LocalFileError
from tieringd.policies.cache_trim import (
    OpenChunk,
    ReleasePlan,
    TrimDemand,
    fits_at_all,
    has_room,
    plan_cache_trim,
    plan_releases,
    trim_demand,
)
from tieringd.storage.threads import in_thread, in_thread_or

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tieringd.cache.directory import CacheDirectory, OpenFile, PartFile
    from tieringd.metrics import CacheMetrics
    from tieringd.policies.cache_trim import CachedFile, CacheUse, ChunkEvictionLimits, TrimLimits, TrimPlan


log = structlog.get_logger(__name__)

PAUSE_SECONDS = 5.0
"""For so long nothing is put after the disk refused, and no room is looked for after none was found."""
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


@dataclass(frozen=True, slots=True)
class KeeperSettings:
    """How large the cache may be, and how often that is looked at."""

    limits: TrimLimits
    check_interval_seconds: float = 30.0
    """`cloud_storage_cache_check_interval_ms`."""


class CacheKeeper:
    """Own one cache directory. Belongs to one event loop; the blocking work is done in threads."""

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

    @property
    def is_started(self) -> bool:
        """Say whether the directory was read, and so is in use."""
        return self._is_started

    @property
    def limits(self) -> TrimLimits:
        """Return what holds now: the settings, and what the disk's areas leave."""
        limits = self._settings.limits
        if self._space_bytes is None:
            return limits
        return replace(limits, size_bytes=min(limits.size_bytes, self._space_bytes))

    def set_settings(self, settings: KeeperSettings) -> None:
        """Keep by *settings* from now on."""
        self._settings = settings
        self._look_soon()

    def set_space(self, limit_bytes: int | None) -> None:
        """
        Take what `DiskSpace.cache_limit_bytes` says, or None; what is over it is evicted at once.

        The cache goes before the log: whoever plans a trim of the log tells this one first.
        """
        self._space_bytes = limit_bytes
        self._look_soon()

    async def run(self) -> None:
        """Look every interval, until cancelled; the access times are saved in the end."""
        try:
            while True:
                await self.step()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._settings.check_interval_seconds):
                        await self._hurry.wait()
                self._hurry.clear()
        finally:
            await self._save()

    async def step(self) -> TrimPlan | None:
        """Look once, and evict what is too much; None while the directory cannot be used."""
        now = asyncio.get_running_loop().time()
        if not await self._start(now):
            return None
        if now - self._compared_at >= COMPARE_SECONDS:
            self._compared_at = now
            with suppress(LocalFileError):  # The next look at it says what is wrong, if it still is.
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
        Begin a file of *size_bytes*; None where the cache does not take it.

        The caller ends the part whatever happens: with `settle` once it is published, else with `abandon`.
        """
        now = asyncio.get_running_loop().time()
        reason = ""
        if not await self._start(now):
            reason = "unusable"
        elif now < self._disk_refuses_until:
            reason = "disk"
        elif not await self._reserve(size_bytes):
            reason = "full"
        if reason:
            self._refuse(reason)
            return None
        try:
            part = await self._part(name, size_bytes)
        except BaseException:
            self._accounts.release(size_bytes)
            raise
        if part is None:
            self._accounts.release(size_bytes)
        return part

    async def publish(self, part: PartFile) -> OpenFile | None:
        """Give a part its name; None where the disk does not take it."""
        try:
            opened = await in_thread_or(_close, partial(self.directory.publish, part))
        except LocalFileError as error:
            self.note_refusal(error)
            return None
        return opened

    def settle(self, part: PartFile) -> None:
        """End a part that was published."""
        self._accounts.release(part.size_bytes)
        self._publish()

    async def abandon(self, part: PartFile) -> None:
        """Remove a part that was not published, and give back what was reserved for it."""
        try:
            await in_thread(part.abandon)
        finally:
            self._accounts.release(part.size_bytes)
            self._publish()

    async def discard(self, name: str) -> None:
        """Delete a file whose bytes are wrong."""
        self.open_chunks.forget((name,))
        await in_thread(self.directory.discard, name)
        self._publish()

    def mistrust(self, name: str) -> None:
        """Have a file checked again before anybody else reads it."""
        self.open_chunks.forget((name,))
        self._accounts.set_checked(name, None)

    def touch(self, name: str) -> None:
        """Note that a file is read now."""
        self._accounts.touch(name, accessed_ms=self.directory.now_ms())

    def note_refusal(self, error: LocalFileError) -> None:
        """Take in that the disk refused a put: for a while nothing is put."""
        self._disk_refuses_until = asyncio.get_running_loop().time() + PAUSE_SECONDS
        self._refuse(reason_of(error))
        self._say(str(error))

    async def _start(self, now: float) -> bool:
        """Read the directory once; a directory that cannot be used is tried again with each look."""
        if self._is_started:
            return True
        async with self._starting:
            if self.is_started:  # Meanwhile, by whoever was before us in line.
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
        """Promise room to one file, evicting others where that is what it takes."""
        if await self._reserved_now(size_bytes):
            return True
        now = asyncio.get_running_loop().time
        if now() < self._no_room_until:
            return False
        async with self._trimming:
            # Whoever was before us in line may have made enough.
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
                    # Somebody else has filled the disk: the cache gives up as much as it asks for.
                    async with self._trimming:
                        await self._evict(await self._plan(TrimDemand(size_bytes, 1, "its disk is full")))
                    continue
                self.note_refusal(error)
                return None
        raise AssertionError("the last attempt returns")

    async def _use(self, wanted_bytes: int = 0) -> CacheUse:
        free_bytes: int | None = None
        if self.limits.min_free_bytes:
            with suppress(LocalFileError):  # Then the put itself says what is wrong with the disk.
                free_bytes = await in_thread(self.directory.free_bytes)
        return replace(
            self._accounts.use(),
            free_bytes=free_bytes,
            wanted_bytes=wanted_bytes,
            wanted_objects=1 if wanted_bytes else 0,
        )

    async def _trim(self, use: CacheUse) -> TrimPlan:
        demand = trim_demand(use, self.limits)
        if use.wanted_bytes and self._carry_over:
            # Those who were next in turn the last time are enough for one put: no plan over all files.
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

    async def _plan(self, demand: TrimDemand, candidates: tuple[CachedFile, ...] | None = None) -> TrimPlan:
        """Plan over *candidates*, or else over all files; many of them take a moment."""
        in_use, carryover_bytes = self.open_chunks.in_use(), self.limits.carryover_bytes

        def plan() -> TrimPlan:
            files = self._accounts.files() if candidates is None else candidates
            return plan_cache_trim(files, demand, in_use=in_use, carryover_bytes=carryover_bytes)

        if not (demand.size_bytes or demand.objects):
            return plan_cache_trim((), demand, in_use=in_use)
        return await in_thread(plan)

    async def _evict(self, plan: TrimPlan) -> None:
        in_use = self.open_chunks.in_use()
        files = [one.file for one in plan.evictions if one.file.name not in in_use]
        if not files:
            return
        names = [file.name for file in files]
        # An open file keeps its room on the disk.
        self.open_chunks.forget(names)
        evicted_bytes = await in_thread(self.directory.evict, names)
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
        with suppress(LocalFileError):  # They are only advice; a disk that takes nothing is said elsewhere.
            await in_thread(self.directory.save_access_times)

    def _look_soon(self) -> None:
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
