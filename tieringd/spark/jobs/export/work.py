"""What one task does: it reads a portion from the archive, and writes its files into the target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tieringd.errors import RetryableError, TieringError
from tieringd.spark.jobs.export.records import record_batches
from tieringd.spark.jobs.export.row_files import RowFiles
from tieringd.spark.jobs.export.topic_target import StoredFile, Written
from tieringd.spark.jobs.progress import watched
from tieringd.spark.jobs.spark_errors import SPARK_ERRORS
from tieringd.spark.jobs.tasks import cause_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql import SparkSession

    from tieringd.spark.bucket import Bucket
    from tieringd.spark.jobs.export.plan import Lost, Portion
    from tieringd.spark.jobs.export.state import Isolation
    from tieringd.spark.jobs.export.topic_target import SinkOpener
    from tieringd.spark.jobs.progress import Progress

T = TypeVar("T")
R = TypeVar("R")


class Runner(Protocol):
    """Whoever does a round's tasks, all of them or none."""

    def __call__(self, work: Work, portions: Sequence[Portion], /) -> list[Written]:
        """Return what *work* gives for each portion, in their order."""


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
        lost: list[Lost] = []
        with TemporaryDirectory(prefix="tieringd-export-") as directory:
            files = RowFiles[Any, StoredFile](sink, Path(directory))
            for batch in record_batches(
                self.archive(),
                portion,
                isolation=self.isolation,
                fails_on_gap=self.fails_on_gap,
                miss=lost.append,
            ):
                files.write(batch)
            stored = files.finish()
        return Written(portion, tuple(stored), sink.clipped_times, tuple(lost))


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
