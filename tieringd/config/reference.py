"""
The reference page of the configuration, made from the classes themselves.

`docs/configuration.md` is what `render` returns; a test keeps the two the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args, get_origin

from pydantic import BaseModel

from tieringd.config.fields import NEVER_CLEARED, Choice, Kind
from tieringd.config.naming import SECTIONS
from tieringd.config.yaml_source import dotted

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

_INTRODUCTION = """\
# Configuration reference

Made by `tieringd.config.reference` from the classes that read the file; do not edit this page.

The file is YAML. Every fault in it is reported at once, with its line, and nothing starts before
all are gone. A property that is not listed here is refused.

* **Sizes and durations** are numbers with a unit: `10GiB`, `512MiB`, `1GB`, `30s`, `7d`, `1h30m`. Sizes
  know `B`, `KB` to `PB` (powers of 1000) and `KiB` to `PiB` (powers of 1024); durations `ms`, `s`, `m`, `h`,
  `d` and `w`. A bare number is in the unit that the property's name ends in.
* **`${NAME}`** in a value is replaced by the environment variable NAME; a variable that is not set is
  a fault. Write `$${` for the two characters themselves. Inside `[ ]`, put it in quotes.
* **null** is accepted where the default is null. A property whose default is "not set" cannot be reset with
  null or an empty text: remove its line.
* **Words** are `true` and `false` only; `yes`, `no`, `on` and `off` are text. Anchors, aliases and tags are
  not supported.
"""
_TOPICS = """\

`NAME` is a topic's name, or a pattern with `*`, `?` or `[...]`; put a pattern that begins with `*` in quotes.
For each topic every setting is looked up by itself, and the first of these that sets it decides:

1. the topic's own name in this file;
2. the patterns in this file that match it, the longest first, equally long ones in the order of the file;
3. what the broker has set on the topic;
4. the cluster's value: `cloud_storage_enable_remote_write`, `cloud_storage_enable_remote_read`,
   `retention_local_target_ms_default` and `retention_local_target_bytes_default`.

So a topic's own value overrides the cluster's both ways. `cloud_storage_enabled: false` turns everything off.

At one place, Kafka's names go before Redpanda's: `local.retention.*` before `retention.local.target.*`, and
`remote.storage.enable`, which stands for write and read, before `redpanda.remote.*`. Kafka's `-2` says that
local data stays as long as total retention keeps it. That is no local limit of that kind, and the cluster's
default does not take its place.

A value of the broker that cannot be read is ignored, and reported in the log.
"""


def render() -> str:
    """Return the whole page."""
    return _INTRODUCTION + "".join(
        f"\n## {_heading(place)}\n"
        + (_TOPICS if model.__name__ == "TopicProperties" else "")
        + "\n| property | type | default | meaning |\n|---|---|---|---|\n"
        + "".join(_row(name, field) for name, field in model.model_fields.items())
        for place, model in SECTIONS.items()
    )


def _heading(place: tuple[str | int, ...]) -> str:
    return f"`{dotted(place)}`" if place else "Top level"


def _row(name: str, field: FieldInfo) -> str:
    annotation = field.rebuild_annotation()
    kinds = _kinds(annotation)
    cells = (
        f"`{field.alias or name}`",
        _type(annotation, kinds),
        _default(field, kinds),
        f"{field.description}",
    )
    return f"| {' | '.join(cells)} |\n"


def _kinds(annotation: Any) -> list[tuple[Kind, Any]]:
    """Return the kinds in an annotation with the types they describe, the outermost first."""
    is_annotated = hasattr(annotation, "__metadata__")
    own = [(one, get_args(annotation)[0]) for one in annotation.__metadata__] if is_annotated else []
    inner = get_args(annotation)[:1] if is_annotated else get_args(annotation)
    below = [pair for argument in inner for pair in _kinds(argument)]
    return [(kind, source) for kind, source in own if isinstance(kind, Kind)] + below


def _type(annotation: Any, kinds: list[tuple[Kind, Any]]) -> str:
    bare = get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation
    if get_origin(bare) is dict or (isinstance(bare, type) and issubclass(bare, BaseModel)):
        return "section, see below"
    kind, source = kinds[0]
    words = ", ".join(f"`{word}`" for word in get_args(source)) if isinstance(kind, Choice) else ""
    many = "list, each: " if get_origin(bare) is tuple else ""
    return f"{many}{kind.label} {words}".strip()


def _default(field: FieldInfo, kinds: list[tuple[Kind, Any]]) -> str:
    if field.is_required():
        return "required"
    if field.default is None:
        return "not set" if NEVER_CLEARED in field.metadata else "`null`"
    if field.default_factory is not None or isinstance(field.default, BaseModel):
        return ""
    return f"`{kinds[0][0].show(field.default)}`" if field.default != () else "none"
