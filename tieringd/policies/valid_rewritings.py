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

**Cost.** A job that runs every day makes one segment of one, again and again, and all its records stay. So
segments are numbered, and such a *line* of segments counts as one: all in it have the same offsets, each was
made of the one before, and outside of the line all are related to the same segments. Only lines are compared
with each other. What is left grows with the names in the records, and not with their square.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
    """Time of storing the record in ms since the epoch, by the store's clock."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A stored segment that is on the lineage."""

    identity: SegmentIdentity
    stored_at_ms: int


@dataclass(frozen=True, slots=True)
class ValidRewritings:
    """The segments that valid rewritings name, and those that they supersede."""

    named: Mapping[SegmentIdentity, int]
    """The named segments that are stored, each with the latest time of its records in milliseconds."""
    superseded: frozenset[SegmentIdentity]
    fallen: tuple[tuple[SegmentIdentity, int], ...]
    """
    Segments that jobs have stored but that do not count, although they may have been swapped in; with times.
    """


@dataclass(frozen=True, slots=True, eq=False)
class _Unit:
    """Segments that are valid or invalid together."""

    segments: tuple[int, ...]
    """The numbers of the segments that no newer leader has cut back."""
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
    lines = _Lines([one.rewriting for one in recorded])
    units = _units(recorded, stored, epoch_starts, lines)
    passed_over = _passed_over(units, recorded, lines)
    units = [unit for unit in units if unit not in passed_over]
    there = _Stored(lines, stored)
    fallen = {unit for unit in units if not there.has(unit)}
    while True:
        claims = _Claims(lines)
        for unit in units:
            if unit not in fallen:
                claims.add(unit)
        superseded = [one for one in candidates if claims.supersede(one.identity)]
        overtaken = _overtaken(superseded, candidates, claims)
        if not overtaken:
            return ValidRewritings(
                claims.named(there.numbers),
                frozenset(one.identity for one in superseded),
                # A merge removes no records.
                tuple(
                    (lines.identities[one], unit.stored_at_ms)
                    for unit in units
                    if unit in fallen and unit.kind is not RewritingKind.MERGED
                    for one in unit.segments
                ),
            )
        fallen |= overtaken


