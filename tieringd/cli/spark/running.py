"""Running a job for a command: its session, its progress, its report, its exit code."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Protocol

import typer

from tieringd.cli.options import OutputFormat, loaded
from tieringd.cli.spark.progress import JobProgress
from tieringd.cli.spark.session import interruptible, is_submitted, parse_conf, spark_session
from tieringd.errors import ConfigError, LocalFileError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tieringd.config import Config
    from tieringd.spark.jobs.progress import Progress
    from tieringd.spark.jobs.report import Report


class Job(Protocol):
    """A job with all that is wanted of it."""

    def __call__(self, spark: SparkSession, config: Config, *, progress: Progress) -> Report:
        """Do it."""


def run_job(
    job: Job,
    *,
    config: Path,
    master: str | None,
    conf: Sequence[str] | None,
    output: OutputFormat,
    report: Path | None,
) -> None:
    """
    Run *job* and print its report; exit 1 when that has faults.

    Raises:
        ConfigError: The configuration or the report's place is wrong, or Spark cannot be started.
        TieringError: The job failed.
    """
    settings = loaded(config, needs_broker=False)
    options = parse_conf(conf or ())
    if report is not None:
        _require_writable(report)
    # Else it would stand in the midst of the JSON.
    is_quiet = output is OutputFormat.JSON and is_submitted(os.environ)
    progress = JobProgress(is_terminal=sys.stderr.isatty(), is_quiet=is_quiet)

    def work() -> Report:
        with spark_session(master=master, conf=options) as spark:
            try:
                return job(spark, settings, progress=progress)
            finally:
                progress.end()

    done = interruptible(work)
    tell(done, output=output, path=report)
    if done.faults:
        raise typer.Exit(1)


def tell(report: Report, *, output: OutputFormat, path: Path | None) -> None:
    """
    Print a report, and write it to a file; the one where the other fails, too: it took hours.

    Raises:
        LocalFileError: It cannot be written.
    """
    try:
        typer.echo(report.as_json() if output is OutputFormat.JSON else report.as_text().rstrip("\n"))
    finally:
        # Whoever read standard output may have gone, as with `| head`.
        if path is not None:
            _write(path, report)


def _require_writable(path: Path) -> None:
    """
    See that a report can be written, before hours are spent on it.

    Raises:
        ConfigError: It cannot.
    """
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(
            f"--report {path}: no file can be written there",
            hint="Nothing was begun. The directory has to exist, and to be writable",
        )


def _write(path: Path, report: Report) -> None:
    try:
        path.write_text(report.as_json() + "\n")
    except OSError as error:
        raise LocalFileError(f"the report cannot be written: {error}", path=str(path)) from error
