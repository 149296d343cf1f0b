"""
The local retention hint: `allowed_local_start_offset`, and when it is looked at again.

The hint is the offset at which local retention lets a partition's log begin. It is stored with the
partition's manifest, so the next leader goes on from it, and only the leader's reconciler writes
it. No hint means that local retention has no say: all that is durable may go. That is so where
the storage mode is `cloud`, and where the topic is compacted.

| storage mode | compacted | stored hint | step |
|---|---|---|---|
| tiered_cloud | no | none | evaluate and publish |
| tiered_cloud | no | some | evaluate at the normal cadence |
| tiered_cloud | yes | some | publish that there is none |
| cloud | either | some | publish that there is none |
| tiered_cloud | yes | none | nothing |
| cloud | either | none | nothing |

The cadence: a segment's worth of bytes since the last evaluation, or 60 s, or another configuration;
and the moment at which a segment is known to fall out of local retention.
An evaluation that finds what is stored already publishes nothing. One that finds less than what is
stored publishes that: a hint may move down, as after a limit was raised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

from tieringd.policies.local_retention import plan_trim

if TYPE_CHECKING:
    from tieringd.model.local_log import LocalLog
    from tieringd.model.manifest import PartitionManifest
    from tieringd.policies.local_retention import LocalRetentionTarget

EVALUATION_INTERVAL_MS = 60_000


class StorageMode(StrEnum):
    """The topic property `storage.mode`."""

    TIERED_CLOUD = "tiered_cloud"
    """The local log holds what local retention says."""
    CLOUD = "cloud"
    """The local log holds what is not durable yet."""


class HintStep(Enum):
    """What is to be done about a partition's hint."""

    EVALUATE = "evaluate"
    CLEAR = "clear"
    LEAVE = "leave"


@dataclass(frozen=True, slots=True)
class HintShape:
    """The configuration that a hint rests on; another one makes it out of date."""

    storage_mode: StorageMode
    is_compacted: bool
    """Whether `cleanup.policy` has compact in it, alone or with delete."""
    target: LocalRetentionTarget
    """What is enforced, and not what is only advice."""
    never_trimmed_because: str = ""
    """Why nobody trims the log at all; empty when somebody may."""

    @property
    def has_hint(self) -> bool:
        """Say whether local retention has a say at all."""
        return not self.why_no_say

    @property
    def why_no_say(self) -> str:
        """Return why local retention has no say; empty when it has."""
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
    """What was appended since then."""

    def noted(self, appended_bytes: int) -> HintMemory:
        """Return this memory with more bytes appended."""
        return replace(self, bytes_since=self.bytes_since + appended_bytes)


@dataclass(frozen=True, slots=True)
class HintPlan:
    """What to publish, if anything, and what to remember."""

    step: HintStep
    offset: int | None
    """What is to be stored from here on."""
    is_change: bool
    """Whether it is something else than what is stored, and has to be published."""
    memory: HintMemory | None
    """
    To be remembered once *offset* is published, or at once where there is nothing to publish.

    After a publish that failed the old memory stays, and so the next plan is this one again.
    """
    because: str
    trims_to: int = 0
    """Where the trim that follows ends; 0 where there is nothing to trim."""


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
    Decide about the hint of one partition, of which *stored* is published; evaluate it if that is due.

    What is found lies on a segment's base: it is the highest one that neither the broker's
    housekeeping nor durability forbids. A first hint that lets nothing go is not worth a commit:
    without one nothing goes either (`TrimWishes.awaits_hint`). *due_ms* is from when on an evaluation
    would find another one.
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
    """Return what is to be done about a hint, and why."""
    if not shape.has_hint:
        step = HintStep.LEAVE if stored is None else HintStep.CLEAR
        return step, f"{shape.why_no_say}: local retention has no say"
    due_because = _why_due(shape, memory, stored=stored, segment_bytes=segment_bytes, now_ms=now_ms)
    if due_because:
        return HintStep.EVALUATE, due_because
    if due_ms <= now_ms:
        return HintStep.EVALUATE, "a segment is past local retention"
    return HintStep.LEAVE, "the hint was evaluated a short while ago"


def hint_due_ms(memory: HintMemory) -> int:
    """Return from when on an evaluation is due, if nothing but the time changes."""
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
    # A clock that was set back must not hold the next evaluation up for as long.
    if not memory.evaluated_at_ms <= now_ms < hint_due_ms(memory):
        return f"{EVALUATION_INTERVAL_MS // 1000} seconds have passed"
    return ""
