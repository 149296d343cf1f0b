"""
Run a job's work on Spark's executors: one function for a list of small plain tasks.

A task has only a description of its work. The executor opens the bucket itself, with its own credentials, and
keeps it open for later tasks (`spark.bucket`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from tieringd.errors import TieringError
from tieringd.spark.jobs.job_progress import Progress, watched
from tieringd.spark.worker_process import spare_collections

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")
R = TypeVar("R")

_RAISED = re.compile(r"^(?:[\w.]*\s)?tieringd\.errors\.\w+: (.+)$", re.MULTILINE)
_FOREIGN = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n)+(\S.*)$", re.MULTILINE)
"""A Python traceback of any other error, such as a full disk, or a package that an executor lacks."""
_NOT_BEGUN = re.compile(r"Error from python worker:\s*\n\s*(\S.*)$", re.MULTILINE)
"""The message of an executor whose Python cannot start a worker."""
_CALLED = "An error occurred while calling "


class TaskFailed(TieringError):
    """A task failed on executors in all of Spark's attempts, or Spark gave up for another reason."""


class Spread(Protocol):
    """A function that runs a list of tasks, on executors or elsewhere."""

    def __call__(self, what: str, tasks: Sequence[T], work: Callable[[T], R], /) -> list[R]:
        """Run *work* for each of *tasks*, and return the results in order."""


def spread_over(spark: SparkSession, progress: Progress) -> Spread:
    """Return a `Spread` that runs tasks on the executors of *spark* and reports to *progress*."""

    def spread(what: str, tasks: Sequence[T], work: Callable[[T], R], /) -> list[R]:
        return run_tasks(spark, what, tasks, work, progress=progress)

    return spread


def run_tasks(
    spark: SparkSession, what: str, tasks: Sequence[T], work: Callable[[T], R], *, progress: Progress
) -> list[R]:
    """
    Run *work* for each of *tasks*, each as one task of Spark, and return the results in order.

    Spark begins with the first tasks, so the largest ones should come first. *work* is pickled for the
    executors: it must be a module's function, or a `functools.partial` of one.

    Raises:
        TaskFailed: A task failed in all attempts.
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
    Turn Spark's errors in the context into a TaskFailed with the cause in one line.

    Raises:
        TaskFailed: Spark raised an error.
    """
    from tieringd.spark.jobs.spark_errors import SPARK_ERRORS  # noqa: PLC0415 - an optional part

    try:
        yield
    except SPARK_ERRORS as error:
        what = "Spark gave up" if raised_in_task(str(error)) is None else "a task failed"
        raise TaskFailed(
            f"{what}: {cause_of(error)}",
            hint="Spark's own log has the details; on this machine --conf spark.log.level=ERROR shows it",
        ) from error


def raised_in_task(text: str) -> str | None:
    """Return the error of a task, or of a worker's start, from Spark's message; None if it has neither."""
    found = _RAISED.findall(text) or _FOREIGN.findall(text) or _NOT_BEGUN.findall(text)
    return found[-1].strip() if found else None


def cause_of(error: Exception) -> str:
    """Return the cause of an error that Spark raised, in one line."""
    text = str(error)
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(_CALLED)]
    first = lines[0].removeprefix(": ") if lines else type(error).__name__
    return raised_in_task(text) or first
