"""
The overview of a daemon: what the status page and `tieringd status` show on one screen.

It is made of the same figures as the metrics, so the two agree. It costs one walk over the partitions, in
the thread that renders the page, and holds only the worst of them, so that its size does not grow.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from tieringd import __version__
from tieringd.archiving.partition_status import PartitionFault, PartitionStatus
from tieringd.archiving.reconciler import Reconciler
from tieringd.daemon.operator_tasks import Seen, Task, tasks
from tieringd.daemon.readiness import GATEWAY_WORKERS, Readiness
from tieringd.daemon.recent_errors import FoldedError, RecentErrors
from tieringd.daemon.workers.worker_pool import WorkerPool
from tieringd.daemon.workers.worker_status import WorkerStatus
from tieringd.metrics import Metrics
from tieringd.metrics.partition_figures import PartitionFigures, by_labels
from tieringd.space.space_manager import SpaceManager
from tieringd.storage.resilient import ResilientStore

MOST_PARTITIONS: Final = 20


@dataclass(frozen=True, slots=True)
class DaemonFacts:
    """What does not change while a daemon runs."""

    store: str
    """The kind of the object store and the bucket's name."""
    broker: str
    started_at: float = field(default_factory=time.monotonic)
    """Start of the daemon, on the clock of `time.monotonic`."""


@dataclass(frozen=True, slots=True)
class PartitionLine:
    """One of the worst partitions."""

    topic: str
    partition: int
    fault: str
    """The kind of its fault; empty without one."""
    because: str
    """The fault in words, or what the partition waits for."""
    lag_seconds: float
    pending_bytes: int
    seconds_to_loss: float | None
    """None where the broker will not delete what is not durable."""
    remote: tuple[int, int]
    """The first archived offset, and the one after the last."""
    local: tuple[int, int]
    """The same of the local log."""


@dataclass(frozen=True, slots=True)
class DiskLine:
    """One filesystem."""

    directories: str
    total_bytes: int
    free_bytes: int
    state: str
    """`ok`, `low` or `degraded`."""
    log_bytes: int | None = None
    log_area_bytes: int | None = None
    phase: str = ""
    """The last phase of space management that trims; empty while the logs are within their area."""


@dataclass(frozen=True, slots=True)
class UploadLine:
    """One write to the object store that is under way."""

    key: str
    seconds: float
    attempts: int


@dataclass(frozen=True, slots=True)
class Overview:
    """One screen about a daemon."""

    version: str
    uptime_seconds: float
    cluster: str
    store: str
    broker: str
    reasons: Mapping[str, str]
    """What keeps the daemon from being ready, by a reason's name; empty when it is ready."""
    led_partitions: int
    followed_partitions: int
    pending_bytes: int
    pending_segments: int
    lag_seconds: float
    seconds_to_loss: float | None
    unknown_loss_partitions: int
    """Led partitions whose manifest is not known: no figure tells what of them waits, and how long it may."""
    archived_bytes: int
    local_bytes: int
    faults: Mapping[str, int]
    tasks: tuple[Task, ...]
    partitions: tuple[PartitionLine, ...]
    """The worst first, at most `MOST_PARTITIONS`."""
    disks: tuple[DiskLine, ...]
    cache_bytes: int
    cache_limit_bytes: int
    uploads: tuple[UploadLine, ...]
    errors: tuple[FoldedError, ...]
    workers: tuple[WorkerStatus, ...]
    """The processes that serve the gateway's clients; none where the daemon itself does."""


