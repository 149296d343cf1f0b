"""
The work of one task: read a portion from the archive, and write its files to the target.

Records come from the reader of the Spark source, which handles merges and compactions that happen meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from tieringd.errors import RetryableError, TieringError
from tieringd.spark.jobs.export.plan import ALLOW_GAPS, LostOffsets, Portion, require_reached
from tieringd.spark.jobs.export.row_files import RowFiles
from tieringd.spark.jobs.export.state import Isolation
from tieringd.spark.jobs.export.topic_target import SinkOpener, StoredFile, WrittenFiles
from tieringd.spark.jobs.job_progress import Progress, watched
from tieringd.spark.jobs.spark_errors import SPARK_ERRORS
from tieringd.spark.jobs.tasks import cause_of
from tieringd.spark.source.data_loss import Loss
from tieringd.spark.source.planning import spans_of
from tieringd.spark.source.segment_spans import OffsetRange, find_stretches
from tieringd.spark.source.task_reader import ReadingRules, TaskReader

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    # An ordinary import would load prometheus_client into processes that do not need it.
    from tieringd.spark.bucket import Bucket

COLUMNS: Final = ("key", "value", "partition", "offset", "timestamp", "timestampType", "headers")
"""The columns of a record, without the topic's name."""

T = TypeVar("T")
R = TypeVar("R")


class Runner(Protocol):
    """A function that runs a round's tasks. It returns all results, or raises."""

    def __call__(self, work: Work, portions: Sequence[Portion], /) -> list[WrittenFiles]:
        """Run *work* for each portion, and return the results in order."""


@dataclass(slots=True)
class Losses:
    """Collects the offsets of a portion that the archive lacks. See `OnLoss`."""

    portion: Portion
    fails_on_gap: bool
    found: list[LostOffsets] = field(default_factory=list)

    def meet(self, loss: Loss) -> None:
        """
        Note a loss.

        Raises:
            TieringError: The rules do not allow losses.
        """
        lost = LostOffsets(self.portion.partition, loss.base_offset, loss.last_offset + 1, loss.reason)
        if self.fails_on_gap:
            raise TieringError(str(lost), hint=ALLOW_GAPS)
        self.found.append(lost)


@dataclass(frozen=True, slots=True)
class Work:
    """The function of a topic's tasks, called with a portion. It is sent to executors."""

    archive: Callable[[], Bucket]
    open_sink: SinkOpener
    isolation: Isolation
    fails_on_gap: bool
    may_be_cut: bool = False
    """Whether the archive may end before a portion does. The offsets past its end count as lost then."""

    def __call__(self, portion: Portion) -> WrittenFiles:
        """
        Write a portion's files, and return them.

        Raises:
            TieringError: The portion cannot be read or written. Files that were written do no harm.
        """
        sink = self.open_sink(portion)
        losses = Losses(portion, self.fails_on_gap)
        with TemporaryDirectory(prefix="tieringd-export-") as directory:
            files = RowFiles[Any, StoredFile](sink, Path(directory))
            for batch in self.batches(portion, losses):
                files.write(batch)
            stored = files.finish()
        return WrittenFiles(portion, tuple(stored), sink.clipped_times, tuple(losses.found))

    def batches(self, portion: Portion, losses: Losses) -> Iterator[pa.RecordBatch]:
        """
        Yield the records of a portion under `COLUMNS`, ascending by offset.

        Raises:
            TieringError: The archive no longer reaches the portion's end, or it lacks offsets and the rules
                do not allow that.
            CorruptDataError: Stored bytes are damaged; the error names the object and the position.
        """
        bucket, partition = self.archive(), portion.partition
        found = bucket.run(bucket.current_manifest(partition))
        manifest = require_reached(found, partition, 0 if self.may_be_cut else portion.next_offset)
        wanted = OffsetRange(partition.topic_partition, manifest, portion.from_offset, portion.next_offset)
        rules = ReadingRules(
            COLUMNS, read_committed=self.isolation == "read_committed", skip_corrupt=False, loss=losses
        )
        spans = spans_of(find_stretches(bucket, [wanted], rule=losses))
        yield from TaskReader(bucket, rules).batches(spans)


@dataclass(frozen=True, slots=True)
class _Failed:
    """An error of a task that would occur again in another attempt."""

    text: str


@dataclass(frozen=True, slots=True)
class _Reported:
    """
    Work that returns a permanent error as a value.

    If it were raised, Spark would try the task again, and obscure the message.
    """

    work: Work

    def __call__(self, portion: Portion) -> WrittenFiles | _Failed:
        try:
            return self.work(portion)
        except RetryableError:
            raise
        except TieringError as error:
            return _Failed(str(error))


def on_spark(spark: SparkSession, what: str, progress: Progress) -> Runner:
    """Return a runner on Spark's executors, with one task for each portion, that reports to *progress*."""

    def run(work: Work, portions: Sequence[Portion]) -> list[WrittenFiles]:
        try:
            with watched(spark, what, progress):
                tasks = spark.sparkContext.parallelize(portions, len(portions))
                outcomes = tasks.map(_Reported(work)).collect()
        except SPARK_ERRORS as error:
            raise RetryableError(
                f"a task of the export failed in all attempts: {cause_of(error)}",
                hint="Its output is discarded; export again after the cause is repaired",
            ) from error
        failed = [one.text for one in outcomes if isinstance(one, _Failed)]
        if failed:
            raise TieringError(f"the export stopped, and its uncommitted output is discarded: {failed[0]}")
        return [one for one in outcomes if isinstance(one, WrittenFiles)]

    return run
