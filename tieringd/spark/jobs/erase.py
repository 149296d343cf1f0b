"""
Erasure: every record with one of some keys goes from the archive, tombstones and old versions too.

Each segment is read; one that has such a record is stored once more without it, and the rest stays as it is.
What was replaced holds the records until it is deleted: by the daemon that archives the topic, after its
delay, or by the job when it is told to. Brokers are not asked: what they still hold is for them to delete.
"""

from __future__ import annotations

import secrets
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from crc32c import crc32c

from tieringd.archive.segment_rewriter import SegmentRewriter
from tieringd.errors import ConfigError, CorruptDataError, ObjectNotFound
from tieringd.formats.erasure_record import (
    ErasedPartition,
    ErasureOutcome,
    ErasureRequest,
    encode_erasure_outcome,
    encode_erasure_request,
)
from tieringd.formats.object_keys import (
    QUARANTINED_PREFIX,
    data_key,
    erasure_key,
    owner_of,
    parse_quarantined_key,
)
from tieringd.model.segment import REWRITER_PREFIX
from tieringd.spark.bucket import bucket_of
from tieringd.spark.jobs.chosen import chosen_partitions, rounds, shares
from tieringd.spark.jobs.erased_keys import fingerprints
from tieringd.spark.jobs.progress import silent, watched
from tieringd.spark.jobs.report import Report
from tieringd.spark.jobs.swapping import (
    Outcome,
    SwapKind,
    SwappedPartition,
    delete_replaced,
    swap,
    what_is_done_is_told,
)
from tieringd.spark.jobs.tasks import failures_in_words
from tieringd.spark.key_eraser import ErasureCut

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from pyspark import Broadcast
    from pyspark.sql import SparkSession

    from tieringd.archive.segment_swap import Successor
    from tieringd.config import Config
    from tieringd.model.partition import TopicIdPartition
    from tieringd.spark.bucket import Bucket
    from tieringd.spark.jobs.chosen import Share
    from tieringd.spark.jobs.progress import Progress
    from tieringd.spark.jobs.report import Value


