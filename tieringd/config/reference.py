"""
The reference page of the configuration, made from the classes themselves.

`docs/configuration.md` is what `render` returns; a test keeps the two the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieringd.config.describe import TOPICS, properties_of
from tieringd.config.known import NOT_APPLICABLE, NOT_APPLICABLE_TO_TOPICS
from tieringd.config.naming import SECTIONS
from tieringd.config.yaml_source import dotted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tieringd.config.describe import Property
    from tieringd.config.yaml_source import Place

_INTRODUCTION = """\
# Configuration reference

Made by `tieringd.config.reference` from the classes that read the file; do not edit this page.
`tieringd config check FILE` finds what is wrong with a file, `config show FILE` prints what is in effect and
where each value came from, and `config schema` prints a JSON schema for editors.

The file is YAML. Every fault in it is reported at once, with its line, and nothing starts before
all are gone. A property that is not listed here is refused.

* **Sizes and durations** are numbers with a unit: `10GiB`, `512MiB`, `1GB`, `30s`, `7d`, `1h30m`. Sizes
  know `B`, `KB` to `PB` (powers of 1000) and `KiB` to `PiB` (powers of 1024); durations `ms`, `s`, `m`, `h`,
  `d` and `w`. A bare number is in the unit that the property's name ends in.
* **`${NAME}`** in a value is replaced by the environment variable NAME; a variable that is not set is
  a fault. Write `$${` for the two characters themselves. Inside `[ ]`, put it in quotes.
* **null** is accepted where the default is null. A property whose default is "not set" cannot be reset with
  null or an empty text: remove its line.
* **reload** says what a changed value needs: `live` properties are taken over by a running daemon that is
  sent SIGHUP, all others need a `restart`. A new file with a fault changes nothing.
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
   `retention_local_target_ms_default`, `retention_local_target_bytes_default`, `log_retention_ms` and
   `retention_bytes`.

So a topic's own value overrides the cluster's both ways. `cloud_storage_enabled: false` turns everything off.

At one place, Kafka's names go before Redpanda's: `local.retention.*` before `retention.local.target.*`, and
`remote.storage.enable`, which stands for write and read, before `redpanda.remote.*`. Kafka's `-2` says that
local data stays as long as total retention keeps it. That is no local limit of that kind, and the cluster's
default does not take its place.

A value of the broker that cannot be read is ignored, and reported in the log.
"""


_NOT_APPLICABLE = """\

## Not applicable

These are accepted, have no effect, and are reported with the reason, so that a cluster's properties can be
kept in one file.

| property | reason |
|---|---|
"""


def render() -> str:
    """Return the whole page."""
    sections = "".join(
        f"\n## {_heading(place)}\n"
        + (_TOPICS if place == TOPICS else "")
        + "\n| property | type | default | reload | meaning |\n|---|---|---|---|---|\n"
        + "".join(_row(place, one) for one in properties_of(model))
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
    words = ", ".join(f"`{word}`" for word in one.words)
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
