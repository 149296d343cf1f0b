"""The commands of Spark's jobs, without Spark: options, what is missing, progress."""

# Long: commands of Spark in an interpreter that has loaded it.

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import typer
from py4j.java_gateway import GatewayClient, GatewayParameters

from tests.unit.cli.commands import invoked, tieringd
from tieringd.cli.options import OutputFormat
from tieringd.cli.spark import session
from tieringd.cli.spark.options import duration
from tieringd.cli.spark.running import SECONDS_BETWEEN, JobProgress, tell
from tieringd.cli.spark.session import parse_conf, session_options
from tieringd.spark.jobs.report import Report

SUBMITTED = {"PYSPARK_GATEWAY_PORT": "1"}


@pytest.fixture
def config(tmp_path):
    (tmp_path / "bucket").mkdir()
    return write_spark_config(tmp_path)


def write_spark_config(root):
    """Write a configuration with the directory `bucket` of *root* for the bucket."""
    path = root / "tieringd.yaml"
    path.write_text(
        "state_directory: /nowhere\ncloud_storage_backend: file\n"
        f"cloud_storage_file_root: {root / 'bucket'}\n"
    )
    return path


def test_conf_is_key_and_value():
    """A value may hold what it wants."""
    assert parse_conf(["a.b=c=d", "e="]) == {"a.b": "c=d", "e": ""}


@pytest.mark.parametrize("wrong", ["a", "=b", ""])
def test_conf_without_a_value_is_refused(wrong):
    """The error names the value that has no `key=value`."""
    with pytest.raises(typer.BadParameter, match=f"--conf {wrong}: expected key=value"):
        parse_conf([wrong])


@pytest.mark.parametrize(
    ("master", "conf", "environ", "found"),
    [
        pytest.param(None, {}, {}, "local[*]", id="here"),
        pytest.param("yarn", {}, {}, "yarn", id="a cluster"),
        pytest.param(None, {"spark.master": "spark://h:1"}, {}, "spark://h:1", id="a property"),
        pytest.param("local[2]", {"spark.master": "yarn"}, {}, "local[2]", id="the option comes first"),
        pytest.param(None, {}, SUBMITTED, None, id="what spark-submit says"),
        pytest.param("local[1]", {}, SUBMITTED, "local[1]", id="the option comes before spark-submit"),
    ],
)
def test_master_of_the_session(master, conf, environ, found):
    """A local master opens nothing to other hosts. Spark's own settings hold for any other master."""
    options = session_options(master=master, conf=conf, environ=environ)
    assert options.get("spark.master") == found
    assert options["spark.sql.session.timeZone"] == "UTC"
    is_here = found is not None and found.startswith("local")
    assert (options.get("spark.driver.bindAddress") == "127.0.0.1") == is_here
    assert ("spark.ui.enabled" in options) == is_here


def test_properties_come_before_our_own():
    """An operator may want another time zone, or the page."""
    conf = {"spark.ui.enabled": "true", "spark.sql.session.timeZone": "CET"}
    assert conf.items() <= session_options(master=None, conf=conf, environ={}).items()


@pytest.fixture
def silenced_py4j():
    """Silence Py4J until the end of the test."""
    root, own = logging.getLogger(), logging.getLogger("py4j")
    filters, level = list(root.filters), own.level
    session.silence_py4j()
    yield
    root.filters[:] = filters
    own.setLevel(level)


def test_lost_connection_to_the_jvm_is_not_logged(silenced_py4j, caplog):
    """A JVM that is killed resets the connection: Py4J has the root logger print a stack then."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def reset_the_connection():
            jvm, _ = server.accept()
            with jvm:
                jvm.recv(1)
                jvm.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        thread = threading.Thread(target=reset_the_connection)
        thread.start()
        client = GatewayClient(gateway_parameters=GatewayParameters(port=server.getsockname()[1]))
        assert client.send_command("c\n", retry=False) == "x", "Py4J's word for an error"
        thread.join()
        client.close()
    logging.getLogger().warning("of another")
    assert [record.message for record in caplog.records] == ["of another"]


def test_log_settings_are_there():
    """The file that keeps the JVM quiet is part of the package."""
    (path,) = Path(session.__file__).parent.glob("*.properties")
    assert path.as_uri() in session_options(master=None, conf={}, environ={})["spark.driver.extraJavaOptions"]


JOBS = (
    ["scrub"],
    ["usage"],
    ["rebuild"],
    ["compact", "orders"],
    ["compact", "orders", "--dry-run"],
    ["erase", "orders", "--key", "k", "--requested-by", "me"],
    ["erase", "orders", "--key", "k", "--requested-by", "me", "--dry-run"],
    ["merge", "orders", "--no-broker"],
    ["export", "orders", "--target-format", "parquet", "--target", "file:///lake"],
    ["export", "orders", "--target-format", "iceberg"],
)
ONE_BY_ONE = """
import json, sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from tieringd.cli.main import main

