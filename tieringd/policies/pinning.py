"""
Pinning: which closed segments to pin, so that a broker cannot delete what is not durable.

A pin is a second name (a hard link) for a segment's file, outside the log directory. While the broker has
the file as well, a pin takes no space; once the broker has deleted it, the pin alone holds the bytes.
Only those held bytes count against the budget.

A pin counts as part of the log's head only where there is evidence that it belongs there. After an
unclean election a replica may begin anew at a higher offset, on another lineage: older pins are then not
part of the log that follows, and the log itself does not show it.

When the budget is exceeded, the oldest held bytes that are not durable are given up first: the loss is then
one range at the end of the archive, recorded as a gap, and the disk space stays the broker's.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tieringd.errors import CorruptDataError
from tieringd.model.local_log import LocalLog
from tieringd.model.manifest_parts import Gap
from tieringd.model.segment import LocalSegment
from tieringd.policies.epoch_history import EpochHistory, end_offset_for, newest_shared_epoch

_NOT_ENDED = 2**63
"""The end of a log that continues: past every offset."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A segment's file under tieringd's own name."""

    segment: LocalSegment
    """The segment with the pin's path; `next_offset` is never None."""
    is_held: bool
    """Whether the broker has deleted the file, so that only the pin holds its bytes."""
    is_stray: bool = False
    """Whether there is no evidence that it belongs before the log: it is kept, and never uploaded."""
    is_open: bool = False
    """
    Whether it was made of an active segment: while the log has the file, the end is only a hint.

    Once the log lacks the file, `broker.pins.with_true_ends` has put the end right.
    """


@dataclass(frozen=True, slots=True)
class PinnedLog:
    """A partition's pins, and the log's properties when they were last known to belong to it."""

    pins: tuple[Pin, ...] = ()
    epochs: EpochHistory | None = None
    """The leader-epoch history of log and pins then; None when it was not noted."""
    anchor: int | None = None
    """The inode of the log's last segment then. A hard link of tieringd keeps the inode from being reused."""
    is_elsewhere: bool = False
    """
    Whether they are of another log directory, where the log was before, or of an earlier configuration.

    Their inodes may be of another filesystem, and are no evidence.
    """
    elsewhere: tuple[PinnedLog, ...] = ()
    """The pins of the partition in other places, each with the note that is there."""

    @property
    def all_pins(self) -> tuple[Pin, ...]:
        """Return all pins, wherever they are."""
        return sum((one.pins for one in self.elsewhere), self.pins)


NO_PINS: Final = PinnedLog()


@dataclass(frozen=True, slots=True)
class PinPlan:
    """Pins to make and to release for one partition, each oldest first."""

    make: tuple[LocalSegment, ...] = ()
    release: tuple[Pin, ...] = ()
    """Pins that are durable."""
    replaced: tuple[Pin, ...] = ()
    """
    Pins that are not durable, and in whose place the log has something else.

    Each goes once the segments of *make* that overlap it are pinned: until then it may become the only copy.
    """
    stray: tuple[Pin, ...] = ()
    """Stray pins to set aside, or to leave aside."""


def judged(log: LocalLog, found: PinnedLog) -> tuple[LocalLog, tuple[Pin, ...]]:
    """
    Return the pins of *found*, those as stray that lie before *log* without evidence of belonging to it.

    All of them belonged to the log at the last observation, so either of two facts is evidence that they
    still do. Either a file of that time is still in the log: then nothing below it was cut off since. Or
    both histories share an epoch, which has one leader: then they are equal up to where that epoch ends.
    The broker's retention deletes from the head and keeps both. A log that began anew has neither.

    Returns the log as well, with an epoch history that reaches as far back as its pins do: the broker
    forgets the epochs of what it deletes.

    Raises:
        CorruptDataError: The epochs alone speak for the pins, and they may be those of the log before this
            one. The next scan finds the broker's new file.
    """
    if not found.elsewhere:
        return _judged(log, found)
    epochs, pins = log.epochs, list[Pin]()
    for one in (found, *found.elsewhere):
        # Each note is of another time, and speaks for the pins beside it alone.
        extended, more = _judged(log, one)
        pins += more
        if extended is not log:
            epochs = _joined(extended.epochs, epochs, same_to=math.inf)
    return log if epochs == log.epochs else replace(log, epochs=epochs), tuple(pins)


