"""
What the housekeeping service asks of a kind of work on the archive.

A job is work that can wait: merging, re-uploading what was compacted, scrubbing, purging. It comes in turns
that are cut by a number of store requests. A turn may be cancelled at any await, and the process killed:
whatever was begun is either found again or harmless. When turns come is not the job's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


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
