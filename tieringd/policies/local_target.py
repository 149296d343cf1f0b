"""
The local target: what of the local retention settings holds for a topic, and where it comes from.

Two families of names say how much stays on the broker. Kafka's `local.retention.*` is always
enforced. Redpanda's `retention.local.target.*`, and the cluster's defaults of that family, are
enforced under `retention_local_strict` only. Without it they are advice: the log may grow to total
retention, and the space manager goes by the advice when it needs room.

Each limit is looked up by itself; the first place that sets it decides, and at one place Kafka's name
goes before Redpanda's. No local limit reaches past the topic's total: what is gone in all is gone here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from tieringd.policies.local_retention import LocalRetentionTarget

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Kind: TypeAlias = Literal["ms", "bytes"]

_AS_TOTAL = -2
_KAFKA = "local.retention"
_REDPANDA = "retention.local.target"
_CLUSTER = "retention_local_target"


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """What one place sets; None where it says nothing. Limits keep their negative numbers."""

    place: str
    """As an operator would call it: `the file`, `the broker`."""
    kafka_ms: int | None = None
    """`local.retention.ms`: -1 is without limit, -2 as total retention."""
    kafka_bytes: int | None = None
    redpanda_ms: int | None = None
    """`retention.local.target.ms`: nothing above zero switches it off, the cluster's default as well."""
    redpanda_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ClusterLocalTarget:
    """What holds where no place says anything of a topic; None means no limit of that kind."""

    target_ms: int | None
    target_bytes: int | None
    is_strict: bool
    """`retention_local_strict`."""


@dataclass(frozen=True, slots=True)
class LocalLimit:
    """One of a topic's two local limits."""

    enforced: int | None
    """What local retention trims to; None means no limit."""
    advised: int | None
    """What the space manager goes by when it needs room; the same, where the setting is enforced."""
    source: str
    """The property that decides, and where it is set."""
    is_explicit: bool
    """Whether the topic has a setting of its own: the space manager spares it longer."""


@dataclass(frozen=True, slots=True)
class LocalTarget:
    """What holds for a topic's local log."""

    ms: LocalLimit
    bytes: LocalLimit
    remarks: tuple[str, ...] = ()
    """What is set and has no effect, or another than it seems to."""

    @property
    def enforced(self) -> LocalRetentionTarget:
        """Return the target that local retention trims to."""
        return LocalRetentionTarget(target_ms=self.ms.enforced, target_bytes=self.bytes.enforced)

    @property
    def advised(self) -> LocalRetentionTarget:
        """Return the target that the space manager trims to when it needs room."""
        return LocalRetentionTarget(target_ms=self.ms.advised, target_bytes=self.bytes.advised)

    @property
    def is_explicit(self) -> bool:
        """Say whether the topic has a local setting of its own, of either kind."""
        return self.ms.is_explicit or self.bytes.is_explicit


def resolve_local_target(
    places: Sequence[LocalSettings],
    *,
    cluster: ClusterLocalTarget,
    total_ms: int | None,
    total_bytes: int | None,
) -> LocalTarget:
    """
    Return the local target of a topic whose places are given with the most specific first.

    *total_ms* and *total_bytes* are the topic's total retention; None is without limit.
    """
    ms, ms_remarks = _resolve(
        "ms",
        [(one.place, one.kafka_ms, one.redpanda_ms) for one in places],
        default=cluster.target_ms,
        total=total_ms,
        is_strict=cluster.is_strict,
    )
    size, size_remarks = _resolve(
        "bytes",
        [(one.place, one.kafka_bytes, one.redpanda_bytes) for one in places],
        default=cluster.target_bytes,
        total=total_bytes,
        is_strict=cluster.is_strict,
    )
    return LocalTarget(ms, size, (*ms_remarks, *size_remarks))


def _resolve(
    kind: Kind,
    places: Iterable[tuple[str, int | None, int | None]],
    *,
    default: int | None,
    total: int | None,
    is_strict: bool,
) -> tuple[LocalLimit, list[str]]:
    for place, kafka, redpanda in places:
        if kafka is not None:
            limit = _smaller(total, kafka if kafka >= 0 else None)
            source = f"{_KAFKA}.{kind}={kafka} in {place}"
            remarks = _remarks(kind, place, kafka, redpanda, total=total)
            return LocalLimit(limit, limit, source, is_explicit=kafka != _AS_TOTAL), remarks
        if redpanda is not None:
            advised = _smaller(total, redpanda if redpanda > 0 else None)
            source = f"{_REDPANDA}.{kind}={redpanda} in {place}"
            return LocalLimit(advised if is_strict else total, advised, source, is_explicit=True), []
    advised = _smaller(total, default)
    source = f"{_CLUSTER}_{kind}_default={'null' if default is None else default}"
    return LocalLimit(advised if is_strict else total, advised, source, is_explicit=False), []


def _smaller(total: int | None, local: int | None) -> int | None:
    return min((limit for limit in (total, local) if limit is not None), default=None)


def _remarks(kind: Kind, place: str, kafka: int, redpanda: int | None, *, total: int | None) -> list[str]:
    """Return what of the place that decides has no effect, or another than it seems to."""
    name, shadowed = f"{_KAFKA}.{kind}", f"{_REDPANDA}.{kind}"
    found = []
    if redpanda is not None:
        found.append(f"{name} and {shadowed} are both set in {place}: {name} holds; remove {shadowed}")
    if total is not None and kafka != _AS_TOTAL and not 0 <= kafka <= total:
        found.append(f"{name}={kafka} in {place} is more than retention.{kind}={total}, which holds as well")
    return found
