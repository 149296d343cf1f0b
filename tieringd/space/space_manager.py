"""
The space manager: keeps the logs on each filesystem within their area, and sizes the cache's area.

Every interval it measures the log directories and the cache. A directory that cannot be measured, as on a
disk that has failed, is left out until it can. The space manager first tells the cache its limit, and the
cache evicts at once. Where the logs of a filesystem are over their area, it plans what to trim
(`policies.space_plan`) and asks the archivers of those partitions, which check and limit the trim like
any other. The space manager trims nothing itself. What an archiver could not trim is planned again in the
next round.

The facts of each partition come from the observer's last scan. A partition that this daemon cannot trim
is listed with the reason, so that a plan that falls short can be explained.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from tieringd.archiving.observer import BrokerSnapshot, FollowedPartition, Observation
from tieringd.broker.disk_use import NO_SCAN, DiskUseMeter, ScannedLogs, directory_uses
from tieringd.config import Config
from tieringd.metrics import Metrics
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import Leadership, TopicPartition
from tieringd.model.segment import LocalSegment
from tieringd.policies.disk_areas import AreaSettings, DirectoryUse, DiskSpace, plan_spaces
from tieringd.policies.durability import durable_end
from tieringd.policies.local_retention import plan_trim
from tieringd.policies.space_plan import SpaceDemand, SpacePartition, SpacePlan, plan_space
from tieringd.policies.trim_target import TrimObstacle

if TYPE_CHECKING:
    # An ordinary import would load the archiver into commands that do not need it.
    from tieringd.archiving.reconciler import Reconciler


log = structlog.get_logger(__name__)

NOT_TIERED = "remote write is off for the topic: only the broker's own retention trims it"
HIDDEN = "the settings of the topic cannot be read: they may switch remote write off"
FOLLOWED = "another broker leads the partition, and trims it on all replicas"
PAUSED = "the topic is paused"
NOT_KNOWN = "the durable offsets of the partition are not known yet"
NO_ARCHIVER = TrimObstacle("the archiver of the partition has not started, or has stopped")

SEGMENT_BYTES = 128 << 20
"""The size of an ordinary segment: exceeding an area by no more is not worth a trim."""
NO_OVERAGE = 1.0
"""Only the excess is trimmed, and no more: the next round is half a minute away."""


def space_partitions(
    snapshot: BrokerSnapshot,
    *,
    log_dirs: tuple[str, ...],
    manifest_of: Callable[[Leadership], PartitionManifest | None],
    obstacle_of: Callable[[Leadership], TrimObstacle | None],
    now_ms: int,
) -> Iterator[SpacePartition]:
    """
    Yield a fact sheet for each partition that lies in one of *log_dirs*.

    *obstacle_of* says why an archiver does not trim at present; None when it does.
    """
    for leadership, seen in snapshot.wanted.items():
        if seen.log.partition.log_dir in log_dirs:
            manifest = manifest_of(leadership)
            if manifest is None:
                yield _kept(seen.log.partition.topic_partition, seen.log.segments, NOT_KNOWN)
            else:
                yield space_partition(seen, manifest, obstacle=obstacle_of(leadership), now_ms=now_ms)
    for one in snapshot.followed:
        if one.log.partition.log_dir in log_dirs:
            yield _of_followed(one, PAUSED if _is_paused(snapshot, one) else FOLLOWED)
    for one in snapshot.held_back:
        if one.log.partition.log_dir in log_dirs:
            yield _of_followed(one, NOT_KNOWN)
    for partition in snapshot.untiered:
        if partition.log_dir in log_dirs:
            name = partition.topic_partition
            yield _kept(name, (), HIDDEN if name in snapshot.unclear else NOT_TIERED)


def scanned_logs(snapshot: BrokerSnapshot | None) -> ScannedLogs:
    """Return the logs that *snapshot* has read."""
    if snapshot is None:
        return NO_SCAN
    return ScannedLogs(snapshot.scan_number, {one.partition.path: one for one in snapshot.logs})


def space_partition(
    seen: Observation, manifest: PartitionManifest, *, obstacle: TrimObstacle | None, now_ms: int
) -> SpacePartition:
    """
    Return the facts of a partition that this daemon archives.

    Where the local target is enforced, phase 1 takes what the published hint allows, and phase 2 what is
    past the target by now. Where the target is only advice, phase 1 takes what is past it: the log has
    exceeded it because there was room.
    """
    topic, log_start_offset = seen.topic, seen.bounds.log_start_offset
    is_strict = topic.local_target.enforced == topic.local_target.advised
    past_retention = plan_trim(
        seen.log, manifest, topic.local_target.enforced, log_start_offset=log_start_offset, now_ms=now_ms
    ).start_offset
    past_advice = plan_trim(
        seen.log, manifest, topic.local_target.advised, log_start_offset=log_start_offset, now_ms=now_ms
    ).start_offset
    hint = manifest.allowed_local_start_offset
    if topic.never_trimmed_because:
        obstacle = TrimObstacle(topic.never_trimmed_because)
    return SpacePartition(
        seen.log.partition.topic_partition,
        seen.log.segments,
        log_start_offset=log_start_offset,
        durable_next_offset=durable_end(seen.log, manifest, log_start_offset=log_start_offset).offset,
        retention_next_offset=min(hint or log_start_offset, past_retention)
        if is_strict
        else max(past_retention, past_advice),
        local_retention_next_offset=past_advice,
        has_explicit_target=topic.local_target.is_explicit,
        not_reclaimable=obstacle.because if obstacle else "",
        not_reclaimable_from=obstacle.from_offset if obstacle else 0,
    )


def _is_paused(snapshot: BrokerSnapshot, one: FollowedPartition) -> bool:
    partition = one.partition
    return any((key.topic, key.topic_id) == (partition.topic, partition.topic_id) for key in snapshot.paused)


def _of_followed(one: FollowedPartition, reason: str) -> SpacePartition:
    return _kept(one.log.partition.topic_partition, one.log.segments, reason)


def _kept(topic_partition: TopicPartition, segments: tuple[LocalSegment, ...], reason: str) -> SpacePartition:
    start_offset = segments[0].base_offset if segments else 0
    return SpacePartition(
        topic_partition,
        segments,
        log_start_offset=start_offset,
        durable_next_offset=start_offset,
        retention_next_offset=start_offset,
        local_retention_next_offset=start_offset,
        has_explicit_target=False,
        not_reclaimable=reason,
    )


@dataclass(frozen=True, slots=True)
class SpaceReport:
    """What one round measured and planned for one filesystem."""

    space: DiskSpace
    plan: SpacePlan | None
    """None while the logs are within their area."""


class SpaceManager:
    """Plan for one daemon's disks. One task at a time calls `step`."""

    def __init__(
        self,
        config: Config,
        *,
        reconciler: Reconciler,
        metrics: Metrics,
        ages_ms: Callable[[], int],
        measure: Callable[[Sequence[str]], Sequence[DirectoryUse]] | None = None,
        tell_cache: Callable[[int | None], None] = lambda _: None,
    ) -> None:
        """
        Take the collaborators.

        *ages_ms* returns the time that ages count to. *measure* measures directories, in a thread; by
        default a `DiskUseMeter` that knows the reconciler's scans. *tell_cache* is called in each round
        with the bytes that the chunk cache may hold from now on, and with None when space management is
        switched off.
        """
        self._config = config
        self._log_dirs = tuple(str(path) for path in config.broker.log_dirs)
        self._reconciler = reconciler
        self._metrics = metrics
        self._ages_ms = ages_ms
        self._measure = measure or DiskUseMeter(lambda: scanned_logs(reconciler.snapshot))
        self._tell_cache = tell_cache
        self._cursors: dict[int, TopicPartition] = {}
        self._problems: dict[str, str] = {}
        """Why log directories could not be measured in the last round, as far as this was logged."""
        self._published: set[str] = set()
        """The names of the filesystems whose figures are in the metrics."""
        self._cache_limit_bytes: int | None = None
        """The limit that the cache was given last."""
        self._short: set[int] = set()
        """The filesystems on which the last round did not find enough."""
        self.reports: tuple[SpaceReport, ...] = ()
        """What the last round measured and planned; empty before the first, and when it is switched off."""

    def set_config(self, config: Config) -> None:
        """Use *config* from the next round on; the log directories stay as they were."""
        self._config = config
        if not config.space_management_enable:
            self._rest()

    async def run(self) -> None:
        """Do a round every interval, until cancelled."""
        self._metrics.health.loop_succeeded("space")
        while True:
            await asyncio.sleep(self._config.retention_local_trim_interval / 1000)
            if self._config.space_management_enable:
                await self.step()
            else:
                # Again: a round may have been under way when it was switched off.
                self._rest()
                self._metrics.health.loop_succeeded("space")

    def _rest(self) -> None:
        """Forget what was measured: it is not measured any more, and a shortage would stay for ever."""
        self.reports = ()
        self._short.clear()
        self._published.clear()
        self._cache_limit_bytes = None
        self._metrics.space.forget()
        self._tell_cache(None)

    async def step(self) -> tuple[SpaceReport, ...]:
        """Measure, plan and ask the archivers; return the reports. Empty before the first scan."""
        snapshot = self._reconciler.snapshot
        if snapshot is None:
            return ()
        # Before the measurement: this process may stand still anywhere after it.
        measured_at = asyncio.get_running_loop().time()
        uses, problems = await asyncio.to_thread(measured_logs, self._log_dirs, self._measure)
        self._report(problems)
        if not uses:
            return ()
        cache = await asyncio.to_thread(measured_cache, self._config, self._measure)
        reports = []
        for space in plan_spaces(uses, cache, area_settings(self._config)):
            self._publish_cache(space, may_grow=not problems)
            if not space.log_dirs:
                continue
            plan = await self._plan(snapshot, space) if space.log_excess_bytes else None
            if plan is not None:
                self._act(snapshot, space, plan, measured_at=measured_at)
            self._publish(space, plan)
            reports.append(SpaceReport(space, plan))
        measured = {report.space.log_dirs[0] for report in reports}
        for gone in self._published - measured:
            self._metrics.space.forget_logs(gone)
        self._published = measured
        if not problems:
            self._metrics.health.loop_succeeded("space")
        self.reports = tuple(reports)
        return self.reports

    def _report(self, problems: dict[str, str]) -> None:
        """Log once for each log directory why it cannot be measured."""
        for path, problem in problems.items():
            if self._problems.get(path) != problem:
                log.warning("log directory cannot be measured", path=path, error=problem)
        self._problems = problems

    async def _plan(self, snapshot: BrokerSnapshot, space: DiskSpace) -> SpacePlan:
        # A plan over millions of segments takes a second of processor time, so it runs in a thread.
        return await asyncio.to_thread(
            plan_for,
            snapshot,
            space,
            manifest_of=self._reconciler.last_manifest,
            obstacle_of=self._obstacle_of,
            cursor=self._cursors.get(space.filesystem),
            now_ms=self._ages_ms(),
        )

    def _obstacle_of(self, leadership: Leadership) -> TrimObstacle | None:
        archiver = self._reconciler.archiver(leadership)
        return archiver.trim_obstacle if archiver else NO_ARCHIVER

    def _act(
        self, snapshot: BrokerSnapshot, space: DiskSpace, plan: SpacePlan, *, measured_at: float
    ) -> None:
        if not plan.wanted_bytes:
            return
        offsets = plan.cloud_gc_offsets()
        age_ms = round((asyncio.get_running_loop().time() - measured_at) * 1000)
        for leadership, seen in snapshot.wanted.items():
            if seen.log.partition.log_dir not in space.log_dirs:
                continue
            next_offset = offsets.get(leadership.partition.topic_partition)
            if next_offset is None and (obstacle := self._obstacle_of(leadership)) is not None:
                # The plan does not count on it, and only another trial shows that the obstacle has gone.
                next_offset = obstacle.retry_offset
            if next_offset:
                self._reconciler.request_space(leadership, next_offset, age_ms=age_ms)
        if plan.cursor is not None:
            self._cursors[space.filesystem] = plan.cursor
        for phase in plan.phases:
            if phase.removals:
                self._metrics.space.planned_bytes.labels(phase.phase.name.lower()).inc(phase.size_bytes)
                log.info(
                    "space is needed",
                    log_dirs=space.log_dirs,
                    phase=phase.phase.value,
                    title=phase.phase.title,
                    partitions=len(phase.removals),
                    size_bytes=phase.size_bytes,
                )

    def _publish_cache(self, space: DiskSpace, *, may_grow: bool) -> None:
        if space.cache_dir is None:
            return
        limit_bytes, known_bytes = space.cache_limit_bytes, self._cache_limit_bytes
        if known_bytes is not None and not may_grow:
            # The logs of a directory that cannot be measured may be on this filesystem.
            limit_bytes = min(limit_bytes, known_bytes)
        self._cache_limit_bytes = limit_bytes
        self._metrics.space.cache_bytes.labels(space.cache_dir).set(space.cache_used_bytes)
        self._metrics.space.cache_area_bytes.labels(space.cache_dir).set(limit_bytes)
        self._tell_cache(limit_bytes)

    def _publish(self, space: DiskSpace, plan: SpacePlan | None) -> None:
        name, short_bytes = space.log_dirs[0], plan.short_by_bytes if plan else 0
        self._metrics.space.log_bytes.labels(name).set(space.log_used_bytes)
        self._metrics.space.log_area_bytes.labels(name).set(space.areas.log_bytes)
        self._metrics.space.short_bytes.labels(name).set(short_bytes)
        if short_bytes and space.filesystem not in self._short:
            log.warning(
                "the logs are over their area, and not enough of them may go; see `tieringd space plan`",
                log_dirs=space.log_dirs,
                short_by_bytes=short_bytes,
            )
        (self._short.add if short_bytes else self._short.discard)(space.filesystem)


