"""
Trimming one partition's local log: only durable segments below the target, with the archive's bytes.

Segments that total retention expired in the archive are trimmed as well: neither tier keeps them.

The policy selects segments by bounds, size and age. This module compares each selected file's CRC32C with
its stored copy's before it asks the broker. A file that this process uploaded, and that has not changed
since, was read for its checksum then and is not read again.

`HintPublisher` evaluates the partition's local retention hint when it is due, and stores it when it has
changed. `policies.local_hint` decides both. Only the partition's leader stores the hint: with the commit
of an upload, or with a commit of its own.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol

from tieringd.archive.manifest_store import StoredManifest
from tieringd.archiving.claim import Claim
from tieringd.archiving.observer import Observation
from tieringd.archiving.partition_logger import PartitionLogger
from tieringd.archiving.remote_log import RemoteLog
from tieringd.archiving.share_groups import ShareGroups
from tieringd.broker.base import Broker
from tieringd.errors import (
    BrokerDenied,
    CorruptDataError,
    LocalFileError,
    ObjectNotFound,
    RetryableError,
    StorageDenied,
    StorageError,
    StorageUnavailable,
    TieringError,
)
from tieringd.metrics import Metrics
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import Leadership, TopicIdPartition
from tieringd.model.segment import LocalSegment
from tieringd.policies.local_hint import HintMemory, HintPlan, plan_hint
from tieringd.policies.local_retention import TrimCandidate, TrimPlan, trim_due_ms
from tieringd.policies.total_retention import is_local_expiry_unproved, plan_local_expiry
from tieringd.policies.trim_target import TrimObstacle, TrimWishes, plan_trim_to_target

_SEGMENT_BYTES = 1 << 30
"""Kafka's default for a topic that does not set `segment.bytes`."""

DENIED_PAUSE_MS = 300_000
"""Pause after the broker refused a trim for good; an operator may grant the permission meanwhile."""
SPACE_REQUEST_GOOD_MS = 600_000
"""
How long a request for space counts, from when the disk was measured. The space manager repeats it while the
disk is full. A step that waits for hours must not trim then as if the disk still were: without waiting for
replicas or for a user's deletion.
"""
PUT_OFF_MS = 60_000
"""How long a trim that did not happen for a reason that passes waits, if nothing else brings another step."""
DIFFERS_MS = 3_600_000
"""
How long a file that differs from its stored copy, or whose copy is damaged or may not be read, is not read
again. A trim of it may be due in each round, and a file may have a gigabyte.
"""
STALE_SCAN_SECONDS = 60.0
"""
How long after a trim older observations are not used for another trim: they show segments that are already
deleted.
"""


class HintPublisher(PartitionLogger):
    """Keep the stored hint in line with local retention. Owned by the partition's archiver."""

    __slots__ = ("_ages_ms", "_claim", "_memory", "_partition")

    def __init__(
        self, partition: TopicIdPartition, *, claim: Claim, ages_ms: Callable[[PartitionManifest], int]
    ) -> None:
        """Take the collaborators; *ages_ms* returns the time that ages count to."""
        self._claim = claim
        self._ages_ms = ages_ms
        self._partition = partition
        self._memory: HintMemory | None = None

    async def step(
        self, stored: StoredManifest, seen: Observation
    ) -> tuple[StoredManifest, PartitionManifest]:
        """
        Evaluate the hint where that is due, and store it if it has changed.

        Returns the stored manifest and the manifest to trim by. They differ while a hint cannot be
        stored: then the lower one of the stored and the new hint holds, because the other may be too high.
        """
        plan = self._plan(stored.existing, seen, self._memory)
        if plan.is_change:
            try:
                stored = await self._claim.commit(stored, plan.applied_to(stored.existing))
            except (StorageError, StorageUnavailable) as error:
                self._log.warning("local retention hint cannot be stored", hint=plan.offset, error=str(error))
                hints = (stored.existing.allowed_local_start_offset, plan.offset)
                lower = None if None in hints else min(hint for hint in hints if hint is not None)
                return stored, replace(stored.existing, allowed_local_start_offset=lower)
        self.note_committed(plan)
        return stored, stored.existing

    def after_upload(
        self, appended: PartitionManifest, seen: Observation, *, uploaded_bytes: int
    ) -> HintPlan:
        """Return the hint to commit together with the segments that *appended* has more than the bucket."""
        return self._plan(appended, seen, self._memory and self._memory.noted(uploaded_bytes))

    def note_committed(self, plan: HintPlan) -> None:
        """Note that *plan* is in the bucket."""
        self._memory = plan.memory

    def due_ms(self, manifest: PartitionManifest, seen: Observation) -> float:
        """Return the time from which local retention lets more of the log go than the hint allows."""
        if not seen.topic.hint_shape.has_hint:
            return math.inf
        return trim_due_ms(
            seen.log,
            manifest,
            seen.topic.local_retention_target,
            log_start_offset=seen.bounds.log_start_offset,
        )

    def _plan(self, manifest: PartitionManifest, seen: Observation, memory: HintMemory | None) -> HintPlan:
        return plan_hint(
            seen.log,
            manifest,
            seen.topic.hint_shape,
            memory,
            stored=manifest.allowed_local_start_offset,
            segment_bytes=seen.topic.segment_bytes or _SEGMENT_BYTES,
            log_start_offset=seen.bounds.log_start_offset,
            now_ms=self._ages_ms(manifest),
            due_ms=self.due_ms(manifest, seen),
        )


