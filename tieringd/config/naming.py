"""
Which names are valid where, and how to explain a name that is not.

A wrong name is one of three things: a property in the wrong section, a typing error near a valid name,
or an unknown name.

`NOT_APPLICABLE` holds names of tiered storage that only the broker can act on. They are accepted and
reported with the reason, so that a cluster's properties can be kept in one file.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING

from tieringd.config.model import AdminConfig, BrokerConfig, Config, LogConfig, Security
from tieringd.config.properties import GatewayConfig, TopicProperties
from tieringd.config.yaml_source import Place, dotted

if TYPE_CHECKING:
    from pydantic import BaseModel


_ROLLING = "the broker rolls its segments; set it in the broker"
_COMPACTION = "the broker compacts its logs; set it in the broker"
_REPLICAS = "the broker decides how much of a partition it copies to a new replica; set it in the broker"
_RECOVERY = "the broker applies it when a topic is created; use the command `tieringd recover` instead"
_GROUPS = "the broker keeps the offsets of consumer groups, which are not tiered; set it in the broker"

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
"""Topic properties under `topics` that only the broker can act on, and why."""

SECTIONS_OF_OTHERS: Mapping[str, str] = MappingProxyType(
    {
        "redpanda": (
            "the section of redpanda.yaml is not read here; write its cluster properties at the top level"
        ),
        "rpk": (
            "the section of rpk is not read here; write tune_ballast_file, ballast_file_path and "
            "ballast_file_size at the top level"
        ),
    }
)
"""Sections of redpanda.yaml, and where their properties belong here."""

SECTIONS: dict[Place, type[BaseModel]] = {
    (): Config,
    ("broker",): BrokerConfig,
    ("broker", "security"): Security,
    ("admin",): AdminConfig,
    ("gateway",): GatewayConfig,
    ("log",): LogConfig,
    ("topics", "NAME"): TopicProperties,
}
"""Every section, in the order of the reference page. NAME is a topic's name or pattern."""

_TOPIC: Place = ("topics", "NAME")
_FEW_NAMES = 8
"""A section with at most this many names lists them all if none is near."""


def property_names(model: type[BaseModel]) -> tuple[str, ...]:
    """Return the names of a section's properties, as they are written in the file."""
    return tuple(field.alias or name for name, field in model.model_fields.items())


def why_not_applicable(place: Place) -> str | None:
    """Return why a valid name at *place* has no effect here, or None for any other name."""
    if len(place) == 1:
        return NOT_APPLICABLE.get(str(place[0]))
    is_topics = place[0] == "topics" and len(place) == len(_TOPIC) + 1
    return NOT_APPLICABLE_TO_TOPICS.get(str(place[-1])) if is_topics else None


def explain_unknown(place: Place) -> str:
    """Return the explanation of a name that its section does not have."""
    section, name = _section(place), str(place[-1])
    if not section and name in SECTIONS_OF_OTHERS:
        return SECTIONS_OF_OTHERS[name]
    accepted = NOT_APPLICABLE_TO_TOPICS if section == _TOPIC else NOT_APPLICABLE if not section else ()
    for other, model in SECTIONS.items():
        if name in property_names(model) and other != section:
            return f"unknown property in this section; it belongs {_where(other)}"
    names = property_names(SECTIONS[section])
    for near in get_close_matches(name, [*names, *accepted], n=1):
        return f"unknown property; did you mean {near}?"
    if len(names) <= _FEW_NAMES:
        return f"unknown property; this section has {', '.join(names)}"
    return "unknown property; docs/configuration.md lists all properties"


def nearest_place(place: Place) -> Place:
    """Return the place that an unknown name most likely means. A valid place is returned unchanged."""
    if not place or _section(place) not in SECTIONS:
        return place
    near = get_close_matches(str(place[-1]), property_names(SECTIONS[_section(place)]), n=1)
    return (*place[:-1], near[0]) if near else place


def _section(place: Place) -> Place:
    return _TOPIC if place[0] == "topics" and len(place) > len(_TOPIC) else place[:-1]


def _where(section: Place) -> str:
    if section == _TOPIC:
        return "under topics, below a topic's name"
    return f"under {dotted(section)}" if section else "at the top level"
