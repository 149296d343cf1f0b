"""
The follower: keeps the manifests of partitions that other brokers lead fresh enough to take over.

A new leader then asks the store for one manifest's version, and not for its history. What a
follower knows may only make this daemon more careful: it never trims, deletes or uploads by it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from tieringd.errors import CorruptDataError, TieringError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from tieringd.archive.manifest_store import ManifestStore, StoredManifest
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.partition import TopicIdPartition

log = structlog.get_logger(__name__)

REFRESH_INTERVAL_MS = 60_000
"""How old a follower's copy may become before it is looked at again."""
REFRESHES_PER_STEP = 200
"""Requests of one step, so that ten thousand followed partitions cost a steady trickle."""


class Follower:
    """The followed manifests of one daemon. One task at a time calls `step`; `take` may run any time."""

    def __init__(self, manifests: ManifestStore, *, steady_ms: Callable[[], int]) -> None:
        """Take the parts; *steady_ms* returns milliseconds that only pass."""
        self._manifests = manifests
        self._steady_ms = steady_ms
        self._known: dict[TopicIdPartition, StoredManifest] = {}
        self._looked_at_ms: dict[TopicIdPartition, int] = {}

    def manifest(self, partition: TopicIdPartition) -> PartitionManifest | None:
        """Return a partition's manifest as last seen; None when none was."""
        known = self._known.get(partition)
        return known.manifest if known else None

    def take(self, partition: TopicIdPartition) -> StoredManifest | None:
        """Return what is known of a partition that this broker leads from now on."""
        return self._known.get(partition)

    async def step(self, followed: Collection[TopicIdPartition]) -> int:
        """Look again at those of *followed* whose copy is oldest; return how many were looked at."""
        for gone in self._looked_at_ms.keys() - set(followed):
            del self._looked_at_ms[gone]
            self._known.pop(gone, None)
        now_ms = self._steady_ms()
        due = [
            one
            for one in followed
            if now_ms - self._looked_at_ms.get(one, -REFRESH_INTERVAL_MS) >= REFRESH_INTERVAL_MS
        ]
        due.sort(key=lambda one: self._looked_at_ms.get(one, 0))
        looked_at = 0
        for partition in due[:REFRESHES_PER_STEP]:
            try:
                known = self._known.get(partition)
                self._known[partition] = (
                    await self._manifests.refreshed(partition, known)
                    if known
                    else await self._manifests.load(partition)
                )
            except CorruptDataError as error:
                log.error("followed manifest is damaged", partition=str(partition), error=str(error))  # noqa: TRY400 its text is enough
            except TieringError as error:
                log.warning("followed manifests are not fresh", partition=str(partition), error=str(error))
                break
            self._looked_at_ms[partition] = now_ms
            looked_at += 1
        return looked_at
