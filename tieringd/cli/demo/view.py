"""The demo's live table. Its values are read from the local disk and from the bucket."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from tieringd.broker.log_dir import read_local_log, scan_log_dirs
from tieringd.cli.demo.journal import Journal
from tieringd.config import Config
from tieringd.daemon.archive import Archive
from tieringd.errors import LocalFileError
from tieringd.model.local_log import LocalLog
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition, TopicPartition

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class PartitionView:
    """A snapshot of one partition, on the local disk and in the bucket."""

    partition: TopicPartition
    written_to: int
    """The journal's next offset, exclusive."""
    log: LocalLog
    manifest: PartitionManifest | None

    @property
    def backlog_bytes(self) -> int:
        """Return the bytes of closed segments that no manifest covers yet."""
        durable_to = self.manifest.next_offset if self.manifest else 0
        closed = (one for one in self.log.segments if one.next_offset is not None)
        return sum(one.size_bytes for one in closed if one.base_offset >= durable_to)

    @property
    def local_start_offset(self) -> int:
        """Return the first offset that is still on the local disk."""
        return self.log.segments[0].base_offset if self.log.segments else 0

    @property
    def uploaded_bytes(self) -> int:
        """Return the size of all stored segments."""
        return self.manifest.size_bytes if self.manifest else 0

    @property
    def trimmed_bytes(self) -> int:
        """Return the size of the stored segments that are trimmed from the local disk."""
        stored = self.manifest.segments if self.manifest else ()
        return sum(one.size_bytes for one in stored if one.last_offset < self.local_start_offset)

    @property
    def is_settled(self) -> bool:
        """Return whether every closed segment is stored and trimmed."""
        return self.manifest is not None and len(self.log.segments) == 1 and not self.backlog_bytes


async def partition_views(config: Config, archive: Archive, journal: Journal) -> list[PartitionView]:
    """
    Return snapshots of the journal's partitions, in order.

    Partitions without a directory yet, and partitions whose files change meanwhile, are left out.
    """
    views: list[PartitionView] = []
    scan = await asyncio.to_thread(scan_log_dirs, [str(path) for path in config.broker.log_dirs])
    for found in scan.partitions:
        if found.topic_partition not in journal.partitions:
            continue
        try:
            local_log = await asyncio.to_thread(read_local_log, found)
        except LocalFileError:
            # The broker is rolling or trimming right now. The next snapshot is half a second away.
            continue
        name = found.topic_partition
        cluster = scan.cluster_id or config.cluster_id
        stored = await archive.manifests.load(
            TopicIdPartition(cluster, name.topic, found.topic_id, name.partition)
        )
        written_to = journal.partitions[name].next_offset
        views.append(PartitionView(name, written_to, local_log, stored.manifest))
    return sorted(views, key=lambda view: view.partition)


def table(views: Sequence[PartitionView], *, title: str) -> Table:
    """Return *views* as a table; sizes in MiB, offsets as [first, next)."""
    grid = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    grid.add_column("partition", no_wrap=True)
    for name in ("on disk", "uploaded", "backlog", "trimmed", "manifest", "local log", "written"):
        grid.add_column(name, justify="right", no_wrap=True)
    for view in views:
        manifest = view.manifest
        grid.add_row(
            str(view.partition),
            _mib(view.log.size_bytes),
            _mib(view.uploaded_bytes),
            _mib(view.backlog_bytes),
            _mib(view.trimmed_bytes),
            f"{manifest.start_offset}..{manifest.next_offset}" if manifest else "-",
            f"{view.local_start_offset}..",
            str(view.written_to),
        )
    return grid


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:.1f} MiB"
