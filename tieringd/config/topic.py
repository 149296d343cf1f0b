"""
The settings of one topic: the file's overrides, then the broker's configuration, then the cluster's.

Each setting is looked up separately. The first place that sets it decides: the topic's own name in the
file, the patterns that match it (longest first, then in the order of the file), the broker's topic
configuration, the cluster's value. At one place Kafka's name goes before Redpanda's.
`remote.storage.enable` stands for write and read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeVar

from tieringd.config.fields import AS_TOTAL, MAX_INT64, UNLIMITED
from tieringd.config.properties import TopicProperties
from tieringd.formats.topic_manifest import OriginalRetention
from tieringd.policies.local_hint import HintShape, StorageMode
from tieringd.policies.local_retention import (
    ClusterLocalTarget,
    LocalRetentionTarget,
    LocalSettings,
    LocalTarget,
    resolve_local_target,
)
from tieringd.policies.segment_merge import MergeLimits, MergeSettings
from tieringd.policies.total_retention import RetentionPace, TotalRetention
from tieringd.policies.trim_target import why_never_trimmed

_T = TypeVar("_T", bool, int, str)
_WILDCARDS = frozenset("*?[")
_MINUTE_MS = 60_000
_INTERNAL_PREFIX = "__"  # The prefix of Kafka's internal topics.
_PACE = RetentionPace(interval_ms=300_000, delete_delay_ms=3_600_000)
TARGET_MANIFEST_BYTES = 64 << 10
_NO_MERGING = MergeSettings(is_enabled=False)
DEFAULT_SEGMENT_BYTES = 1 << 30
"""Kafka's default for `segment.bytes`, for topics that do not set it."""
_NO_LIMIT = TotalRetention(limit_ms=None, limit_bytes=None)
_STORAGE_MODES = tuple(mode.value for mode in StorageMode)


@dataclass(frozen=True, slots=True)
class ClusterDefaults:
    """The settings of a topic that neither the file nor the broker configures."""

    enabled: bool
    """False turns tiering off for every topic."""
    remote_write: bool
    remote_read: bool
    local_target: ClusterLocalTarget
    is_kafka: bool = False
    """Whether the broker is Apache Kafka, which refuses to trim some topics."""
    total_ms: int | None = None
    """Default of total retention. None and -1 mean no limit."""
    total_bytes: int | None = None
    pace: RetentionPace = _PACE
    target_manifest_bytes: int = TARGET_MANIFEST_BYTES
    merging: MergeSettings = _NO_MERGING
    reuploads_compacted: bool = True


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """The resolved settings of one topic."""

    remote_write: bool
    remote_read: bool
    local_target: LocalTarget
    storage_mode: StorageMode = StorageMode.TIERED_CLOUD
    is_compacted: bool = False
    """Whether `cleanup.policy` contains compact."""
    is_compact_only: bool = False
    never_trimmed_because: str = ""
    """Why tieringd never trims its local log; empty if it may."""
    segment_bytes: int | None = None
    """The size at which the broker closes the topic's segments; None if the topic does not set it."""
    broker_retention_ms: int | None = None
    """How long the broker itself keeps records; None means no limit, or unknown."""
    broker_retention_bytes: int | None = None
    managed_retention: bool = False
    """Whether tieringd takes over the topic's retention from the broker."""
    total: TotalRetention = _NO_LIMIT
    """How much both tiers keep together."""
    retention_pace: RetentionPace = _PACE
    target_manifest_bytes: int = TARGET_MANIFEST_BYTES
    """A larger manifest spills its oldest segments."""
    merging: MergeSettings = _NO_MERGING
    reuploads_compacted: bool = False
    """Whether the compacted remainder of a segment replaces its archived records."""
    may_elect_uncleanly: bool = False
    """Whether the broker may elect a replica that is not in sync if no other replica is left."""
    remote_delete: bool = False
    """
    Whether deleting the topic deletes its objects.

    True only with write and read, never for a read replica.
    """
    problems: tuple[str, ...] = ()
    """Topic settings that cannot be read, contradict each other, or have no effect."""

    @property
    def local_retention_target(self) -> LocalRetentionTarget:
        """Return the target that local retention trims to."""
        return self.local_target.enforced

    @property
    def merge_limits(self) -> MergeLimits | None:
        """Return the size limits for merging its archived segments, or None if they are not merged."""
        if not self.merging.is_enabled or not self.remote_write or self.is_compacted:
            return None
        return self.merging.limits(segment_bytes=self.segment_bytes or DEFAULT_SEGMENT_BYTES)

    @property
    def hint_shape(self) -> HintShape:
        """Return the settings that the local retention hint depends on."""
        return HintShape(
            self.storage_mode, self.is_compacted, self.local_target.enforced, self.never_trimmed_because
        )


@dataclass(frozen=True, slots=True)
class _Settings:
    """The settings of one place; None for each that is not set. Limits keep their negative numbers."""

    remote_write: bool | None
    remote_read: bool | None
    local: LocalSettings
    storage_mode: str | None
    remote_delete: bool | None
    read_replica: str | None
    total_ms: int | None
    total_bytes: int | None
    cleanup_policy: str | None