found = []
for arguments in json.loads(sys.argv[1]):
    output, errors = StringIO(), StringIO()
    sys.argv = ["tieringd", *arguments]
    with redirect_stdout(output), redirect_stderr(errors):
        try:
            main()
        except SystemExit as end:
            found.append([end.code, output.getvalue(), errors.getvalue()])
print(json.dumps(found))
"""
"""Runs commands in one interpreter, and prints the exit code, the output and the errors of each."""


@pytest.fixture(scope="module")
def without_pyspark(tmp_path_factory):
    """Give the outcome of each job's command in an interpreter without PySpark. One starts in a second."""
    root = tmp_path_factory.mktemp("without-pyspark")
    (root / "missing" / "pyspark").mkdir(parents=True)
    (root / "missing" / "pyspark" / "__init__.py").write_text("raise ImportError('no pyspark')")
    commands = [["spark", *job, "--config", str(write_spark_config(root))] for job in JOBS]
    python_path = f"{root / 'missing'}:{':'.join(sys.path)}"
    done = subprocess.run(
        [sys.executable, "-c", ONE_BY_ONE, json.dumps(commands)],
        env=os.environ | {"PYTHONPATH": python_path},
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


@pytest.mark.parametrize("number", range(len(JOBS)), ids=lambda number: " ".join(JOBS[number]))
def test_command_without_pyspark_says_what_to_install(without_pyspark, number):
    """The command line itself needs none of it."""
    exit_code, output, errors = without_pyspark[number]
    assert (exit_code, output) == (2, "")
    assert "this command needs PySpark" in errors
    assert "pip install 'tieringd[spark]'" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("home", ["", "/nowhere"])
def test_command_without_java_says_so(tmp_path, config, home):
    """The error names Java 17, and JAVA_HOME if it is set."""
    done = tieringd("spark", "usage", "--config", config, PATH=str(tmp_path), JAVA_HOME=home)
    assert (done.exit_code, done.output) == (2, "")
    assert "Spark needs Java 17" in done.errors
    assert ("JAVA_HOME=/nowhere" in done.errors) == bool(home)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["scrub"], "--config"),
        (["usage", "--by", "hour"], "--by"),
        (["usage", "--days", "0"], "--days"),
        (["rebuild", "--wirte"], "--wirte"),
        (["compact"], "TOPICS"),
        (["compact", "orders", "--min-compaction-lag", "soon"], "--min-compaction-lag"),
        (["compact", "orders", "--delete-retention", "10MiB"], "--delete-retention"),
        (["merge", "orders", "--delete-after", "-1"], "--delete-after"),
        (["merge", "orders", "--delete-after", "7"], "7 has no unit"),
        (["compact", "orders", "--delete-retention", "1"], "1 has no unit"),
        (["compact", "orders", "--min-compaction-lag", "1"], "1 has no unit"),
        (["export", "orders", "--target-format", "parquet", "--portion-size", "128"], "128 has no unit"),
        (["erase", "orders", "--key", "k"], "--requested-by"),
        (["erase", "orders", "--requested-by", "me", "--key-encoding", "utf-16"], "--key-encoding"),
        (["export", "orders"], "--target-format"),
        (["export", "orders", "--target-format", "csv"], "--target-format"),
        (["export", "orders", "--target-format", "iceberg", "--portion-size", "1d"], "--portion-size"),
    ],
)
def test_wrong_command_line_exits_2(config, arguments, words):
    """A wrong command line ends the command before it looks for Spark."""
    given = [] if arguments == ["scrub"] else ["--config", config]
    done = invoked("spark", *arguments, *given)
    assert (done.exit_code, done.output) == (2, "")
    assert words in done.errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Give one or more keys with --key, or a file with one key per line with --keys-file"),
        (["--key", "someone", "--key-encoding", "hex"], "a key is not in hex"),
        (["--keys-file", "/nowhere/keys"], "/nowhere/keys"),
    ],
)
def test_erasure_without_keys_that_can_be_read_is_refused(config, arguments, words):
    """The command is refused before it looks for Spark, and the error names no key."""
    done = tieringd("spark", "erase", "orders", "--requested-by", "me", "--config", config, *arguments)
    assert (done.exit_code, done.output) == (2, "")
    assert words in done.errors
    assert "someone" not in done.errors


