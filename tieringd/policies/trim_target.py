"""
The trim target: the offset before which a partition's local log is let go.

It is the smaller of the durable offset and the hint of local retention. Without a hint it is the
durable offset: local retention has no say then. Where it has a say and its first hint is still to be
published, nothing goes on its account: a missing hint would let everything go.

The space manager may ask for more by a `cloud_gc` offset. That raises the target, never past what is
durable. A request serves one trim: a later one would act on pressure that is gone.

Some logs are never trimmed by us, whatever is durable. Those are named here too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tieringd.policies.durability import durable_end, why_not_durable
from tieringd.policies.local_retention import ACTIVE_STAYS, NO_ACTIVE_YET, TrimCandidate, TrimPlan

if TYPE_CHECKING:
    from tieringd.model.local_log import LocalLog
    from tieringd.model.manifest import PartitionManifest


@dataclass(frozen=True, slots=True)
class TrimWishes:
    """Who wants how much of a partition's local log to go."""

    hint: int | None = None
    """The hint that is published."""
    awaits_hint: bool = False
    """Whether a hint is to come, should there be none: that is `HintShape.has_hint`."""
    cloud_gc_offset: int | None = None
    """What the space manager asked for."""
    never_because: str = ""
    """The answer of `why_never_trimmed`."""


@dataclass(frozen=True, slots=True)
class TrimTarget:
    """How far one partition may be trimmed now, and what holds it there."""

    offset: int
    """The first offset that stays. Never below the log's start, which is where it stands already."""
    spends_cloud_gc: bool
    """Whether a `cloud_gc` offset was looked at: it is to be cleared once this target was acted on."""
    because: str


def choose_trim_target(wishes: TrimWishes, *, durable_offset: int, log_start_offset: int) -> TrimTarget:
    """Choose the trim target of a log of which what is below *durable_offset* is durable."""
    spends = wishes.cloud_gc_offset is not None
    if wishes.never_because:
        return TrimTarget(log_start_offset, spends, wishes.never_because)
    wanted, because = _wanted(wishes)
    if wanted is None or wanted > durable_offset:
        wanted = durable_offset
        because = f"{because}, and only what is below offset {durable_offset} is durable"
    return TrimTarget(max(log_start_offset, wanted), spends, because)


def _wanted(wishes: TrimWishes) -> tuple[int | None, str]:
    """Return how far the log is to be trimmed, durable or not, and who says so; None for all of it."""
    cloud_gc_offset = wishes.cloud_gc_offset
    if wishes.hint is not None:
        wanted, because = wishes.hint, f"local retention keeps offset {wishes.hint} and what follows"
    elif wishes.awaits_hint:
        wanted, because = 0, "the local retention hint is not published yet"
    else:
        return None, "there is no local retention hint"
    if cloud_gc_offset is not None and cloud_gc_offset > wanted:
        return cloud_gc_offset, f"the space manager asked for a trim to offset {cloud_gc_offset}"
    return wanted, because


def why_never_trimmed(
    *, is_kafka: bool, is_compact_only: bool, is_internal: bool, is_read_remotely: bool
) -> str:
    """
    Say why the local log of a topic is never trimmed by us; empty when it may be.

    What is trimmed is read from the archive. A topic that is only written there keeps its log for
    as long as the broker's own retention says. Kafka refuses DeleteRecords for compact-only and
    internal topics; Redpanda does not.
    """
    if not is_read_remotely:
        return "remote read is off for the topic: only the broker's own retention trims it"
    if is_kafka and is_compact_only:
        return "Kafka refuses to delete records of a topic whose cleanup.policy is only compact"
    if is_kafka and is_internal:
        return "Kafka refuses to delete records of an internal topic"
    return ""


def plan_trim_to_target(
    log: LocalLog, manifest: PartitionManifest, wishes: TrimWishes, *, log_start_offset: int
) -> tuple[TrimTarget, TrimPlan]:
    """
    Choose the target from what is on disk and in the archive, and the whole segments below it.

    Segments below *log_start_offset* are on their way out already and are not named again.
    """
    up_to, _ = _wanted(wishes)
    durable = durable_end(log, manifest, log_start_offset=log_start_offset, up_to=up_to)
    target = choose_trim_target(wishes, durable_offset=durable.offset, log_start_offset=log_start_offset)
    if wishes.never_because:
        return target, TrimPlan((), log_start_offset, wishes.never_because)
    return target, _segments_below(log, manifest, target, log_start_offset=log_start_offset)


def _segments_below(
    log: LocalLog, manifest: PartitionManifest, target: TrimTarget, *, log_start_offset: int
) -> TrimPlan:
    start_offset = log_start_offset
    candidates: list[TrimCandidate] = []
    for segment in log.segments:
        if segment.next_offset is not None and segment.next_offset <= log_start_offset:
            continue
        start_offset = max(start_offset, segment.base_offset)
        if segment.next_offset is None:
            return TrimPlan(tuple(candidates), start_offset, ACTIVE_STAYS)
        pieces = manifest.segments.overlapping(segment.base_offset, segment.next_offset)
        reason = why_not_durable(segment, pieces, log, manifest)
        if not reason and segment.next_offset > target.offset:
            reason = f"segment {segment.base_offset} reaches past offset {target.offset}: {target.because}"
        if reason:
            return TrimPlan(tuple(candidates), start_offset, reason)
        candidates.append(TrimCandidate(segment, pieces))
        start_offset = segment.next_offset
    return TrimPlan(tuple(candidates), start_offset, NO_ACTIVE_YET)
