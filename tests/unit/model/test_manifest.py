"""The partition manifest: each change by itself, and every broken rule by its words."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.model.values import PARTITION, WRITERS, manifests, remote, stored
from tieringd.model.manifest import SEGMENTS_REMEMBERED, PartitionManifest
from tieringd.model.manifest_parts import Gap, Replacement, Retired
from tieringd.model.segment import CrossingTransaction
from tieringd.model.segment_table import SegmentTable
from tieringd.model.tail_cut import cut_back

EMPTY = PartitionManifest.begin(PARTITION, start_offset=10)
TWO = stored([remote(10, 19), remote(20, 29)])


def test_manifest_begins_with_nothing():
    """A new manifest ends where it starts, and no writer has claimed it."""
    assert (EMPTY.start_offset, EMPTY.next_offset, EMPTY.last_offset) == (10, 10, None)
    assert (EMPTY.leader_epoch, EMPTY.writer_id, EMPTY.commit_number) == (-1, "", 0)
    assert (len(EMPTY.segments), EMPTY.gaps, EMPTY.epochs) == (0, (), ())
    assert EMPTY.faults() == ()


def test_appended_segments_move_the_end():
    """The next offset is the end of the last segment, and the old manifest stays as it was."""
    longer = TWO.appended([remote(30, 30), remote(31, 99)])
    assert [one.base_offset for one in longer.segments] == [10, 20, 30, 31]
    assert (longer.next_offset, longer.last_offset) == (100, 99)
    assert (TWO.next_offset, TWO.last_offset, len(TWO.segments)) == (30, 29, 2)
    assert longer.faults() == TWO.faults() == ()


@pytest.mark.parametrize(
    "segments",
    [
        pytest.param([remote(31, 39)], id="hole"),
        pytest.param([remote(29, 39)], id="overlap"),
        pytest.param([remote(20, 29)], id="again"),
        pytest.param([remote(30, 29)], id="empty"),
        pytest.param([remote(30, 39), remote(41, 49)], id="hole inside"),
        pytest.param([remote(30, 39), remote(39, 49)], id="overlap inside"),
    ],
)
def test_appended_refuses_a_hole_an_overlap_and_an_empty_segment(segments):
    """A segment that does not begin where the last one ends is refused with all its neighbours."""
    culprit = segments[-1]
    with pytest.raises(ValueError, match=f"segment {culprit.base_offset} to {culprit.last_offset} cannot fo"):
        TWO.appended(segments)


@pytest.mark.parametrize(
    ("known", "added", "expected"),
    [
        pytest.param((), ((3, 10),), ((3, 10),), id="first"),
        pytest.param(((3, 10),), ((3, 20),), ((3, 10),), id="known epoch keeps its start"),
        pytest.param(((3, 10),), ((3, 5),), ((3, 10),), id="known epoch with an earlier start"),
        pytest.param(((3, 10),), ((3, 20), (5, 25)), ((3, 10), (5, 25)), id="next"),
        pytest.param(((3, 10),), ((4, 10),), ((3, 10), (4, 10)), id="an epoch without records"),
        pytest.param((), ((1, 0), (2, 5), (2, 7), (9, 9)), ((1, 0), (2, 5), (9, 9)), id="several"),
        pytest.param(((3, 10),), (), ((3, 10),), id="none"),
    ],
)
def test_appended_extends_the_history_of_epochs(known, added, expected):
    """Epochs that are not known yet go to the end; a known one keeps where it began."""
    assert EMPTY.appended((), known).appended((), added).epochs == expected


@pytest.mark.parametrize(
    ("added", "words"),
    [
        pytest.param(((2, 30),), "leader epoch 2 at offset 30 follows epoch 3 at 10", id="epoch goes back"),
        pytest.param(((4, 9),), "leader epoch 4 at offset 9 follows epoch 3 at 10", id="start goes back"),
        pytest.param(((4, 12), (5, 11)), "epoch 5 at offset 11 follows epoch 4 at 12", id="among the new"),
    ],
)
def test_appended_refuses_an_epoch_that_goes_back(added, words):
    """Neither an epoch nor its start may be lower than the one before."""
    with pytest.raises(ValueError, match=words):
        EMPTY.appended((), ((3, 10),)).appended((), added)


def test_gap_is_recorded_at_the_end():
    """A gap takes the place of segments, with its reason and time, and uploading goes on after it."""
    gap = Gap(30, 44, "deleted by the broker", 1234)
    longer = TWO.with_gap(gap)
    assert (longer.gaps, longer.next_offset, longer.last_offset) == ((gap,), 45, 44)
    assert longer.appended([remote(45, 50)]).faults() == ()
    assert TWO.gaps == ()


@pytest.mark.parametrize(
    "gap", [Gap(31, 44, "", 0), Gap(29, 44, "", 0), Gap(30, 29, "", 0)], ids=["after", "before", "empty"]
)
def test_gap_anywhere_else_is_refused(gap):
    """A gap begins at the next offset and holds at least one."""
    with pytest.raises(ValueError, match=f"gap {gap.base_offset} to {gap.last_offset} cannot follow offset"):
        TWO.with_gap(gap)


LONG = (
    stored([remote(10, 19), remote(20, 29)])
    .appended((), ((3, 10), (5, 20)))
    .with_gap(Gap(30, 39, "gone", 7))
    .appended([remote(40, 49), remote(50, 59)], ((8, 45), (9, 60)))
)
"""Segments 10, 20, a gap, 40, 50; epochs 3 from 10, 5 from 20, 8 from 45, and 9, which wrote nothing."""


@pytest.mark.parametrize(
    ("next_offset", "rows", "gaps", "epochs"),
    [
        pytest.param(50, [10, 20, 40], 1, [3, 5, 8], id="the last segment"),
        pytest.param(40, [10, 20], 1, [3, 5], id="to the end of the gap"),
        pytest.param(30, [10, 20], 0, [3, 5], id="the gap as well"),
        pytest.param(20, [10], 0, [3], id="all but the first"),
        pytest.param(10, [], 0, [], id="everything"),
    ],
)
def test_cut_back_manifest_ends_at_the_cut_and_remembers_what_was_replaced(next_offset, rows, gaps, epochs):
    """Segments, gaps and epochs from the cut on go; the range, the new epoch and the time stay."""
    cut = cut_back(LONG, next_offset, leader_epoch=12, now_ms=99)
    assert [one.base_offset for one in cut.segments] == rows
    assert len(cut.gaps) == gaps
    assert [epoch for epoch, _ in cut.epochs] == epochs
    assert (cut.next_offset, cut.start_offset) == (next_offset, 10)
    assert cut.replacements == (Replacement(next_offset, 59, 12, 99),)
    assert cut.faults() == ()
    assert (LONG.next_offset, len(LONG.segments), LONG.replacements) == (60, 4, ())


@pytest.mark.parametrize("next_offset", [11, 19, 21, 31, 39, 41, 51, 59, 60, 61, -1])
def test_cut_back_refuses_any_other_place(next_offset):
    """A cut is refused inside a segment or gap, at the end, and outside of the archive."""
    with pytest.raises(ValueError, match=f"orders-3 cannot be cut back to offset {next_offset}"):
        cut_back(LONG, next_offset, leader_epoch=12, now_ms=99)


@pytest.mark.parametrize("next_offset", [0, 9])
def test_cut_back_before_the_start_leaves_nothing_and_begins_there(next_offset):
    """Another leader wrote from there on, and nothing of it was ever archived."""
    cut = cut_back(LONG, next_offset, leader_epoch=12, now_ms=99)
    assert (cut.start_offset, cut.next_offset) == (next_offset, next_offset)
    assert (len(cut.segments), cut.gaps, cut.faults()) == (0, (), ())
    assert cut.replacements == (Replacement(next_offset, 59, 12, 99),)


def test_cut_back_manifest_goes_on_with_another_leader_s_segments():
    """Segments after the cut are appended as ever, and another replacement is added to the first."""
    cut = cut_back(LONG, 40, leader_epoch=12, now_ms=99)
    longer = cut.appended([remote(40, 43)], ((12, 40),))
    again = cut_back(longer, 40, leader_epoch=14, now_ms=100)
    assert longer.faults() == again.faults() == ()
    assert again.replacements == (Replacement(40, 59, 12, 99), Replacement(40, 43, 14, 100))
    assert again.epochs == ((3, 10), (5, 20))


def test_cut_back_keeps_its_writer_and_its_beginning():
    """A cut is a change like any other: the writer that commits it signs it."""
    signed = dataclasses.replace(LONG, began_at_ms=5).committed(
        writer_id=WRITERS[1], leader_epoch=9, commit_number=3, now_ms=50
    )
    cut = cut_back(signed, 40, leader_epoch=12, now_ms=99)
    assert (cut.began_at_ms, cut.leader_epoch, cut.commit_number, cut.committed_at_ms) == (5, 9, 3, 50)


def test_empty_manifest_has_nothing_to_cut():
    """Nothing was stored, so nothing can be replaced."""
    with pytest.raises(ValueError, match="cannot be cut back"):
        cut_back(EMPTY, 10, leader_epoch=1, now_ms=0)


def test_manifest_remembers_when_it_began():
    """The beginning is that of the first version, whatever comes after."""
    begun = PartitionManifest.begin(PARTITION, start_offset=10, now_ms=1234)
    assert begun.began_at_ms == 1234
    later = begun.appended([remote(10, 19)]).committed(
        writer_id="w", leader_epoch=1, commit_number=1, now_ms=99
    )
    assert later.began_at_ms == 1234


def test_committed_changes_the_writer_and_nothing_else():
    """The claim is four fields; what is stored stays the same."""
    signed = TWO.committed(writer_id=WRITERS[1], leader_epoch=7, commit_number=42, now_ms=99)
    claim = (signed.writer_id, signed.leader_epoch, signed.commit_number, signed.committed_at_ms)
    assert claim == (WRITERS[1], 7, 42, 99)
    assert signed.committed(writer_id="", leader_epoch=-1, commit_number=0, now_ms=0) == TWO


def _with(base: PartitionManifest, *segments, **changes) -> PartitionManifest:
    """Return *base* with rows and fields that no method would let in."""
    rows = {"segments": SegmentTable.of(segments)} if segments else {}
    return dataclasses.replace(base, **rows, **changes)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        pytest.param(
            _with(TWO, remote(10, 19), remote(21, 29)),
            ["offsets 20 to 20 are neither stored nor a recorded gap"],
            id="hole",
        ),
        pytest.param(
            _with(TWO, remote(12, 29)),
            ["offsets 10 to 11 are neither stored nor a recorded gap"],
            id="hole at the start",
        ),
        pytest.param(
            _with(TWO, remote(10, 20), remote(20, 29)),
            ["segment 20 overlaps the offsets before 21"],
            id="overlap by one",
        ),
        pytest.param(
            _with(TWO, remote(10, 29), remote(20, 24), remote(30, 39), next_offset=40),
            ["segment 20 overlaps the offsets before 30"],
            id="inside another",
        ),
        pytest.param(
            _with(TWO, remote(0, 9), remote(10, 29)),
            ["segment 0 overlaps the offsets before 10"],
            id="before the start",
        ),
        pytest.param(
            _with(TWO, remote(20, 29), remote(10, 19)),
            ["segment 10 follows segment 20, out of order"],
            id="rows out of order",
        ),
        pytest.param(
            _with(TWO, remote(10, 29), remote(10, 29)),
            ["segment 10 follows segment 10, out of order", "segment 10 overlaps the offsets before 30"],
            id="twice",
        ),
        pytest.param(
            _with(TWO, remote(10, 29), remote(30, 29)),
            ["segment 30 ends before it begins, at 29"],
            id="empty segment",
        ),
        pytest.param(
            _with(TWO, gaps=(Gap(25, 29, "", 0),)),
            ["gap 25 overlaps the offsets before 30"],
            id="gap over a segment",
        ),
        pytest.param(
            _with(TWO, gaps=(Gap(30, 29, "", 0),)), ["gap 30 ends before it begins, at 29"], id="empty gap"
        ),
        pytest.param(
            _with(TWO, next_offset=31),
            ["next_offset is 31, but the last entry ends before 30"],
            id="end too late",
        ),
        pytest.param(
            _with(TWO, next_offset=29),
            ["next_offset is 29, but the last entry ends before 30"],
            id="end too early",
        ),
        pytest.param(
            _with(EMPTY, next_offset=11),
            ["next_offset is 11, but the last entry ends before 10"],
            id="end without entries",
        ),
        pytest.param(
            _with(TWO, epochs=((3, 10), (2, 20))),
            ["leader epoch 2 at 20 follows 3 at 10"],
            id="epoch goes back",
        ),
        pytest.param(
            _with(TWO, epochs=((3, 10), (3, 20))), ["leader epoch 3 at 20 follows 3 at 10"], id="epoch twice"
        ),
        pytest.param(
            _with(TWO, epochs=((3, 10), (4, 9), (5, 12), (1, 12))),
            ["leader epoch 4 at 9 follows 3 at 10", "leader epoch 1 at 12 follows 5 at 12"],
            id="two at once",
        ),
    ],
)
def test_faults_names_every_broken_rule(broken, words):
    """Each broken rule is one line that names the offsets; nothing else is reported."""
    assert list(broken.faults()) == words


@given(manifests(), st.data())
def test_faults_sees_every_lost_row(manifest, data):
    """A sound manifest has none, and one without any one of its rows is no longer sound."""
    assert manifest.faults() == ()
    rows = list(manifest.segments)
    if rows:
        del rows[data.draw(st.integers(0, len(rows) - 1))]
        assert dataclasses.replace(manifest, segments=SegmentTable.of(rows)).faults()


@given(manifests(), st.data())
def test_faults_sees_any_two_rows_that_changed_places(manifest, data):
    """Rows in another order would be searched in vain, so they are a fault."""
    rows = list(manifest.segments)
    if len(rows) > 1:
        first = data.draw(st.integers(0, len(rows) - 2))
        rows[first], rows[first + 1] = rows[first + 1], rows[first]
        assert dataclasses.replace(manifest, segments=SegmentTable.of(rows)).faults()


def crossing(first_offset: int, marker_offset: int) -> CrossingTransaction:
    return CrossingTransaction(7, first_offset, marker_offset, 5)


def test_crossing_transaction_is_one_however_many_segments_tell_of_it():
    """A crossing transaction begins at its first reported offset, in whatever order segments report it."""
    another = CrossingTransaction(8, 20, 60, 6)
    told = [crossing(35, 60), another, crossing(31, 60), crossing(33, 60), crossing(36, 45)]
    begun = TWO.appended([remote(30, 39)], crossing=told)
    assert begun.crossing == (crossing(36, 45), crossing(31, 60), another)
    again = begun.appended([remote(40, 49)], crossing=[crossing(40, 60)])
    assert again.crossing == begun.crossing, "the first marker is in the archive, and may be cut off again"
    assert again.faults() == ()


def test_crossing_transaction_is_forgotten_when_its_marker_is_far_from_the_end():
    """A manifest does not grow by every transaction that there ever was."""
    rows = [remote(10 * row, 10 * row + 9) for row in range(SEGMENTS_REMEMBERED)]
    told = [crossing(5, 9), crossing(5, 10), crossing(7, 10_000)]
    full = stored(rows).appended((), crossing=told)
    assert full.crossing == tuple(told)
    assert full.appended([remote(full.next_offset, full.next_offset)]).crossing == tuple(told[1:])


def test_gap_takes_the_transactions_whose_markers_are_lost_in_it():
    """Transactions whose markers are in a gap are not whole any more, whatever another log says."""
    told = [crossing(15, 29), crossing(15, 30), crossing(15, 39), crossing(15, 40)]
    begun = TWO.appended((), crossing=told).with_gap(Gap(30, 39, "gone", 7))
    assert begun.crossing == (told[0], told[3])


def test_cut_at_the_archives_start_leaves_no_transaction_that_began_before_it():
    """Nothing of it is archived. With it, each round would find it reopened, and nothing to cut off."""
    inside = TWO.appended((), crossing=[crossing(5, 45)]).starting_inside(TWO.segments[0], 15, now_ms=7)
    assert cut_back(inside, 20, leader_epoch=12, now_ms=8).crossing == (crossing(5, 45),)
    cut = cut_back(inside, 15, leader_epoch=12, now_ms=8)
    assert (cut.start_offset, cut.next_offset, cut.crossing, cut.faults()) == (15, 15, (), ())


def test_cut_back_manifest_keeps_the_transactions_that_began_before_the_cut():
    """The markers of these transactions may be cut off, and are past the archive's end then."""
    told = [crossing(12, 18), crossing(12, 28), crossing(25, 45), crossing(15, 50)]
    cut = cut_back(TWO.appended((), crossing=told), 20, leader_epoch=9, now_ms=1)
    assert cut.crossing == (told[0], told[1], told[3])
    assert cut.faults() == ()