def _judged(log: LocalLog, found: PinnedLog) -> tuple[LocalLog, tuple[Pin, ...]]:
    """Judge the pins in one place; see `judged`."""
    if not found.pins or (first_offset := log.first_offset) is None:
        return log, found.pins
    same_by_files, same_by_epochs = _same_by_files(log, found), _same_by_epochs(log, found.epochs)
    if same_by_files < 0 and _are_epochs_of_then(log, found, first_offset):
        raise CorruptDataError(
            f"{log.partition.path}: the log begins at offset {first_offset}, and all leader epochs before "
            "it: the broker has not written the file of epochs since"
        )
    same_to = max(same_by_files, same_by_epochs)
    pins = tuple(
        replace(pin, is_stray=True)
        if pin.segment.base_offset < first_offset and _end(pin.segment) > same_to
        else pin
        for pin in found.pins
    )
    if found.epochs and any(pin.segment.base_offset < first_offset and not pin.is_stray for pin in pins):
        log = replace(log, epochs=_joined(found.epochs, log.epochs, same_to=min(same_to, first_offset)))
    return log, pins


def _are_epochs_of_then(log: LocalLog, found: PinnedLog, first_offset: int) -> bool:
    """
    Say whether the epochs of *log* may be those of the log that *found* was noted of.

    A broker whose log begins anew makes the new segment first, and clears its file of epochs then. Both that
    and a deletion from the head leave no epoch that begins before the log.
    """
    if not log.epochs or not found.epochs:
        return False
    return (
        log.epochs[-1][1] < first_offset
        and log.epochs[: len(found.epochs)] == found.epochs
        and any(pin.segment.base_offset < first_offset and not pin.is_stray for pin in found.pins)
    )


def _joined(noted: EpochHistory, found: EpochHistory, *, same_to: float) -> EpochHistory:
    """Return *found*, extended by the earlier epochs of *noted*, which is valid up to *same_to*."""
    if not found:
        return tuple(one for one in noted if one[1] < same_to)
    epoch, start_offset = found[0]
    if start_offset > same_to:
        # There may be other epochs between the two.
        return found
    before = [one for one in noted if one[0] <= epoch and one[1] < start_offset]
    return (*before, *(found[1:] if before and before[-1][0] == epoch else found))


def _same_by_files(log: LocalLog, found: PinnedLog) -> float:
    """Return the base of the last segment of *log* that has had a link since the last observation."""
    if found.is_elsewhere:
        return -math.inf
    ours = {found.anchor, *(pin.segment.inode for pin in found.pins if not pin.is_stray)}
    return max((one.base_offset for one in log.segments if one.inode in ours), default=-math.inf)


def _same_by_epochs(log: LocalLog, epochs: EpochHistory | None) -> float:
    if not epochs and not log.epochs:
        # Neither side has a history: there is no evidence for the pins, and none against them.
        return math.inf
    shared = newest_shared_epoch(epochs or (), log.epochs)
    if shared is None:
        return -math.inf
    ends = [end_offset_for(one, shared, log_end_offset=_NOT_ENDED) for one in (epochs or (), log.epochs)]
    return min(end for _, end in filter(None, ends))


