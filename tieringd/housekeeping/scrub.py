"""
Scrubbing as housekeeping: the partitions that this broker leads, a little at a time.

Each partition is scrubbed at its own time, at Redpanda's intervals. A fault is repaired at once where
that is possible, and shown in metrics until a later scrub does not find it any more. Now and then the
bucket is listed for orphans of these partitions. Faults that need an operator are left to `tieringd
archive scrub`.

The progress is held in memory: a restarted daemon begins anew.

`ScrubParts` puts the parts of a scrub together for one bucket. `WholeScrub` makes one whole pass with
them, for operators.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush

import structlog

from tieringd.archive.manifest_store import ManifestStore
from tieringd.archive.scrub.orphan_search import NamedObjects, OrphanSearch
from tieringd.archive.scrub.partition_scrub import PartitionScrubber, ScrubCursor, ScrubStretch
from tieringd.archive.scrub.survey import ScrubbedTopics
from tieringd.errors import TieringError
from tieringd.housekeeping.bucket_quarantine import Expired, ObjectQuarantine, QuarantineExpiry
from tieringd.housekeeping.healer import Healer
from tieringd.housekeeping.partition_sweep import JobTurn
from tieringd.metrics import Metrics
from tieringd.model.partition import TopicIdPartition
from tieringd.policies.scrub import FaultKind, Finding, Orphan, ScrubPace, first_due_ms, next_due_ms
from tieringd.storage.archive_clock import ArchiveClock
from tieringd.storage.base import ObjectStore
from tieringd.storage.threads import in_thread

log = structlog.get_logger(__name__)

_STALE_DUE_TIMES = 64
"""How many outdated entries the heap of due times may hold, beyond as many as partitions are led."""


@dataclass(frozen=True, slots=True)
class ScrubParts:
    """The parts that scrub one bucket."""

    partitions: PartitionScrubber
    search: OrphanSearch
    quarantine: ObjectQuarantine
    expiry: QuarantineExpiry
    healer: Healer


@dataclass(slots=True)
class ScrubReport:
    """The findings and actions of one whole pass."""

    partitions: list[ScrubStretch] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    """All faults that were found, repaired or not."""
    mended: dict[Finding, str] = field(default_factory=dict)
    """How each of these was repaired, in words."""
    orphans: list[Orphan] = field(default_factory=list)
    moved: list[Orphan] = field(default_factory=list)
    """Orphans that are in quarantine now."""
    left: list[tuple[str, str]] = field(default_factory=list)
    """Keys that could not be repaired, moved or deleted, and why."""
    uncertain: dict[TopicIdPartition, str] = field(default_factory=dict)
    """Partitions whose objects cannot be judged, and why."""
    expired: Expired = field(default_factory=Expired)
    listed_objects: int = 0

    @property
    def faults(self) -> list[Finding]:
        """Return the faults that were not repaired."""
        return [one for one in self.findings if one not in self.mended]


async def move_orphans(parts: ScrubParts, orphans: Iterable[Orphan], report: ScrubReport) -> None:
    """
    Put orphans into quarantine, each partition's together, and note the results in *report*.

    Raises:
        StorageUnavailable: Some may be in both places. The next pass continues.
    """
    by_partition: defaultdict[TopicIdPartition, list[Orphan]] = defaultdict(list)
    for one in orphans:
        by_partition[one.partition].append(one)
    for partition, some in by_partition.items():
        moved = await parts.quarantine.move(
            some, still_orphans=partial(parts.search.still_orphans, partition)
        )
        report.moved += moved.moved
        report.left += moved.left


class WholeScrub:
    """
    One pass over a bucket, or over one topic in it.

    Partitions of a topic that is being purged are not scrubbed: their manifests name objects that are
    gone already, and a repaired object would be left behind by the purge. Their orphans are found like
    all others.
    """

    def __init__(
        self,
        parts: ScrubParts,
        store: ObjectStore,
        manifests: ManifestStore,
        *,
        topic: str | None = None,
        on_progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._parts = parts
        self._topics = ScrubbedTopics(store, manifests, is_wanted=lambda name: topic in {None, name})
        self._topic = topic
        self._on_progress = on_progress

    async def run(
        self, *, deep: bool, fix: bool, expire_before_ms: Callable[[], int] | None = None
    ) -> ScrubReport:
        """
        Scrub everything; with *fix*, repair what can be repaired and put orphans into quarantine.

        With *fix* and *expire_before_ms*, objects that were put into quarantine before that time are
        deleted as well. The time is asked for last: by then the store's responses have shown its clock.

        Raises:
            StorageUnavailable: The store does not answer. Nothing that was done has to be undone.
        """
        report = ScrubReport()
        known = [one async for one in self._topics.partitions(report.findings)]
        for partition in known:
            await self._scrub(report, partition, deep=deep, fix=fix)
        found = await self._search(report, known, fix=fix)
        # Partitions that have a manifest but no topic manifest that lists them.
        for partition in [one for one in found if not await self._topics.is_leaving(one)]:
            await self._scrub(report, partition, deep=deep, fix=fix)
        if fix and expire_before_ms is not None:
            report.expired = await self._parts.expiry.expire(
                before_ms=expire_before_ms(), is_ours=self._is_ours
            )
            report.left += report.expired.left
        return report

    def _is_ours(self, partition: TopicIdPartition) -> bool:
        return self._topic in {None, partition.topic}

    async def _scrub(
        self, report: ScrubReport, partition: TopicIdPartition, *, deep: bool, fix: bool
    ) -> None:
        self._on_progress(str(partition))
        stretch = await self._parts.partitions.scrub(partition, deep=deep)
        if stretch.findings and await self._topics.is_leaving(partition):
            # The topic was not being purged yet when it was listed: a purge records itself before it
            # deletes anything.
            return
        report.partitions.append(stretch)
        for finding in stretch.findings:
            report.findings.append(finding)
            if fix:
                await self._heal(report, finding)

    async def _heal(self, report: ScrubReport, finding: Finding) -> None:
        try:
            how = await self._parts.healer.heal(finding)
        except TieringError as error:
            log.warning("an archived object could not be mended", key=finding.key, error=str(error))
            report.left.append((finding.key, f"the object could not be repaired: {error}"))
            return
        if how:
            report.mended[finding] = how

    async def _search(
        self, report: ScrubReport, known: list[TopicIdPartition], *, fix: bool
    ) -> list[TopicIdPartition]:
        """List the bucket for orphans; return the partitions with a manifest that are not among *known*."""
        self._on_progress("orphans")
        named = await self._parts.search.names(known)
        others: dict[TopicIdPartition, None] = {}
        async for page in self._parts.search.pages(named, is_ours=self._is_ours):
            report.listed_objects += page.objects
            report.findings += [one for one in page.findings if one not in report.findings]
            report.uncertain |= page.uncertain
            report.orphans += page.orphans
            others |= dict.fromkeys(page.partitions)
            if fix:
                await move_orphans(self._parts, page.orphans, report)
            if page.next_start_after is not None:
                self._on_progress(f"orphans: {report.listed_objects} objects listed")
        return [one for one in others if one not in set(known)]


@dataclass(slots=True)
class _Progress:
    """The progress of one partition's scrub."""

    due_ms: int
    cursor: ScrubCursor | None = None
    found: set[Finding] = field(default_factory=set)
    """Faults that the current scrub found and did not repair."""
    known: set[Finding] = field(default_factory=set)
    """Faults that the last complete scrub found."""


