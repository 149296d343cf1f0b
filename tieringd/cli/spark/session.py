"""
The Spark session of a command.

In a program that runs Spark already it is a new session on the same SparkContext; else the command starts
Spark and stops it.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import typer

from tieringd.errors import ConfigError

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

T = TypeVar("T")

_SUBMITTED = "PYSPARK_GATEWAY_PORT"
"""A variable that `spark-submit` sets for the program that it starts."""
HERE: Final = "local[*]"
_HINT = "Spark's output has more details; on this machine it is shown with --conf spark.log.level=WARN"
_TIME_ZONE: Final = "spark.sql.session.timeZone"
_ANYWHERE: Final = {
    _TIME_ZONE: "UTC",
    "spark.ui.showConsoleProgress": "false",
    # See "What makes it faster" in docs/spark.md.
    "spark.python.unix.domain.socket.enabled": "true",
}
_QUIET = Path(__file__).with_name("quiet-log4j2.properties").as_uri()
_ON_THIS_MACHINE: Final = {
    # No port is opened that other machines could connect to.
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    # That module says why. On a cluster the workers' output goes to a log, and needs no such daemon.
    "spark.python.daemon.module": "tieringd.spark.worker_daemon",
    # The command itself reports failures; the JVM's log is switched off.
    "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={_QUIET}",
}


def is_submitted(environ: Mapping[str, str]) -> bool:
    """
    Return whether `spark-submit` has started this program.

    `spark-submit` writes the standard output and the standard error of a program to one output.
    """
    return _SUBMITTED in environ


def parse_conf(conf: Sequence[str]) -> dict[str, str]:
    """
    Return the properties of the --conf options, by name.

    Raises:
        typer.BadParameter: One is not of the form key=value.
    """
    found = {}
    for one in conf:
        key, separator, value = one.partition("=")
        if not key or not separator:
            raise typer.BadParameter(f"--conf {one}: expected key=value")
        found[key] = value
    return found


def session_options(
    *, master: str | None, conf: Mapping[str, str], environ: Mapping[str, str]
) -> dict[str, str]:
    """
    Return the session's properties: our defaults, then *conf*, then *master*.

    Without *master* and `spark.master` the master is `local[*]`, or left out if `spark-submit` has set it.
    """
    if master is None:
        master = conf.get("spark.master", None if is_submitted(environ) else HERE)
    is_here = master is not None and master.startswith("local")
    return {
        **_ANYWHERE,
        **(_ON_THIS_MACHINE if is_here else {}),
        **conf,
        **({} if master is None else {"spark.master": master}),
    }


@contextmanager
def optional_parts() -> Iterator[None]:
    """
    Turn the ImportErrors of the context into a ConfigError. It imports modules that need the spark extra.

    Raises:
        ConfigError: A package of the spark extra is not installed.
    """
    try:
        yield
    except ImportError as error:
        what = "PySpark" if error.name in {None, "pyspark"} else f"the package {error.name}"
        raise ConfigError(f"this command needs {what}", hint="pip install 'tieringd[spark]'") from error


@contextmanager
def spark_session(*, master: str | None, conf: Mapping[str, str]) -> Iterator[SparkSession]:
    """
    Yield a session that is usable in the context.

    A program that runs Spark already, such as a notebook, gets a new session on its SparkContext, and Spark
    keeps running afterwards. Otherwise the session is built here, and the session and its JVM end with the
    context.

    Raises:
        ConfigError: PySpark or Java is missing, Spark does not start, or the running Spark does not have the
            properties of *master* and *conf*, and cannot take them.
    """
    context = running_context()
    if context is not None:
        yield _beside(context, master=master, conf=conf)
        return
    with optional_parts():
        from pyspark.sql import SparkSession  # noqa: PLC0415 - an optional part

        from tieringd.spark.jobs.job_progress import spark_may_be_gone  # noqa: PLC0415 - likewise
        from tieringd.spark.jobs.spark_errors import SPARK_ERRORS  # noqa: PLC0415 - likewise
        from tieringd.spark.jobs.tasks import cause_of  # noqa: PLC0415 - likewise
    _require_java(os.environ)
    options = session_options(master=master, conf=conf, environ=os.environ)
    if options.get("spark.master", "").startswith("local"):
        # The workers run the Python of this command, whichever `python3` is in PATH.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    silence_py4j()
    builder = SparkSession.builder.appName("tieringd")
    for name, value in options.items():
        builder = builder.config(name, value)
    try:
        session = builder.getOrCreate()
    except SPARK_ERRORS as error:
        raise ConfigError(f"Spark does not start: {cause_of(error)}", hint=_HINT) from error
    try:
        yield session
    finally:
        with spark_may_be_gone():
            session.stop()


def silence_py4j() -> None:
    """
    Keep Py4J's stack traces off standard error. The command itself reports once that the JVM is gone.

    Py4J logs a lost JVM at each call: with its own loggers, and with the root logger if the connection is
    reset before an answer.
    """
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(_is_not_of_py4j)


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    return Path(record.pathname).parent.name != "py4j"


def running_context() -> SparkContext | None:
    """Return this process's active SparkContext; None without one, or if PySpark is not imported."""
    if "pyspark" not in sys.modules:
        return None
    from pyspark import SparkContext  # noqa: PLC0415 - an optional part

    return SparkContext._active_spark_context  # noqa: SLF001 - PySpark has no other name for it


