"""
Local retention: how far a partition's local log may be trimmed by time and by size.

A segment may go when it is closed, durable, and past the local target by time or by size. The walk starts
at the head and ends at the first segment that must stay, so a trim is always a prefix: a hole in the
middle of a log is silent in Kafka.

A broker's housekeeping applies the size limit first and the time limit from there, or each alone, and
uses the result that reaches further; a round later it continues with what is left. This walk ends where
those rounds end. The actual trim may end at another offset: `policies.trim_target` decides it.

`resolve_local_target` decides which local retention settings hold for a topic, and where each comes from.
Two families of names say how much stays on the broker. Kafka's `local.retention.*` is always enforced.
Redpanda's `retention.local.target.*`, and the cluster's defaults of that family, are enforced under
`retention_local_strict` only. Without it they are advice: the log may grow to total retention, and the
space manager uses the advice when it needs room. Each limit is resolved separately. The first place that
sets it decides, and at one place Kafka's name precedes Redpanda's. No local limit reaches past the
topic's total: what total retention deletes is deleted locally too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tieringd.model.local_log import LocalLog
from tieringd.model.manifest import PartitionManifest
from tieringd.model.segment import LocalSegment, RemoteSegment
from tieringd.policies.durability import WalkedSegment, is_comparable, walk_log
from tieringd.policies.retention_time import retention_time_ms

ACTIVE_STAYS = "the active segment always stays"
NO_ACTIVE_YET = "there is no active segment yet"

Kind: TypeAlias = Literal["ms", "bytes"]

_AS_TOTAL = -2
_KAFKA = "local.retention"
_REDPANDA = "retention.local.target"
_CLUSTER = "retention_local_target"

UNLIMITED = -1


@dataclass(frozen=True, slots=True)
class LocalRetentionTarget:
    """How much of a partition stays on the broker; None means no limit of that kind."""

    target_ms: int | None
    target_bytes: int | None


@dataclass(frozen=True, slots=True)
class TrimCandidate:
    """A local segment that may be trimmed, and the stored segments that cover it."""

    local: LocalSegment
    pieces: tuple[RemoteSegment, ...]
    """Ascending and contiguous; together they cover the segment."""

    @property
    def next_offset(self) -> int:
        """Return the first offset after the segment."""
        assert self.local.next_offset is not None, "only closed segments are trimmed"
        return self.local.next_offset

    @property
    def has_checksums(self) -> bool:
        """Say whether the pieces' checksums cover exactly the segment's bytes."""
        return is_comparable(self.local, self.pieces)


@dataclass(frozen=True, slots=True)
class TrimPlan:
    """The segments that may be trimmed, oldest first, and why the next one stays."""

    candidates: tuple[TrimCandidate, ...]
    start_offset: int
    """The first offset that stays: where the local log is allowed to begin."""
    kept_because: str


def plan_trim(
    log: LocalLog,
    manifest: PartitionManifest,
    target: LocalRetentionTarget,
    *,
    log_start_offset: int,
    now_ms: int,
) -> TrimPlan:
    """
    Choose the closed segments at the head of *log* that may be trimmed.

    The broker is already deleting segments below *log_start_offset*: they count as gone and are not
    listed again. By size, a segment is trimmed only while at least `target_bytes` remain, as in Kafka's
    own local retention.
    """
    log_bytes = log.size_bytes

    def why_kept(one: WalkedSegment) -> str:
        past_time = target.target_ms is not None and _newest_ms(one.pieces) <= now_ms - target.target_ms
        if past_time or _is_past_size(target, left_bytes=log_bytes - one.end_bytes):
            return ""
        return f"segment {one.local.base_offset} is within the local retention target"

    return trim_head(log, manifest, why_kept, log_start_offset=log_start_offset)


def trim_head(
    log: LocalLog,
    manifest: PartitionManifest,
    why_kept: Callable[[WalkedSegment], str],
    *,
    log_start_offset: int,
) -> TrimPlan:
    """
    Return the durable closed segments at the head of *log*, up to the first that stays.

    *why_kept* says why a durable segment stays; empty when it may be trimmed.
    """
    start_offset = log_start_offset
    candidates: list[TrimCandidate] = []
    for one in walk_log(log, manifest, log_start_offset=log_start_offset):
        start_offset = max(start_offset, one.local.base_offset)
        if one.local.next_offset is None:
            return TrimPlan(tuple(candidates), start_offset, ACTIVE_STAYS)
        reason = one.not_durable_because or why_kept(one)
        if reason:
            return TrimPlan(tuple(candidates), start_offset, reason)
        candidates.append(TrimCandidate(one.local, one.pieces))
        start_offset = one.local.next_offset
    return TrimPlan(tuple(candidates), start_offset, NO_ACTIVE_YET)


def trim_due_ms(
    log: LocalLog, manifest: PartitionManifest, target: LocalRetentionTarget, *, log_start_offset: int
) -> float:
    """
    Return the time from which `plan_trim` names a segment, if nothing but the time changes.

    Infinity when it never does.
    """
    first = next(walk_log(log, manifest, log_start_offset=log_start_offset), None)
    if first is None or first.local.next_offset is None or first.not_durable_because:
        return math.inf
    if _is_past_size(target, left_bytes=log.size_bytes - first.end_bytes):
        return -math.inf
    return math.inf if target.target_ms is None else _newest_ms(first.pieces) + target.target_ms


def _is_past_size(target: LocalRetentionTarget, *, left_bytes: int) -> bool:
    return target.target_bytes is not None and left_bytes >= target.target_bytes


def _newest_ms(pieces: Sequence[RemoteSegment]) -> int:
    return max(retention_time_ms(piece) for piece in pieces)


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """The settings of one place; None where it sets nothing. Limits keep their negative numbers."""

    place: str
    """The operator's name for it: `the file`, `the broker`."""
    kafka_ms: int | None = None
    """`local.retention.ms`: -1 means no limit, -2 the same as total retention."""
    kafka_bytes: int | None = None
    redpanda_ms: int | None = None
    """
    `retention.local.target.ms`: a value of zero or below means no limit, and overrides the cluster's default.
    """
    redpanda_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ClusterLocalTarget:
    """The target of topics for which no place sets one; None means no limit of that kind."""

    target_ms: int | None
    target_bytes: int | None
    is_strict: bool
    """`retention_local_strict`."""


