"""An object store whose requests go over a `Wire`, and damage to a store in memory."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.fakes.memory_store import MemoryStore
from tieringd.errors import PreconditionFailed, StorageUnavailable
from tieringd.storage.base import FileSlice
from tieringd.storage.store_times import StoreTimes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from tests.fakes.wire import Wire
    from tieringd.storage.base import Body, Condition, Joined, JoinSource, ListPage, ObjectInfo, ObjectStore


LATE_SECONDS = 2.0
"""How long after it was sent a late write takes effect."""


def store_unavailable(operation: str, outcome_unknown: bool = False) -> StorageUnavailable:  # noqa: FBT001, FBT002 - the wire calls it
    return StorageUnavailable(f"{operation}: the store does not answer", outcome_unknown=outcome_unknown)


def restore(store: MemoryStore, objects: Mapping[str, tuple[bytes, ObjectInfo]]) -> None:
    """Make *objects* all that the store holds. An earlier `dict(store.objects)` brings back that state."""
    for key in store.objects.keys() - objects.keys():
        store.remove(key)
    for key, (data, info) in objects.items():
        store.place(key, data, info)


def rot(store: MemoryStore, key: str, position: int = -1) -> None:
    """Turn a bit of the stored byte at *position*. The store still reports the checksum from before."""
    data, info = store.objects[key]
    changed = bytearray(data)
    changed[position] ^= 1
    store.place(key, bytes(changed), info)


def forget_checksums(store: MemoryStore) -> None:
    """Make the store report no checksums of what it holds, as some stores do."""
    for key, (data, info) in list(store.objects.items()):
        store.place(key, data, replace(info, crc32c=None))


class RefusingStore(MemoryStore):
    """Stores no object whose key begins with *refused_prefix*, while that is set."""

    refused_prefix: str | None = None

    async def put(
        self, key: str, body: Body, *, crc32c: int, condition: Condition | None = None
    ) -> ObjectInfo:
        """Store an object, or fail as a store that does not answer."""
        if self.refused_prefix is not None and key.startswith(self.refused_prefix):
            raise store_unavailable("put")
        return await super().put(key, body, crc32c=crc32c, condition=condition)


class AwayStore(MemoryStore):
    """A store that answers nothing while it is away."""

    is_away = False

    def _request(self, operation, key):
        if self.is_away:
            raise store_unavailable(operation)
        return super()._request(operation, key)


class DistantStore:
    """
    One daemon's access to a bucket that several may use.

    *on_put* is called with the key of each stored object, even if the daemon gets no answer. *refuses* is
    called for each conditional write and returns its fate: `before` (refused, and not stored), `after`
    (stored, and refused all the same, as where a proxy sends a request twice), `late` (stored some time after
    the sender is gone, and never answered), or an empty text. With *deletes_late* a deletion that is given up
    may happen later.
    """

    def __init__(
        self,
        store: ObjectStore,
        wire: Wire,
        *,
        on_put: Callable[[str], Awaitable[None] | None] | None = None,
        refuses: Callable[[], str] = str,
        deletes_late: bool = False,
    ) -> None:
        self._store = store
        self._wire = wire
        self._on_put = on_put
        self._refuses = refuses
        self._deletes_late = deletes_late
        self._late: asyncio.Task[None] | None = None
        self._times = StoreTimes()
        self.has_own_clock = getattr(store, "has_own_clock", False)

    def tell_time_to(self, listener: Callable[[int | None], None]) -> None:
        """Call *listener* with the bucket's time at each answer that arrives here."""
        self._times.listen(listener)

    def _tell_time(self) -> None:
        now_ms = getattr(self._store, "now_ms", None)
        self._times.note(None if now_ms is None else now_ms())

    async def put(
        self, key: str, body: Body, *, crc32c: int, condition: Condition | None = None
    ) -> ObjectInfo:
        """Store an object. An object whose request was given up may still be stored later."""

        async def effect(data: Body = body) -> ObjectInfo:
            refusal = self._refuses() if condition is not None else ""
            if refusal == "before":
                raise PreconditionFailed(f"put {key}: 409, another write is under way", key=key)
            if refusal == "late":
                late = self._put_late(key, data, crc32c, condition)
                self._late = asyncio.get_running_loop().create_task(late)
                await asyncio.Event().wait()
            info = await self._store.put(key, data, crc32c=crc32c, condition=condition)
            if self._on_put is not None:
                self._on_put(key)
            if refusal:
                raise PreconditionFailed(f"put {key}: 412, the object has another version", key=key)
            return info

        def detach() -> Callable[[], Awaitable[ObjectInfo]]:
            data = os.pread(body.fd, body.size_bytes, body.position) if isinstance(body, FileSlice) else body
            return lambda: effect(data)

        info: ObjectInfo = await self._wire.carry("put", effect, lost=store_unavailable, detach=detach)
        self._tell_time()
        return info

    async def _put_late(self, key: str, data: bytes, crc32c: int, condition: Condition | None) -> None:
        """Store an object some time after its sender was heard last."""
        await asyncio.sleep(LATE_SECONDS)
        with suppress(PreconditionFailed):
            await self._store.put(key, data, crc32c=crc32c, condition=condition)
            if self._on_put is not None:
                self._on_put(key)

    async def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Return a whole object."""
        return await self._carry("get", lambda: self._store.get(key))

    async def get_range(self, key: str, *, position: int, size_bytes: int) -> bytes:
        """Return the bytes of a range."""
        return await self._carry(
            "get_range", lambda: self._store.get_range(key, position=position, size_bytes=size_bytes)
        )

    async def head(self, key: str) -> ObjectInfo:
        """Return the store's information on an object."""
        return await self._carry("head", lambda: self._store.head(key))

    async def list_page(self, prefix: str, *, start_after: str | None = None, limit: int = 1000) -> ListPage:
        """Return one page of a listing."""
        return await self._carry(
            "list_page", lambda: self._store.list_page(prefix, start_after=start_after, limit=limit)
        )

    async def delete_many(self, keys: Sequence[str]) -> None:
        """Delete objects."""

        async def effect() -> None:
            await self._store.delete_many(keys)

        detach = (lambda: effect) if self._deletes_late else None
        await self._wire.carry(
            "delete_many", effect, lost=lambda name, _: store_unavailable(name), detach=detach
        )
        self._tell_time()

    async def join(
        self, key: str, sources: Sequence[JoinSource], *, crc32c: int, condition: Condition | None = None
    ) -> Joined | None:
        """Join several objects into one. After a request that was given up this may still happen later."""

        async def effect() -> Joined | None:
            return await self._store.join(key, sources, crc32c=crc32c, condition=condition)

        return await self._wire.carry("join", effect, lost=store_unavailable, detach=lambda: effect)

    async def close(self) -> None:
        """Do nothing, as others may use the bucket."""

    async def _carry(self, operation: str, effect: Callable[[], Awaitable[Any]]) -> Any:
        # Reads change nothing, so their outcome is never unknown. A lost answer is an ordinary error.
        answer = await self._wire.carry(
            operation, effect, lost=lambda name, _: store_unavailable(name), detach=None
        )
        self._tell_time()
        return answer