@pytest.mark.parametrize(
    "one",
    [
        pytest.param(crossing(30, 40), id="begins past the end"),
        pytest.param(crossing(20, 20), id="is its own marker"),
        pytest.param(crossing(21, 20), id="ends before it begins"),
    ],
)
def test_transaction_that_crosses_nothing_breaks_a_rule(one):
    """Such a transaction has no records in the archive, or nothing between them and its marker."""
    assert dataclasses.replace(TWO, crossing=(one,)).faults() == (
        f"the transaction from {one.first_offset} to {one.marker_offset} crosses no segment's end",
    )


def test_merge_puts_one_segment_in_the_place_of_its_parts():
    """The parts are retired, in order, and what is beside them stays."""
    parts = [remote(0, 4), remote(5, 9), remote(10, 19), remote(20, 29)]
    manifest = stored(parts)
    merged = remote(5, 19, size_bytes=2048, writer_id=WRITERS[1])
    found = manifest.merged(merged, now_ms=7)
    assert list(found.segments) == [parts[0], merged, parts[3]]
    assert found.retired == (Retired(SegmentTable.of(parts[1:3]), 7),)
    assert (found.start_offset, found.next_offset, found.expired_at_ms) == (0, 30, None)
    assert found.faults() == ()
    assert found.forgotten(2).retired == ()


