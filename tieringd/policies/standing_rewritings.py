"""
Which rewritings stand, where no manifest says what became of them, and what they do away with.

A job that takes records out of segments stores the new ones, then a record that names all of them, and then
swaps them in. So where there is a record the swap may be taken for done: what it names holds all that the
archive held there, but for what was to go. Everything else at these offsets is older, is made of what is
older, or came too late to be named, unless it was made of the new segments in turn; other records tell that.
Nothing of it may be chosen: it may hold what was erased. What a newer leader wrote at these offsets counts
as ever: then the rewritten segment is off the lineage (`manifest_rebuild`).

A rewriting does not stand where

* a segment of it is not stored, nor what that was made into. Of a compaction all must be: a tombstone may
  have gone from one segment, and what it hid be in another. Those that are missing at its beginning may have
  expired;
* a later one, or a later merge, was made of what it should have replaced: it never took place;
* something was stored later at its offsets that is now all there is of others: so the archive went on
  without it. A merge that was under way at the time may be either: one that the archive went on with, or one
  that came too late. If it is all there is of offsets before all others these have rather expired.

What was rewritten and is named by none that stands was left by a job that died. It is better than nothing.

One that falls for the first or the last of these reasons may have taken place all the same: what it named was
damaged or lost since. What was taken out may be back then, so an operator has to hear of it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Final

from tieringd.model.segment import RewritingKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tieringd.model.segment import Rewriting, SegmentIdentity

UNDER_WAY_MS: Final = 3_600_000
"""A merge is named that long after it was stored, at the most."""
_LAST: Final = attrgetter("last_offset")


@dataclass(frozen=True, slots=True)
class RecordedRewriting:
    """A rewriting of which a record is in the bucket."""

    rewriting: Rewriting
    stored_at_ms: int
    """When the record was stored, by the store's clock."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A stored segment that is on the lineage."""

    identity: SegmentIdentity
    stored_at_ms: int


@dataclass(frozen=True, slots=True)
class StandingRewritings:
    """What the rewritings that stand name, and what they do away with."""

    named: Mapping[SegmentIdentity, int]
    """And when that was recorded, in milliseconds."""
    superseded: frozenset[SegmentIdentity]
    fallen: tuple[tuple[SegmentIdentity, int], ...]
    """What jobs have stored that does not count, though it may have taken its place; likewise with times."""


@dataclass(frozen=True, slots=True, eq=False)
class _Unit:
    """Segments that count together."""

    segments: tuple[SegmentIdentity, ...]
    """Those that no newer leader has cut back."""
    kind: RewritingKind
    stored_at_ms: int


def standing_rewritings(
    recorded: Sequence[RecordedRewriting],
    stored: Mapping[SegmentIdentity, int],
    candidates: Sequence[Candidate],
    epoch_starts: Mapping[int, int],
) -> StandingRewritings:
    """
    Judge what is *recorded* of one partition, of which all of *stored* is there.

    *stored* has the newest leader epoch that is known of each. *candidates* are those that may be chosen;
    *epoch_starts* has the first offset of each leader epoch that they tell of.
    """
    lines = _Lines(one.rewriting for one in recorded)
    units = _units(recorded, stored, epoch_starts)
    passed_over = _passed_over(units, recorded, lines)
    units = [unit for unit in units if unit not in passed_over]
    fallen = {unit for unit in units if not _is_there(unit, lines, stored)}
    while True:
        claims = _Claims(lines)
        for unit in units:
            if unit not in fallen:
                claims.add(unit)
        superseded = [one for one in candidates if claims.against(one.identity)]
        overtaken = _overtaken(superseded, candidates, claims)
        if not overtaken:
            return StandingRewritings(
                claims.named(),
                frozenset(one.identity for one in superseded),
                # A merge takes nothing out.
                tuple(
                    (one, unit.stored_at_ms)
                    for unit in units
                    if unit in fallen and unit.kind is not RewritingKind.MERGED
                    for one in unit.segments
                ),
            )
        fallen |= overtaken


