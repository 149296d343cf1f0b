"""
Consumer groups in the bucket: read, and committed by compare-and-swap.

A commit names the version that it was made from, so of two endpoints that change a group at once one fails,
and decides anew from what the other has written. A commit whose outcome is unknown is looked for: each one
carries the endpoint that made it, and a number.
"""

from __future__ import annotations

from dataclasses import dataclass

from crc32c import crc32c

from tieringd.errors import (
    CorruptDataError,
    ObjectNotFound,
    ObjectTooLarge,
    PreconditionFailed,
    StorageUnavailable,
)
from tieringd.formats.group_documents import (
    decode_group,
    encode_group,
    group_key,
    groups_prefix,
    parse_group_key,
)
from tieringd.model.consumer_group import ConsumerGroup, StoredGroup
from tieringd.storage.base import IfAbsent, IfVersion, ObjectStore
from tieringd.storage.listing import list_objects
from tieringd.storage.threads import in_thread_if_large


@dataclass(frozen=True, slots=True)
class GroupVersion:
    """A group, and the version of its object."""

    group: ConsumerGroup
    version: str | None
    """None where there is no object."""


class GroupStore:
    """The groups of one cluster. *writer_id* is the endpoint's; a process has its own."""

    def __init__(self, store: ObjectStore, *, cluster: str, writer_id: str, max_bytes: int) -> None:
        self._store = store
        self._cluster = cluster
        self._writer_id = writer_id
        self._max_bytes = max_bytes
        self._commits = 0

    async def load(self, group_id: str, known: GroupVersion | None = None) -> GroupVersion:
        """
        Return a group as it is now. Only its version is read if it is still the *known* one.

        Raises:
            CorruptDataError: The object is no group.
            StorageUnavailable: The store does not answer.
        """
        key = group_key(self._cluster, group_id)
        try:
            if known is not None and known.version is not None:
                info = await self._store.head(key)
                if info.version == known.version:
                    return known
            data, info = await self._store.get(key)
        except ObjectNotFound:
            return GroupVersion(ConsumerGroup(group_id), None)
        stored = await in_thread_if_large(len(data), _decoded, data, key)
        return GroupVersion(stored.group, info.version)

    async def commit(self, group: ConsumerGroup, version: str | None) -> GroupVersion:
        """
        Write a group in the place of the one with *version*, durably.

        Raises:
            PreconditionFailed: Another commit was first.
            ObjectTooLarge: The group has more bytes than are allowed.
            StorageUnavailable: The store does not answer. The commit may be there, or come later.
        """
        self._commits += 1
        stored = StoredGroup(group, self._writer_id, self._commits)
        data = await in_thread_if_large(_likely_bytes(group), encode_group, stored)
        key = group_key(self._cluster, group.group_id)
        if len(data) > self._max_bytes:
            raise ObjectTooLarge(
                f"the group {group.group_id} would have {len(data)} bytes; {self._max_bytes} are allowed",
                key=key,
            )
        condition = IfAbsent() if version is None else IfVersion(version)
        try:
            info = await self._store.put(key, data, crc32c=crc32c(data), condition=condition)
        except StorageUnavailable as error:
            if not error.outcome_unknown:
                raise
            return await self._looked_for(stored, key)
        return GroupVersion(group, info.version)

    async def _looked_for(self, stored: StoredGroup, key: str) -> GroupVersion:
        try:
            data, info = await self._store.get(key)
        except ObjectNotFound:
            raise PreconditionFailed("the commit did not arrive", key=key) from None
        found = _decoded(data, key)
        if (found.writer_id, found.commit_number) != (stored.writer_id, stored.commit_number):
            raise PreconditionFailed("the commit did not arrive, or was followed by another", key=key)
        return GroupVersion(found.group, info.version)

    async def versions(self) -> dict[str, str]:
        """
        Return the version of each group's object, by group, deleted groups included.

        Raises:
            StorageUnavailable: The store does not answer.
        """
        found: dict[str, str] = {}
        async for info in list_objects(self._store, groups_prefix(self._cluster)):
            group_id = parse_group_key(self._cluster, info.key)
            if group_id is not None:
                found[group_id] = info.version
        return found


def _likely_bytes(group: ConsumerGroup) -> int:
    return 1024 * len(group.members) + 64 * sum(map(len, group.offsets.values()))


def _decoded(data: bytes, key: str) -> StoredGroup:
    try:
        return decode_group(data)
    except CorruptDataError as error:
        raise error.located(key) from error
