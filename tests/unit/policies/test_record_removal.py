"""The rule for dropping a record: what may go, what is held, and what an election brings back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.model.values import PARTITION, remote
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Gap, RecordDeletion, Unsettled
from tieringd.model.segment_table import SegmentTable
from tieringd.model.tail_cut import cut_back
from tieringd.policies.record_removal import (
    CompactionBasis,
    LogObservation,
    cut_for_unsettled,
    may_drop_tombstones,
    plan_release,
    why_winners_may_be_gone,
)
from tieringd.policies.segment_merge import MergeLimits, plan_merges
from tieringd.recovery.partition_mover import _for_target


def segment(number, *, writer_id="0a", size_bytes=100):
    """Return a segment of ten offsets."""
    return remote(number * 10, number * 10 + 9, writer_id=writer_id, size_bytes=size_bytes, leader_epoch=0)


def archive(segments=5) -> PartitionManifest:
    """Return an archive of so many segments."""
    return PartitionManifest.begin(PARTITION, start_offset=0).appended(
        [segment(number) for number in range(segments)], [(0, 0)]
    )


def compacted(manifest, *numbers, writer="e1", winners_end=50, is_held=True) -> PartitionManifest:
    """Return an archive in which some neighbouring segments were compacted, each for itself."""
    left = [segment(number, writer_id=f"rewritten-{writer}", size_bytes=10) for number in numbers]
    return manifest.compacted(left, now_ms=numbers[0], winners_end=winners_end, is_held=is_held)


def writers(manifest) -> list[str]:
    """Return the writer of each segment."""
    return [one.writer_id for one in manifest.segments]


def basis(manifest, rows=5, *, has_log=True) -> CompactionBasis:
    return CompactionBasis(manifest.segments.head(rows), manifest.replacements, has_log)


def test_cut_that_loses_a_winner_puts_the_originals_back():
    """The compacted segments leave with it, and their objects are to be deleted."""
    before = archive()
    after = cut_back(compacted(before, 0, 1), 40, leader_epoch=1, now_ms=9)
    assert list(after.segments) == list(before.segments)[:4]
    assert [(one.segments[0].writer_id, one.is_held) for one in after.retired] == [("rewritten-e1", False)]
    assert after.faults() == ()


def test_cut_behind_all_winners_undoes_nothing():
    """The compacted segments stay, and their originals are held on."""
    manifest = compacted(archive(), 0, 1, winners_end=30)
    after = cut_back(manifest, 30, leader_epoch=1, now_ms=9)
    assert writers(after) == ["rewritten-e1", "rewritten-e1", "0a"]
    assert after.retired == manifest.retired


def test_later_compactions_are_undone_with_an_earlier_one():
    """The later one may have dropped the tombstone of what the earlier one brings back."""
    manifest = compacted(compacted(archive(), 0, winners_end=50), 2, writer="e2", winners_end=30)
    assert writers(cut_back(manifest, 40, leader_epoch=1, now_ms=9)) == ["0a"] * 4


def test_compaction_of_a_compaction_is_undone_alone():
    """The first of two compactions of the same segments stays if the cut leaves all of its winners."""
    manifest = compacted(compacted(archive(), 0, 1, winners_end=30), 0, 1, writer="e2", winners_end=50)
    assert writers(cut_back(manifest, 40, leader_epoch=1, now_ms=9)) == [
        "rewritten-e1",
        "rewritten-e1",
        "0a",
        "0a",
    ]


def test_joined_segments_come_apart_again():
    """One that was made of three gives way to them."""
    joined = remote(0, 29, writer_id="rewritten-e1", size_bytes=10, leader_epoch=0)
    manifest = archive().compacted([joined], now_ms=1, winners_end=50)
    after = cut_back(manifest, 40, leader_epoch=1, now_ms=9)
    assert list(after.segments) == list(archive().segments)[:4]


def test_what_has_expired_does_not_come_back():
    """Retention took the oldest compacted segment: its original stays away."""
    manifest = compacted(archive(), 0, 1).expired(1, now_ms=5)
    after = cut_back(manifest, 40, leader_epoch=1, now_ms=9)
    assert [one.base_offset for one in after.segments] == [10, 20, 30]
    assert writers(after) == ["0a"] * 3
    assert not any(one.is_held for one in after.retired)
    assert after.faults() == ()


def test_original_around_the_archive_s_start_comes_back_whole():
    """Its head stays hidden, because the archive begins inside of it."""
    left = [remote(0, 4, size_bytes=5, leader_epoch=0), remote(5, 19, size_bytes=5, leader_epoch=0)]
    manifest = archive().compacted(left, now_ms=1, winners_end=50).expired(1, now_ms=5)
    after = cut_back(manifest, 40, leader_epoch=1, now_ms=9)
    assert list(after.segments) == list(archive().segments)[:4]
    assert (after.start_offset, after.unsettled) == (5, None)
    assert after.faults() == ()


@pytest.mark.parametrize("before_offset", [1, 10, 15, 19, 20])
def test_originals_before_a_users_deletion_do_not_come_back(before_offset):
    """The first one that comes back is the one in which the archive begins."""
    joined = remote(0, 19, writer_id="rewritten-e1", size_bytes=10, leader_epoch=0)
    manifest = archive().compacted([joined], now_ms=1, winners_end=50)
    manifest = manifest.with_deletion(RecordDeletion(before_offset, 0)).following_deletion(now_ms=2)
    after = cut_back(manifest, 40, leader_epoch=1, now_ms=9)
    bases = [base for base in (0, 10, 20, 30) if base + 9 >= before_offset]
    assert [one.base_offset for one in after.segments] == bases
    assert writers(after) == ["0a"] * len(bases)
    assert (after.start_offset, after.unsettled) == (before_offset, None)
    assert sum(len(one.segments) for one in after.retired if one.segments[0].writer_id == "0a") == 4 - len(
        bases
    )
    assert after.faults() == ()


def test_original_that_does_not_fit_any_more_is_not_called_settled():
    """Its place is one with its neighbours' now, so what was dropped there is noted as unsettled."""
    manifest = compacted(archive(), 1)
    joined = remote(0, 29, writer_id="joined", size_bytes=10, leader_epoch=0)
    manifest = manifest.compacted([joined], now_ms=3)
    after = cut_back(manifest, 40, leader_epoch=1, now_ms=9)
    assert writers(after) == ["joined", "0a"]
    assert after.unsettled == Unsettled(10, 40)
    assert not any(one.is_held for one in after.retired)
    assert after.faults() == ()


