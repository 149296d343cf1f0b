"""`tieringd space plan`: printed and not carried out."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.fakes.log_writer import LogWriter
from tests.unit.cli.commands import invoked, tieringd
from tieringd.space.space_manager import NOT_TIERED


@pytest.fixture
def host(tmp_path):
    """A log directory of two topics, archived once, and a disk that leaves the logs one byte."""
    logs = tmp_path / "logs"
    logs.mkdir()
    writer, other = LogWriter(logs, "orders", 0), LogWriter(logs, "scratch", 0)
    for _ in range(3):
        writer.closed_segment()
    other.closed_segment()
    document = {
        "broker": {"kind": "none", "log_dirs": [str(logs)]},
        "state_directory": str(tmp_path / "state"),
        "cloud_storage_enabled": True,
        "cloud_storage_backend": "file",
        "cloud_storage_file_root": str(tmp_path / "archive"),
        "retention_local_target_capacity_bytes": 1,
        # Else all of it is past the local target, and goes in the first phase.
        "retention_local_target_ms_default": None,
        "log_retention_ms": -1,
        "topics": {"orders": {"remote.storage.enable": True}},
    }
    path = tmp_path / "tieringd.yaml"
    path.write_text(yaml.safe_dump(document))
    done = tieringd("run", "--once", "--config", path)
    assert done.exit_code == 0, done.errors
    return path, writer


def test_plan_names_phase_partition_and_offset_and_does_nothing(host):
    """The plan goes down to two segments first, and then to the active one. All files stay."""
    path, writer = host
    before = writer.bases_on_disk
    (space,) = invoked("space", "plan", "--config", path, "--format", "json").json()
    removals = {phase["phase"]: phase["removals"] for phase in space["phases"]}
    assert [one["before_offset"] for one in removals[3]] == [writer.bases[2]]
    assert [one["before_offset"] for one in removals[5]] == [writer.bases[-1]]
    assert removals[1] == removals[2] == removals[4] == []
    assert space["log_area_bytes"] == 1
    assert writer.bases_on_disk == before


def test_plan_says_why_the_rest_stays(host):
    """A topic that is not tiered is named, with the reason."""
    path, _ = host
    done = invoked("space", "plan", "--config", path)
    assert done.exit_code == 0, done.errors
    (line,) = [line for line in done.output.splitlines() if line.startswith("scratch")]
    assert NOT_TIERED in line
    assert "phase 3: topics on default local settings" in done.output


def test_sizes_of_the_plan_are_short(host):
    """Four digits and a unit: a disk is not told in bytes, nor in KiB."""
    path, _ = host
    first = invoked("space", "plan", "--config", path).output.splitlines()[0]
    assert re.search(r"the logs use [\d.]+k?B of their area of 1B, on a disk of [\d.]{1,5}[GTP]B$", first)


def test_plan_names_the_log_directory_that_cannot_be_measured(host):
    """A plan that leaves a disk out would not be one; the error says which directory is not there."""
    path, _ = host
    document = yaml.safe_load(path.read_text())
    gone = str(path.parent / "gone")
    document["broker"]["log_dirs"].append(gone)
    path.write_text(yaml.safe_dump(document))
    done = tieringd("space", "plan", "--config", path)
    assert done.exit_code == 1
    assert done.errors.endswith(f"error: the use of {gone} cannot be measured: No such file or directory\n")
