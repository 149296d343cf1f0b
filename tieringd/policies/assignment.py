"""
Assignment: which archivers should run, given what this broker leads and what runs now.

An archiver belongs to one partition under one leader epoch. A new epoch means a new archiver:
whatever the old one knew of the manifest was learned under a claim that has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from tieringd.model.partition import Leadership


@dataclass(frozen=True, slots=True)
class AssignmentPlan:
    """Archivers to stop and to start, each in partition order."""

    stop: tuple[Leadership, ...]
    start: tuple[Leadership, ...]


def plan_assignment(
    wanted: AbstractSet[Leadership], running: AbstractSet[Leadership], fenced: AbstractSet[Leadership]
) -> AssignmentPlan:
    """
    Compare *wanted* with *running*.

    A leadership in *fenced* was lost to another writer and is not started again: the two would
    take the manifest from each other for ever. It may come back under a higher epoch.
    """
    return AssignmentPlan(
        stop=tuple(sorted(running - wanted, key=_order)),
        start=tuple(sorted(wanted - running - fenced, key=_order)),
    )


def _order(leadership: Leadership) -> tuple[str, int, int]:
    return (leadership.partition.topic, leadership.partition.partition, leadership.leader_epoch)