def broker_limits(properties: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Return the broker's own retention of a topic, in milliseconds and in bytes; None is no limit."""
    return _retention(properties, "retention.ms"), _retention(properties, "retention.bytes")


def resolve_topic(
    name: str,
    *,
    overrides: Mapping[str, TopicProperties],
    broker_properties: Mapping[str, str],
    defaults: ClusterDefaults,
    original: OriginalRetention | None = None,
) -> TopicConfig:
    """
    Return the settings of the topic *name*.

    *original* is the retention that the broker had before tieringd managed it. It is the total retention
    then.
    """
    broker, problems = _broker_settings(name, broker_properties, original)
    places = [*(_file_settings(one) for one in _matching(name, overrides)), broker]
    write = _first([place.remote_write for place in places])
    read = _first([place.remote_read for place in places])
    remote_read = defaults.enabled and (defaults.remote_read if read is None else read)
    broker_retention_ms, broker_retention_bytes = broker_limits(broker_properties)
    policy = _first([place.cleanup_policy for place in places])
    # Kafka accepts an empty policy since 4.2; nothing is deleted under it.
    cleanup = "delete" if policy is None else policy
    total = TotalRetention(
        _limited([*(place.total_ms for place in places), defaults.total_ms]),
        _limited([*(place.total_bytes for place in places), defaults.total_bytes]),
        deletes="delete" in cleanup,
        is_read_remotely=remote_read,
    )
    local_target = resolve_local_target(
        [place.local for place in places],
        cluster=defaults.local_target,
        total_ms=total.limit_ms if total.deletes else None,
        total_bytes=total.limit_bytes if total.deletes else None,
    )
    is_compact_only = "compact" in cleanup and "delete" not in cleanup
    replica_of = _first([place.read_replica for place in places])
    wants_write = defaults.remote_write if write is None else write
    remote_write = defaults.enabled and wants_write and not replica_of
    never_trimmed_because = why_never_trimmed(
        is_kafka=defaults.is_kafka,
        is_compact_only=is_compact_only,
        is_policy_empty=not cleanup,
        is_internal=name.startswith(_INTERNAL_PREFIX),
        is_read_remotely=remote_read,
    )
    managed_retention = defaults.enabled and bool(
        _first([one.managed_retention for one in _matching(name, overrides)])
    )
    delete = _first([place.remote_delete for place in places])
    return TopicConfig(
        remote_write=remote_write,
        remote_read=remote_read,
        remote_delete=remote_write and remote_read and delete is not False,
        local_target=local_target,
        storage_mode=StorageMode(
            _first([place.storage_mode for place in places]) or StorageMode.TIERED_CLOUD
        ),
        is_compacted="compact" in cleanup,
        is_compact_only=is_compact_only,
        never_trimmed_because=never_trimmed_because,
        total=total,
        retention_pace=defaults.pace,
        target_manifest_bytes=defaults.target_manifest_bytes,
        merging=defaults.merging,
        reuploads_compacted=defaults.reuploads_compacted and remote_write and "compact" in cleanup,
        segment_bytes=_size(broker_properties, "segment.bytes"),
        managed_retention=managed_retention,
        broker_retention_ms=broker_retention_ms,
        broker_retention_bytes=broker_retention_bytes,
        may_elect_uncleanly=broker_properties.get("unclean.leader.election.enable") == "true",
        problems=(
            *problems,
            *_refused_write(name, replica_of if write else None),
            *_not_managed(
                name,
                is_wanted=managed_retention,
                because=never_trimmed_because if remote_write else "remote write is off for the topic",
                is_unlimited_by_us=original is not None
                and broker_retention_ms is None
                and broker_retention_bytes is None,
            ),
            *(f"topic {name}: {remark}" for remark in local_target.remarks),
        ),
    )


def keeps_deleted(name: str, overrides: Mapping[str, TopicProperties]) -> bool:
    """
    Say whether the file has `redpanda.remote.delete: false` for *name*.

    The broker's value does not matter.
    """
    return _first([one.remote_delete for one in _matching(name, overrides)]) is False


def _refused_write(topic: str, replica_of: str | None) -> tuple[str, ...]:
    if replica_of is None:
        return ()
    problem = (
        f"topic {topic}: redpanda.remote.readreplica={replica_of} refuses redpanda.remote.write, because a "
        "read replica is never uploaded; remove one of them"
    )
    return (problem,)


def _not_managed(topic: str, *, is_wanted: bool, because: str, is_unlimited_by_us: bool) -> tuple[str, ...]:
    """Say that a topic's retention is not managed: *because*, if it is wanted at all."""
    if is_unlimited_by_us and (because or not is_wanted):
        why = because or "tieringd.managed.retention is off"
        problem = (
            f"topic {topic}: tieringd has made the broker's retention unlimited, and does not manage it any "
            f"more ({why}): nothing deletes from the log now; run `tieringd topic release {topic}`"
        )
        return (problem,)
    if is_wanted and because:
        return (f"topic {topic}: tieringd.managed.retention has no effect: {because}",)
    return ()


def is_pattern(name: str) -> bool:
    """Say whether a name under `topics` is a pattern and not a topic's own name."""
    return not _WILDCARDS.isdisjoint(name)


def _matching(name: str, overrides: Mapping[str, TopicProperties]) -> list[TopicProperties]:
    """Return the file's entries for *name*, the most specific entry first."""
    patterns = [one for one in overrides if is_pattern(one) and fnmatchcase(name, one)]
    exact = [overrides[name]] if name in overrides else []
    return [*exact, *(overrides[one] for one in sorted(patterns, key=len, reverse=True))]


def _file_settings(properties: TopicProperties) -> _Settings:
    return _Settings(
        remote_write=_first([properties.remote_storage_enable, properties.remote_write]),
        remote_read=_first([properties.remote_storage_enable, properties.remote_read]),
        local=LocalSettings(
            "the file",
            kafka_ms=properties.local_retention_ms,
            kafka_bytes=properties.local_retention_bytes,
            redpanda_ms=properties.local_target_ms,
            redpanda_bytes=properties.local_target_bytes,
        ),
        storage_mode=properties.storage_mode,
        remote_delete=properties.remote_delete,
        read_replica=properties.read_replica,
        total_ms=_first([properties.retention_ms, _in_ms(properties.remote_log_retention_minutes)]),
        total_bytes=_first([properties.retention_bytes, properties.remote_log_retention_bytes]),
        cleanup_policy=properties.cleanup_policy,
    )


def _broker_settings(
    topic: str, properties: Mapping[str, str], original: OriginalRetention | None
) -> tuple[_Settings, tuple[str, ...]]:
    """
    Read the broker's topic configuration.

    A bad value is ignored and reported. It is not fatal, because tieringd did not write it.
    """
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

    def mode(name: str) -> str | None:
        text = properties.get(name, "").strip().lower()
        if not text or text in _STORAGE_MODES:
            return text or None
        problems.append(
            f"topic {topic}: the broker has {name}={properties[name]}, "
            f"which is not {' or '.join(_STORAGE_MODES)}"
        )
        return None

    if flag("redpanda.remote.recovery"):
        problems.append(
            f"topic {topic}: the broker has redpanda.remote.recovery=true, which only has an effect when a "
            "topic is created; use `tieringd recover` to restore topics"
        )
    kafka = flag("remote.storage.enable")
    original_ms, original_bytes = (
        (original.effective_ms, original.effective_bytes) if original else (None, None)
    )
    settings = _Settings(
        remote_write=_first([kafka, flag("redpanda.remote.write")]),
        remote_read=_first([kafka, flag("redpanda.remote.read")]),
        local=LocalSettings(
            "the broker",
            kafka_ms=limit("local.retention.ms", AS_TOTAL),
            kafka_bytes=limit("local.retention.bytes", AS_TOTAL),
            redpanda_ms=limit("retention.local.target.ms", UNLIMITED),
            redpanda_bytes=limit("retention.local.target.bytes", UNLIMITED),
        ),
        storage_mode=mode("storage.mode"),
        remote_delete=flag("redpanda.remote.delete"),
        read_replica=_bucket(properties.get("redpanda.remote.readreplica", "")),
        total_ms=_unless_managed(limit("retention.ms", UNLIMITED), original_ms),
        total_bytes=_unless_managed(limit("retention.bytes", UNLIMITED), original_bytes),
        cleanup_policy=properties.get("cleanup.policy"),
    )
    return settings, tuple(problems)


def _bucket(text: str) -> str | None:
    """Return the bucket of a read replica. Redpanda also writes an empty text or `false` for none."""
    text = text.strip()
    return None if text.lower() in ("", "false", "null") else text


def _retention(properties: Mapping[str, str], name: str) -> int | None:
    """Return one of the broker's own retention limits, which the broker has checked."""
    text = properties.get(name, "").strip()
    if "delete" not in properties.get("cleanup.policy", "delete") or not re.fullmatch(r"[0-9]{1,19}", text):
        return None
    return int(text)


def _size(properties: Mapping[str, str], name: str) -> int | None:
    """Return a size that the broker has checked."""
    text = properties.get(name, "").strip()
    return int(text) if re.fullmatch(r"[0-9]{1,19}", text) else None


def _unless_managed(found: int | None, original: int | None) -> int | None:
    """Return a limit of the broker. If it has none because tieringd manages it, return *original*."""
    return found if original is None or found not in {None, UNLIMITED} else original


def _limited(values: Sequence[int | None]) -> int | None:
    """Return the first limit that is set, with None for a limit of -1."""
    found = _first(values)
    return None if found == UNLIMITED else found


def _in_ms(minutes: int | None) -> int | None:
    return None if minutes is None else minutes * _MINUTE_MS


def _first(values: Sequence[_T | None]) -> _T | None:
    return next((value for value in values if value is not None), None)