@dataclass(slots=True)
class _SearchProgress:
    """The progress of the search for orphans."""

    due_ms: int
    named: NamedObjects | None = None
    """None between two searches."""
    ours: frozenset[TopicIdPartition] = frozenset()
    unread: list[TopicIdPartition] = field(default_factory=list)
    """Partitions whose names are still to be read, before the first page."""
    start_after: str | None = None
    orphans: int = 0
    orphan_bytes: int = 0


class ScrubJob:
    """Scrub the partitions that this daemon leads; see `HousekeepingJob`. One task at a time calls `turn`."""

    def __init__(
        self,
        parts: ScrubParts,
        *,
        led: Callable[[], Collection[TopicIdPartition]],
        pace: ScrubPace,
        metrics: Metrics,
        clock: ArchiveClock,
        jitter: Callable[[], float],
    ) -> None:
        """
        Take the collaborators; *jitter* returns 0 to 1.

        *led* is called at each turn, and returns the same object while nothing has changed.
        """
        self._parts = parts
        self._led = led
        self._pace = pace
        self._metrics = metrics.scrub
        self._now_ms = clock.steady_ms
        self._wall_ms = clock.wall_ms
        self._ages_ms = clock.ages_ms
        self._jitter = jitter
        self._progress: dict[TopicIdPartition, _Progress] = {}
        # A turn handles one partition, so a walk over all of them in each turn would be quadratic.
        self._due: list[tuple[int, int, TopicIdPartition]] = []
        """A heap of due times. A time that is not that of the partition's progress any more is outdated."""
        self._due_count = 0
        self._done_at_ms: OrderedDict[TopicIdPartition, int] = OrderedDict()
        """End of each partition's last whole scrub in ms since the epoch, oldest first; 0 without one."""
        self._last_led: Collection[TopicIdPartition] | None = None
        self._has_faults_changed = True
        self._search: _SearchProgress | None = None
        self._publish_pace()

    @property
    def name(self) -> str:
        """Return "scrub"."""
        return "scrub"

    @property
    def due_times(self) -> int:
        """Return how many due times are kept, outdated ones included."""
        return len(self._due)

    def set_pace(self, pace: ScrubPace) -> None:
        """Use *pace* from the next turn on; times that are already set stay."""
        self._pace = pace
        self._publish_pace()
        self._parts.search.grace_ms = pace.orphan_grace_ms

    async def turn(self, *, requests_max: int) -> JobTurn:
        """See `HousekeepingJob.turn`."""
        pace, now_ms = self._pace, self._now_ms()
        if not pace.is_enabled:
            self._progress.clear()
            self._due.clear()
            self._done_at_ms.clear()
            self._search, self._last_led, self._has_faults_changed = None, None, True
            self._publish()
            return JobTurn(0, has_more=False)
        self._follow(pace, now_ms)
        search = self._search
        partition = self._first_due()
        is_search_due = search is not None and search.due_ms <= now_ms
        requests = 0
        if partition is not None and self._progress[partition].due_ms <= now_ms:
            requests = await self._scrub(partition, pace, requests_max)
        elif search is not None and is_search_due:
            requests = await self._search_orphans(search, pace, requests_max)
        self._publish()
        return JobTurn(requests, has_more=self._is_anything_due())

    def _is_anything_due(self) -> bool:
        now_ms, partition = self._now_ms(), self._first_due()
        due = [] if partition is None else [self._progress[partition].due_ms]
        due += [self._search.due_ms] if self._search else []
        return any(one <= now_ms for one in due)

    def _first_due(self) -> TopicIdPartition | None:
        """Return the partition that is due first."""
        while self._due:
            due_ms, _, partition = self._due[0]
            progress = self._progress.get(partition)
            if progress is not None and progress.due_ms == due_ms:
                return partition
            heappop(self._due)
        return None

    def _set_due(self, partition: TopicIdPartition, due_ms: int) -> None:
        self._progress[partition].due_ms = due_ms
        self._due_count += 1
        heappush(self._due, (due_ms, self._due_count, partition))
        if len(self._due) > 2 * len(self._progress) + _STALE_DUE_TIMES:
            # Leadership that comes and goes adds a time on each return, weeks before the scrub is due.
            self._due = [
                (one.due_ms, number, name) for number, (name, one) in enumerate(self._progress.items())
            ]
            heapify(self._due)
            self._due_count = len(self._due)

    def _follow(self, pace: ScrubPace, now_ms: int) -> None:
        """Add partitions that are led since the last turn, and drop those that are not led any more."""
        found = self._led()
        if found is self._last_led:
            return
        self._last_led = found
        led = set(found)
        for partition in [one for one in self._progress if one not in led]:
            del self._progress[partition], self._done_at_ms[partition]
            self._has_faults_changed = True
        for partition in led - self._progress.keys():
            self._progress[partition] = _Progress(0)
            self._done_at_ms[partition] = 0
            self._done_at_ms.move_to_end(partition, last=False)
            self._set_due(partition, first_due_ms(pace, now_ms=now_ms, jitter=self._jitter()))
        if self._search is None and led:
            self._search = _SearchProgress(first_due_ms(pace, now_ms=now_ms, jitter=self._jitter()))

    async def _scrub(self, partition: TopicIdPartition, pace: ScrubPace, requests_max: int) -> int:
        progress = self._progress[partition]
        is_complete = False
        try:
            stretch = await self._parts.partitions.scrub(
                partition, deep=False, requests_max=requests_max, cursor=progress.cursor
            )
            await self._take(progress, stretch)
            is_complete = stretch.cursor is None
        finally:
            # A failed scrub waits as well, so that it does not starve the other partitions.
            due_ms = next_due_ms(pace, now_ms=self._now_ms(), is_complete=is_complete, jitter=self._jitter())
            self._set_due(partition, due_ms)
        if is_complete:
            self._has_faults_changed |= progress.known != progress.found
            progress.known, progress.found = progress.found, set()
            self._done_at_ms[partition] = self._wall_ms()
            self._done_at_ms.move_to_end(partition)
        return stretch.requests

    async def _take(self, progress: _Progress, stretch: ScrubStretch) -> None:
        """Note the findings of a stretch, and repair those that can be repaired."""
        progress.cursor = stretch.cursor
        self._metrics.objects.inc(stretch.objects)
        self._metrics.size_bytes.inc(stretch.inspected_bytes)
        for finding in stretch.findings:
            progress.found.add(finding)
            self._has_faults_changed = True
            log.error(
                "archive fault",
                kind=finding.kind.value,
                key=finding.key,
                fault=finding.detail,
                action=finding.action,
            )
            try:
                how = await self._parts.healer.heal(finding)
            except TieringError as error:
                log.warning("an archived object could not be mended", key=finding.key, error=str(error))
                continue
            if how:
                progress.found.discard(finding)
                progress.known.discard(finding)
                self._metrics.mended.labels(finding.kind.value).inc()

    async def _search_orphans(self, search: _SearchProgress, pace: ScrubPace, requests_max: int) -> int:
        is_complete, requests = False, 0
        try:
            if search.named is None:
                search.ours, search.named = frozenset(self._progress), NamedObjects()
                search.unread = list(search.ours)
                search.start_after, search.orphans, search.orphan_bytes = None, 0, 0
            if search.unread:
                requests += await self._read_names(search, search.named, requests_max)
                if search.unread:
                    # The next turn goes on.
                    return requests
            while not is_complete and (not requests or requests < requests_max):
                requests += await self._page(search, search.named)
                is_complete = search.start_after is None
            if is_complete:
                await self._expire(pace)
        except TieringError:
            search.due_ms = next_due_ms(pace, now_ms=self._now_ms(), is_complete=False, jitter=self._jitter())
            if search.start_after is None and not search.unread:
                search.named = None
            raise
        if is_complete:
            self._metrics.orphans.set(search.orphans)
            self._metrics.orphan_bytes.set(search.orphan_bytes)
            search.named = None
            search.due_ms = next_due_ms(pace, now_ms=self._now_ms(), is_complete=True, jitter=self._jitter())
        return requests

    async def _read_names(self, search: _SearchProgress, named: NamedObjects, requests_max: int) -> int:
        """Read the names of as many partitions as *requests_max* allows; return the requests."""
        requests = 0
        while search.unread and requests < requests_max:
            requests += await self._parts.search.add_names(named, search.unread[-1])
            search.unread.pop()
        if not search.unread:
            await in_thread(named.seal)
        return requests

    def _is_ours(self, partition: TopicIdPartition) -> bool:
        """Say whether a partition was led when the search began, and still is."""
        return self._search is not None and partition in self._search.ours and partition in self._progress

    async def _page(self, search: _SearchProgress, named: NamedObjects) -> int:
        page = await self._parts.search.page(named, start_after=search.start_after, is_ours=self._is_ours)
        for partition, why in page.uncertain.items():
            log.warning("objects cannot be judged, and are left alone", partition=str(partition), reason=why)
        for finding in page.findings:
            if finding.partition is not None:
                self._progress[finding.partition].known.add(finding)
                self._has_faults_changed = True
        report = ScrubReport()
        await move_orphans(self._parts, [one for one in page.orphans if not one.needs_operator], report)
        self._metrics.quarantined.inc(len(report.moved))
        waiting = [one for one in page.orphans if one not in report.moved]
        search.orphans += len(waiting)
        search.orphan_bytes += sum(one.stored.size_bytes for one in waiting)
        search.start_after = page.next_start_after
        return page.requests + 5 * len(page.orphans)

    async def _expire(self, pace: ScrubPace) -> None:
        expired = await self._parts.expiry.expire(
            before_ms=self._ages_ms() - pace.quarantine_ms, is_ours=self._is_ours
        )
        self._metrics.deleted.inc(len(expired.deleted))

    def _publish_pace(self) -> None:
        is_enabled, interval_ms = self._pace.is_enabled, self._pace.full_interval_ms
        self._metrics.interval_seconds.set(interval_ms / 1000 if is_enabled else 0)

    def _publish(self) -> None:
        """Set the metrics of known faults, by kind, if there may be others than before."""
        if self._has_faults_changed:
            self._has_faults_changed = False
            found = (finding for one in self._progress.values() for finding in one.known | one.found)
            kinds = Counter(finding.kind for finding in found)
            for kind in FaultKind:
                self._metrics.faults.labels(kind.value).set(kinds[kind])
        self._metrics.last_full.set(next(iter(self._done_at_ms.values()), 0) / 1000)
