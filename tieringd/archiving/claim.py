"""
The claim: one partition's manifest under one leader epoch, from the first read until it is fenced.

The claim holds all that an archiver knows of the bucket, and changes only after the bucket did. It logs and
counts each new segment, gap and replacement once, whether a commit or a later read shows it: the answer to
a commit may be lost after the commit took effect.

The process that archived the partition before this one, under the same leader epoch, may have ended with a
commit on its way. That commit can still take effect, but only one: each commit names the version that it
was made from, and a process that has ended reads no newer one. So the claim takes over the first commit of
another process under its own epoch. A second one shows that another process is alive, and fences.

A `ManifestChange` is prepared by housekeeping, concurrently with the archiver, and committed by the
archiver between two of its own commits. Every object that the change names is stored before. `ChangeQueue`
holds such changes until the archiver's next step. A change does not survive a failure: the job that offered
it learns the result, and offers it again if it still makes sense.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol

from tieringd.archive.manifest_store import (
    ManifestStore,
    StoredManifest,
    fenced_by,
    fenced_by_removal,
    rival_writer,
)
from tieringd.archiving.partition_logger import LeadershipLogger
from tieringd.errors import (
    BucketNotFound,
    RetryableError,
    RivalWriter,
    StorageError,
    StorageUnavailable,
    TieringError,
)
from tieringd.metrics import Metrics
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import Leadership, TopicIdPartition
from tieringd.policies.total_retention import RetentionPace
from tieringd.storage.background import background

OFFER_SECONDS = 600.0
"""
How long an offered change waits for its archiver's step. A step that reads files for a trim may take hours,
and the job that waits for it holds up all housekeeping.
"""
EXPECTED_EDIT_MS = 5_000
"""How soon the bucket is asked for an edit that something else has announced."""


async def is_old(_: TopicIdPartition) -> bool:
    """Say that the bucket may have a partition's manifest."""
    return False


