"""The end of a writing job: swap in its new segments, delete replaced objects, and record the outcome."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final, TypeVar

from tieringd.archive.retired_objects import GoneSince, dated_ms, delete_retired
from tieringd.archive.segment_swap import SegmentSwap, Successor, Swapped, held_in
from tieringd.errors import ConfigError, ObjectNotFound, StorageUnavailable, TieringError
from tieringd.model.partition import TopicIdPartition
from tieringd.policies.record_removal import CompactionBasis
from tieringd.spark.jobs.report import Table, Value
from tieringd.storage.at_once import at_once

if TYPE_CHECKING:
    # An ordinary import would load prometheus_client into processes that do not need it.
    from tieringd.model.manifest import PartitionManifest
    from tieringd.spark.bucket import Bucket

T = TypeVar("T")

PARTITIONS_AT_ONCE: Final = 64
"""
Partitions that a driver works on at once. Each makes its requests one after the other.

Ten thousand partitions take a minute or two then where a store answers in 30 ms. The store's own limit of
connections applies as well.
"""
CHANGED_MEANWHILE = "another process replaced the same segments while the job ran. Run the job again"
_ALL_TIMES_MS = 2**62


@dataclass(frozen=True, slots=True)
class SwappedPartition:
    """A partition in which segments were replaced."""

    partition: TopicIdPartition
    successors: tuple[Successor, ...]
    retired_at_ms: int

    @property
    def removed_records(self) -> int:
        """Return how many records were removed from the partition."""
        return sum(one.removed_records for one in self.successors)


@dataclass(slots=True)
class SwapOutcome:
    """What a job has changed so far, and its faults. Owned by the job."""

    swapped: list[SwappedPartition] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    deleted_segments: int = 0
    has_begun: bool = False
    """Whether the job has tried to replace anything."""

    def add(self, part: SwapOutcome) -> None:
        """Add the outcome of a part of the job."""
        self.swapped += part.swapped
        self.faults += part.faults
        self.deleted_segments += part.deleted_segments
        self.has_begun |= part.has_begun

    def figures(self) -> dict[str, Value]:
        """Return the sums of what was replaced."""
        return {
            "partitions_changed": len(self.swapped),
            "segments_before": sum(len(one.parts) for each in self.swapped for one in each.successors),
            "segments_after": sum(len(each.successors) for each in self.swapped),
            "size_bytes_before": sum(map(_bytes_before, self.swapped)),
            "size_bytes_after": sum(map(_bytes_after, self.swapped)),
            "records_removed": sum(one.removed_records for one in self.swapped),
            "deleted_segments": self.deleted_segments,
        }

    def table(self) -> Table:
        """Return a table of what was replaced, by partition."""
        return Table(
            "partitions",
            (
                "topic",
                "partition",
                "topic_id",
                "segments_before",
                "segments_after",
                "size_bytes_before",
                "size_bytes_after",
                "records_removed",
            ),
            tuple(
                (
                    each.partition.topic,
                    each.partition.partition,
                    each.partition.topic_id,
                    sum(len(one.parts) for one in each.successors),
                    len(each.successors),
                    _bytes_before(each),
                    _bytes_after(each),
                    each.removed_records,
                )
                for each in self.swapped
            ),
        )


@contextmanager
def outcome_reported(
    outcome: SwapOutcome, fault: str = "the job stopped before its end; run it again"
) -> Iterator[None]:
    """
    Turn an error in the context into a *fault* if segments may have been replaced before.

    So the job still ends with a report, which lists the replaced segments.

    Raises:
        TieringError: The error of the context, if nothing has been replaced.
    """
    try:
        yield
    except TieringError as error:
        if not outcome.has_begun:
            raise
        outcome.faults.append(f"{fault}: {error}")


class SwapKind(Enum):
    """How new segments of a partition replace the old ones."""

    MERGED = "merged"
    """Each one independently; it holds all bytes of the segments that it replaces."""
    REWRITTEN = "rewritten"
    """Each one independently."""
    COMPACTED = "compacted"
    """All together or none."""


@dataclass(frozen=True, slots=True)
class PartitionSwap:
    """The new segments of one partition."""

    partition: TopicIdPartition
    successors: Sequence[Successor]
    basis: CompactionBasis | None = None
    """What a compaction read; None for other kinds."""


@dataclass(frozen=True, slots=True)
class NotSwapped:
    """Partitions whose segments were not replaced, although new ones are stored."""

    faulty: set[TopicIdPartition]
    """Partitions with a fault in the outcome."""
    overtaken: dict[TopicIdPartition, PartitionManifest]
    """Current manifests of partitions where retention removed some segments of a compaction's run."""


