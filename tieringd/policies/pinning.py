"""
Pinning: which closed segments to hold on to, so that a broker cannot delete what is not durable.

A pin is a second name (a hard link) for a segment's file, outside the log directory. While the
broker has the file as well, a pin takes no space; once the broker has deleted it, the pin is
all that holds the bytes. Only those held bytes count against the budget.

When the budget is passed the oldest held bytes go first: what is lost then is one range at the
end of the archive, recorded as a gap, and the disk stays the broker's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieringd.model.local_log import LocalLog
    from tieringd.model.segment import LocalSegment


@dataclass(frozen=True, slots=True)
class Pin:
    """A segment's file under our own name."""

    segment: LocalSegment
    """With the pin's path; `next_offset` is never None."""
    is_held: bool
    """Whether the broker has deleted the file, so that only the pin holds its bytes."""


@dataclass(frozen=True, slots=True)
class PinPlan:
    """Pins to make and to release for one partition, each oldest first."""

    make: tuple[LocalSegment, ...] = ()
    release: tuple[Pin, ...] = ()


def plan_pins(
    log: LocalLog, pins: Sequence[Pin], *, next_offset: int | None, expiring_end: int | None = None
) -> PinPlan:
    """
    Compare *pins* with *log*, given that everything below *next_offset* is durable.

    None as *next_offset* means that nothing is. A closed segment that is not durable gets a pin, and
    so does the active one when the broker may soon close and delete it in one go: then *expiring_end*
    says where it ends. A pin goes when its segment is durable, or when the log has other bytes in
    its place: the log was truncated, and what the pin holds is on no lineage any more.
    """
    durable_to = -1 if next_offset is None else next_offset
    wanted = {
        segment.base_offset: segment
        for segment in _closed(log, expiring_end)
        if segment.next_offset is not None and segment.next_offset > durable_to
    }
    release: list[Pin] = []
    pinned: set[int] = set()
    first_offset = log.first_offset
    for pin in sorted(pins, key=lambda one: one.segment.base_offset):
        segment = pin.segment
        current = wanted.get(segment.base_offset)
        is_durable = segment.next_offset is not None and segment.next_offset <= durable_to
        is_replaced = (
            first_offset is not None
            and segment.base_offset >= first_offset
            and (
                current is None
                or (current.inode, current.next_offset) != (segment.inode, segment.next_offset)
            )
        )
        if is_durable or is_replaced:
            release.append(pin)
        else:
            pinned.add(segment.base_offset)
    return PinPlan(
        make=tuple(segment for base, segment in sorted(wanted.items()) if base not in pinned),
        release=tuple(release),
    )


def _closed(log: LocalLog, expiring_end: int | None) -> tuple[LocalSegment, ...]:
    """Return the closed segments, and the active one as if it were closed when it ends at *expiring_end*."""
    if expiring_end is None or not log.segments or expiring_end <= log.segments[-1].base_offset:
        return log.closed_segments
    return (*log.closed_segments, replace(log.segments[-1], next_offset=expiring_end))


def pins_over_budget(pins: Sequence[Pin], *, budget_bytes: int) -> tuple[Pin, ...]:
    """Return the held pins to give up, oldest file first, until the held bytes fit *budget_bytes*."""
    held = sorted((pin for pin in pins if pin.is_held), key=lambda pin: pin.segment.modified_ns)
    excess = sum(pin.segment.size_bytes for pin in held) - budget_bytes
    given_up: list[Pin] = []
    for pin in held:
        if excess <= 0:
            break
        given_up.append(pin)
        excess -= pin.segment.size_bytes
    return tuple(given_up)


def with_pins(log: LocalLog, pins: Sequence[Pin]) -> tuple[LocalSegment, ...]:
    """
    Return the segments that can be uploaded: those of *log*, and before them those that only pins hold.

    A pinned segment that reaches into the log's first segment, as after the broker deleted records
    inside it, is left out: the log's own is newer.
    """
    first_offset = log.first_offset
    before = [
        pin.segment
        for pin in sorted(pins, key=lambda one: one.segment.base_offset)
        if pin.segment.next_offset is not None
        and (first_offset is None or pin.segment.next_offset <= first_offset)
    ]
    return (*before, *log.segments)
