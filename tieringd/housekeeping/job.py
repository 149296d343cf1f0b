"""
What the housekeeping service asks of a kind of work on the archive.

A job is work that can wait: merging, re-uploading what was compacted, scrubbing, purging. It comes in turns
that are cut by a number of store requests. A turn may be cancelled at any await, and the process killed:
whatever was begun is either found again or harmless. When turns come is not the job's business.

`PartitionPasses` goes over all partitions for a job, and gives each its share of a turn. A pass goes on
where the last turn ended, in the order of the partitions. The job decides what a share is, and what is
remembered of a partition. A partition rests once its share has said that there is nothing to do until it
changes. Passes leave out resting partitions: of ten thousand partitions nearly all rest.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping

    from tieringd.model.partition import Leadership


P = TypeVar("P")


PASSES_TO_SKIP_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class JobTurn:
    """What one turn did."""

    requests: int
    """Store requests that it made, about; what the quota is counted by."""
    has_more: bool
    """Whether another turn would find something to do at once."""
    has_covered_all: bool = True
    """
    Whether each partition has had its share since this was last said. When housekeeping is forced, a job gets
    turns until it says so; one that never says otherwise gets one turn.
    """


class HousekeepingJob(Protocol):
    """One kind of work; the service gives it turns, one at a time."""

    @property
    def name(self) -> str:
        """Return what it is called in metrics and logs."""
        ...

    async def turn(self, *, requests_max: int) -> JobTurn:
        """
        Do about as much as *requests_max* store requests allow, and at least one piece of work.

        Raises:
            TieringError: The turn is given up; the next one comes later.
        """
        ...


@dataclass(frozen=True, slots=True)
class Share:
    """What was done for one partition."""

    requests: int = 0
    """Store requests, about."""
    has_more: bool = False
    """Whether its next share would find something to do at once."""
    has_failed: bool = False
    """Whether the partition could not go on, and the others can: it is passed over for a while."""
    may_rest: bool = False
    """Whether there is nothing to do before the partition's archive or local log changes."""


@dataclass(slots=True)
class _Failing:
    """A partition whose last shares failed."""

    failures: int = 0
    """One after the other."""
    passes_to_skip: int = 0


class PartitionPasses(Generic[P]):
    """Give each of *partitions*, as they are then, its *share*."""

    def __init__(
        self,
        partitions: Callable[[], Mapping[Leadership, P]],
        *,
        share: Callable[[P], Awaitable[Share]],
        forget: Callable[[Leadership], object],
        changed: Callable[[], Collection[Leadership]] | None = None,
    ) -> None:
        """
        Take the parts; *forget* is told of each partition that is not there any more.

        *changed* returns what has begun, changed or ended since it was called last (`ChangeFeed.reader`).
        Without it each pass goes over all of *partitions*.
        """
        self._partitions = partitions
        self._share = share
        self._forget = forget
        self._changed = changed
        self._awake: set[Leadership] | None = None
        """Those that do not rest; None before the first pass."""
        self._left: list[Leadership] = []
        """Who has not had its share in this pass, the next one last."""
        self._found_more = False
        self._failing: dict[Leadership, _Failing] = {}

    async def turn(self, *, requests_max: int) -> JobTurn:
        """
        Go on with the pass, until about *requests_max* requests are spent.

        Raises:
            TieringError: One partition's share failed. The next turn goes on with the others.
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
        """Begin a pass over those that do not rest."""
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

    def _note(self, leadership: Leadership, share: Share) -> None:
        if share.may_rest and self._awake is not None and self._changed is not None:
            self._awake.discard(leadership)
        if not share.has_failed:
            if share.requests:
                self._failing.pop(leadership, None)
            return
        failing = self._failing.setdefault(leadership, _Failing())
        failing.failures += 1
        failing.passes_to_skip = min(2**failing.failures, PASSES_TO_SKIP_MAX)