async def swap_all(
    bucket: Bucket,
    swaps: Sequence[PartitionSwap],
    outcome: SwapOutcome,
    *,
    kind: SwapKind,
    count: int = PARTITIONS_AT_ONCE,
) -> NotSwapped:
    """
    Do the swaps of different partitions, *count* at once, and return the partitions that were not swapped.

    The results and faults go to *outcome*, in the order of *swaps*.
    """
    overtaken: dict[TopicIdPartition, PartitionManifest] = {}

    async def one(each: PartitionSwap, part: SwapOutcome) -> None:
        manifest = await swap(bucket, each.partition, each.successors, part, kind=kind, basis=each.basis)
        if manifest is not None:
            overtaken[each.partition] = manifest

    parts = await _for_each(swaps, one, outcome, count=count)
    faulty = {each.partition for each, part in zip(swaps, parts, strict=True) if part.faults}
    return NotSwapped(faulty, overtaken)


def expired_parts(successor: Successor, manifest: PartitionManifest) -> int:
    """Return how many of the segments that *successor* replaces have expired in *manifest*."""
    return sum(part.next_offset <= manifest.start_offset for part in successor.parts)


async def _for_each(
    items: Sequence[T],
    work: Callable[[T, SwapOutcome], Awaitable[None]],
    outcome: SwapOutcome,
    *,
    count: int = PARTITIONS_AT_ONCE,
) -> list[SwapOutcome]:
    """
    Do *work* for each of *items*, *count* at once, each with an outcome of its own, and return those.

    All are added to *outcome* in the order of *items*, also when an item ends with an error.
    """
    parts = [SwapOutcome() for _ in items]
    try:
        await at_once(list(zip(items, parts, strict=True)), lambda pair: work(*pair), count=count)
    finally:
        for part in parts:
            outcome.add(part)
    return parts


async def swap(
    bucket: Bucket,
    partition: TopicIdPartition,
    successors: Sequence[Successor],
    outcome: SwapOutcome,
    *,
    kind: SwapKind,
    basis: CompactionBasis | None = None,
) -> PartitionManifest | None:
    """
    Swap *successors* into the manifest of one partition. The result, or a fault, goes to *outcome*.

    *basis* is what a compaction read.

    Returns:
        The current manifest if a compaction was not swapped in because retention took some of the segments
        that one of *successors* replaces; None otherwise. This is no fault: the rest can be rewritten.
    """
    segment_swap = _swap_in(bucket)

    async def put_in_place() -> Swapped:
        if kind is SwapKind.MERGED:
            return await segment_swap.merge(partition, successors)
        return await segment_swap.rewrite(
            partition, successors, is_whole=kind is SwapKind.COMPACTED, basis=basis
        )

    outcome.has_begun = True
    try:
        try:
            swapped = await put_in_place()
        except StorageUnavailable:
            # Perhaps only the answer was lost. Then the second attempt finds the new segments in place.
            swapped = await put_in_place()
    except StorageUnavailable as error:
        outcome.faults.append(
            f"{partition}: it is not known whether its segments were replaced: {error}. Run the job again"
        )
        return None
    except TieringError as error:
        outcome.faults.append(f"{partition}: its segments are unchanged: {error}")
        return None
    if swapped.done:
        outcome.swapped.append(SwappedPartition(partition, swapped.done, swapped.retired_at_ms))
    if swapped.left_because:
        outcome.faults.append(
            f"{partition}: its segments are unchanged: {swapped.left_because}. Run the job again"
        )
    elif swapped.left:
        is_overtaken = any(0 < expired_parts(one, swapped.manifest) < len(one.parts) for one in successors)
        if kind is SwapKind.COMPACTED and is_overtaken:
            return swapped.manifest
        outcome.faults.append(
            f"{partition}: {swapped.left} new segments were not needed: {CHANGED_MEANWHILE}"
        )
    return None


