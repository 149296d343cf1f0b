"""An archive in a directory, made from logs that a test writes, for readers that have only the bucket."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.builders import DEFAULT_TIME_MS
from tests.fakes.archive import Clock, archive_in, archived
from tests.fakes.log_writer import LogWriter
from tieringd.archive.object_joiner import ObjectJoiner
from tieringd.archiving.claim import Claim
from tieringd.formats.object_keys import TopicKey, data_key, index_key, manifest_key
from tieringd.housekeeping.merging import SegmentMerger
from tieringd.metrics import Metrics
from tieringd.model.manifest_parts import Gap
from tieringd.model.partition import Leadership
from tieringd.model.spilling import part_to_spill, spilled
from tieringd.policies.segment_merge import MergeLimits
from tieringd.storage.file import FileStore
from tieringd.storage.file_root import make_marker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tieringd.daemon.archive import Archive
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.segment import RemoteSegment


class FileArchive:
    """
    A bucket that is a directory. Each call acts as a daemon of its own that does one thing and ends.

    So synchronous code, such as that of a Spark driver, can use it.
    """

    def __init__(self, directory: Path) -> None:
        self.root = directory / "bucket"
        self.root.mkdir(parents=True)
        make_marker(self.root)
        self._logs = directory / "logs"
        self._work = directory / "work"
        self._written = 0

    @property
    def url(self) -> str:
        """Return the URL that users give as the path."""
        return f"file://{self.root}"

    def writer(self, topic: str = "orders", partition: int = 0, **options: Any) -> LogWriter:
        """Return a new log. `add` archives its closed segments."""
        self._written += 1
        return LogWriter(self._logs / f"{self._written}", topic, partition, **options)

    def add(self, *writers: LogWriter, now_ms: int = DEFAULT_TIME_MS) -> None:
        """Archive the closed segments that are not archived yet."""
        asyncio.run(self._add(*writers, now_ms=now_ms))

    def filled(
        self,
        topic: str = "orders",
        partition: int = 0,
        *,
        segments: int = 3,
        batches: int = 4,
        **options: Any,
    ) -> LogWriter:
        """Archive a new log with *segments* segments of *batches* batches, of three records each."""
        writer = self.writer(topic, partition, **options)
        for _ in range(segments):
            for _ in range(batches):
                writer.append()
            writer.roll()
        self.add(writer)
        return writer

    def manifest(self, writer: LogWriter) -> PartitionManifest:
        """Return the stored manifest of a log."""
        return asyncio.run(self._archive().manifests.load(writer.identified)).existing

    def edit(
        self, writer: LogWriter, change: Callable[[PartitionManifest], PartitionManifest]
    ) -> PartitionManifest:
        """Replace the manifest of a log by the result of *change*."""

        async def changed(found: PartitionManifest) -> PartitionManifest:
            return change(found)

        return asyncio.run(self._archive().manifests.edit(writer.identified, changed)).existing

    def move(self, writer: LogWriter, place: str) -> None:
        """Note that a topic's archive was moved to another bucket."""
        key = _key_of(writer)
        asyncio.run(self._archive().manifests.change_topic(key, lambda found: replace(found, moved_to=place)))

    def lose(self, writer: LogWriter, *values: bytes) -> None:
        """Append *values* to the log, and record them in the archive as a gap that the broker deleted."""
        base_offset = writer.next_offset
        writer.append(*values)
        writer.roll()
        gap = Gap(base_offset, writer.next_offset - 1, "the broker deleted them", DEFAULT_TIME_MS)
        self.edit(writer, lambda manifest: manifest.with_gap(gap))

    def expire(self, writer: LogWriter, segments: int) -> None:
        """Expire the oldest segments as total retention does, and delete their objects."""
        gone = list(self.manifest(writer).segments)[:segments]
        self.edit(writer, lambda manifest: manifest.expired(segments, now_ms=DEFAULT_TIME_MS))
        self.delete(writer, *gone)

    def merge(self, writer: LogWriter) -> None:
        """Merge all segments into one, and delete the merged segments' objects."""
        before = list(self.manifest(writer).segments)
        asyncio.run(self._merge(writer, sum(segment.size_bytes for segment in before)))
        after = list(self.manifest(writer).segments)
        assert len(after) == 1
        self.delete(writer, *before)

    def spill(self, writer: LogWriter, segments: int) -> None:
        """Move the oldest segments out of the live manifest."""
        asyncio.run(self._spill(writer, segments))

    def forget(self, writer: LogWriter) -> None:
        """Delete the manifest of a log, as the purge of a deleted topic does."""
        (self.root / manifest_key(writer.identified)).unlink()

    def delete(self, writer: LogWriter, *segments: RemoteSegment) -> None:
        """Delete the objects of segments."""
        for segment in segments:
            (self.root / data_key(writer.identified, segment)).unlink()
            (self.root / index_key(writer.identified, segment)).unlink()

    def object_of(self, writer: LogWriter, segment: int) -> Path:
        """Return the file of a segment's data object, by its number."""
        return self.root / data_key(writer.identified, self.manifest(writer).segments[segment])

    def _archive(self) -> Archive:
        return archive_in(FileStore(self.root))

    async def _add(self, *writers: LogWriter, now_ms: int) -> None:
        archive = archive_in(FileStore(self.root), now_ms=Clock(now_ms))
        for writer in writers:
            count = writer.identified.partition + 1
            await archive.manifests.ensure_topic(_key_of(writer), partition_count=count)
            await archived(writer, archive)

    async def _spill(self, writer: LogWriter, segments: int) -> None:
        manifests = self._archive().manifests
        found = (await manifests.load(writer.identified)).existing
        part = part_to_spill(found, segments)
        name = await manifests.spillovers.put(part)

        async def change(manifest: PartitionManifest) -> PartitionManifest:
            return spilled(manifest, part, name)

        await manifests.edit(writer.identified, change)

    async def _merge(self, writer: LogWriter, size_bytes: int) -> None:
        store, clock = FileStore(self.root), Clock()
        archive = archive_in(store, now_ms=clock)
        leadership = Leadership(writer.identified, 0)
        claim = Claim(leadership, archive.manifests, metrics=Metrics())
        merger = SegmentMerger(
            leadership,
            store,
            joiner=ObjectJoiner(store, work_directory=self._work),
            writer_id="a1",
            metrics=Metrics(),
            now_ms=clock,
        )
        stored = await claim.current(lambda: self.manifest(writer))
        (run,) = merger.plan(stored.existing, MergeLimits(size_bytes, size_bytes - 1)).runs
        prepared = await merger.prepare(stored.existing, run)
        assert prepared is not None
        await merger.commit(claim, stored, prepared)


def _key_of(writer: LogWriter) -> TopicKey:
    each = writer.identified
    return TopicKey(each.cluster, each.topic, each.topic_id)