@dataclass(frozen=True, slots=True)
class _Looked:
    """What a task did with a segment that has one of the keys, or that it could not read."""

    partition: TopicIdPartition
    successor: Successor | None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class _Eraser:
    """Erase keys from the segments of a share. Runs on an executor."""

    config: Config
    keys: Broadcast[frozenset[bytes]]
    writer_id: str

    def __call__(self, share: Share) -> list[_Looked]:
        """Store what is left of those segments that have one of the keys."""
        bucket = bucket_of(self.config)
        rewriter = SegmentRewriter(
            bucket.store,
            bucket.reader,
            writer_id=self.writer_id,
            work_directory=Path(tempfile.gettempdir()),
        )
        return list(self._looked(bucket, rewriter, share))

    def _looked(self, bucket: Bucket, rewriter: SegmentRewriter, share: Share) -> Iterator[_Looked]:
        partition, keys = share.partition, self.keys.value
        for segment in share.segments:
            try:
                if bucket.run(rewriter.removes_any(partition, segment, ErasureCut(keys))):
                    done = bucket.run(rewriter.rewrite(partition, (segment,), ErasureCut(keys)))
                    yield _Looked(partition, done)
            except (CorruptDataError, ObjectNotFound) as error:
                yield _Looked(partition, None, str(error))


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
    Erase all records with one of *keys* from the archives of *topics*, which are names or patterns.

    *requested_by* and *reason* are for the record. With *delete_after_ms* the job deletes what left these
    archives at least that long ago; 0 is everything at once, also under readers that still use it.

    Raises:
        ConfigError: There is no key, or nobody who asks.
        ObjectNotFound: The bucket holds no such topic.
        StorageError: An operator must act. The record says what was to be done; run it again. Where
            something was erased before, that is a fault of the report instead.
        StorageUnavailable: The store is away; likewise.
        TaskFailed: An executor could not do its part; likewise.
    """
    if not keys:
        raise ConfigError("no key is given: nothing can be erased")
    if not requested_by.strip():
        raise ConfigError("nobody is named who asks for this", hint="The record of the erasure needs a name")
    bucket, job_id = bucket_of(config), secrets.token_hex(8)
    request = ErasureRequest(job_id, bucket.clock(), requested_by, reason, tuple(topics), fingerprints(keys))
    chosen = bucket.run(chosen_partitions(bucket, topics))
    _store_record(bucket, request, encode_erasure_request(request), is_done=False)

    outcome = Outcome(faults=list(chosen.faults))
    eraser = _Eraser(config, spark.sparkContext.broadcast(frozenset(keys)), f"{REWRITER_PREFIX}{job_id}")
    segments_read = 0
    with what_is_done_is_told(outcome):
        for some in rounds(bucket, chosen.partitions, outcome.faults):
            todo = [share for one in some for share in shares(one.partition, one.segments)]
            with watched(spark, "erasing keys", progress), failures_in_words():
                looked = spark.sparkContext.parallelize(todo, max(1, len(todo))).flatMap(eraser).collect()
            segments_read += sum(len(one.segments) for one in some)
            _swap(bucket, looked, outcome)

    named = [one.partition for one in chosen.partitions]
    deleted_at_ms = bucket.run(_deleted_at_ms(bucket, named, outcome, after_ms=delete_after_ms))
    done = ErasureOutcome(
        bucket.clock(),
        tuple(_erased(one, config.archive_delete_delay_ms) for one in outcome.swapped),
        deleted_at_ms,
        tuple(outcome.faults),
    )
    record: Value = None
    with what_is_done_is_told(outcome, "the record of what was erased is not stored; run the job again"):
        _store_record(bucket, request, encode_erasure_outcome(request, done), is_done=True)
        record = erasure_key(begun_at_ms=request.begun_at_ms, job_id=job_id, is_done=True)
    quarantined: Value = None
    with what_is_done_is_told(outcome, "objects in quarantine may have the keys, and were not counted"):
        quarantined = bucket.run(_quarantined(bucket, frozenset(named)))
    figures: dict[str, Value] = {
        "job_id": job_id,
        "keys": len(request.key_sha256),
        "topics": len(chosen.topics),
        "partitions": len(chosen.partitions),
        "segments_read": segments_read,
        **outcome.figures(),
        "quarantined_objects": quarantined,
        "record": record,
    }
    return Report("erase", figures, (outcome.table(),), tuple(outcome.faults))


def _swap(bucket: Bucket, looked: Sequence[_Looked], outcome: Outcome) -> None:
    """Swap what was rewritten; what cannot be read stays, and so may keep a key."""
    successors: dict[TopicIdPartition, list[Successor]] = defaultdict(list)
    for one in looked:
        if one.successor is None:
            outcome.faults.append(f"{one.partition}: a segment may still have one of the keys: {one.fault}")
        else:
            successors[one.partition].append(one.successor)
    for partition, some in successors.items():
        bucket.run(swap(bucket, partition, some, outcome, kind=SwapKind.REWRITTEN))


async def _deleted_at_ms(
    bucket: Bucket, partitions: Sequence[TopicIdPartition], outcome: Outcome, *, after_ms: int | None
) -> int | None:
    """Delete as *after_ms* says; return when all was that was replaced, None where some may be left."""
    if after_ms is None:
        return None
    known = len(outcome.faults)
    await delete_replaced(bucket, partitions, outcome, after_ms=after_ms)
    return bucket.clock() if after_ms == 0 and len(outcome.faults) == known else None


def _store_record(bucket: Bucket, request: ErasureRequest, data: bytes, *, is_done: bool) -> None:
    key = erasure_key(begun_at_ms=request.begun_at_ms, job_id=request.job_id, is_done=is_done)
    # The name is nobody else's. Without a condition it is stored again when an answer was lost.
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


async def _quarantined(bucket: Bucket, partitions: frozenset[TopicIdPartition]) -> int:
    """Return how many objects in quarantine were of these partitions: they may hold the keys, too."""
    found, start_after = 0, None
    while True:
        page = await bucket.store.list_page(QUARANTINED_PREFIX, start_after=start_after)
        keys = (parse_quarantined_key(info.key) for info in page.objects)
        found += sum(1 for key in keys if key is not None and owner_of(key) in partitions)
        start_after = page.next_start_after
        if start_after is None:
            return found