class Claim(LeadershipLogger):
    """
    Hold a partition's manifest for its archiver. One task at a time uses it.

    Any await may be cancelled: until the answer to a commit is known, the claim assumes nothing, and the
    next use reads the manifest again.
    """

    __slots__ = (
        "_announced",
        "_edits_checked_at_ms",
        "_has_held",
        "_is_new",
        "_known",
        "_leadership",
        "_manifests",
        "_metrics",
        "_rival_commit",
        "_stored",
    )

    def __init__(
        self,
        leadership: Leadership,
        manifests: ManifestStore,
        *,
        metrics: Metrics,
        known: StoredManifest | None = None,
        is_new: Callable[[TopicIdPartition], Awaitable[bool]] = is_old,
    ) -> None:
        """
        Take the collaborators; *known* is the last manifest that this daemon read as a follower.

        *is_new* waits for the manifest of a partition's topic, and says whether the bucket most likely has
        nothing of the partition. Then it is not asked for a manifest before the first commit.
        """
        self._leadership = leadership
        self._manifests = manifests
        self._metrics = metrics
        self._known = known
        self._is_new = is_new
        self._stored: StoredManifest | None = None
        self._announced: PartitionManifest | None = None
        self._has_held = False
        """Whether this claim has read or written the manifest under its leader epoch."""
        self._rival_commit: tuple[str, int] | None = None
        """The writer and number of the one commit by another process that came in after that."""
        self._edits_checked_at_ms = 0

    @property
    def manifest(self) -> PartitionManifest | None:
        """Return the manifest in the bucket; None while it is not known for certain."""
        return self._stored.manifest if self._stored else None

    @property
    def last_manifest(self) -> PartitionManifest | None:
        """Return the manifest that was last known to be in the bucket; None when none ever was."""
        if self._announced is not None:
            return self._announced
        return self._known.manifest if self._known else None

    @property
    def last_stored(self) -> StoredManifest | None:
        """Return what the bucket was last known to hold; None when it was never asked."""
        return self._known

    @property
    def held_manifest(self) -> PartitionManifest | None:
        """
        Return the manifest that was last known to be in the bucket under this leader epoch; None before that.

        It has everything that earlier leaders archived and trimmed.
        """
        return self._announced

    async def current(
        self, begin: Callable[[], PartitionManifest], *, log_start_offset: int = 0
    ) -> StoredManifest:
        """
        Return the manifest to act on: this claim's own last write, or a fresh read.

        A manifest of an older epoch, or a missing one, is claimed at once: a deposed leader's next commit
        then fails even if this archiver has nothing to upload, and the bucket knows of the partition from
        its first observation on. *begin* returns the manifest of a partition that has none. A log start at
        *log_start_offset* that an earlier leader left may come from a trim or from a user; it counts as a
        trim by tieringd.

        Raises:
            FencedError: A newer leader epoch owns the manifest; or the manifest existed and was removed; or
                another process commits under this leader epoch.
            CorruptDataError: The stored manifest is damaged.
        """
        if self._stored is not None:
            return self._stored
        partition, leader_epoch = self._leadership.partition, self._leadership.leader_epoch

        def claimed(manifest: PartitionManifest) -> PartitionManifest:
            return replace(manifest, trimmed_offset=max(manifest.trimmed_offset, log_start_offset))

        if self._known is None and await self._is_new(partition):
            # In a first start beside ten thousand partitions, reading what is not there takes a third of the
            # time. This is tried once: whatever comes of it, the bucket is asked after that. A refusal proves
            # nothing, because a store may refuse concurrent writes.
            self._is_new = is_old
            begun = await self._manifests.begin(claimed(begin()), leader_epoch=leader_epoch)
            if begun is not None:
                self._count_commit()
                return self._hold(begun)
        stored = await self._manifests.refreshed(partition, self._known)
        found = stored.manifest
        if found is not None and found.leader_epoch > leader_epoch:
            raise fenced_by(found, leader_epoch)
        if found is None and self._known is not None and self._known.manifest is not None:
            # A new manifest would orphan all that the removed one named.
            raise fenced_by_removal(partition)
        if found is not None and self._is_rivals(stored):
            self._take_over(rival_writer(found))
        self._known = stored
        if found is None or found.leader_epoch < leader_epoch:
            return await self.commit(stored, claimed(found or begin()))
        return self._hold(stored)

    async def commit(self, stored: StoredManifest, manifest: PartitionManifest) -> StoredManifest:
        """
        Replace *stored* by *manifest*, under this claim's leader epoch.

        Raises:
            FencedError: Another writer owns the manifest now.
            StorageUnavailable: The outcome is unknown, or one commit of another process came first. The
                next use reads the manifest again.
        """
        self._stored = None
        try:
            committed = await self._manifests.commit(
                stored, manifest, leader_epoch=self._leadership.leader_epoch
            )
        except RivalWriter as rival:
            self._take_over(rival)
            raise StorageUnavailable(
                f"another process (writer {rival.writer_id}) committed first; this may be the last commit "
                f"of a process that has ended. The manifest of {self._leadership.partition} is read again"
            ) from rival
        self._count_commit()
        return self._hold(committed)

    async def is_current(self) -> bool:
        """
        Say whether the bucket still holds the version of the manifest that this claim knows.

        If not, the next use reads it again and finds out which writer owns it. A store that does not answer
        counts as unchanged: as far as this process can know, no other writer reaches it either.

        Raises:
            StorageError: An operator must act.
        """
        try:
            return await self.is_surely_current()
        except StorageUnavailable as error:
            self._log.info("manifest cannot be looked at", error=str(error))
            return True

    async def is_surely_current(self) -> bool:
        """
        Say what `is_current` says, for a caller that needs the answer of the store.

        Raises:
            StorageUnavailable: It is unknown. Ask again.
            StorageError: An operator must act.
        """
        known = self._known
        assert known is not None, "asked after `current`"
        found = await self._manifests.refreshed(self._leadership.partition, known)
        if found.version == known.version:
            return True
        self._stored = None
        self._log.warning("another writer has changed the manifest; reading it again")
        return False

    async def check_for_edits(self, pace: RetentionPace, *, now_ms: int) -> None:
        """
        Check now and then whether a job has edited the manifest (`ManifestStore.edit`).

        An archiver that commits notices an edit by another job. One with nothing to commit must poll for
        it: otherwise its readers would be sent to replaced objects, and no step would delete those.

        Raises:
            StorageError: An operator must act.
        """
        if self._stored is None:
            # The next step is about to read the manifest anyway.
            self._edits_checked_at_ms = now_ms
        elif not 0 <= now_ms - self._edits_checked_at_ms < pace.edits_interval_ms:
            await self.is_current()
            self._edits_checked_at_ms = now_ms

    def expect_edit(self, pace: RetentionPace, *, now_ms: int) -> None:
        """Let `check_for_edits` ask the bucket soon, and not only an interval after the last time."""
        due_ms = now_ms - pace.edits_interval_ms + EXPECTED_EDIT_MS
        self._edits_checked_at_ms = min(self._edits_checked_at_ms, due_ms)

    def edits_due_ms(self, pace: RetentionPace) -> int:
        """Return the time from which `check_for_edits` asks the bucket again."""
        return self._edits_checked_at_ms + pace.edits_interval_ms

    async def record_trim(self, before_offset: int, *, is_stored_end: bool) -> bool:
        """
        Record in the bucket that tieringd trims up to *before_offset*; say whether the trim may go on.

        When the record cannot be stored, for example because the store is away, a trim to the end of a
        stored segment may go on without it: no later leader takes such a log start for a user's
        DeleteRecords. See `policies.total_retention`. A missing bucket is not a store that is away: its
        content may be gone, so nothing is trimmed.

        Raises:
            FencedError: Another writer owns the manifest now.
            BucketNotFound: There is no bucket.
        """
        known = self.last_manifest
        assert known is not None, "asked after `current`"
        if before_offset <= known.trimmed_offset:
            return True
        if self._stored is None:
            return is_stored_end
        manifest = replace(self._stored.existing, trimmed_offset=before_offset)
        try:
            await self.commit(self._stored, manifest)
        except BucketNotFound:
            raise
        except (StorageError, StorageUnavailable) as error:
            self._log.warning("a trim cannot be recorded", before_offset=before_offset, error=str(error))
            return is_stored_end
        return True

    def newest(self, stored: StoredManifest) -> StoredManifest:
        """Return the last committed manifest; the older *stored* while the last outcome is unknown."""
        return self._stored or stored

    def _is_rivals(self, stored: StoredManifest) -> bool:
        """Say whether another process committed *stored* under this epoch after this claim held it."""
        found = stored.existing
        return (
            self._has_held
            and (self._known is None or stored.version != self._known.version)
            and found.leader_epoch == self._leadership.leader_epoch
            and self._manifests.is_rival(found)
        )

    def _take_over(self, rival: RivalWriter) -> None:
        """
        Note a commit by another process; the same commit may be noted twice.

        Raises:
            RivalWriter: It is the second commit, so that process is alive.
        """
        commit = (rival.writer_id, rival.commit_number)
        if self._rival_commit not in {None, commit}:
            raise rival
        if self._rival_commit is None:
            self._log.warning(
                "another process has committed under our leader epoch; one such commit is taken over",
                writer_id=rival.writer_id,
                commit_number=rival.commit_number,
            )
        self._rival_commit = commit

    def _count_commit(self) -> None:
        self._metrics.manifest_commits.labels(self._leadership.partition.topic).inc()

    def _hold(self, stored: StoredManifest) -> StoredManifest:
        self._stored = self._known = stored
        self._has_held = True
        self._announce(stored.existing)
        return stored

    def _announce(self, manifest: PartitionManifest) -> None:
        """Log and count the segments, gaps and replacements that are new in the bucket."""
        before, self._announced = self._announced, manifest
        if before is None:
            return
        topic = self._leadership.partition.topic
        segments = manifest.segments
        for row in range(segments.row_at_or_after(before.next_offset), len(segments)):
            segment = segments[row]
            self._metrics.uploads.labels(topic).inc()
            self._metrics.upload_bytes.labels(topic).inc(segment.size_bytes)
            self._log.info(
                "segment durable",
                base_offset=segment.base_offset,
                last_offset=segment.last_offset,
                size_bytes=segment.size_bytes,
            )
        for gap in manifest.gaps:
            # A gap below the live offset was spilled before and is only taken back.
            if gap not in before.gaps and gap.base_offset >= before.live_offset:
                self._metrics.gaps.labels(topic).inc()
                self._log.error(
                    "gap recorded in the archive",
                    base_offset=gap.base_offset,
                    last_offset=gap.last_offset,
                    reason=gap.reason,
                )
        for one in manifest.replacements[len(before.replacements) :]:
            offsets = one.last_offset - one.base_offset + 1
            self._metrics.replaced_offsets.labels(topic).inc(offsets)
            self._log.error(
                "archive's tail replaced: another leader's log took its place",
                base_offset=one.base_offset,
                last_offset=one.last_offset,
            )


