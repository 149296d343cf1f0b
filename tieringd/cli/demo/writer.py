"""
The demo's stand-in for a broker: real v2 record batches, appended to a log directory.

The writer lays files out as a broker does, and rolls segments by size. It writes no broker indexes:
tieringd builds its own, and copies the broker's only where they exist.
"""

from __future__ import annotations

import asyncio
import base64
import random
import time
from hashlib import blake2b, sha256
from io import BufferedWriter
from itertools import cycle
from pathlib import Path

from tieringd.cli.demo.journal import Journal
from tieringd.clock import wall_clock_ms
from tieringd.formats.checkpoints import encode_epoch_checkpoint, encode_partition_metadata
from tieringd.formats.compression import Codec
from tieringd.formats.log_names import LogFileKind, encode_file_name
from tieringd.formats.record_batch import NewRecord, encode_batch
from tieringd.model.partition import TopicPartition

SEGMENT_BYTES = 1 << 20
RECORDS_PER_BATCH = 64
RECORD_BYTES = 512
_APPEND_PAUSE_SECONDS = 0.04


class PartitionWriter:
    """Appends batches to one partition's directory. Only one task at a time may use it."""

    def __init__(self, directory: Path, partition: TopicPartition, journal: Journal, *, seed: int) -> None:
        self._directory = directory
        self._partition = partition
        self._journal = journal
        self._random = random.Random(seed)  # noqa: S311 a demo's data, the same in each run
        self._codecs = cycle(Codec)
        self._next_offset = 0
        self._base_offset = 0
        self._size_bytes = 0
        self._sha256 = sha256()
        directory.mkdir(parents=True)
        # All partitions of a topic have the same topic id, as with a broker.
        digest = blake2b(partition.topic.encode(), digest_size=16).digest()
        topic_id = base64.urlsafe_b64encode(digest).decode().rstrip("=")
        (directory / "partition.metadata").write_bytes(encode_partition_metadata(topic_id))
        (directory / "leader-epoch-checkpoint").write_bytes(encode_epoch_checkpoint([(0, 0)]))
        self._file = self._opened()

    def append(self) -> None:
        """Append one batch, compressed with the next codec in turn. Roll first when the segment is full."""
        records = [self._record() for _ in range(RECORDS_PER_BATCH)]
        batch = encode_batch(self._next_offset, records, codec=next(self._codecs))
        if self._size_bytes and self._size_bytes + len(batch) > SEGMENT_BYTES:
            self._roll()
        self._file.write(batch)
        self._file.flush()
        self._size_bytes += len(batch)
        self._sha256.update(batch)
        for record in records:
            self._journal.note(
                self._partition,
                self._next_offset,
                timestamp_ms=record.timestamp_ms,
                key=record.key,
                value=record.value,
                headers=tuple(record.headers),
            )
            self._next_offset += 1

    def close(self) -> None:
        """Close the active segment's file."""
        self._file.close()

    def _roll(self) -> None:
        self._file.close()
        journal = self._journal.partitions[self._partition]
        journal.segments[self._base_offset] = self._sha256.digest()
        self._base_offset, self._size_bytes, self._sha256 = self._next_offset, 0, sha256()
        self._file = self._opened()

    def _opened(self) -> BufferedWriter:
        return (self._directory / encode_file_name(self._base_offset, LogFileKind.LOG)).open("xb")

    def _record(self) -> NewRecord:
        number = self._random.getrandbits(32)
        # Half text, which a person can read first, and half noise: compression saves about half of it.
        value = b"order placed; " * (RECORD_BYTES // 28) + self._random.randbytes(RECORD_BYTES // 2)
        return NewRecord(
            value,
            key=None if number % 16 == 0 else b"customer-%d" % (number % 1000),
            timestamp_ms=wall_clock_ms(),
            headers=[("trace", number.to_bytes(4, "big"))],
        )


class LogDirectoryWriter:
    """Writes to all of a journal's partitions for a given time, and until each has a closed segment."""

    def __init__(
        self,
        log_dir: Path,
        journal: Journal,
        *,
        seconds: float,
        pause_seconds: float = _APPEND_PAUSE_SECONDS,
    ) -> None:
        self._journal = journal
        self._seconds = seconds
        self._pause_seconds = pause_seconds
        self._writers = [
            PartitionWriter(log_dir / str(partition), partition, journal, seed=number)
            for number, partition in enumerate(journal.partitions)
        ]

    async def write(self) -> None:
        """
        Append batches for `seconds`, then close the files.

        A slow machine writes longer: without a closed segment nothing would be archived.
        """
        end = time.monotonic() + self._seconds
        try:
            while time.monotonic() < end or not all(
                one.segments for one in self._journal.partitions.values()
            ):
                for writer in self._writers:
                    writer.append()
                await asyncio.sleep(self._pause_seconds)
        finally:
            for writer in self._writers:
                writer.close()
