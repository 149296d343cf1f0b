"""
The archiver: one partition's closed segments into the bucket, and out of the local log.

A step is observe, decide, act, record. The order of effects is data, index, manifest, trim:
a crash after any of them loses nothing, and leaves at most objects that nobody names.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from tieringd.errors import (
    CorruptDataError,
    FencedError,
    TieringError,
)
from tieringd.formats.record_batch import OldMagicError
from tieringd.model.manifest import Gap, PartitionManifest
from tieringd.policies.upload import UploadLimits, UploadPlan, admissible_prefix, plan_uploads
from tieringd.services.trimmer import Trimmer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tieringd.broker.base import Broker
    from tieringd.metrics import Metrics
    from tieringd.model.local_log import LocalLog
    from tieringd.model.partition import Leadership
    from tieringd.model.segment import LocalSegment
    from tieringd.services.manifest_store import ManifestStore, StoredManifest
    from tieringd.services.observation import Observation
    from tieringd.services.remote_log import CopiedSegment, RemoteLog

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did and what it left."""

    uploaded: int = 0
    trimmed: int = 0
    gaps: int = 0
    pending_segments: int = 0
    """Eligible segments that are still to be uploaded."""
    fault: str = ""
    """What holds the partition back until someone acts; empty when nothing does."""
    needs_another_look: bool = False
    """Offsets are missing on disk; the next observation decides whether they are a gap."""

    @property
    def made_progress(self) -> bool:
        """
        Say whether another step on the same observation may find more to do.

        A trim ends an observation: its files are not all there any more.
        """
        return (self.uploaded > 0 or self.gaps > 0) and not self.trimmed


@dataclass(frozen=True, slots=True)
class _Quarantine:
    """A segment whose bytes are corrupt, remembered by identity: other bytes are looked at anew."""

    base_offset: int
    identity: tuple[int, int, int]
    fault: str


