"""A manifest that spills against plain lists, through any sequence of changes and crashes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.examples import examples
from tests.unit.model.values import PARTITION, WRITERS, remote, remote_segments
from tieringd.archive.record_deletion import following_deletion
from tieringd.formats.manifest_codec import (
    decode_manifest,
    decode_spillover,
    encode_manifest,
    encode_spillover,
)
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Gap, RecordDeletion
from tieringd.model.segment_table import SegmentTable
from tieringd.model.spilling import (
    live_piece,
    part_to_spill,
    piece_of,
    spilled,
    spillover_deleted,
    spillover_expired,
    with_parts,
)
from tieringd.model.tail_cut import cut_back

if TYPE_CHECKING:
    from tieringd.model.segment import RemoteSegment
    from tieringd.model.spillover import SpilloverManifest, SpilloverName

LONGEST = 6


class _Parts:
    """Gives out spilled parts as `SpilloverManifests` does, without ever waiting."""

    def __init__(self, parts: list[SpilloverManifest]) -> None:
        self._parts = parts

    async def pieces(self, manifest: PartitionManifest, *, from_offset: int):
        """Yield the pieces from the one that holds *from_offset* on."""
        for part in self._parts:
            if part.next_offset > from_offset:
                yield piece_of(manifest, part)
        yield live_piece(manifest)


class SpillingMachine(RuleBasedStateMachine):
    """
    Append, replace, merge, trim, spill, expire, delete, take back and claim, in any order.

    The model is a list of segments, one of gaps, and one of what has expired and is not deleted. It
    knows nothing of spilling. `bucket` holds every spillover manifest that was ever stored.
    """

    @initialize(start_offset=st.integers(0, 20))
    def begin(self, start_offset: int) -> None:
        self.manifest = PartitionManifest.begin(PARTITION, start_offset=start_offset)
        self.start_offset = self.next_offset = start_offset
        self.segments: list[RemoteSegment] = []
        self.gaps: list[Gap] = []
        self.retired: list[tuple[RemoteSegment, int]] = []
        self.bucket: dict[SpilloverName, bytes] = {}
        self.now_ms = 0
        self.deleted_before = 0

    @property
    def is_spilled(self) -> bool:
        return self.manifest.spillover is not None and self.manifest.spillover.segments > 0

    def parts(self) -> list[SpilloverManifest]:
        """Return the parts that belong to the archive, ascending: by their names alone."""
        found: list[SpilloverManifest] = []
        spillover = self.manifest.spillover
        name = spillover.newest if spillover else None
        while name is not None and name.next_offset > spillover.begin_offset:
            found.append(decode_spillover(self.bucket[name], partition=PARTITION, name=name))
            name = found[-1].previous
        return found[::-1]

    def whole(self) -> PartitionManifest:
        return with_parts(self.manifest, self.parts())

    @rule(count=st.integers(2, 6), data=st.data())
    def append(self, count: int, data: st.DataObject) -> None:
        added = []
        for _ in range(count):
            drawn = data.draw(remote_segments(self.next_offset, max_length=LONGEST))
            # No upload has the name of an earlier one, so none is equal to a segment that has expired.
            crc32c = drawn.crc32c
            while any(replace(drawn, crc32c=crc32c) == one for one, _ in self.retired):
                crc32c = (crc32c + 1) % 2**32
            added.append(replace(drawn, crc32c=crc32c))
            self.next_offset = added[-1].next_offset
        self.segments += added
        self.manifest = self.manifest.appended(added)

    @rule(length=st.integers(1, LONGEST))
    def record_gap(self, length: int) -> None:
        gap = Gap(self.next_offset, self.next_offset + length - 1, "retention", len(self.gaps))
        self.gaps.append(gap)
        self.next_offset = gap.next_offset
        self.manifest = self.manifest.with_gap(gap)

    def _part(self, data: st.DataObject) -> tuple[SpilloverManifest, SpilloverName]:
        part = part_to_spill(
            self.manifest, data.draw(st.integers(1, min(3, len(self.manifest.segments) - 1)))
        )
        document, name = encode_spillover(part)
        self.bucket[name] = document
        return part, name

    def _may_spill(self) -> bool:
        return len(self.manifest.segments) > 1 and (self.manifest.spillover is None or self.is_spilled)

    @precondition(_may_spill)
    @rule(data=st.data())
    def spill(self, data: st.DataObject) -> None:
        part, name = self._part(data)
        before = self.manifest
        self.manifest = spilled(before, part, name)
        if before.spillover is None:
            assert with_parts(self.manifest, [part]) == before

    @precondition(_may_spill)
    @rule(data=st.data())
    def spill_again(self, data: st.DataObject) -> None:
        self.spill(data)

    @precondition(_may_spill)
    @rule(data=st.data())
    def crash_after_a_part_was_stored(self, data: st.DataObject) -> None:
        self._part(data)

    @rule(writer_id=st.sampled_from(WRITERS), epoch=st.integers(0, 9))
    def claim(self, writer_id: str, epoch: int) -> None:
        signed = self.manifest.committed(
            writer_id=writer_id, leader_epoch=epoch, commit_number=1, now_ms=self.now_ms
        )
        self.manifest = decode_manifest(encode_manifest(signed))
        assert self.manifest == signed

    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        parts = self.parts()
        if parts:
            self.manifest = with_parts(self.manifest, parts[data.draw(st.integers(0, len(parts) - 1)) :])

    @rule(data=st.data())
    def cut_back(self, data: st.DataObject) -> None:
        entries = [*self.segments, *self.gaps]
        if not entries:
            return
        cut = data.draw(st.sampled_from(sorted((one.base_offset for one in entries), reverse=True)[:4]))
        if self.is_spilled and not any(one.next_offset <= cut for one in self.manifest.segments):
            with pytest.raises(ValueError, match="cannot be cut back"):
                cut_back(self.manifest, cut, leader_epoch=0, now_ms=5)
            # Back to the newest part that has a segment below the cut; all of them where none has.
            parts = self.parts()
            kept = [number for number, part in enumerate(parts) if part.segments[0].next_offset <= cut]
            self.manifest = with_parts(self.manifest, parts[max(kept, default=0) :])
        self.manifest = cut_back(self.manifest, cut, leader_epoch=0, now_ms=5)
        self.segments = [one for one in self.segments if one.last_offset < cut]
        self.gaps = [one for one in self.gaps if one.last_offset < cut]
        self.next_offset = cut
        self.start_offset = min(self.start_offset, cut)

    @precondition(lambda self: not self.is_spilled and 0 < self.start_offset < self.next_offset)
    @rule(data=st.data())
    def begin_anew(self, data: st.DataObject) -> None:
        cut = data.draw(st.integers(0, self.start_offset - 1))
        self.manifest = cut_back(self.manifest, cut, leader_epoch=0, now_ms=5)
        self.segments, self.gaps = [], []
        self.start_offset = self.next_offset = cut

    @precondition(lambda self: self.segments)
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        held = self.manifest.spillover.segments if self.is_spilled else len(self.segments)
        gone = self.segments[: data.draw(st.integers(1, min(held, 3)))]
        self.now_ms += 1
        if self.is_spilled:
            with pytest.raises(ValueError, match="cannot expire"):
                self.manifest.expired(1, now_ms=0)
            self.manifest = spillover_expired(self.manifest, SegmentTable.of(gone), now_ms=self.now_ms)
        else:
            self.manifest = self.manifest.expired(len(gone), now_ms=self.now_ms)
        self.start_offset = gone[-1].next_offset
        self.retired += [(one, self.now_ms) for one in gone]
        self.segments = self.segments[len(gone) :]
        self.gaps = [one for one in self.gaps if one.base_offset >= self.start_offset]

    @rule(count=st.integers(0, 4))
    def forget(self, count: int) -> None:
        rows = [(row, one.retired_at_ms) for one in self.manifest.retired for row in one.segments]
        for row in rows[:count]:
            self.retired.remove(row)
        self.manifest = self.manifest.forgotten(count)

    @rule(data=st.data())
    def delete_what_expired_of_the_spilled(self, data: st.DataObject) -> None:
        spillover = self.manifest.spillover
        if spillover is None or not spillover.retired:
            return
        rows = [row for part in self.parts() for row in part.segments]
        limit = spillover.retired[-1].next_offset
        left = [row for row in rows if spillover.begin_offset <= row.base_offset and row.next_offset <= limit]
        gone = left[: data.draw(st.integers(1, len(left)))]
        for row in gone:
            self.retired.remove(next(one for one in self.retired if one[0] == row))
        self.manifest = spillover_deleted(self.manifest, gone[-1].next_offset)

    @precondition(lambda self: self.is_spilled)
    @rule(data=st.data())
    def expire_a_little(self, data: st.DataObject) -> None:
        self.expire(data)

    @rule(distance=st.integers(1, 9))
    def refuse_to_expire_elsewhere(self, distance: int) -> None:
        base = self.manifest.live_offset + distance
        for gone in ([], [remote(base, base)]):
            with pytest.raises(ValueError, match="cannot expire up to"):
                spillover_expired(self.manifest, SegmentTable.of(gone), now_ms=0)

    @precondition(lambda self: self.segments)
    @rule(data=st.data())
    def delete_records_inside_the_first(self, data: st.DataObject) -> None:
        first = self.segments[0]
        begin = max(self.start_offset, first.base_offset)
        for wrong in (begin, first.next_offset):
            with pytest.raises(ValueError, match="cannot begin at"):
                self.manifest.starting_inside(first, wrong, now_ms=0)
        if begin < first.last_offset:
            offset = data.draw(st.integers(begin + 1, first.last_offset))
            self.manifest = self.manifest.starting_inside(first, offset, now_ms=self.now_ms)
            self.start_offset = offset
            self.gaps = [one for one in self.gaps if one.base_offset >= offset]

    @rule(distance=st.integers(-20, 5))
    def delete_records(self, distance: int) -> None:
        """Record a deletion, and follow it over spilled and live segments at once."""
        self.now_ms += 1
        before_offset = max(0, self.next_offset + distance)
        self.deleted_before = max(self.deleted_before, before_offset)
        recorded = self.manifest.with_deletion(RecordDeletion(before_offset, leader_epoch=2**31 - 1))
        following = following_deletion(recorded, _Parts(self.parts()), now_ms=self.now_ms)
        with pytest.raises(StopIteration) as done:
            following.send(None)
        self.manifest = done.value.value
        gone = [one for one in self.segments if one.next_offset <= self.deleted_before]
        self.segments = self.segments[len(gone) :]
        self.retired += [(one, self.now_ms) for one in gone]
        self.start_offset = gone[-1].next_offset if gone else self.start_offset
        if self.segments and self.segments[0].base_offset < self.deleted_before:
            self.start_offset = max(self.start_offset, self.deleted_before)
        self.gaps = [one for one in self.gaps if one.base_offset >= self.start_offset]

    @precondition(lambda self: len(self.manifest.segments) > 1)
    @rule(data=st.data())
    def merge(self, data: st.DataObject) -> None:
        live = list(self.manifest.segments)
        row = data.draw(st.integers(0, len(live) - 2))
        parts = live[row : row + data.draw(st.integers(2, 3))]
        size_bytes = sum(one.size_bytes for one in parts)
        if size_bytes >= 2**63:
            return
        merged = replace(parts[0], last_offset=parts[-1].last_offset, size_bytes=size_bytes)
        if any(one.next_offset != later.base_offset for one, later in pairwise(parts)):
            with pytest.raises(ValueError, match="do not match the manifest"):
                self.manifest.merged(merged, now_ms=0)
            return
        self.now_ms += 1
        self.manifest = self.manifest.merged(merged, now_ms=self.now_ms)
        at = self.segments.index(parts[0])
        self.segments[at : at + len(parts)] = [merged]
        self.retired += [(one, self.now_ms) for one in parts]

    @rule()
    def refuse_to_delete_what_is_held(self) -> None:
        spillover = self.manifest.spillover
        limit = spillover.retired[-1].next_offset if spillover and spillover.retired else self.start_offset
        with pytest.raises(ValueError, match="is held from before"):
            spillover_deleted(self.manifest, limit + 1)

    @rule()
    def refuse_parts_that_are_not_the_newest(self) -> None:
        parts = self.parts()
        for wrong in (parts[:-1], parts[:-2] + parts[-1:] if len(parts) > 2 else []):
            if wrong:
                with pytest.raises(ValueError, match="not the newest spilled parts"):
                    with_parts(self.manifest, wrong)

    @invariant()
    def is_sound(self) -> None:
        assert self.manifest.faults() == ()

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        assert (self.manifest.start_offset, self.manifest.next_offset) == (
            self.start_offset,
            self.next_offset,
        )
        assert self.manifest.segment_count == len(self.segments)
        assert self.manifest.size_bytes == sum(one.size_bytes for one in self.segments)
        assert self.manifest.gap_offsets == sum(one.offsets for one in self.gaps)

    @invariant()
    def is_whole_with_its_parts(self) -> None:
        found = self.whole()
        assert found.faults() == ()
        assert found.spillover is None
        assert list(found.segments) == self.segments
        assert list(found.gaps) == self.gaps
        retired = [(row, one.retired_at_ms) for one in found.retired for row in one.segments]
        assert sorted(retired, key=repr) == sorted(self.retired, key=repr)
        times = [one.retired_at_ms for one in found.retired]
        assert times == sorted(times)

    @invariant()
    def parts_follow_each_other(self) -> None:
        for part, later in zip(self.parts(), self.parts()[1:], strict=False):
            assert part.next_offset == later.base_offset


SpillingMachine.TestCase.settings = settings(
    max_examples=examples(100), stateful_step_count=40, deadline=None
)


class TestSpillingStates(SpillingMachine.TestCase):
    """All parts together are what there would be without spilling, after any sequence of changes."""