class _Lines:
    """What was made of rewritten segments, and of that in turn."""

    def __init__(self, rewritings: Iterable[Rewriting]) -> None:
        self._made: defaultdict[SegmentIdentity, list[SegmentIdentity]] = defaultdict(list)
        self._known: dict[SegmentIdentity, frozenset[SegmentIdentity]] = {}
        for one in rewritings:
            stored = sorted(one.stored, key=_LAST)
            for part in one.replaced:
                row = bisect_left(stored, part.base_offset, key=_LAST)
                while row < len(stored) and stored[row].overlaps(part):
                    self._made[part].append(stored[row])
                    row += 1

    def of(self, one: SegmentIdentity) -> frozenset[SegmentIdentity]:
        """Return all that was made of a segment, and itself."""
        found = self._known.get(one)
        if found is None:
            seen, todo = {one}, [one]
            while todo:
                new = [each for each in self._made.get(todo.pop(), ()) if each not in seen]
                seen.update(new)
                todo += new
            found = self._known[one] = frozenset(seen)
        return found

    def are_related(self, one: SegmentIdentity, other: SegmentIdentity) -> bool:
        """Say whether one of them was made of the other."""
        return one in self.of(other) or other in self.of(one)


class _Layers:
    """Segments of units, found by their offsets. In each layer they ascend and do not overlap."""

    def __init__(self) -> None:
        self._layers: list[list[tuple[int, int, int, SegmentIdentity, _Unit]]] = []
        self._count = 0

    def add(self, unit: _Unit) -> None:
        """Take the segments of a unit."""
        for one in unit.segments:
            layer = next((each for each in self._layers if not any(_within(each, one))), None)
            if layer is None:
                layer = []
                self._layers.append(layer)
            self._count += 1
            insort(layer, (one.last_offset, one.base_offset, self._count, one, unit))

    def over(self, one: SegmentIdentity) -> Iterator[tuple[SegmentIdentity, _Unit]]:
        """Yield the segments that have offsets of *one*, and their units."""
        for layer in self._layers:
            yield from _within(layer, one)


def _within(
    layer: list[tuple[int, int, int, SegmentIdentity, _Unit]], one: SegmentIdentity
) -> Iterator[tuple[SegmentIdentity, _Unit]]:
    row = bisect_left(layer, one.base_offset, key=itemgetter(0))
    while row < len(layer) and layer[row][1] <= one.last_offset:
        yield layer[row][3:]
        row += 1


class _Claims:
    """The offsets of the units that stand."""

    def __init__(self, lines: _Lines) -> None:
        self._lines = lines
        self._units: list[_Unit] = []
        self._layers = _Layers()

    def add(self, unit: _Unit) -> None:
        """Take a unit, unless it contradicts one that was taken before."""
        found = ((one, claim) for one in unit.segments for claim, _ in self._layers.over(one))
        if all(self._lines.are_related(one, claim) for one, claim in found):
            self._units.append(unit)
            self._layers.add(unit)

    def against(self, one: SegmentIdentity) -> list[_Unit]:
        """Return the units that do away with a segment."""
        return [unit for claim, unit in self._layers.over(one) if one not in self._lines.of(claim)]

    def named(self) -> dict[SegmentIdentity, int]:
        """Return the segments of all units, with the latest times of their records."""
        oldest_first = sorted(self._units, key=attrgetter("stored_at_ms"))
        return {one: unit.stored_at_ms for unit in oldest_first for one in unit.segments}


class _NewerLeaders:
    """Where the log of whoever led after some epoch begins."""

    def __init__(self, epoch_starts: Mapping[int, int]) -> None:
        self._epochs = sorted(epoch_starts)
        starts = accumulate((epoch_starts[epoch] for epoch in reversed(self._epochs)), min)
        self._earliest = list(starts)[::-1]
        """The smallest first offset of each epoch and all newer ones."""

    def have_cut(self, one: SegmentIdentity, known_epoch: int) -> bool:
        """Say whether they wrote other records at a segment's offsets."""
        row = bisect_right(self._epochs, known_epoch)
        return row < len(self._epochs) and self._earliest[row] <= one.last_offset


