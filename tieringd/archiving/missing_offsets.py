"""
Offsets that one partition's local log lacks: gaps at the archive's end, and holes between segments.

`GapRecorder` records offsets that left the disk before they were copied, or that can never be copied. A gap
in the archive is permanent, so missing data becomes a gap only after two observations with different
numbers, and only where later data follows.

`HoleWatch` remembers the first observation that showed each hole of the log. An observation reads pins, files
and bounds one after the other, so a segment that moves meanwhile may be in none of them. The consequences of
a hole may be permanent, so they wait for a second observation.
"""

from __future__ import annotations

from collections.abc import Callable

from tieringd.archive.manifest_store import StoredManifest
from tieringd.archiving.claim import Claim
from tieringd.archiving.observer import Observation
from tieringd.archiving.partition_logger import PartitionLogger
from tieringd.model.local_log import Hole
from tieringd.model.manifest_parts import Gap
from tieringd.model.partition import TopicIdPartition
from tieringd.policies.upload_plan import MissingRange, UploadPlan


class GapRecorder(PartitionLogger):
    """Record the gaps of one partition. Owned by its archiver, used within its step."""

    __slots__ = ("_claim", "_missed", "_now_ms", "_partition", "lost")

    def __init__(self, partition: TopicIdPartition, *, claim: Claim, now_ms: Callable[[], int]) -> None:
        self._claim = claim
        self._now_ms = now_ms
        self._partition = partition
        self._missed: tuple[int, MissingRange] | None = None
        """The missing range that an earlier observation showed, with the number of that observation."""
        self.lost: MissingRange | None = None
        """The missing range that two observations showed; also while no segment follows that is stored."""

    @property
    def is_unsure(self) -> bool:
        """Say whether only one observation has shown missing offsets, so that the next one decides."""
        return self._missed is not None and self.lost is None

    def missing(self, plan: UploadPlan, seen: Observation) -> tuple[Gap | None, bool]:
        """
        Return the gap of offsets that left the disk before they were copied, if two observations lack them.

        The gap is committed together with the segment that follows it, not before: the leader epochs of that
        segment say which log the gap is of. Another leader's log may have these offsets, or no batch that
        begins where the gap ends. Also returns whether the plan may be acted on.
        """
        missing = plan.missing
        if missing is None:
            self._missed = self.lost = None
            return None, True
        if self._missed is None or not _covers(self._missed[1], missing):
            self._missed, self.lost = (seen.scan_number, missing), None
            self._log.warning(
                "local log begins after the archive's end; looking again before a gap is recorded",
                archive_next_offset=missing.base_offset,
                local_first_offset=missing.last_offset + 1,
                path=seen.log.partition.path,
            )
            return None, False
        if self._missed[0] == seen.scan_number:
            return None, False
        self.lost = missing
        if not plan.slices:
            return None, False
        reason = "the broker removed these offsets before they were copied"
        return Gap(missing.base_offset, missing.last_offset, reason, self._now_ms()), True

    async def record(
        self, stored: StoredManifest, base_offset: int, last_offset: int, reason: str, *, after: Gap | None
    ) -> StoredManifest:
        """
        Record one gap at the archive's end. *after* is an earlier gap that is not committed yet, if any.

        Raises:
            FencedError: Another writer owns the manifest now.
            StorageUnavailable: The commit failed. The next step reads the manifest again.
        """
        manifest = stored.existing if after is None else stored.existing.with_gap(after)
        gap = Gap(base_offset, last_offset, reason, self._now_ms())
        return await self._claim.commit(stored, manifest.with_gap(gap))


class HoleWatch:
    """
    Remember when each hole of one partition's log was first seen. Owned by its archiver.

    A scan may also miss the log's first files: what they hold counts as a hole as well.
    """

    __slots__ = ("_first_scans", "_scan_number")

    def __init__(self) -> None:
        self._first_scans: dict[Hole, int] = {}
        """
        The holes of the newest observation, each with the number of the first consecutive one that showed it.
        """
        self._scan_number = 0

    def note(self, seen: Observation) -> None:
        """Take note of an observation. Noting the same observation again changes nothing."""
        self._scan_number = seen.scan_number
        holes = seen.uploadable.holes | _missing_head(seen)
        self._first_scans = {hole: self._first_scans.get(hole, seen.scan_number) for hole in holes}

    @property
    def confirmed(self) -> frozenset[Hole]:
        """Return the holes of the newest observation that an earlier one showed as well."""
        return frozenset(hole for hole, first in self._first_scans.items() if first != self._scan_number)

    @property
    def new(self) -> frozenset[Hole]:
        """Return the holes that only the newest observation shows."""
        return frozenset(hole for hole, first in self._first_scans.items() if first == self._scan_number)


def _covers(earlier: MissingRange, missing: MissingRange) -> bool:
    return earlier.base_offset <= missing.base_offset and missing.last_offset <= earlier.last_offset


def _missing_head(seen: Observation) -> frozenset[Hole]:
    """Return the offsets that the log has by the broker, before the first one that it has by its files."""
    first_offset, log_start_offset = seen.uploadable.first_offset, seen.bounds.log_start_offset
    if first_offset is None or first_offset <= log_start_offset or seen.log.is_reframed:
        return frozenset()
    return frozenset({(log_start_offset, first_offset)})
