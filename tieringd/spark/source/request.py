"""What a reader was asked for, as it travels to executors, and what is the same for batches and streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

from tieringd.spark.bucket import Bucket, bucket_of
from tieringd.spark.source.data_loss import LossRule
from tieringd.spark.source.option_values import OptionValues, fault
from tieringd.spark.source.options import SourceOptions, parse_options, read_columns
from tieringd.spark.source.planning import Span, plan_tasks
from tieringd.spark.source.schema import columns_of
from tieringd.spark.source.segment_spans import OffsetRange, find_spans
from tieringd.spark.source.settings import StoreSettings, read_settings
from tieringd.spark.source.task_reader import ReadingRules, TaskReader
from tieringd.spark.worker_process import spare_collections

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType


@dataclass(frozen=True, slots=True)
class Request:
    """What a reader was asked for. Plain, so that it can go to executors."""

    options: SourceOptions
    settings: StoreSettings
    columns: tuple[str, ...]

    def bucket(self) -> Bucket:
        """
        Return this process's bucket, opened with its own credentials.

        Raises:
            TieringError: It cannot be opened.
        """
        return bucket_of(self.settings.config())

    @property
    def loss(self) -> LossRule:
        """Return what to do where records are missing."""
        return LossRule(is_fatal=self.options.fail_on_data_loss)

    def tasks(self, ranges: Sequence[OffsetRange], *, loss: LossRule) -> list[InputPartition]:
        """
        Return the tasks that read *ranges*.

        Raises:
            DataLossError: Part of a range is not in the archive, and that is not all right.
        """
        tasks = plan_tasks(
            find_spans(self.bucket(), ranges, rule=loss),
            task_bytes=self.options.task_bytes,
            tasks_min=self.options.tasks_min,
            task_records_max=self.options.task_records_max,
        )
        spare_collections()
        return [InputPartition(spans) for spans in tasks]

    def read(self, task: InputPartition) -> Iterator[pa.RecordBatch]:
        """
        Yield the records of a task; Spark's own stand-in for no task at all has none.

        Raises:
            TieringError: They cannot be read.
        """
        spans: tuple[Span, ...] = task.value or ()
        rules = ReadingRules(
            self.columns,
            read_committed=self.options.read_committed,
            skip_corrupt=self.options.skip_corrupt,
            loss=self.loss,
        )
        yield from TaskReader(self.bucket(), rules).batches(spans)
        spare_collections()


def read_request(given: Mapping[str, str], schema: StructType, *, is_streaming: bool) -> Request:
    """
    Return what options and a schema ask for; a configuration file is read here.

    Raises:
        ConfigError: An option is wrong, or they contradict each other.
    """
    columns = columns_of(schema)
    if OptionValues(given).has("columns") and columns != read_columns(given):
        raise fault("columns", f"contradicts the schema, whose columns are {', '.join(columns)}")
    return Request(parse_options(given, is_streaming=is_streaming), read_settings(given), columns)
