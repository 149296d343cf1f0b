"""
Names of tiered storage that are no properties of ours: only the broker can act on them.

They are accepted, so that a cluster's properties can be kept in one place, and reported with the reason.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_ROLLING = "the broker rolls its segments; set it there"
_COMPACTION = "the broker compacts its logs; set it there"
_REPLICAS = "the broker decides how much of a partition it copies to a new replica; set it there"
_RECOVERY = "it acts when a topic is created, and here a command does that: `tieringd recover`"
_GROUPS = "the broker keeps the offsets of consumer groups, and they are not tiered; set it there"

NOT_APPLICABLE: Mapping[str, str] = MappingProxyType(
    {
        "compacted_log_segment_size": _COMPACTION,
        "group_offset_retention_check_ms": _GROUPS,
        "group_offset_retention_sec": _GROUPS,
        "initial_retention_local_target_bytes_default": _REPLICAS,
        "initial_retention_local_target_ms_default": _REPLICAS,
        "legacy_group_offset_retention_enabled": _GROUPS,
        "log.roll.ms": _ROLLING,
        "log_compaction_interval_ms": _COMPACTION,
        "log_segment_ms": _ROLLING,
        "log_segment_ms_max": _ROLLING,
        "log_segment_ms_min": _ROLLING,
        "log_segment_size": _ROLLING,
        "max_compacted_log_segment_size": _COMPACTION,
    }
)
"""Cluster properties that only the broker can act on, and why."""

NOT_APPLICABLE_TO_TOPICS: Mapping[str, str] = MappingProxyType(
    {"redpanda.remote.recovery": _RECOVERY, "segment.bytes": _ROLLING, "segment.ms": _ROLLING}
)
"""The same for topic properties under `topics`."""

SECTIONS_OF_OTHERS: Mapping[str, str] = MappingProxyType(
    {
        "redpanda": "redpanda.yaml's section is not read here; write its cluster properties at the top level",
        "rpk": (
            "rpk's section is not read here; write tune_ballast_file, ballast_file_path and "
            "ballast_file_size at the top level"
        ),
    }
)
"""Sections of redpanda.yaml, and where their properties belong here."""