class TrimRecord(Protocol):
    """Record a trim in the bucket before it is asked for; see `Claim.record_trim`."""

    async def __call__(self, before_offset: int, *, is_stored_end: bool) -> bool:
        """Say whether the trim may be asked for."""
        ...


class Trimmer(PartitionLogger):
    """
    Trim one partition's local segments.

    Owned by the partition's archiver and used within its step. A crash at any point is harmless: what was
    trimmed is durable, and what was not is planned again.
    """

    __slots__ = (
        "_ages_ms",
        "_blocking",
        "_broker",
        "_denied",
        "_denied_until_ms",
        "_differs",
        "_failure",
        "_has_told_of_history",
        "_is_current",
        "_is_held",
        "_leadership",
        "_metrics",
        "_partition",
        "_proved",
        "_record",
        "_remote_log",
        "_share_groups",
        "_space_request",
        "_steady_ms",
        "_trimmed_at",
        "held_bytes",
        "is_put_off",
    )

    def __init__(
        self,
        leadership: Leadership,
        *,
        broker: Broker,
        remote_log: RemoteLog,
        metrics: Metrics,
        share_groups: ShareGroups,
        steady_ms: Callable[[], int],
        ages_ms: Callable[[PartitionManifest], int],
        is_current: Callable[[], Awaitable[bool]],
        record: TrimRecord,
    ) -> None:
        """
        Take the collaborators.

        *ages_ms* returns the time that ages count to. *steady_ms* returns milliseconds of a clock that is
        never set back. *is_current* says whether the bucket still holds the manifest that is trimmed by;
        without it, a leader that does not know yet that it was deposed would trim what its successor has cut
        off the archive. *record* stores what distinguishes tieringd's own trims from a user's DeleteRecords.
        *leadership* goes with every trim: the broker carries it out only while it leads under that epoch.
        """
        self._record = record
        self._leadership = leadership
        self._partition = leadership.partition
        self._broker = broker
        self._remote_log = remote_log
        self._metrics = metrics
        self._share_groups = share_groups
        self._steady_ms = steady_ms
        self._ages_ms = ages_ms
        self._is_current = is_current
        self.held_bytes = 0
        """Bytes that only share groups kept from the last trim."""
        self.is_put_off = False
        """Whether the last trim did not happen for a reason that passes by itself, as a broker's refusal."""
        self._proved: dict[int, tuple[int, int, int]] = {}
        self._differs: tuple[TrimCandidate, int] | None = None
        """The last candidate with other bytes than its copy, or no such copy, and until when it counts."""
        self._blocking: LocalSegment | None = None
        """The segment that ended the last comparison: it differs from its stored copy, or is not readable."""
        self._denied_until_ms = 0
        self._denied: TrimObstacle | None = None
        """The broker's refusal of the last trim; None where it refused nothing."""
        self._trimmed_at = -math.inf
        self._failure = ""
        self._has_told_of_history = False
        """Whether it was logged that records past total retention stay, for want of an epoch history."""
        self._is_held = False
        """Whether share groups held something back at the last trim, as far as this was logged."""
        self._space_request: tuple[int, int] | None = None
        """The offset up to which the space manager asked for room, and until when that counts."""

    def request_space(self, next_offset: int, *, age_ms: int = 0) -> None:
        """
        Let the next trim take durable segments before *next_offset*, because the disk needs room.

        *age_ms* is how long ago the disk was measured.
        """
        self._space_request = next_offset, self._steady_ms() + SPACE_REQUEST_GOOD_MS - age_ms

    @property
    def cloud_gc_offset(self) -> int | None:
        """Return the offset up to which the disk needs room now; None if it does not."""
        request = self._space_request
        return request[0] if request is not None and self._counts(request) else None

    def _counts(self, request: tuple[int, int]) -> bool:
        """Say whether a request for space still counts."""
        return self._steady_ms() <= request[1]

    @property
    def is_paused(self) -> bool:
        """Say whether no trim is tried at present, because the broker has just refused one."""
        return self._steady_ms() < self._denied_until_ms

    @property
    def obstacle(self) -> TrimObstacle | None:
        """Return what ended the last trim and will end the next; None if nothing did. Any thread may ask."""
        blocking = self._blocking
        if self._denied is not None or blocking is None:
            return self._denied
        return TrimObstacle(
            f"segment {blocking.base_offset} differs from its stored copy, or cannot be compared with it",
            from_offset=blocking.base_offset,
            retry_offset=blocking.next_offset or 0,
        )

    def note_proved(self, base_offset: int, identity: tuple[int, int, int]) -> None:
        """Remember, until the file is gone, that the file with *identity* matches its stored copy."""
        self._proved[base_offset] = identity

    async def trim(self, manifest: PartitionManifest, seen: Observation) -> int:
        """Trim what *manifest*, which is in the bucket, allows; return the number of segments trimmed."""
        self.held_bytes = 0
        self._forget_gone(seen)
        if self.is_paused or self._is_older_than_last_trim(seen):
            return 0
        self.is_put_off = False
        return 0 if _lacks_head(seen) else await self._trim(manifest, seen)

    async def _trim(self, manifest: PartitionManifest, seen: Observation) -> int:
        request = self._space_request if self.cloud_gc_offset is not None else None
        wishes = TrimWishes(
            hint=manifest.allowed_local_start_offset,
            awaits_hint=seen.topic.hint_shape.has_hint,
            cloud_gc_offset=request[0] if request is not None else None,
            never_because=seen.topic.never_trimmed_because,
        )
        is_urgent = request is not None
        target, plan = plan_trim_to_target(
            seen.log, manifest, wishes, log_start_offset=seen.bounds.log_start_offset
        )
        if target.spends_cloud_gc:
            self._space_request = None
        free = plan
        if not plan.candidates:
            # Nothing is left of the segments that the broker refused to delete.
            self._denied = None
        else:
            plan = await self._without_held(free, manifest, wishes, seen)
        proved = await self._prove(plan.candidates)
        if not proved:
            return 0
        if not await self._is_current():
            self.is_put_off = True
            return 0
        # The proof may take long, and a share group may have begun to read since.
        still_free = await self._without_held(free, manifest, wishes, seen)
        proved = proved[: len(still_free.candidates)]
        if not proved:
            return 0
        if request is not None and not self._counts(request):
            # The proof took longer than the disk counts as full. The next trim is planned anew, and what is
            # proved is not read again for it.
            self.is_put_off = True
            return 0
        before_offset = proved[-1].next_offset
        is_stored_end = proved[-1].pieces[-1].next_offset == before_offset
        if not await self._record(before_offset, is_stored_end=is_stored_end):
            self.is_put_off = True
            return 0
        segments = [candidate.local for candidate in proved]
        done = await self._let_go(seen, segments, before_offset=before_offset, is_urgent=is_urgent)
        return len(proved) if done else 0

    async def _without_held(
        self, free: TrimPlan, manifest: PartitionManifest, wishes: TrimWishes, seen: Observation
    ) -> TrimPlan:
        """Return the plan *free* without the segments that share groups still need."""
        hold = await self._share_groups.hold(self._partition.topic_partition, now_ms=self._ages_ms(manifest))
        if hold is None:
            self._is_held = False
            return free
        wishes = replace(wishes, share_group_hold=hold)
        _, plan = plan_trim_to_target(
            seen.log, manifest, wishes, log_start_offset=seen.bounds.log_start_offset
        )
        held = free.candidates[len(plan.candidates) :]
        self.held_bytes = sum(candidate.local.size_bytes for candidate in held)
        if held and not self._is_held:
            self._log.info("trim waits for a share group", because=hold.because, held_bytes=self.held_bytes)
        self._is_held = bool(held)
        return plan

    async def trim_expired(self, manifest: PartitionManifest, seen: Observation) -> int:
        """
        Trim what total retention took out of *manifest*, which is in the bucket; return as `trim` does.

        There is no stored copy of these segments any more, so none is compared.
        """
        log_start_offset = seen.bounds.log_start_offset
        before_offset = plan_local_expiry(seen.log, manifest, log_start_offset=log_start_offset)
        if before_offset is None or seen.topic.never_trimmed_because:
            return 0
        if is_local_expiry_unproved(seen.log, manifest, log_start_offset=log_start_offset):
            if not self._has_told_of_history:
                self._has_told_of_history = True
                self._log.warning(
                    "records before the archive's start stay on disk: the log's leader-epoch history does "
                    "not reach back to them, so they may be others; the broker's retention takes them",
                    log_start_offset=log_start_offset,
                    archive_start_offset=manifest.start_offset,
                )
            return 0
        if self._steady_ms() < self._denied_until_ms or self._is_older_than_last_trim(seen):
            return 0
        if not await self._is_current():
            self.is_put_off = True
            return 0
        closed = seen.log.closed_segments
        segments = [one for one in closed if log_start_offset < (one.next_offset or 0) <= before_offset]
        return len(segments) if await self._let_go(seen, segments, before_offset=before_offset) else 0

    async def _let_go(
        self,
        seen: Observation,
        segments: Sequence[LocalSegment],
        *,
        before_offset: int,
        is_urgent: bool = False,
    ) -> bool:
        """
        Ask the broker to delete *segments*, which end at *before_offset*; say whether it did.

        Where the broker may elect a replica that is not in sync, a trim waits until all are in sync: no
        later leader can replace what every replica holds. Only a full disk (*is_urgent*) does not wait.
        """
        try:
            log_start_offset = await self._broker.trim(
                self._leadership,
                seen.log,
                before_offset=before_offset,
                needs_every_replica=seen.topic.may_elect_uncleanly and not is_urgent,
            )
        except BrokerDenied as error:
            self._denied_until_ms, self.is_put_off = self._steady_ms() + DENIED_PAUSE_MS, True
            # One segment is enough for a trial: meanwhile others give what was wanted of this partition.
            first_end = segments[0].next_offset if segments else None
            self._denied = TrimObstacle(str(error), retry_offset=first_end or before_offset)
            self._count_failure(error)
            self._log.error("trim refused", before_offset=before_offset, error=str(error))
            return False
        except RetryableError as error:
            self.is_put_off = True
            self._count_failure(error)
            if self._failure != str(error):
                # Each observation tries again, so the same reason is logged once.
                self._failure = str(error)
                self._log.warning("trim failed", before_offset=before_offset, error=str(error))
            return False
        self._failure, self._denied = "", None
        self._trimmed_at = asyncio.get_running_loop().time()
        self._note_trimmed(segments, before_offset=before_offset, log_start_offset=log_start_offset)
        return True

    def _is_older_than_last_trim(self, seen: Observation) -> bool:
        """
        Say whether *seen* may still show what the last trim deleted.

        This holds for a limited time: a broker that crashed may have forgotten the trim, and its log then
        looks as before.
        """
        return seen.scan_began_at < self._trimmed_at > asyncio.get_running_loop().time() - STALE_SCAN_SECONDS

    async def _prove(self, candidates: Sequence[TrimCandidate]) -> list[TrimCandidate]:
        """Return the prefix of *candidates* whose local bytes match the archive; note what ends it."""
        proved: list[TrimCandidate] = []
        for candidate in candidates:
            local = candidate.local
            if self._proved.get(local.base_offset) != local.identity:
                known = self._differs
                differs = known is not None and known[0] == candidate and self._steady_ms() < known[1]
                if differs or not await self._is_same(candidate):
                    self._blocking = local
                    break
                self._proved[local.base_offset] = local.identity
            if self._blocking is not None and self._blocking.base_offset < candidate.next_offset:
                self._blocking = None
            proved.append(candidate)
        return proved

    def _forget_gone(self, seen: Observation) -> None:
        """Forget files that *seen* does not show any more: the broker's own retention deletes as well."""
        blocking = self._blocking
        if blocking is not None and not any(
            one.base_offset == blocking.base_offset and seen.bounds.log_start_offset < (one.next_offset or 0)
            for one in seen.log.segments
        ):
            self._blocking = None
        if len(self._proved) <= len(seen.log.segments):
            return
        on_disk = {one.base_offset for one in seen.log.segments}
        self._proved = {base: identity for base, identity in self._proved.items() if base in on_disk}

    async def _is_same(self, candidate: TrimCandidate) -> bool:
        """
        Say whether a local segment matches its stored copy; log where it does not.

        Compares checksums where the stored pieces begin and end with the segment. Where another leader
        cut the log elsewhere, or a job removed records, there is no checksum of just these bytes, and the
        stored batches are read.
        """
        local = candidate.local
        try:
            if candidate.has_checksums:
                sizes = [piece.size_bytes for piece in candidate.pieces]
                found = await self._remote_log.local_checksums(local, sizes)
                difference = _checksum_difference(candidate, found)
            else:
                difference = await self._remote_log.local_difference(self._partition, local, candidate.pieces)
        except (LocalFileError, StorageUnavailable, ObjectNotFound) as error:
            self.is_put_off = True
            self._log.warning("segment cannot be compared before a trim", error=str(error))
            return False
        except StorageDenied as error:
            self._differs = candidate, self._steady_ms() + DIFFERS_MS
            self._log.error(
                "stored copy of a local segment may not be read; the segment is not trimmed",
                base_offset=local.base_offset,
                path=local.path,
                error=str(error),
            )
            return False
        except CorruptDataError as error:
            # Nothing proves that the archive has these bytes. The rest of the step does not need the proof.
            self._differs = candidate, self._steady_ms() + DIFFERS_MS
            self._log.error(
                "stored copy of a local segment is damaged; the segment is not trimmed",
                base_offset=local.base_offset,
                path=local.path,
                error=str(error),
            )
            return False
        if difference:
            self._differs = candidate, self._steady_ms() + DIFFERS_MS
            self._log.error(
                "local segment differs from its stored copy; it is not trimmed",
                base_offset=local.base_offset,
                path=local.path,
                difference=difference,
            )
        return not difference

    def _note_trimmed(
        self, trimmed: Sequence[LocalSegment], *, before_offset: int, log_start_offset: int
    ) -> None:
        size_bytes = sum(segment.size_bytes for segment in trimmed)
        for segment in trimmed:
            self._proved.pop(segment.base_offset, None)
        self._metrics.trims.labels(self._partition.topic).inc(len(trimmed))
        self._metrics.trimmed_bytes.labels(self._partition.topic).inc(size_bytes)
        self._log.info(
            "local log trimmed",
            before_offset=before_offset,
            log_start_offset=log_start_offset,
            segments=len(trimmed),
            size_bytes=size_bytes,
        )

    def _count_failure(self, error: TieringError) -> None:
        self._metrics.trim_failures.labels(self._partition.topic, type(error).__name__).inc()


def _lacks_head(seen: Observation) -> bool:
    """
    Return whether the log begins, by its files, after the offset at which it begins by the broker.

    Then *seen* does not show what a trim would delete first, so nothing says that it is durable.
    """
    first_offset = seen.log.first_offset
    is_later = first_offset is not None and first_offset > seen.bounds.log_start_offset
    return is_later and not seen.log.is_reframed


def _checksum_difference(candidate: TrimCandidate, found: Sequence[int]) -> str:
    for piece, checksum in zip(candidate.pieces, found, strict=True):
        if piece.crc32c != checksum:
            return (
                f"offsets {piece.base_offset} to {piece.last_offset} have checksum {checksum:08x} on disk "
                f"and {piece.crc32c:08x} in the archive"
            )
    return ""