class ManifestChange(Protocol):
    """A prepared merge, or a compacted segment that takes the place of others."""

    async def commit(self, claim: Claim, stored: StoredManifest) -> StoredManifest:
        """
        Commit the change on *stored*; return *stored* where a changed manifest makes it useless.

        Raises:
            FencedError: Another writer owns the manifest now.
            StorageUnavailable: The claim reads the manifest again; then this may be called again.
        """
        ...


class ChangeQueue:
    """
    Hold the offered changes in order. Owned by an archiver, and used on one event loop.

    A commit may be cancelled at any await. Its change then counts as one of unknown outcome, and closing
    the queue cancels the future that the offering job waits for.
    """

    __slots__ = ("_claim", "_is_closed", "_offers")

    def __init__(self, claim: Claim) -> None:
        self._claim = claim
        # A list: it holds a few offers at most, and an empty deque takes 600 bytes of each idle archiver.
        self._offers: list[tuple[ManifestChange, asyncio.Future[None]]] = []
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._offers)

    def offer(self, change: ManifestChange) -> asyncio.Future[None]:
        """Queue *change*; the future ends as `Archiver.offer` says."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        if self._is_closed:
            future.cancel()
        else:
            self._offers.append((change, future))
            timer = loop.call_later(OFFER_SECONDS, self._withdraw, future)
            future.add_done_callback(lambda _: timer.cancel())
        return future

    def _withdraw(self, future: asyncio.Future[None]) -> None:
        """Let the job of an offer go on; `commit_all` passes over the change unless it has begun with it."""
        if not future.done():
            future.set_exception(
                RetryableError(
                    f"the archiver's step has not come to this change in {OFFER_SECONDS:.0f} s; it is "
                    "prepared again later"
                )
            )

    async def commit_all(self, stored: StoredManifest) -> StoredManifest:
        """
        Commit the changes in order; return the stored manifest after them.

        Raises:
            TieringError: A change failed. `fail` must pass the error to that change and those after it.
        """
        while self._offers:
            change, future = self._offers[0]
            if not future.done():  # The offering job may have ended and cancelled its future.
                with background():
                    stored = await change.commit(self._claim, stored)
            self._offers.pop(0)
            if not future.done():
                future.set_result(None)
        return stored

    def fail(self, error: TieringError) -> None:
        """Pass *error* to all waiting jobs: the step ended without committing their changes."""
        while self._offers:
            _, future = self._offers.pop(0)
            if not future.done():
                future.set_exception(error)

    def close(self) -> None:
        """Cancel all queued changes, and any that are offered later."""
        self._is_closed = True
        while self._offers:
            self._offers.pop(0)[1].cancel()


async def ended(future: asyncio.Future[None]) -> bool:
    """
    Wait until an offered change has ended; say whether the archiver still lives.

    Waiting on the future itself would be ambiguous: when the archiver's end cancels the future, `await`
    raises as if the waiting task were cancelled.

    Raises:
        TieringError: The error that the archiver's step ended with, or that none came to the change in time.
    """
    try:
        await asyncio.wait([future])
    finally:
        future.cancel()  # Takes effect only where the waiting task was cancelled.
    if future.cancelled():
        return False
    future.result()
    return True
