"""An archive in a directory, hands to damage it with, and Spark's part done by a plain loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.fakes.archive import archive_in, archiver_of, observed
from tests.fakes.broker import FakeBroker
from tests.fakes.log_writer import LogWriter
from tieringd.config import parse_config
from tieringd.formats.manifest_codec import decode_manifest
from tieringd.formats.object_keys import TopicKey, data_key, manifest_key, topic_manifest_key
from tieringd.storage.file import FileStore
from tieringd.storage.file_root import make_marker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tieringd.model.manifest import PartitionManifest

DAY_MS = 86_400_000


class Shelf:
    """One bucket, and the logs that are archived in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.root = directory / "bucket"
        self.root.mkdir()
        make_marker(self.root)
        self.config = parse_config(
            "state_directory: /nowhere\n"
            "cloud_storage_backend: file\n"
            f"cloud_storage_file_root: {self.root}\n"
            "cloud_storage_target_manifest_size_bytes: 4096\n",
            source="test",
            environ={},
            needs_broker=False,
        )
        self.writers: dict[str, LogWriter] = {}

    def writer(self, topic: str = "orders", partition: int = 0) -> LogWriter:
        """Return a partition's log; an empty one the first time."""
        name = f"{topic}-{partition}"
        if name not in self.writers:
            self.writers[name] = LogWriter(self.directory / "logs", topic, partition)
        return self.writers[name]

    def fill(self, topic: str = "orders", partition: int = 0, *, segments: int = 4) -> LogWriter:
        """Archive closed segments of two batches each."""
        writer = self.writer(topic, partition)
        for number in range(segments):
            writer.append(b"a%d" % number, b"b%d" % number)
            writer.append(b"c%d" % number)
            writer.roll()
        self.archive(writer)
        return writer

    def archive(
        self, writer: LogWriter, *, leader_epoch: int | None = None, spill: bool = False, looks: int = 1
    ) -> PartitionManifest:
        """
        Archive all that is closed, under the newest epoch of the log unless told otherwise.

        At least *looks* observations are made of the log.

        With *spill*, all that the local log does not hold is spilled.
        """

        async def work() -> None:
            services = archive_in(FileStore(self.root))
            await services.manifests.ensure_topic(
                self.topic_key(writer), partition_count=writer.name.partition + 1
            )
            archiver = archiver_of(writer, services, FakeBroker(writer), leader_epoch=leader_epoch)
            changes = {"target_manifest_bytes": 1} if spill else {}
            for _ in range(looks):
                while (await archiver.step(observed(writer, **changes))).uploaded:
                    pass

        asyncio.run(work())
        return self.manifest(writer)

    def topic_key(self, writer: LogWriter) -> TopicKey:
        one = writer.identified
        return TopicKey(one.cluster, one.topic, one.topic_id)

    def manifest(self, writer: LogWriter) -> PartitionManifest:
        return decode_manifest(self.read(manifest_key(writer.identified)))

    def topic_manifest_key(self, writer: LogWriter) -> str:
        return topic_manifest_key(self.topic_key(writer))

    def whole_manifest(self, writer: LogWriter) -> PartitionManifest:
        """Return the manifest with all that is spilled."""
        spillovers = archive_in(FileStore(self.root)).manifests.spillovers
        return asyncio.run(spillovers.with_history(self.manifest(writer)))

    def data_keys(self, writer: LogWriter) -> list[str]:
        return [data_key(writer.identified, one) for one in self.whole_manifest(writer).segments]

    def values(self, writer: LogWriter, *, read_committed: bool = False) -> dict[int, bytes | None]:
        """Return what reading the archive gives."""

        async def read() -> dict[int, bytes | None]:
            services = archive_in(FileStore(self.root))
            manifest = (await services.manifests.load(writer.identified)).existing
            records = services.records.records(
                manifest, from_offset=0, read_committed=read_committed, on_gap=lambda _: None
            )
            return {record.offset: record.value async for record in records}

        return asyncio.run(read())

    def keys(self) -> list[str]:
        """Return the keys of all objects."""
        paths = (path.relative_to(self.root) for path in self.root.rglob("*") if path.is_file())
        return sorted(str(path) for path in paths if not path.parts[0].startswith("."))

    def read(self, key: str) -> bytes:
        return (self.root / key).read_bytes()

    def write(self, key: str, data: bytes) -> None:
        (self.root / key).parent.mkdir(parents=True, exist_ok=True)
        (self.root / key).write_bytes(data)

    def remove(self, key: str) -> None:
        (self.root / key).unlink()

    def contents(self) -> dict[str, bytes]:
        return {key: self.read(key) for key in self.keys()}

    def restore(self, contents: dict[str, bytes]) -> None:
        """Put everything back as it was."""
        for key in self.keys():
            self.remove(key)
        for key, data in contents.items():
            self.write(key, data)


def spread(_what: str, tasks: Sequence[object], work: Callable[[object], object], /) -> list[object]:
    """Do the tasks one after the other."""
    return [work(task) for task in tasks]