@pytest.mark.parametrize(
    "merged",
    [
        pytest.param(remote(5, 9), id="one-segment"),
        pytest.param(remote(5, 19, size_bytes=2049), id="other-size"),
        pytest.param(remote(6, 19, size_bytes=2048), id="begins-inside"),
        pytest.param(remote(5, 18, size_bytes=2048), id="ends-inside"),
        pytest.param(remote(20, 39, size_bytes=2048), id="past-the-end"),
    ],
)
def test_merge_of_what_is_not_there_is_refused(merged):
    """A merged segment is all of two or more neighbours, to the byte."""
    manifest = stored([remote(0, 4), remote(5, 9), remote(10, 19), remote(20, 29)])
    with pytest.raises(ValueError, match="do not match the manifest"):
        manifest.merged(merged, now_ms=0)


def test_merge_over_a_gap_is_refused():
    """Segments on both sides of a recorded gap are not one segment."""
    manifest = stored([remote(0, 4)]).with_gap(Gap(5, 6, "lost", 0)).appended([remote(7, 9)])
    with pytest.raises(ValueError, match="do not match the manifest"):
        manifest.merged(remote(0, 9, size_bytes=2048), now_ms=0)


def test_merge_forgets_the_transactions_that_cross_no_end_any_more():
    """One that begins before the merged segment, or ends after it, is still remembered."""
    inside, ends, begins, around = (
        CrossingTransaction(1, 6, 12, 0),
        CrossingTransaction(2, 3, 13, 0),
        CrossingTransaction(3, 7, 20, 0),
        CrossingTransaction(4, 2, 40, 0),
    )
    manifest = stored([remote(0, 4), remote(5, 9), remote(10, 19), remote(20, 29)])
    manifest = manifest.appended((), crossing=[inside, ends, begins, around])
    found = manifest.merged(remote(5, 19, size_bytes=2048), now_ms=0)
    assert set(found.crossing) == {ends, begins, around}


