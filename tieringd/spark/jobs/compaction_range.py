"""Which part of an archived partition is compacted, and by which rules."""

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
from tieringd.spark.jobs.compaction_tasks import Run
from tieringd.spark.latest_records import CompactionRules

DELETE_RETENTION_MS: Final = 86_400_000
"""How long tombstones stay: Kafka's own default."""


@dataclass(frozen=True, slots=True)
class CompactOptions:
    """What is wanted of a compaction."""

    delete_retention_ms: int = DELETE_RETENTION_MS
    """Tombstones that are older than that go, by their own timestamps."""
    min_compaction_lag_ms: int = 0
    """A segment with a record younger than that stays as it is, and so do all that follow."""
    drops_keyless: bool = False
    """Whether records without a key go: Kafka's cleaner drops them, and nobody can bring them back."""


@dataclass(frozen=True, slots=True)
class CompactionRange:
    """What is compacted of one partition: its oldest segments, up to some point."""

    manifest: PartitionManifest
    """With all its history."""
    segments: SegmentTable
    rules: CompactionRules

    def run_of(self, rows: range, *, removed_records: int) -> Run:
        """Return what a task has to know to make one segment of some, which loses so many records."""
        segments = self.segments
        parts = tuple(segments[row] for row in rows)
        return Run(self.manifest.partition, parts, self.rules, removed_records)

    def basis(self, *, has_log: bool) -> CompactionBasis:
        """Return what was read for it; *has_log* says whether a broker may have the partition's log."""
        return CompactionBasis(self.segments, self.manifest.replacements, has_log)


async def compaction_range(
    bucket: Bucket, manifest: PartitionManifest, options: CompactOptions, *, now_ms: int
) -> CompactionRange:
    """
    Return what is compacted of a partition at the time *now_ms*.

    Where the topic goes on from an older archive tombstones stay: what they hide may lie there.
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
    drops_tombstones = may_drop_tombstones(looked_from=manifest.start_offset, readable_from=readable_from)
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
