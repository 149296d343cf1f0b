"""A stored segment, a store that injects faults on demand, and a hydrator over a real directory."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crc32c import crc32c

from tests.builders import segment_bytes
from tests.fakes.archive import Clock
from tests.fakes.memory_store import MemoryStore
from tieringd.cache.cache_directory import CacheDirectory
from tieringd.formats.object_keys import data_key, index_key
from tieringd.formats.segment_scan import SegmentScanner
from tieringd.formats.sidecar import encode_sidecar
from tieringd.metrics import Metrics
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import BrokerIndexes, RemoteSegment, SegmentIndex
from tieringd.policies.cache_trim import ChunkEvictionLimits, TrimLimits
from tieringd.reading.cache_keeper import CacheKeeper, KeeperSettings, OpenChunks
from tieringd.reading.hydrator import HydrationLimits, Hydrator
from tieringd.reading.partition_reader import ArchivedBatches, PartitionReader

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tieringd.policies.chunk_layout import Chunk
    from tieringd.reading.hydrator import HydratedChunk

PARTITION = TopicIdPartition("east", "orders", "AAAAAAAAAAAAAAAAAAAAAQ", 3)
BATCHES = 12
BATCH_BYTES = len(segment_bytes(0, batches=1, value=b"v" * 300))
CHUNK_BYTES = 3 * BATCH_BYTES
"""The size of three batches, so that a segment has four chunks."""
LARGE = TrimLimits(size_bytes=1 << 40, objects=1000)


class OddStore(MemoryStore):
    """A store whose next answers a test changes, or holds back."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: deque[Callable[[bytes], bytes]] = deque()
        """Functions that change the bytes of the next answers, one for each answer."""
        self.gate: asyncio.Event | None = None
        """Reads of ranges wait for this event, if it is set to one."""
        self.at_once = self.most_at_once = 0

    async def get_range(self, key: str, *, position: int, size_bytes: int) -> bytes:
        """Return the bytes of a range, changed by the next fault."""
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            data = await super().get_range(key, position=position, size_bytes=size_bytes)
            if self.gate is not None:
                await self.gate.wait()
        finally:
            self.at_once -= 1
        return self.changes.popleft()(data) if self.changes else data

    async def get(self, key: str) -> tuple[bytes, Any]:
        """Return a whole object, changed by the next fault."""
        data, info = await super().get(key)
        return (self.changes.popleft()(data) if self.changes else data), info

    def downloads(self, operation: str = "get_range") -> int:
        """Return the number of requests of one operation."""
        return sum(name == operation for name, _ in self.requests)


