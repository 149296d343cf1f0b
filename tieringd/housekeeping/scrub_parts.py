"""The parts of a scrub, put together for one bucket; and one whole pass with them, as operators ask for."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import structlog

from tieringd.archive.scrub.topics import ScrubbedTopics
from tieringd.errors import TieringError
from tieringd.housekeeping.quarantine_expiry import Expired

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tieringd.archive.manifest_store import ManifestStore
    from tieringd.archive.scrub.orphan_search import OrphanSearch
    from tieringd.archive.scrub.partition_scrub import PartitionScrubber, ScrubStretch
    from tieringd.housekeeping.healer import Healer
    from tieringd.housekeeping.object_quarantine import ObjectQuarantine
    from tieringd.housekeeping.quarantine_expiry import QuarantineExpiry
    from tieringd.model.partition import TopicIdPartition
    from tieringd.policies.scrub import Finding
    from tieringd.policies.scrub_orphans import Orphan
    from tieringd.storage.base import ObjectStore

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ScrubParts:
    """What scrubs one bucket."""

    partitions: PartitionScrubber
    search: OrphanSearch
    quarantine: ObjectQuarantine
    expiry: QuarantineExpiry
    healer: Healer


@dataclass(slots=True)
class ScrubReport:
    """What one whole pass found and did."""

    partitions: list[ScrubStretch] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    """All that was found, mended or not."""
    mended: dict[Finding, str] = field(default_factory=dict)
    """How."""
    orphans: list[Orphan] = field(default_factory=list)
    moved: list[Orphan] = field(default_factory=list)
    """Those that are in quarantine now."""
    left: list[tuple[str, str]] = field(default_factory=list)
    """Keys that were to be mended, moved or deleted and were not, and why."""
    uncertain: dict[TopicIdPartition, str] = field(default_factory=dict)
    """Partitions whose objects nobody may judge, and why."""
    expired: Expired = field(default_factory=Expired)
    listed_objects: int = 0

    @property
    def faults(self) -> list[Finding]:
        """Return what is wrong still."""
        return [one for one in self.findings if one not in self.mended]


async def move_orphans(parts: ScrubParts, orphans: Iterable[Orphan], report: ScrubReport) -> None:
    """
    Put orphans into quarantine, each partition's together, and note in *report* what became of them.

    Raises:
        StorageUnavailable: Some may be in both places. The next pass goes on.
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

    Partitions of a topic that is being purged are not looked at: their manifests name what is gone already,
    and what is mended there would be left behind the purge. Their orphans are found like all others.
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
        Look at everything; with *fix*, mend what can be mended and put orphans into quarantine.

        With *expire_before_ms*, what was put into quarantine before that time is deleted as well. It is
        asked when all else is done: by then the store has told its time.

        Raises:
            StorageUnavailable: The store does not answer. Nothing that was done has to be undone.
        """
        report = ScrubReport()
        known = [one async for one in self._topics.partitions(report.findings)]
        for partition in known:
            await self._scrub(report, partition, deep=deep, fix=fix)
        found = await self._search(report, known, fix=fix)
        # Those that no topic manifest leads to.
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
            # It was not yet when it was listed: a purge says so before it deletes anything.
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
            report.left.append((finding.key, f"it could not be mended: {error}"))
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
        start_after: str | None = None
        while True:
            page = await self._parts.search.page(named, start_after=start_after, is_ours=self._is_ours)
            report.listed_objects += page.objects
            report.findings += [one for one in page.findings if one not in report.findings]
            report.uncertain |= page.uncertain
            report.orphans += page.orphans
            others |= dict.fromkeys(page.partitions)
            if fix:
                await move_orphans(self._parts, page.orphans, report)
            start_after = page.next_start_after
            if start_after is None:
                return [one for one in others if one not in set(known)]
            self._on_progress(f"orphans: {report.listed_objects} objects listed")
