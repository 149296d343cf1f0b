"""
Creating an object unless there is one: a refusal is believed only where the object is seen.

A store may refuse a write that met another one although neither took effect. A caller that took this for "it
is there" would go on without the object, and report success.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieringd.errors import ObjectNotFound, PreconditionFailed, StorageUnavailable
from tieringd.storage.base import IfAbsent

if TYPE_CHECKING:
    from tieringd.storage.base import Body, ObjectStore


async def create(store: ObjectStore, key: str, body: Body, *, crc32c: int) -> bool:
    """
    Store an object unless there is one with *key*; say whether it was stored. Either way it is there then.

    Raises:
        StorageUnavailable: The store refused to create it, and does not have it: try again.
        StorageError: As `ObjectStore.put` has it.
    """
    try:
        await store.put(key, body, crc32c=crc32c, condition=IfAbsent())
    except PreconditionFailed as refusal:
        try:
            await store.head(key)
        except ObjectNotFound:
            raise StorageUnavailable(
                f"the store refused to create {key}, saying that it exists, and does not have it"
            ) from refusal
        return False
    return True
