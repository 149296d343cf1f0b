"""
What the classes declare of each property: its kinds, its default, its meaning, how it is shown.

The reference page, the JSON schema, `config show` and the comparison of a reload use this module, so
that they cannot disagree with the code that reads the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args, get_origin

from pydantic import BaseModel

from tieringd.config.fields import LIVE, NEVER_CLEARED, Choice, Kind, SecretText
from tieringd.config.model import Config
from tieringd.config.naming import SECTIONS
from tieringd.config.properties import TopicProperties
from tieringd.config.yaml_source import Place

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

SECRET = "(secret)"  # noqa: S105 what is shown in a secret's place
TOPICS: Place = ("topics", "NAME")


@dataclass(frozen=True, slots=True)
class Property:
    """One property, as the class of its section declares it."""

    attribute: str
    field: FieldInfo
    kinds: tuple[tuple[Kind, Any], ...]
    """The kinds in its type, outermost first, each with the type that it describes."""
    is_section: bool
    is_list: bool

    @property
    def name(self) -> str:
        """Return the name as it is written in the file."""
        return self.field.alias or self.attribute

    @property
    def meaning(self) -> str:
        """Return its purpose, in words on one line."""
        return " ".join(f"{self.field.description}".split())

    @property
    def is_live(self) -> bool:
        """Say whether a running daemon applies a new value."""
        return LIVE in self.field.metadata

    @property
    def is_secret(self) -> bool:
        """Say whether its value must never be shown."""
        return any(isinstance(kind, SecretText) for kind, _ in self.kinds)

    @property
    def is_never_cleared(self) -> bool:
        """Say whether an empty value is refused instead of meaning the default."""
        return NEVER_CLEARED in self.field.metadata

    @property
    def accepts_null(self) -> bool:
        """Say whether null may be written."""
        return self.field.default is None and not self.is_never_cleared

    @property
    def words(self) -> tuple[str, ...]:
        """Return the words it must be one of; empty if it is not a choice."""
        kind, source = self.kinds[0]
        return get_args(source) if isinstance(kind, Choice) else ()

    def show(self, value: Any) -> str:
        """Return a value as an operator would write it, or the placeholder of a secret."""
        if value is None:
            return "not set" if self.is_never_cleared else "null"
        if self.is_secret:
            return SECRET
        kind = self.kinds[0][0]
        return ", ".join(kind.show(one) for one in value) if self.is_list else kind.show(value)

    def plain(self, value: Any) -> Any:
        """Return a value as JSON holds it, or the placeholder of a secret."""
        if self.is_secret and value is not None:
            return SECRET
        if self.is_list:
            return [str(one) for one in value]
        return value if isinstance(value, (bool, int, float, type(None))) else str(value)


def properties_of(model: type[BaseModel]) -> tuple[Property, ...]:
    """Return a section's properties in the order of the reference page."""
    return tuple(_property(name, field) for name, field in model.model_fields.items())


def values_of(config: Config) -> Iterator[tuple[Place, Property, Any]]:
    """Yield each property that is not a section, with its value. For topics, only set ones are included."""
    for section, model in SECTIONS.items():
        if model is TopicProperties:
            continue
        holder: Any = config
        for step in section:
            holder = getattr(holder, str(step))
        for one in properties_of(model):
            if not one.is_section:
                yield (*section, one.name), one, getattr(holder, one.attribute)
    for topic, properties in config.topics.items():
        for one in properties_of(TopicProperties):
            if one.attribute in properties.model_fields_set:
                yield ("topics", topic, one.name), one, getattr(properties, one.attribute)


def _property(attribute: str, field: FieldInfo) -> Property:
    annotation = field.rebuild_annotation()
    bare = get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation
    return Property(
        attribute=attribute,
        field=field,
        kinds=tuple(_kinds(annotation)),
        is_section=get_origin(bare) is dict or (isinstance(bare, type) and issubclass(bare, BaseModel)),
        is_list=get_origin(bare) is tuple,
    )


def _kinds(annotation: Any) -> list[tuple[Kind, Any]]:
    is_annotated = hasattr(annotation, "__metadata__")
    own = [(one, get_args(annotation)[0]) for one in annotation.__metadata__] if is_annotated else []
    inner = get_args(annotation)[:1] if is_annotated else get_args(annotation)
    below = [pair for argument in inner for pair in _kinds(argument)]
    return [(kind, source) for kind, source in own if isinstance(kind, Kind)] + below


def config_hash(config: Config) -> str:
    """Return a hash of every property's value, without secrets: equal where daemons are configured alike."""
    shown = [(".".join(map(str, place)), one.show(value)) for place, one, value in values_of(config)]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:12]
