"""
Write rows to local Parquet files, one for each place that they belong to, and store each file.

A portion gives exactly one file for each place, so that the portion and the place determine the file's name.
Memory is bounded. Rows are held until a row group is full. When all held rows are too many, the file with the
most writes them out. If there are more places than files may be open, rows of the other places wait on disk.
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
    """Decides the file of each row of a portion and the form of the rows, and stores complete files."""

    @property
    def schema(self) -> pa.Schema:
        """Return the schema of the files."""

    @property
    def clipped_times(self) -> int:
        """Return how many timestamps `arranged` clipped to the years 1 to 9999."""

    def place_of(self, hour: int | None) -> Place:
        """Return the place of an hour, counted from the epoch; None is for records without an hour."""

    def arranged(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return a batch of records as rows of `schema`."""

    def store(self, place: Place, path: Path, metadata: pq.FileMetaData) -> Stored_co:
        """Store the complete file at *path*, and return its description."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for the rows that a task holds in memory, and for its open files."""

    row_group_rows: int = ROW_GROUP_ROWS
    row_group_bytes: int = ROW_GROUP_BYTES
    held_bytes: int = HELD_BYTES_MAX
    open_files: int = OPEN_FILES_MAX


class _RowFile:
    """A Parquet file that is being written."""

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
        """Add rows; return the change of `held_bytes`."""
        before = self.held_bytes
        self._batches.append(batch)
        self._rows += batch.num_rows
        self.held_bytes += batch.nbytes
        if self._rows >= limits.row_group_rows or self.held_bytes >= limits.row_group_bytes:
            self.flush()
        return self.held_bytes - before

    def flush(self) -> None:
        """Write the held rows as a row group."""
        if self._batches:
            table = pa.Table.from_batches(self._batches, self._schema)
            self._writer.write_table(table, row_group_size=table.num_rows)
        self._batches, self._rows, self.held_bytes = [], 0, 0

    def close(self) -> pq.FileMetaData:
        """Finish the file, and return its metadata."""
        self.flush()
        self._writer.close()
        return self._metadata[0]


@dataclass
class _Overflow(Generic[Place]):
    """A file on disk with rows of places that have no Parquet file yet. Each batch is of one place."""

    path: Path
    schema: pa.Schema
    batches_of: dict[Place, list[int]] = field(default_factory=dict)
    _writer: pa.RecordBatchFileWriter | None = None
    _batches: int = 0

    def write(self, place: Place, batch: pa.RecordBatch) -> None:
        """Add rows of *place*."""
        if self._writer is None:
            self._writer = pa.ipc.new_file(str(self.path), self.schema)
        self._writer.write_batch(batch)
        self.batches_of.setdefault(place, []).append(self._batches)
        self._batches += 1

    def rows(self) -> Iterator[tuple[Place, Iterator[pa.RecordBatch]]]:
        """Yield each place with its rows, in their order."""
        if self._writer is None:
            return
        self._writer.close()
        with pa.memory_map(str(self.path)) as file, pa.ipc.open_file(file) as reader:
            for place, numbers in self.batches_of.items():
                yield place, map(reader.get_batch, numbers)


class RowFiles(Generic[Place, Stored]):
    """
    The files of one portion. They are made in *directory*, which the caller removes.

    Call `write` with the records in order, then `finish`. A crash in between leaves only complete files in
    the sink.
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
        """Add a batch of records."""
        for place, rows in split_by_place(batch, self._sink.place_of):
            self._write(place, self._sink.arranged(rows))

    def finish(self) -> list[Stored]:
        """Complete every file and store it in the sink; return the sink's description of each."""
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