async def end_holding(
    bucket: Bucket, manifests: Sequence[PartitionManifest], outcome: SwapOutcome
) -> set[TopicIdPartition]:
    """
    Stop holding the segments that compactions replaced in these partitions, after an erasure.

    Held segments may have erased keys, and an election could put them back. Failures are faults of *outcome*;
    their partitions are returned.
    """
    segment_swap = _swap_in(bucket)
    partitions = [one.partition for one in manifests if held_in(one)]

    async def release(partition: TopicIdPartition, part: SwapOutcome) -> None:
        try:
            await segment_swap.release(partition)
        except TieringError as error:
            part.faults.append(
                f"{partition}: segments that a compaction replaced may still have one of the keys, and an "
                f"election could bring them back: {error}. Run the job again"
            )

    parts = await _for_each(partitions, release, outcome)
    return {partition for partition, part in zip(partitions, parts, strict=True) if part.faults}


async def delete_replaced(
    bucket: Bucket,
    partitions: Sequence[TopicIdPartition],
    outcome: SwapOutcome,
    *,
    after_ms: int,
    gone_since: Mapping[TopicIdPartition, GoneSince] | None = None,
    without_log: Container[TopicIdPartition] = (),
) -> None:
    """
    Delete the objects of segments that left these partitions' manifests at least *after_ms* ago.

    A commit is dated before it is sent. So the time counts from the first manifest that was read with it, by
    the job at its start (*gone_since*) or now, and begins when the store took that manifest. Where a daemon
    commits all the time, that is lately, and the daemon deletes.

    Segments that are held for compactions are deleted only in partitions *without_log*, of which no broker
    has a log. With *after_ms* 0 all others are deleted, independent of any clock. Failures are faults of
    *outcome*.
    """
    clock_status = bucket.clock.status()
    if after_ms and clock_status.doubt:
        outcome.faults.append(
            f"objects that no manifest names any more were not deleted: {clock_status.doubt}; set this "
            "host's clock, and run the job again"
        )
        return
    away: StorageUnavailable | None = None
    left: list[TopicIdPartition] = []

    async def delete(partition: TopicIdPartition, part: SwapOutcome) -> None:
        nonlocal away
        if away is not None:
            # Each other partition would wait for the store as well.
            left.append(partition)
            return
        try:
            deleted = await _delete_replaced(
                bucket,
                partition,
                after_ms=after_ms,
                gone_since=(gone_since or {}).get(partition, GoneSince()),
                keeps_held=partition not in without_log,
            )
        except StorageUnavailable as error:
            away = error
            left.append(partition)
        except TieringError as error:
            part.faults.append(
                f"{partition}: objects that no manifest names any more were not deleted: {error}"
            )
        else:
            part.deleted_segments += deleted

    await _for_each(partitions, delete, outcome)
    if left:
        others = f", and in {len(left) - 1} other partitions" if len(left) > 1 else ""
        outcome.faults.append(
            f"{left[0]}{others}: objects that no manifest names any more were not deleted: {away}"
        )


async def _delete_replaced(
    bucket: Bucket, partition: TopicIdPartition, *, after_ms: int, gone_since: GoneSince, keeps_held: bool
) -> int:
    """
    Delete the objects of one partition; return of how many segments.

    Raises:
        ConfigError: No age is certain.
    """
    until_ms, since_ms = _ALL_TIMES_MS, dated_ms
    if after_ms:
        stored = await bucket.manifests.load(partition)
        if stored.manifest is None:
            raise ObjectNotFound("the bucket has no manifest of this partition any more")
        clock_status = bucket.clock.status()
        if doubt := clock_status.doubt_after(stored.manifest.committed_at_ms):
            raise ConfigError(doubt, hint="Set this host's clock, and run the job again")
        until_ms = clock_status.now_ms - after_ms
        gone_since.note(stored)
        since_ms = gone_since.ms
    deleted = await delete_retired(
        bucket.store,
        bucket.manifests,
        partition,
        retired_until_ms=until_ms,
        keeps_held=keeps_held,
        since_ms=since_ms,
    )
    return len(deleted)


def _swap_in(bucket: Bucket) -> SegmentSwap:
    return SegmentSwap(
        bucket.store,
        bucket.manifests,
        now_ms=bucket.clock,
        target_manifest_bytes=bucket.config.cloud_storage_target_manifest_size_bytes,
    )


def _bytes_before(swapped: SwappedPartition) -> int:
    return sum(part.size_bytes for one in swapped.successors for part in one.parts)


def _bytes_after(swapped: SwappedPartition) -> int:
    return sum(one.segment.size_bytes for one in swapped.successors)
