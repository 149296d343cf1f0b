"""
Upload times of one partition's archive, looked up where a wrong clock may have noted them.

A segment whose records are newer than its upload is either dated in the future, or was uploaded while a clock
was wrong. Before such a segment is let go of by age, the store is asked when it took the data object, and
a manifest that says otherwise is corrected. What needs proof is decided in `policies.retention_time`.
"""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import structlog

from tieringd.errors import StorageError, StorageUnavailable
from tieringd.model.redating import with_marks_redated, with_upload_times
from tieringd.model.rewriting import SegmentIdentity
from tieringd.policies.local_retention import plan_trim, trim_due_ms
from tieringd.policies.retention_time import (
    NOTHING_IS_OLD_MS,
    is_impossible,
    needs_proof,
    proven_upload_ms,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tieringd.archive.manifest_store import StoredManifest
    from tieringd.archiving.claim import Claim
    from tieringd.archiving.observation import Observation
    from tieringd.archiving.remote_log import RemoteLog
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.partition import TopicIdPartition
    from tieringd.model.segment import RemoteSegment
    from tieringd.storage.archive_clock import ArchiveClock

log = structlog.get_logger(__name__)

LOOKED_UP_AT_ONCE = 16
REMEMBERED_MAX = 1024
"""Of one partition. Only what is about to go, and the segment after it, is asked for more than once."""


class UploadTimes:
    """Keep one partition's upload times true. Owned by its archiver, and used within its step."""

    def __init__(
        self, partition: TopicIdPartition, *, claim: Claim, remote_log: RemoteLog, clock: ArchiveClock
    ) -> None:
        self._partition = partition
        self._claim = claim
        self._remote_log = remote_log
        self._clock = clock
        self._log = log.bind(topic=partition.topic, partition=partition.partition)
        self._proven: dict[SegmentIdentity, int] = {}
        """When the store took segments; only those that needed proof lately."""
        self._awaits_proof = False

    def ages_ms(self, manifest: PartitionManifest) -> int:
        """Return the time that local ages count to; nothing is old while an upload time awaits proof."""
        return NOTHING_IS_OLD_MS if self._awaits_proof else self._clock.ages_ms(manifest.committed_at_ms)

    async def keep(self, stored: StoredManifest, seen: Observation) -> StoredManifest:
        """
        Correct what local retention rests on, and marks that cannot be; return the manifest as it is then.

        While the store is away nothing is corrected, and nothing local is old.

        Raises:
            FencedError: Another writer owns the manifest now.
        """
        manifest = stored.existing
        ages_ms = self._clock.ages_ms(manifest.committed_at_ms)
        # The clock may be certain again before this step ends: what awaits proof stays all the same.
        self._awaits_proof = ages_ms == NOTHING_IS_OLD_MS
        if self._awaits_proof:
            return stored
        try:
            redated = with_marks_redated(manifest, partial(is_impossible, now_ms=ages_ms), now_ms=ages_ms)
            if redated is not manifest:
                self._log.warning("times in the manifest that cannot be are taken for now")
                stored = await self._claim.commit(stored, redated)
            due = self._locally_due(stored.existing, seen, ages_ms=ages_ms)
            return await self.proven(stored, due, now_ms=ages_ms)
        except (StorageError, StorageUnavailable) as error:
            self._awaits_proof = True
            self._log.warning("upload times cannot be looked up", error=str(error))
            return self._claim.newest(stored)

    async def proven(
        self, stored: StoredManifest, segments: Iterable[RemoteSegment], *, now_ms: int
    ) -> StoredManifest:
        """
        Look up those of *segments*, which are live, that need it; commit what was wrong.

        *now_ms* is a time that is certain.

        Raises:
            FencedError: Another writer owns the manifest now.
            StorageError: An operator must act.
            StorageUnavailable: Nothing is known to have changed.
        """
        wrong = await self.corrections(segments, now_ms=now_ms)
        if not wrong:
            return stored
        manifest = stored.existing
        table = with_upload_times(manifest.segments, wrong)
        return await self._claim.commit(stored, manifest.with_segments(table))

    async def corrections(self, segments: Iterable[RemoteSegment], *, now_ms: int) -> dict[int, int]:
        """
        Return the right upload times of those of *segments* that have wrong ones, by base offset.

        *now_ms* is a time that is certain.

        Raises:
            StorageError: An operator must act.
            StorageUnavailable: The store does not answer.
        """
        doubtful = [one for one in segments if needs_proof(one, now_ms=now_ms)]
        unproven = [one for one in doubtful if SegmentIdentity.of(one) not in self._proven]
        for begin in range(0, len(unproven), LOOKED_UP_AT_ONCE):
            some = unproven[begin : begin + LOOKED_UP_AT_ONCE]
            found = await asyncio.gather(
                *(self._remote_log.stored_at_ms(self._partition, one) for one in some)
            )
            for segment, stored_at_ms in zip(some, found, strict=True):
                # Without its data object a segment is as old as it says: there is nothing left to keep.
                self._proven[SegmentIdentity.of(segment)] = (
                    segment.uploaded_at_ms
                    if stored_at_ms is None
                    else proven_upload_ms(segment, stored_at_ms=stored_at_ms, now_ms=now_ms)
                )
        proven = [(one, self._proven[SegmentIdentity.of(one)]) for one in doubtful]
        wrong = {one.base_offset: time_ms for one, time_ms in proven if time_ms != one.uploaded_at_ms}
        for oldest in list(islice(self._proven, max(0, len(self._proven) - REMEMBERED_MAX))):
            del self._proven[oldest]
        if wrong and unproven:
            self._log.warning(
                "segments were uploaded under a wrong clock; they count from when the store took them",
                segments=len(wrong),
                first_offset=min(wrong),
            )
        return wrong

    def _locally_due(
        self, manifest: PartitionManifest, seen: Observation, *, ages_ms: int
    ) -> Iterable[RemoteSegment]:
        """Yield the stored form of what local retention lets go, and of the first segment that stays."""
        target, log_start_offset = seen.topic.local_retention_target, seen.bounds.log_start_offset
        if target.target_ms is None or not seen.topic.hint_shape.has_hint:
            return
        start_offset = log_start_offset
        due_ms = trim_due_ms(seen.log, manifest, target, log_start_offset=log_start_offset)
        if due_ms <= ages_ms:
            plan = plan_trim(seen.log, manifest, target, log_start_offset=log_start_offset, now_ms=ages_ms)
            for candidate in plan.candidates:
                yield from candidate.pieces
            start_offset = plan.start_offset
        yield from manifest.segments.overlapping(start_offset, start_offset + 1)
