"""
Which recorded rewritings are valid, where no manifest says so, and which segments they supersede.

A job that removes records from segments stores the new segments, then a record that names all of them,
and then swaps them in. So where there is a record, the swap counts as done: the named segments hold all
that the archive held there, except for what was removed. Every other object at these offsets is older, is
made of older ones, or came too late to be named, unless it was made of the new segments in turn; other
records show that. None of these objects may be chosen: it may hold erased records. What a newer leader
wrote at these offsets counts as always: then the rewritten segment is off the lineage
(`manifest_rebuild`).

A rewriting is not valid where

* one of its segments is not stored, nor what that was made into. A compaction needs all of them: a
  tombstone may have been removed from one segment, and what it hid may be in another. Those missing at
  its beginning may have expired;
* a later rewriting or merge was made of the segments that it should have replaced: it never took place;
* a segment was stored later at its offsets that is now the only one with some of them: so the archive
  continued without the rewriting. A merge that was under way at the time may be either: one that the
  archive continued with, or one that came too late. If it is the only segment with offsets before all
  others, these have rather expired.

Rewritten objects that no valid record names were left behind by a job that died. They are used where
nothing else has their offsets.

A rewriting that is invalid for the first or the last of these reasons may have taken place all the same:
its segments were damaged or lost since. The removed records may be back then, so an operator must be told.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter, itemgetter
from typing import Final

from tieringd.model.segment import Rewriting, RewritingKind, SegmentIdentity

UNDER_WAY_MS: Final = 3_600_000
"""A merge is named in a manifest within this time after it was stored."""
_LAST: Final = attrgetter("last_offset")


@dataclass(frozen=True, slots=True)
class RecordedRewriting:
    """A rewriting whose record is in the bucket."""

    rewriting: Rewriting
    stored_at_ms: int
    """When the record was stored, by the store's clock."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A stored segment that is on the lineage."""

    identity: SegmentIdentity
    stored_at_ms: int


@dataclass(frozen=True, slots=True)
class ValidRewritings:
    """The segments that valid rewritings name, and those that they supersede."""

    named: Mapping[SegmentIdentity, int]
    """The named segments, each with the time of its record in milliseconds."""
    superseded: frozenset[SegmentIdentity]
    fallen: tuple[tuple[SegmentIdentity, int], ...]
    """
    Segments that jobs have stored but that do not count, although they may have been swapped in; with times.
    """


@dataclass(frozen=True, slots=True, eq=False)
class _Unit:
    """Segments that are valid or invalid together."""

    segments: tuple[SegmentIdentity, ...]
    """The segments that no newer leader has cut back."""
    kind: RewritingKind
    stored_at_ms: int


