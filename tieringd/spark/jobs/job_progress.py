"""The progress of a running job: how many of Spark's tasks are done."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

POLL_SECONDS = 1.0
_OF_A_GROUP = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")
"""Spark's thread-local properties of a job group. A notebook's cell may have a group of its own."""


class Progress(Protocol):
    """A receiver of a job's progress."""

    def __call__(self, what: str, done: int, total: int, /) -> None:
        """Receive that *done* of *total* tasks of the step *what* are done."""


def silent(_what: str, _done: int, _total: int) -> None:
    """Ignore the progress."""


@contextmanager
def watched(
    spark: SparkSession, what: str, progress: Progress, *, poll_seconds: float = POLL_SECONDS
) -> Iterator[None]:
    """
    Report the tasks that Spark runs for this thread in the context to *progress*, as the step *what*.

    An exception in the context, such as an interrupt, cancels these tasks.
    """
    context = spark.sparkContext
    group = f"tieringd-{uuid.uuid4().hex}"
    is_over = threading.Event()
    told = (-1, -1)

    def tell() -> None:
        nonlocal told
        done = total = 0
        tracker = context.statusTracker()
        for job_id in tracker.getJobIdsForGroup(group):
            job = tracker.getJobInfo(job_id)
            for stage_id in job.stageIds if job else ():
                stage = tracker.getStageInfo(stage_id)
                # A waiting stage is not counted. It may have many tasks that end at once, such as those of a
                # shuffle, or it may be skipped: the rest would seem far too much.
                if stage is not None and (stage.numActiveTasks or stage.numCompletedTasks):
                    done += stage.numCompletedTasks
                    total += stage.numTasks
        if total and (done, total) != told:
            told = (done, total)
            progress(what, done, total)

    def poll() -> None:
        with spark_may_be_gone():
            while not is_over.wait(poll_seconds):
                tell()

    before = {name: context.getLocalProperty(name) for name in _OF_A_GROUP}
    # With `interruptOnCancel` a cancellation also interrupts tasks that wait for a store.
    context.setJobGroup(group, what, interruptOnCancel=True)
    watcher = threading.Thread(target=poll, name="tieringd-progress", daemon=True)
    watcher.start()
    try:
        yield
    except BaseException:
        # An interrupt of the driver stops the executors as well.
        with spark_may_be_gone():
            context.cancelJobGroup(group)
        raise
    finally:
        is_over.set()
        watcher.join()
        with spark_may_be_gone():
            for name, value in before.items():
                context.setLocalProperty(name, value)  # type: ignore[arg-type]
    with spark_may_be_gone():
        tell()


@contextmanager
def spark_may_be_gone() -> Iterator[None]:
    """
    Suppress Spark's errors in the context, whose work is useless if Spark is gone.

    Such an error would hide the error that says why Spark is gone.
    """
    from tieringd.spark.jobs.spark_errors import SPARK_ERRORS  # noqa: PLC0415 - an optional part

    with suppress(*SPARK_ERRORS):
        yield
