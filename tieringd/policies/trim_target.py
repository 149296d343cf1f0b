"""
The trim target: the offset before which a partition's local log is trimmed.

It is the smaller of the durable offset and the hint of local retention. Without a hint it is the durable
offset: local retention does not limit the trim then. Where local retention applies, but its first hint is
still to be published, it allows no trim: a missing hint would let everything go.

The space manager may ask for more by a `cloud_gc` offset. That raises the target, never past what is
durable. A request serves one trim: a later one would act on pressure that is gone.

A share group (KIP-932) reads from the broker alone, which skips what was trimmed. So a segment that a share
group still needs stays on disk, for a limited time after its upload. A request of the space manager goes
first: a full disk stops the broker.

tieringd never trims some logs, whatever is durable. `why_never_trimmed` names those.
"""

from __future__ import annotations

from dataclasses import dataclass

from tieringd.model.local_log import LocalLog
from tieringd.model.manifest import PartitionManifest
from tieringd.policies.durability import WalkedSegment, durable_end
from tieringd.policies.local_retention import TrimPlan, trim_head


@dataclass(frozen=True, slots=True)
class ShareGroupHold:
    """The records of a partition that share groups still need."""

    offset: int
    """The first of them."""
    because: str
    kept_from_ms: int
    """Segments that were uploaded before this time are not held any more."""

    def holds(self, one: WalkedSegment) -> bool:
        """Say whether a durable closed segment is held."""
        assert one.local.next_offset is not None, "only closed segments are trimmed"
        newest_ms = max(piece.uploaded_at_ms for piece in one.pieces)
        return one.local.next_offset > self.offset and newest_ms >= self.kept_from_ms


@dataclass(frozen=True, slots=True)
class TrimObstacle:
    """
    A reason why a partition's local log, or the end of it, is not trimmed.

    The space manager does not count on what lies behind it. Some obstacles end only when another trim gets
    past them, so it asks for that trim again while it needs room.
    """

    because: str
    from_offset: int = 0
    """Nothing at or past it is trimmed."""
    retry_offset: int = 0
    """A trim to this offset shows whether the obstacle is still there; 0 where no trim is needed for that."""


@dataclass(frozen=True, slots=True)
class TrimWishes:
    """The requests for a trim of a partition's local log, and what forbids it."""

    hint: int | None = None
    """The published hint."""
    awaits_hint: bool = False
    """Whether a hint is to be published if there is none: `HintShape.has_hint`."""
    cloud_gc_offset: int | None = None
    """The offset that the space manager asked for."""
    never_because: str = ""
    """The result of `why_never_trimmed`."""
    share_group_hold: ShareGroupHold | None = None
    """The records that share groups still need; None where they need none."""


@dataclass(frozen=True, slots=True)
class TrimTarget:
    """How far one partition may be trimmed now, and what limits it."""

    offset: int
    """The first offset that stays. Never below the current log start offset."""
    spends_cloud_gc: bool
    """Whether a `cloud_gc` offset was considered: it must be cleared once this target was acted on."""
    because: str


def choose_trim_target(wishes: TrimWishes, *, durable_offset: int, log_start_offset: int) -> TrimTarget:
    """Choose the trim target of a log that is durable below *durable_offset*."""
    spends = wishes.cloud_gc_offset is not None
    if wishes.never_because:
        return TrimTarget(log_start_offset, spends, wishes.never_because)
    wanted, because = _wanted(wishes)
    if wanted is None or wanted > durable_offset:
        wanted = durable_offset
        because = f"{because}, but only offsets below {durable_offset} are durable"
    return TrimTarget(max(log_start_offset, wanted), spends, because)


def _wanted(wishes: TrimWishes) -> tuple[int | None, str]:
    """Return the wanted log start, durable or not, and the reason; None for no limit."""
    cloud_gc_offset = wishes.cloud_gc_offset
    if wishes.hint is not None:
        wanted, because = wishes.hint, f"local retention keeps offset {wishes.hint} and later"
    elif wishes.awaits_hint:
        wanted, because = 0, "the local retention hint is not published yet"
    else:
        return None, "there is no local retention hint"
    if cloud_gc_offset is not None and cloud_gc_offset > wanted:
        return cloud_gc_offset, f"the space manager requested a trim to offset {cloud_gc_offset}"
    return wanted, because


def why_never_trimmed(
    *,
    is_kafka: bool,
    is_compact_only: bool,
    is_policy_empty: bool,
    is_internal: bool,
    is_read_remotely: bool,
) -> str:
    """
    Say why tieringd never trims the local log of a topic; empty when it may.

    Trimmed records are read from the archive. A topic that is only written there keeps its log as long as
    the broker's own retention says. Kafka refuses DeleteRecords for compact-only and internal topics;
    Redpanda does not. An empty `cleanup.policy` keeps everything in Kafka's log, and a broker that asks for
    `delete` in the policy refuses DeleteRecords there as well.
    """
    if not is_read_remotely:
        return "remote read is off for the topic: only the broker's own retention trims it"
    if is_kafka and is_compact_only:
        return "Kafka refuses to delete records of a topic whose cleanup.policy is only compact"
    if is_kafka and is_policy_empty:
        return "Kafka may refuse to delete records of a topic whose cleanup.policy is empty"
    if is_kafka and is_internal:
        return "Kafka refuses to delete records of an internal topic"
    return ""


def plan_trim_to_target(
    log: LocalLog, manifest: PartitionManifest, wishes: TrimWishes, *, log_start_offset: int
) -> tuple[TrimTarget, TrimPlan]:
    """
    Choose the target from what is on disk and in the archive, and the whole segments below it.

    The broker is already deleting segments below *log_start_offset*; they are not listed again.
    """
    up_to, _ = _wanted(wishes)
    durable = durable_end(log, manifest, log_start_offset=log_start_offset, up_to=up_to)
    target = choose_trim_target(wishes, durable_offset=durable.offset, log_start_offset=log_start_offset)
    if wishes.never_because:
        return target, TrimPlan((), log_start_offset, wishes.never_because)

    hold = wishes.share_group_hold

    def why_kept(one: WalkedSegment) -> str:
        if one.local.next_offset is None:
            return ""
        if one.local.next_offset > target.offset:
            return f"segment {one.local.base_offset} reaches past offset {target.offset}: {target.because}"
        if hold is not None and one.local.next_offset > (wishes.cloud_gc_offset or 0) and hold.holds(one):
            return f"segment {one.local.base_offset} is kept on disk: {hold.because}"
        return ""

    return target, trim_head(log, manifest, why_kept, log_start_offset=log_start_offset)
