"""Every property of the systems we implement: it works, or it is not applicable."""

from typing import NamedTuple

import pytest

from tests.unit.config.texts import SMALLEST, parsed, problems_of
from tieringd.config.describe import properties_of
from tieringd.config.model import Config
from tieringd.config.properties import TopicProperties

NO_DEFAULT = "no default of its own"
"""The document gives none, or it is another system's."""
DERIVED = "derived"
"""What it is follows from other properties; the field itself holds nothing."""
MIB, GIB = 2**20, 2**30
DAY_MS = 86_400_000


class Works(NamedTuple):
    default: object
    example: str


class NotApplicable(NamedTuple):
    default: object
    reason: str


RECOVERS = "the broker applies it when a topic is created; use the command `tieringd recover` instead"
ROLLS = "the broker rolls its segments; set it in the broker"
COMPACTS = "the broker compacts its logs; set it in the broker"
REPLICAS = "the broker decides how much of a partition it copies to a new replica; set it in the broker"
GROUPS = "the broker keeps the offsets of consumer groups, which are not tiered; set it in the broker"

CLUSTER = {
    # Object storage access
    "cloud_storage_enabled": Works(False, "false"),
    "cloud_storage_region": Works(None, "eu-central-1"),
    "cloud_storage_bucket": Works(None, "archive"),
    "cloud_storage_credentials_source": Works("config_file", "sts"),
    "cloud_storage_access_key": Works(None, "k"),
    "cloud_storage_secret_key": Works(None, "s"),
    "cloud_storage_api_endpoint": Works(DERIVED, "s3.example.com"),
    "cloud_storage_api_endpoint_port": Works(443, "9000"),
    "cloud_storage_disable_tls": Works(False, "true"),
    "cloud_storage_trust_file": Works(None, "/etc/ca.pem"),
    "cloud_storage_azure_container": Works(None, "archive"),
    "cloud_storage_azure_storage_account": Works(None, "account1"),
    "cloud_storage_azure_shared_key": Works(None, "k"),
    "cloud_storage_azure_managed_identity_id": Works(None, "id"),
    "cloud_storage_azure_adls_endpoint": Works(None, "h.example.com"),
    "cloud_storage_azure_adls_port": Works(None, "443"),
    # Transport and retries
    "cloud_storage_max_connections": Works(20, "10"),
    "cloud_storage_initial_backoff_ms": Works(100, "1s"),
    "cloud_storage_segment_upload_timeout_ms": Works(30_000, "1m"),
    "cloud_storage_manifest_upload_timeout_ms": Works(10_000, "1m"),
    "cloud_storage_max_connection_idle_time_ms": Works(5_000, "1m"),
    # Remote write
    "cloud_storage_enable_remote_write": Works(False, "true"),
    "cloud_storage_enable_remote_read": Works(False, "true"),
    "cloud_storage_segment_max_upload_interval_sec": Works(None, "600"),
    "cloud_storage_reconciliation_interval_ms": Works(10_000, "1s"),
    "cloud_storage_upload_ctrl_update_interval_ms": Works(60_000, "1s"),
    "cloud_storage_upload_ctrl_p_coeff": Works(-2.0, "-1"),
    "cloud_storage_upload_ctrl_d_coeff": Works(0.0, "1"),
    "cloud_storage_upload_ctrl_min_shares": Works(100, "10"),
    "cloud_storage_upload_ctrl_max_shares": Works(1000, "900"),
    # Remote read and cache
    "cloud_storage_cache_directory": Works(DERIVED, "/srv/cache"),
    "cloud_storage_cache_size": Works(0, "100GiB"),
    "cloud_storage_cache_size_percent": Works(20, "12.5"),
    "cloud_storage_cache_max_objects": Works(100_000, "5000"),
    "cloud_storage_cache_num_buckets": Works(0, "64"),
    "cloud_storage_cache_check_interval_ms": Works(30_000, "1s"),
    "cloud_storage_cache_trim_carryover_bytes": Works(0, "256MiB"),
    "cloud_storage_cache_trim_threshold_percent_size": Works(None, "70"),
    "cloud_storage_cache_trim_threshold_percent_objects": Works(None, "70"),
    "cloud_storage_cache_trim_walk_concurrency": Works(1, "4"),
    "cloud_storage_cache_chunk_size": Works(16 * MIB, "8MiB"),
    "cloud_storage_chunk_eviction_strategy": Works("eager", "predictive"),
    "cloud_storage_disable_chunk_reads": Works(False, "true"),
    "cloud_storage_hydrated_chunks_per_segment_ratio": Works(0.7, "0.5"),
    "cloud_storage_min_chunks_per_segment_threshold": Works(5, "8"),
    "cloud_storage_readreplica_manifest_sync_timeout_ms": Works(30_000, "1m"),
    "kafka_enable_describe_log_dirs_remote_storage": Works(True, "false"),
    # Housekeeping of the archive
    "cloud_storage_idle_timeout_ms": Works(10_000, "1m"),
    "cloud_storage_idle_threshold_rps": Works(1, "5"),
    "cloud_storage_housekeeping_interval_ms": Works(300_000, "1m"),
    "cloud_storage_enable_segment_merging": Works(True, "false"),
    "cloud_storage_enable_scrubbing": Works(False, "true"),
    "cloud_storage_partial_scrub_interval_ms": Works(3_600_000, "2h"),
    "cloud_storage_full_scrub_interval_ms": Works(43_200_000, "1d"),
    "cloud_storage_scrubbing_interval_jitter_ms": Works(600_000, "1m"),
    "cloud_storage_segment_size_target": Works(None, "512MiB"),
    "cloud_storage_segment_size_min": Works(None, "64MiB"),
    "cloud_storage_target_manifest_size_bytes": Works(64 * 2**10, "128KiB"),
    # Retention. The seven days hold where there is no broker. A broker has a value for every topic.
    "log_retention_ms": Works(7 * DAY_MS, "2d"),
    "retention_bytes": Works(None, "1TiB"),
    "delete_retention_ms": Works(None, "7d"),
    "log.retention.ms": Works(None, "7d"),
    "log.retention.bytes": Works(None, "1TiB"),
    "log.roll.ms": NotApplicable(NO_DEFAULT, ROLLS),
    "retention_local_target_ms_default": Works(DAY_MS, "2d"),
    "retention_local_target_bytes_default": Works(None, "1GiB"),
    "initial_retention_local_target_bytes_default": NotApplicable(None, REPLICAS),
    "initial_retention_local_target_ms_default": NotApplicable(None, REPLICAS),
    "retention_local_strict": Works(False, "true"),
    "log_segment_ms": NotApplicable(NO_DEFAULT, ROLLS),
    "log_segment_ms_min": NotApplicable(NO_DEFAULT, ROLLS),
    "log_segment_ms_max": NotApplicable(NO_DEFAULT, ROLLS),
    "log_segment_size": NotApplicable(GIB, ROLLS),
    "compacted_log_segment_size": NotApplicable(NO_DEFAULT, COMPACTS),
    "max_compacted_log_segment_size": NotApplicable(NO_DEFAULT, COMPACTS),
    "log_compaction_interval_ms": NotApplicable(NO_DEFAULT, COMPACTS),
    "group_offset_retention_sec": NotApplicable(NO_DEFAULT, GROUPS),
    "group_offset_retention_check_ms": NotApplicable(NO_DEFAULT, GROUPS),
    "legacy_group_offset_retention_enabled": NotApplicable(NO_DEFAULT, GROUPS),
    # Space management and disk alerts
    "space_management_enable": Works(True, "false"),
    "disk_reservation_percent": Works(20, "12.5"),
    "retention_local_target_capacity_bytes": Works(None, "1TiB"),
    "retention_local_target_capacity_percent": Works(None, "60"),
    "retention_local_trim_interval": Works(30_000, "1m"),
    "storage_space_alert_free_threshold_bytes": Works(0, "10GiB"),
    "storage_space_alert_free_threshold_percent": Works(5, "0"),
    "storage_min_free_bytes": Works(5 * GIB, "1GiB"),
    "tune_ballast_file": Works(False, "true"),
    "ballast_file_path": Works(DERIVED, "/srv/ballast"),
    "ballast_file_size": Works(GIB, "2GiB"),
}
TOPIC = {
    "redpanda.remote.write": Works(None, "true"),
    "redpanda.remote.read": Works(None, "true"),
    "redpanda.remote.delete": Works(None, "false"),
    "redpanda.remote.recovery": NotApplicable(None, RECOVERS),
    "retention.ms": Works(None, "7d"),
    "retention.bytes": Works(None, "1TiB"),
    "retention.local.target.ms": Works(None, "1d"),
    "retention.local.target.bytes": Works(None, "1GiB"),
    "local.retention.ms": Works(None, "-2"),
    "local.retention.bytes": Works(None, "-2"),
    "remote.storage.enable": Works(None, "true"),
    "remote.log.retention.minutes": Works(None, "60"),
    "remote.log.retention.bytes": Works(None, "1TiB"),
    "cleanup.policy": Works(None, "delete"),
    "segment.ms": NotApplicable(None, ROLLS),
    "segment.bytes": NotApplicable(GIB, ROLLS),
}


