"""
Run a job for a command: its session, its progress, its report, its exit code.

`JobProgress` prints a job's progress on standard error: one line that changes in a terminal, elsewhere a new
line every few seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import typer

from tieringd.cli.options import ConfigFile, Format, OutputFormat, loaded, print_document
from tieringd.cli.spark.options import Conf, Master, ReportFile
from tieringd.cli.spark.session import interruptible, is_submitted, parse_conf, spark_session
from tieringd.config import Config
from tieringd.errors import ConfigError, LocalFileError
from tieringd.spark.jobs.job_progress import Progress
from tieringd.spark.jobs.report import Report

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


SECONDS_BETWEEN = 10.0
"""Time between two lines of progress where the output is not a terminal."""


class JobProgress:
    """
    Prints a job's progress.

    Outside a terminal, nothing is printed for a job of less than SECONDS_BETWEEN.
    """

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
        """Show that *done* of *total* tasks of the step *what* are done."""
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
        """End the terminal's line of progress, if there is one."""
        if self._width:
            typer.echo(err=True)
        self._width = 0

    def _line(self, done: int, total: int, seconds: float) -> str:
        line = f"{self._what}: {done} of {total} tasks ({done / max(1, total):.0%})"
        if 0 < done < total:
            line += f", about {seconds * (total - done) / done:.0f} s left"
        return line


class Job(Protocol):
    """A job with its own arguments bound."""

    def __call__(self, spark: SparkSession, config: Config, *, progress: Progress) -> Report:
        """Run the job, and return its report."""


def run_job(
    job: Job,
    *,
    config: ConfigFile,
    master: Master = None,
    conf: Conf = None,
    output: Format = OutputFormat.TABLE,
    report: ReportFile = None,
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
    # `spark-submit` has one output for both streams: progress would stand in the midst of the JSON.
    is_quiet = output.is_data and is_submitted(os.environ)
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


def job_command(function: Callable[..., Job]) -> Callable[..., None]:
    """
    Return a command that runs the job which *function* makes of its options.

    The command has these options, and those of `run_job`. A function that needs the configuration file has a
    parameter `config`.
    """
    own = signature(function, eval_str=True).parameters
    _, config, *others = signature(run_job, eval_str=True).parameters.values()
    # The order is that of the help.
    options = {one.name: one.replace(kind=Parameter.KEYWORD_ONLY) for one in (config, *own.values(), *others)}

    @wraps(function)
    def command(**given: Any) -> None:
        job = function(**{name: given[name] for name in own})
        run_job(job, **{one.name: given[one.name] for one in (config, *others)})

    command.__signature__ = Signature(list(options.values()))  # type: ignore[attr-defined]
    command.__annotations__ = {name: one.annotation for name, one in options.items()}
    return command


def tell(report: Report, *, output: OutputFormat, path: Path | None) -> None:
    """
    Print a report on standard output, and write it to the file *path*, if there is one.

    The file is written even if printing fails: a job may have taken hours.

    Raises:
        LocalFileError: The file cannot be written.
    """
    try:
        if output.is_data:
            print_document(json.loads(report.as_json()), output)
        else:
            typer.echo(report.as_text().rstrip("\n"))
    finally:
        # The reader of standard output may have closed the pipe, as `| head` does.
        if path is not None:
            _write(path, report)


def _require_writable(path: Path) -> None:
    """
    Check that the report's file can be written, before a job spends hours.

    Raises:
        ConfigError: *path* is a directory, or cannot be written.
    """
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(
            f"--report {path}: the file cannot be written",
            hint="Nothing was begun. The directory must exist and be writable",
        )


def _write(path: Path, report: Report) -> None:
    try:
        path.write_text(report.as_json() + "\n")
    except OSError as error:
        raise LocalFileError(f"the report cannot be written: {error}", path=str(path)) from error
