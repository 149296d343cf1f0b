"""
How a job has its work done: a list of small plain tasks, one function, and what Spark's executors return.

A task takes nothing along but what it has to do. The executor opens the bucket itself, with its own
credentials, and keeps it open for the tasks that follow (`spark.bucket`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from tieringd.errors import TieringError
from tieringd.spark.jobs.progress import Progress, watched
from tieringd.spark.worker_process import spare_collections

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")
R = TypeVar("R")

_RAISED = re.compile(r"^(?:[\w.]*\s)?tieringd\.errors\.\w+: (.+)$", re.MULTILINE)
_FOREIGN = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n)+(\S.*)$", re.MULTILINE)
"""What Python says of any error, as of a full disk, or a package that an executor does not have."""
_NOT_BEGUN = re.compile(r"Error from python worker:\s*\n\s*(\S.*)$", re.MULTILINE)
"""What the executor's Python says that cannot start a worker."""
_CALLED = "An error occurred while calling "


class TaskFailed(TieringError):
    """An executor could not do its part, after as many attempts as Spark makes."""


class Spread(Protocol):
    """Whoever has a list of tasks done, on executors or not."""

    def __call__(self, what: str, tasks: Sequence[T], work: Callable[[T], R], /) -> list[R]:
        """Return what *work* returns for each of *tasks*, in order."""


def spread_over(spark: SparkSession, progress: Progress) -> Spread:
    """Return what has tasks done by the executors of *spark*, and tells *progress* of it; see `run_tasks`."""

    def spread(what: str, tasks: Sequence[T], work: Callable[[T], R], /) -> list[R]:
        return run_tasks(spark, what, tasks, work, progress=progress)

    return spread


def run_tasks(
    spark: SparkSession, what: str, tasks: Sequence[T], work: Callable[[T], R], *, progress: Progress
) -> list[R]:
    """
    Return what *work* returns for each of *tasks*, in order; each is a task of Spark's.

    Spark begins with the first ones, so the largest belong there. *work* runs on executors and is
    pickled: a function of a module, or a `functools.partial` of one.

    Raises:
        TaskFailed: A task failed each time that it was tried.
    """
    if not tasks:
        return []
    with watched(spark, what, progress), failures_in_words():
        return spark.sparkContext.parallelize(tasks, len(tasks)).map(partial(_on_executor, work)).collect()


def _on_executor(work: Callable[[T], R], task: T) -> R:
    result = work(task)
    spare_collections()
    return result


@contextmanager
def failures_in_words() -> Iterator[None]:
    """
    Turn what Spark raises in the block into one of our errors, with the cause in a line.

    Raises:
        TaskFailed: Spark gave up.
    """
    from tieringd.spark.jobs.spark_errors import SPARK_ERRORS  # noqa: PLC0415 - an optional part

    try:
        yield
    except SPARK_ERRORS as error:
        what = "Spark gave up" if raised_in_task(str(error)) is None else "a task failed"
        raise TaskFailed(
            f"{what}: {cause_of(error)}",
            hint="Spark's own log has the whole story; on this machine --conf spark.log.level=ERROR shows it",
        ) from error


def raised_in_task(text: str) -> str | None:
    """Return what a task raised, or why it did not begin, of what Spark says; None where it was neither."""
    found = _RAISED.findall(text) or _FOREIGN.findall(text) or _NOT_BEGUN.findall(text)
    return found[-1].strip() if found else None


def cause_of(error: Exception) -> str:
    """Return in a line what is of interest in an error that Spark has raised."""
    text = str(error)
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(_CALLED)]
    first = lines[0].removeprefix(": ") if lines else type(error).__name__
    return raised_in_task(text) or first
