"""
Checks of the archive before anything is restored, at three depths with Redpanda's names.

`no_check` checks nothing, and continues with other partitions where one cannot be read. The other two
refuse a damaged archive before anything is written. Gaps are no reason to refuse; the report shows them.
An older archive that a topic continues has to have its manifests as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tieringd.archive.catalog import ArchivedTopic
from tieringd.cli.recover.options import Validation
from tieringd.daemon.archive import Archive
from tieringd.errors import CorruptDataError, ObjectNotFound
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition

MISSING = "missing_manifest"


@dataclass(frozen=True, slots=True)
class Findings:
    """The result of the validation of each partition."""

    mode: Validation
    gap_offsets: dict[TopicIdPartition, int] = field(default_factory=dict)

    def of(self, partition: TopicIdPartition) -> str:
        """Return a partition's value in the report's validation column."""
        if self.mode is Validation.NO_CHECK:
            return "not_checked"
        lost = self.gap_offsets.get(partition, 0)
        return f"offset_gap: {lost} offsets are missing" if lost else "passed"


def missing(topic: ArchivedTopic) -> list[TopicIdPartition]:
    """Return the partitions of a topic that have no manifest."""
    there = {one.partition for one in topic.partitions}
    return [one for one in topic.topic.partitions() if one not in there]


async def validated(
    archive: Archive, found: Sequence[ArchivedTopic], mode: Validation, depth: int
) -> Findings:
    """
    Check the archives of *found* as *mode* says.

    Args:
        archive: The archive of all topics.
        found: The topics to check.
        mode: What to check.
        depth: How many of each partition's newest segments to check; 0 for all.

    Raises:
        CorruptDataError: An archive is damaged or incomplete; the message names every fault.
    """
    findings = Findings(mode)
    if mode is Validation.NO_CHECK:
        return findings
    faults = [
        f"{one.topic.key.topic}: {len(absent)} of {one.topic.partition_count} partitions have no manifest"
        for one in found
        if (absent := missing(one))
    ]
    for manifest in (manifest for topic in found for manifest in topic.partitions):
        try:
            await archive.history.parts(
                manifest.partition,
                start_offset=manifest.start_offset,
                deleted_before=manifest.deleted_before,
            )
        except (ObjectNotFound, CorruptDataError) as error:
            faults.append(f"{manifest.partition.topic_partition}: {error}")
    if mode is Validation.CHECK_MANIFEST_AND_SEGMENT_METADATA:
        for manifest in (manifest for topic in found for manifest in topic.partitions):
            faults.extend(await _faults(archive, manifest, depth))
            if manifest.gaps:
                lost = sum(gap.next_offset - gap.base_offset for gap in manifest.gaps)
                findings.gap_offsets[manifest.partition] = lost
    if faults:
        raise CorruptDataError(
            f"the archive is incomplete: {'; '.join(faults)}",
            hint=f"Restore what exists with --validate {Validation.NO_CHECK.value}",
        )
    return findings


async def _faults(archive: Archive, manifest: PartitionManifest, depth: int) -> list[str]:
    report = await archive.verifier.verify(manifest, deep=False, newest=depth or None)
    return [f"{manifest.partition.topic_partition}: {fault}" for fault in report.faults]
