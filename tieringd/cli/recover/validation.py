"""
What is looked at before anything is brought back: three depths, with Redpanda's names.

`no_check` looks at nothing, and goes on with other partitions where one cannot be read. The others refuse
what is not whole before anything is written. What is no reason to refuse is in the report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tieringd.archive.catalog import ArchivedTopic
from tieringd.cli.recover.options import Validation
from tieringd.daemon.archive import Archive
from tieringd.errors import CorruptDataError
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition

MISSING = "missing_manifest"


@dataclass(frozen=True, slots=True)
class Findings:
    """What validation found of each partition."""

    mode: Validation
    gap_offsets: dict[TopicIdPartition, int] = field(default_factory=dict)

    def of(self, partition: TopicIdPartition) -> str:
        """Return a partition's line in the report."""
        if self.mode is Validation.NO_CHECK:
            return "not_checked"
        lost = self.gap_offsets.get(partition, 0)
        return f"offset_gap: {lost} offsets" if lost else "passed"


def missing(topic: ArchivedTopic) -> list[TopicIdPartition]:
    """Return the partitions of a topic that have no manifest."""
    there = {one.partition for one in topic.partitions}
    return [one for one in topic.topic.partitions() if one not in there]


async def validated(
    archive: Archive, found: Sequence[ArchivedTopic], mode: Validation, depth: int
) -> Findings:
    """
    Look at the archive of these topics; *depth* is how many segments of each partition, or 0 for all.

    Raises:
        CorruptDataError: It is not whole; every fault is named.
    """
    findings = Findings(mode)
    if mode is Validation.NO_CHECK:
        return findings
    faults = [
        f"{one.topic.key.topic}: {len(absent)} of {one.topic.partition_count} partitions have no manifest"
        for one in found
        if (absent := missing(one))
    ]
    if mode is Validation.CHECK_MANIFEST_AND_SEGMENT_METADATA:
        for manifest in (manifest for topic in found for manifest in topic.partitions):
            faults.extend(await _faults(archive, manifest, depth))
            if manifest.gaps:
                lost = sum(gap.next_offset - gap.base_offset for gap in manifest.gaps)
                findings.gap_offsets[manifest.partition] = lost
    if faults:
        raise CorruptDataError(
            f"the archive is not whole: {'; '.join(faults)}",
            hint=f"Bring back what there is with --validate {Validation.NO_CHECK.value}",
        )
    return findings


async def _faults(archive: Archive, manifest: PartitionManifest, depth: int) -> list[str]:
    report = await archive.verifier.verify(manifest, deep=False, newest=depth or None)
    return [f"{manifest.partition.topic_partition}: {fault}" for fault in report.faults]
