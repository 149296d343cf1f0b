"""
Quarantine: a partition whose local data is corrupt is neither uploaded nor trimmed from there on.

A segment is remembered by its identity: when the file changes, as after the replica was made
anew, it is looked at again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieringd.errors import CorruptDataError
    from tieringd.metrics import Metrics
    from tieringd.model.local_log import LocalLog
    from tieringd.model.partition import TopicIdPartition
    from tieringd.model.segment import LocalSegment, SegmentSlice

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Held:
    base_offset: int
    identity: tuple[int, int, int]
    fault: str


class Quarantine:
    """Hold one partition back at its first corrupt segment. Owned by the partition's archiver."""

    def __init__(self, partition: TopicIdPartition, *, metrics: Metrics) -> None:
        self._held: _Held | None = None
        self._topic = partition.topic
        self._metrics = metrics
        self._log = log.bind(topic=partition.topic, partition=partition.partition)

    @property
    def fault(self) -> str:
        """Return why the partition is held back; empty when it is not."""
        return self._held.fault if self._held else ""

    def enter(self, segment: LocalSegment, error: CorruptDataError) -> None:
        """Hold the partition back at *segment*."""
        self._held = _Held(segment.base_offset, segment.identity, str(error))
        self._metrics.upload_failures.labels(self._topic, type(error).__name__).inc()
        self._log.error(
            "segment is corrupt: the partition is neither uploaded nor trimmed from here on",
            base_offset=segment.base_offset,
            path=segment.path,
            error=str(error),
        )

    def lift(self, local_log: LocalLog) -> None:
        """End the quarantine when the segment is gone or its bytes may have changed."""
        held = self._held
        if held is not None and not any(
            (segment.base_offset, segment.identity) == (held.base_offset, held.identity)
            for segment in local_log.segments
        ):
            self._log.info(
                "quarantined segment has changed; looking at it again", base_offset=held.base_offset
            )
            self._held = None

    def passes(self, slices: Sequence[SegmentSlice]) -> list[SegmentSlice]:
        """Return those of *slices* that lie before the corrupt segment."""
        held = self._held
        return [part for part in slices if held is None or part.segment.base_offset < held.base_offset]