def _beside(context: SparkContext, *, master: str | None, conf: Mapping[str, str]) -> SparkSession:
    """
    Return a new session of *context* with the properties of *conf* and the time zone UTC.

    Our results depend on the time zone.

    Raises:
        ConfigError: *master* is not that of *context*, or a property of *conf* has another value that cannot
            be changed while Spark runs.
    """
    from pyspark.sql import SparkSession  # noqa: PLC0415 - an optional part

    session = SparkSession(context).newSession()
    wanted = {**conf, **({} if master is None else {"spark.master": master})}
    fixed = dict(context.getConf().getAll())
    refused = []
    for name, value in {_TIME_ZONE: "UTC", **wanted}.items():
        if session.conf.isModifiable(name):
            session.conf.set(name, value)
        elif fixed.get(name) != value:
            refused.append(f"{name} is {fixed.get(name, 'not set')}, but {value} is requested")
    if refused:
        raise ConfigError(
            "this program has a running Spark session, whose properties cannot be changed",
            problems=tuple(refused),
            hint="Leave out --master and these --conf options, or end that session first: spark.stop()",
        )
    return session


def interruptible(work: Callable[[], T]) -> T:
    """
    Call *work*, which uses Spark, and return its result. Ctrl-C ends the wait at once.

    *work* runs in a thread of its own, because an interrupt in a call to the JVM leaves that call without a
    valid answer. The JVM and its tasks end with this process. A Spark that ran before outlives an interrupt:
    there *work* runs in the calling thread, and PySpark cancels its tasks.
    """
    if running_context() is not None:
        return work()
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
            outcome.set_exception(error)

    threading.Thread(target=run, name="tieringd-job", daemon=True).start()
    return outcome.result()


def _require_java(environ: Mapping[str, str]) -> None:
    """
    Check that Java is installed. Under `spark-submit` nothing is checked, since Spark runs already.

    Raises:
        ConfigError: JAVA_HOME has no Java, or without JAVA_HOME there is none in PATH.
    """
    home = environ.get("JAVA_HOME")
    found = Path(home, "bin", "java").exists() if home else shutil.which("java", path=environ.get("PATH"))
    if not found and not is_submitted(environ):
        raise ConfigError(
            "Spark needs Java 17 or newer, and "
            f"{(f'JAVA_HOME={home} has none' if home else 'there is none')}",
            hint="apt-get install openjdk-17-jre-headless, or set JAVA_HOME",
        )
