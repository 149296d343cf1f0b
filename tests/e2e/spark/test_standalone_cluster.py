"""A cluster of Spark with two workers, one of whose executors is killed while a query runs."""

# Long: a master, two workers, two executors and a driver start.

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.fakes.file_archive import FileArchive
from tests.support.class_data import spark_java_options

_ROOT = Path(__file__).parents[3]
_PATIENCE_SECONDS = 600
"""On a slow and busy machine two executors took four minutes until they read."""
_COMMAND = re.compile(r"```\n(spark-submit --master spark://.*?)```", re.DOTALL)

PROGRAM = """
import json, os, sys, time
from pathlib import Path
from pyspark.sql import SparkSession

def noted(rows):
    # The parent of a worker is Spark's daemon for Python, and the daemon's parent is the executor.
    status = Path(f"/proc/{os.getppid()}/stat").read_text()
    executor = int(status.rpartition(")")[2].split()[1])
    place = Path(os.environ['PLACE'])
    (place / f"executor-{executor}").touch()
    while not (place / "killed").exists():
        time.sleep(0.05)
    return rows

spark = SparkSession.builder.getOrCreate()
options = {"subscribe": "orders", "minPartitions": "8"}
orders = spark.read.format("tieringd").options(**options).load(sys.argv[1])
offsets = orders.select("offset").rdd.mapPartitions(noted).map(lambda row: row.offset).collect()
print("OFFSETS", json.dumps(offsets))
"""


@contextmanager
def spark_daemon(role, *arguments, log, environ):
    """Run a daemon of a standalone cluster until the context ends."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [Path(sys.executable).with_name("spark-class"), f"org.apache.spark.deploy.{role}", *arguments],
            stdout=output,
            stderr=output,
            env=environ,
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(_PATIENCE_SECONDS)


def until(found, log):
    """Return the first true result of *found*; *log* says what went wrong if there is none."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not (result := found()):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    return result


@pytest.fixture
def master(tmp_path):
    """Give the URL of a master with two workers of one core each."""
    environ = os.environ | {
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": spark_java_options(),
        "PYTHONPATH": str(_ROOT),
    }
    address = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
    with ExitStack() as running:
        log = tmp_path / "master.log"
        running.enter_context(spark_daemon("master.Master", *address, log=log, environ=environ))
        found = until(lambda: re.search(r"Starting Spark master at (spark://\S+)", log.read_text()), log)
        for number in range(2):
            options = ("--cores", "1", "--memory", "640m", "--work-dir", str(tmp_path / f"work-{number}"))
            running.enter_context(
                spark_daemon(
                    "worker.Worker",
                    *address,
                    *options,
                    found[1],
                    log=tmp_path / f"{number}.log",
                    environ=environ,
                )
            )
        yield found[1]


# Long: a cluster of Spark, and an executor that is missed.
@pytest.mark.timeout(1800)
def test_command_of_the_docs_has_every_record_once_when_an_executor_dies(master, tmp_path):
    """The killed executor's tasks are read again by another one."""
    archive = FileArchive(tmp_path / "archive")
    writer = archive.filled(segments=6, batches=8)
    program, place = tmp_path / "count_orders.py", tmp_path / "place"
    program.write_text(PROGRAM)
    place.mkdir()
    (command,) = _COMMAND.findall((_ROOT / "docs/spark_clusters.md").read_text())
    words = shlex.split(
        command.replace("\\\n", " ")
        .replace("spark://master:7077", master)
        .replace("/opt/tieringd/bin/python", sys.executable)
        .replace("count_orders.py", f"{program} {archive.url}")
    )
    settings = {
        "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": spark_java_options(),
        "spark.driver.host": "127.0.0.1",
        "spark.executorEnv.PLACE": str(place),
        "spark.executorEnv.PYTHONPATH": str(_ROOT),
    }
    limits = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    environ = os.environ | {"SPARK_LOCAL_IP": "127.0.0.1", "PYTHONPATH": str(_ROOT), "PLACE": str(place)}
    log = tmp_path / "driver.log"
    with log.open("wb") as errors:
        driver = subprocess.Popen(
            [Path(sys.executable).with_name(words[0]), *limits, *words[1:]],
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environ,
        )
        try:
            until(lambda: len(list(place.glob("executor-*"))) == 2 or driver.poll() is not None, log)
            assert driver.poll() is None, log.read_text()
            executors = list(place.glob("executor-*"))
            os.kill(int(executors[0].name.removeprefix("executor-")), signal.SIGKILL)
            (place / "killed").touch()
            output, _ = driver.communicate(timeout=_PATIENCE_SECONDS)
        finally:
            if driver.poll() is None:
                driver.terminate()
                driver.wait(_PATIENCE_SECONDS)
    assert driver.returncode == 0, log.read_text()
    (line,) = [one for one in output.decode().splitlines() if one.startswith("OFFSETS")]
    assert sorted(json.loads(line.removeprefix("OFFSETS"))) == sorted(writer.values())