def plan_pins(
    log: LocalLog,
    pins: Sequence[Pin],
    *,
    next_offset: int | None,
    expiring_end: int | None = None,
    gaps: Sequence[Gap] = (),
) -> PinPlan:
    """
    Compare *pins* with *log*, given that everything below *next_offset* is durable.

    None as *next_offset* means that nothing is durable. A closed segment that is not durable gets a pin,
    and so does the active one when the broker may soon close and delete it in one go: then *expiring_end*
    is its end offset. A pin of the active one stays, whatever is appended. A pin is released when its segment
    is durable. It is replaced when the log has other bytes in its place: a cleaner wrote the segment anew, or
    the log was truncated, and the pinned bytes are on no lineage any more.

    A stray pin stays while it may be the only copy of offsets in one of the archive's *gaps*.
    """
    durable_to = -1 if next_offset is None else next_offset
    wanted = {
        segment.base_offset: segment
        for segment in _closed(log, expiring_end)
        if segment.next_offset is not None and segment.next_offset > durable_to
    }
    release: list[Pin] = []
    replaced: list[Pin] = []
    stray: list[Pin] = []
    pinned: set[int] = set()
    first_offset, active = log.first_offset, log.segments[-1] if log.segments else None
    for pin in sorted(pins, key=lambda one: one.segment.base_offset):
        segment = pin.segment
        current = wanted.get(segment.base_offset)
        # The end of an open pin is a hint, and an earlier release made such pins without the mark. What the
        # log has of the file may go on, and not be durable.
        goes_on = current is not None and current.inode == segment.inode
        is_durable = _end(segment) <= durable_to and not goes_on
        if pin.is_stray:
            is_lost = any(
                gap.base_offset < _end(segment) and segment.base_offset < gap.next_offset for gap in gaps
            )
            (release if is_durable and not is_lost else stray).append(pin)
            continue
        is_replaced = (
            first_offset is not None
            and segment.base_offset >= first_offset
            and not _is_pin_of(pin, current, active)
        )
        if is_durable:
            release.append(pin)
        elif is_replaced:
            replaced.append(pin)
        else:
            pinned.add(segment.base_offset)
    return PinPlan(
        make=tuple(segment for base, segment in sorted(wanted.items()) if base not in pinned),
        release=tuple(release),
        replaced=tuple(replaced),
        stray=tuple(stray),
    )


def without_successor(replaced: Sequence[Pin], unmade: Sequence[LocalSegment]) -> tuple[Pin, ...]:
    """Return those of *replaced* that stay, because a segment in their place could not be pinned."""
    return tuple(
        pin
        for pin in replaced
        if any(one.base_offset < _end(pin.segment) and pin.segment.base_offset < _end(one) for one in unmade)
    )


def _is_pin_of(pin: Pin, current: LocalSegment | None, active: LocalSegment | None) -> bool:
    """Say whether *pin* is of *current*, or of the *active* segment, and under a name that is right."""
    if active is not None and pin.segment.inode == active.inode:
        # Another end than at the time of the pin does no harm: it is read from the file when it matters.
        return pin.is_open
    return current is not None and (current.inode, current.next_offset) == (
        pin.segment.inode,
        pin.segment.next_offset,
    )


def _end(segment: LocalSegment) -> int:
    assert segment.next_offset is not None, "only what is closed, or as good as closed, is pinned"
    return segment.next_offset


def _closed(log: LocalLog, expiring_end: int | None) -> tuple[LocalSegment, ...]:
    """Return the closed segments, and the active one as closed at *expiring_end*, if that is given."""
    if expiring_end is None or not log.segments or expiring_end <= log.segments[-1].base_offset:
        return log.closed_segments
    return (*log.closed_segments, replace(log.segments[-1], next_offset=expiring_end))


def pins_over_budget(
    pins: Sequence[Pin], *, budget_bytes: int, durable: Collection[Pin] = ()
) -> tuple[Pin, ...]:
    """
    Return the held pins to give up until the held bytes fit *budget_bytes*.

    Those that are *durable* go first, and then the oldest files.
    """
    held = sorted(
        (pin for pin in pins if pin.is_held), key=lambda pin: (pin not in durable, pin.segment.modified_ns)
    )
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
    Return the segments that can be uploaded: those of *log*, preceded by those that only pins hold.

    A pinned segment that overlaps the log's first segment, as after the broker deleted records inside it,
    is left out: the log's own is newer. So are stray pins, pins without a record, and all pins while the log
    has no segment. Of pins in two places that overlap, the one that begins first counts.
    """
    first_offset = log.first_offset
    before: list[LocalSegment] = []
    for pin in sorted(pins, key=lambda one: one.segment.base_offset):
        base_offset, end = pin.segment.base_offset, _end(pin.segment)
        is_ours = first_offset is not None and base_offset < end <= first_offset and not pin.is_stray
        if is_ours and (not before or base_offset >= _end(before[-1])):
            before.append(pin.segment)
    return (*before, *log.segments)
