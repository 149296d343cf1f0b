"""Decide which part of an archived partition is compacted, and by which rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tieringd.errors import ObjectNotFound
from tieringd.formats.object_keys import history_link_key, topic_key
from tieringd.model.manifest import PartitionManifest
from tieringd.model.segment import NO_TIMESTAMP
from tieringd.model.segment_table import SegmentTable
from tieringd.policies.record_removal import CompactionBasis, may_drop_tombstones
from tieringd.spark.bucket import Bucket
from tieringd.spark.jobs.compaction_tasks import CompactionRun
from tieringd.spark.latest_records import CompactionRules

DELETE_RETENTION_MS: Final = 86_400_000
"""Time that tombstones stay; Kafka's default of `delete.retention.ms`."""


@dataclass(frozen=True, slots=True)
class CompactOptions:
    """The options of a compaction."""

    delete_retention_ms: int = DELETE_RETENTION_MS
    """Tombstones with an older timestamp are removed."""
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


async def compaction_range(
    bucket: Bucket, manifest: PartitionManifest, options: CompactOptions, *, now_ms: int
) -> CompactionRange:
    """
    Return the part of a partition to compact at the time *now_ms*.

    If the topic has an older archive as its history, tombstones stay: the older archive may have records that
    they hide.
    """
    limit_ms = now_ms - options.min_compaction_lag_ms
    rows = 0
    for newest_ms, uploaded_at_ms in zip(
        manifest.segments.column("max_timestamp_ms"), manifest.segments.column("uploaded_at_ms"), strict=True
    ):
        if (uploaded_at_ms if newest_ms == NO_TIMESTAMP else newest_ms) > limit_ms:
            break
        rows += 1
    readable_from = None if await _goes_on_from_another(bucket, manifest) else manifest.start_offset
    drops_tombstones = may_drop_tombstones(read_from=manifest.start_offset, readable_from=readable_from)
    rules = CompactionRules(
        manifest.start_offset,
        now_ms - options.delete_retention_ms if drops_tombstones else None,
        drops_keyless=options.drops_keyless,
    )
    return CompactionRange(manifest, manifest.segments.head(rows), rules)


async def _goes_on_from_another(bucket: Bucket, manifest: PartitionManifest) -> bool:
    partition = manifest.partition
    key = history_link_key(topic_key(partition))
    try:
        await bucket.store.head(key)
    except ObjectNotFound:
        return False
    return True