def valid_rewritings(
    recorded: Sequence[RecordedRewriting],
    stored: Mapping[SegmentIdentity, int],
    candidates: Sequence[Candidate],
    epoch_starts: Mapping[int, int],
) -> ValidRewritings:
    """
    Judge the *recorded* rewritings of one partition.

    *stored* maps each stored segment to the newest leader epoch known of it. *candidates* are the
    segments that may be chosen. *epoch_starts* has the first offset of each leader epoch that they contain.
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
            return ValidRewritings(
                claims.named(),
                frozenset(one.identity for one in superseded),
                # A merge removes no records.
                tuple(
                    (one, unit.stored_at_ms)
                    for unit in units
                    if unit in fallen and unit.kind is not RewritingKind.MERGED
                    for one in unit.segments
                ),
            )
        fallen |= overtaken


class _Lines:
    """Which segments were made of rewritten segments, and of those in turn."""

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
        """Return a segment and all that was made of it."""
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
        """Add the segments of a unit."""
        for one in unit.segments:
            layer = next((each for each in self._layers if not any(_within(each, one))), None)
            if layer is None:
                layer = []
                self._layers.append(layer)
            self._count += 1
            insort(layer, (one.last_offset, one.base_offset, self._count, one, unit))

    def over(self, one: SegmentIdentity) -> Iterator[tuple[SegmentIdentity, _Unit]]:
        """Yield the segments that overlap *one*, and their units."""
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
    """The offsets of the valid units."""

    def __init__(self, lines: _Lines) -> None:
        self._lines = lines
        self._units: list[_Unit] = []
        self._layers = _Layers()

    def add(self, unit: _Unit) -> None:
        """Add a unit, unless it contradicts one that was added before."""
        found = ((one, claim) for one in unit.segments for claim, _ in self._layers.over(one))
        if all(self._lines.are_related(one, claim) for one, claim in found):
            self._units.append(unit)
            self._layers.add(unit)

    def against(self, one: SegmentIdentity) -> list[_Unit]:
        """Return the units that supersede a segment."""
        return [unit for claim, unit in self._layers.over(one) if one not in self._lines.of(claim)]

    def named(self) -> dict[SegmentIdentity, int]:
        """Return the segments of all units, with the latest times of their records."""
        oldest_first = sorted(self._units, key=attrgetter("stored_at_ms"))
        return {one: unit.stored_at_ms for unit in oldest_first for one in unit.segments}


class _NewerLeaders:
    """Where the logs of leaders after a given epoch begin."""

    def __init__(self, epoch_starts: Mapping[int, int]) -> None:
        self._epochs = sorted(epoch_starts)
        starts = accumulate((epoch_starts[epoch] for epoch in reversed(self._epochs)), min)
        self._earliest = list(starts)[::-1]
        """The smallest first offset of each epoch and all newer ones."""

    def have_cut(self, one: SegmentIdentity, known_epoch: int) -> bool:
        """Say whether leaders after *known_epoch* wrote other records at a segment's offsets."""
        row = bisect_right(self._epochs, known_epoch)
        return row < len(self._epochs) and self._earliest[row] <= one.last_offset


def _units(
    recorded: Iterable[RecordedRewriting],
    stored: Mapping[SegmentIdentity, int],
    epoch_starts: Mapping[int, int],
) -> list[_Unit]:
    """Return the units, those with precedence first."""
    units: list[_Unit] = []
    leaders = _NewerLeaders(epoch_starts)
    for one in recorded:
        # A segment may hold batches of a newer epoch than the one in its name.
        left = [
            each
            for each in one.rewriting.stored
            if not leaders.have_cut(each, stored.get(each, each.leader_epoch))
        ]
        left.sort(key=_LAST)
        is_whole = one.rewriting.kind is RewritingKind.COMPACTED
        groups = [tuple(left)] if is_whole else [(each,) for each in left]
        units += [_Unit(group, one.rewriting.kind, one.stored_at_ms) for group in groups if group]
    # Of a merge and a rewriting of the same segments, the merge still holds the removed records.
    return sorted(
        units, key=lambda unit: (unit.kind is not RewritingKind.MERGED, unit.stored_at_ms), reverse=True
    )


def _is_there(unit: _Unit, lines: _Lines, stored: Mapping[SegmentIdentity, int]) -> bool:
    """Say whether all of a unit is stored, or what was made of it; its beginning may have expired."""
    # `isdisjoint` would iterate over all stored keys each time, because a mapping is not a set.
    there = [any(each in stored for each in lines.of(one)) for one in unit.segments]
    return True in there and all(there[there.index(True) :])


def _passed_over(units: Iterable[_Unit], recorded: Iterable[RecordedRewriting], lines: _Lines) -> set[_Unit]:
    """Return the units that never took place: later other segments were at their offsets."""
    layers = _Layers()
    for unit in units:
        layers.add(unit)
    found: set[_Unit] = set()
    for one in recorded:
        is_merge = one.rewriting.kind is RewritingKind.MERGED
        # The replaced segments were in the manifest at that time. A merge's own objects may have come too
        # late.
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
    """Return the units that never took place: a later segment holds offsets that would be lost with them."""
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
    """Return the first and last offsets of the contiguous ranges that segments hold."""
    spans: list[tuple[int, int]] = []
    for one in sorted(identities, key=attrgetter("base_offset")):
        if spans and one.base_offset <= spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], max(spans[-1][1], one.last_offset))
        else:
            spans.append((one.base_offset, one.last_offset))
    return spans
