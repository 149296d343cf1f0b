"""
Puts that leave the right bytes in the store, even if the store ignores checksums.

A put announces the CRC32C of its bytes, and a store compares it with the bytes that arrive. Some
S3-compatible stores ignore the announcement: a bit that flips on the way is stored, and the local copy
is trimmed although the object is wrong. No such store says so. So each process tries the store once
before it stores anything: the store must refuse an object with a wrong checksum. If the store accepts
that object, every later put is read back.

A checksum in the response to a put is compared in any case.

`require_conditional_writes` tries at the start whether a store honours conditional writes. Conditions
alone keep two writers apart. A store that ignores them answers every write with success: nothing looks
wrong until a manifest has lost segments. Some emulators, gateways and older stores do so without saying
so, hence the trial.

`create` creates an object unless it exists, and believes a refusal only where it can read the object. A
store may refuse a write that collided with another one although neither took effect. A caller that
trusted such a refusal would go on without the object, and report success. It can replace an object that
arrived damaged: a put of which only the read-back failed leaves one behind, and its caller tries again.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from dataclasses import replace
from typing import Final

import structlog
from crc32c import crc32c
from crc32c import crc32c as crc32c_of

from tieringd.errors import (
    BucketNotFound,
    ChecksumRejected,
    ConfigError,
    ObjectNotFound,
    PreconditionFailed,
    StorageDenied,
    StorageError,
    StorageUnavailable,
    StoreFull,
)
from tieringd.storage.base import (
    Body,
    Condition,
    FileSlice,
    IfAbsent,
    IfVersion,
    ObjectInfo,
    ObjectStore,
    TriedStore,
)

log = structlog.get_logger(__name__)

PROBE_PREFIX: Final = "tieringd-probe/"
"""Prefix of the objects that try the store. A leftover object below it has no meaning."""

_TRIES: Final = 3
"""How often the bytes are sent before a put fails because the store keeps other bytes."""
_READ_BYTES: Final = 8 << 20
_TRIAL: Final = b"tieringd sends a wrong checksum with these bytes"

_HINT = (
    "choose a store with conditional writes. If only one daemon will ever write to this bucket and prefix, "
    "cloud_storage_single_writer accepts this store; with a second writer, data would then be lost "
    "unnoticed"
)


async def create(
    store: ObjectStore, key: str, body: Body, *, crc32c: int, replaces_damaged: bool = False
) -> bool:
    """
    Store an object unless one with *key* exists. Return whether it was stored.

    Either way the object exists afterwards. With *replaces_damaged* every writer of *key* sends the same
    bytes, if it sends as many. In a store that compares no checksums, an existing object with as many but
    other bytes was damaged on the way then, and is replaced.

    Raises:
        StorageUnavailable: The store refused to create it, and does not have it: try again.
        StorageError: As in `ObjectStore.put`.
    """
    try:
        await store.put(key, body, crc32c=crc32c, condition=IfAbsent())
    except PreconditionFailed as refusal:
        try:
            found = await store.head(key)
            if not (replaces_damaged and await _is_damaged(store, found, body, crc32c)):
                return False
        except ObjectNotFound:
            raise StorageUnavailable(
                f"the store refused to create {key} because it exists, but reading it finds no such object"
            ) from refusal
        await _replace(store, found, body, crc32c)
    return True


async def _is_damaged(store: ObjectStore, found: ObjectInfo, body: Body, crc32c: int) -> bool:
    if not (isinstance(store, TriedStore) and store.reads_back) or found.size_bytes != _size_of(body):
        return False
    return await _stored_crc32c(store, found.key, found.size_bytes) != crc32c


async def _replace(store: ObjectStore, found: ObjectInfo, body: Body, crc32c: int) -> None:
    log.error("the object store has other bytes than it was sent: they are replaced", key=found.key)
    try:
        await store.put(found.key, body, crc32c=crc32c, condition=IfVersion(found.version))
    except PreconditionFailed as error:
        raise StorageUnavailable(f"{found.key} was damaged, and another writer replaced it") from error


class CheckedPuts:
    """
    The puts of one store. Cancelling one is safe: an object is stored whole, right or wrong, or not at all.

    Until `find_out` has returned, it is unknown whether the store compares checksums. A caller that does
    not call it trusts the store.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._trial_key = PROBE_PREFIX + secrets.token_hex(8)
        self.reads_back = False
        """Whether each object is read back, because the store does not compare checksums."""

    async def find_out(self) -> None:
        """
        Send an object with a wrong checksum. If the store accepts it, read back every put from now on.

        Raises:
            BucketNotFound: There is no bucket.
            StorageDenied: The store forbids writing or deleting.
            StorageUnavailable: The store does not answer, so nothing is known.
            StoreFull: The store has no room.
        """
        try:
            await self._store.put(self._trial_key, _TRIAL, crc32c=crc32c_of(_TRIAL) ^ 1)
        except (BucketNotFound, StorageDenied, StoreFull):
            raise
        except StorageError:
            # Whatever its words, the store refused the bytes.
            return
        self.reads_back = True
        log.warning(
            "the object store does not compare checksums: each object is read back after it was stored",
            hint="this doubles the traffic. Use a store that compares x-amz-checksum-crc32c",
        )
        await self._store.delete_many([self._trial_key])

    async def put(
        self, key: str, body: Body, *, crc32c: int, condition: Condition | None = None
    ) -> ObjectInfo:
        """
        Store an object as `ObjectStore.put` does. If the store then holds other bytes, send them again.

        Raises:
            ChecksumRejected: The bytes have another checksum, or the store kept other bytes each time.
            StorageUnavailable: With `outcome_unknown` set when an object is stored, and cannot be read back
                or replaced.
        """
        info = await self._store.put(key, body, crc32c=crc32c, condition=condition)
        size_bytes = _size_of(body)
        for tried in range(1, _TRIES + 1):
            if await self._is_right(info, size_bytes=size_bytes, crc32c=crc32c):
                return replace(info, crc32c=crc32c)
            log.error("the object store has other bytes than it was sent", key=key, tries=tried)
            if tried < _TRIES:
                # A conditional put replaces only the object that it has just stored.
                again = None if condition is None else IfVersion(info.version)
                try:
                    info = await self._store.put(key, body, crc32c=crc32c, condition=again)
                except StorageUnavailable as error:
                    # Begun anew, a conditional put would fail against its own damaged object.
                    raise _in_doubt(
                        f"put {key}: the store has other bytes than it was sent, and got no others: {error}",
                        error,
                    ) from error
        raise ChecksumRejected(
            f"put {key}: the store kept other bytes than it was sent, {_TRIES} times in a row",
            key=key,
            hint="Check the network and the store's disks for damage. The damaged object is not used",
        )

    async def _is_right(self, info: ObjectInfo, *, size_bytes: int, crc32c: int) -> bool:
        """Return whether the store has the right bytes: by its checksum, and by reading back where needed."""
        if info.crc32c is not None and info.crc32c != crc32c:
            return False
        if not self.reads_back:
            return True
        try:
            found = await self._store.head(info.key)
            return (
                found.size_bytes == size_bytes
                and await _stored_crc32c(self._store, info.key, size_bytes) == crc32c
            )
        except (ObjectNotFound, StorageUnavailable) as error:
            raise _in_doubt(
                f"put {info.key}: the object could not be read back for comparison: {error}", error
            ) from error


