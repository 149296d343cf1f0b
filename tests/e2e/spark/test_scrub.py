"""Scrub on real executors: what a broker wrote is sound, and of what is damaged nothing is missed."""

# Long: jobs of Spark read every object of archives.

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.archives import FileObjects, archived_manifest, segment_keys
from tests.e2e.log_files import write_partition
from tests.e2e.sample_topics import SAMPLE_TOPICS
from tests.support.command_here import run_here
from tests.support.daemon import command, directory_config, run_command, run_json, write_config
from tieringd.config import load_config
from tieringd.formats.object_keys import manifest_key
from tieringd.spark.jobs.scrub import scrub
from tieringd.spark.jobs.tasks import TaskFailed

SEGMENTS = 8
JVM_TIMEOUT_SECONDS = 300


def loaded(path):
    return load_config(path, environ=os.environ, needs_broker=False)


@pytest.fixture
def archive(tmp_path):
    """Give the configuration of a small archive in a directory."""
    for number in range(2):
        write_partition(tmp_path / "logs", f"orders-{number}", segments=SEGMENTS)
    (tmp_path / "archive").mkdir()
    properties = directory_config([tmp_path / "logs"], tmp_path / "archive", tmp_path / "state")
    path = write_config(tmp_path / "tieringd.yaml", properties)
    done = run_command("run", "--once", "--config", str(path))
    assert done.returncode == 0, done.stderr.decode()
    return path


def test_what_a_broker_wrote_is_sound(spark, samples, sample_objects):
    """Every codec, transactions and append times: as much as the daemon's own deep scrub counts."""
    told = []
    report = scrub(spark, loaded(samples.config), progress=lambda *one: told.append(one))
    document = json.loads(report.as_json())
    verified = run_json("archive", "verify", "--deep", "--config", str(samples.config))["partitions"]

    assert report.faults == ()
    assert document["tables"]["orphans"] == []
    assert {row["topic"]: (row["size_bytes"], row["records"]) for row in document["tables"]["topics"]} == {
        row["topic"]: (row["size_bytes"], row["records"]) for row in verified
    }
    assert {row["topic"] for row in verified} == set(SAMPLE_TOPICS)
    keys = sample_objects.keys()
    listed = [key for key in keys if not key.startswith(("meta/", "owners/"))]
    assert document["figures"]["listed_objects"] == document["figures"]["objects"] == len(listed)
    assert told[-1][1] == told[-1][2] > 0


def test_every_planted_fault_is_found_and_no_other(spark, archive):
    """Removed, cut, flipped and swapped: each object is named once; what is mended is not named any more."""
    root = archive.parent / "archive"
    objects, config = FileObjects(root), loaded(archive)
    assert scrub(spark, config).faults == ()
    sound = {key: objects.read(key) for key in objects.keys()}  # noqa: SIM118 a method
    keys = segment_keys(archived_manifest(objects, "orders"))
    others = segment_keys(archived_manifest(objects, "orders", 1))
    (root / keys[0]).unlink()
    (root / keys[1]).write_bytes(sound[keys[1]][:-1])
    (root / keys[2]).write_bytes(sound[keys[2]] + b"\0")
    for key, at in ((keys[3], 70), (keys[4], len(sound[keys[4]]) - 1), (f"{keys[5]}.index", 40)):
        data = bytearray(sound[key])
        data[at] ^= 1
        (root / key).write_bytes(bytes(data))
    (root / keys[6]).write_bytes(sound[keys[7]])
    (root / keys[7]).write_bytes(sound[keys[6]])
    (root / f"{others[0]}.index").write_bytes(sound[f"{others[1]}.index"])
    (root / f"{others[2]}.index").unlink()
    planted = {*keys[:5], f"{keys[5]}.index", *keys[6:8], f"{others[0]}.index", f"{others[2]}.index"}

    report = scrub(spark, config)

    found = json.loads(report.as_json())["tables"]["findings"]
    assert {row["key"] for row in found} == planted
    assert len(found) == len(report.faults) == len(planted)
    kinds = {row["key"]: row["kind"] for row in found}
    assert (kinds[keys[0]], kinds[keys[1]], kinds[keys[2]]) == ("data_missing", "data_size", "data_size")

    for key in planted:
        (root / key).write_bytes(sound[key])
    assert scrub(spark, config).faults == ()


@pytest.mark.leaves_damage("the damaged manifest stays")
def test_damaged_manifest_is_found(spark, archive):
    """A damaged manifest is found and named, whatever else it hides."""
    manifest = archived_manifest(FileObjects(archive.parent / "archive"), "orders", 1)
    path = archive.parent / "archive" / manifest_key(manifest.partition)
    path.write_bytes(path.read_bytes()[:-1])
    (fault,) = scrub(spark, loaded(archive)).faults
    assert manifest_key(manifest.partition) in fault


