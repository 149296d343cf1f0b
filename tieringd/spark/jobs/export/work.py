"""
What one task does: it reads a portion from the archive, and writes its files into the target.

Records come from the reader of the Spark source. Merges and compaction under it are its business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from tieringd.errors import RetryableError, TieringError
from tieringd.spark.jobs.export.plan import ALLOW_GAPS, Lost, Portion, require_reached
from tieringd.spark.jobs.export.row_files import RowFiles
from tieringd.spark.jobs.export.state import Isolation
from tieringd.spark.jobs.export.topic_target import SinkOpener, StoredFile, Written
from tieringd.spark.jobs.progress import Progress, watched
from tieringd.spark.jobs.spark_errors import SPARK_ERRORS
from tieringd.spark.jobs.tasks import cause_of
from tieringd.spark.source.data_loss import Loss
from tieringd.spark.source.segment_spans import OffsetRange, find_spans
from tieringd.spark.source.task_reader import ReadingRules, TaskReader

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    # An ordinary import would load prometheus_client into processes that do not need it.
    from tieringd.spark.bucket import Bucket

COLUMNS: Final = ("key", "value", "partition", "offset", "timestamp", "timestampType", "headers")
"""Those of a record, without the topic's name."""

T = TypeVar("T")
R = TypeVar("R")


class Runner(Protocol):
    """Whoever does a round's tasks, all of them or none."""

    def __call__(self, work: Work, portions: Sequence[Portion], /) -> list[Written]:
        """Return what *work* gives for each portion, in their order."""


@dataclass(slots=True)
class Losses:
    """What the archive lacks of a portion. See `OnLoss`."""

    portion: Portion
    fails_on_gap: bool
    found: list[Lost] = field(default_factory=list)

    def meet(self, loss: Loss) -> None:
        """
        Note a loss.

        Raises:
            TieringError: The rules do not allow any.
        """
        lost = Lost(self.portion.partition, loss.base_offset, loss.last_offset + 1, loss.reason)
        if self.fails_on_gap:
            raise TieringError(str(lost), hint=ALLOW_GAPS)
        self.found.append(lost)


@dataclass(frozen=True, slots=True)
class Work:
    """A task for any portion of a topic; it is sent to executors."""

    archive: Callable[[], Bucket]
    open_sink: SinkOpener
    isolation: Isolation
    fails_on_gap: bool

    def __call__(self, portion: Portion) -> Written:
        """
        Write a portion.

        Raises:
            TieringError: It cannot be read, or not be written. What was written of it does no harm.
        """
        sink = self.open_sink(portion)
        losses = Losses(portion, self.fails_on_gap)
        with TemporaryDirectory(prefix="tieringd-export-") as directory:
            files = RowFiles[Any, StoredFile](sink, Path(directory))
            for batch in self.batches(portion, losses):
                files.write(batch)
            stored = files.finish()
        return Written(portion, tuple(stored), sink.clipped_times, tuple(losses.found))

    def batches(self, portion: Portion, losses: Losses) -> Iterator[pa.RecordBatch]:
        """
        Yield the records of a portion under `COLUMNS`, ascending by offset.

        Raises:
            TieringError: The archive no longer reaches so far; or it lacks offsets, and may not.
            CorruptDataError: Stored bytes are wrong; the error names the object and position.
        """
        bucket, partition = self.archive(), portion.partition
        found = bucket.run(bucket.manifests.load(partition)).manifest
        manifest = require_reached(found, partition, portion.next_offset)
        wanted = OffsetRange(partition.topic_partition, manifest, portion.from_offset, portion.next_offset)
        rules = ReadingRules(
            COLUMNS, read_committed=self.isolation == "read_committed", skip_corrupt=False, loss=losses
        )
        yield from TaskReader(bucket, rules).batches(find_spans(bucket, [wanted], rule=losses))


@dataclass(frozen=True, slots=True)
class _Failed:
    """An error of a task that another try of the task would meet again."""

    text: str


@dataclass(frozen=True, slots=True)
class _Reported:
    """Work that brings a final error back as a value: Spark would only try it again, and say it badly."""

    work: Work

    def __call__(self, portion: Portion) -> Written | _Failed:
        try:
            return self.work(portion)
        except RetryableError:
            raise
        except TieringError as error:
            return _Failed(str(error))


def on_spark(spark: SparkSession, what: str, progress: Progress) -> Runner:
    """Return what does tasks on Spark's executors, one for each portion, and tells *progress* of them."""

    def run(work: Work, portions: Sequence[Portion]) -> list[Written]:
        try:
            with watched(spark, what, progress):
                tasks = spark.sparkContext.parallelize(portions, len(portions))
                outcomes = tasks.map(_Reported(work)).collect()
        except SPARK_ERRORS as error:
            raise RetryableError(
                f"a task of the export failed, more often than Spark tries: {cause_of(error)}",
                hint="What it was writing does not count; export again once that is mended",
            ) from error
        failed = [one.text for one in outcomes if isinstance(one, _Failed)]
        if failed:
            raise TieringError(f"the export stopped, and what it was writing does not count: {failed[0]}")
        return [one for one in outcomes if isinstance(one, Written)]

    return run
