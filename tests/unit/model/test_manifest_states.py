"""The partition manifest against a plain list of offsets, through any sequence of changes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support.examples import examples
from tests.unit.model.values import PARTITION, WRITERS, remote_segments
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Gap, Replacement
from tieringd.model.tail_cut import cut_back

if TYPE_CHECKING:
    from tieringd.model.segment import RemoteSegment

LONGEST = 6
"""Offsets in one segment or gap: short, so that every offset of the log is looked up."""


class ManifestMachine(RuleBasedStateMachine):
    """
    Append, record gaps, commit, and try what must be refused.

    The model is two lists in the order of the calls and one dictionary from each offset to what
    holds it. It knows nothing of columns and bisection.
    """

    @initialize(start_offset=st.integers(0, 20))
    def begin(self, start_offset: int) -> None:
        self.manifest = PartitionManifest.begin(PARTITION, start_offset=start_offset)
        self.start_offset = start_offset
        self.next_offset = start_offset
        self.segments: list[RemoteSegment] = []
        self.gaps: list[Gap] = []
        self.holders: dict[int, RemoteSegment | Gap] = {}
        self.epochs: list[tuple[int, int]] = []
        self.replacements: list[Replacement] = []
        self.claim = ("", -1, 0, 0)
        self.retired: list[tuple[RemoteSegment, int]] = []
        self.expired_at_ms: int | None = None
        self.compactions = 0

    def _note(self, entry: RemoteSegment | Gap) -> None:
        for offset in range(entry.base_offset, entry.last_offset + 1):
            assert offset not in self.holders
            self.holders[offset] = entry
        self.next_offset = entry.last_offset + 1

    @rule(count=st.integers(0, 3), new_epoch=st.booleans(), data=st.data())
    def append(self, count: int, new_epoch: bool, data: st.DataObject) -> None:  # noqa: FBT001 drawn by name
        first_offset, added = self.next_offset, []
        for _ in range(count):
            added.append(data.draw(remote_segments(self.next_offset, max_length=LONGEST)))
            self._note(added[-1])
        self.segments += added
        if new_epoch:
            self.epochs.append((self.epochs[-1][0] + 2 if self.epochs else 0, first_offset))
        self.manifest = self.manifest.appended(added, self.epochs[-1:])

    @rule(length=st.integers(1, LONGEST), reason=st.sampled_from(["retention", "old format"]))
    def record_gap(self, length: int, reason: str) -> None:
        gap = Gap(self.next_offset, self.next_offset + length - 1, reason, len(self.gaps))
        self.gaps.append(gap)
        self._note(gap)
        self.manifest = self.manifest.with_gap(gap)

    @rule(writer_id=st.sampled_from(WRITERS), epoch=st.integers(0, 9), number=st.integers(1, 99))
    def commit(self, writer_id: str, epoch: int, number: int) -> None:
        self.claim = (writer_id, epoch, number, number * 10)
        self.manifest = self.manifest.committed(
            writer_id=writer_id, leader_epoch=epoch, commit_number=number, now_ms=number * 10
        )

    @rule(data=st.data())
    def cut_back(self, data: st.DataObject) -> None:
        entries = [*self.segments, *self.gaps]
        if not entries:
            return
        cut = data.draw(st.sampled_from(sorted(one.base_offset for one in entries)))
        self.replacements.append(Replacement(cut, self.next_offset - 1, len(self.replacements), 5))
        self.manifest = cut_back(self.manifest, cut, leader_epoch=len(self.replacements) - 1, now_ms=5)
        self.segments = [one for one in self.segments if one.last_offset < cut]
        self.gaps = [one for one in self.gaps if one.last_offset < cut]
        self.holders = {offset: holder for offset, holder in self.holders.items() if offset < cut}
        self.epochs = [(epoch, start) for epoch, start in self.epochs if start < cut]
        self.next_offset = cut

    @rule(data=st.data(), now_ms=st.integers(0, 9))
    def expire(self, data: st.DataObject, now_ms: int) -> None:
        if not self.segments:
            return
        count = data.draw(st.integers(1, len(self.segments)))
        self.start_offset = self.segments[count - 1].last_offset + 1
        self.retired += [(one, now_ms) for one in self.segments[:count]]
        self.manifest = self.manifest.expired(count, now_ms=now_ms)
        self.segments = self.segments[count:]
        self.gaps = [one for one in self.gaps if one.base_offset >= self.start_offset]
        self.holders = {offset: one for offset, one in self.holders.items() if offset >= self.start_offset}
        self.expired_at_ms = now_ms

    @rule(data=st.data(), now_ms=st.integers(0, 9))
    def merge(self, data: st.DataObject, now_ms: int) -> None:
        starts = [
            row
            for row, (one, other) in enumerate(pairwise(self.segments))
            if one.next_offset == other.base_offset
        ]
        if not starts:
            return
        first = data.draw(st.sampled_from(starts))
        last = first + 2
        while last < len(self.segments) and data.draw(st.booleans()):
            if self.segments[last - 1].next_offset != self.segments[last].base_offset:
                break
            last += 1
        parts = self.segments[first:last]
        drawn = data.draw(remote_segments(parts[0].base_offset, max_length=1))
        merged = replace(
            drawn,
            last_offset=parts[-1].last_offset,
            size_bytes=sum(part.size_bytes for part in parts),
        )
        if merged.size_bytes >= 2**63:
            return
        self.manifest = self.manifest.merged(merged, now_ms=now_ms)
        self.retired += [(part, now_ms) for part in parts]
        self.segments[first:last] = [merged]
        self.holders |= dict.fromkeys(range(merged.base_offset, merged.next_offset), merged)

    @rule(data=st.data(), change=st.sampled_from(["shorter", "longer", "smaller", "alone"]))
    def refuse_to_merge_what_is_not_there(self, data: st.DataObject, change: str) -> None:
        if not self.segments:
            return
        first = data.draw(st.integers(0, len(self.segments) - 1))
        parts = self.segments[first : first + 2]
        size_bytes = sum(part.size_bytes for part in parts)
        merged = replace(parts[0], last_offset=parts[-1].last_offset, size_bytes=size_bytes)
        match change:
            case "shorter":
                merged = replace(merged, last_offset=merged.last_offset - 1)
            case "longer":
                merged = replace(merged, last_offset=merged.last_offset + 1)
            case "smaller":
                merged = replace(merged, size_bytes=size_bytes + 1)
            case "alone":
                merged = parts[0]
        with pytest.raises(ValueError, match="do not match the manifest"):
            self.manifest.merged(merged, now_ms=0)

    @rule(data=st.data(), now_ms=st.integers(0, 9))
    def compact(self, data: st.DataObject, now_ms: int) -> None:
        if not self.segments:
            return
        first = data.draw(st.integers(0, len(self.segments) - 1))
        last = first + 1
        while last < len(self.segments) and data.draw(st.booleans()):
            if self.segments[last - 1].next_offset != self.segments[last].base_offset:
                break
            last += 1
        parts = self.segments[first:last]
        begin, end = parts[0].base_offset, parts[-1].next_offset
        cuts = data.draw(st.lists(st.integers(begin, end - 1), unique=True, max_size=3).map(sorted))
        bounds = [begin, *(cut for cut in cuts if cut > begin), end]
        self.compactions += 1
        new = [
            replace(
                parts[0],
                base_offset=base,
                last_offset=next_offset - 1,
                uploaded_at_ms=2**62 + self.compactions,
            )
            for base, next_offset in pairwise(bounds)
        ]
        self.manifest = self.manifest.compacted(new, now_ms=now_ms)
        self.retired += [(part, now_ms) for part in parts]
        self.segments[first:last] = new
        for one in new:
            self.holders |= dict.fromkeys(range(one.base_offset, one.next_offset), one)

    @rule(data=st.data(), change=st.sampled_from(["shorter", "longer", "later", "the same"]))
    def refuse_to_compact_what_is_not_there(self, data: st.DataObject, change: str) -> None:
        if not self.segments:
            return
        part = data.draw(st.sampled_from(self.segments))
        smaller = replace(part, size_bytes=max(part.size_bytes - 1, 0))
        match change:
            case "shorter":
                smaller = replace(smaller, last_offset=part.last_offset - 1)
            case "longer":
                smaller = replace(smaller, last_offset=self.next_offset)
            case "later":
                smaller = replace(smaller, base_offset=part.base_offset + 1)
            case "the same":
                smaller = part
        with pytest.raises(ValueError, match="cannot be replaced by compacted segments"):
            self.manifest.compacted([smaller], now_ms=0)

    @rule(count=st.integers(0, 9))
    def forget(self, count: int) -> None:
        self.manifest = self.manifest.forgotten(count)
        self.retired = self.retired[count:]

    @rule(more=st.integers(1, 3))
    def refuse_to_expire_what_is_not_there(self, more: int) -> None:
        for count in (0, len(self.segments) + more):
            with pytest.raises(ValueError, match="cannot expire"):
                self.manifest.expired(count, now_ms=0)

    @rule(data=st.data())
    def begin_anew(self, data: st.DataObject) -> None:
        if not 0 < self.start_offset < self.next_offset:
            return
        cut = data.draw(st.integers(0, self.start_offset - 1))
        self.replacements.append(Replacement(cut, self.next_offset - 1, len(self.replacements), 5))
        self.manifest = cut_back(self.manifest, cut, leader_epoch=len(self.replacements) - 1, now_ms=5)
        self.segments, self.gaps, self.holders = [], [], {}
        self.epochs = [(epoch, start) for epoch, start in self.epochs if start < cut]
        self.start_offset = self.next_offset = cut

    @rule(offset=st.integers(-1, 60))
    def refuse_a_cut_anywhere_else(self, offset: int) -> None:
        bases = {one.base_offset for one in self.holders.values()}
        is_inside = self.start_offset <= offset < self.next_offset and offset not in bases
        if offset < 0 or offset >= self.next_offset or is_inside:
            with pytest.raises(ValueError, match="cannot be cut back"):
                cut_back(self.manifest, offset, leader_epoch=0, now_ms=0)

    @rule(distance=st.integers(-LONGEST, LONGEST).filter(bool), data=st.data())
    def refuse_another_place(self, distance: int, data: st.DataObject) -> None:
        segment = data.draw(remote_segments(self.next_offset + distance, max_length=LONGEST))
        with pytest.raises(ValueError, match="cannot follow"):
            self.manifest.appended([segment])
        with pytest.raises(ValueError, match="cannot follow"):
            self.manifest.with_gap(Gap(segment.base_offset, segment.last_offset, "", 0))

    @rule(data=st.data())
    def refuse_a_hole_between_new_segments(self, data: st.DataObject) -> None:
        first = data.draw(remote_segments(self.next_offset, max_length=LONGEST))
        second = data.draw(remote_segments(first.next_offset + 1, max_length=LONGEST))
        with pytest.raises(ValueError, match="cannot follow"):
            self.manifest.appended([first, second])

    @rule()
    def refuse_an_empty_entry(self) -> None:
        with pytest.raises(ValueError, match="cannot follow"):
            self.manifest.with_gap(Gap(self.next_offset, self.next_offset - 1, "", 0))

    @rule(distance=st.integers(1, 3))
    def refuse_an_epoch_that_goes_back(self, distance: int) -> None:
        if self.epochs:
            epoch, start_offset = self.epochs[-1]
            with pytest.raises(ValueError, match="leader epoch"):
                self.manifest.appended((), [(epoch - distance, start_offset)])
            with pytest.raises(ValueError, match="leader epoch"):
                self.manifest.appended((), [(epoch + 1, start_offset - distance)])

    @invariant()
    def is_sound(self) -> None:
        assert self.manifest.faults() == ()

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        found = self.manifest
        assert (found.partition, found.start_offset) == (PARTITION, self.start_offset)
        assert found.next_offset == self.next_offset
        assert found.last_offset == max(self.holders, default=None)
        assert list(found.segments) == self.segments
        assert list(found.gaps) == self.gaps
        assert list(found.epochs) == self.epochs
        assert list(found.replacements) == self.replacements
        assert found.expired_at_ms == self.expired_at_ms
        assert [(row, one.retired_at_ms) for one in found.retired for row in one.segments] == self.retired
        assert all(len(one.segments) for one in found.retired)
        assert (found.writer_id, found.leader_epoch, found.commit_number, found.committed_at_ms) == self.claim

    @invariant()
    def every_offset_is_held_once_or_is_outside(self) -> None:
        assert sorted(self.holders) == list(range(self.start_offset, self.next_offset))
        for offset in range(self.start_offset - 1, self.next_offset + 1):
            holder = self.holders.get(offset)
            expected = None if isinstance(holder, Gap) else holder
            assert self.manifest.segments.covering(offset) == expected

    @invariant()
    def reading_begins_at_the_first_segment_that_is_not_behind(self) -> None:
        for offset in range(self.start_offset - 1, self.next_offset + 1):
            behind = [one for one in self.segments if one.last_offset < offset]
            assert self.manifest.segments.row_at_or_after(offset) == len(behind)

    @invariant()
    def times_are_those_of_the_rows(self) -> None:
        times = self.manifest.segments.column("max_timestamp_ms")
        for wanted in {0, *times}:
            expected = next((one for one in self.segments if one.max_timestamp_ms >= wanted), None)
            row = next((row for row, time_ms in enumerate(times) if time_ms >= wanted), None)
            assert (None if row is None else self.manifest.segments[row]) == expected


ManifestMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


class TestManifestStates(ManifestMachine.TestCase):
    """A manifest is sound and agrees with the model after any sequence of changes."""