class Archiver:
    """
    Keep one partition's remote log up to date with its local log, under one leader epoch.

    Owned by the reconciler. `step` is called by one task at a time, and may be cancelled at
    any await: what is known of the bucket changes only after the bucket did. A `FencedError`
    ends the archiver's life.
    """

    def __init__(
        self,
        leadership: Leadership,
        *,
        broker: Broker,
        remote_log: RemoteLog,
        manifests: ManifestStore,
        metrics: Metrics,
        limits: UploadLimits,
        now_ms: Callable[[], int],
    ) -> None:
        self._leadership = leadership
        self._partition = leadership.partition
        self._remote_log = remote_log
        self._manifests = manifests
        self._metrics = metrics
        self._limits = limits
        self._now_ms = now_ms
        self._log = log.bind(
            topic=leadership.partition.topic,
            partition=leadership.partition.partition,
            leader_epoch=leadership.leader_epoch,
        )
        self._stored: StoredManifest | None = None
        self._quarantine: _Quarantine | None = None
        self._missing_seen_at: int | None = None
        self._trimmer = Trimmer(
            leadership.partition, broker=broker, remote_log=remote_log, metrics=metrics, now_ms=now_ms
        )

    @property
    def quarantine_fault(self) -> str:
        """Return why the partition is quarantined; empty when it is not."""
        return self._quarantine.fault if self._quarantine else ""

    @property
    def manifest(self) -> PartitionManifest | None:
        """Return the manifest as last read or written; None before the first commit."""
        return self._stored.manifest if self._stored else None

    async def step(self, seen: Observation) -> StepResult:
        """
        Upload one batch of eligible segments, commit them, then trim what is durable.

        Raises:
            FencedError: Another writer owns the partition now.
            RetryableError: Nothing is wrong with the data; what could be committed has been.
            CorruptDataError: The stored manifest is damaged.
        """
        stored = await self._current()
        plan = self._plan(stored, seen)
        self._lift_quarantine(seen.log)
        segments = self._not_quarantined(plan.segments)

        stored, gaps, plan_holds = await self._record_missing(stored, plan, seen)
        uploaded, failure = 0, None
        if plan_holds:
            stored, uploaded, skipped, failure = await self._upload(stored, segments, seen)
            gaps += skipped
        trimmed = 0
        if failure is None and self._quarantine is None:
            trimmed = await self._trimmer.trim(stored.manifest, seen) if stored.manifest else 0
        pending = self._publish(stored, seen)
        if isinstance(failure, TieringError):
            raise failure
        return StepResult(
            uploaded=uploaded,
            trimmed=trimmed,
            gaps=gaps,
            pending_segments=pending,
            fault=self.quarantine_fault,
            needs_another_look=bool(plan.segments) and not plan_holds,
        )

    async def _current(self) -> StoredManifest:
        """Return the manifest this archiver acts on: its own last write, or a fresh read."""
        if self._stored is None:
            stored = await self._manifests.load(self._partition)
            owner = stored.manifest
            if owner is not None and owner.leader_epoch > self._leadership.leader_epoch:
                raise FencedError(
                    f"leader epoch {owner.leader_epoch} owns the manifest of {self._partition}, and this "
                    f"broker leads it since epoch {self._leadership.leader_epoch} only"
                )
            self._stored = stored
        return self._stored

    def _plan(self, stored: StoredManifest, seen: Observation) -> UploadPlan:
        return plan_uploads(
            seen.log,
            seen.bounds,
            next_offset=stored.manifest.next_offset if stored.manifest else None,
            limits=self._limits,
        )

    async def _record_missing(
        self, stored: StoredManifest, plan: UploadPlan, seen: Observation
    ) -> tuple[StoredManifest, int, bool]:
        """
        Record offsets that left the disk before they were copied.

        A gap in the archive is for ever, so it takes two looks, and data to follow it. Returns
        the stored manifest, the gaps recorded, and whether the plan may be acted on.
        """
        missing = plan.missing
        if missing is None or not plan.segments:
            self._missing_seen_at = None
            return stored, 0, missing is None
        if self._missing_seen_at != missing.last_offset:
            self._missing_seen_at = missing.last_offset
            self._log.warning(
                "local log begins after the archive's end; looking again before a gap is recorded",
                archive_next_offset=missing.base_offset,
                local_first_offset=missing.last_offset + 1,
                path=seen.log.partition.path,
            )
            return stored, 0, False
        stored = await self._commit_gap(
            stored,
            missing.base_offset,
            missing.last_offset,
            "the broker removed these offsets before they were copied",
        )
        return stored, 1, True

    async def _commit_gap(
        self, stored: StoredManifest, base_offset: int, last_offset: int, reason: str
    ) -> StoredManifest:
        manifest = stored.manifest or PartitionManifest.begin(self._partition, start_offset=base_offset)
        gap = Gap(base_offset, last_offset, reason, self._now_ms())
        stored = await self._commit(stored, manifest.with_gap(gap))
        self._metrics.gaps.labels(self._partition.topic).inc()
        self._log.error(
            "gap recorded in the archive", base_offset=base_offset, last_offset=last_offset, reason=reason
        )
        return stored

    async def _upload(
        self, stored: StoredManifest, segments: Sequence[LocalSegment], seen: Observation
    ) -> tuple[StoredManifest, int, int, TieringError | None]:
        """
        Copy *segments* side by side and commit the longest prefix that succeeded.

        Returns the stored manifest, the segments committed, the gaps recorded for segments that
        can never be copied, and the failure that ended the prefix.
        """
        if not segments:
            return stored, 0, 0, None
        outcomes = await self._copy_all(segments, seen)
        copies = [outcome if not isinstance(outcome, TieringError) else None for outcome in outcomes]
        manifest = stored.manifest or PartitionManifest.begin(
            self._partition, start_offset=segments[0].base_offset
        )
        count = admissible_prefix(
            [copy.remote if copy else None for copy in copies], next_offset=manifest.next_offset
        )
        admitted = [copy for copy in copies[:count] if copy is not None]
        if admitted:
            epochs = [epoch for copy in admitted for epoch in copy.index.epochs]
            stored = await self._commit(stored, manifest.appended([copy.remote for copy in admitted], epochs))
            self._note_uploads(admitted)
        failure = next((one for one in outcomes[count:] if isinstance(one, TieringError)), None)
        if isinstance(failure, OldMagicError):
            old = segments[count]
            assert old.next_offset is not None, "only closed segments are planned"
            stored = await self._commit_gap(
                stored, old.base_offset, old.next_offset - 1, "message format v0/v1 is not archived"
            )
            return stored, count, 1, None
        if isinstance(failure, CorruptDataError):
            self._enter_quarantine(segments[count], failure)
            return stored, count, 0, None
        return stored, count, 0, failure

    async def _copy_all(
        self, segments: Sequence[LocalSegment], seen: Observation
    ) -> list[CopiedSegment | TieringError]:
        """Copy each segment; a failure is a result, so that its neighbours are still committed."""

        async def copy(segment: LocalSegment) -> CopiedSegment | TieringError:
            try:
                return await self._remote_log.copy_segment(self._leadership, seen.log, segment)
            except TieringError as error:
                return error

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(copy(segment)) for segment in segments]
        return [task.result() for task in tasks]

    async def _commit(self, stored: StoredManifest, manifest: PartitionManifest) -> StoredManifest:
        # Until the answer is known, nothing is known of the bucket: a failure makes the next step read it.
        self._stored = None
        stored = await self._manifests.commit(stored, manifest, leader_epoch=self._leadership.leader_epoch)
        self._stored = stored
        self._metrics.manifest_commits.labels(self._partition.topic).inc()
        return stored

    def _note_uploads(self, copies: Sequence[CopiedSegment]) -> None:
        for copy in copies:
            self._trimmer.note_proved(copy.remote.base_offset, copy.identity)
            self._metrics.uploads.labels(self._partition.topic).inc()
            self._metrics.upload_bytes.labels(self._partition.topic).inc(copy.remote.size_bytes)
            self._log.info(
                "segment durable",
                base_offset=copy.remote.base_offset,
                last_offset=copy.remote.last_offset,
                size_bytes=copy.remote.size_bytes,
            )

    def _enter_quarantine(self, segment: LocalSegment, error: CorruptDataError) -> None:
        self._quarantine = _Quarantine(segment.base_offset, segment.identity, str(error))
        self._metrics.upload_failures.labels(self._partition.topic, type(error).__name__).inc()
        self._log.error(
            "segment is corrupt: the partition is neither uploaded nor trimmed from here on",
            base_offset=segment.base_offset,
            path=segment.path,
            error=str(error),
        )

    def _lift_quarantine(self, local_log: LocalLog) -> None:
        """End the quarantine when the segment is gone or its bytes may have changed."""
        held = self._quarantine
        if held is not None and not any(
            (segment.base_offset, segment.identity) == (held.base_offset, held.identity)
            for segment in local_log.segments
        ):
            self._log.info(
                "quarantined segment has changed; looking at it again", base_offset=held.base_offset
            )
            self._quarantine = None

    def _not_quarantined(self, segments: Sequence[LocalSegment]) -> list[LocalSegment]:
        held = self._quarantine
        return [segment for segment in segments if held is None or segment.base_offset < held.base_offset]

    def _publish(self, stored: StoredManifest, seen: Observation) -> int:
        """Set the partition's gauges from what is true after the step; return what is pending."""
        plan = self._plan(stored, seen)
        labels = (self._partition.topic, str(self._partition.partition))
        manifest = stored.manifest
        next_offset = manifest.next_offset if manifest else seen.bounds.log_start_offset
        gap_offsets = sum(gap.next_offset - gap.base_offset for gap in manifest.gaps) if manifest else 0
        oldest_ns = min((segment.modified_ns for segment in plan.segments), default=None)
        lag_seconds = 0.0 if oldest_ns is None else max(0.0, self._now_ms() / 1000 - oldest_ns / 1e9)
        self._metrics.pending_bytes.labels(*labels).set(plan.pending_bytes)
        self._metrics.pending_segments.labels(*labels).set(plan.pending_segments)
        self._metrics.archiver_pending.labels("kafka", *labels).set(
            max(0, seen.bounds.last_stable_offset - next_offset)
        )
        self._metrics.lag_seconds.labels(*labels).set(lag_seconds)
        self._metrics.next_offset.labels(*labels).set(next_offset)
        self._metrics.gap_offsets.labels(*labels).set(gap_offsets)
        return plan.pending_segments
