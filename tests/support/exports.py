"""Exports without Spark: an archive in a directory, tasks in this process, a plain reader of the result."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
from crc32c import crc32c

from tests.fakes.archive import archive_in, archived, archiver_of, observed
from tests.fakes.broker import FakeBroker
from tests.fakes.log_writer import LogWriter
from tieringd.archive.archive_reader import SegmentIndexes
from tieringd.config import parse_config
from tieringd.formats.index_merge import IndexedSegment, merged_index
from tieringd.formats.object_keys import TopicKey, data_key, index_key
from tieringd.formats.sidecar import encode_sidecar
from tieringd.model.manifest_parts import Gap
from tieringd.model.segment import RemoteSegment
from tieringd.model.tail_cut import cut_back
from tieringd.spark.bucket import Bucket
from tieringd.spark.jobs.export.parquet_target import ParquetTopic
from tieringd.spark.jobs.export.rounds import TopicOutcome, export_topic
from tieringd.spark.jobs.export.state import ExportRules
from tieringd.spark.jobs.export.target_store import TargetStore
from tieringd.storage.file import FileStore
from tieringd.storage.file_root import make_marker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from tieringd.config import Config

HOUR_MS = 3_600_000


def file_config(root: Path) -> Config:
    """Make a directory, and return a configuration with it as the bucket."""
    root.mkdir(parents=True, exist_ok=True)
    make_marker(root)
    return parse_config(
        f"state_directory: /nowhere\ncloud_storage_backend: file\ncloud_storage_file_root: {root}\n",
        source="test",
        environ={},
        needs_broker=False,
    )


def in_this_process(work, portions):
    """Run tasks one after another, in place of Spark."""
    return [work(one) for one in portions]


@dataclass
class ArchivedLogs:
    """The logs of a topic's partitions, their archive, and the open bucket."""

    directory: Path
    config: Config
    bucket: Bucket
    writers: list[LogWriter]
    services: Any = field(repr=False)

    @classmethod
    def made(
        cls, directory: Path, *, partitions: int = 1, topic: str = "orders", **options: Any
    ) -> ArchivedLogs:
        """Make empty logs and an empty archive in *directory*."""
        config = file_config(directory / "archive")
        logs = directory / "logs"
        writers = [LogWriter(logs, topic, number, **options) for number in range(partitions)]
        store = FileStore(config.cloud_storage_file_root)
        return cls(directory, config, Bucket(config), writers, archive_in(store))

    async def archive(self) -> None:
        """Archive all closed segments."""
        one = self.writers[0].identified
        key = TopicKey(one.cluster, one.topic, one.topic_id)
        await self.services.manifests.ensure_topic(key, partition_count=len(self.writers))
        for writer in self.writers:
            await archived(writer, self.services)

    async def fill(self, segments: int = 3, *, batches: int = 2, values: int = 3) -> None:
        """Append segments to each log, with timestamps some hours apart, and archive them."""
        for writer in self.writers:
            for _ in range(segments):
                for _ in range(batches):
                    base = writer.next_offset
                    written = [b"%d-%d" % (writer.name.partition, base + each) for each in range(values)]
                    time_ms = 1_700_000_000_000 + base * HOUR_MS // 2
                    writer.append(*written, timestamp_ms=time_ms)
                writer.roll()
        await self.archive()

    def topic(self) -> Any:
        """Return the archived topic, as an export finds it."""
        return self.bucket.run(self.bucket.catalog.topic(self.writers[0].identified.topic))

    def written(self, *, read_committed: bool = True) -> Counter[tuple[int, int, bytes]]:
        """Return the partition, offset and value of each record that a reader of the archive should see."""
        found: Counter[tuple[int, int, bytes]] = Counter()
        for writer in self.writers:
            number = writer.name.partition
            for offset, value in writer.values(read_committed=read_committed).items():
                if offset < writer.bases[-1]:
                    found[number, offset, value] += 1
        return found

    async def edit(self, change: Callable[[Any], Any], number: int = 0) -> None:
        """Replace a partition's manifest by the result of *change*."""

        async def changed(manifest: Any) -> Any:
            return change(manifest)

        await self.services.manifests.edit(self.writers[number].identified, changed)

    async def depose(self, cut: int, *, begins_at: int | None = None, now_ms: int = 0) -> None:
        """
        Simulate an unclean election: cut the archive back to *cut*, and archive a new leader's log.

        The new log begins at *begins_at*; None is *cut*. The log has four segments of two records, whose
        values are `new` and their offset. The offsets from *cut* to the new log's start become a gap.
        """
        (writer,) = self.writers
        first = cut if begins_at is None else begins_at

        def deposed(manifest: Any) -> Any:
            left = cut_back(manifest, cut, leader_epoch=1, now_ms=now_ms)
            gap = Gap(cut, first - 1, "the new leader's log begins later", now_ms)
            return left if first == cut else left.with_gap(gap)

        await self.edit(deposed)
        leader = LogWriter(self.directory / "deposed", writer.name.topic, 0, first_offset=first)
        leader.begin_epoch(1)
        for base in range(first, first + 8, 2):
            leader.append(b"new%d" % base, b"new%d" % (base + 1))
            leader.roll()
        services = archive_in(self.services.store, writer_id="b2")
        archiver = archiver_of(leader, services, FakeBroker(leader), leader_epoch=1)
        while (await archiver.step(observed(leader))).uploaded:
            pass

    async def merge(self) -> None:
        """Merge the first two adjacent segments of each partition, and delete their objects."""
        for writer in self.writers:
            manifest = (await self.services.manifests.load(writer.identified)).existing
            rows = [
                row
                for row, (one, other) in enumerate(pairwise(manifest.segments))
                if one.next_offset == other.base_offset
            ]
            if rows:
                await self._merge(writer, [manifest.segments[rows[0]], manifest.segments[rows[0] + 1]])

    async def _merge(self, writer: LogWriter, parts: list[RemoteSegment]) -> None:
        store = self.services.store
        data = b"".join([(await store.get(data_key(writer.identified, one)))[0] for one in parts])
        indexes = SegmentIndexes(store)
        sidecar = encode_sidecar(
            merged_index(
                [IndexedSegment(one, await indexes.index_of(writer.identified, one)) for one in parts]
            )
        )
        merged = RemoteSegment(
            base_offset=parts[0].base_offset,
            last_offset=parts[-1].last_offset,
            size_bytes=len(data),
            crc32c=crc32c(data),
            base_timestamp_ms=min(one.base_timestamp_ms for one in parts),
            max_timestamp_ms=max(one.max_timestamp_ms for one in parts),
            leader_epoch=0,
            writer_id="c3",
            uploaded_at_ms=parts[-1].uploaded_at_ms,
            index_size_bytes=len(sidecar),
            index_crc32c=crc32c(sidecar),
        )
        await store.put(data_key(writer.identified, merged), data, crc32c=crc32c(data))
        await store.put(index_key(writer.identified, merged), sidecar, crc32c=crc32c(sidecar))

        async def change(manifest):
            return manifest.merged(merged, now_ms=1)

        await self.services.manifests.edit(writer.identified, change)
        gone = [key(writer.identified, one) for one in parts for key in (data_key, index_key)]
        await store.delete_many(gone)


