"""
Closing a partition's manifest: from then on no archiver commits to it, whatever it believes to lead.

It is a commit as any other, under an epoch above all that leaders have. Whoever commits after it is fenced,
and what was committed before it is in the version that is returned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieringd.errors import FencedError, StorageUnavailable
from tieringd.model.manifest import CLOSED_EPOCH

if TYPE_CHECKING:
    from tieringd.archive.manifest_store import ManifestStore, StoredManifest
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.partition import TopicIdPartition

CLOSE_TRIES = 16
"""An archiver may commit in between, and again; each time it has uploaded something first."""


async def closed(
    manifests: ManifestStore, partition: TopicIdPartition, *, begin: PartitionManifest | None = None
) -> StoredManifest:
    """
    Close a partition's manifest; return it as it is then. One that is closed already stays as it is.

    Where there is none, *begin* is closed in its place; without that, nothing is done.

    Raises:
        CorruptDataError: It cannot be read.
        StorageUnavailable: Whether it is closed is not known; or archivers were faster, again and again.
    """
    for _ in range(CLOSE_TRIES):
        stored = await manifests.load(partition)
        manifest = stored.manifest or begin
        if manifest is None or (stored.manifest is not None and stored.manifest.is_closed):
            return stored
        try:
            return await manifests.commit(stored, manifest, leader_epoch=CLOSED_EPOCH)
        except FencedError:
            continue  # Somebody else closed it, or took it away.
        except StorageUnavailable as error:
            if error.outcome_unknown or not await _has_changed(manifests, stored, partition):
                raise
    raise StorageUnavailable(f"the manifest of {partition} is being written all the time and was not closed")


async def _has_changed(manifests: ManifestStore, stored: StoredManifest, partition: TopicIdPartition) -> bool:
    """Say whether a commit failed because another one came first, and not because the store is away."""
    return (await manifests.refreshed(partition, stored)).version != stored.version