def _in_doubt(text: str, error: ObjectNotFound | StorageUnavailable) -> StorageUnavailable:
    """Return the error of a put that has stored an object, right or wrong, before *error* ended it."""
    return StorageUnavailable(
        text,
        outcome_unknown=True,
        retry_after_seconds=error.retry_after_seconds if isinstance(error, StorageUnavailable) else None,
        is_throttling=isinstance(error, StorageUnavailable) and error.is_throttling,
    )


def _size_of(body: Body) -> int:
    return body.size_bytes if isinstance(body, FileSlice) else len(body)


async def _stored_crc32c(store: ObjectStore, key: str, size_bytes: int) -> int:
    checksum = 0
    for position in range(0, size_bytes, _READ_BYTES):
        data = await store.get_range(
            key, position=position, size_bytes=min(_READ_BYTES, size_bytes - position)
        )
        checksum = await asyncio.to_thread(crc32c_of, data, checksum)
    return checksum


async def require_conditional_writes(store: ObjectStore, *, second: ObjectStore | None = None) -> None:
    """
    Return when *store* honours conditions. A small object is written, replaced and deleted.

    With *second*, another opening of the same store, the two take turns: each must see at once what the
    other wrote.

    Raises:
        ConfigError: The store ignores or rejects conditions.
        StorageUnavailable: The store does not answer, so nothing is known.
        StorageDenied: The store forbids writing or deleting.
        BucketNotFound: There is no bucket.
    """
    key = PROBE_PREFIX + secrets.token_hex(8)
    try:
        await _try_conditions(store, second or store, key)
    except (ConfigError, StorageError, StorageUnavailable):
        # The reason matters more than a small object that is left behind.
        with suppress(StorageError, StorageUnavailable):
            await store.delete_many([key])
        raise
    await store.delete_many([key])


async def _try_conditions(store: ObjectStore, second: ObjectStore, key: str) -> None:
    first = await _put(store, key, b"1", IfAbsent())
    if first is None:
        raise ConfigError(
            f"the object store refused to create the new object {key}, as if it existed", hint=_HINT
        )
    if await _put(second, key, b"2", IfAbsent()) is not None:
        raise ConfigError(
            "the object store ignores the condition of a write: it replaced an object that was only to be "
            "created",
            hint=_HINT,
        )
    if await _put(second, key, b"3", IfVersion(first.version)) is None:
        raise ConfigError(
            "the object store refused a conditional write with the version that it returned for the object",
            hint=_HINT,
        )
    if await _put(store, key, b"4", IfVersion(first.version)) is not None:
        raise ConfigError(
            "the object store ignores the condition of a write: it replaced an object although its version "
            "had changed",
            hint=_HINT,
        )


async def _put(store: ObjectStore, key: str, data: bytes, condition: Condition) -> ObjectInfo | None:
    """Return the object that was stored, or None when the condition did not hold."""
    try:
        return await store.put(key, data, crc32c=crc32c(data), condition=condition)
    except PreconditionFailed:
        return None
    except (BucketNotFound, StorageDenied, StoreFull):
        raise
    except StorageError as error:
        raise ConfigError(
            f"the object store does not support conditional writes: {error}", hint=_HINT
        ) from error
