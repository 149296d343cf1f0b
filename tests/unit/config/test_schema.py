"""The JSON schema: what it accepts the daemon accepts, and what it refuses the daemon refuses."""

import json
from pathlib import Path

import pytest
import yaml

from tests.unit.config.json_schema_check import faults
from tests.unit.config.texts import EXAMPLES, ON, SMALLEST, parsed, problems_of
from tieringd.config.describe import properties_of
from tieringd.config.naming import SECTIONS
from tieringd.config.reference import json_schema

SAMPLES = sorted((Path(__file__).parents[3] / "config").glob("*.yaml"))


def faults_of(text):
    # Through JSON, as an editor has it: what is no JSON would fail here.
    return faults(json.loads(json.dumps(json_schema())), yaml.safe_load(text))


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_sample_fits_the_schema(path):
    """An editor shows a sample without a mark."""
    assert faults_of(path.read_text()) == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_of_each_cloud_fits_the_schema(name):
    """All of them, with the secret from the environment."""
    assert faults_of(ON + EXAMPLES[name]) == []


@pytest.mark.parametrize(
    "line",
    [
        "shutdown_timeout_ms: 5",
        "shutdown_timeout_ms: 1h",
        "shutdown_timeout_ms: '30'",
        "shutdown_timeout_ms: 10m30s",
        "shutdown_timeout_ms: 1.5 m",
        "shutdown_timeout_ms: ${A}",
        "cloud_storage_segment_max_upload_interval_sec: null",
        "cloud_storage_segment_max_upload_interval_sec: 10m",
        "pin_max_bytes: 1.5GiB",
        "pin_max_bytes: 10 MB",
        "retention_local_target_bytes_default: -1",
        "retention_local_target_bytes_default: null",
        "cloud_storage_max_connections: ${N}",
        "cloud_storage_disable_tls: ${FLAG}",
        "cloud_storage_upload_ctrl_p_coeff: -1",
        "cloud_storage_upload_ctrl_p_coeff: -1.5",
        "cloud_storage_api_endpoint: '[::1]'",
        "cloud_storage_prefix: ''",
        "cloud_storage_prefix: a/b.c",
        "cloud_storage_azure_container: $root",
        "cloud_storage_secret_key: anything",
        "log_retention_ms: -1",
        "log_retention_ms: 7d",
        "log.retention.bytes: 1TiB",
        "log:",
        "topics:",
        "topics: {orders: }",
        "topics: {'*': {local.retention.ms: -2, redpanda.remote.write: true}}",
        "admin: {port: 0}",
        "log_segment_size: 1GiB",
        "topics: {a: {segment.bytes: 5}}",
        "log.roll.ms: null",
    ],
)
def test_schema_accepts_what_the_daemon_accepts(line):
    """All the ways to write a value."""
    text = SMALLEST + line + "\n"
    assert parsed(text, A="30s", N="10", FLAG="true")
    assert faults_of(text) == []


@pytest.mark.parametrize(
    "line",
    [
        "shutdown_timeout_ms: 0",
        "shutdown_timeout_ms: 7200000",
        "shutdown_timeout_ms: 10MiB",
        "shutdown_timeout_ms: soon",
        "shutdown_timeout_ms: null",
        "shutdown_timeout_ms: true",
        "shutdown_timeout_ms: 1.5",
        "cloud_storage_segment_max_upload_interval_sec: 500ms",
        "pin_max_bytes: 1GiB5MiB",
        "pin_max_bytes: 1h",
        "pin_max_bytes: -1",
        "retention_local_target_bytes_default: -2",
        "cloud_storage_max_connections: 1025",
        "cloud_storage_max_connections: '20'",
        "cloud_storage_max_connections: true",
        "cloud_storage_disable_tls: 'true'",
        "cloud_storage_upload_ctrl_p_coeff: 1",
        "cloud_storage_api_endpoint: https://h",
        "cloud_storage_api_endpoint: null",
        "cloud_storage_access_key: ''",
        "cloud_storage_secret_key: ''",
        "cloud_storage_secret_key: null",
        "cloud_storage_prefix: /a",
        "cloud_storage_prefix: a/../b",
        "cloud_storage_backend: s3",
        "cloud_storage_backend: null",
        "cloud_storage_file_root: archive",
        "log: {level: loud}",
        "topics: {'a b': {}}",
        "topics: {a: {local.retention.ms: -3}}",
        "topics: {a: {nonsense: 1}}",
        "topics: {a: {retention.ms: 0}}",
        "topics: {a: {cleanup.policy: none}}",
        "topics: [a]",
        "admin: 9640",
        "nonsense: 1",
        "broker2: {}",
        "cloud_storage_idle_threshold_rps: -1",
    ],
)
def test_schema_refuses_what_the_daemon_refuses(line):
    """An editor marks it before the daemon would."""
    text = SMALLEST + line + "\n"
    assert problems_of(text)
    assert faults_of(text)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("state_directory: /srv/state\n", ""),
        ("  kind: none\n", ""),
        ("[/srv/logs]", "[]"),
        ("[/srv/logs]", "/srv/logs"),
        ("[/srv/logs]", "[logs]"),
        ("broker:", "broker: null\nbrokers:"),
    ],
)
def test_schema_knows_what_is_required(old, new):
    """A file needs a broker section and a state directory."""
    assert faults_of(SMALLEST) == []
    assert problems_of(SMALLEST.replace(old, new))
    assert faults_of(SMALLEST.replace(old, new))


def test_schema_describes_every_property():
    """An editor shows the meaning where the pointer is."""
    schema = json_schema()
    topics = schema["properties"]["topics"]["additionalProperties"]
    for place, model in SECTIONS.items():
        section = topics if place[:1] == ("topics",) else schema
        for step in place if section is schema else ():
            section = section["properties"][step]
        for one in properties_of(model):
            assert section["properties"][one.name]["description"] == one.meaning
