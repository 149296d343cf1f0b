"""
Which names are valid where, and what to say of a name that is not.

A wrong name is one of three things: a property in the wrong section, a typing error near a valid
name, or nothing we know.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

from tieringd.config.gateway import GatewayConfig
from tieringd.config.known import (
    NOT_APPLICABLE,
    NOT_APPLICABLE_TO_TOPICS,
    SECTIONS_OF_OTHERS,
)
from tieringd.config.model import AdminConfig, BrokerConfig, Config, LogConfig, Security
from tieringd.config.topic_properties import TopicProperties
from tieringd.config.yaml_source import dotted

if TYPE_CHECKING:
    from pydantic import BaseModel

    from tieringd.config.yaml_source import Place

SECTIONS: dict[Place, type[BaseModel]] = {
    (): Config,
    ("broker",): BrokerConfig,
    ("broker", "security"): Security,
    ("admin",): AdminConfig,
    ("gateway",): GatewayConfig,
    ("log",): LogConfig,
    ("topics", "NAME"): TopicProperties,
}
"""Every section, in the order of the reference page; NAME is a topic's name or pattern."""

_TOPIC: Place = ("topics", "NAME")
_FEW_NAMES = 8
"""A section with no more names than this lists them all when none is near."""


def property_names(model: type[BaseModel]) -> tuple[str, ...]:
    """Return the names of a section's properties, as they are written in the file."""
    return tuple(field.alias or name for name, field in model.model_fields.items())


def why_not_applicable(place: Place) -> str | None:
    """Return why a name, which is valid at *place*, says nothing to us; None for any other name."""
    if len(place) == 1:
        return NOT_APPLICABLE.get(str(place[0]))
    is_topics = place[0] == "topics" and len(place) == len(_TOPIC) + 1
    return NOT_APPLICABLE_TO_TOPICS.get(str(place[-1])) if is_topics else None


def explain_unknown(place: Place) -> str:
    """Return what to say of a name that its section does not have."""
    section, name = _section(place), str(place[-1])
    if not section and name in SECTIONS_OF_OTHERS:
        return SECTIONS_OF_OTHERS[name]
    accepted = NOT_APPLICABLE_TO_TOPICS if section == _TOPIC else NOT_APPLICABLE if not section else ()
    for other, model in SECTIONS.items():
        if name in property_names(model) and other != section:
            return f"unknown property here; it belongs {_where(other)}"
    names = property_names(SECTIONS[section])
    for near in get_close_matches(name, [*names, *accepted], n=1):
        return f"unknown property; did you mean {near}?"
    if len(names) <= _FEW_NAMES:
        return f"unknown property; the names here are {', '.join(names)}"
    return "unknown property, and no name is near it; docs/configuration.md lists them all"


def nearest_place(place: Place) -> Place:
    """Return the place that an unknown name most likely means; a valid one is its own nearest."""
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
