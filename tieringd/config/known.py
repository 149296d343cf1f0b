"""
Names of tiered storage that a later release brings, so that a typing error can be told from them.

A name leaves this page when its property takes effect; a property that is accepted and does
nothing would be worse than one that is refused.
"""

from __future__ import annotations

LATER_PROPERTIES: frozenset[str] = frozenset(
    [
        "cloud_storage_azure_adls_endpoint",
        "cloud_storage_azure_adls_port",
        "cloud_storage_azure_container",
        "cloud_storage_azure_managed_identity_id",
        "cloud_storage_azure_shared_key",
        "cloud_storage_azure_storage_account",
        "cloud_storage_cache_check_interval_ms",
        "cloud_storage_cache_chunk_size",
        "cloud_storage_cache_directory",
        "cloud_storage_cache_max_objects",
        "cloud_storage_cache_num_buckets",
        "cloud_storage_cache_size",
        "cloud_storage_cache_size_percent",
        "cloud_storage_cache_trim_carryover_bytes",
        "cloud_storage_cache_trim_threshold_percent_objects",
        "cloud_storage_cache_trim_threshold_percent_size",
        "cloud_storage_cache_trim_walk_concurrency",
        "cloud_storage_chunk_eviction_strategy",
        "cloud_storage_disable_chunk_reads",
        "cloud_storage_hydrated_chunks_per_segment_ratio",
        "cloud_storage_min_chunks_per_segment_threshold",
        "cloud_storage_enable_segment_merging",
        "cloud_storage_housekeeping_interval_ms",
        "cloud_storage_idle_threshold_rps",
        "cloud_storage_idle_timeout_ms",
        "cloud_storage_segment_size_min",
        "cloud_storage_segment_size_target",
        "cloud_storage_target_manifest_size_bytes",
        "kafka_enable_describe_log_dirs_remote_storage",
        "compacted_log_segment_size",
        "delete_retention_ms",
        "group_offset_retention_check_ms",
        "group_offset_retention_sec",
        "initial_retention_local_target_bytes_default",
        "initial_retention_local_target_ms_default",
        "legacy_group_offset_retention_enabled",
        "log.retention.bytes",
        "log.retention.ms",
        "log.roll.ms",
        "log_compaction_interval_ms",
        "log_retention_ms",
        "log_segment_ms",
        "log_segment_ms_max",
        "log_segment_ms_min",
        "log_segment_size",
        "max_compacted_log_segment_size",
        "retention_bytes",
        "retention_local_strict",
        "ballast_file_path",
        "ballast_file_size",
        "disk_reservation_percent",
        "retention_local_target_capacity_bytes",
        "retention_local_target_capacity_percent",
        "retention_local_trim_interval",
        "space_management_enable",
        "storage_min_free_bytes",
        "storage_space_alert_free_threshold_bytes",
        "storage_space_alert_free_threshold_percent",
        "tune_ballast_file",
    ]
)
"""Cluster properties, written at the top level."""

LATER_TOPIC_PROPERTIES: frozenset[str] = frozenset(
    [
        "cleanup.policy",
        "redpanda.remote.delete",
        "redpanda.remote.recovery",
        "remote.log.retention.bytes",
        "remote.log.retention.minutes",
        "retention.bytes",
        "retention.ms",
        "segment.bytes",
        "segment.ms",
    ]
)
"""Topic properties, written under `topics`."""