@dataclass(frozen=True, slots=True)
class LocalLimit:
    """One of a topic's two local limits."""

    enforced: int | None
    """The limit that local retention trims to; None means no limit."""
    advised: int | None
    """
    The limit that the space manager uses when it needs room; equals `enforced` where the setting is enforced.
    """
    source: str
    """The property that decides, and where it is set."""
    is_explicit: bool
    """Whether the topic has a setting of its own: the space manager spares it longer."""


@dataclass(frozen=True, slots=True)
class LocalTarget:
    """The local limits that hold for a topic."""

    ms: LocalLimit
    bytes: LocalLimit
    remarks: tuple[str, ...] = ()
    """Settings that have no effect, or another one than they seem to have."""

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
    Return the local target of a topic; *places* are ordered with the most specific first.

    *total_ms* and *total_bytes* are the topic's total retention; None means no limit.
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
    """Return which settings of the deciding place have no effect, or another one than they seem to have."""
    name, shadowed = f"{_KAFKA}.{kind}", f"{_REDPANDA}.{kind}"
    found = []
    if redpanda is not None:
        found.append(
            f"{name} and {shadowed} are both set in {place}: {name} takes precedence; remove {shadowed}"
        )
    if total is not None and kafka != _AS_TOTAL and not 0 <= kafka <= total:
        found.append(f"{name}={kafka} in {place} is more than retention.{kind}={total}, which also applies")
    return found