class _Lines:
    """
    The segments that records name, by numbers, and which were made of which.

    The attributes are read only. A line is a number as well.
    """

    def __init__(self, rewritings: Sequence[Rewriting]) -> None:
        self.numbers: dict[SegmentIdentity, int] = {}
        self.identities: list[SegmentIdentity] = []
        self.named: list[tuple[array[int], array[int]]] = []
        """The numbers of the segments that each record has stored, ascending by offset, and replaced."""
        self._made = array("i")
        """The first segment that was made of a segment; -1 where there is none."""
        self._made_more: dict[int, list[int]] = {}
        """All segments that were made of a segment, where they are more than one."""
        for one in rewritings:
            stored = sorted(one.stored, key=_LAST)
            self.named.append((self._numbered(stored), self._numbered(one.replaced)))
        parents = array("i", [-1]) * len(self.identities)
        """The segment that a segment was made of; -1 without one, -2 with several."""
        self._made = array("i", [-1]) * len(self.identities)
        self.base_offsets = array("q", (one.base_offset for one in self.identities))
        self.last_offsets = array("q", (one.last_offset for one in self.identities))
        for stored_numbers, replaced in self.named:
            self._relate(stored_numbers, replaced, parents)
        self.line_of = array("i", [-1]) * len(self.identities)
        """The line of each segment."""
        self.place_of = array("i", [0]) * len(self.identities)
        """How many segments of its line come before a segment."""
        self._first: list[int] = []
        """The first segment of each line."""
        self._last: list[int] = []
        self._draw(parents)
        self._below: dict[int, frozenset[int]] = {}

    def _numbered(self, segments: Iterable[SegmentIdentity]) -> array[int]:
        numbers, found = self.numbers, array("i")
        for one in segments:
            number = numbers.setdefault(one, len(numbers))
            if number == len(self.identities):
                self.identities.append(one)
            found.append(number)
        return found

    def _relate(self, stored: array[int], replaced: array[int], parents: array[int]) -> None:
        bases, lasts, made = self.base_offsets, self.last_offsets, self._made
        ends, row = [lasts[one] for one in stored], 0
        for part in replaced:
            base, last = bases[part], lasts[part]
            # Neighbours follow each other in most records.
            if row >= len(ends) or ends[row] < base or (row and ends[row - 1] >= base):
                row = bisect_left(ends, base)
            at = row
            while at < len(ends) and bases[stored[at]] <= last:
                child = stored[at]
                at += 1
                if made[part] == -1:
                    made[part] = child
                elif child in self._made_of(part):
                    continue
                else:
                    self._made_more.setdefault(part, [made[part]]).append(child)
                parents[child] = part if parents[child] == -1 else -2

    def _made_of(self, number: int) -> Sequence[int]:
        first = self._made[number]
        return self._made_more.get(number) or (() if first == -1 else (first,))

    def _draw(self, parents: array[int]) -> None:
        """Put each segment into a line."""
        bases, lasts = self.base_offsets, self.last_offsets

        def only_child(number: int) -> int:
            child = self._made[number]
            if child == -1 or number in self._made_more or parents[child] != number:
                return -1
            is_alike = bases[number] == bases[child] and lasts[number] == lasts[child]
            return child if is_alike and child != number else -1

        heads = (n for n, parent in enumerate(parents) if parent < 0 or only_child(parent) != n)
        # A ring of segments has no head. No program writes one, and each of its segments is a line then.
        for is_ring, numbers in ((False, heads), (True, range(len(parents)))):
            for number in numbers:
                if self.line_of[number] != -1:
                    continue
                self._first.append(number)
                line, place, last = len(self._first) - 1, 0, number
                self.line_of[number] = line
                while not is_ring and (child := only_child(last)) != -1:
                    last, place = child, place + 1
                    self.line_of[last], self.place_of[last] = line, place
                self._last.append(last)

    def span(self, line: int) -> SegmentIdentity:
        """Return a segment of a line, for its offsets."""
        return self.identities[self._first[line]]

    def below(self, line: int) -> frozenset[int]:
        """Return the lines whose segments were made of a line's last segment."""
        found = self._below.get(line)
        if found is None:
            seen: set[int] = set()
            todo = [line]
            while todo:
                children = self._made_of(self._last[todo.pop()])
                new = {self.line_of[child] for child in children} - seen
                seen |= new
                todo += new
            found = self._below[line] = frozenset(seen)
        return found

    def are_related(self, one: int, other: int) -> bool:
        """Say whether the segments of one line were made of those of the other, or the lines are the same."""
        return one == other or other in self.below(one) or one in self.below(other)


class _Stored:
    """Which segments of the records are stored."""

    def __init__(self, lines: _Lines, stored: Iterable[SegmentIdentity]) -> None:
        self._lines = lines
        self.numbers: set[int] = {number for one in stored if (number := lines.numbers.get(one)) is not None}
        """Their numbers."""
        self._last_place: dict[int, int] = {}
        """The place of the last stored segment in each line."""
        for number in self.numbers:
            line, place = lines.line_of[number], lines.place_of[number]
            self._last_place[line] = max(place, self._last_place.get(line, -1))
        self._is_below: dict[int, bool] = {}

    def has(self, unit: _Unit) -> bool:
        """Say whether all of a unit is stored, or what was made of it; its beginning may have expired."""
        there = [self._has(one) for one in unit.segments]
        return True in there and all(there[there.index(True) :])

    def _has(self, number: int) -> bool:
        line = self._lines.line_of[number]
        if self._last_place.get(line, -1) >= self._lines.place_of[number]:
            return True
        found = self._is_below.get(line)
        if found is None:
            found = self._is_below[line] = any(one in self._last_place for one in self._lines.below(line))
        return found


