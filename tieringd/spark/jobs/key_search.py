"""
The dry run of an erasure: find the segments that have one of some keys. Nothing is stored, not even a record.

Data that the erasure could not process is a fault here as well.

A segment is read up to the first record with a key, so the dry run takes no longer than the erasure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tieringd.errors import ConfigError, CorruptDataError, ObjectNotFound
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import REWRITER_PREFIX
from tieringd.spark.bucket import bucket_of
from tieringd.spark.jobs.chosen import SegmentShare, chosen_partitions, rewriter_of, rounds, shares
from tieringd.spark.jobs.job_progress import Progress, silent
from tieringd.spark.jobs.leftovers import find_leftovers, suspect_faults
from tieringd.spark.jobs.leftovers import search as search_objects
from tieringd.spark.jobs.report import Report, Table, Value
from tieringd.spark.jobs.tasks import run_tasks
from tieringd.spark.key_eraser import ErasureCut

if TYPE_CHECKING:
    from pyspark import Broadcast
    from pyspark.sql import SparkSession

    # An ordinary import would load pydantic into processes that do not need it.
    from tieringd.config import Config


@dataclass(frozen=True, slots=True)
class _Found:
    """The segments with one of the keys in a share."""

    segments: int = 0
    size_bytes: int = 0
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _KeyFinder:
    """Searches the segments of a share for keys. Runs on an executor."""

    config: Config
    keys: Broadcast[frozenset[bytes]]

    def __call__(self, share: SegmentShare) -> _Found:
        """Count the segments that have one of the keys."""
        bucket, partition = bucket_of(self.config), share.partition
        rewriter = rewriter_of(bucket, writer_id=REWRITER_PREFIX)
        sizes, faults = [], []
        for segment in share.segments:
            try:
                # To the end: what the erasure could not rewrite is a fault of the search as well.
                cut = ErasureCut(self.keys.value)
                if bucket.run(rewriter.removes_any(partition, segment, cut, reads_all=True)):
                    sizes.append(segment.size_bytes)
            except (CorruptDataError, ObjectNotFound) as error:
                faults.append(f"{partition}: a segment may have one of the keys: {error}")
        return _Found(len(sizes), sum(sizes), tuple(faults))


def search(
    spark: SparkSession,
    config: Config,
    *,
    topics: Sequence[str],
    keys: Collection[bytes],
    progress: Progress = silent,
) -> Report:
    """
    Report which partitions of *topics*, names or patterns, have records with one of *keys*.

    Raises:
        ConfigError: *keys* is empty.
        ObjectNotFound: The bucket holds no such topic.
        TaskFailed: An executor failed: the store does not answer, or an operator must act.
    """
    if not keys:
        raise ConfigError("no key is given: nothing can be found")
    bucket = bucket_of(config)
    chosen = bucket.run(chosen_partitions(bucket, topics))
    faults = list(chosen.faults)
    shared_keys = spark.sparkContext.broadcast(frozenset(keys))
    finder = _KeyFinder(config, shared_keys)
    found: dict[TopicIdPartition, list[_Found]] = defaultdict(list)
    segments_read = 0
    for some in rounds(bucket, chosen.partitions, faults):
        segments_read += sum(len(one.segments) for one in some)
        todo = [share for one in some for share in shares(one.partition, one.segments)]
        done = run_tasks(spark, "looking for keys", todo, finder, progress=progress)
        for share, each in zip(todo, done, strict=True):
            found[share.partition].append(each)
    faults += [fault for of_it in found.values() for each in of_it for fault in each.faults]
    left = bucket.run(find_leftovers(bucket, topics, {one.partition: one for one in chosen.partitions}))
    faults += left.faults
    suspects = search_objects(
        spark, config, [*left.unnamed, *left.quarantined], shared_keys, progress=progress
    )
    faults += suspect_faults(suspects)
    rows: list[tuple[Value, ...]] = []
    for name, of_it in found.items():
        segments, size_bytes = sum(each.segments for each in of_it), sum(each.size_bytes for each in of_it)
        if segments:
            rows.append((name.topic, name.partition, name.topic_id, segments, size_bytes))
    figures: dict[str, Value] = {
        "mode": "dry run: nothing is changed",
        "keys": len(set(keys)),
        "topics": len(chosen.topics),
        "partitions": len(chosen.partitions),
        "segments_read": segments_read,
        "segments_to_rewrite": sum(each.segments for of_it in found.values() for each in of_it),
        "size_bytes_to_rewrite": sum(each.size_bytes for of_it in found.values() for each in of_it),
        "unnamed_objects": len(left.unnamed),
        "quarantined_objects": len(left.quarantined),
        "objects_left": len(suspects),
    }
    columns = ("topic", "partition", "topic_id", "segments_to_rewrite", "size_bytes_to_rewrite")
    return Report("erase", figures, (Table("partitions", columns, tuple(rows)),), tuple(faults))
