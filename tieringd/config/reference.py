"""
The reference page of the configuration, made from the classes themselves.

`docs/configuration.md` is the result of `render`; a test keeps the two equal.

`json_schema` makes a JSON schema of the file, for editors that complete and check while the user types.
It checks less than the classes: only `tieringd config check` knows the rules between properties, and the
values of `${NAME}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tieringd.config.describe import TOPICS, Property, properties_of
from tieringd.config.fields import (
    MAX_INT64,
    AbsolutePath,
    Amount,
    Choice,
    Decimal,
    Flag,
    Kind,
    Number,
    NumberOrWord,
    SecretText,
    Text,
)
from tieringd.config.naming import NOT_APPLICABLE, NOT_APPLICABLE_TO_TOPICS, SECTIONS
from tieringd.config.units import Quantity
from tieringd.config.yaml_source import Place, dotted

_Schema = dict[str, Any]
_VARIABLE: _Schema = {"$ref": "#/$defs/variable"}
_TOPIC_NAME = r"^[A-Za-z0-9._*?\[\]!-]+$"

_INTRODUCTION = """\
# Configuration reference

`tieringd.config.reference` generates this page from the classes that read the file; do not edit it.
`tieringd config check FILE` reports the faults of a file, `config show FILE` prints each value in effect and
its origin, and `config schema` prints a JSON schema for editors.

The file is YAML. All its faults are reported together, each with its line, and tieringd starts only with a
file without faults. A property that is not listed here is a fault.

* **Sizes and durations** are numbers with a unit: `10GiB`, `512MiB`, `1GB`, `30s`, `7d`, `1h30m`. Sizes
  have `B`, `KB` to `PB` (powers of 1000) and `KiB` to `PiB` (powers of 1024); durations `ms`, `s`, `m`, `h`,
  `d` and `w`. A bare number is in the unit that the property's name ends in.
* **`${NAME}`** in a value is replaced by the environment variable NAME; a variable that is not set is
  a fault. Write `$${` for the two characters themselves. Inside `[ ]`, put it in quotes.
* **null** is accepted where the default is null. A property whose default is "not set" cannot be reset with
  null or an empty text: remove its line.
* **reload** says how a changed value takes effect: a running daemon applies `live` properties when it
  receives SIGHUP; all others need a `restart`. If the new file has a fault, the daemon keeps its settings.
* **Words** are `true` and `false` only; `yes`, `no`, `on` and `off` are text. Anchors, aliases and tags are
  not supported.
"""
_CHUNKS = """\

**Chunks: two bounds.** Files of the cache and open files have bounds of their own.

* How many chunks are on the disk is bounded by `cloud_storage_cache_size` and its percentage,
  `cloud_storage_cache_max_objects` and `storage_min_free_bytes`, for all segments together: the cache leaves
  a fifth more than that free, so that it gives way before the disk is degraded. The least recently used go
  first. `tieringd_cache_objects` and `tieringd_cache_bytes` show what is there.
* How many chunks of a segment are open is bounded by `cloud_storage_chunk_eviction_strategy` with
  `cloud_storage_hydrated_chunks_per_segment_ratio` and `cloud_storage_min_chunks_per_segment_threshold`.
  `tieringd_cache_open_chunks` shows how many are open. Redpanda's documentation speaks of chunks that may be
  hydrated. In Redpanda too a chunk is hydrated while its file is open: the strategies close files, and the
  file stays on the disk until the cache is trimmed.

A bound on a segment's chunks on the disk would delete chunks from a cache that has room, and the next reader
would download them again. With `eager`, the default, every chunk would go as soon as its reader leaves.

`predictive` first closes the chunks that the fewest readers come to, then those whose readers have the most
chunks left before them, then the least recently used. A reader comes to every chunk after the one that it
reads.
"""
_TOPICS = """\

`NAME` is a topic's name, or a pattern with `*`, `?` or `[...]`; put a pattern that begins with `*` in quotes.
For each topic every setting is looked up separately, and the first of these places that sets it decides:

1. the topic's own name in this file;
2. the patterns in this file that match it, the longest first, equally long ones in the order of the file;
3. what the broker has set on the topic;
4. the cluster's value: `cloud_storage_enable_remote_write`, `cloud_storage_enable_remote_read`,
   `retention_local_target_ms_default`, `retention_local_target_bytes_default`, `retention_bytes` and,
   without a broker, `log_retention_ms`.

So a topic's own value overrides the cluster's both ways. `cloud_storage_enabled: false` turns everything off.

Within one place, Kafka's names take precedence over Redpanda's: `local.retention.*` over
`retention.local.target.*`, and `remote.storage.enable`, which sets both write and read, over
`redpanda.remote.*`. Kafka's `-2` keeps local data as long as total retention keeps it: there is no local
limit of that kind, and the cluster's default does not apply.

A value of the broker that is not valid is ignored, and reported in the log.
"""


_NOT_APPLICABLE = """\

## Not applicable

These properties are accepted and have no effect, so that a cluster's properties can be kept in one file.
`tieringd config check` reports them with the reason.

| property | reason |
|---|---|
"""


def json_schema() -> _Schema:
    """Return the schema, in the draft 2020-12."""
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
    """Return the forms in which a value of *kind* may be written."""
    match kind:
        case Number(low, high):
            form: _Schema = {"type": "integer", "minimum": low, "maximum": high}
        case NumberOrWord(low, high, word):
            return [{"type": "integer", "minimum": low, "maximum": high}, {"enum": [word]}]
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
    """Return a Python pattern for JSON schema, whose patterns are JavaScript's and match anywhere."""
    if pattern == Text().pattern:
        return {"minLength": 1}
    inner = pattern.replace(r"\Z", "$")
    return {"pattern": f"^(?:{inner})$"}


def render() -> str:
    """Return the whole page."""
    sections = "".join(
        f"\n## {_heading(place)}\n"
        + (_TOPICS if place == TOPICS else "")
        + "\n| property | type | default | reload | meaning |\n|---|---|---|---|---|\n"
        + "".join(_row(place, one) for one in properties_of(model))
        + ("" if place else _CHUNKS)
        for place, model in SECTIONS.items()
    )
    topics = {f"topics[NAME].{name}": reason for name, reason in NOT_APPLICABLE_TO_TOPICS.items()}
    return _INTRODUCTION + sections + _NOT_APPLICABLE + _reasons({**NOT_APPLICABLE, **topics})


def _heading(place: Place) -> str:
    return f"`{dotted(place)}`" if place else "Top level"


def _row(place: Place, one: Property) -> str:
    is_live = one.is_live or place == TOPICS
    reload = "" if one.is_section else "live" if is_live else "restart"
    cells = (f"`{one.name}`", _type(one), _default(one), reload, one.meaning)
    return f"| {' | '.join(cells)} |\n"


def _reasons(reasons: Mapping[str, str]) -> str:
    return "".join(f"| `{name}` | {reason} |\n" for name, reason in reasons.items())


def _type(one: Property) -> str:
    if one.is_section:
        return "section, see below"
    words = ", ".join(f"`{one.kinds[0][0].show(word)}`" for word in one.words)
    many = "list, each: " if one.is_list else ""
    return f"{many}{one.kinds[0][0].label} {words}".strip()


def _default(one: Property) -> str:
    if one.field.is_required():
        return "required"
    if one.is_section:
        return ""
    if one.field.default is None:
        return "`null`" if one.accepts_null else "not set"
    return f"`{one.show(one.field.default)}`" if one.field.default != () else "none"