class _Overlaps:
    """Lines, found by their offsets."""

    def __init__(self, lines: _Lines, wanted: Iterable[int]) -> None:
        rows = sorted(
            (span.base_offset, span.last_offset, one) for one in wanted for span in (lines.span(one),)
        )
        self._rows = rows
        self._reach = list(accumulate((last for _, last, _ in rows), max))
        """The greatest last offset of each row and all before it."""

    def over(self, span: SegmentIdentity) -> Iterator[int]:
        """Yield the lines that overlap *span*."""
        row = bisect_right(self._rows, span.last_offset, key=itemgetter(0)) - 1
        while row >= 0 and self._reach[row] >= span.base_offset:
            if self._rows[row][1] >= span.base_offset:
                yield self._rows[row][2]
            row -= 1


class _Layers:
    """Lines that are added one after the other. In each layer they ascend and do not overlap."""

    def __init__(self) -> None:
        self._layers: list[list[tuple[int, int, int]]] = []

    def add(self, line: int, span: SegmentIdentity) -> None:
        """Add a line with its offsets."""
        layer = next((each for each in self._layers if not any(_within(each, span))), None)
        if layer is None:
            layer = []
            self._layers.append(layer)
        insort(layer, (span.last_offset, span.base_offset, line))

    def over(self, span: SegmentIdentity) -> Iterator[int]:
        """Yield the lines that overlap *span*."""
        for layer in self._layers:
            for row in _within(layer, span):
                yield row[2]


def _within(layer: list[tuple[int, int, int]], span: SegmentIdentity) -> Iterator[tuple[int, int, int]]:
    row = bisect_left(layer, span.base_offset, key=itemgetter(0))
    while row < len(layer) and layer[row][1] <= span.last_offset:
        yield layer[row]
        row += 1


@dataclass(slots=True)
class _LineClaims:
    """The valid units with segments in one line."""

    units: list[tuple[int, _Unit]] = field(default_factory=list)
    """Each with the place of its segment."""
    last_place: int = -1


class _Claims:
    """The offsets of the valid units."""

    def __init__(self, lines: _Lines) -> None:
        self._lines = lines
        self._units: list[_Unit] = []
        self._of_line: dict[int, _LineClaims] = {}
        self._layers = _Layers()

    def add(self, unit: _Unit) -> None:
        """Add a unit, unless it contradicts one that was added before."""
        lines = self._lines
        places = [(lines.line_of[one], lines.place_of[one]) for one in unit.segments]
        # A line that was added is related to all others that were.
        new = [line for line, _ in places if line not in self._of_line]
        if not all(
            lines.are_related(line, claim) for line in new for claim in self._layers.over(lines.span(line))
        ):
            return
        self._units.append(unit)
        for line, place in places:
            claims = self._of_line.get(line)
            if claims is None:
                claims = self._of_line[line] = _LineClaims()
                self._layers.add(line, lines.span(line))
            claims.units.append((place, unit))
            claims.last_place = max(claims.last_place, place)

    def supersede(self, one: SegmentIdentity) -> bool:
        """Say whether any unit supersedes a segment."""
        return any(self._against(one))

    def against(self, one: SegmentIdentity) -> list[_Unit]:
        """Return the units that supersede a segment."""
        return [
            unit for claims, begin in self._against(one) for place, unit in claims.units if place >= begin
        ]

    def _against(self, one: SegmentIdentity) -> Iterator[tuple[_LineClaims, int]]:
        """Yield the claims that supersede a segment by line, and from which place of the line on."""
        lines, number = self._lines, self._lines.numbers.get(one)
        own = None if number is None else lines.line_of[number]
        for line in self._layers.over(one):
            claims = self._of_line[line]
            if number is not None and line == own:
                # What is later in its line was made of the segment.
                begin = lines.place_of[number] + 1
                if claims.last_place >= begin and line not in lines.below(line):
                    yield claims, begin
            elif own is None or own not in lines.below(line):
                yield claims, 0

    def named(self, wanted: Container[int]) -> dict[SegmentIdentity, int]:
        """Return the *wanted* segments of all units, with the latest times of their records."""
        oldest_first = sorted(self._units, key=attrgetter("stored_at_ms"))
        identities = self._lines.identities
        return {
            identities[one]: unit.stored_at_ms
            for unit in oldest_first
            for one in unit.segments
            if one in wanted
        }


