"""
What holds for one topic: the file's overrides, then the broker's configuration, then the cluster's.

Each setting is looked up by itself. The first place that sets it decides: the topic's own name
in the file, the patterns that match it (longest first, then in the order of the file), the
broker's topic configuration, the cluster's value. At one place Kafka's name goes before
Redpanda's. `remote.storage.enable` stands for write and read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from tieringd.config.fields import AS_TOTAL, MAX_INT64, UNLIMITED, Flag, Text, duration, size
from tieringd.policies.local_retention import LocalRetentionTarget

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_T = TypeVar("_T", bool, int, str)
_BUCKET = r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]"
_WILDCARDS = frozenset("*?[")

STRICT = ConfigDict(
    frozen=True,
    extra="forbid",
    strict=True,
    hide_input_in_errors=True,
    use_attribute_docstrings=True,
)
"""How every section is read. Inputs stay out of errors: one of them may be a secret."""


class TopicProperties(BaseModel):
    """What the file sets for a topic, or for the topics that a pattern matches."""

    model_config = STRICT

    remote_write: Annotated[bool, Flag()] | None = Field(default=None, alias="redpanda.remote.write")
    """Upload this topic."""
    remote_read: Annotated[bool, Flag()] | None = Field(default=None, alias="redpanda.remote.read")
    """Serve reads of this topic from the archive."""
    remote_storage_enable: Annotated[bool, Flag()] | None = Field(default=None, alias="remote.storage.enable")
    """Kafka's name: both of the above."""
    remote_delete: Annotated[bool, Flag()] | None = Field(default=None, alias="redpanda.remote.delete")
    """Whether deleting the topic is to delete its objects. It takes write and read, and is true with both."""
    read_replica: Annotated[str, Text("text", _BUCKET, "must be a bucket's bare name")] | None = Field(
        default=None, alias="redpanda.remote.readreplica"
    )
    """The bucket that this topic is a read replica of: it is never uploaded, nor its objects deleted."""
    local_target_ms: Annotated[int, duration(1, MAX_INT64, UNLIMITED)] | None = Field(
        default=None, alias="retention.local.target.ms"
    )
    """Keep this much time on the broker; -1 is without limit."""
    local_target_bytes: Annotated[int, size(1, MAX_INT64, UNLIMITED)] | None = Field(
        default=None, alias="retention.local.target.bytes"
    )
    """Keep this many bytes of each partition on the broker; -1 is without limit."""
    local_retention_ms: Annotated[int, duration(0, MAX_INT64, UNLIMITED, AS_TOTAL)] | None = Field(
        default=None, alias="local.retention.ms"
    )
    """Kafka's name, which wins. -1 is without limit, -2 as long as total retention: no local limit."""
    managed_retention: Annotated[bool, Flag()] | None = Field(
        default=None, alias="tieringd.managed.retention"
    )
    """Set the broker's retention of the topic to unlimited, so that only tieringd deletes from it."""
    local_retention_bytes: Annotated[int, size(0, MAX_INT64, UNLIMITED, AS_TOTAL)] | None = Field(
        default=None, alias="local.retention.bytes"
    )
    """Kafka's name, which wins. -1 is without limit, -2 as much as total retention: no local limit."""


@dataclass(frozen=True, slots=True)
class ClusterDefaults:
    """What holds where neither the file nor the broker says anything of a topic."""

    enabled: bool
    """False turns tiering off whatever a topic says."""
    remote_write: bool
    remote_read: bool
    local_retention_target: LocalRetentionTarget


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """What holds for one topic."""

    remote_write: bool
    remote_read: bool
    local_retention_target: LocalRetentionTarget
    broker_retention_ms: int | None = None
    """How long the broker itself keeps records; None is without limit, or not known."""
    broker_retention_bytes: int | None = None
    managed_retention: bool = False
    """Whether tieringd is to take over the topic's retention from the broker."""
    remote_delete: bool = False
    """Whether deleting the topic deletes its objects: only with write and read, and of no read replica."""
    problems: tuple[str, ...] = ()
    """What in the broker's topic configuration cannot be read, contradicts or has no effect."""


@dataclass(frozen=True, slots=True)
class _Settings:
    """What one place sets; None where it says nothing. Limits keep their negative numbers."""

    remote_write: bool | None
    remote_read: bool | None
    target_ms: int | None
    target_bytes: int | None
    remote_delete: bool | None
    read_replica: str | None