def plan_for(
    snapshot: BrokerSnapshot,
    space: DiskSpace,
    *,
    manifest_of: Callable[[Leadership], PartitionManifest | None],
    obstacle_of: Callable[[Leadership], TrimObstacle | None],
    cursor: TopicPartition | None,
    now_ms: int,
) -> SpacePlan:
    """
    Return the plan for one filesystem; this takes a while where there are millions of segments.

    *obstacle_of* says why a partition cannot be trimmed at present; None when it can.
    """
    partitions = space_partitions(
        snapshot,
        log_dirs=space.log_dirs,
        manifest_of=manifest_of,
        obstacle_of=obstacle_of,
        now_ms=now_ms,
    )
    demand = SpaceDemand(
        used_bytes=space.log_used_bytes,
        target_bytes=space.areas.log_bytes,
        segment_bytes=SEGMENT_BYTES,
        overage_coefficient=NO_OVERAGE,
    )
    return plan_space(partitions, demand, cursor=cursor)


def measured_logs(
    log_dirs: Sequence[str], measure: Callable[[Sequence[str]], Sequence[DirectoryUse]]
) -> tuple[tuple[DirectoryUse, ...], dict[str, str]]:
    """
    Return the sizes of the log directories, and by path why others cannot be measured. This blocks.

    A broker with several disks goes on when one of them fails, and so does the care for the others.
    """
    uses: list[DirectoryUse] = []
    problems: dict[str, str] = {}
    for path in log_dirs:
        try:
            uses.extend(measure([path]))
        except OSError as error:
            problems[path] = str(error)
    return tuple(uses), problems


