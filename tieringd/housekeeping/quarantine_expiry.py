"""
What has been in quarantine for long enough is deleted; what a manifest names after all goes back.

A move that was given up leaves its copy there, beside the object: it is dropped where it is the same. That
a named object is in quarantine alone should not happen. Should it, nothing is lost: its copy is there until
this has read the manifests of its partition, and what they name is put back and never deleted.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from tieringd.errors import ChecksumRejected, CorruptDataError, ObjectNotFound
from tieringd.formats.object_keys import owner_of
from tieringd.policies.scrub_orphans import is_named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tieringd.archive.scrub.owners import Owners
    from tieringd.housekeeping.object_quarantine import ObjectQuarantine
    from tieringd.model.partition import TopicIdPartition
    from tieringd.policies.scrub_orphans import Owner

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Expired:
    """What became of what was in quarantine."""

    deleted: tuple[str, ...] = ()
    put_back: tuple[str, ...] = ()
    """Those that are named, and are where they were."""
    left: tuple[tuple[str, str], ...] = ()
    """Keys and reasons."""

    def joined(self, other: Expired) -> Expired:
        """Return both together."""
        return Expired(self.deleted + other.deleted, self.put_back + other.put_back, self.left + other.left)


class QuarantineExpiry:
    """Empty one bucket's quarantine of what has been in it for long enough. Keeps no state."""

    def __init__(self, quarantine: ObjectQuarantine, owners: Owners) -> None:
        self._quarantine = quarantine
        self._owners = owners

    async def expire(
        self, *, before_ms: int, is_ours: Callable[[TopicIdPartition], bool] = lambda _: True
    ) -> Expired:
        """
        Delete what was put into quarantine before a time, of the partitions that are ours.

        Raises:
            StorageUnavailable: Some may be left. Calling again goes on.
        """
        due: defaultdict[TopicIdPartition, list[str]] = defaultdict(list)
        async for one in self._quarantine.objects():
            partition = owner_of(one.key)
            if one.quarantined_at_ms < before_ms and partition is not None and is_ours(partition):
                due[partition].append(one.key)
        expired = Expired()
        for partition, keys in due.items():
            found = await self.delete(partition, keys)
            expired = expired.joined(found)
        await self._quarantine.delete_reports(before_ms=before_ms)
        return expired

    async def delete(self, partition: TopicIdPartition, keys: Iterable[str]) -> Expired:
        """
        Delete objects of one partition from quarantine; those that its manifests name go back instead.

        One that cannot go back is left there, with the reason, and the others go on.

        Raises:
            StorageUnavailable: Some may be left. Calling again goes on.
        """
        owner = await self._owners.owner(partition)
        deleted: list[str] = []
        put_back: list[str] = []
        left: list[tuple[str, str]] = []
        for key in keys:
            doubt = _doubt(owner)
            if is_named(owner, key):
                try:
                    if await self._quarantine.restore(key):
                        log.error("a named object was in quarantine, and is back", key=key)
                    put_back.append(key)
                except (ChecksumRejected, CorruptDataError, ObjectNotFound) as error:
                    log.warning("a named object in quarantine cannot go back", key=key, error=str(error))
                    left.append((key, str(error)))
            elif doubt:
                left.append((key, doubt))
            else:
                deleted.append(key)
        await self._quarantine.delete(deleted)
        for key in deleted:
            log.info("orphan deleted from quarantine", key=key)
        return Expired(tuple(deleted), tuple(put_back), tuple(left))


def _doubt(owner: Owner) -> str:
    """Return why nothing of this owner may be deleted; empty where it may."""
    if owner.uncertain:
        return f"what is named is not known for certain: {owner.uncertain}"
    if owner.is_manifest_missing:
        return "the partition's manifest is missing"
    return ""
