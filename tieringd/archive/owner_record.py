"""
The record of an archive's owners in the bucket: read, claimed by compare-and-swap, and told from the bucket.

`require_two_places` finds out whether two stores are one place under two names, such as a symbolic link, an
address and a host name, or two APIs of one provider. No name tells that, but an object does.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping

import structlog
from crc32c import crc32c

from tieringd.errors import (
    ConfigError,
    CorruptDataError,
    ObjectNotFound,
    PreconditionFailed,
    StorageUnavailable,
)
from tieringd.formats.archive_owners import (
    ARCHIVE_OWNERS_KEY,
    ArchiveOwners,
    decode_archive_owners,
    encode_archive_owners,
)
from tieringd.formats.object_keys import TOPIC_MANIFESTS_PREFIX
from tieringd.policies.archive_ownership import Claimant, admitted, claimed, moved_in
from tieringd.storage.base import IfAbsent, IfVersion, ObjectStore
from tieringd.storage.checked_puts import PROBE_PREFIX

log = structlog.get_logger(__name__)

_TRIES = 5
"""Attempts to write the record. Each lost one means that another process has written it."""
_AFTER_SLASH = "0"
"""The character after `/` in the order of keys."""


class OwnerRecord:
    """The record in *store*; *place* is the archive's address, for people."""

    def __init__(self, store: ObjectStore, *, place: str) -> None:
        self._store = store
        self._place = place

    async def require(self, claimant: Claimant) -> None:
        """
        Check that *claimant* may write to the archive. Nothing is written.

        Raises:
            ConfigError: The archive is that of another cluster or host.
            CorruptDataError: The record cannot be read.
            StorageError: An operator must act.
            StorageUnavailable: The store does not answer.
        """
        owners, _ = await self._read()
        found = await clusters_in(self._store) if owners is None else ()
        claimed(owners, found, claimant, place=self._place)

    async def claim(self, claimant: Claimant) -> None:
        """Record *claimant* as an owner, unless it is one. Raises as `require` does."""
        place = self._place
        await self._change(lambda owners, found: claimed(owners, found, claimant, place=place))

    async def admit(self, claimant: Claimant) -> ArchiveOwners:
        """
        Record *claimant* as an owner, in place of another owner of its cluster.

        Returns:
            The owners before; without a record, the clusters that the bucket has objects of.

        Raises:
            CorruptDataError: The record cannot be read.
            StorageError: An operator must act.
            StorageUnavailable: The store does not answer.
        """
        return await self._change(lambda owners, found: admitted(owners, found, claimant))

    async def admit_moved(self, clusters: Mapping[str, str | None]) -> None:
        """
        Record the owners of topics that are copied into this archive, by cluster.

        Raises:
            ConfigError: The archive has another owner for one of the clusters.
        """
        place = self._place
        await self._change(lambda owners, found: moved_in(owners, found, clusters, place=place))

    async def owners(self) -> ArchiveOwners:
        """Return the recorded owners; without a record, the clusters that the bucket has objects of."""
        owners, _ = await self._read()
        return owners or ArchiveOwners(dict.fromkeys(await clusters_in(self._store)))

    async def _change(
        self, change: Callable[[ArchiveOwners | None, Collection[str]], ArchiveOwners]
    ) -> ArchiveOwners:
        """Write what *change* makes of the record, and return the owners before."""
        for _ in range(_TRIES):
            owners, version = await self._read()
            found = await clusters_in(self._store) if owners is None else ()
            changed = change(owners, found)
            before = owners or ArchiveOwners(dict.fromkeys(found))
            if changed == owners:
                return before
            data = encode_archive_owners(changed)
            condition = IfAbsent() if version is None else IfVersion(version)
            try:
                await self._store.put(ARCHIVE_OWNERS_KEY, data, crc32c=crc32c(data), condition=condition)
            except PreconditionFailed:
                continue
            log.info(
                "the archive's owners are recorded", place=self._place, clusters=dict(changed.of_cluster)
            )
            return before
        raise StorageUnavailable(
            f"{ARCHIVE_OWNERS_KEY} at {self._place} was changed by others {_TRIES} times"
        )

    async def _read(self) -> tuple[ArchiveOwners | None, str | None]:
        """Return the record and its version; None for both without a record."""
        try:
            data, info = await self._store.get(ARCHIVE_OWNERS_KEY)
        except ObjectNotFound:
            return None, None
        try:
            return decode_archive_owners(data), info.version
        except CorruptDataError as error:
            raise CorruptDataError(
                error.message,
                source=ARCHIVE_OWNERS_KEY,
                hint=error.hint or "Delete this object: the daemon makes it anew from what the bucket holds",
            ) from error


async def clusters_in(store: ObjectStore) -> list[str]:
    """Return the clusters of which the bucket has objects, in one request for each and one more."""
    found: list[str] = []
    start_after = None
    while True:
        page = await store.list_page(TOPIC_MANIFESTS_PREFIX, start_after=start_after, limit=1)
        if page.objects:
            start_after = page.objects[0].key
            match start_after.split("/"):
                case ["meta", cluster, _, *_]:
                    found.append(cluster)
                    start_after = f"{TOPIC_MANIFESTS_PREFIX}{cluster}{_AFTER_SLASH}"
        elif page.next_start_after is None:
            return found
        else:
            start_after = page.next_start_after


async def require_two_places(source: ObjectStore, target: ObjectStore, *, names: tuple[str, str]) -> None:
    """
    Return if *source* and *target* are two places. A small object is written to the target, and deleted.

    Raises:
        ConfigError: They are one place. *names*, of source and target, are in the message.
        StorageError: An operator must act.
        StorageUnavailable: A store does not answer.
    """
    key = PROBE_PREFIX + secrets.token_hex(16)
    data = b"tieringd looks for this object in another bucket"
    await target.put(key, data, crc32c=crc32c(data), condition=IfAbsent())
    try:
        await source.head(key)
    except ObjectNotFound:
        return
    finally:
        await target.delete_many([key])
    raise ConfigError(
        f"{names[0]} and {names[1]} are two names of one place: there is nothing to copy",
        hint="Name another bucket or prefix in the configuration that --to names",
    )
