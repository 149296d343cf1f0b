"""`tieringd config`: what is in effect, the schema and the reference page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.unit.cli.commands import invoked, tieringd
from tieringd.config.reference import json_schema, render
from tieringd.errors import ConfigError

TEXT = """\
broker:
  kind: kafka
  log_dirs: [/srv/logs]
  bootstrap: ['localhost:9092']
state_directory: /srv/state
cloud_storage_enabled: true
cloud_storage_api_endpoint: storage.googleapis.com
cloud_storage_region: us-west1
cloud_storage_bucket: archive
cloud_storage_access_key: k
cloud_storage_secret_key: ${TIERINGD_TEST_SECRET}
log_segment_size: 1GiB
log_retention_ms: -1
topics:
  orders: {local.retention.ms: 6h}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "t.yaml"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize("command", ["check", "show"])
def test_file_of_an_archive_only_endpoint_needs_no_broker(file, command):
    """A file without a broker is sound for an endpoint alone, and its other faults are named all the same."""
    file.write_text("state_directory: /srv/state\ngateway: {port: 9092}\n")
    with pytest.raises(ConfigError):
        invoked("config", command, file)
    assert invoked("config", command, file, "--archive-only").exit_code == 0
    file.write_text("state_directory: /srv/state\ngateway: {port: 99999}\n")
    done = tieringd("config", command, file, "--archive-only")
    assert done.exit_code == 2
    assert "2: gateway.port: must be from 0 to 65535" in done.errors
    assert "broker" not in done.errors


def test_show_prints_each_value_with_its_origin(file):
    """No line is wider than a screen; remarks go to standard error, and a secret goes nowhere."""
    done = tieringd("config", "show", file, TIERINGD_TEST_SECRET="hunter2")
    assert done.exit_code == 0
    assert max(map(len, done.output.splitlines())) < 80
    whole = re.sub(r"\n +", "  ", done.output)
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in whole.splitlines()}
    assert lines["cloud_storage_backend"].split("  ")[0] == "google"
    assert lines["cloud_storage_backend"].endswith("inferred from cloud_storage_api_endpoint")
    assert lines["cloud_storage_bucket"].split() == ["archive", "line", "9"]
    assert lines["cloud_storage_secret_key"].split("  ")[0] == "(secret)"
    assert lines["cloud_storage_secret_key"].endswith("line 11, from ${TIERINGD_TEST_SECRET}")
    assert lines["cloud_storage_max_connections"].split() == ["20", "default"]
    assert lines["topics[orders].local.retention.ms"].split() == ["6h", "line", "15"]
    warning, note = done.errors.splitlines()
    assert warning.startswith(f"warning: {file}:13: log_retention_ms: keeps records without limit")
    assert (
        note
        == f"note: {file}:12: log_segment_size: not applicable: the broker rolls its segments; set it in "
        "the broker"
    )
    assert "hunter2" not in done.output + done.errors


def test_show_prints_json(file):
    """A program gets numbers, lines and variables."""
    done = tieringd("config", "show", file, "--format", "json", TIERINGD_TEST_SECRET="hunter2")
    found = done.json()
    assert found["cloud_storage_backend"] == {
        "value": "google",
        "origin": "inferred",
        "inferred_from": ["cloud_storage_api_endpoint"],
    }
    assert found["cloud_storage_secret_key"] == {
        "value": "(secret)",
        "origin": "environment",
        "line": 11,
        "variables": ["TIERINGD_TEST_SECRET"],
    }
    assert found["topics[orders].local.retention.ms"] == {"value": 21_600_000, "origin": "file", "line": 15}
    assert found["broker.log_dirs"] == {"value": ["/srv/logs"], "origin": "file", "line": 3}
    assert found["pin_segments"] == {"value": True, "origin": "default"}
    assert "hunter2" not in done.output + done.errors


def test_show_reports_faults_as_check_does(tmp_path):
    """A file with faults has no effect to show."""
    path = tmp_path / "t.yaml"
    path.write_text(TEXT.replace("archive", "s3://archive"))
    with pytest.raises(ConfigError) as caught:
        invoked("config", "show", path)
    assert len(caught.value.problems) == 2


def test_check_prints_notes_and_is_ok(file):
    """A property that is not applicable is no fault, and is not silent."""
    done = tieringd("config", "check", file, TIERINGD_TEST_SECRET="hunter2")
    assert (done.exit_code, done.output) == (0, f"{file}: ok\n")
    assert [line.split(":")[0] for line in done.errors.splitlines()] == ["warning", "note"]


def test_schema_is_printed_as_json():
    """The schema is printed without a configuration file."""
    done = invoked("config", "schema")
    assert json.loads(done.output) == json_schema()


def test_docs_are_the_reference_page():
    """The printed page is docs/configuration.md, to the byte."""
    done = invoked("config", "docs")
    page = (Path(__file__).parents[3] / "docs/configuration.md").read_text()
    assert done.output == render() == page
