"""Commands in a program that has a Spark session already: they use it, and leave it as it is."""

from __future__ import annotations

import json
import threading

import pytest

from tests.e2e.log_files import write_partition
from tests.e2e.spark.keyed_topics import archive_once
from tests.support.command_here import run_here
from tests.support.daemon import directory_config, write_config
from tieringd.cli.spark.session import interruptible, spark_session


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """Give the configuration of a small archive in a directory."""
    directory = tmp_path_factory.mktemp("archive")
    write_partition(directory / "logs", "orders-0", segments=3)
    (directory / "bucket").mkdir()
    properties = directory_config([directory / "logs"], directory / "bucket", directory / "state")
    path = write_config(directory / "tieringd.yaml", properties)
    archive_once(path)
    return path


def test_session_goes_on_as_it_was(spark, archive):
    """The command runs on the context that is there, and the session keeps its own properties."""
    context = spark.sparkContext
    spark.conf.set("spark.sql.session.timeZone", "CET")
    try:
        options = ("--master", context.master, "--conf", "spark.sql.session.timeZone=EST", "--format", "json")
        done = run_here("spark", "usage", "--config", str(archive), *options)
        assert spark.conf.get("spark.sql.session.timeZone") == "CET"
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")

    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(done.stdout)["figures"]["segments"] == 3
    assert spark.sparkContext is context
    assert spark.range(3).count() == 3


def test_properties_of_a_command_are_its_own(spark):
    """
    Properties that may change hold in the command's session.

    Times are in UTC unless it asks for others.
    """
    spark.conf.set("spark.sql.session.timeZone", "CET")
    try:
        with spark_session(master=None, conf={"spark.sql.shuffle.partitions": "3"}) as session:
            assert session.sparkContext is spark.sparkContext
            assert session.conf.get("spark.sql.shuffle.partitions") == "3"
            assert session.conf.get("spark.sql.session.timeZone") == "UTC"
        assert spark.conf.get("spark.sql.shuffle.partitions") != "3"
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--master", "local[9]"), "spark.master is local[2], but local[9] is requested"),
        (("--conf", "spark.driver.memory=7g"), "spark.driver.memory is 1g, but 7g is requested"),
        (("--conf", "spark.task.maxFailures=9"), "spark.task.maxFailures is not set, but 9 is requested"),
    ],
    ids=["master", "changed", "unset"],
)
def test_another_spark_than_the_running_one_is_refused(spark, archive, options, told):
    """The running Spark is not what was asked for, and the error says what differs and what to do."""
    done = run_here("spark", "usage", "--config", str(archive), *options)
    assert (done.returncode, done.stdout) == (2, b"")
    assert told in done.stderr.decode()
    assert "spark.stop()" in done.stderr.decode()
    assert spark.range(3).count() == 3


def test_job_is_done_in_the_calling_thread(spark):
    """An interrupt ends the job with the call, as it does without the command; no thread goes on with it."""
    assert interruptible(threading.get_ident) == threading.get_ident()
