"""
Rows into local Parquet files, one for each place that they belong to; then each file to where it is kept.

However many places there are, a portion gives one file for each, so that its files have names that follow
from the portion and the place. Memory is bounded: rows wait for a row group to be full, the fullest file
gives way when all together are too many, and what goes to more places than files may be open waits on disk.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from tieringd.spark.jobs.export.places import split_by_place

ROW_GROUP_ROWS: Final = 1 << 20
ROW_GROUP_BYTES: Final = 128 << 20
HELD_BYTES_MAX: Final = 256 << 20
OPEN_FILES_MAX: Final = 64
COMPRESSION: Final = "zstd"

Place = TypeVar("Place", bound="Hashable")
Stored = TypeVar("Stored")
Stored_co = TypeVar("Stored_co", covariant=True)


class Sink(Protocol[Place, Stored_co]):
    """Where rows go: which file of a portion each belongs to, what they look like there, and who keeps it."""

    @property
    def schema(self) -> pa.Schema:
        """Return the schema of the files."""

    @property
    def clipped_times(self) -> int:
        """Return how many timestamps `arranged` had to change, since no calendar names them."""

    def place_of(self, hour: int | None) -> Place:
        """Return where records of an hour belong, counted from the epoch, and those without one."""

    def arranged(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return a batch of records as rows of `schema`."""

    def store(self, place: Place, path: Path, metadata: pq.FileMetaData) -> Stored_co:
        """Keep the file at *path*, which is complete, and return what is to be known of it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of a task's rows may be in memory, and in how many files at once."""

    row_group_rows: int = ROW_GROUP_ROWS
    row_group_bytes: int = ROW_GROUP_BYTES
    held_bytes: int = HELD_BYTES_MAX
    open_files: int = OPEN_FILES_MAX


class _RowFile:
    """A Parquet file in the making."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path = path
        self.held_bytes = 0
        self._schema = schema
        self._rows = 0
        self._batches: list[pa.RecordBatch] = []
        self._metadata: list[pq.FileMetaData] = []
        self._writer = pq.ParquetWriter(
            path, schema, compression=COMPRESSION, metadata_collector=self._metadata
        )

    def write(self, batch: pa.RecordBatch, limits: Limits) -> int:
        """Take rows; return by how many bytes that changes what is held."""
        before = self.held_bytes
        self._batches.append(batch)
        self._rows += batch.num_rows
        self.held_bytes += batch.nbytes
        if self._rows >= limits.row_group_rows or self.held_bytes >= limits.row_group_bytes:
            self.flush()
        return self.held_bytes - before

    def flush(self) -> None:
        """Write what is held as a row group."""
        if self._batches:
            table = pa.Table.from_batches(self._batches, self._schema)
            self._writer.write_table(table, row_group_size=table.num_rows)
        self._batches, self._rows, self.held_bytes = [], 0, 0

    def close(self) -> pq.FileMetaData:
        """Finish the file."""
        self.flush()
        self._writer.close()
        return self._metadata[0]


@dataclass
class _Overflow(Generic[Place]):
    """Rows of places that have no file yet, on disk; each batch is of one place."""

    path: Path
    schema: pa.Schema
    batches_of: dict[Place, list[int]] = field(default_factory=dict)
    _writer: pa.RecordBatchFileWriter | None = None
    _batches: int = 0

    def write(self, place: Place, batch: pa.RecordBatch) -> None:
        """Take rows of *place*."""
        if self._writer is None:
            self._writer = pa.ipc.new_file(str(self.path), self.schema)
        self._writer.write_batch(batch)
        self.batches_of.setdefault(place, []).append(self._batches)
        self._batches += 1

    def rows(self) -> Iterator[tuple[Place, Iterator[pa.RecordBatch]]]:
        """Yield each place with its rows, in the order in which they came."""
        if self._writer is None:
            return
        self._writer.close()
        with pa.memory_map(str(self.path)) as file, pa.ipc.open_file(file) as reader:
            for place, numbers in self.batches_of.items():
                yield place, map(reader.get_batch, numbers)


class RowFiles(Generic[Place, Stored]):
    """
    The files of one portion, made in *directory*, which the caller removes.

    `write` the records in their order, then `finish`. A crash in between leaves nothing in the sink but
    whole files.
    """

    def __init__(self, sink: Sink[Place, Stored], directory: Path, limits: Limits | None = None) -> None:
        self._sink = sink
        self._directory = directory
        self._limits = limits or Limits()
        self._open: dict[Place, _RowFile] = {}
        self._held_bytes = 0
        self._overflow: _Overflow[Place] = _Overflow(directory / "overflow.arrow", sink.schema)
        self._files = 0

    def write(self, batch: pa.RecordBatch) -> None:
        """Take a batch of records."""
        for place, rows in split_by_place(batch, self._sink.place_of):
            self._write(place, self._sink.arranged(rows))

    def finish(self) -> list[Stored]:
        """Complete every file and hand it to the sink; return what the sink says of each."""
        stored = [self._store(place, file) for place, file in self._open.items()]
        for place, batches in self._overflow.rows():
            file = self._new_file()
            for batch in batches:
                file.write(batch, self._limits)
            stored.append(self._store(place, file))
        return stored

    def _write(self, place: Place, rows: pa.RecordBatch) -> None:
        if place not in self._open:
            if len(self._open) == self._limits.open_files:
                self._overflow.write(place, rows)
                return
            self._open[place] = self._new_file()
        self._held_bytes += self._open[place].write(rows, self._limits)
        if self._held_bytes > self._limits.held_bytes:
            fullest = max(self._open.values(), key=lambda file: file.held_bytes)
            self._held_bytes -= fullest.held_bytes
            fullest.flush()

    def _new_file(self) -> _RowFile:
        self._files += 1
        return _RowFile(self._directory / f"{self._files}.parquet", self._sink.schema)

    def _store(self, place: Place, file: _RowFile) -> Stored:
        metadata = file.close()
        stored = self._sink.store(place, file.path, metadata)
        file.path.unlink()
        return stored
