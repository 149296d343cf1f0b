"""
Retries, deadlines and limits, in one place for every object store.

Backoff is exponential with full jitter, and longer where the store asks for it (Retry-After). Every
operation has one deadline for all its attempts together. The error's class decides about a retry: only
`StorageUnavailable` is retried. A conditional write whose outcome is unknown is never repeated: it may
have succeeded, and its repetition would then fail against itself. Its caller reads first.

After an outage the first request that succeeds ends the backoff of the others. Otherwise a store that is
back would stay idle for as long as it was away, up to the longest backoff.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol, TypeVar

from tieringd.errors import StorageUnavailable, TieringError
from tieringd.storage.base import (
    Body,
    Condition,
    ExpiringStore,
    FileSlice,
    Joined,
    JoiningStore,
    JoinSource,
    KeepingStore,
    ListPage,
    ObjectInfo,
    ObjectStore,
    OpenableStore,
    PartsStore,
    Take,
)
from tieringd.storage.checked_puts import PROBE_PREFIX, CheckedPuts
from tieringd.storage.ranges import read_range

T = TypeVar("T")

_DELETE_BATCH = 1000  # The most that one request of every store takes; a longer list is several operations.

_SOURCES_IN_AN_UPLOAD = 100
"""Sources of a join per upload timeout: a join takes one or two requests per source."""

_AWAY_SECONDS = 1.0
"""
A store without any success for this long counts as having been away.

The next success then ends the backoff of waiting operations. A store that merely fails now and then ends
no backoff.
"""


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Deadlines, backoff and concurrency of requests to a store."""

    initial_backoff_seconds: float = 0.1
    max_backoff_seconds: float = 10.0
    segment_upload_timeout_seconds: float = 30.0
    """Deadline of a PUT from a file, or of a join, for all attempts together."""
    manifest_upload_timeout_seconds: float = 10.0
    """Deadline of every other operation, for all attempts together."""
    max_concurrent_requests: int = 20
    """Reads and writes together."""


class Listener(Protocol):
    """A function that is called after every attempt."""

    def __call__(self, *, is_throttled: bool) -> None:
        """Note an attempt; *is_throttled* tells whether the store asked for fewer requests."""


def _ignore(operation: str, outcome: str, seconds: float, size_bytes: int) -> None:
    """Ignore the figures of a finished attempt."""