def flipped(data: bytes) -> bytes:
    """Return *data* with one bit of a record changed."""
    damaged = bytearray(data)
    damaged[len(data) // 2 + 40] ^= 1
    return bytes(damaged)


def cut(data: bytes) -> bytes:
    """Return *data* without its last byte."""
    return data[:-1]


class Stored:
    """One segment in a store, with its index."""

    def __init__(
        self,
        store: MemoryStore,
        base_offset: int = 0,
        *,
        batches: int = BATCHES,
        data: bytes | None = None,
        next_offset: int | None = None,
    ) -> None:
        """Store *batches* of three records, or *data* up to *next_offset*."""
        self.data = data or segment_bytes(base_offset, batches=batches, value=b"v" * 300)
        next_offset = next_offset or base_offset + 3 * batches
        scanner = SegmentScanner(base_offset, next_offset, index_interval_bytes=1)
        scanner.feed(memoryview(self.data))
        scan = scanner.finish(0)
        self.index = SegmentIndex(
            base_offset=base_offset,
            last_offset=next_offset - 1,
            size_bytes=len(self.data),
            crc32c=crc32c(self.data),
            record_count=scan.record_count,
            batch_count=scan.batch_count,
            epochs=scan.epochs,
            aborted=(),
            entries=scan.entries,
            broker=BrokerIndexes(offset_index=b"o" * 100),
        )
        self.sidecar = encode_sidecar(self.index)
        self.segment = RemoteSegment(
            base_offset=base_offset,
            last_offset=next_offset - 1,
            size_bytes=len(self.data),
            crc32c=crc32c(self.data),
            base_timestamp_ms=0,
            max_timestamp_ms=0,
            leader_epoch=7,
            writer_id="ab12",
            uploaded_at_ms=0,
            index_size_bytes=len(self.sidecar),
        )
        self.key = data_key(PARTITION, self.segment)
        self.index_key = index_key(PARTITION, self.segment)
        store.add(self.key, self.data)
        store.add(self.index_key, self.sidecar)

    def bytes_of(self, chunk: Chunk) -> bytes:
        """Return the bytes that a chunk should have."""
        return self.data[chunk.position : chunk.end]


def bytes_in(found: HydratedChunk) -> bytes:
    """Return the bytes that a reader gets from a chunk."""
    if found.file is None:
        assert found.data is not None
        return found.data
    assert found.data is None
    return os.pread(found.file.fd, found.file.size_bytes + 1, found.file.position)


class Host:
    """One process with a cache. A new instance with the same path simulates a restart."""

    def __init__(self, path: Path, store: MemoryStore, *, limits: TrimLimits = LARGE) -> None:
        self.store = store
        self.metrics = Metrics()
        self.clock = Clock()
        self.directory = CacheDirectory(path, now_ms=self.clock)
        self.open_chunks = OpenChunks(ChunkEvictionLimits(), now=self._loop_time, metrics=self.metrics.cache)
        self.keeper = CacheKeeper(
            self.directory, self.open_chunks, settings=KeeperSettings(limits), metrics=self.metrics.cache
        )
        self.hydrator: Hydrator

    def start(self, **changes: Any) -> Hydrator:
        """Return a new hydrator. The last one must be closed."""
        limits = HydrationLimits(**{"chunk_bytes": CHUNK_BYTES, **changes})
        self.hydrator = Hydrator(self.store, self.keeper, limits=limits, metrics=self.metrics.cache)
        return self.hydrator

    async def read(self, stored: Stored, number: int = 0) -> bytes:
        """Read a chunk as one reader, and return its bytes."""
        chunk = self.hydrator.layout(stored.index).chunks[number]
        async with self.hydrator.chunk(PARTITION, stored.segment, stored.index, chunk) as found:
            assert found.chunk == chunk
            return bytes_in(found)

    def path_of(self, stored: Stored, number: int = 0) -> Path:
        """Return the file of a chunk."""
        chunk = self.hydrator.layout(stored.index).chunks[number]
        return self.directory.path / f"{stored.key}_chunks/{chunk.position}"

    def value(self, name: str, **labels: str) -> float:
        """Return a metric of the cache; 0 if it has no such series yet."""
        return self.metrics.registry.get_sample_value(f"tieringd_cache_{name}", labels) or 0

    def assert_tidy(self) -> None:
        """Check that no space is reserved, no file is partly written, and the accounts match the files."""
        use = self.directory.accounts.use()
        assert (use.reserved_bytes, use.reserved_objects) == (0, 0)
        files = [
            file for file in self.directory.path.rglob("*") if file.is_file() and file.name != "access_times"
        ]
        assert [file for file in files if file.suffix == ".part"] == []
        if self.keeper.is_started:
            assert use.objects == len(files)
            assert use.size_bytes == sum(file.stat().st_size for file in files)
        assert self.value("hydrations_in_progress") == 0

    @staticmethod
    def _loop_time() -> float:
        return asyncio.get_running_loop().time()


@asynccontextmanager
async def running(host: Host, **changes: Any) -> AsyncIterator[Hydrator]:
    """Run a hydrator in the context. At the end, check that it left no descriptor, file or account behind."""
    directory = host.directory.path.parent
    before = open_files(directory)
    hydrator = host.start(**changes)
    try:
        yield hydrator
    finally:
        await hydrator.close()
    assert open_files(directory) == before
    host.assert_tidy()


def open_files(below: Path) -> int:
    """
    Return how many files below a directory this process has open.

    Objects of earlier tests close theirs at any time.
    """
    count = 0
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208 - a path of the kernel
        # The descriptor of this listing itself is gone by now.
        with suppress(FileNotFoundError):
            count += Path(f"/proc/self/fd/{number}").readlink().is_relative_to(below)
    return count


async def read_batches(
    reader: PartitionReader,
    manifest: PartitionManifest,
    offset: int,
    *,
    size_bytes_max: int,
    needs_a_batch: bool = True,
) -> ArchivedBatches | None:
    """Hold the batches from an offset on, and take them; None where the manifest does not hold the offset."""
    held = await reader.hold(manifest, offset)
    return held and held.take(size_bytes_max=size_bytes_max, needs_a_batch=needs_a_batch)