def of(table, kind):
    return [pytest.param(name, one, id=name) for name, one in table.items() if isinstance(one, kind)]


def cluster_line(name, value):
    return f"{name}: {value}\n", f"t.yaml:5: {name}"


def topic_line(name, value):
    return f"topics:\n  orders:\n    {name}: {value}\n", f"t.yaml:7: topics[orders].{name}"


@pytest.mark.parametrize(
    ("name", "one", "line", "model"),
    [(*param.values, cluster_line, Config) for param in of(CLUSTER, Works)]
    + [(*param.values, topic_line, TopicProperties) for param in of(TOPIC, Works)],
)
def test_property_works_under_its_own_name_with_its_own_default(name, one, line, model):
    """The default is the documents', and the file may hold another value."""
    (found,) = (known for known in properties_of(model) if known.name == name)
    assert found.field.default == (None if one.default is DERIVED else one.default)
    text, _ = line(name, one.example)
    config = parsed(SMALLEST + text)
    holder = config.topics["orders"] if model is TopicProperties else config
    assert found.attribute in holder.model_fields_set
    assert config.notes == ()


@pytest.mark.parametrize(
    ("name", "one", "line"),
    [(*param.values, cluster_line) for param in of(CLUSTER, NotApplicable)]
    + [(*param.values, topic_line) for param in of(TOPIC, NotApplicable)],
)
@pytest.mark.parametrize("value", ["1", "null", "anything"])
def test_property_that_is_not_applicable_is_accepted_and_reported(name, one, line, value):
    """The note says why the property is not applicable, with its line. Nothing changes."""
    text, where = line(name, value)
    config = parsed(SMALLEST + text)
    assert config.notes == (f"{where}: not applicable: {one.reason}",)
    assert config.warnings == ()


def test_notes_come_in_the_order_of_the_lines_and_beside_faults():
    """A property that is not applicable never hides a fault, and a fault never becomes a note."""
    text = (
        SMALLEST + "topics: {a: {segment.ms: 1, local.retention.ms: x}}\nlog.roll.ms: 5\nlog_segment_ms: 6\n"
    )
    (problem,) = problems_of(text)
    assert problem.startswith("t.yaml:5: topics[a].local.retention.ms: ")
    found = parsed(text.replace("ms: x", "ms: 5")).notes
    assert [note.split(": ")[:2] for note in found] == [
        ["t.yaml:5", "topics[a].segment.ms"],
        ["t.yaml:6", "log.roll.ms"],
        ["t.yaml:7", "log_segment_ms"],
    ]