def test_erasure_without_a_requester_is_refused(config):
    """A dry run is refused too, because the command that follows it is the same."""
    asked = ("--key", "k", "--requested-by", " ", "--dry-run", "--config", config)
    done = tieringd("spark", "erase", "orders", *asked, PATH="/nowhere")
    assert (done.exit_code, done.output) == (2, "")
    assert "--requested-by is empty" in done.errors


@pytest.mark.parametrize("text", ["0", " 0 ", "0s"])
def test_nothing_needs_no_unit(text):
    """A zero needs no unit: it is as long in all of them."""
    assert duration(text) == 0


def test_wrong_prices_exit_2(tmp_path, config):
    """Wrong prices end the command before it looks for Spark."""
    path = tmp_path / "prices.yaml"
    path.write_text("storage_gib_month: much\nwrites_1000: 1\n")
    done = tieringd("spark", "usage", "--config", config, "--prices", path, PATH="/nowhere", JAVA_HOME="")
    assert (done.exit_code, done.output) == (2, "")
    assert "storage_gib_month: expected a number" in done.errors
    assert "Java" not in done.errors


def test_wrong_configuration_of_pyiceberg_exits_2(tmp_path, config):
    """The configuration of pyiceberg is read at its import, and the error does not quote its wrong line."""
    (tmp_path / ".pyiceberg.yaml").write_text("catalog: {shop: {token: hunter2}}\n")
    done = tieringd(
        *("spark", "export", "orders", "--config", config, "--target-format", "iceberg"),
        PYICEBERG_HOME=str(tmp_path),
        PATH="/nowhere",
    )
    assert (done.exit_code, done.output) == (2, "")
    assert "pyiceberg's own configuration cannot be read" in done.errors
    assert "hunter2" not in done.errors


OTHER_FORMAT = [
    ("parquet", "--catalog"),
    ("parquet", "--catalog-property"),
    ("parquet", "--namespace"),
    ("parquet", "--dot-replacement"),
    ("iceberg", "--target"),
    ("iceberg", "--target-config"),
]


@pytest.mark.parametrize(("target_format", "option"), OTHER_FORMAT)
def test_option_of_the_other_format_is_refused(config, target_format, option):
    """The option would have no effect. Its value is not shown, as it may be a secret."""
    done = invoked(
        "spark", "export", "orders", "--config", config, "--target-format", target_format, option, "a=hunter2"
    )
    assert (done.exit_code, done.output) == (2, "")
    assert f"{option} is an option of --target-format" in " ".join(done.errors.replace("│", " ").split())
    assert "hunter2" not in done.errors


def test_catalogue_property_without_a_value_is_refused(config):
    """The error names the property by its number: its text may be a secret."""
    arguments = ["--target-format", "iceberg", "--catalog-property", "a=b", "--catalog-property", "hunter2"]
    done = invoked("spark", "export", "orders", "--config", config, *arguments)
    assert (done.exit_code, done.output) == (2, "")
    assert "value 2 is not key=value" in done.errors
    assert "hunter2" not in done.errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Give --target"),
        (["--target", "file:///lake", "--portion-size", "0"], "portion_bytes: must be at least 1"),
        (["--target", "file:///lake", "--target-config", "/nowhere/lake.yaml"], "/nowhere/lake.yaml"),
        (["--target", "ftp://lake"], "ftp://lake is not a place for Parquet files"),
    ],
)
def test_parquet_export_that_cannot_be_is_refused(config, arguments, words):
    """An impossible export is refused before Spark is started."""
    done = tieringd(
        "spark", "export", "orders", "--config", config, "--target-format", "parquet", *arguments, PATH=""
    )
    assert (done.exit_code, done.output) == (2, "")
    assert words in done.errors


