"""How far a job is, while it works: the tasks of Spark that are done, told to whoever wants to know."""

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
"""What Spark keeps of a job group for a thread: a notebook's cell may have one of its own."""


class Progress(Protocol):
    """Whoever is told."""

    def __call__(self, what: str, done: int, total: int, /) -> None:
        """Take that *done* of *total* tasks of *what* are done."""


def silent(_what: str, _done: int, _total: int) -> None:
    """Tell nobody."""


@contextmanager
def watched(
    spark: SparkSession, what: str, progress: Progress, *, poll_seconds: float = POLL_SECONDS
) -> Iterator[None]:
    """Tell *progress* of the tasks that Spark does for this thread in the block, under the name *what*."""
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
                # One that waits may be many tasks that are over at once, as those of a shuffle, or be left
                # out: what is left to do would seem far too much.
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
    # An interrupt reaches tasks that wait for a store.
    context.setJobGroup(group, what, interruptOnCancel=True)
    watcher = threading.Thread(target=poll, name="tieringd-progress", daemon=True)
    watcher.start()
    try:
        yield
    except BaseException:
        # Whoever interrupts the driver wants the executors to stop as well.
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
    Do in the context what is of no use without a Spark: its errors are passed over.

    They would take the place of the one that tells why it is gone.
    """
    from tieringd.spark.jobs.spark_errors import SPARK_ERRORS  # noqa: PLC0415 - an optional part

    with suppress(*SPARK_ERRORS):
        yield