@pytest.mark.parametrize(("trims_to", "expected"), [(0, 10), (5, 10), (20, 20), (30, 30), (99, 30)])
def test_hint_is_a_record_of_the_trim_that_follows(trims_to, expected):
    """A hint records the trim that it allows, and a lower hint forgets no trim."""
    found = TWO.with_hint(25, trims_to=trims_to)
    assert (found.allowed_local_start_offset, found.trimmed_offset) == (25, expected)
    assert found.with_hint(0).trimmed_offset == expected


def test_archive_begun_anew_forgets_no_trim():
    """Segments below the archive's start may have been trimmed as expired, which needs no record."""
    emptied = TWO.expired(2, now_ms=1)
    assert emptied.trimmed_offset == 10
    assert cut_back(emptied, 4, leader_epoch=1, now_ms=2).trimmed_offset == 30
    assert cut_back(TWO, 20, leader_epoch=1, now_ms=2).trimmed_offset == 10


def test_archive_that_begins_inside_its_first_segment_goes_on():
    """The archive expires, is merged and is cut as any other. An offset of another segment is refused."""
    inside = TWO.starting_inside(TWO.segments[0], 15, now_ms=7)
    assert (inside.start_offset, inside.live_base, inside.expired_at_ms) == (15, 10, 7)
    assert inside.faults() == inside.expired(1, now_ms=8).faults() == ()
    assert inside.expired(1, now_ms=8).start_offset == 20
    merged = inside.merged(remote(10, 29, size_bytes=2048), now_ms=8)
    assert (merged.start_offset, merged.faults()) == (15, ())
    for cut in (10, 15, 20):
        assert cut_back(inside, cut, leader_epoch=1, now_ms=8).faults() == ()
    for segment, offset in ((0, 10), (0, 15), (0, 20), (1, 25)):
        with pytest.raises(ValueError, match=f"cannot begin at {offset}"):
            inside.starting_inside(TWO.segments[segment], offset, now_ms=9)