def test_wrong_conf_exits_2(config):
    """Spark is not started for it."""
    done = tieringd("spark", "scrub", "--config", config, "--conf", "key", PATH="/nowhere")
    assert (done.exit_code, done.output) == (2, "")
    assert "expected key=value" in done.errors


@pytest.mark.parametrize("place", ["missing/report.json", "bucket"])
def test_report_that_cannot_be_written_exits_2(tmp_path, config, place):
    """A report that cannot be written ends the command before the job, and not after it."""
    done = tieringd(
        "spark", "scrub", "--config", config, "--report", tmp_path / place, PATH="/nowhere", JAVA_HOME=""
    )
    assert (done.exit_code, done.output) == (2, "")
    assert "the file cannot be written" in done.errors


def test_report_is_written_where_standard_output_has_no_reader(tmp_path, monkeypatch):
    """The result of hours is in the file all the same."""
    path = tmp_path / "report.json"
    reading, writing = os.pipe()
    os.close(reading)
    with suppress(BrokenPipeError), os.fdopen(writing, "w") as gone:
        # The report goes to the standard output of the process; this one has no reader any more.
        monkeypatch.setattr(sys, "stdout", gone)
        with pytest.raises(BrokenPipeError):
            tell(Report("scrub", {"faults": 0}), output=OutputFormat.TEXT, path=path)
        monkeypatch.undo()
    assert json.loads(path.read_text())["figures"] == {"faults": 0}


def test_submit_file_is_the_commands_of_this_group():
    """The file takes the arguments that would follow `tieringd spark`."""
    path = Path(invoked("spark", "submit-file").output.strip())
    assert path.is_file()
    command = [sys.executable, path, "usage", "--help"]
    found = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    assert found.returncode == 0, found.stderr
    assert "Count bytes, objects and requests" in " ".join(found.stdout.split())


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_progress_in_a_terminal_is_one_line(capsys):
    """The line is written over, and left when the next step begins."""
    clock = Clock()
    progress = JobProgress(is_terminal=True, clock=clock)
    progress("scrub", 0, 10)
    clock.now = 30
    progress("scrub", 5, 10)
    progress("usage", 1, 1)
    progress.end()
    progress.end()
    assert capsys.readouterr().err == (
        "\rscrub: 0 of 10 tasks (0%)"
        "\rscrub: 5 of 10 tasks (50%), about 30 s left"
        "\n\rusage: 1 of 1 tasks (100%)\n"
    )


def test_shorter_line_covers_the_longer_one_before(capsys):
    """Nothing of it is left to be seen."""
    clock = Clock()
    progress = JobProgress(is_terminal=True, clock=clock)
    clock.now = 9
    progress("scrub", 9, 10)
    progress("scrub", 10, 10)
    first, second = capsys.readouterr().err.split("\r")[1:]
    assert len(second) == len(first)


def test_progress_is_silent_where_it_would_stand_in_the_report(capsys):
    """Progress is silent if standard error would mix with the report, however long the job takes."""
    clock = Clock()
    progress = JobProgress(is_terminal=False, is_quiet=True, clock=clock)
    clock.now = 10 * SECONDS_BETWEEN
    progress("scrub", 5, 10)
    progress.end()
    assert capsys.readouterr().err == ""


def test_progress_elsewhere_is_sparse(capsys):
    """A line now and then, and none for a job that is over at once."""
    clock = Clock()
    progress = JobProgress(is_terminal=False, clock=clock)
    for done in range(11):
        progress("scrub", done, 10)
        clock.now += SECONDS_BETWEEN / 4
    progress.end()
    assert capsys.readouterr().err.splitlines() == [
        "scrub: 4 of 10 tasks (40%), about 15 s left",
        "scrub: 8 of 10 tasks (80%), about 5 s left",
    ]
