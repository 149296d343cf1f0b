"""
The interface between the housekeeping service and one kind of work on the archive.

A job is work that can wait: merging, re-uploading compacted segments, scrubbing, purging. It gets turns
that are limited by a number of store requests. A turn may be cancelled at any await, and the process
killed: unfinished work is either found again or harmless. The service decides when turns come.

`PartitionSweep` goes over all partitions for a job, and gives each its share of a turn. A pass continues
where the last turn ended, in the order of the partitions. The job decides what a share is, and what is
remembered of a partition. A partition rests once its share has reported that there is nothing to do until
it changes. Passes leave out resting partitions: of ten thousand partitions nearly all rest.

`PlanningJob` is a job that plans what to do with a partition's segments, with a worker for each partition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

from tieringd.archiving.archiver import Archiver
from tieringd.archiving.observer import Observation
from tieringd.model.partition import Leadership

P = TypeVar("P")
W = TypeVar("W")


PASSES_TO_SKIP_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class JobTurn:
    """The result of one turn."""

    requests: int
    """The approximate number of store requests that it made, for the quota."""
    has_more: bool
    """Whether another turn would find something to do at once."""
    has_covered_all: bool = True
    """
    Whether each partition has had its share since this was last true. When housekeeping is forced, a job gets
    turns until this is true; a job that leaves the default gets one turn.
    """


class HousekeepingJob(Protocol):
    """One kind of work; the service gives it turns, one at a time."""

    @property
    def name(self) -> str:
        """Return its name in metrics and logs."""
        ...

    async def turn(self, *, requests_max: int) -> JobTurn:
        """
        Do about as much as *requests_max* store requests allow, and at least one piece of work.

        Raises:
            TieringError: The turn is given up; the next one comes later.
        """
        ...


@dataclass(frozen=True, slots=True)
class ArchivedPartition:
    """A partition that this daemon archives."""

    leadership: Leadership
    archiver: Archiver
    """It knows the manifest, and commits what is offered to it with its next step."""
    seen: Observation
    """The newest observation of its local log."""


@dataclass(frozen=True, slots=True)
class ShareResult:
    """The result of one partition's share of a turn."""

    requests: int = 0
    """The approximate number of store requests."""
    has_more: bool = False
    """Whether its next share would find something to do at once."""
    has_failed: bool = False
    """Whether this partition alone failed: it is then skipped for some passes, and the others go on."""
    may_rest: bool = False
    """Whether there is nothing to do before the partition's archive or local log changes."""


@dataclass(slots=True)
class _Failing:
    """A partition whose last shares failed."""

    failures: int = 0
    """The number of failures in a row."""
    passes_to_skip: int = 0


class PartitionSweep(Generic[P]):
    """Give each of the current *partitions* its *share*."""

    def __init__(
        self,
        partitions: Callable[[], Mapping[Leadership, P]],
        *,
        share: Callable[[P], Awaitable[ShareResult]],
        forget: Callable[[Leadership], object],
        changed: Callable[[], Collection[Leadership]] | None = None,
    ) -> None:
        """
        Take the collaborators; *forget* is called for each partition that is gone.

        *changed* returns the partitions that began, changed or ended since its last call
        (`ChangeFeed.reader`). Without it each pass goes over all of *partitions*.
        """
        self._partitions = partitions
        self._share = share
        self._forget = forget
        self._changed = changed
        self._awake: set[Leadership] | None = None
        """The partitions that do not rest; None before the first pass."""
        self._left: list[Leadership] = []
        """The partitions that have not had their share in this pass, the next one last."""
        self._found_more = False
        self._failing: dict[Leadership, _Failing] = {}

    async def turn(self, *, requests_max: int) -> JobTurn:
        """
        Continue the pass, until about *requests_max* requests are spent.

        Raises:
            TieringError: One partition's share failed. The next turn continues with the others.
        """
        partitions = self._partitions()
        if not self._left:
            self._begin(partitions)
        requests = 0
        while self._left and requests < requests_max:
            leadership = self._left.pop()
            one = partitions.get(leadership)
            if one is not None and not self._is_passed_over(leadership):
                share = await self._share(one)
                self._note(leadership, share)
                requests += share.requests
                self._found_more |= share.has_more
                await asyncio.sleep(0)  # Plans take no requests, and there may be ten thousand of them.
        has_covered_all = not self._left
        return JobTurn(
            requests, has_more=self._found_more or not has_covered_all, has_covered_all=has_covered_all
        )

    def _begin(self, partitions: Mapping[Leadership, P]) -> None:
        """Begin a pass over the partitions that do not rest."""
        self._found_more = False
        awake = set(self._awake or ())
        if self._changed is not None:
            awake.update(self._changed())
        if self._changed is None or self._awake is None:
            awake.update(partitions)
        for gone in [one for one in awake if one not in partitions]:
            awake.discard(gone)
            self._failing.pop(gone, None)
            self._forget(gone)
        self._awake = awake
        self._left = sorted(awake, key=lambda one: one.partition, reverse=True)

    def _is_passed_over(self, leadership: Leadership) -> bool:
        failing = self._failing.get(leadership)
        if failing is None or not failing.passes_to_skip:
            return False
        failing.passes_to_skip -= 1
        return True

    def _note(self, leadership: Leadership, share: ShareResult) -> None:
        if share.may_rest and self._awake is not None and self._changed is not None:
            self._awake.discard(leadership)
        if not share.has_failed:
            if share.requests:
                self._failing.pop(leadership, None)
            return
        failing = self._failing.setdefault(leadership, _Failing())
        failing.failures += 1
        failing.passes_to_skip = min(2**failing.failures, PASSES_TO_SKIP_MAX)


@dataclass(slots=True)
class PlannedWork(Generic[W]):
    """What a job keeps of a partition between turns."""

    worker: W
    finished: tuple[Any, ...] | None = None
    """The basis of a plan that left nothing to do: a table of segments, and what else decides."""

    def is_finished(self, basis: tuple[Any, ...]) -> bool:
        """
        Say whether the last plan left nothing to do, and *basis* is still the same.

        Tables never change, so a different table is a different object.
        """
        before = self.finished
        return before is not None and before[0] is basis[0] and before[1:] == basis[1:]


class PlanningJob(Generic[W]):
    """A job that plans what to do with the segments of each of the current *partitions*."""

    def __init__(
        self,
        partitions: Callable[[], Mapping[Leadership, ArchivedPartition]],
        *,
        make_worker: Callable[[Leadership], W],
        changed: Callable[[], Collection[Leadership]] | None = None,
    ) -> None:
        """Take the collaborators; *changed* is as for `PartitionSweep`."""
        self._make_worker = make_worker
        self._known: dict[Leadership, PlannedWork[W]] = {}
        self._sweep = PartitionSweep(
            partitions,
            share=self._share,
            forget=lambda leadership: self._known.pop(leadership, None),
            changed=changed,
        )

    async def turn(self, *, requests_max: int) -> JobTurn:
        """
        Continue the pass over all partitions, until about *requests_max* requests are spent.

        Raises:
            TieringError: One partition's share failed. The next turn continues with the others.
        """
        return await self._sweep.turn(requests_max=requests_max)

    async def _share(self, one: ArchivedPartition) -> ShareResult:
        """Plan one partition, and do a part of the plan."""
        raise NotImplementedError

    def _work_of(self, leadership: Leadership) -> PlannedWork[W]:
        if leadership not in self._known:
            self._known[leadership] = PlannedWork(self._make_worker(leadership))
        return self._known[leadership]
