"""
Archive retention: one partition's stored segments that are past total retention go, in two steps.

First the manifest no longer names them, and from then on they do not exist for readers. Their
objects follow after a delay, for readers that began before. Each step is a commit under our leader
epoch; a crash between them leaves a manifest that says what is still to be deleted.

What goes, and why the rest stays, is decided in `policies.total_retention`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING

import structlog

from tieringd.policies.total_retention import FirstLook, expiry_due_ms, plan_total_retention

if TYPE_CHECKING:
    from collections.abc import Callable

    from tieringd.metrics import Metrics
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.partition import TopicIdPartition
    from tieringd.services.claim import Claim
    from tieringd.services.manifest_store import StoredManifest
    from tieringd.services.observation import Observation
    from tieringd.services.remote_log import RemoteLog

log = structlog.get_logger(__name__)

DELETED_AT_ONCE_MAX = 500
"""Segments whose objects are deleted in one step: uploads do not wait long behind a large deletion."""


@dataclass(frozen=True, slots=True)
class _Look:
    """When total retention was looked at last, and on what."""

    seen: Observation
    at_ms: int


class ArchiveRetention:
    """
    Keep one partition's archive within its total retention.

    Owned by the partition's archiver and used within its step, after the archive was seen to be on
    the leader's lineage.
    """

    def __init__(
        self,
        partition: TopicIdPartition,
        *,
        claim: Claim,
        remote_log: RemoteLog,
        metrics: Metrics,
        now_ms: Callable[[], int],
    ) -> None:
        self._partition = partition
        self._claim = claim
        self._remote_log = remote_log
        self._metrics = metrics
        self._now_ms = now_ms
        self._log = log.bind(topic=partition.topic, partition=partition.partition)
        self._last: _Look | None = None
        self._first: FirstLook | None = None

    async def step(self, stored: StoredManifest, seen: Observation) -> tuple[StoredManifest, int]:
        """
        Delete objects that are due, then let go of what is past retention; return the segments of both.

        Raises:
            FencedError: Another writer owns the manifest now.
            StorageUnavailable: Another step goes on from here.
        """
        stored, deleted = await self._delete_retired(
            stored, delay_ms=seen.topic.retention_pace.delete_delay_ms
        )
        if self._is_due(stored.existing, seen):
            stored, expired = await self._look(stored, seen)
            return stored, deleted + expired
        return stored, deleted

    def due_ms(self, manifest: PartitionManifest, seen: Observation) -> float:
        """Return from when on a step has something to do, if nothing but the time changes."""
        pace = seen.topic.retention_pace
        retired_at_ms = manifest.retired[0].retired_at_ms if manifest.retired else math.inf
        look_ms = expiry_due_ms(manifest, seen.topic.total, self._first, interval_ms=pace.interval_ms)
        if self._last is None or self._last.seen is not seen:
            look_ms = -math.inf
        if self._last is not None:
            look_ms = max(look_ms, self._last.at_ms + pace.interval_ms)
        return min(retired_at_ms + pace.delete_delay_ms, look_ms)

    def _is_due(self, manifest: PartitionManifest, seen: Observation) -> bool:
        """Say whether it is time for a look; a clock that was set back does not put one off."""
        if not manifest.segments:
            return False
        if self._last is None:
            return True
        passed_ms = self._now_ms() - self._last.at_ms
        return not 0 <= passed_ms < seen.topic.retention_pace.interval_ms

    async def _look(self, stored: StoredManifest, seen: Observation) -> tuple[StoredManifest, int]:
        """Let go of what this look and an earlier one find; return how many segments that were."""
        now_ms, manifest, limits = self._now_ms(), stored.existing, seen.topic.total
        log_start_offset = seen.bounds.log_start_offset
        found = plan_total_retention(
            manifest, seen.log, limits, log_start_offset=log_start_offset, now_ms=now_ms
        )
        first = self._first
        agreed = plan_total_retention(
            manifest,
            seen.log,
            limits,
            log_start_offset=log_start_offset,
            now_ms=now_ms,
            up_to=first.start_offset if first else manifest.start_offset,
        )
        if agreed.segments:
            stored = await self._claim.commit(stored, manifest.expired(agreed.segments, now_ms=now_ms))
            self._metrics.expired.segments.labels(self._partition.topic).inc(agreed.segments)
            self._metrics.expired.size_bytes.labels(self._partition.topic).inc(agreed.size_bytes)
            self._log.info(
                "archived segments are past total retention",
                start_offset=agreed.start_offset,
                segments=agreed.segments,
                size_bytes=agreed.size_bytes,
                objects_go_in_seconds=seen.topic.retention_pace.delete_delay_ms / 1000,
            )
        self._last = _Look(seen, now_ms)
        is_more = found.start_offset > agreed.start_offset
        self._first = FirstLook(found.start_offset, now_ms) if is_more else None
        return stored, agreed.segments

    async def _delete_retired(self, stored: StoredManifest, *, delay_ms: int) -> tuple[StoredManifest, int]:
        """Delete the objects of what left the manifest long enough ago; return how many segments that is."""
        manifest, now_ms = stored.existing, self._now_ms()
        due = [one.segments for one in manifest.retired if one.retired_at_ms + delay_ms <= now_ms]
        # A leader that does not know yet that it was deposed leaves this to its successor.
        if not due or not await self._claim.is_current():
            return stored, 0
        segments = tuple(islice(chain.from_iterable(due), DELETED_AT_ONCE_MAX))
        await self._remote_log.delete_segments(self._partition, segments)
        stored = await self._claim.commit(stored, manifest.forgotten(len(segments)))
        self._metrics.expired.deleted_segments.labels(self._partition.topic).inc(len(segments))
        self._log.info(
            "objects deleted from the archive",
            segments=len(segments),
            size_bytes=sum(segment.size_bytes for segment in segments),
        )
        return stored, len(segments)
