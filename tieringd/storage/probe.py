"""
Whether a store keeps its word on conditional writes, found out at start by trying.

Two writers are kept apart by conditions alone. A store that ignores them answers every write
with success: nothing would ever look wrong until a manifest had lost segments. Some emulators,
gateways and older stores do so, and none of them says it, hence the trial.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import TYPE_CHECKING

from crc32c import crc32c

from tieringd.errors import (
    BucketNotFound,
    ConfigError,
    PreconditionFailed,
    StorageDenied,
    StorageError,
    StorageUnavailable,
    StoreFull,
)
from tieringd.storage.base import IfAbsent, IfVersion
from tieringd.storage.checked_puts import PROBE_PREFIX

if TYPE_CHECKING:
    from tieringd.storage.base import Condition, ObjectInfo, ObjectStore

_HINT = (
    "choose a store with conditional writes. If only one daemon will ever write to this bucket and prefix, "
    "cloud_storage_single_writer accepts this store; a second writer would then lose data without a word"
)


async def require_conditional_writes(store: ObjectStore, *, second: ObjectStore | None = None) -> None:
    """
    Return when *store* honours conditions. A small object is written, replaced and deleted.

    With *second*, another opening of the same store, the two take turns: each must see at once what
    the other has written.

    Raises:
        ConfigError: The store ignores conditions or does not take them.
        StorageUnavailable: It is away, so nothing is known.
        StorageDenied: It forbids to write or to delete.
        BucketNotFound: There is no bucket.
    """
    key = PROBE_PREFIX + secrets.token_hex(8)
    try:
        await _try_conditions(store, second or store, key)
    except (ConfigError, StorageError, StorageUnavailable):
        # The reason matters more than a small object that stays behind.
        with suppress(StorageError, StorageUnavailable):
            await store.delete_many([key])
        raise
    await store.delete_many([key])


async def _try_conditions(store: ObjectStore, second: ObjectStore, key: str) -> None:
    first = await _put(store, key, b"1", IfAbsent())
    if first is None:
        raise ConfigError(f"the object store refused to create {key}, saying that it exists", hint=_HINT)
    if await _put(second, key, b"2", IfAbsent()) is not None:
        raise ConfigError("the object store replaces objects that were to be created only", hint=_HINT)
    if await _put(second, key, b"3", IfVersion(first.version)) is None:
        raise ConfigError("the object store does not know the version that it gave an object", hint=_HINT)
    if await _put(store, key, b"4", IfVersion(first.version)) is not None:
        raise ConfigError(
            "the object store replaces objects whatever version the writer has read", hint=_HINT
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
        raise ConfigError(f"the object store takes no conditional writes: {error}", hint=_HINT) from error