class _NewerLeaders:
    """The first offsets of the logs of leaders after a given epoch."""

    def __init__(self, epoch_starts: Mapping[int, int]) -> None:
        self._epochs = sorted(epoch_starts)
        starts = accumulate((epoch_starts[epoch] for epoch in reversed(self._epochs)), min)
        self._earliest = list(starts)[::-1]
        """The smallest first offset of each epoch and all newer ones."""

    def have_cut(self, last_offset: int, known_epoch: int) -> bool:
        """Say whether leaders after *known_epoch* wrote other records up to a segment's last offset."""
        row = bisect_right(self._epochs, known_epoch)
        return row < len(self._epochs) and self._earliest[row] <= last_offset


def _units(
    recorded: Iterable[RecordedRewriting],
    stored: Mapping[SegmentIdentity, int],
    epoch_starts: Mapping[int, int],
    lines: _Lines,
) -> list[_Unit]:
    """Return the units, those with precedence first."""
    units: list[_Unit] = []
    leaders = _NewerLeaders(epoch_starts)
    # A segment may hold batches of a newer epoch than the one in its name.
    known = {number: epoch for one, epoch in stored.items() if (number := lines.numbers.get(one)) is not None}
    for one, (numbers, _) in zip(recorded, lines.named, strict=True):
        left = tuple(
            each
            for each in numbers
            if not leaders.have_cut(
                lines.last_offsets[each], known.get(each, lines.identities[each].leader_epoch)
            )
        )
        is_whole = one.rewriting.kind is RewritingKind.COMPACTED
        groups = [left] if is_whole else [(each,) for each in left]
        units += [_Unit(group, one.rewriting.kind, one.stored_at_ms) for group in groups if group]
    # A merge comes last: it still holds the records that a rewriting of the same segments removed.
    return sorted(
        units, key=lambda unit: (unit.kind is not RewritingKind.MERGED, unit.stored_at_ms), reverse=True
    )


def _passed_over(units: Iterable[_Unit], recorded: Iterable[RecordedRewriting], lines: _Lines) -> set[_Unit]:
    """Return the units that never took place: later other segments were at their offsets."""
    of_line: defaultdict[int, list[_Unit]] = defaultdict(list)
    line_of = lines.line_of
    for unit in units:
        for number in unit.segments:
            of_line[line_of[number]].append(unit)
    overlaps = _Overlaps(lines, of_line)
    # The replaced segments were in the manifest at the time of the record. A merge's own objects may have
    # come too late.
    there_ms: dict[int, int] = {}
    """The latest time, by line, at which a unit's other segments cannot have been there."""
    for one, (stored, replaced) in zip(recorded, lines.named, strict=True):
        is_merge = one.rewriting.kind is RewritingKind.MERGED
        for numbers, at_ms in (
            (replaced, one.stored_at_ms),
            (stored if is_merge else (), one.stored_at_ms - UNDER_WAY_MS),
        ):
            for number in numbers:
                line = line_of[number]
                if there_ms.get(line, at_ms - 1) < at_ms:
                    there_ms[line] = at_ms
    found: set[_Unit] = set()
    for line, at_ms in there_ms.items():
        for other in overlaps.over(lines.span(line)):
            if not lines.are_related(line, other):
                found.update(unit for unit in of_line[other] if at_ms > unit.stored_at_ms)
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