def test_an_erasure_ends_the_holding():
    """The replaced segments are not put back: only the log could bring their records back."""
    manifest = compacted(archive(), 0, 1)
    after = manifest.released(manifest.retired, is_settled=False)
    assert after.unsettled == Unsettled(0, 50)
    assert writers(cut_back(after, 40, leader_epoch=1, now_ms=9)) == [
        "rewritten-e1",
        "rewritten-e1",
        "0a",
        "0a",
    ]


def test_held_segments_are_not_forgotten():
    """Objects that may be needed again are not counted as deleted."""
    manifest = compacted(compacted(archive(), 0, winners_end=50), 2, writer="e2", winners_end=0)
    assert manifest.forgotten(1).retired == manifest.retired[:1]


@pytest.mark.parametrize(
    ("log_starts", "settled"), [([50, 50], 1), ([50, 49], 0), ([49, 50], 0), ([90, 70], 1), ([], 0)]
)
def test_winners_below_the_log_start_are_settled(log_starts, settled):
    """Winners settle only if they lie below the log's start in each observation of the log."""
    manifest = compacted(archive(), 0, 1)
    observations = [LogObservation(one, keeps_all=False) for one in log_starts]
    release = plan_release(manifest, observations)
    assert (len(release.settled), release.in_log, bool(release)) == (settled, (), bool(settled))


def test_a_later_compaction_is_held_with_an_earlier_one():
    """A later compaction cannot be undone alone."""
    manifest = compacted(compacted(archive(), 0, winners_end=50), 2, writer="e2", winners_end=30)
    assert not plan_release(manifest, [LogObservation(40, keeps_all=False)] * 2)
    assert len(plan_release(manifest, [LogObservation(50, keeps_all=False)] * 2).settled) == 2


def test_log_that_is_never_trimmed_holds_the_records_itself():
    """
    A log that is never trimmed holds its records from its start on.

    Segments before its start are held for good.
    """
    manifest = compacted(archive(), 1)
    observations = [LogObservation(10, keeps_all=True)] * 2
    assert plan_release(manifest, observations).in_log == manifest.retired
    assert not plan_release(manifest, [LogObservation(11, keeps_all=True)] * 2)
    assert not plan_release(manifest, [observations[0], LogObservation(10, keeps_all=False)])
    assert not plan_release(manifest, [observations[0], LogObservation(5, keeps_all=True)]), (
        "it was trimmed after all"
    )


def test_unreadable_offsets_are_settled():
    """Retention took all of it."""
    manifest = compacted(archive(), 0).expired(1, now_ms=5)
    assert len(plan_release(manifest, [LogObservation(0, keeps_all=False)] * 2).settled) == 1


def test_unsettled_offsets_settle_like_the_others():
    """Unsettled offsets settle when all winners lie below the log's start."""
    manifest = compacted(archive(), 1, is_held=False)
    assert not plan_release(manifest, [LogObservation(49, keeps_all=False)] * 2)
    assert plan_release(manifest, [LogObservation(50, keeps_all=False)] * 2).is_all_settled


@pytest.mark.parametrize(
    ("cut_offset", "log_start_offset", "expected", "is_lost"),
    [
        (40, 0, 10, False),
        (40, 10, 10, False),
        (40, 11, 20, True),
        (40, 35, 40, True),
        (40, 99, 40, True),
        (10, 0, 10, False),
        (50, 0, 50, False),
    ],
)
def test_log_takes_the_place_of_what_is_not_held(cut_offset, log_start_offset, expected, is_lost):
    """
    The archive is cut back to the first segment that the log has as a whole.

    Lost offsets before are reported.
    """
    manifest = replace(compacted(archive(6), 1, is_held=False))
    found, missing = cut_for_unsettled(manifest, cut_offset, log_start_offset=log_start_offset)
    assert (found, bool(missing)) == (expected, is_lost)


