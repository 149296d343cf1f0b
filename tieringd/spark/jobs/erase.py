"""
Erase every record with one of some keys from the archive, tombstones and old versions included.

The job reads each segment. A segment with such a record is stored again without it; the others stay as they
are. The replaced objects hold the records until they are deleted: by the daemon that archives the topic after
its delay, or by the job if it is told to. The job does not contact brokers, which must delete their own data.

At its end the job lists the bucket. Data that it did not process is a fault: a partition without a manifest,
or an object with a key that no manifest names. The record of the job says that everything is deleted only if
there is no such fault, and the store keeps no bytes of deleted objects.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from crc32c import crc32c

from tieringd.archive.segment_rewriter import SegmentRewriter
from tieringd.archive.segment_swap import Successor
from tieringd.errors import ConfigError, CorruptDataError, ObjectNotFound, TieringError
from tieringd.formats.job_records import (
    ErasedPartition,
    ErasureOutcome,
    ErasureRequest,
    PartitionGoneOver,
    encode_erasure_outcome,
    encode_erasure_request,
)
from tieringd.formats.object_keys import data_key, erasure_key
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import REWRITER_PREFIX
from tieringd.spark.bucket import Bucket, bucket_of
from tieringd.spark.jobs.chosen import SegmentShare, chosen_partitions, rewriter_of, rounds, shares
from tieringd.spark.jobs.erased_keys import fingerprints
from tieringd.spark.jobs.job_progress import Progress, silent
from tieringd.spark.jobs.leftovers import Leftovers, find_leftovers, search, suspect_faults
from tieringd.spark.jobs.report import Report, Value
from tieringd.spark.jobs.swapping import (
    PartitionSwap,
    SwapKind,
    SwapOutcome,
    SwappedPartition,
    delete_replaced,
    end_holding,
    outcome_reported,
    swap_all,
)
from tieringd.spark.jobs.tasks import run_tasks
from tieringd.spark.key_eraser import ErasureCut

if TYPE_CHECKING:
    from pyspark import Broadcast
    from pyspark.sql import SparkSession

    # An ordinary import would load pydantic into processes that do not need it.
    from tieringd.config import Config


@dataclass(frozen=True, slots=True)
class _Rewritten:
    """A segment that has one of the keys and was rewritten, or that could not be read."""

    partition: TopicIdPartition
    successor: Successor | None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class _Eraser:
    """Erases keys from the segments of a share. Runs on an executor."""

    config: Config
    keys: Broadcast[frozenset[bytes]]
    writer_id: str

    def __call__(self, share: SegmentShare) -> list[_Rewritten]:
        """Store the rest of each segment that has one of the keys, and return one result for each."""
        bucket = bucket_of(self.config)
        rewriter = rewriter_of(bucket, writer_id=self.writer_id)
        return list(self._rewritten(bucket, rewriter, share))

    def _rewritten(
        self, bucket: Bucket, rewriter: SegmentRewriter, share: SegmentShare
    ) -> Iterator[_Rewritten]:
        partition, keys = share.partition, self.keys.value
        for segment in share.segments:
            try:
                if bucket.run(rewriter.removes_any(partition, segment, ErasureCut(keys))):
                    done = bucket.run(rewriter.rewrite(partition, (segment,), ErasureCut(keys)))
                    yield _Rewritten(partition, done)
            except (CorruptDataError, ObjectNotFound) as error:
                yield _Rewritten(partition, None, str(error))


def erase(
    spark: SparkSession,
    config: Config,
    *,
    topics: Sequence[str],
    keys: Collection[bytes],
    requested_by: str,
    reason: str = "",
    delete_after_ms: int | None = None,
    progress: Progress = silent,
) -> Report:
    """
    Erase all records with one of *keys* from the archives of *topics*.

    Args:
        spark: The session that runs the tasks.
        config: The archive's configuration.
        topics: Names or patterns.
        keys: The keys to erase.
        requested_by: The person who requests the erasure; stored in its record.
        reason: Why; stored in its record.
        delete_after_ms: Delete objects that left these archives at least this many ms ago. 0 deletes
            everything at once, even objects that readers still use. None leaves the deletion to the daemon.
        progress: Called with the progress of each step.

    Raises:
        ConfigError: *keys* is empty, or *requested_by* is.
        ObjectNotFound: The bucket holds no such topic.
        StorageError: An operator must act. The record says what was to be done; run the job again. If
            something was erased before, the error is a fault of the report instead.
        StorageUnavailable: The store does not answer; as above.
        TaskFailed: An executor failed; as above.
    """
    if not keys:
        raise ConfigError("no key is given: nothing can be erased")
    if not requested_by.strip():
        raise ConfigError(
            "the name of the person who requested the erasure is missing",
            hint="Give the name; the record of the erasure needs it",
        )
    bucket, job_id = bucket_of(config), secrets.token_hex(8)
    request = ErasureRequest(job_id, bucket.clock(), requested_by, reason, tuple(topics), fingerprints(keys))
    chosen = bucket.run(chosen_partitions(bucket, topics))
    _store_record(bucket, request, encode_erasure_request(request), is_done=False)

    outcome = SwapOutcome(faults=list(chosen.faults))
    shared_keys = spark.sparkContext.broadcast(frozenset(keys))
    eraser = _Eraser(config, shared_keys, f"{REWRITER_PREFIX}{job_id}")
    reached = _Reached()
    segments_read = 0
    with outcome_reported(outcome):
        # Segments that a compaction replaced and that are held may have the keys too. They could be put
        # back after an election, so their holding ends, also in partitions that have no other segments.
        empty = [one for one in chosen.partitions if not one.segments]
        reached.note(empty, bucket.run(end_holding(bucket, empty, outcome)))
        for some in rounds(bucket, chosen.partitions, outcome.faults):
            todo = [share for one in some for share in shares(one.partition, one.segments)]
            done_tasks = run_tasks(spark, "erasing keys", todo, eraser, progress=progress)
            rewritten = list(chain.from_iterable(done_tasks))
            segments_read += sum(len(one.segments) for one in some)
            faulty = _swap(bucket, rewritten, outcome)
            reached.note(some, faulty | bucket.run(end_holding(bucket, some, outcome)))

    named = [one.partition for one in chosen.partitions]
    if delete_after_ms is not None:
        bucket.run(
            delete_replaced(bucket, named, outcome, after_ms=delete_after_ms, gone_since=chosen.gone_since)
        )
    deleted_at_ms = bucket.clock()
    left, suspects = Leftovers(), []
    with outcome_reported(
        outcome, "the bucket was not searched for objects that no manifest names; run the job again"
    ):
        left = bucket.run(find_leftovers(bucket, topics, reached.gone_over, told=reached.faulty))
        outcome.faults += left.faults
        suspects = search(spark, config, [*left.unnamed, *left.quarantined], shared_keys, progress=progress)
        outcome.faults += suspect_faults(suspects)
    begun_key = erasure_key(begun_at_ms=request.begun_at_ms, job_id=job_id, is_done=False)
    kept_by_store = bucket.run(_kept_by_store(bucket, begun_key))
    is_deleted = delete_after_ms == 0 and not outcome.faults and not kept_by_store
    done = ErasureOutcome(
        bucket.clock(),
        tuple(_erased(one, config.archive_delete_delay_ms) for one in outcome.swapped),
        deleted_at_ms if is_deleted else None,
        tuple(outcome.faults),
        tuple(_gone_over(one, left.replaced_from) for one in reached.gone_over.values()),
        tuple(one.stored.key for one in suspects),
        kept_by_store,
    )
    record: Value = None
    with outcome_reported(outcome, "the record of the erasure is not stored; run the job again"):
        _store_record(bucket, request, encode_erasure_outcome(request, done), is_done=True)
        record = erasure_key(begun_at_ms=request.begun_at_ms, job_id=job_id, is_done=True)
    figures: dict[str, Value] = {
        "job_id": job_id,
        "keys": len(request.key_sha256),
        "topics": len(chosen.topics),
        "partitions": len(chosen.partitions),
        "partitions_gone_over": len(done.gone_over),
        "segments_read": segments_read,
        **outcome.figures(),
        "unnamed_objects": len(left.unnamed),
        "quarantined_objects": len(left.quarantined),
        "objects_left": len(suspects),
        "kept_by_store": "; ".join(kept_by_store) or None,
        "deleted_at_ms": done.deleted_at_ms,
        "record": record,
    }
    return Report("erase", figures, (outcome.table(),), tuple(outcome.faults))


@dataclass(slots=True)
class _Reached:
    """The partitions that the job has processed, with their manifests of that time."""

    gone_over: dict[TopicIdPartition, PartitionManifest] = field(default_factory=dict)
    faulty: set[TopicIdPartition] = field(default_factory=set)
    """Partitions of which a part may still have a key. A fault of the report names each."""

    def note(self, some: Sequence[PartitionManifest], faulty: Collection[TopicIdPartition]) -> None:
        """Note the partitions of a round, and which of them are faulty."""
        self.faulty.update(faulty)
        self.gone_over.update({one.partition: one for one in some if one.partition not in faulty})


def _swap(bucket: Bucket, rewritten: Sequence[_Rewritten], outcome: SwapOutcome) -> set[TopicIdPartition]:
    """
    Swap in the rewritten segments; return the partitions of which a part may still have a key.

    Segments that cannot be read stay as they are. Each returned partition has a fault in *outcome*.
    """
    successors: dict[TopicIdPartition, list[Successor]] = defaultdict(list)
    faulty: set[TopicIdPartition] = set()
    for one in rewritten:
        if one.successor is None:
            faulty.add(one.partition)
            outcome.faults.append(f"{one.partition}: a segment may still have one of the keys: {one.fault}")
        else:
            successors[one.partition].append(one.successor)
    swaps = [PartitionSwap(partition, some) for partition, some in successors.items()]
    return faulty | bucket.run(swap_all(bucket, swaps, outcome, kind=SwapKind.REWRITTEN)).faulty


def _gone_over(
    manifest: PartitionManifest, replaced_from: Mapping[TopicIdPartition, int]
) -> PartitionGoneOver:
    next_offset = replaced_from.get(manifest.partition, manifest.next_offset)
    return PartitionGoneOver(
        manifest.partition,
        manifest.start_offset,
        next_offset,
        has_expired=manifest.expired_at_ms is not None,
    )


async def _kept_by_store(bucket: Bucket, key: str) -> tuple[str, ...]:
    """Return the ways in which the store keeps bytes of deleted objects. A failed query counts as one."""
    try:
        return await bucket.store.kept_after_delete(key)
    except TieringError as error:
        return (f"it is not known whether the store keeps deleted objects: {error}",)


def _store_record(bucket: Bucket, request: ErasureRequest, data: bytes, *, is_done: bool) -> None:
    key = erasure_key(begun_at_ms=request.begun_at_ms, job_id=request.job_id, is_done=is_done)
    # Only this job uses this name, so the put needs no condition, and a retry after a lost answer succeeds.
    bucket.run(bucket.store.put(key, data, crc32c=crc32c(data)))


def _erased(one: SwappedPartition, delay_ms: int) -> ErasedPartition:
    partition = one.partition
    return ErasedPartition(
        partition,
        one.removed_records,
        tuple(data_key(partition, part) for each in one.successors for part in each.parts),
        tuple(data_key(partition, each.segment) for each in one.successors),
        one.retired_at_ms,
        one.retired_at_ms + delay_ms,
    )
