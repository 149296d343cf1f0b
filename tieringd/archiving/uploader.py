"""
The uploader: copies a plan's slices concurrently, and returns which of them may be committed.

It decides nothing about the manifest. No manifest names what it stores until the archiver commits it, so
an upload that fails, or that is never committed, leaves an object that no reader sees.

`Quarantine` remembers which segments are corrupt on the local disk. Their partition is neither uploaded
nor trimmed from such a segment on. A segment is known by its identity: a changed file is read again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

from tieringd.archiving.partition_logger import PartitionLogger
from tieringd.archiving.remote_log import RemoteLog
from tieringd.archiving.segment_copier import CopiedSegment, CopyRequest
from tieringd.archiving.upload_queue import Urgency
from tieringd.errors import BrokerUnavailable, CorruptDataError, TieringError
from tieringd.metrics import Metrics
from tieringd.model.local_log import Hole, LocalLog
from tieringd.model.partition import Leadership, TopicIdPartition
from tieringd.model.segment import LocalSegment, SegmentSlice
from tieringd.policies.upload_plan import admissible_prefix


@dataclass(frozen=True, slots=True)
class _Held:
    base_offset: int
    """The base offset of the segment that cannot be copied."""
    files: frozenset[tuple[int, tuple[int, int, int]]]
    """The base offsets and identities of that segment and of the damaged one."""
    fault: str


class Quarantine(PartitionLogger):
    """Hold one partition back at its first corrupt segment. Owned by the partition's archiver."""

    __slots__ = ("_held", "_metrics", "_partition", "_topic")

    def __init__(self, partition: TopicIdPartition, *, metrics: Metrics) -> None:
        self._held: _Held | None = None
        self._topic = partition.topic
        self._metrics = metrics
        self._partition = partition

    @property
    def fault(self) -> str:
        """Return why the partition is held back; empty when it is not."""
        return self._held.fault if self._held else ""

    def enter(self, segment: LocalSegment, error: CorruptDataError, local_log: LocalLog) -> None:
        """
        Hold the partition back at *segment*.

        The damage that *error* tells of may be in a later file of *local_log*, in which a transaction ends.
        """
        damaged = (one for one in local_log.segments if one.path == error.source)
        files = frozenset((one.base_offset, one.identity) for one in (segment, *damaged))
        self._held = _Held(segment.base_offset, files, str(error))
        self._metrics.upload_failures.labels(self._topic, type(error).__name__).inc()
        self._log.error(
            "segment is corrupt: the partition is neither uploaded nor trimmed from here on",
            base_offset=segment.base_offset,
            path=segment.path,
            error=str(error),
        )

    def lift(self, local_log: LocalLog) -> None:
        """End the quarantine when one of its files is gone or its bytes may have changed."""
        held = self._held
        found = {(segment.base_offset, segment.identity) for segment in local_log.segments} if held else ()
        if held is not None and not held.files.issubset(found):
            self._log.info(
                "quarantined segment has changed; looking at it again", base_offset=held.base_offset
            )
            self._held = None

    def passes(self, slices: Sequence[SegmentSlice]) -> list[SegmentSlice]:
        """Return those of *slices* that lie before the corrupt segment."""
        held = self._held
        return [part for part in slices if held is None or part.segment.base_offset < held.base_offset]


@dataclass(frozen=True, slots=True)
class UploadOutcome:
    """The result of the uploads of one plan."""

    admitted: tuple[CopiedSegment, ...] = ()
    """The longest prefix that succeeded: it may be committed."""
    failure: TieringError | None = None
    """What ended the prefix; None when all succeeded."""
    failed: SegmentSlice | None = None
    """The slice that was not copied because of *failure*."""


@dataclass(slots=True)
class LeadershipConfirmation:
    """Until when it counts as confirmed that this broker leads some partitions. One serves many archivers."""

    until: float = math.inf
    """Loop time. Each round that sees this broker as the leader of all of them prolongs it."""


_UNLIMITED: Final = LeadershipConfirmation()

_Copy: TypeAlias = asyncio.Task[CopiedSegment | TieringError | None]


