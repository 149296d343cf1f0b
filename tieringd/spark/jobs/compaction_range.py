"""Decide which part of an archived partition is compacted, and by which rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from tieringd.errors import ObjectNotFound
from tieringd.formats.object_keys import TopicKey, history_link_key, topic_key
from tieringd.model.manifest import PartitionManifest
from tieringd.model.segment import NO_TIMESTAMP
from tieringd.model.segment_table import SegmentTable
from tieringd.policies.record_removal import CompactionBasis, may_drop_tombstones
from tieringd.spark.bucket import Bucket
from tieringd.spark.jobs.compaction_tasks import CompactionRun
from tieringd.spark.latest_records import CompactionRules
from tieringd.storage.at_once import at_once

LOADS_AT_ONCE: Final = 16
DELETE_RETENTION_MS: Final = 86_400_000
"""Time that tombstones stay, from their own timestamp; Kafka's default of `delete.retention.ms`."""


@dataclass(frozen=True, slots=True)
class CompactOptions:
    """The options of a compaction."""

    delete_retention_ms: int = DELETE_RETENTION_MS
    """
    Tombstones with an older timestamp are removed.

    It must be longer than any reader that goes on from a position is behind: such a reader has read the older
    record, and misses the deletion.
    """
    min_compaction_lag_ms: int = 0
    """A segment with a younger record stays as it is, and so do all later segments."""
    drops_keyless: bool = False
    """Whether records without a key are removed, as Kafka's cleaner does. They cannot be brought back."""


@dataclass(frozen=True, slots=True)
class CompactionRange:
    """The part of one partition that is compacted: its oldest segments."""

    manifest: PartitionManifest
    """The manifest with its spilled segments."""
    segments: SegmentTable
    rules: CompactionRules

    def run_of(self, rows: range, *, removed_records: int) -> CompactionRun:
        """Return the run of the segments in *rows*, which become one and lose *removed_records*."""
        segments = self.segments
        parts = tuple(segments[row] for row in rows)
        return CompactionRun(self.manifest.partition, parts, self.rules, removed_records)

    def basis(self, *, has_log: bool) -> CompactionBasis:
        """Return what the compaction read; *has_log* says whether a broker may have the partition's log."""
        return CompactionBasis(self.segments, self.manifest.replacements, has_log)


async def compaction_ranges(
    bucket: Bucket, manifests: Sequence[PartitionManifest], options: CompactOptions, *, now_ms: int
) -> list[CompactionRange]:
    """
    Return the part of each partition to compact at the time *now_ms*.

    If a topic has an older archive as its history, tombstones stay: the older archive may have records that
    they hide.
    """
    topics = list(dict.fromkeys(topic_key(one.partition) for one in manifests))
    goes_on = await at_once(topics, partial(_goes_on_from_another, bucket), count=LOADS_AT_ONCE)
    has_history = dict(zip(topics, goes_on, strict=True))
    return [
        compaction_range(one, options, now_ms=now_ms, has_history=has_history[topic_key(one.partition)])
        for one in manifests
    ]


def compaction_range(
    manifest: PartitionManifest, options: CompactOptions, *, now_ms: int, has_history: bool
) -> CompactionRange:
    """Return the part of a partition to compact. With *has_history* its topic has an older archive."""
    rows = _old_rows(manifest.segments, now_ms=now_ms, lag_ms=options.min_compaction_lag_ms)
    readable_from = None if has_history else manifest.start_offset
    drops_tombstones = may_drop_tombstones(read_from=manifest.start_offset, readable_from=readable_from)
    rules = CompactionRules(
        manifest.start_offset,
        now_ms - options.delete_retention_ms if drops_tombstones else None,
        drops_keyless=options.drops_keyless,
    )
    return CompactionRange(manifest, manifest.segments.head(rows), rules)


def _old_rows(segments: SegmentTable, *, now_ms: int, lag_ms: int) -> int:
    """
    Return how many of the oldest segments have no record that is younger than *lag_ms*.

    Without a lag these are all segments. A timestamp in the future says nothing about the age of a record,
    and neither does a missing one: such a segment is as old as its upload, which came after its records.
    """
    if not lag_ms:
        return len(segments)
    times = zip(segments.column("max_timestamp_ms"), segments.column("uploaded_at_ms"), strict=True)
    for row, (newest_ms, uploaded_at_ms) in enumerate(times):
        is_known = newest_ms != NO_TIMESTAMP and newest_ms <= now_ms
        if (newest_ms if is_known else uploaded_at_ms) > now_ms - lag_ms:
            return row
    return len(segments)


async def _goes_on_from_another(bucket: Bucket, topic: TopicKey) -> bool:
    try:
        await bucket.store.head(history_link_key(topic))
    except ObjectNotFound:
        return False
    return True
