"""
Which holes in a partition's log are there for good: those that two looks have found.

A look reads pins, files and bounds one after the other, so a segment that moves from the one to the other
meanwhile may be in none of them. What follows from a hole may be for ever: a transaction whose marker is in
it counts as aborted, and an archive is cut back by what is left of the log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tieringd.archiving.observation import Observation
    from tieringd.model.local_log import Hole


class HoleWatch:
    """Remember when each hole of one partition's log was first seen. Owned by its archiver."""

    def __init__(self) -> None:
        self._first_seen: dict[Hole, int] = {}
        """The holes of the newest look, each with the number of the first look in a row that found it."""
        self._look = 0

    def note(self, seen: Observation) -> None:
        """Take note of a look; noting the same look again changes nothing."""
        self._look = seen.look
        self._first_seen = {hole: self._first_seen.get(hole, seen.look) for hole in seen.uploadable.holes}

    @property
    def confirmed(self) -> frozenset[Hole]:
        """Return the holes of the newest look that an earlier look has found, too."""
        return frozenset(hole for hole, first in self._first_seen.items() if first != self._look)

    @property
    def new(self) -> frozenset[Hole]:
        """Return the holes that only the newest look has found."""
        return frozenset(hole for hole, first in self._first_seen.items() if first == self._look)
