"""The scrub that ends every history."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieringd.archive.scrub.partition_scrub import PartitionScrubber

if TYPE_CHECKING:
    from tieringd.daemon.archive import Archive
    from tieringd.model.partition import TopicIdPartition


async def expect_clean(archive: Archive, partition: TopicIdPartition) -> None:
    """Scrub one partition as deep as it goes, and find nothing; verify what its manifest says as well."""
    stored = await archive.manifests.load(partition)
    if stored.manifest is None:
        return
    scrubber = PartitionScrubber(archive.store, archive.manifests)
    stretch = await scrubber.scrub(partition, deep=True)
    assert stretch.cursor is None, "the scrub did not come to its end"
    assert not stretch.findings, stretch.findings
    report = await archive.verifier.verify(stored.manifest, deep=True)
    assert not report.faults, report.faults
