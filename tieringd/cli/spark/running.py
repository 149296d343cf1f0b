"""
Running a job for a command: its session, its progress, its report, its exit code.

`JobProgress` tells how far a job is, on standard error: one line in a terminal, a line now and then
elsewhere.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Protocol

import typer

from tieringd.cli.options import OutputFormat, loaded
from tieringd.cli.spark.session import interruptible, is_submitted, parse_conf, spark_session
from tieringd.errors import ConfigError, LocalFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tieringd.config import Config
    from tieringd.spark.jobs.progress import Progress
    from tieringd.spark.jobs.report import Report


SECONDS_BETWEEN = 10.0
"""Of lines that stay, as in a log."""


class JobProgress:
    """Say what a job tells of itself. Quiet elsewhere than in a terminal for a job that is over at once."""

    def __init__(
        self, *, is_terminal: bool, is_quiet: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._is_terminal = is_terminal
        self._is_quiet = is_quiet
        self._clock = clock
        self._what = ""
        self._began = self._said = clock()
        self._width = 0

    def __call__(self, what: str, done: int, total: int, /) -> None:
        """Take that *done* of *total* tasks of *what* are done."""
        if self._is_quiet:
            return
        now = self._clock()
        if what != self._what:
            self.end()
            self._what, self._began = what, now
        line = self._line(done, total, now - self._began)
        if self._is_terminal:
            typer.echo(f"\r{line.ljust(self._width)}", err=True, nl=False)
            self._width = len(line)
        elif done and now - self._said >= SECONDS_BETWEEN:
            self._said = now
            typer.echo(line, err=True)

    def end(self) -> None:
        """Leave the line, if there is one."""
        if self._width:
            typer.echo(err=True)
        self._width = 0

    def _line(self, done: int, total: int, seconds: float) -> str:
        line = f"{self._what}: {done} of {total} tasks ({done / max(1, total):.0%})"
        if 0 < done < total:
            line += f", about {seconds * (total - done) / done:.0f} s left"
        return line


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
