"""
A JSON schema of the file, for editors that complete and check while one types.

It is made from the same classes that read the file, and says less than they do: rules between
properties, and what stands behind `${NAME}`, are known only to `tieringd config check`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tieringd.config.describe import TOPICS, properties_of
from tieringd.config.fields import (
    MAX_INT64,
    AbsolutePath,
    Amount,
    Choice,
    Decimal,
    Flag,
    Number,
    SecretText,
    Text,
)
from tieringd.config.known import NOT_APPLICABLE, NOT_APPLICABLE_TO_TOPICS
from tieringd.config.naming import SECTIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tieringd.config.describe import Property
    from tieringd.config.fields import Kind
    from tieringd.config.units import Quantity
    from tieringd.config.yaml_source import Place

_Schema = dict[str, Any]
_VARIABLE: _Schema = {"$ref": "#/$defs/variable"}
_TOPIC_NAME = r"^[A-Za-z0-9._*?\[\]!-]+$"


def json_schema() -> _Schema:
    """Return the schema, in the draft of 2020-12."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration of tieringd",
        **_section(()),
        "$defs": {
            "variable": {
                "description": "Text in which ${NAME} is replaced by an environment variable",
                "type": "string",
                "pattern": r"\$\{",
            }
        },
    }


def _section(place: Place) -> _Schema:
    model = SECTIONS[place]
    own = {one.name: _property(place, one) for one in properties_of(model)}
    required = [one.name for one in properties_of(model) if one.field.is_required()]
    others: Mapping[str, str] = {}
    if place in {(), TOPICS}:
        others = NOT_APPLICABLE_TO_TOPICS if place else NOT_APPLICABLE
    ignored: _Schema = {
        name: {"description": f"Not applicable: {reason}.", "deprecated": True}
        for name, reason in others.items()
    }
    found: _Schema = {"type": "object", "properties": own | ignored, "additionalProperties": False}
    return found | ({"required": required} if required else {})


def _property(place: Place, one: Property) -> _Schema:
    if one.name == TOPICS[0]:
        found: _Schema = {
            "type": ["object", "null"],
            "propertyNames": {"pattern": _TOPIC_NAME},
            "additionalProperties": _may_be_empty(_section(TOPICS)),
        }
    elif one.is_section:
        section = _section((*place, one.name))
        found = section if one.field.is_required() else _may_be_empty(section)
    else:
        found = _value(one)
    return {"description": one.meaning, **found}


def _may_be_empty(section: _Schema) -> _Schema:
    return {**section, "type": ["object", "null"]}


def _value(one: Property) -> _Schema:
    kind, _ = one.kinds[0]
    forms = [*_forms(kind, one.words), _VARIABLE]
    if one.is_list:
        items: _Schema = {"type": "array", "items": {"anyOf": forms}}
        return items | ({"minItems": 1} if one.field.is_required() else {})
    if one.accepts_null:
        forms.append({"type": "null"})
    found: _Schema = {"anyOf": forms}
    if one.field.is_required() or one.field.default is None:
        return found
    return found | {"default": one.plain(one.field.default)}


def _forms(kind: Kind, words: tuple[str, ...]) -> list[_Schema]:
    """Return the ways in which a value of *kind* may be written."""
    match kind:
        case Number(low, high):
            form: _Schema = {"type": "integer", "minimum": low, "maximum": high}
        case Decimal(low, high):
            form = {"type": "number", "minimum": low, "maximum": high}
        case Amount(quantity, low, high, special):
            return _amount(quantity, low, high, special)
        case Choice():
            form = {"enum": list(words)}
        case Text(_, pattern):
            form = {"type": "string", **_pattern(pattern)}
        case _:
            form = _FORMS[type(kind)]
    return [form]


_FORMS: Mapping[type[Kind], _Schema] = {
    Flag: {"type": "boolean"},
    AbsolutePath: {"type": "string", "pattern": "^/"},
    SecretText: {"type": "string", "minLength": 1},
}


def _amount(quantity: Quantity, low: int, high: int, special: tuple[int, ...]) -> list[_Schema]:
    number: _Schema = {"type": "integer", "minimum": low}
    if high != MAX_INT64:
        number["maximum"] = high
    units = "|".join(quantity.units)
    part = rf"[0-9]+(?:\.[0-9]+)?\s*(?:{units})"
    many = rf"(?:\s*{part})+" if quantity.may_be_compound else part
    text: _Schema = {
        "description": f"A {quantity.noun} with its unit, such as {quantity.example}",
        "type": "string",
        "pattern": rf"^\s*(?:[0-9]+|{many})\s*$",
    }
    return [number, text, *([{"enum": list(special)}] if special else [])]


def _pattern(pattern: str) -> _Schema:
    """Return a pattern of ours as JSON schema has it: that of JavaScript, and found anywhere in the text."""
    if pattern == Text().pattern:
        return {"minLength": 1}
    inner = pattern.replace(r"\Z", "$")
    return {"pattern": f"^(?:{inner})$"}