def resolve_topic(
    name: str,
    *,
    overrides: Mapping[str, TopicProperties],
    broker_properties: Mapping[str, str],
    defaults: ClusterDefaults,
) -> TopicConfig:
    """Return what holds for the topic *name*."""
    broker, problems = _broker_settings(name, broker_properties)
    places = [*(_file_settings(one) for one in _matching(name, overrides)), broker]
    write = _first([place.remote_write for place in places])
    read = _first([place.remote_read for place in places])
    target_ms = _first([place.target_ms for place in places])
    target_bytes = _first([place.target_bytes for place in places])
    target = defaults.local_retention_target
    replica_of = _first([place.read_replica for place in places])
    wants_write = defaults.remote_write if write is None else write
    remote_write = defaults.enabled and wants_write and not replica_of
    remote_read = defaults.enabled and (defaults.remote_read if read is None else read)
    delete = _first([place.remote_delete for place in places])
    return TopicConfig(
        remote_write=remote_write,
        remote_read=remote_read,
        remote_delete=remote_write and remote_read and delete is not False,
        local_retention_target=LocalRetentionTarget(
            target_ms=target.target_ms if target_ms is None else _limit(target_ms),
            target_bytes=target.target_bytes if target_bytes is None else _limit(target_bytes),
        ),
        managed_retention=defaults.enabled
        and bool(_first([one.managed_retention for one in _matching(name, overrides)])),
        broker_retention_ms=_retention(broker_properties, "retention.ms"),
        broker_retention_bytes=_retention(broker_properties, "retention.bytes"),
        problems=(*problems, *_refused_write(name, replica_of if write else None)),
    )


def _refused_write(topic: str, replica_of: str | None) -> tuple[str, ...]:
    if replica_of is None:
        return ()
    problem = (
        f"topic {topic}: redpanda.remote.readreplica={replica_of} refuses redpanda.remote.write, "
        "as a read replica is never uploaded; remove one of them"
    )
    return (problem,)


def is_pattern(name: str) -> bool:
    """Say whether a name under `topics` is a pattern and not a topic's own name."""
    return not _WILDCARDS.isdisjoint(name)


def _matching(name: str, overrides: Mapping[str, TopicProperties]) -> list[TopicProperties]:
    """Return what the file sets for *name*, the most specific entry first."""
    patterns = [one for one in overrides if is_pattern(one) and fnmatchcase(name, one)]
    exact = [overrides[name]] if name in overrides else []
    return [*exact, *(overrides[one] for one in sorted(patterns, key=len, reverse=True))]


def _file_settings(properties: TopicProperties) -> _Settings:
    return _Settings(
        remote_write=_first([properties.remote_storage_enable, properties.remote_write]),
        remote_read=_first([properties.remote_storage_enable, properties.remote_read]),
        target_ms=_first([properties.local_retention_ms, properties.local_target_ms]),
        target_bytes=_first([properties.local_retention_bytes, properties.local_target_bytes]),
        remote_delete=properties.remote_delete,
        read_replica=properties.read_replica,
    )


def _broker_settings(topic: str, properties: Mapping[str, str]) -> tuple[_Settings, tuple[str, ...]]:
    """Read the broker's topic configuration, which we did not write: a bad value is left out, not fatal."""
    problems: list[str] = []

    def flag(name: str) -> bool | None:
        text = properties.get(name, "").strip().lower()
        if text in ("true", "false", ""):
            return text == "true" if text else None
        problems.append(
            f"topic {topic}: the broker has {name}={properties[name]}, which is not true or false"
        )
        return None

    def limit(name: str, low: int) -> int | None:
        text = properties.get(name, "").strip()
        if not text:
            return None
        if re.fullmatch(r"-?[0-9]{1,19}", text) and low <= int(text) <= MAX_INT64:
            return int(text)
        problems.append(f"topic {topic}: the broker has {name}={properties[name]}, which is not a limit")
        return None

    if flag("redpanda.remote.recovery"):
        problems.append(
            f"topic {topic}: the broker has redpanda.remote.recovery=true, which acts only when a topic "
            "is created, and has no effect on this one"
        )
    kafka = flag("remote.storage.enable")
    settings = _Settings(
        remote_write=_first([kafka, flag("redpanda.remote.write")]),
        remote_read=_first([kafka, flag("redpanda.remote.read")]),
        target_ms=_first(
            [
                limit("local.retention.ms", AS_TOTAL),
                _redpanda_limit(limit("retention.local.target.ms", UNLIMITED)),
            ]
        ),
        target_bytes=_first(
            [
                limit("local.retention.bytes", AS_TOTAL),
                _redpanda_limit(limit("retention.local.target.bytes", UNLIMITED)),
            ]
        ),
        remote_delete=flag("redpanda.remote.delete"),
        read_replica=_bucket(properties.get("redpanda.remote.readreplica", "")),
    )
    return settings, tuple(problems)


def _bucket(text: str) -> str | None:
    """Return the bucket of a read replica; Redpanda also writes an empty text or `false` for none."""
    text = text.strip()
    return None if text.lower() in ("", "false", "null") else text


def _retention(properties: Mapping[str, str], name: str) -> int | None:
    """Return one of the broker's own retention limits; it has checked them."""
    text = properties.get(name, "").strip()
    if "delete" not in properties.get("cleanup.policy", "delete") or not re.fullmatch(r"[0-9]{1,19}", text):
        return None
    return int(text)


def _redpanda_limit(value: int | None) -> int | None:
    """Redpanda switches a limit off with 0 as well as with -1; to Kafka, 0 is a limit of nothing."""
    return UNLIMITED if value == 0 else value


def _limit(value: int) -> int | None:
    """Return a limit; None for -1 and for Kafka's -2, which leave it to total retention."""
    return value if value >= 0 else None


def _first(values: Sequence[_T | None]) -> _T | None:
    return next((value for value in values if value is not None), None)
