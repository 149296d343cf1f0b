"""
An object store in this process's memory: the reference for the behaviour of the others.

Its objects end with the process. It serves tests, simulations and benchmarks. It fails and waits on demand.
It reads file slices on the loop's thread, so that a virtual clock stays in step. Versions are a counter: each
write gets a new one, whatever its bytes.
"""

from __future__ import annotations

import asyncio
import os
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType

from crc32c import crc32c as crc32c_of

from tieringd.clock import wall_clock_ms
from tieringd.errors import ChecksumRejected, ObjectNotFound, PreconditionFailed, StorageDenied, TieringError
from tieringd.storage.base import (
    Body,
    Condition,
    FileSlice,
    IfVersion,
    Joined,
    JoinSource,
    ListPage,
    ObjectInfo,
    truncated,
)
from tieringd.storage.store_times import StoreTimes


@dataclass(frozen=True, slots=True)
class _Fault:
    error: Callable[[], TieringError]
    is_after_effect: bool


class MemoryStore:
    """
    A bucket in a dictionary.

    Every operation waits *latency_seconds* before it takes effect, or fails first when a fault is queued
    for it. No other task runs between the wait and the end of the effect.
    """

    has_own_clock = True

    def __init__(self, *, latency_seconds: float = 0.0, now_ms: Callable[[], int] | None = None) -> None:
        """
        Use *now_ms* as the store's clock.

        Without one the store reports no time, and dates objects by the host's clock.
        """
        self.latency_seconds = latency_seconds
        self.now_ms = now_ms
        self._times = StoreTimes()
        self.requests: list[tuple[str, str]] = []
        """Every call so far: the operation and its key (a prefix, or "" for many keys)."""
        self._objects: dict[str, tuple[bytes, ObjectInfo]] = {}
        self._faults: dict[str, deque[_Fault]] = {}
        self.denied: set[str] = set()
        """Keys of which the store answers every request with a refusal, as under a policy for these keys."""
        self._writes = 0

    @property
    def objects(self) -> Mapping[str, tuple[bytes, ObjectInfo]]:
        """A read-only view of the bucket: each key's bytes and information. Reading it is no request."""
        return MappingProxyType(self._objects)

    def fail_next(
        self,
        operation: str,
        error: Callable[[], TieringError],
        *,
        times: int = 1,
        after_effect: bool = False,
    ) -> None:
        """
        Make the next *times* calls of *operation* (the method's name) raise the error that *error* builds.

        With *after_effect* the call takes effect before it raises, like a request whose response is lost.
        """
        fault = _Fault(error, after_effect)
        self._faults.setdefault(operation, deque()).extend([fault] * times)

    async def put(
        self, key: str, body: Body, *, crc32c: int, condition: Condition | None = None
    ) -> ObjectInfo:
        """Store an object whole."""
        async with self._request("put", key):
            data = _read(body) if isinstance(body, FileSlice) else bytes(body)
            self._check(key, condition)
            if crc32c_of(data) != crc32c:
                raise ChecksumRejected(
                    f"put {key}: the checksum of the bytes is not the expected one", key=key
                )
            return self.add(key, data)

    def add(self, key: str, data: bytes) -> ObjectInfo:
        """Store an object at once, without waiting, failing or being counted: for set-up."""
        self._writes += 1
        info = ObjectInfo(
            key, len(data), str(self._writes), crc32c_of(data), (self.now_ms or wall_clock_ms)()
        )
        self.place(key, data, info)
        return info

    def place(self, key: str, data: bytes, info: ObjectInfo) -> None:
        """Store *data* with exactly *info* at once, even if they disagree: for set-up of damage."""
        self._objects[key] = (data, info)

    def remove(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Delete an object at once, and return what it was; KeyError where there is none. For set-up."""
        return self._objects.pop(key)

    async def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Return an object whole."""
        async with self._request("get", key):
            return self._object(key)

    async def get_range(self, key: str, *, position: int, size_bytes: int) -> bytes:
        """Return the bytes of a range."""
        async with self._request("get_range", key):
            return self._object(key)[0][position : position + size_bytes]

    async def head(self, key: str) -> ObjectInfo:
        """Return an object's size, version and checksum."""
        async with self._request("head", key):
            return self._object(key)[1]

    async def list_page(self, prefix: str, *, start_after: str | None = None, limit: int = 1000) -> ListPage:
        """Return one page of the keys in order."""
        async with self._request("list_page", prefix):
            keys = sorted((key for key in self._objects if key.startswith(prefix)), key=str.encode)
            start = 0 if start_after is None else bisect_right(keys, start_after.encode(), key=str.encode)
            page = keys[start : start + limit]
            # Like most stores' listings, this one reports no checksums.
            objects = tuple(replace(self._objects[key][1], crc32c=None) for key in page)
        return ListPage(objects, page[-1] if start + limit < len(keys) else None)

    async def delete_many(self, keys: Sequence[str]) -> None:
        """Delete objects."""
        async with self._request("delete_many", ""):
            for key in keys:
                self._objects.pop(key, None)

    async def join(
        self, key: str, sources: Sequence[JoinSource], *, crc32c: int, condition: Condition | None = None
    ) -> Joined | None:
        """Make one object of several."""
        async with self._request("join", key):
            data = b"".join(self._object(source.key)[0] for source in sources)
            self._check(key, condition)
            if crc32c_of(data) != crc32c:
                raise ChecksumRejected(
                    f"join {key}: the checksum of the bytes is not the expected one", key=key
                )
            return Joined(self.add(key, data), is_proven=True, host_bytes=0)

    async def kept_after_delete(self, _key: str) -> tuple[str, ...]:
        """Return nothing: a deleted object is gone."""
        return ()

    def tell_time_to(self, listener: Callable[[int | None], None]) -> None:
        """Tell *listener* the time with each response."""
        self._times.listen(listener)

    async def close(self) -> None:
        """Do nothing: the store holds no resources."""

    @asynccontextmanager
    async def _request(self, operation: str, key: str) -> AsyncIterator[None]:
        """Count a call, wait, and raise the fault queued for it, before or after its effect."""
        self.requests.append((operation, key))
        queue = self._faults.get(operation)
        fault = queue.popleft() if queue else None
        # Even without latency every call yields to the loop once, as a call of a real store does.
        await asyncio.sleep(self.latency_seconds)
        self._times.note(None if self.now_ms is None else self.now_ms())
        if fault is not None and not fault.is_after_effect:
            raise fault.error()
        if key in self.denied:
            raise StorageDenied(f"{operation} {key}: access denied", key=key)
        yield
        if fault is not None:
            raise fault.error()

    def _object(self, key: str) -> tuple[bytes, ObjectInfo]:
        try:
            return self._objects[key]
        except KeyError:
            raise ObjectNotFound(f"{key}: there is no such object", key=key) from None

    def _check(self, key: str, condition: Condition | None) -> None:
        if condition is None:
            return
        wanted = condition.version if isinstance(condition, IfVersion) else None
        found = self._objects[key][1].version if key in self._objects else None
        if found != wanted:
            raise PreconditionFailed(f"put {key}: the version is {found}, not {wanted}", key=key)


def _read(file_slice: FileSlice) -> bytes:
    data = os.pread(file_slice.fd, file_slice.size_bytes, file_slice.position)
    if len(data) < file_slice.size_bytes:
        raise truncated(file_slice, file_slice.position + len(data))
    return data
