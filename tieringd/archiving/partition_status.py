"""
The state of one partition's archiver, as the status page, `run --once` and the metrics tell it.

All three count partitions by `PartitionFault`, so that they agree. `PartitionGauges` sets the gauges of one
partition after each step of its archiver. `OperatorWaitGauge` counts partitions that wait for an operator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from tieringd.archiving.observer import Observation
from tieringd.archiving.operator_case import OperatorWait
from tieringd.metrics import Metrics
from tieringd.metrics.partition_figures import PartitionFigures
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import Leadership, TopicIdPartition, TopicPartition
from tieringd.policies.upload_plan import UploadPlan

_WAITING_TOPICS: Final = 50
_OTHER_TOPICS: Final = "(others)"


class PartitionFault(Enum):
    """What is wrong with a partition, as metrics and the status page name it."""

    CORRUPT = "corrupt"
    """Its local data is damaged."""
    FENCED = "fenced"
    """Another daemon archives it under the same leader epoch."""
    OPERATOR = "operator"
    """It waits because only an operator can decide."""
    STORE = "store"
    """The object store failed."""
    OTHER = "other"
    """A step failed in another way, and is tried again."""


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """The state of one archiver, for the admin page and for `--once`."""

    uploaded: int = 0
    trimmed: int = 0
    pending_segments: int = 0
    fault: str = ""
    waits_because: str = field(default="", compare=False)
    """Why the first segment that is not eligible waits."""
    is_store_fault: bool = False
    """Whether the object store caused the fault, so that other partitions suffer from it as well."""
    operator_wait: OperatorWait | None = field(default=None, compare=False)
    """The case that only an operator can decide; None without one."""
    fault_kind: PartitionFault | None = field(default=None, compare=False)
    """The kind of the fault; None without one."""


@dataclass(frozen=True, slots=True)
class PassResult:
    """The result of one pass over all partitions."""

    statuses: Mapping[Leadership, PartitionStatus]
    problems: Mapping[str, str]
    """What was left out, and why: the pass is incomplete unless this is empty."""


class PartitionGauges:
    """Show the figures of one partition. Remembers since when a transaction holds a segment back."""

    __slots__ = ("_held_at", "_partition", "_table")

    def __init__(self, partition: TopicIdPartition, *, metrics: Metrics) -> None:
        self._partition = partition.topic_partition
        self._table = metrics.partitions
        self._held_at: tuple[int, int] | None = None
        """
        The last stable offset that holds a closed segment back, and since when (milliseconds, steady clock).
        """

    def publish(
        self,
        manifest: PartitionManifest,
        seen: Observation,
        plan: UploadPlan,
        *,
        trim_held_bytes: int,
        seconds_to_loss: float,
        now_ms: int,
        steady_ms: int,
    ) -> None:
        """
        Show every figure.

        *plan* is what is left to upload after the step. *trim_held_bytes* is what only share groups kept from
        the trim. *now_ms* is of this host's wall clock, which also dates the files; *steady_ms* is of a clock
        that is never set back.
        """
        waiting = [part.segment for part in plan.slices if not part.is_open]
        oldest_ns = min((segment.modified_ns for segment in waiting), default=None)
        lag_seconds = 0.0 if oldest_ns is None else max(0.0, now_ms / 1000 - oldest_ns / 1e9)
        self._table.show(
            self._partition,
            PartitionFigures(
                pending_bytes=plan.pending_bytes,
                pending_segments=plan.pending_segments,
                pending_offsets=max(0, seen.bounds.last_stable_offset - manifest.next_offset),
                lag_seconds=lag_seconds,
                seconds_to_loss=seconds_to_loss,
                held_seconds=self._held_seconds(plan, seen, steady_ms),
                held_bytes=plan.held_bytes,
                trim_held_bytes=trim_held_bytes,
                next_offset=manifest.next_offset,
                start_offset=manifest.start_offset,
                gap_offsets=manifest.gap_offsets,
                archived_bytes=manifest.size_bytes,
                archived_segments=manifest.segment_count,
                local_bytes=seen.log.size_bytes,
                local_start_offset=seen.bounds.log_start_offset,
                local_next_offset=seen.bounds.log_end_offset,
            ),
        )

    def _held_seconds(self, plan: UploadPlan, seen: Observation, steady_ms: int) -> float:
        """Return for how long a closed segment has waited at the same last stable offset."""
        if not plan.held_by_transaction:
            self._held_at = None
            return 0.0
        stable = seen.bounds.last_stable_offset
        if self._held_at is None or self._held_at[0] != stable:
            self._held_at = (stable, steady_ms)
        return (steady_ms - self._held_at[1]) / 1000


class OperatorWaitGauge:
    """Show how many partitions wait for an operator, by topic and reason."""

    def __init__(self, metrics: Metrics) -> None:
        self._gauge = metrics.waiting_for_operator
        self._shown: frozenset[tuple[str, str]] = frozenset()
        """The labels that were shown last."""

    def publish(self, waits: Iterable[tuple[TopicPartition, OperatorWait]]) -> None:
        """Show *waits*, the partitions that wait, in the place of those shown before."""
        waiting = bounded_waits(Counter((one.topic, wait.reason.value) for one, wait in waits))
        for gone in self._shown - waiting.keys():
            self._gauge.remove(*gone)
        for labels, partitions in waiting.items():
            self._gauge.labels(*labels).set(partitions)
        self._shown = frozenset(waiting)


def bounded_waits(waiting: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
    """Return *waiting* with its first topics by name, and the others as one: metrics must stay few."""
    topics = sorted({topic for topic, _ in waiting})[:_WAITING_TOPICS]
    found: Counter[tuple[str, str]] = Counter()
    for (topic, reason), partitions in waiting.items():
        found[topic if topic in topics else _OTHER_TOPICS, reason] += partitions
    return found
