"""
A check of documents against JSON schema, with as much of it as ours uses.

A keyword that it does not know is an error: a schema cannot be right by being skipped.
"""

from __future__ import annotations

import re
from typing import Any

_TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "number": (int, float),
    "integer": int,
}
_ANNOTATIONS = {"$schema", "$defs", "title", "description", "default", "deprecated"}


def faults(
    schema: dict[str, Any], document: Any, root: dict[str, Any] | None = None, at: str = ""
) -> list[str]:
    """Return what is wrong with *document*, with where it is."""
    root = schema if root is None else root
    found: list[str] = []
    for keyword, value in schema.items():
        if keyword not in _ANNOTATIONS:
            found += _FAULTS[keyword](value, document, schema, root, at)
    return found


def _type(value: Any, document: Any, schema: Any, root: Any, at: str) -> list[str]:
    names = value if isinstance(value, list) else [value]
    is_bool = isinstance(document, bool)
    fits = any(isinstance(document, _TYPES[one]) and (not is_bool or one == "boolean") for one in names)
    return [] if fits else [f"{at}: is not {value}"]


def _any_of(value: Any, document: Any, schema: Any, root: Any, at: str) -> list[str]:
    each = [faults(one, document, root, at) for one in value]
    return [] if [] in each else [f"{at}: fits nothing: {each}"]


def _ref(value: str, document: Any, schema: Any, root: Any, at: str) -> list[str]:
    assert value.startswith("#/$defs/")
    return faults(root["$defs"][value.removeprefix("#/$defs/")], document, root, at)


def _properties(value: Any, document: Any, schema: Any, root: Any, at: str) -> list[str]:
    if not isinstance(document, dict):
        return []
    return [
        fault
        for name, one in value.items()
        if name in document
        for fault in faults(one, document[name], root, f"{at}.{name}")
    ]


def _additional(value: Any, document: Any, schema: Any, root: Any, at: str) -> list[str]:
    others = set(document) - set(schema.get("properties", {})) if isinstance(document, dict) else set()
    if value is False:
        return [f"{at}: {name} is unknown" for name in sorted(others)]
    return [fault for name in sorted(others) for fault in faults(value, document[name], root, f"{at}.{name}")]


def _names(value: Any, document: Any, schema: Any, root: Any, at: str) -> list[str]:
    names = document if isinstance(document, dict) else ()
    return [fault for name in names for fault in faults(value, name, root, f"{at}.{name}")]


def _items(value: Any, document: Any, schema: Any, root: Any, at: str) -> list[str]:
    items = document if isinstance(document, list) else ()
    return [
        fault for number, one in enumerate(items) for fault in faults(value, one, root, f"{at}[{number}]")
    ]


def _required(value: Any, document: Any, schema: Any, root: Any, at: str) -> list[str]:
    missing = [name for name in value if isinstance(document, dict) and name not in document]
    return [f"{at}: {name} is missing" for name in missing]


def _pattern(value: str, document: Any, schema: Any, root: Any, at: str) -> list[str]:
    fits = not isinstance(document, str) or re.search(value, document)
    return [] if fits else [f"{at}: does not match {value}"]


def _compare(fits: Any, kinds: Any) -> Any:
    def check(value: Any, document: Any, schema: Any, root: Any, at: str) -> list[str]:
        is_of_kind = isinstance(document, kinds) and not isinstance(document, bool)
        return [f"{at}: {document!r} is beyond {value}"] if is_of_kind and not fits(document, value) else []

    return check


def _enum(value: Any, document: Any, schema: Any, root: Any, at: str) -> list[str]:
    return [] if document in value else [f"{at}: is not one of {value}"]


_FAULTS: dict[str, Any] = {
    "type": _type,
    "anyOf": _any_of,
    "$ref": _ref,
    "properties": _properties,
    "additionalProperties": _additional,
    "propertyNames": _names,
    "items": _items,
    "required": _required,
    "pattern": _pattern,
    "enum": _enum,
    "minimum": _compare(lambda document, value: document >= value, (int, float)),
    "maximum": _compare(lambda document, value: document <= value, (int, float)),
    "minLength": _compare(lambda document, value: len(document) >= value, str),
    "minItems": _compare(lambda document, value: len(document) >= value, list),
}