@pytest.mark.parametrize(
    ("offset", "bases", "start"),
    [(0, [10, 20], 10), (10, [10, 20], 10), (15, [10, 20], 15), (20, [20], 20), (25, [20], 25), (99, [], 30)],
)
def test_readers_see_an_archive_from_an_offset_on(offset, bases, start):
    """The segment in which it lies stays, as do the ones after it."""
    seen = TWO.seen_from(offset)
    assert ([one.base_offset for one in seen.segments], seen.start_offset) == (bases, start)
    assert seen.next_offset == 30


def test_compacted_segments_take_the_place_of_their_originals():
    """The originals are retired in order, their neighbours stay, and more or fewer segments may follow."""
    parts = [remote(0, 4), remote(5, 9), remote(10, 19), remote(20, 29)]
    one = remote(5, 19, size_bytes=2047)
    found = stored(parts).compacted([one], now_ms=7)
    assert list(found.segments) == [parts[0], one, parts[3]]
    assert found.retired == (Retired(SegmentTable.of(parts[1:3]), 7),)
    two = [remote(5, 7, size_bytes=3), remote(8, 19, size_bytes=0)]
    again = found.compacted(two, now_ms=8)
    assert list(again.segments) == [parts[0], *two, parts[3]]
    assert again.retired == (*found.retired, Retired(SegmentTable.of([one]), 8))
    assert (again.start_offset, again.next_offset, again.faults()) == (0, 30, ())