def _units(
    recorded: Iterable[RecordedRewriting],
    stored: Mapping[SegmentIdentity, int],
    epoch_starts: Mapping[int, int],
) -> list[_Unit]:
    """Return what counts together, that which counts first before the rest."""
    units: list[_Unit] = []
    leaders = _NewerLeaders(epoch_starts)
    for one in recorded:
        # It may hold batches of a newer epoch than the one that its name has.
        left = [
            each
            for each in one.rewriting.stored
            if not leaders.have_cut(each, stored.get(each, each.leader_epoch))
        ]
        left.sort(key=_LAST)
        is_whole = one.rewriting.kind is RewritingKind.COMPACTED
        groups = [tuple(left)] if is_whole else [(each,) for each in left]
        units += [_Unit(group, one.rewriting.kind, one.stored_at_ms) for group in groups if group]
    # Of a merge and a rewriting of the same segments the merge still holds what was to go.
    return sorted(
        units, key=lambda unit: (unit.kind is not RewritingKind.MERGED, unit.stored_at_ms), reverse=True
    )


def _is_there(unit: _Unit, lines: _Lines, stored: Mapping[SegmentIdentity, int]) -> bool:
    """Say whether all of a unit is stored, or what was made of it; its beginning may have expired."""
    # `isdisjoint` would go through all that is stored each time: a mapping is no set to it.
    there = [any(each in stored for each in lines.of(one)) for one in unit.segments]
    return True in there and all(there[there.index(True) :])


def _passed_over(units: Iterable[_Unit], recorded: Iterable[RecordedRewriting], lines: _Lines) -> set[_Unit]:
    """Return the units that never took place: later on something else was at their offsets."""
    layers = _Layers()
    for unit in units:
        layers.add(unit)
    found: set[_Unit] = set()
    for one in recorded:
        is_merge = one.rewriting.kind is RewritingKind.MERGED
        # What was to be replaced was in the manifest then. A merge may have come too late itself.
        for segments, after_ms in (
            (one.rewriting.replaced, 0),
            (one.rewriting.stored if is_merge else (), UNDER_WAY_MS),
        ):
            found.update(
                unit
                for each in segments
                for segment, unit in layers.over(each)
                if one.stored_at_ms > unit.stored_at_ms + after_ms and not lines.are_related(each, segment)
            )
    return found


def _overtaken(
    superseded: Iterable[Candidate], candidates: Iterable[Candidate], claims: _Claims
) -> set[_Unit]:
    """Return the units that never took place: something later holds offsets that would be lost with it."""
    superseded = list(superseded)
    gone = {one.identity for one in superseded}
    held = _joined(one.identity for one in candidates if one.identity not in gone)
    begin = held[0][0] if held else 0
    found: set[_Unit] = set()
    for one in superseded:
        first, last = one.identity.base_offset, one.identity.last_offset
        if _is_within(held, first, last):
            continue
        is_needed = not _is_within(held, max(first, begin), last)
        for unit in claims.against(one.identity):
            later_ms = one.stored_at_ms - unit.stored_at_ms
            if later_ms > UNDER_WAY_MS or (is_needed and later_ms > -UNDER_WAY_MS):
                found.add(unit)
    return found


def _is_within(spans: Sequence[tuple[int, int]], first: int, last: int) -> bool:
    row = bisect_left(spans, last, key=itemgetter(1))
    return first > last or (row < len(spans) and spans[row][0] <= first)


def _joined(identities: Iterable[SegmentIdentity]) -> list[tuple[int, int]]:
    """Return the first and last offsets of what segments hold without a hole."""
    spans: list[tuple[int, int]] = []
    for one in sorted(identities, key=attrgetter("base_offset")):
        if spans and one.base_offset <= spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], max(spans[-1][1], one.last_offset))
        else:
            spans.append((one.base_offset, one.last_offset))
    return spans
