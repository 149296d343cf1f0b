"""
Recording gaps: offsets that left the disk before they were copied, and what can never be copied.

A gap in the archive is for ever, so what is only missing takes two looks, and data to follow it. Two looks
are two numbers (`Observation.look`): however often one look is acted on, it says the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from tieringd.model.manifest_parts import Gap

if TYPE_CHECKING:
    from collections.abc import Callable

    from tieringd.archive.manifest_store import StoredManifest
    from tieringd.archiving.claim import Claim
    from tieringd.archiving.observation import Observation
    from tieringd.model.partition import TopicIdPartition
    from tieringd.policies.upload import MissingRange, UploadPlan

log = structlog.get_logger(__name__)


class GapRecorder:
    """Record the gaps of one partition. Owned by its archiver, used within its step."""

    def __init__(self, partition: TopicIdPartition, *, claim: Claim, now_ms: Callable[[], int]) -> None:
        self._claim = claim
        self._now_ms = now_ms
        self._log = log.bind(topic=partition.topic, partition=partition.partition)
        self._missed: tuple[int, MissingRange] | None = None
        """What an earlier look missed, with its number."""

    async def record_missing(
        self, stored: StoredManifest, plan: UploadPlan, seen: Observation
    ) -> tuple[StoredManifest, int, bool]:
        """
        Record offsets that left the disk before they were copied, on the second look that misses them.

        Returns the stored manifest, the gaps recorded, and whether the plan may be acted on.
        """
        missing = plan.missing
        if missing is None or not plan.slices:
            self._missed = None
            return stored, 0, missing is None
        if self._missed is None or not _covers(self._missed[1], missing):
            self._missed = (seen.look, missing)
            self._log.warning(
                "local log begins after the archive's end; looking again before a gap is recorded",
                archive_next_offset=missing.base_offset,
                local_first_offset=missing.last_offset + 1,
                path=seen.log.partition.path,
            )
            return stored, 0, False
        if self._missed[0] == seen.look:
            return stored, 0, False
        reason = "the broker removed these offsets before they were copied"
        return await self.record(stored, missing.base_offset, missing.last_offset, reason), 1, True

    async def record(
        self, stored: StoredManifest, base_offset: int, last_offset: int, reason: str
    ) -> StoredManifest:
        """
        Record one gap at the archive's end.

        Raises:
            FencedError: Another writer owns the manifest now.
            StorageUnavailable: The next step looks again.
        """
        gap = Gap(base_offset, last_offset, reason, self._now_ms())
        return await self._claim.commit(stored, stored.existing.with_gap(gap))


def _covers(earlier: MissingRange, missing: MissingRange) -> bool:
    return earlier.base_offset <= missing.base_offset and missing.last_offset <= earlier.last_offset
