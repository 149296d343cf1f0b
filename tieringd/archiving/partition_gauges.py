"""The gauges of one partition, set from what is true after each step of its archiver."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tieringd.archiving.observation import Observation
    from tieringd.metrics import Metrics
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.partition import TopicIdPartition
    from tieringd.policies.upload import UploadPlan


class PartitionGauges:
    """Publish how one partition stands. It remembers since when a transaction holds it back."""

    def __init__(self, partition: TopicIdPartition, *, metrics: Metrics) -> None:
        self._labels = (partition.topic, str(partition.partition))
        self._metrics = metrics
        self._held_at: tuple[int, int] | None = None
        """The last stable offset that holds a closed segment back, and since when, by the steady clock."""

    def publish(
        self,
        manifest: PartitionManifest,
        seen: Observation,
        plan: UploadPlan,
        *,
        seconds_to_loss: float,
        now_ms: int,
        steady_ms: int,
    ) -> None:
        """Set every gauge; *plan* is what is left to be uploaded, and *now_ms* is of the files' clock."""
        metrics, labels = self._metrics, self._labels
        waiting = [part.segment for part in plan.slices if not part.is_open]
        oldest_ns = min((segment.modified_ns for segment in waiting), default=None)
        lag_seconds = 0.0 if oldest_ns is None else max(0.0, now_ms / 1000 - oldest_ns / 1e9)
        metrics.pending_bytes.labels(*labels).set(plan.pending_bytes)
        metrics.pending_segments.labels(*labels).set(plan.pending_segments)
        metrics.archiver_pending.labels("kafka", *labels).set(
            max(0, seen.bounds.last_stable_offset - manifest.next_offset)
        )
        metrics.lag_seconds.labels(*labels).set(lag_seconds)
        metrics.seconds_to_loss.labels(*labels).set(seconds_to_loss)
        metrics.held_seconds.labels(*labels).set(self._held_seconds(plan, seen, steady_ms))
        metrics.next_offset.labels(*labels).set(manifest.next_offset)
        metrics.start_offset.labels(*labels).set(manifest.start_offset)
        metrics.gap_offsets.labels(*labels).set(manifest.gap_offsets)

    def _held_seconds(self, plan: UploadPlan, seen: Observation, steady_ms: int) -> float:
        """Return for how long a closed segment has waited at the same last stable offset."""
        if not plan.held_by_transaction:
            self._held_at = None
            return 0.0
        stable = seen.bounds.last_stable_offset
        if self._held_at is None or self._held_at[0] != stable:
            self._held_at = (stable, steady_ms)
        return (steady_ms - self._held_at[1]) / 1000