class Uploader:
    """Upload one partition's segments as long as this broker is known to lead it."""

    __slots__ = ("_confirmation", "_leadership", "_remote_log", "_waiting", "_withdrawn")

    def __init__(self, leadership: Leadership, remote_log: RemoteLog) -> None:
        self._leadership = leadership
        self._remote_log = remote_log
        self._confirmation = _UNLIMITED
        self._waiting: list[_Copy] = []
        """The copies of the current call that the gate has not let begin yet."""
        self._withdrawn: list[_Copy] = []

    def confirm_leadership(self, confirmation: LeadershipConfirmation) -> None:
        """Note that the cluster names this broker the leader, as long as *confirmation* says so."""
        self._confirmation = confirmation

    @property
    def is_confirmed(self) -> bool:
        """Say whether a recent round has seen this broker as the partition's leader."""
        return asyncio.get_running_loop().time() <= self._confirmation.until

    @property
    def is_waiting(self) -> bool:
        """Say whether uploads wait in the gate's queue."""
        return bool(self._waiting)

    def withdraw_waiting(self) -> None:
        """
        Take the uploads that have not begun out of the gate's queue: `upload` ends without them.

        Uploads that have begun go on, and `upload` waits for them.
        """
        withdrawn, self._waiting = self._waiting, []
        self._withdrawn += withdrawn
        for task in withdrawn:
            task.cancel()

    async def upload(
        self,
        local_log: LocalLog,
        slices: Sequence[SegmentSlice],
        *,
        next_offset: int,
        urgency: Urgency,
        final_holes: Collection[Hole] = (),
        waits: bool = True,
    ) -> UploadOutcome:
        """
        Copy *slices* of *local_log*; the first one begins at *next_offset*.

        Offsets in *final_holes* are gone for good: two observations lack them. Without *waits*, slices that
        the gate does not let begin at once are left out.
        """
        if not slices:
            return UploadOutcome()
        request = partial(
            CopyRequest,
            self._leadership,
            local_log,
            urgency=urgency,
            before_put=self._require_leadership,
            final_holes=final_holes,
        )
        outcomes = await self._copy_all(request, slices, waits=waits)
        copies = [outcome if isinstance(outcome, CopiedSegment) else None for outcome in outcomes]
        count = admissible_prefix([copy.remote if copy else None for copy in copies], next_offset=next_offset)
        admitted = tuple(copy for copy in copies[:count] if copy is not None)
        for part, outcome in zip(slices[count:], outcomes[count:], strict=True):
            if outcome is None:
                # It was withdrawn, or had nothing to copy. What failed behind it is not the next one yet.
                break
            if isinstance(outcome, TieringError):
                return UploadOutcome(admitted, outcome, part)
        return UploadOutcome(admitted)

    async def _copy_all(
        self, request: Callable[..., CopyRequest], slices: Sequence[SegmentSlice], *, waits: bool
    ) -> list[CopiedSegment | TieringError | None]:
        """
        Copy each slice; None for one that was withdrawn.

        A failure becomes a result, so that neighbouring slices can still be committed.
        """

        async def copy(part: SegmentSlice) -> CopiedSegment | TieringError | None:
            task = asyncio.current_task()
            assert task is not None, "copying happens in a task"
            begun = partial(self._waiting.remove, task)
            try:
                return await self._remote_log.copy_segment(request(part, on_begun=begun))
            except TieringError as error:
                return error

        self._withdrawn = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(copy(part)) for part in slices]
                self._waiting = list(tasks)
                if not waits:
                    # Each copy asks the gate in its task's first turn, which comes before this one.
                    asyncio.get_running_loop().call_soon(self.withdraw_waiting)
        finally:
            self._waiting = []
        return [None if task in self._withdrawn else task.result() for task in tasks]

    def _require_leadership(self) -> None:
        """
        Refuse to store anything when leadership has not been confirmed recently.

        So a process that was stopped through a change of leadership stores nothing when it goes on.

        Raises:
            BrokerUnavailable: The confirmation has expired.
        """
        if not self.is_confirmed:
            raise BrokerUnavailable(
                f"this broker's leadership of {self._leadership.partition} was confirmed too long ago; it "
                "is checked again first"
            )
