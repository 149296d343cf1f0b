"""
A data source of Spark that reads and decodes nothing: each task yields one record batch again and again.

What a scan of it takes is what Spark takes to start a task, and to move records from Python into its rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from tieringd.spark.decoder.schema import arrow_schema
from tieringd.spark.decoder.segment_decoder import BYTES_MAX, ROWS_MAX
from tieringd.spark.source.schema import columns_of, schema_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql.types import StructType

COLUMNS = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")
"""The columns of `schema` that an archive has by default."""
KEY_BYTES = 12


class HeldBatches(DataSource):
    """
    Records in the shape in which the archive's source yields them.

    Options: `topic`; `records`, of all tasks; `tasks`; `valueBytes`, of each value.
    """

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return "held"

    def schema(self) -> StructType:
        """Return the columns of the archive's source, without headers."""
        return schema_of(COLUMNS)

    def reader(self, schema: StructType) -> HeldReader:
        """Return a reader of the columns of *schema*."""
        names = ("records", "tasks", "valueBytes")
        return HeldReader(columns_of(schema), self.options["topic"], *(int(self.options[n]) for n in names))


class HeldReader(DataSourceReader):
    """Divides the records among the tasks."""

    def __init__(
        self, columns: tuple[str, ...], topic: str, records: int, tasks: int, value_bytes: int
    ) -> None:
        """Make a reader of *records* records with values of *value_bytes*, in *tasks* tasks."""
        self._columns = columns
        self._topic = topic
        self._shares = [records // tasks] * tasks
        self._shares[0] += records % tasks
        self._value_bytes = value_bytes

    def partitions(self) -> list[InputPartition]:
        """Return the tasks, each with its number of records."""
        return [InputPartition(share) for share in self._shares]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the records of a task. All record batches but the last are the same one."""
        rows = min(ROWS_MAX, BYTES_MAX // (KEY_BYTES + self._value_bytes))
        batch = self._batch(rows)
        left: int = partition.value
        while left > 0:
            yield batch.slice(0, left) if left < rows else batch
            left -= rows

    def _batch(self, rows: int) -> pa.RecordBatch:
        schema = arrow_schema(self._columns)
        numbers = np.arange(rows, dtype=np.int64)
        every = {
            "key": pa.array([f"key-{number:08}".encode() for number in range(rows)], pa.binary()),
            "value": _values(rows, self._value_bytes),
            "topic": pa.repeat(pa.scalar(self._topic, pa.string()), rows),
            "partition": pa.repeat(pa.scalar(0, pa.int32()), rows),
            "offset": pa.array(numbers),
            "timestamp": pa.array(numbers * 1000).cast(pa.timestamp("us", tz="UTC")),
            "timestampType": pa.repeat(pa.scalar(0, pa.int32()), rows),
        }
        return pa.RecordBatch.from_arrays([every[name] for name in self._columns], schema=schema)


def _values(rows: int, value_bytes: int) -> pa.Array:
    ends = pa.py_buffer(np.arange(rows + 1, dtype=np.int32) * np.int32(value_bytes))
    content = pa.py_buffer(np.random.default_rng(0).bytes(rows * value_bytes))
    return pa.Array.from_buffers(pa.binary(), rows, [None, ends, content])
