"""
The local retention hint: `allowed_local_start_offset`, and when it is evaluated again.

The hint is the offset at which local retention lets a partition's log begin. It is stored with the
partition's manifest, so the next leader continues from it, and only the leader's archiver writes it. No
hint means that local retention does not limit trims: all durable segments may go. That is the case where
the storage mode is `cloud`, and where the topic is compacted.

| storage mode | compacted | stored hint | step |
|---|---|---|---|
| tiered_cloud | no | none | evaluate and publish |
| tiered_cloud | no | some | evaluate at the normal cadence |
| tiered_cloud | yes | some | publish that there is none |
| cloud | either | some | publish that there is none |
| tiered_cloud | yes | none | nothing |
| cloud | either | none | nothing |

An evaluation is due after a segment's worth of bytes since the last one, after 60 s, after a change of
configuration, and at the moment at which a segment is known to fall out of local retention. An evaluation
that finds the stored value publishes nothing. One that finds a lower value publishes it: a hint may move
down, as after a limit was raised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum, StrEnum

from tieringd.model.local_log import LocalLog
from tieringd.model.manifest import PartitionManifest
from tieringd.policies.local_retention import LocalRetentionTarget, plan_trim

EVALUATION_INTERVAL_MS = 60_000


class StorageMode(StrEnum):
    """The topic property `storage.mode`."""

    TIERED_CLOUD = "tiered_cloud"
    """The local log holds what local retention keeps."""
    CLOUD = "cloud"
    """The local log holds what is not durable yet."""


class HintStep(Enum):
    """The step to take for a partition's hint."""

    EVALUATE = "evaluate"
    CLEAR = "clear"
    LEAVE = "leave"


@dataclass(frozen=True, slots=True)
class HintShape:
    """The configuration that a hint depends on; a hint made with another one is out of date."""

    storage_mode: StorageMode
    is_compacted: bool
    """Whether `cleanup.policy` includes compact, alone or with delete."""
    target: LocalRetentionTarget
    """The enforced target, without mere advice."""
    never_trimmed_because: str = ""
    """Why the log is never trimmed at all; empty when it may be."""

    @property
    def has_hint(self) -> bool:
        """Say whether local retention limits the trims of this partition."""
        return not self.why_no_say

    @property
    def why_no_say(self) -> str:
        """Return why local retention does not limit trims; empty when it does."""
        if self.never_trimmed_because:
            return self.never_trimmed_because
        if self.storage_mode is not StorageMode.TIERED_CLOUD:
            return f"storage.mode is {self.storage_mode}"
        return "the topic is compacted" if self.is_compacted else ""


@dataclass(frozen=True, slots=True)
class HintMemory:
    """What the partition's leader remembers of its last evaluation; lost with the leadership."""

    shape: HintShape
    evaluated_at_ms: int
    bytes_since: int = 0
    """Bytes appended since then."""

    def noted(self, appended_bytes: int) -> HintMemory:
        """Return this memory with more bytes appended."""
        return replace(self, bytes_since=self.bytes_since + appended_bytes)


@dataclass(frozen=True, slots=True)
class HintPlan:
    """What to publish, if anything, and what to remember."""

    step: HintStep
    offset: int | None
    """The hint to be stored from here on."""
    is_change: bool
    """Whether it differs from the stored hint, and has to be published."""
    memory: HintMemory | None
    """
    To be remembered once *offset* is published, or at once where there is nothing to publish.

    After a failed publish the old memory stays, so the next plan is the same again.
    """
    because: str
    trims_to: int = 0
    """Exclusive end of the trim that follows; 0 where there is nothing to trim."""

    def applied_to(self, manifest: PartitionManifest) -> PartitionManifest:
        """Return *manifest* with this hint."""
        return manifest.with_hint(self.offset, trims_to=self.trims_to) if self.is_change else manifest


def plan_hint(
    log: LocalLog,
    manifest: PartitionManifest,
    shape: HintShape,
    memory: HintMemory | None,
    *,
    stored: int | None,
    segment_bytes: int,
    log_start_offset: int,
    now_ms: int,
    due_ms: float = math.inf,
) -> HintPlan:
    """
    Decide about the hint of one partition; evaluate it if that is due.

    *stored* is the published hint. The new hint is a segment's base offset: the highest one that neither
    the broker's housekeeping nor durability forbids. A first hint that allows no trim is not worth a
    commit: without a hint nothing is trimmed either (`TrimWishes.awaits_hint`). *due_ms* is the time from
    which an evaluation would find another hint.
    """
    step, because = next_hint_step(
        shape, memory, stored=stored, segment_bytes=segment_bytes, now_ms=now_ms, due_ms=due_ms
    )
    if step is HintStep.LEAVE:
        remembered = memory if shape.has_hint else None
        return HintPlan(step, stored, is_change=False, memory=remembered, because=because)
    if step is HintStep.CLEAR:
        return HintPlan(step, None, is_change=True, memory=None, because=because)
    found = plan_trim(log, manifest, shape.target, log_start_offset=log_start_offset, now_ms=now_ms)
    offset = None if stored is None and not found.candidates else found.start_offset
    return HintPlan(
        step,
        offset,
        is_change=offset != stored,
        memory=HintMemory(shape, evaluated_at_ms=now_ms),
        because=f"{because}; {found.kept_because}",
        trims_to=found.start_offset if found.candidates else 0,
    )


def next_hint_step(
    shape: HintShape,
    memory: HintMemory | None,
    *,
    stored: int | None,
    segment_bytes: int,
    now_ms: int,
    due_ms: float = math.inf,
) -> tuple[HintStep, str]:
    """Return the step to take for a hint, and why."""
    if not shape.has_hint:
        step = HintStep.LEAVE if stored is None else HintStep.CLEAR
        return step, f"{shape.why_no_say}: local retention does not apply"
    due_because = _why_due(shape, memory, stored=stored, segment_bytes=segment_bytes, now_ms=now_ms)
    if due_because:
        return HintStep.EVALUATE, due_because
    if due_ms <= now_ms:
        return HintStep.EVALUATE, "a segment is past the limits of local retention"
    return HintStep.LEAVE, "the hint was evaluated recently"


def hint_due_ms(memory: HintMemory) -> int:
    """Return the time from which an evaluation is due, if nothing but the time changes."""
    return memory.evaluated_at_ms + EVALUATION_INTERVAL_MS


def _why_due(
    shape: HintShape, memory: HintMemory | None, *, stored: int | None, segment_bytes: int, now_ms: int
) -> str:
    if stored is None:
        return "there is no hint yet"
    if memory is None:
        return "this leader has not evaluated the hint yet"
    if shape != memory.shape:
        return "the configuration has changed"
    if memory.bytes_since >= segment_bytes:
        return f"{memory.bytes_since} bytes were appended, a segment or more"
    # A clock that was set back must not delay the next evaluation by as much.
    if not memory.evaluated_at_ms <= now_ms < hint_due_ms(memory):
        return f"{EVALUATION_INTERVAL_MS // 1000} seconds have passed"
    return ""