def test_cut_forgets_what_is_unsettled_past_it():
    """Nothing is unsettled any more where the log takes the place of all of it."""
    manifest = compacted(archive(), 1, is_held=False)
    assert cut_back(manifest, 10, leader_epoch=1, now_ms=9).unsettled is None
    assert cut_back(manifest, 30, leader_epoch=1, now_ms=9).unsettled == Unsettled(10, 30)


def test_compaction_needs_all_that_its_winners_came_from():
    """A cut of any segment that the compaction read refuses it, not only a cut of those that it rewrites."""
    manifest = archive()
    read = basis(manifest, 4)
    assert why_winners_may_be_gone(read, manifest, base_offset=0) == ""
    cut = cut_back(manifest, 30, leader_epoch=1, now_ms=9)
    assert "election" in why_winners_may_be_gone(read, cut, base_offset=0)
    again = cut.appended([segment(3, writer_id="0b"), segment(4, writer_id="0b")])
    assert "election" in why_winners_may_be_gone(read, again, base_offset=0)


def test_compaction_is_not_refused_for_what_it_has_not_read():
    """A cut behind it, new segments, merges and other rewritings lose no winner."""
    manifest = archive()
    read = basis(manifest, 3)
    cut = cut_back(manifest, 30, leader_epoch=1, now_ms=9)
    assert why_winners_may_be_gone(read, cut, base_offset=0) == ""
    merged = remote(10, 29, writer_id="0b", size_bytes=200, leader_epoch=0)
    assert why_winners_may_be_gone(read, manifest.merged(merged, now_ms=1), base_offset=0) == ""
    assert why_winners_may_be_gone(read, compacted(manifest, 1, winners_end=0), base_offset=0) == ""
    assert why_winners_may_be_gone(read, manifest.expired(2, now_ms=1), base_offset=0) == ""


def test_recorded_gap_is_no_lost_segment():
    """A gap that the compaction saw refuses nothing; a hole beside it, where it read a segment, does."""
    manifest = archive(2).with_gap(Gap(20, 29, "the broker deleted them", 1))
    manifest = manifest.appended([segment(3), segment(4)])
    read = basis(manifest, 4)
    assert why_winners_may_be_gone(read, manifest, base_offset=0) == ""
    assert why_winners_may_be_gone(read, manifest.expired(2, now_ms=1), base_offset=0) == ""
    without = replace(manifest, segments=SegmentTable.of([segment(0), segment(1), segment(4)]))
    assert "no longer has offset 30" in why_winners_may_be_gone(read, without, base_offset=0)
    without = replace(manifest, segments=manifest.segments.head(3), next_offset=40)
    assert "no longer has offset 40" in why_winners_may_be_gone(read, without, base_offset=0)


def test_manifest_that_was_made_again_does_not_tell_of_cuts():
    """A rebuilt manifest has lost its replacements, so the compaction is refused."""
    cut = cut_back(archive(), 40, leader_epoch=1, now_ms=9)
    read = basis(cut, 4)
    assert why_winners_may_be_gone(read, replace(cut, replacements=()), base_offset=0)


def test_nothing_can_be_lost_without_a_log():
    """No election takes place, and nothing is held."""
    assert basis(archive(), has_log=False).winners_end == 0
    assert basis(archive(), 4).winners_end == 40


@pytest.mark.parametrize(
    ("read_from", "readable_from", "expected"),
    [(0, 0, True), (5, 0, False), (5, 7, True), (0, None, False)],
)
def test_tombstones_go_only_where_all_before_them_was_read(read_from, readable_from, expected):
    """An older archive before this one may hold what they hide."""
    assert may_drop_tombstones(read_from=read_from, readable_from=readable_from) is expected


def test_what_is_held_is_not_merged_with_others():
    """A held segment may have to take its place again."""
    manifest = compacted(archive(6), 2)
    limits = MergeLimits(target_bytes=1000, min_bytes=150)
    assert [(one.base_offset, one.next_offset) for one in plan_merges(manifest, limits).runs] == [
        (0, 20),
        (30, 60),
    ]


def test_winner_past_the_end_is_a_fault_of_the_manifest():
    """Nothing can be dropped for what the archive does not have."""
    assert compacted(archive(), 0, winners_end=50).faults() == ()
    assert "past the end of the archive" in compacted(archive(), 0, winners_end=51).faults()[0]
    assert "past the end of the archive" in compacted(archive(), 0, winners_end=51, is_held=False).faults()[0]


def test_moved_archive_notes_what_was_held():
    """Objects of what was replaced stay in the source."""
    there = _for_target(compacted(archive(), 0), 0)
    assert (there.retired, there.unsettled) == ((), Unsettled(0, 50))