def test_compacted_segment_that_was_retired_before_is_refused():
    """The retired segment's objects are about to be deleted, under the name that the new one would have."""
    first = remote(0, 9)
    second = remote(0, 9, size_bytes=7)
    manifest = stored([first]).compacted([second], now_ms=1)
    with pytest.raises(ValueError, match="cannot be replaced by compacted segments"):
        manifest.compacted([first], now_ms=2)
    assert manifest.forgotten(1).compacted([first], now_ms=3).segments[0] == first


def test_compaction_over_a_gap_is_refused():
    """A gap stays recorded: it is unknown what was there."""
    manifest = stored([remote(0, 4)]).with_gap(Gap(5, 6, "lost", 0)).appended([remote(7, 9)])
    with pytest.raises(ValueError, match="cannot be replaced by compacted segments"):
        manifest.compacted([remote(0, 9, size_bytes=1)], now_ms=0)


def test_compaction_knows_the_transactions_over_the_new_ends():
    """A transaction inside a new segment is forgotten. One that crosses an end is remembered once."""
    inside, ends, crosses_anew = (
        CrossingTransaction(1, 6, 12, 0),
        CrossingTransaction(2, 3, 13, 0),
        CrossingTransaction(3, 11, 17, 0),
    )
    manifest = stored([remote(0, 4), remote(5, 9), remote(10, 19), remote(20, 29)])
    manifest = manifest.appended((), crossing=[inside, ends])
    new = [remote(5, 14, size_bytes=9), remote(15, 19, size_bytes=9)]
    found = manifest.compacted(new, now_ms=0, crossing=[crosses_anew])
    assert found.crossing == (ends, crosses_anew)
    assert manifest.compacted(new, now_ms=0, crossing=[CrossingTransaction(2, 8, 13, 0)]).crossing == (ends,)
