"""A reader's request, which travels to executors, and the work that batches and streams share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

from tieringd.spark.bucket import Bucket, bucket_of
from tieringd.spark.source.data_loss import LossRule
from tieringd.spark.source.option_values import OptionValues, fault
from tieringd.spark.source.options import SourceOptions, parse_options, read_columns
from tieringd.spark.source.planning import Stretch, plan_tasks, spans_of
from tieringd.spark.source.reader_settings import StoreSettings, read_settings
from tieringd.spark.source.schema import columns_of
from tieringd.spark.source.segment_spans import OffsetRange, find_stretches
from tieringd.spark.source.task_reader import ReadingRules, TaskReader
from tieringd.spark.worker_process import spare_collections

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType


@dataclass(frozen=True, slots=True)
class Request:
    """A reader's options, settings and columns. Plain data, so that Spark can send it to executors."""

    options: SourceOptions
    settings: StoreSettings
    columns: tuple[str, ...]

    def bucket(self) -> Bucket:
        """
        Return this process's bucket, opened with this process's own credentials.

        Raises:
            TieringError: The bucket cannot be opened.
        """
        return bucket_of(self.settings.config())

    @property
    def loss(self) -> LossRule:
        """Return a new rule for missing records."""
        return LossRule(is_fatal=self.options.fail_on_data_loss)

    def tasks(self, ranges: Sequence[OffsetRange], *, loss: LossRule) -> list[InputPartition]:
        """
        Return the tasks that read *ranges*.

        Raises:
            DataLossError: Part of a range is not in the archive, and *loss* does not allow that.
        """
        tasks = plan_tasks(
            find_stretches(self.bucket(), ranges, rule=loss),
            task_bytes=self.options.task_bytes,
            tasks_min=self.options.tasks_min,
            task_records_max=self.options.task_records_max,
        )
        spare_collections()
        return [InputPartition(stretches) for stretches in tasks]

    def read(self, task: InputPartition) -> Iterator[pa.RecordBatch]:
        """
        Yield the records of a task. Without tasks Spark makes an empty one of its own, which has no records.

        Raises:
            TieringError: The records cannot be read.
        """
        stretches: tuple[Stretch, ...] = task.value or ()
        rules = ReadingRules(
            self.columns,
            read_committed=self.options.read_committed,
            skip_corrupt=self.options.skip_corrupt,
            loss=self.loss,
        )
        yield from TaskReader(self.bucket(), rules).batches(spans_of(stretches))
        spare_collections()


def read_request(given: Mapping[str, str], schema: StructType, *, is_streaming: bool) -> Request:
    """
    Return the request of *given* options and a schema. A file named in `config` is read here.

    Raises:
        ConfigError: An option is wrong, or options or the schema contradict one another.
    """
    columns = columns_of(schema)
    if OptionValues(given).has("columns") and columns != read_columns(given):
        raise fault("columns", f"contradicts the schema, whose columns are {', '.join(columns)}")
    return Request(parse_options(given, is_streaming=is_streaming), read_settings(given), columns)
