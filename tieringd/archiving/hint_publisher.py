"""
The local retention hint of one partition: evaluated when that is due, and stored when it has changed.

When it is due and what it is, is decided in `policies.local_hint`. Only the partition's leader
stores it, with an upload where there is one, and else with a commit of its own.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from tieringd.errors import StorageError, StorageUnavailable
from tieringd.policies.local_hint import plan_hint
from tieringd.policies.local_retention import trim_due_ms

if TYPE_CHECKING:
    from collections.abc import Callable

    from tieringd.archive.manifest_store import StoredManifest
    from tieringd.archiving.claim import Claim
    from tieringd.archiving.observation import Observation
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.partition import TopicIdPartition
    from tieringd.policies.local_hint import HintMemory, HintPlan

log = structlog.get_logger(__name__)

_SEGMENT_BYTES = 1 << 30
"""Of a topic that does not set it: Kafka's default."""


class HintPublisher:
    """Keep the stored hint as local retention has it. Owned by the partition's archiver."""

    def __init__(
        self, partition: TopicIdPartition, *, claim: Claim, ages_ms: Callable[[PartitionManifest], int]
    ) -> None:
        """Take the parts; *ages_ms* returns the time that ages count to."""
        self._claim = claim
        self._ages_ms = ages_ms
        self._log = log.bind(topic=partition.topic, partition=partition.partition)
        self._memory: HintMemory | None = None

    async def step(
        self, stored: StoredManifest, seen: Observation
    ) -> tuple[StoredManifest, PartitionManifest]:
        """
        Evaluate the hint where that is due, and store one that has changed.

        Returns the manifest to trim by as well. While a hint cannot be stored, the lower one of the
        stored and the new one holds: the other may be too high.
        """
        plan = self._plan(stored.existing, seen, self._memory)
        if plan.is_change:
            wanted = stored.existing.with_hint(plan.offset, trims_to=plan.trims_to)
            try:
                stored = await self._claim.commit(stored, wanted)
            except (StorageError, StorageUnavailable) as error:
                self._log.warning("local retention hint cannot be stored", hint=plan.offset, error=str(error))
                hints = (stored.existing.allowed_local_start_offset, plan.offset)
                lower = None if None in hints else min(hint for hint in hints if hint is not None)
                return stored, replace(stored.existing, allowed_local_start_offset=lower)
        self._memory = plan.memory
        return stored, stored.existing

    async def commit_with_hint(
        self, stored: StoredManifest, appended: PartitionManifest, seen: Observation, *, appended_bytes: int
    ) -> StoredManifest:
        """Commit what was uploaded, and the hint that follows from it: one commit for both."""
        plan = self._plan(appended, seen, self._memory and self._memory.noted(appended_bytes))
        if plan.is_change:
            appended = appended.with_hint(plan.offset, trims_to=plan.trims_to)
        stored = await self._claim.commit(stored, appended)
        self._memory = plan.memory
        return stored

    def due_ms(self, manifest: PartitionManifest, seen: Observation) -> float:
        """Return from when on local retention lets more of the log go than the hint says."""
        if not seen.topic.hint_shape.has_hint:
            return math.inf
        return trim_due_ms(
            seen.log,
            manifest,
            seen.topic.local_retention_target,
            log_start_offset=seen.bounds.log_start_offset,
        )

    def _plan(self, manifest: PartitionManifest, seen: Observation, memory: HintMemory | None) -> HintPlan:
        return plan_hint(
            seen.log,
            manifest,
            seen.topic.hint_shape,
            memory,
            stored=manifest.allowed_local_start_offset,
            segment_bytes=seen.topic.segment_bytes or _SEGMENT_BYTES,
            log_start_offset=seen.bounds.log_start_offset,
            now_ms=self._ages_ms(manifest),
            due_ms=self.due_ms(manifest, seen),
        )
