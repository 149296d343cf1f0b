"""
The effect of a reload: which properties differ, and which of them a running daemon applies.

It only compares two configurations. `LIVE`, beside a property, declares that it can change while the
daemon runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tieringd.config.describe import TOPICS, Property, properties_of, values_of
from tieringd.config.model import Config
from tieringd.config.naming import SECTIONS
from tieringd.config.yaml_source import Place, dotted


@dataclass(frozen=True, slots=True)
class Change:
    """A property whose value differs from before."""

    name: str
    """The name with its section, as messages write it."""
    old: str
    """The value as an operator would write it; never a secret."""
    new: str
    is_live: bool
    """Whether a running daemon applies it."""

    def __str__(self) -> str:
        return f"{self.name}: {self.old} -> {self.new}" if self.old != self.new else f"{self.name}: changed"


@dataclass(frozen=True, slots=True)
class Reload:
    """The difference between the configuration in use and a new one."""

    changes: tuple[Change, ...]
    config: Config
    """The configuration until a restart: the old one with the live properties of the new one."""

    @property
    def applied(self) -> tuple[Change, ...]:
        """Return the changes that take effect now."""
        return tuple(change for change in self.changes if change.is_live)

    @property
    def needs_restart(self) -> tuple[Change, ...]:
        """Return the changes that need a restart."""
        return tuple(change for change in self.changes if not change.is_live)


def compare_configs(old: Config, new: Config) -> Reload:
    """Return the changes when *new* is loaded while *old* is in use. Both are valid."""
    before = {place: (one, value) for place, one, value in values_of(old)}
    after = {place: (one, value) for place, one, value in values_of(new)}
    changes = [
        _change(place, before.get(place), after.get(place))
        for place in (*before, *(place for place in after if place not in before))
        if before.get(place, _ABSENT)[1] != after.get(place, _ABSENT)[1]
    ]
    return Reload(tuple(changes), _merged(old, new))


_ABSENT: tuple[None, object] = (None, object())
"""Differs from every value, including null."""


def _change(place: Place, old: tuple[Property, Any] | None, new: tuple[Property, Any] | None) -> Change:
    either = old or new
    assert either is not None, "a place comes from one of the two"
    is_topic = place[0] == TOPICS[0]
    return Change(dotted(place), _shown(old), _shown(new), is_live=is_topic or either[0].is_live)


def _shown(held: tuple[Property, Any] | None) -> str:
    return "not set" if held is None else held[0].show(held[1])


def _merged(old: Config, new: Config) -> Config:
    """Return *old* with every live property of *new*."""
    update: dict[str, Any] = {}
    for section, model in SECTIONS.items():
        if section == TOPICS:
            continue
        live = [one.attribute for one in properties_of(model) if one.is_live]
        if not section:
            update |= {name: getattr(new, name) for name in live}
        elif live:
            assert len(section) == 1, "nothing that is live lies deeper"
            name = str(section[0])
            values = {one: getattr(getattr(new, name), one) for one in live}
            update[name] = getattr(old, name).model_copy(update=values)
    merged = old.model_copy(update=update)
    return merged.with_remarks(warnings=new.warnings, notes=new.notes)