class ResilientStore:
    """
    An object store that retries failed requests.

    *on_request* is called after every attempt with the operation, "ok" or the class of the error
    ("timeout" or "cancelled" for an attempt cut off), seconds, and the bytes of the body sent or
    received. With *tries_checksums* a trial before the first put finds out whether the store compares
    checksums (`storage.checked_puts`). One instance belongs to one event loop.
    """

    def __init__(
        self,
        store: ObjectStore,
        limits: StoreLimits | None = None,
        *,
        on_request: Callable[[str, str, float, int], None] = _ignore,
        random: Random | None = None,
        tries_checksums: bool = False,
    ) -> None:
        self._store = store
        self._puts = CheckedPuts(store)
        self._is_tried = not tries_checksums
        self._trying = asyncio.Lock()
        self._limits = limits or StoreLimits()
        self._on_request = on_request
        self.concurrency = self._limits.max_concurrent_requests
        """How many requests may be under way at once."""
        self.in_flight = 0
        """Requests under way, each of which uses a connection."""
        # Jitter only spreads load, so it needs no secret randomness.
        self._random = random or Random()  # noqa: S311
        self._slots = asyncio.Semaphore(self._limits.max_concurrent_requests)
        self._put_starts: dict[_Operation, float] = {}
        self._succeeded_at = -math.inf
        self._is_back = asyncio.Event()
        self._listeners: list[Listener] = []
        self._held_because = ""
        self._allowed_prefixes: tuple[str, ...] = ()

    def hold_writes(self, reason: str, *, allowed: tuple[str, ...]) -> None:
        """Refuse to put, join and delete objects from now on, other than those with an *allowed* prefix."""
        self._held_because, self._allowed_prefixes = reason, allowed

    def release_writes(self) -> None:
        """End what `hold_writes` began."""
        self._held_because = ""

    def _require_writable(self, keys: Sequence[str]) -> None:
        if self._held_because and not all(key.startswith(self._allowed_prefixes) for key in keys):
            raise StorageUnavailable(f"{keys[0]} is not changed: {self._held_because}")

    def listen(self, listener: Listener) -> None:
        """Call *listener* after every attempt from now on, in the task that made it."""
        self._listeners.append(listener)

    @property
    def backend(self) -> ObjectStore:
        """Return the wrapped store, for abilities that only one kind of store has."""
        return self._store

    @property
    def reads_back(self) -> bool:
        """Return whether each put is read back; see `TriedStore`."""
        return self._puts.reads_back

    @property
    def credentials_end(self) -> float | None:
        """Return when the credentials of the wrapped store expire; see `ExpiringStore`."""
        store = self._store
        return store.credentials_end if isinstance(store, ExpiringStore) else None

    @property
    def oldest_put_started(self) -> float | None:
        """Return when the oldest put in flight got its first slot, in loop time; None without one."""
        return min(self._put_starts.values(), default=None)

    def writes_in_flight(self, now: float) -> list[tuple[str, float, int]]:
        """
        Return key, age in seconds and attempts of each write under way, the oldest first.

        *now* is in loop time. Any thread may ask.
        """
        writes = [
            (operation.key, max(0.0, now - started), operation.attempts)
            for operation, started in self._put_starts.copy().items()
        ]
        return sorted(writes, key=lambda one: -one[1])

    def set_limits(self, limits: StoreLimits) -> None:
        """Use *limits* from the next operation on. The number of concurrent requests stays unchanged."""
        self._limits = limits

    async def put(
        self, key: str, body: Body, *, crc32c: int, condition: Condition | None = None
    ) -> ObjectInfo:
        """Store an object. Without a condition, retry even if the outcome of an attempt is unknown."""
        self._require_writable([key])
        await self.try_checksums()
        is_file = isinstance(body, FileSlice)
        limits = self._limits
        operation = _Operation(
            "put",
            key,
            limits.segment_upload_timeout_seconds if is_file else limits.manifest_upload_timeout_seconds,
            is_write=True,
            is_conditional=condition is not None,
        )
        size_bytes = body.size_bytes if isinstance(body, FileSlice) else len(body)
        try:
            return await self._run(
                operation,
                lambda: self._puts.put(key, body, crc32c=crc32c, condition=condition),
                lambda _: size_bytes,
            )
        finally:
            self._put_starts.pop(operation, None)

    async def try_checksums(self) -> None:
        """
        Find out once whether the store compares checksums. If not, every later put is read back.

        Raises:
            StorageError: An operator must act.
            StorageUnavailable: The store does not answer, so nothing is known.
        """
        if self._is_tried:
            return
        async with self._trying:
            if not self._is_tried:
                await self._run(self._operation("put", PROBE_PREFIX), self._puts.find_out)
                self._is_tried = True

    async def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Return an object whole."""
        return await self._run(
            self._operation("get", key), lambda: self._store.get(key), lambda found: len(found[0])
        )

    async def get_range(self, key: str, *, position: int, size_bytes: int) -> bytes:
        """Return the bytes of a range."""
        return await self._run(
            self._operation("get_range", key),
            lambda: self._store.get_range(key, position=position, size_bytes=size_bytes),
            len,
        )

    async def read_range(self, key: str, *, position: int, size_bytes: int, begin: Callable[[], Take]) -> int:
        """Hand on the bytes of a range; see `RangeStore`. Each attempt begins anew."""
        return await self._run(
            self._operation("get_range", key),
            lambda: read_range(self._store, key, position=position, size_bytes=size_bytes, begin=begin),
            int,
        )

    async def open_object(self, key: str) -> int | None:
        """
        Return a descriptor of an object; see `OpenableStore`. None if the wrapped store has no files.

        No request is sent, so this waits for no slot. It is not tried again: the caller fetches the object.
        """
        store = self._store
        return await store.open_object(key) if isinstance(store, OpenableStore) else None

    async def head(self, key: str) -> ObjectInfo:
        """Return what the store reports about an object."""
        return await self._run(self._operation("head", key), lambda: self._store.head(key))

    async def list_page(self, prefix: str, *, start_after: str | None = None, limit: int = 1000) -> ListPage:
        """Return one page of a listing."""
        return await self._run(
            self._operation("list_page", prefix),
            lambda: self._store.list_page(prefix, start_after=start_after, limit=limit),
        )

    async def delete_many(self, keys: Sequence[str]) -> None:
        """Delete objects. Each batch of a thousand is an operation with its own deadline."""
        self._require_writable(keys)
        for start in range(0, len(keys), _DELETE_BATCH):
            batch = keys[start : start + _DELETE_BATCH]
            await self._run(
                self._operation("delete_many", f"{batch[0]} and {len(batch) - 1} more"),
                lambda batch=batch: self._store.delete_many(batch),  # type: ignore[misc]
            )

    async def join(
        self, key: str, sources: Sequence[JoinSource], *, crc32c: int, condition: Condition | None = None
    ) -> Joined | None:
        """
        Make one object of several, if the wrapped store can. More sources get more time.

        Returns None where the wrapped store cannot join them.
        """
        self._require_writable([key])
        store = self._store
        if not isinstance(store, JoiningStore):
            return None
        operation = _Operation(
            "join",
            key,
            self._limits.segment_upload_timeout_seconds * (1 + len(sources) // _SOURCES_IN_AN_UPLOAD),
            is_write=True,
            is_conditional=condition is not None,
        )
        await self.try_checksums()
        try:
            joined = await self._run(
                operation,
                lambda: store.join(key, sources, crc32c=crc32c, condition=condition),
                lambda joined: joined.host_bytes if joined else 0,
            )
        finally:
            self._put_starts.pop(operation, None)
        if joined is not None and self.reads_back:
            return replace(joined, is_proven=False)
        return joined

    async def kept_after_delete(self, key: str) -> tuple[str, ...]:
        """Return how the bucket keeps deleted objects, as far as the wrapped store reports it."""
        store = self._store
        if not isinstance(store, KeepingStore):
            return ("this kind of store does not report whether it keeps deleted objects",)
        return await self._run(
            self._operation("kept_after_delete", key), lambda: store.kept_after_delete(key)
        )

    async def unfinished_uploads(self) -> list[str]:
        """Return the keys of unfinished uploads; none where the wrapped store knows no such thing."""
        store = self._store
        if not isinstance(store, PartsStore):
            return []
        return await self._run(self._operation("unfinished_uploads", ""), store.unfinished_uploads)

    async def close(self) -> None:
        """Close the wrapped store."""
        await self._store.close()

    def _operation(self, name: str, key: str) -> _Operation:
        return _Operation(name, key, self._limits.manifest_upload_timeout_seconds)

    async def _run(
        self,
        operation: _Operation,
        request: Callable[[], Awaitable[T]],
        size_of: Callable[[T], int] = lambda _: 0,
    ) -> T:
        """
        Try until *request* succeeds, fails for good, or runs out of time.

        Raises:
            StorageUnavailable: The deadline passed, or a conditional write has an unknown outcome.
        """
        now = asyncio.get_running_loop().time
        try:
            # The timeout starts with the first slot: time spent waiting for a slot is not the store's fault.
            async with asyncio.timeout(None) as clock:
                while True:
                    try:
                        async with self._slots:
                            self._begin_attempt(operation, clock)
                            return await self._attempt(operation, request, size_of)
                    except StorageUnavailable as error:
                        pause = self._next_pause(operation, error)
                        if now() + pause >= operation.deadline:
                            raise operation.gave_up(now()) from error
                        is_asked_for = error.retry_after_seconds is not None
                    await self._wait(pause, is_asked_for=is_asked_for)
        except TimeoutError as error:
            raise operation.gave_up(now()) from (operation.last_error or error)

    def _begin_attempt(self, operation: _Operation, clock: asyncio.Timeout) -> None:
        if operation.attempts == 0:
            operation.started = asyncio.get_running_loop().time()
            clock.reschedule(operation.deadline)
            if operation.is_write:
                self._put_starts[operation] = operation.started
        operation.attempts += 1

    async def _attempt(
        self, operation: _Operation, request: Callable[[], Awaitable[T]], size_of: Callable[[T], int]
    ) -> T:
        now = asyncio.get_running_loop().time
        begun, outcome, size_bytes, is_throttled = now(), "cancelled", 0, False
        self.in_flight += 1
        try:
            result = await request()
            outcome, size_bytes = "ok", size_of(result)
        except TieringError as error:
            outcome = type(error).__name__
            is_throttled = isinstance(error, StorageUnavailable) and error.is_throttling
            outcome = "throttled" if is_throttled else outcome
            raise
        except asyncio.CancelledError:
            # The deadline or the caller cut the request off, so its outcome is unknown.
            operation.outcome_unknown = operation.is_write
            outcome = "timeout" if now() >= operation.deadline else "cancelled"
            raise
        finally:
            self.in_flight -= 1
            self._on_request(operation.name, outcome, now() - begun, size_bytes)
            for listener in self._listeners:
                listener(is_throttled=is_throttled)
        self._note_success(now())
        return result

    def _note_success(self, now: float) -> None:
        if now - self._succeeded_at >= _AWAY_SECONDS:
            self._is_back.set()
            self._is_back.clear()  # Operations that wait now go on; later ones wait.
        self._succeeded_at = now

    async def _wait(self, seconds: float, *, is_asked_for: bool) -> None:
        """
        Wait between two attempts.

        The wait ends early when the store is back, unless the store asked for the wait.
        """
        if is_asked_for:
            await asyncio.sleep(seconds)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._is_back.wait()

    def _next_pause(self, operation: _Operation, error: StorageUnavailable) -> float:
        """
        Return the seconds until the next attempt.

        Raises:
            StorageUnavailable: *error*, when the attempt must not be repeated.
        """
        operation.last_error = error
        operation.outcome_unknown = operation.outcome_unknown or error.outcome_unknown
        if operation.is_conditional and error.outcome_unknown:
            raise error
        return self._pause_seconds(operation.attempts, error.retry_after_seconds)

    def _pause_seconds(self, attempts: int, retry_after_seconds: float | None) -> float:
        """Return a random part of the doubling backoff, or the store's Retry-After seconds if longer."""
        limits = self._limits
        ceiling = min(limits.max_backoff_seconds, limits.initial_backoff_seconds * 2 ** (attempts - 1))
        return max(self._random.uniform(0, ceiling), retry_after_seconds or 0.0)


@dataclass(eq=False, slots=True)
class _Operation:
    """One call of an `ObjectStore` method, over all its attempts."""

    name: str
    key: str
    timeout_seconds: float
    is_write: bool = False
    is_conditional: bool = False
    started: float = 0.0
    attempts: int = 0
    outcome_unknown: bool = False
    last_error: StorageUnavailable | None = None

    @property
    def deadline(self) -> float:
        """Return when the operation's time is up, in loop time."""
        return self.started + self.timeout_seconds

    def gave_up(self, now: float) -> StorageUnavailable:
        """Return the error of an operation that ran out of time."""
        cause = f"; last error: {self.last_error}" if self.last_error else "; the store did not respond"
        return StorageUnavailable(
            f"{self.name} {self.key}: gave up after {self.attempts} attempts in {now - self.started:.1f} s "
            f"(the limit is {self.timeout_seconds:g} s){cause}",
            outcome_unknown=self.outcome_unknown,
        )
