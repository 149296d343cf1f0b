"""The Spark session of a command: the one that is running, or one that is built and ended."""

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
"""Set for programs that `spark-submit` has started."""
HERE: Final = "local[*]"
_HINT = "What Spark printed tells more; on this machine it prints with --conf spark.log.level=WARN"
_TIME_ZONE: Final = "spark.sql.session.timeZone"
_ANYWHERE: Final = {
    _TIME_ZONE: "UTC",
    "spark.ui.showConsoleProgress": "false",
    # See "What makes it faster" in docs/spark.md.
    "spark.python.unix.domain.socket.enabled": "true",
}
_QUIET = Path(__file__).with_name("quiet-log4j2.properties").as_uri()
_ON_THIS_MACHINE: Final = {
    # Nothing is opened that other machines could connect to.
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    # See there; elsewhere what workers print goes to a log.
    "spark.python.daemon.module": "tieringd.spark.worker_daemon",
    # What fails is told by the command itself.
    "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={_QUIET}",
}


def is_submitted(environ: Mapping[str, str]) -> bool:
    """Say whether `spark-submit` has started this program: it gives one output for both of a program's."""
    return _SUBMITTED in environ


def parse_conf(conf: Sequence[str]) -> dict[str, str]:
    """
    Return Spark's properties as they were given.

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
    """Return the properties of the session, the master among them unless `spark-submit` has set it."""
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
    Import in the context what comes with the package's spark extra only.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        yield
    except ImportError as error:
        what = "PySpark" if error.name in {None, "pyspark"} else f"the package {error.name}"
        raise ConfigError(f"this command needs {what}", hint="pip install 'tieringd[spark]'") from error


@contextmanager
def spark_session(*, master: str | None, conf: Mapping[str, str]) -> Iterator[SparkSession]:
    """
    Give a session for the time of the context.

    In a program that has a session already, as a notebook does, it is one beside that, on the same
    SparkContext, and both go on. Else it is built here, and it and its JVM end with the context.

    Raises:
        ConfigError: PySpark or Java is missing, or Spark does not start, or the Spark that is running
            is not the one that *master* and *conf* ask for.
    """
    context = running_context()
    if context is not None:
        yield _beside(context, master=master, conf=conf)
        return
    with optional_parts():
        from pyspark.sql import SparkSession  # noqa: PLC0415 - an optional part

        from tieringd.spark.jobs.progress import spark_may_be_gone  # noqa: PLC0415 - likewise
        from tieringd.spark.jobs.spark_errors import SPARK_ERRORS  # noqa: PLC0415 - likewise
        from tieringd.spark.jobs.tasks import cause_of  # noqa: PLC0415 - likewise
    _require_java(os.environ)
    options = session_options(master=master, conf=conf, environ=os.environ)
    if options.get("spark.master", "").startswith("local"):
        # The workers run what this command runs, whatever `python3` is here.
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
    Keep Py4J's stacks off standard error, where the command says once that the JVM is gone.

    Py4J logs the loss at each call: with its own loggers, and with the root logger where the connection is
    reset before an answer.
    """
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(_is_not_of_py4j)


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    return Path(record.pathname).parent.name != "py4j"


def running_context() -> SparkContext | None:
    """Return the SparkContext that this process has begun; None where there is none, or no PySpark."""
    if "pyspark" not in sys.modules:
        return None
    from pyspark import SparkContext  # noqa: PLC0415 - an optional part

    return SparkContext._active_spark_context  # noqa: SLF001 - PySpark has no other name for it


def _beside(context: SparkContext, *, master: str | None, conf: Mapping[str, str]) -> SparkSession:
    """
    Return a new session of *context* with the properties of *conf* and those that our results depend on.

    Raises:
        ConfigError: *master* is another one, or a property of *conf* cannot be changed any more.
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
            refused.append(f"{name} is {fixed.get(name, 'not set')}, and {value} is asked for")
    if refused:
        raise ConfigError(
            "this program has a Spark session, whose properties cannot be changed any more",
            problems=tuple(refused),
            hint="Leave out --master and such a --conf, or end that session first: spark.stop()",
        )
    return session


def interruptible(work: Callable[[], T]) -> T:
    """
    Return what *work* returns, which uses Spark; Ctrl-C ends the wait for it at once.

    It is done in a thread: where an interrupt reaches a call of the JVM, what comes of it is no answer.
    The JVM ends with this process, and its tasks with it. A Spark that was running before goes on after an
    interrupt: there *work* is done in the calling thread, and PySpark cancels its tasks.
    """
    if running_context() is not None:
        return work()
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - whoever waits for it gets it
            outcome.set_exception(error)

    threading.Thread(target=run, name="tieringd-job", daemon=True).start()
    return outcome.result()


def _require_java(environ: Mapping[str, str]) -> None:
    """
    See that there is a Java to run Spark on.

    Raises:
        ConfigError: There is none.
    """
    home = environ.get("JAVA_HOME")
    found = Path(home, "bin", "java").exists() if home else shutil.which("java", path=environ.get("PATH"))
    if not found and not is_submitted(environ):
        raise ConfigError(
            f"Spark needs Java 17 or newer, and {f'JAVA_HOME={home} has none' if home else 'there is none'}",
            hint="apt-get install openjdk-17-jre-headless, or set JAVA_HOME",
        )
