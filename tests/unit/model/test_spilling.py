"""A manifest and its spilled parts: the cases that chance seldom meets."""

from __future__ import annotations

import pytest

from tests.unit.model.values import remote, stored
from tieringd.model.manifest_parts import Gap
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
from tieringd.model.spillover import ExpiredSpillover
from tieringd.model.tail_cut import cut_back


def spilling(manifest, *rows: int):
    """Spill so many segments into one part after another; return the manifest and the parts."""
    parts = []
    for count in rows:
        part = part_to_spill(manifest, count)
        manifest = spilled(manifest, part, part.name(0))
        parts.append(part)
    return manifest, parts


def segments(count: int, first: int = 0):
    return [remote(10 * row, 10 * row + 9, size_bytes=100) for row in range(first, first + count)]


def expired(manifest, next_offset: int, now_ms: int):
    first = manifest.start_offset // 10
    gone = SegmentTable.of(segments(next_offset // 10 - first, first))
    return spillover_expired(manifest, gone, now_ms=now_ms)


def retired(manifest) -> list[tuple[int, int]]:
    return [(row.base_offset, one.retired_at_ms) for one in manifest.retired for row in one.segments]


def test_marks_that_end_in_what_is_taken_back_are_cut():
    """The rest of the spilled segments has expired as far as it goes, since the first mark that said so."""
    manifest, parts = spilling(stored(segments(7)), 2, 4)
    for next_offset, now_ms in ((10, 1), (30, 2), (40, 3)):
        manifest = expired(manifest, next_offset, now_ms)
    found = with_parts(manifest, parts[1:])
    assert found.faults() == ()
    assert found.spillover.retired == (ExpiredSpillover(10, 1), ExpiredSpillover(20, 2))
    assert (found.spillover.segments, found.spillover.size_bytes) == (0, 0)
    assert retired(found) == [(20, 2), (30, 3)]
    assert [one.base_offset for one in found.segments] == [40, 50, 60]


def test_nothing_is_left_spilled_behind_what_was_deleted():
    """A part that ends where all objects are gone is not taken for one that is still there."""
    manifest, parts = spilling(stored(segments(7)), 2, 4)
    manifest = spillover_deleted(expired(manifest, 20, 1), 20)
    found = with_parts(manifest, parts[1:])
    assert found.spillover is None
    assert found.faults() == ()
    assert [one.base_offset for one in found.segments] == [20, 30, 40, 50, 60]


def test_retired_segments_stay_in_the_order_of_their_times():
    """The oldest are deleted first, and are forgotten from the head."""
    manifest = stored(segments(7)).expired(1, now_ms=1)
    manifest, parts = spilling(manifest, 2, 3)
    manifest = expired(manifest, 20, 2)
    assert retired(with_parts(manifest, parts)) == [(0, 1), (10, 2)]


def test_deleted_segments_do_not_come_back():
    """The rest of a part that was deleted in part is still to be deleted."""
    manifest, parts = spilling(stored(segments(7)), 6)
    manifest = spillover_deleted(expired(manifest, 40, 5), 20)
    assert retired(with_parts(manifest, parts)) == [(20, 5), (30, 5)]


def test_pieces_fill_the_archive_between_them():
    """Each piece is a sound manifest of its own offsets, without what has expired."""
    manifest = stored(segments(2)).with_gap(Gap(20, 29, "lost", 0)).appended(segments(4, first=3))
    manifest = manifest.with_gap(Gap(70, 79, "lost", 0))
    manifest, parts = spilling(manifest, 1, 3)
    manifest = expired(manifest, 10, 5)
    first, second, live = (*(piece_of(manifest, part) for part in parts), live_piece(manifest))
    for piece in (first, second, live):
        assert (piece.faults(), piece.spillover, piece.retired) == ((), None, ())
    assert (first.start_offset, first.next_offset, len(first.segments)) == (10, 10, 0)
    assert (second.start_offset, second.next_offset, len(second.segments)) == (10, 50, 3)
    assert (live.start_offset, live.next_offset, len(live.segments)) == (50, 80, 2)
    assert [gap.base_offset for gap in (*second.gaps, *live.gaps)] == [20, 70]
    assert live_piece(stored(segments(2))) == stored(segments(2))


def test_readers_see_what_is_spilled_from_an_offset_on():
    """Hidden segments are in no piece, and nothing is spilled once all spilled segments are hidden."""
    manifest, parts = spilling(stored(segments(6)), 2, 2)
    seen = manifest.seen_from(25)
    piece = piece_of(seen, parts[1])
    assert ([one.base_offset for one in piece.segments], piece.start_offset) == ([20, 30], 25)
    assert [one.base_offset for one in live_piece(seen).segments] == [40, 50]
    live = manifest.seen_from(45)
    assert live.spillover is None
    assert ([one.base_offset for one in live_piece(live).segments], live.start_offset) == ([40, 50], 45)


@pytest.mark.parametrize("rows", [0, 3, -1])
def test_no_more_spills_than_there_is(rows):
    """A part has at least one segment, and the newest stays live."""
    with pytest.raises(ValueError, match="cannot spill"):
        part_to_spill(stored(segments(3)), rows)


def test_nothing_spills_behind_an_expired_part():
    """Parts follow each other without a hole."""
    manifest, _ = spilling(stored(segments(4)), 2)
    manifest = expired(manifest, 20, 1)
    with pytest.raises(ValueError, match="has expired and is still to be deleted"):
        part_to_spill(manifest, 1)
    assert part_to_spill(spillover_deleted(manifest, 20), 1).previous is None


def test_cut_leaves_a_live_segment_or_takes_the_spilled_ones_back():
    """The archive's newest segment is in the live manifest, as long as there is one."""
    manifest, parts = spilling(stored(segments(6)), 2, 2)
    for cut in (0, 10, 20, 40):
        with pytest.raises(ValueError, match="cannot be cut back"):
            cut_back(manifest, cut, leader_epoch=1, now_ms=0)
    assert cut_back(manifest, 50, leader_epoch=1, now_ms=0).faults() == ()
    found = cut_back(with_parts(manifest, parts[1:]), 40, leader_epoch=1, now_ms=0)
    assert found.faults() == ()
    assert [one.base_offset for one in found.segments] == [20, 30]


def test_archive_may_begin_inside_a_spilled_segment_behind_a_gap():
    """The gap is passed with what is before it, and the rest of the archive is as it was."""
    manifest = stored(segments(2)).with_gap(Gap(20, 29, "lost", 0)).appended(segments(4, first=3))
    manifest, parts = spilling(manifest, 2, 2)
    manifest = expired(manifest, 20, 1)
    assert (manifest.start_offset, manifest.gap_offsets) == (20, 10)
    found = manifest.starting_inside(parts[1].segments[0], 33, now_ms=2)
    assert (found.start_offset, found.gap_offsets, found.expired_at_ms, found.faults()) == (33, 0, 2, ())
    whole = with_parts(found, parts)
    assert (whole.faults(), whole.gaps, whole.spillover) == ((), (), None)
    assert [one.base_offset for one in whole.segments] == [30, 40, 50, 60]
    piece = piece_of(found, parts[1])
    assert (piece.start_offset, len(piece.segments), piece.faults()) == (33, 2, ())