@dataclass
class ParquetDirectory:
    """A target for Parquet files, and a plain reader of it."""

    root: Path
    bucket: Bucket

    @classmethod
    def made(cls, root: Path) -> ParquetDirectory:
        """Make an empty directory."""
        return cls(root, Bucket(file_config(root)))

    def topic(self, *, store: Any = None, partition_by: str = "day", topic: str = "orders") -> ParquetTopic:
        """Return the target of a topic, with *store* in place of the directory's own store."""
        opened = TargetStore(store or self.bucket.store, self.bucket.run)
        return ParquetTopic(lambda: opened, topic, url=f"file://{self.root}", partition_by=partition_by)

    def paths(self) -> list[Path]:
        """Return the files that Spark would read. Spark ignores names that begin with `_` or a dot."""
        return [
            path
            for path in sorted(self.root.rglob("*.parquet"))
            if not any(part.startswith(("_", ".")) for part in path.relative_to(self.root).parts)
        ]

    def rows(self, *columns: str) -> list[dict[str, Any]]:
        """Return every row of every file, with all columns or with some."""
        return [
            row
            for path in self.paths()
            for row in pq.read_table(path, partitioning=None, columns=list(columns) or None).to_pylist()
        ]

    def seen(self) -> Counter[tuple[int, int, bytes]]:
        """Count the rows by partition, offset and value."""
        return counted(self.rows("partition", "offset", "value"))


def counted(rows: Iterable[dict[str, Any]]) -> Counter[tuple[int, int, bytes]]:
    """Count *rows* by partition, offset and value."""
    return Counter((row["partition"], row["offset"], row["value"]) for row in rows)


def exported(logs: ArchivedLogs, target: Any, *, run: Any = in_this_process, **rules: Any) -> Any:
    """Export the topic of *logs* and return the outcome; raise the outcome's error."""
    outcome = attempted(logs, target, run=run, **rules)
    if outcome.error is not None:
        raise outcome.error
    return outcome


def attempted(logs: ArchivedLogs, target: Any, *, run: Any = in_this_process, **rules: Any) -> TopicOutcome:
    """Export the topic of *logs* and return the outcome, with its error if there is one."""
    return export_topic(logs.topic(), target, ExportRules(**rules), archive=lambda: logs.bucket, run=run)