def test_failure_of_a_task_is_told_in_a_line(spark, archive):
    """An executor that cannot open the bucket says why, once, and without a stack of Java's."""
    config = loaded(archive)

    def progress(*_):
        """Say nothing."""

    moved = archive.parent / "moved"
    real = archive.parent / "archive"
    survey_done = []

    class Moving:
        """The driver's part is done with the archive in place, and the executors find none."""

        def __init__(self, context):
            self._context = context

        def __getattr__(self, name):
            if name == "parallelize" and not survey_done:
                survey_done.append(True)
                real.rename(moved)
            return getattr(self._context, name)

    class Session:
        sparkContext = Moving(spark.sparkContext)  # noqa: N815 - Spark's name for it

    with pytest.raises(TaskFailed) as failed:
        scrub(Session(), config, progress=progress)
    assert str(failed.value).startswith(f"a task failed: {real} is not a directory")
    assert "\n" not in str(failed.value)


@pytest.mark.leaves_damage("an object is removed to be told")
def test_command_prints_a_report_and_exits_by_it(spark, archive, tmp_path):
    """0 without faults, as a process of its own; 1 with one; the report is a file as well."""
    options = ("--config", str(archive), "--master", "local[2]", "--conf", "spark.driver.memory=1g")
    document = json.loads(_ran("spark", "scrub", *options, "--format", "json"))
    assert document["figures"]["segments"] == 2 * SEGMENTS

    root = archive.parent / "archive"
    gone = segment_keys(archived_manifest(FileObjects(root), "orders"))[0]
    (root / gone).unlink()
    written = tmp_path / "report.json"
    done = run_here("spark", "scrub", "--config", str(archive), "--topic", "ord*", "--report", str(written))
    text = done.stdout.decode()
    assert done.returncode == 1, done.stderr.decode()
    assert f"fault: data_missing: the object is missing (in {gone}" in text
    assert [row["key"] for row in json.loads(written.read_text())["tables"]["findings"]] == [gone]


def test_spark_submit_runs_the_same_commands(archive, tmp_path):
    """
    `spark-submit` runs the command with its own master and ends with its exit code.

    Spark may print beside the report.
    """
    file = run_command("spark", "submit-file").stdout.decode().strip()
    submit = str(Path(sys.executable).with_name("spark-submit"))
    options = ["--master", "local[2]", "--conf", "spark.driver.host=127.0.0.1", "--driver-memory", "1g"]
    conf = ["--conf", "spark.driver.bindAddress=127.0.0.1", "--conf", "spark.ui.enabled=false"]
    environ = os.environ | {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    report = tmp_path / "report.json"
    job = ["scrub", "--config", str(archive), "--format", "json", "--report", str(report)]
    done = subprocess.run(
        [submit, *options, *conf, file, *job],
        check=False,
        capture_output=True,
        timeout=JVM_TIMEOUT_SECONDS,
        env=environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(report.read_text())["figures"]["segments"] == 2 * SEGMENTS
    assert done.stdout.decode().endswith(report.read_text())
    assert "tasks (" not in done.stdout.decode()


def test_interrupt_ends_the_command_and_its_jvm(archive):
    """Ctrl-C reaches the whole process group, as a terminal sends it; nothing is left running."""
    with subprocess.Popen(
        command("spark", "scrub", "--config", str(archive), "--master", "local[2]"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        # The tests may run in a process that ignores interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    ) as process:
        try:
            _wait_for_jvm(process)
            os.killpg(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=JVM_TIMEOUT_SECONDS)
            assert process.returncode != 0
            assert b"Traceback" not in errors, errors.decode()
            deadline = time.monotonic() + JVM_TIMEOUT_SECONDS
            while _group(process.pid) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert _group(process.pid) == []
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _ran(*arguments: str) -> str:
    done = subprocess.run(command(*arguments), check=False, capture_output=True, timeout=JVM_TIMEOUT_SECONDS)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def _wait_for_jvm(process) -> None:
    """Return when the command has started its Java."""
    deadline = time.monotonic() + JVM_TIMEOUT_SECONDS
    # Until its own program runs, the second process is Python's, which says that it was interrupted.
    while "java" not in _names(process.pid):
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _names(group: int) -> set[str]:
    """Return the names of the programs of a process group."""
    found = set()
    for pid in _group(group):
        with suppress(OSError):
            found.add(Path(f"/proc/{pid}/comm").read_text().strip())
    return found


def _group(group: int) -> list[int]:
    """Return the living processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(int(entry.name))
    return found
