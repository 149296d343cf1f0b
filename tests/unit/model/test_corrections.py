"""A gap inside an archive, where an operator gives up segments."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.model.values import PARTITION, remote
from tieringd.model.corrections import with_gap_inside
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Gap, Retired
from tieringd.model.segment import CrossingTransaction
from tieringd.model.segment_table import SegmentTable
from tieringd.model.tail_cut import undone

MANIFEST = PartitionManifest.begin(PARTITION, start_offset=0).appended(
    [remote(0, 9), remote(10, 19), remote(20, 29), remote(30, 39)]
)


def gap(first: int, last: int) -> Gap:
    return Gap(first, last, "given up", 5)


@pytest.mark.parametrize(("first", "last", "left"), [(10, 19, [0, 20, 30]), (0, 29, [30]), (10, 29, [0, 30])])
def test_whole_segments_give_way_to_a_gap(first, last, left):
    """The manifest keeps its rules."""
    found = with_gap_inside(MANIFEST, gap(first, last))
    assert found.faults() == ()
    assert [one.base_offset for one in found.segments] == left
    assert found.gaps == (gap(first, last),)
    assert found.retired == (), "the objects go to quarantine, and are not deleted by the archiver"


def test_gaps_stay_in_order():
    """Several ranges may be given up, one after another."""
    found = with_gap_inside(with_gap_inside(MANIFEST, gap(20, 29)), gap(0, 9))
    assert found.gaps == (gap(0, 9), gap(20, 29))
    assert found.faults() == ()


@pytest.mark.parametrize(
    ("first", "last"),
    [(10, 18), (11, 19), (30, 39), (10, 9), (40, 49)],
    ids=["its end", "its begin", "the newest", "nothing", "past the end"],
)
def test_other_ranges_are_refused(first, last):
    """A gap fills the space between two segments exactly, and the newest segment stays."""
    with pytest.raises(ValueError, match="are not whole segments"):
        with_gap_inside(MANIFEST, gap(first, last))


def test_nothing_is_put_back_into_the_gap():
    """A compaction that has replaced some of the offsets stays, and no log decides a marker in the gap."""
    held = Retired(SegmentTable.of([remote(10, 19, size_bytes=7)]), 1, winners_end=35)
    other = Retired(SegmentTable.of([remote(0, 9, size_bytes=7)]), 1, winners_end=35)
    lost, kept = CrossingTransaction(1, 5, 15, 0), CrossingTransaction(2, 5, 25, 0)
    manifest = replace(MANIFEST, retired=(other, held), crossing=(lost, kept))
    found = with_gap_inside(manifest, gap(10, 19))
    assert [one.is_held for one in found.retired] == [True, False]
    assert found.crossing == (kept,)
    assert undone(found, 32, now_ms=6).faults() == ()
