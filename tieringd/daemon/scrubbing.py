"""The parts that scrub a bucket, built for a daemon's housekeeping and for an operator's command."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tieringd.archive.scrub.orphan_search import OrphanSearch, OwnerLookup
from tieringd.archive.scrub.partition_scrub import PartitionScrubber, ScrubStretch
from tieringd.archiving.claim import ManifestChange
from tieringd.broker.layout import Layout
from tieringd.config import Config
from tieringd.daemon.archive import Archive
from tieringd.errors import CorruptDataError, LocalFileError
from tieringd.housekeeping.bucket_quarantine import ObjectQuarantine, QuarantineExpiry
from tieringd.housekeeping.healer import Healer
from tieringd.housekeeping.scrub import ScrubJob, ScrubParts
from tieringd.metrics import Metrics
from tieringd.model.local_log import LocalLog, LocalPartition
from tieringd.model.partition import Leadership, TopicIdPartition, TopicPartition

if TYPE_CHECKING:
    # An ordinary import would load the archiver into commands that do not need it.
    from tieringd.archiving.observer import Observation
    from tieringd.archiving.reconciler import Reconciler


def scrub_parts(
    config: Config,
    archive: Archive,
    *,
    writer_id: str,
    local_log: Callable[[TopicIdPartition], LocalLog | None],
    offer: Callable[[TopicIdPartition, ManifestChange], Awaitable[None]] | None = None,
    on_segment: Callable[[ScrubStretch], None] = lambda _: None,
) -> ScrubParts:
    """Return the parts that scrub the bucket; *local_log* returns a partition's log on this host."""
    store, manifests = archive.store, archive.manifests
    work_directory = config.state_directory
    if not work_directory.is_dir():
        work_directory = Path(tempfile.gettempdir())
    quarantine = ObjectQuarantine(
        store, work_directory=work_directory, writer_id=writer_id, now_ms=archive.clock
    )
    return ScrubParts(
        partitions=PartitionScrubber(store, manifests, on_segment=on_segment),
        search=OrphanSearch(
            store, manifests, grace_ms=config.archive_orphan_grace_ms, ages_ms=archive.clock.ages_ms
        ),
        quarantine=quarantine,
        expiry=QuarantineExpiry(quarantine, OwnerLookup(store, manifests)),
        healer=Healer(
            store,
            manifests,
            archive.reader,
            quarantine,
            layout=archive.layout,
            local_log=local_log,
            work_directory=work_directory,
            now_ms=archive.clock,
            offer=offer,
        ),
    )


def scrub_job(
    config: Config,
    metrics: Metrics,
    archive: Archive,
    *,
    reconciler: Reconciler,
    writer_id: str,
    offer: Callable[[TopicIdPartition, ManifestChange], Awaitable[None]] | None = None,
) -> ScrubJob:
    """
    Return the housekeeping job that scrubs the partitions that this daemon leads.

    *offer* hands a change to the archiver of a partition, and waits until it was committed or given up.
    """
    wanted: Mapping[Leadership, Observation] = {}
    found: dict[TopicIdPartition, Observation] = {}

    def led() -> dict[TopicIdPartition, Observation]:
        nonlocal wanted, found
        snapshot = reconciler.snapshot
        # A snapshot has the same mapping as the one before where nothing has changed.
        if snapshot is not None and snapshot.wanted is not wanted:
            wanted = snapshot.wanted
            found = {one.partition: seen for one, seen in wanted.items()}
        return found

    def local_log(partition: TopicIdPartition) -> LocalLog | None:
        seen = led().get(partition)
        return seen.uploadable if seen else None

    parts = scrub_parts(config, archive, writer_id=writer_id, local_log=local_log, offer=offer)
    return ScrubJob(
        parts,
        led=led,
        pace=config.scrub_pace,
        metrics=metrics,
        clock=archive.clock,
        jitter=random.random,
    )


class LocalLogs:
    """The logs in the configured directories, read on request. Blocks."""

    def __init__(self, config: Config, layout: Layout) -> None:
        self._directories = [str(path) for path in config.broker.log_dirs]
        self._layout = layout
        self._found: dict[TopicPartition, LocalPartition] | None = None

    def __call__(self, partition: TopicIdPartition) -> LocalLog | None:
        """Return the log of a partition on this host; None where there is none, or it cannot be read."""
        if self._found is None:
            scan = self._layout.scan(self._directories)
            self._found = {one.topic_partition: one for one in scan.partitions}
        local = self._found.get(partition.topic_partition)
        if local is None or local.topic_id != partition.topic_id:
            return None
        try:
            return self._layout.read_log(local, ())
        except (LocalFileError, CorruptDataError):
            return None