def measured_cache(
    config: Config, measure: Callable[[Sequence[str]], Sequence[DirectoryUse]] = directory_uses
) -> DirectoryUse | None:
    """
    Return the size of the chunk cache; None where nothing is cached. This blocks.

    A missing directory counts as empty, on the filesystem on which it will be created. One that cannot be
    measured is left out, which does not reduce the log's area.
    """
    if not config.cloud_storage_enabled:
        return None
    path = config.cache_directory
    try:
        (found,) = measure([str(path)])
    except FileNotFoundError:
        above = next(each for each in path.parents if each.exists())
        filesystem = os.statvfs(above)
        total_bytes = filesystem.f_blocks * filesystem.f_frsize
        return DirectoryUse(str(path), above.stat().st_dev, total_bytes, 0)
    except OSError as error:
        log.warning("the cache directory cannot be measured", path=str(path), error=str(error))
        return None
    return found


def area_settings(config: Config) -> AreaSettings:
    """Return the configured division of the disks."""
    return AreaSettings(
        reservation_percent=config.disk_reservation_percent,
        log_percent=config.retention_local_target_capacity_percent,
        log_bytes=config.retention_local_target_capacity_bytes,
        cache_percent=config.cloud_storage_cache_size_percent,
        cache_bytes=config.cloud_storage_cache_size,
    )
