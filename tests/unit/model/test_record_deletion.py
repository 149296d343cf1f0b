"""A recorded deletion by a user: how far it reaches, and how the archive's start follows it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.model.values import PARTITION, remote, stored
from tieringd.formats.manifest_codec import decode_manifest, encode_manifest
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Gap, RecordDeletion
from tieringd.model.tail_cut import cut_back

ARCHIVE = stored([remote(0, 99), remote(100, 199), remote(200, 299)])


def deleted(before_offset, manifest=ARCHIVE, *, leader_epoch=5):
    """Return the manifest that records the deletion and follows it."""
    recorded = manifest.with_deletion(RecordDeletion(before_offset, leader_epoch))
    return recorded.following_deletion(now_ms=7)


@pytest.mark.parametrize(
    ("before_offset", "start_offset", "segments"),
    [
        pytest.param(1, 1, 3, id="inside the first segment"),
        pytest.param(99, 99, 3, id="at its last record"),
        pytest.param(100, 100, 2, id="at a segment's base"),
        pytest.param(101, 101, 2, id="inside the next"),
        pytest.param(299, 299, 1, id="at the last record of all"),
        pytest.param(300, 300, 0, id="at the archive's end"),
        pytest.param(301, 300, 0, id="past the archive's end"),
    ],
)
def test_start_follows_to_the_record(before_offset, start_offset, segments):
    """Whole segments go, and nothing at or past the offset does."""
    found = deleted(before_offset)
    assert (found.start_offset, len(found.segments), found.next_offset) == (start_offset, segments, 300)
    assert sum(len(one.segments) for one in found.retired) == 3 - segments
    assert (found.deleted_before, found.expired_at_ms, found.faults()) == (before_offset, 7, ())


@pytest.mark.parametrize(
    ("last_offset", "start_offset", "segments"),
    [(348, 349, 0), (349, 350, 0), (350, 350, 1), (399, 350, 1)],
)
def test_what_is_uploaded_later_follows_too(last_offset, start_offset, segments):
    """The archive was behind the deletion: at the end of an upload, at both sides of it, and far before."""
    found = deleted(350).appended([remote(300, last_offset)]).following_deletion(now_ms=8)
    assert (found.start_offset, len(found.segments), found.faults()) == (start_offset, segments, ())


def test_gap_before_the_deletions_end_is_no_segment():
    """The archive begins with the rest of the gap, and the next segment loses nothing."""
    behind = deleted(350).with_gap(Gap(300, 399, "lost", 5)).appended([remote(400, 499)])
    found = behind.following_deletion(now_ms=8)
    assert (found.start_offset, [one.base_offset for one in found.segments]) == (300, [400])
    assert found.faults() == ()


def test_smaller_deletion_changes_nothing():
    """The furthest one stays recorded."""
    found = deleted(150)
    assert deleted(120, found) is found
    assert deleted(150, found) is found
    assert deleted(160, found).start_offset == 160


def test_records_of_a_later_leader_are_not_deleted():
    """An unclean election let another leader write offsets from 220 on; the deletion ends there."""
    later = replace(ARCHIVE, epochs=((5, 0), (6, 220)))
    assert deleted(250, later, leader_epoch=5).start_offset == 220
    assert deleted(250, later, leader_epoch=6).start_offset == 250
    assert deleted(210, later, leader_epoch=5).start_offset == 210


def test_later_leaders_records_stay_when_they_are_uploaded():
    """The deletion is recorded first, and the later leader's log is archived after it."""
    found = deleted(350).appended([remote(300, 399, leader_epoch=6)], [(6, 320)])
    assert found.following_deletion(now_ms=8).start_offset == 320


def test_deletion_of_a_replaced_tail_ends_at_the_cut():
    """The new leader's records take the place of deleted ones, and are not deleted themselves."""
    recorded = replace(ARCHIVE, deletions=(RecordDeletion(400, 5),))
    assert cut_back(recorded, 200, leader_epoch=6, now_ms=1).deleted_before == 200
    assert cut_back(recorded, 200, leader_epoch=5, now_ms=1).deleted_before == 400, "of that very leader"
    assert (
        cut_back(
            replace(ARCHIVE, deletions=(RecordDeletion(150, 5),)), 200, leader_epoch=6, now_ms=1
        ).deleted_before
        == 150
    )


def test_archive_without_segments_keeps_the_deletion_for_later():
    """Nothing was stored when a user deleted the records."""
    empty = deleted(50, PartitionManifest.begin(PARTITION, start_offset=0))
    assert (empty.start_offset, empty.deleted_before) == (0, 50)
    found = empty.appended([remote(0, 99)]).following_deletion(now_ms=8)
    assert (found.start_offset, len(found.segments)) == (50, 1)


@pytest.mark.parametrize(
    "deletions",
    [
        pytest.param([(350, 3), (341, 6)], id="a later leader's ends earlier"),
        pytest.param([(341, 6), (350, 3)], id="the older leader's is recorded last"),
    ],
)
def test_deletion_under_another_epoch_does_not_replace_a_recorded_one(deletions):
    """Epoch 6 turns out to begin at 324: only the deletion of epoch 3 ends there."""
    manifest = ARCHIVE
    for before_offset, leader_epoch in deletions:
        manifest = deleted(before_offset, manifest, leader_epoch=leader_epoch)
    assert manifest.deleted_before == 350
    later = manifest.appended([remote(300, 399, leader_epoch=6)], [(6, 324)])
    assert later.following_deletion(now_ms=8).start_offset == 341
    assert decode_manifest(encode_manifest(manifest)).deletions == manifest.deletions


def test_deletion_that_another_one_covers_is_not_kept():
    """A further deletion under a later epoch takes the place of all before it."""
    found = deleted(250, deleted(220, deleted(240, leader_epoch=3), leader_epoch=5), leader_epoch=6)
    assert found.deletions == (RecordDeletion(250, 6),)


def test_cut_leaves_no_two_deletions_of_one_end():
    """Two deletions that a later leader's cut gives one end become one."""
    found = deleted(341, deleted(350, leader_epoch=3), leader_epoch=4)
    assert len(found.deletions) == 2
    assert cut_back(found, 200, leader_epoch=6, now_ms=1).deletions == (RecordDeletion(200, 4),)


@pytest.mark.parametrize(("same_to", "before_offset"), [(0, 200), (240, 240), (400, 250)])
def test_deletion_outlives_a_cut_as_far_as_the_records_are_the_same(same_to, before_offset):
    """A segment that diverges inside is cut off as a whole; its first records are archived anew."""
    recorded = replace(ARCHIVE, deletions=(RecordDeletion(250, 5),))
    cut = cut_back(recorded, 200, leader_epoch=6, now_ms=1, same_to=same_to)
    assert cut.deleted_before == before_offset
