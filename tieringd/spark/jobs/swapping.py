"""The end of a job that writes: its new segments take their places, and what that came to."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from tieringd.archive.retired_objects import delete_retired
from tieringd.archive.segment_swap import SegmentSwap, Successor, Swapped
from tieringd.errors import StorageUnavailable, TieringError
from tieringd.model.partition import TopicIdPartition
from tieringd.policies.record_removal import CompactionBasis
from tieringd.spark.jobs.report import Table, Value

if TYPE_CHECKING:
    # An ordinary import would load prometheus_client into processes that do not need it.
    from tieringd.spark.bucket import Bucket

CHANGED_MEANWHILE = "someone else has replaced the same segments meanwhile. Run the job again"
_ALL_TIMES_MS = 2**62


@dataclass(frozen=True, slots=True)
class SwappedPartition:
    """A partition in which segments were replaced."""

    partition: TopicIdPartition
    successors: tuple[Successor, ...]
    retired_at_ms: int

    @property
    def removed_records(self) -> int:
        """Return how many records it has lost."""
        return sum(one.removed_records for one in self.successors)


@dataclass(slots=True)
class Outcome:
    """What a job has done so far. Owned by the job."""

    swapped: list[SwappedPartition] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    deleted_segments: int = 0
    has_begun: bool = False
    """Whether it has tried to replace anything."""

    def figures(self) -> dict[str, Value]:
        """Return what was replaced, in sum."""
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
        """Return what was replaced, by partition."""
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
def what_is_done_is_told(
    outcome: Outcome, fault: str = "the job stopped before its end; run it again"
) -> Iterator[None]:
    """
    Turn an error into a *fault* where segments may have been replaced before it: the report tells of them.

    Raises:
        TieringError: What was raised in the context, where nothing has been replaced.
    """
    try:
        yield
    except TieringError as error:
        if not outcome.has_begun:
            raise
        outcome.faults.append(f"{fault}: {error}")


class SwapKind(Enum):
    """How new segments take their places."""

    MERGED = "merged"
    """Each for itself; they hold all bytes of what they replace."""
    REWRITTEN = "rewritten"
    """Each for itself."""
    COMPACTED = "compacted"
    """All together or not at all."""


async def swap(
    bucket: Bucket,
    partition: TopicIdPartition,
    successors: Sequence[Successor],
    outcome: Outcome,
    *,
    kind: SwapKind,
    basis: CompactionBasis | None = None,
) -> None:
    """
    Put *successors* in their places in one partition; what is in the way is told in *outcome*.

    *basis* is what was read for a compaction.
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
            # Only the answer may have been lost: then this finds the new segments in their places.
            swapped = await put_in_place()
    except StorageUnavailable as error:
        outcome.faults.append(
            f"{partition}: it is not known whether its segments were replaced: {error}. Run the job again"
        )
        return
    except TieringError as error:
        outcome.faults.append(f"{partition}: its segments are as they were: {error}")
        return
    if swapped.done:
        outcome.swapped.append(SwappedPartition(partition, swapped.done, swapped.retired_at_ms))
    if swapped.left_because:
        outcome.faults.append(
            f"{partition}: its segments are as they were: {swapped.left_because}. Run the job again"
        )
    elif swapped.left:
        outcome.faults.append(
            f"{partition}: {swapped.left} new segments were not needed: {CHANGED_MEANWHILE}"
        )


async def end_holding(bucket: Bucket, partitions: Sequence[TopicIdPartition], outcome: Outcome) -> None:
    """End the holding of what compactions replaced in *partitions*, which an erasure has gone over."""
    segment_swap = _swap_in(bucket)
    for partition in partitions:
        try:
            await segment_swap.release(partition)
        except TieringError as error:
            outcome.faults.append(
                f"{partition}: segments that a compaction replaced may still have one of the keys, and take "
                f"their places again after an election: {error}. Run the job again"
            )


async def delete_replaced(
    bucket: Bucket,
    partitions: Sequence[TopicIdPartition],
    outcome: Outcome,
    *,
    after_ms: int,
    without_log: Container[TopicIdPartition] = (),
) -> None:
    """
    Delete the objects of what left these partitions' manifests at least *after_ms* ago.

    What is held for compactions goes only in partitions *without_log*: no broker has a log of them.
    With 0 all the rest goes, whatever the clock shows: then no age decides.
    """
    judgement = bucket.clock.judgement()
    if after_ms and judgement.doubt:
        outcome.faults.append(
            f"objects that nothing names any more are left: {judgement.doubt}; set this host's clock, and "
            "run the job again"
        )
        return
    until_ms = judgement.now_ms - after_ms if after_ms else _ALL_TIMES_MS
    for partition in partitions:
        try:
            deleted = await delete_retired(
                bucket.store,
                bucket.manifests,
                partition,
                retired_until_ms=until_ms,
                keeps_held=partition not in without_log,
            )
        except StorageUnavailable as error:
            # Each of the others would wait for the store as well.
            outcome.faults.append(
                f"{partition}, and all after it: objects that nothing names any more are left: {error}"
            )
            return
        except TieringError as error:
            outcome.faults.append(f"{partition}: objects that nothing names any more are left: {error}")
        else:
            outcome.deleted_segments += len(deleted)


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
