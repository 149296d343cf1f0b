"""
The spiller: sees that one partition's live manifest stays near its target size.

The parts are stored first, and then the manifest is committed without them, under our claim as any
other commit. A crash in between leaves objects that nobody names. What spills is decided in
`policies.spillover`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from tieringd.errors import CorruptDataError, StorageError, StorageUnavailable
from tieringd.model.spilling import part_to_spill, spilled
from tieringd.policies.spillover import plan_spillover

if TYPE_CHECKING:
    from tieringd.archive.manifest_store import StoredManifest
    from tieringd.archive.spillover_manifests import SpilloverManifests
    from tieringd.archiving.claim import Claim
    from tieringd.archiving.observation import Observation
    from tieringd.errors import TieringError
    from tieringd.model.partition import TopicIdPartition

log = structlog.get_logger(__name__)


class Spiller:
    """Spill the oldest part of one partition's manifest. Owned by its archiver, used within its step."""

    def __init__(self, partition: TopicIdPartition, *, claim: Claim, spillovers: SpilloverManifests) -> None:
        self._claim = claim
        self._spillovers = spillovers
        self._log = log.bind(topic=partition.topic, partition=partition.partition)
        self._reported = ""

    async def take_back(self, stored: StoredManifest, seen: Observation) -> StoredManifest:
        """
        See that the live manifest tells of all that the local log holds: trimming goes by that.

        A leader before this one may have held less, and spilled more. Where a part cannot be read nothing
        changes: then less is trimmed than could be, and uploads go on.

        Raises:
            FencedError: Another writer owns the manifest now.
            StorageUnavailable: The commit failed.
        """
        manifest, local_offset = stored.existing, _local_offset(seen)
        if local_offset is None or local_offset >= manifest.live_offset:
            return stored
        try:
            wider = await self._spillovers.with_history(manifest, from_offset=local_offset)
        except (StorageError, StorageUnavailable, CorruptDataError) as error:
            self._report(error)
            return stored
        self._reported = ""
        if wider is manifest:
            return stored
        self._log.info(
            "spilled segments taken back into the manifest: the local log holds them",
            local_offset=local_offset,
            live_offset_before=manifest.live_offset,
            live_offset=wider.live_offset,
        )
        return await self._claim.commit(stored, wider)

    def _report(self, error: TieringError) -> None:
        """Say once that a part cannot be read."""
        if str(error) != self._reported:
            self._reported = str(error)
            self._log.error(
                "spilled segments that the local log holds cannot be looked at: they are not trimmed",
                error=str(error),
            )

    async def step(self, stored: StoredManifest, seen: Observation) -> StoredManifest:
        """
        Spill what is too much, where that may go; return what is stored then.

        Raises:
            FencedError: Another writer owns the manifest now.
            StorageUnavailable: At most superfluous objects were stored.
        """
        manifest = stored.existing
        plan = plan_spillover(
            manifest,
            size_bytes=stored.size_bytes,
            target_bytes=seen.topic.target_manifest_bytes,
            local_offset=_local_offset(seen),
        )
        for rows in plan:
            part = part_to_spill(manifest, rows)
            manifest = spilled(manifest, part, await self._spillovers.put(part))
        if not plan:
            return stored
        committed = await self._claim.commit(stored, manifest)
        self._log.info(
            "old segments spilled out of the manifest",
            segments=sum(plan),
            parts=len(plan),
            live_offset=manifest.live_offset,
            manifest_bytes_before=stored.size_bytes,
            manifest_bytes=committed.size_bytes,
        )
        return committed


def _local_offset(seen: Observation) -> int | None:
    """Return the first offset that is on this host, in the log or pinned; None where nothing is."""
    offsets = (seen.log.first_offset, seen.uploadable.first_offset)
    return min((one for one in offsets if one is not None), default=None)