class OverviewMaker:
    """Make overviews of one daemon. `make` may run in any thread."""

    def __init__(
        self,
        facts: DaemonFacts,
        *,
        metrics: Metrics,
        reconciler: Reconciler,
        store: ResilientStore,
        space: SpaceManager,
        errors: RecentErrors,
        workers: WorkerPool | None = None,
    ) -> None:
        """Keep the arguments. *workers* serve the gateway's clients, where this process does not."""
        self._workers = workers
        self._readiness = Readiness(reconciler, workers)
        self._facts = facts
        self._metrics = metrics
        self._reconciler = reconciler
        self._store = store
        self._space = space
        self._errors = errors

    def make(self) -> Overview:
        """Return the overview as it is now."""
        metrics, reconciler = self._metrics, self._reconciler
        figures, snapshot = metrics.partitions.known(), reconciler.snapshot
        statuses = reconciler.statuses()
        sums = metrics.partitions.sums()
        faults = {kind.value: 0 for kind in PartitionFault}
        for status in statuses.values():
            if status.fault_kind is not None:
                faults[status.fault_kind.value] += 1
        lines = [
            _line(
                leadership.partition.topic,
                leadership.partition.partition,
                status,
                figures.get(leadership.partition.topic_partition, PartitionFigures()),
            )
            for leadership, status in statuses.items()
        ]
        worst = heapq.nsmallest(MOST_PARTITIONS, lines, key=_badness)
        reasons = {name: why for name, why in self._readiness.readiness().items() if why}
        now = time.monotonic()
        uploads = tuple(UploadLine(*one) for one in self._store.writes_in_flight(now))
        seen = Seen(
            uptime_seconds=now - self._facts.started_at,
            reasons={name: why for name, why in reasons.items() if name != GATEWAY_WORKERS},
            partitions=lines,
            figures=figures,
            sums=sums,
            problems=reconciler.problems,
            paused_topics=reconciler.paused_topics,
            oldest_upload_seconds=max((one.seconds for one in uploads), default=0.0),
            gateway_fault=reasons.get(GATEWAY_WORKERS, ""),
        )
        return Overview(
            version=__version__,
            uptime_seconds=seen.uptime_seconds,
            cluster=snapshot.cluster if snapshot is not None else "",
            store=self._facts.store,
            broker=self._facts.broker,
            reasons=reasons,
            led_partitions=len(statuses) - faults[PartitionFault.FENCED.value],
            followed_partitions=snapshot.led_elsewhere if snapshot is not None else 0,
            pending_bytes=sums.pending_bytes,
            pending_segments=sums.pending_segments,
            lag_seconds=sums.lag_seconds,
            seconds_to_loss=_finite(sums.seconds_to_loss),
            unknown_loss_partitions=int(metrics.unknown_loss_partitions._value.get()),  # noqa: SLF001
            archived_bytes=sums.archived_bytes,
            local_bytes=sums.local_bytes,
            faults={name: count for name, count in faults.items() if count},
            tasks=tuple(tasks(seen, metrics)),
            partitions=tuple(worst),
            disks=tuple(self._disks()),
            cache_bytes=int(metrics.cache.size_bytes._value.get()),  # noqa: SLF001
            cache_limit_bytes=int(metrics.cache.limit_bytes._value.get()),  # noqa: SLF001
            uploads=uploads,
            errors=tuple(self._errors.folded()),
            workers=() if self._workers is None else self._workers.status(),
        )

    def _disks(self) -> Iterator[DiskLine]:
        disk = self._metrics.disk
        total, free, state = (
            {key[0]: value for key, value in by_labels(pair[1]).items()}
            for pair in (disk.total_bytes, disk.free_bytes, disk.alert)
        )
        reports = {report.space.log_dirs[0]: report for report in self._space.reports}
        for directory, size in total.items():
            report = reports.get(directory)
            phases = (
                [one.phase for one in report.plan.phases if one.removals] if report and report.plan else []
            )
            yield DiskLine(
                ", ".join(report.space.log_dirs) if report else directory,
                int(size),
                int(free.get(directory, 0)),
                ("ok", "low", "degraded")[int(state.get(directory, 0))],
                report.space.log_used_bytes if report else None,
                report.space.areas.log_bytes if report else None,
                f"{phases[-1].value} of 5: {phases[-1].title}" if phases else "",
            )


_STAYING_FAULTS: Final = {
    PartitionFault.CORRUPT.value,
    PartitionFault.FENCED.value,
    PartitionFault.OPERATOR.value,
}
_LAG_STEP_SECONDS: Final = 60


def _line(topic: str, partition: int, status: PartitionStatus, figures: PartitionFigures) -> PartitionLine:
    return PartitionLine(
        topic,
        partition,
        status.fault_kind.value if status.fault_kind is not None else "",
        status.fault or status.waits_because,
        figures.lag_seconds,
        figures.pending_bytes,
        _finite(figures.seconds_to_closed_loss),
        (figures.start_offset, figures.next_offset),
        (figures.local_start_offset, figures.local_next_offset),
    )


def _badness(line: PartitionLine) -> tuple[int, float, int, str, int]:
    """
    Return what sorts the worst partition first: a fault, then a loss that is near, then what is late.

    Faults that do not end by themselves go before others. Lags count in steps, so that partitions that are
    late for one reason stay in order from one look to the next.
    """
    rank = 0 if line.fault in _STAYING_FAULTS else 1 if line.fault else 2
    loss = math.inf if line.seconds_to_loss is None else line.seconds_to_loss
    return rank, loss, -int(line.lag_seconds / _LAG_STEP_SECONDS), line.topic, line.partition


def _finite(seconds: float) -> float | None:
    return None if math.isinf(seconds) else seconds
