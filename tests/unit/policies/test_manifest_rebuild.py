"""Stored segments that make up an archive, apart from leftovers of merges, crashes and elections."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.model.values import PARTITION, remote
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Gap, Unsettled
from tieringd.model.offset_translation import OffsetTranslation
from tieringd.model.segment import AbortedTransaction, CrossingTransaction
from tieringd.policies.epoch_history import epoch_at
from tieringd.policies.manifest_rebuild import (
    EPOCHS_GO_BACK,
    EXPIRED,
    NOT_CHOSEN,
    OFF_LINEAGE,
    RebuildPlan,
    StoredSegment,
    plan_rebuild,
    rebuilt_manifest,
)

NOW_MS = 1_750_000_000_000


def stored(base, last, *, epoch=3, at=0, epochs=None, **changes) -> StoredSegment:
    """Return a stored segment that a leader of *epoch* stored at a time, all of its own epoch by default."""
    segment = remote(base, last, leader_epoch=epoch, uploaded_at_ms=at)
    return StoredSegment(segment, ((epoch, base),) if epochs is None else epochs, **changes)


def spans(plan: RebuildPlan) -> list[tuple[int, int, int]]:
    return [
        (one.segment.base_offset, one.segment.last_offset, one.segment.leader_epoch) for one in plan.chosen
    ]


def test_neighbours_are_all_chosen():
    """Segments without shared offsets are all chosen."""
    segments = [stored(0, 9), stored(10, 19), stored(20, 29)]
    assert plan_rebuild(reversed(segments)) == RebuildPlan(tuple(segments), (), ())


def test_merged_segment_is_chosen_rather_than_its_parts():
    """A merged segment takes the place of several with the same offsets."""
    parts, merged = [stored(0, 9), stored(10, 19)], stored(0, 19, at=5)
    plan = plan_rebuild([*parts, merged, stored(20, 29)])
    assert spans(plan) == [(0, 19, 3), (20, 29, 3)]
    assert dict(plan.left_out) == dict.fromkeys(parts, NOT_CHOSEN)


def test_parts_are_chosen_where_the_merged_one_would_leave_a_hole():
    """A part that reaches further than a leftover is not given up for it."""
    leftover = stored(10, 40, at=1)
    plan = plan_rebuild([leftover, stored(0, 25, at=2), stored(26, 40, at=2)])
    assert spans(plan) == [(0, 25, 3), (26, 40, 3)]


def test_later_one_of_two_with_the_same_offsets_is_chosen():
    """A compacted segment is newer than what it came from."""
    old, new = stored(0, 9, at=1), stored(0, 9, at=2)
    assert plan_rebuild([new, old]).chosen == (new,)


def test_one_of_a_newer_leader_is_chosen_before_a_later_one():
    """The newer leader epoch's segment is chosen of two with the same offsets, whatever the upload times."""
    old, new = stored(0, 9, epoch=3, at=9), stored(0, 9, epoch=4, at=1, epochs=((3, 0),))
    assert plan_rebuild([new, old]).chosen == (new,)


def test_what_a_deposed_leader_stored_is_off_the_lineage():
    """A deposed leader's offsets go on past the first offset of a newer epoch, which it did not know."""
    new = stored(0, 70, epoch=4, epochs=((3, 0), (4, 60)))
    old, longer = stored(0, 59), stored(0, 99)
    plan = plan_rebuild([old, longer, new, stored(100, 199)])
    assert plan.chosen == (new,)
    assert dict(plan.left_out)[longer] == OFF_LINEAGE
    assert dict(plan.left_out)[old] == NOT_CHOSEN
    assert len(plan.left_out) == 3


def test_tail_of_a_deposed_leader_is_not_taken_for_what_follows():
    """The tail begins where the newer leader's last object ends, and is off the lineage all the same."""
    new = stored(0, 99, epoch=4, epochs=((3, 0), (4, 50)))
    assert plan_rebuild([new, stored(100, 199)]).chosen == (new,)


def test_what_an_off_lineage_object_says_of_epochs_does_not_count():
    """A leader whose records were all undone does not undo those before it."""
    undone = stored(50, 100, epoch=4, epochs=((4, 50),))
    newest = stored(150, 199, epoch=5, epochs=((3, 150), (5, 190)))
    begun = stored(40, 60, epoch=5, epochs=((5, 40),))
    sound = stored(0, 39)
    plan = plan_rebuild([undone, begun, sound])
    assert spans(plan) == [(0, 39, 3), (40, 60, 5)]
    assert plan_rebuild([sound, newest]).holes == ((40, 149),)


def test_merged_by_a_newer_leader_beside_what_an_older_one_stored():
    """The writer says nothing of the records: a merge of old segments comes before unmerged ones."""
    merged, later = stored(0, 19, epoch=9, epochs=((3, 0),)), stored(20, 29)
    assert plan_rebuild([merged, later]).chosen == (merged, later)


def test_epochs_that_go_back_cost_the_older_leaders_segment():
    """Batches of one log never go back in epochs."""
    first, second = stored(0, 9, epoch=7, epochs=((6, 0),)), stored(10, 19, epoch=6, epochs=((5, 10),))
    plan = plan_rebuild([first, second])
    assert plan.chosen == (first,)
    assert dict(plan.left_out) == {second: EPOCHS_GO_BACK}


def test_holes_are_told():
    """Offsets between two segments that no object holds."""
    plan = plan_rebuild([stored(5, 9), stored(20, 29), stored(31, 31)])
    assert plan.holes == ((10, 19), (30, 30))


def test_what_lies_before_the_archives_start_is_left_out():
    """One over the start stays."""
    gone, over = stored(0, 9), stored(10, 19)
    plan = plan_rebuild([gone, over], start_offset=12)
    assert (plan.chosen, plan.left_out) == ((over,), ((gone, EXPIRED),))


def test_nothing_stored_is_nothing_chosen():
    """An empty plan."""
    assert plan_rebuild([]) == RebuildPlan((), (), ())


@st.composite
def some_segments(draw) -> list[StoredSegment]:
    """Draw a few objects of one leader, all with other names."""
    found = {}
    for _ in range(draw(st.integers(0, 7))):
        base = draw(st.integers(0, 12))
        last = base + draw(st.integers(0, 6))
        found[base, last] = stored(base, last, at=draw(st.integers(0, 3)), epochs=())
    return list(found.values())


def _worth(chosen) -> tuple[int, int, int]:
    return (
        sum(one.segment.next_offset - one.segment.base_offset for one in chosen),
        -len(chosen),
        sum(one.segment.uploaded_at_ms for one in chosen),
    )


def _overlap(one, other) -> bool:
    return (
        one.segment.base_offset <= other.segment.last_offset
        and other.segment.base_offset <= one.segment.last_offset
    )


@given(some_segments())
def test_choice_is_the_best_of_all_without_an_overlap(segments):
    """The choice has the most offsets, in the fewest segments, stored the latest. A search of all agrees."""
    plan = plan_rebuild(segments)
    every = [
        some
        for count in range(len(segments) + 1)
        for some in combinations(segments, count)
        if not any(_overlap(one, other) for one, other in combinations(some, 2))
    ]
    assert _worth(plan.chosen) == max(map(_worth, every))
    assert not any(_overlap(one, other) for one, other in combinations(plan.chosen, 2))
    assert len(plan.chosen) + len(plan.left_out) == len(segments)


@dataclass
class History:
    """A partition's life: leaders, uploads, crashes and merges; and what is in the bucket at its end."""

    log: list[int] = field(default_factory=list)
    """The epoch under which each offset was written."""
    leader_epoch: int = 1
    archived: list[StoredSegment] = field(default_factory=list)
    """What the manifest names."""
    left: list[StoredSegment] = field(default_factory=list)
    """What else is in the bucket."""
    time_ms: int = 0

    @property
    def next_offset(self) -> int:
        return self.archived[-1].segment.next_offset if self.archived else 0

    def append(self, records: int) -> None:
        self.log += [self.leader_epoch] * records

    def upload(self, length: int, *, is_committed: bool) -> None:
        """Store the next offsets, and commit them or crash before."""
        base = self.next_offset
        last = min(base + length, len(self.log)) - 1
        if last < base:
            return
        made = self._object(base, last)
        (self.archived if is_committed else self.left).append(made)

    def elect(self, kept: int) -> None:
        """Let another leader go on from a log that has lost all but its first offsets, and write to it."""
        self.log = self.log[:kept]
        self.leader_epoch += 1
        self.append(1)
        cut = [one for one in self.archived if one.segment.last_offset >= kept]
        self.archived = [one for one in self.archived if one not in cut]
        self.left += cut

    def merge(self, first: int, count: int) -> None:
        """Put one object in the place of several neighbours."""
        parts = self.archived[first : first + count]
        if len(parts) > 1:
            base, last = parts[0].segment.base_offset, parts[-1].segment.last_offset
            self.archived[first : first + count] = [self._object(base, last)]
            self.left += parts

    def _object(self, base: int, last: int) -> StoredSegment:
        self.time_ms += 1
        epochs = []
        for offset in range(base, last + 1):
            if not epochs or self.log[offset] != epochs[-1][0]:
                epochs.append((self.log[offset], offset))
        writer = f"{self.time_ms:04x}"
        segment = replace(
            remote(base, last, leader_epoch=self.leader_epoch, uploaded_at_ms=self.time_ms), writer_id=writer
        )
        return StoredSegment(segment, tuple(epochs))


@st.composite
def histories(draw) -> History:
    """Draw a life in which the archive has caught up; of what no manifest names, some is deleted."""
    history = History()
    for _ in range(draw(st.integers(1, 14))):
        match draw(st.sampled_from(["append", "upload", "upload", "crash", "elect", "merge"])):
            case "append":
                history.append(draw(st.integers(1, 12)))
            case "upload":
                history.append(draw(st.integers(0, 6)))
                history.upload(draw(st.integers(1, 8)), is_committed=True)
            case "crash":
                history.upload(draw(st.integers(1, 8)), is_committed=False)
            case "elect":
                history.elect(draw(st.integers(0, len(history.log))))
            case _:
                history.merge(draw(st.integers(0, 3)), draw(st.integers(2, 4)))
    while history.next_offset < len(history.log):
        history.upload(draw(st.integers(1, 8)), is_committed=True)
    history.left = [one for one in history.left if draw(st.booleans())]
    return history


def _epochs_by_offset(segments) -> dict[int, int]:
    return {
        offset: epoch_at(one.epochs, offset)
        for one in segments
        for offset in range(one.segment.base_offset, one.segment.next_offset)
    }


@given(histories())
def test_every_archived_offset_comes_back_with_its_own_record(history):
    """
    Each archived offset keeps the record of its own epoch.

    Leftovers of merges and elections change nothing.
    """
    plan = plan_rebuild([*history.archived, *history.left])
    wanted, found = _epochs_by_offset(history.archived), _epochs_by_offset(plan.chosen)
    assert {offset: found.get(offset) for offset in wanted} == wanted


@given(histories())
def test_rebuilt_manifest_is_sound(history):
    """A rebuilt manifest keeps every rule, and begins and ends as its segments do."""
    plan = plan_rebuild(history.left or history.archived)
    if not plan.chosen:
        return
    manifest = rebuilt_manifest(PARTITION, plan, gap_reason="lost", now_ms=NOW_MS)
    assert manifest.faults() == ()
    assert list(manifest.segments) == [one.segment for one in plan.chosen]
    assert [(gap.base_offset, gap.last_offset) for gap in manifest.gaps] == list(plan.holes)
    assert all(gap.reason == "lost" for gap in manifest.gaps)
    assert manifest.start_offset == plan.chosen[0].segment.base_offset
    assert manifest.next_offset == manifest.trimmed_offset == plan.chosen[-1].segment.next_offset


def test_rebuilt_manifest_tells_epochs_gaps_and_aborted_transactions():
    """All that its segments tell, each once."""
    over_the_end = AbortedTransaction(9, 5, 12)
    inside, into_the_hole = AbortedTransaction(7, 1, 3), AbortedTransaction(8, 12, 19)
    plan = plan_rebuild(
        [
            stored(0, 9, epochs=((1, 0), (2, 4)), aborted=(inside, over_the_end)),
            stored(10, 14, epochs=((2, 10), (3, 11)), aborted=(over_the_end, into_the_hole)),
            stored(20, 29, epochs=((3, 20),), aborted=(AbortedTransaction(6, 25, 40),)),
        ]
    )
    manifest = rebuilt_manifest(PARTITION, plan, gap_reason="lost", now_ms=NOW_MS)
    assert manifest.epochs == ((1, 0), (2, 4), (3, 11))
    assert manifest.gaps == (Gap(15, 19, "lost", NOW_MS),)
    assert manifest.crossing == (CrossingTransaction(9, 5, 12, 3),)
    assert manifest.began_at_ms == NOW_MS


def test_what_is_known_of_an_old_manifest_goes_on():
    """The manifest's start and end, the reasons of its gaps, and facts that only a manifest has."""
    translation = OffsetTranslation(5, 3)
    known = replace(
        PartitionManifest.begin(PARTITION, start_offset=0, now_ms=7)
        .appended([remote(0, 9)])
        .with_gap(Gap(10, 19, "never copied", 8))
        .appended([remote(20, 29)])
        .with_gap(Gap(30, 34, "not copied either", 9)),
        start_offset=3,
        expired_at_ms=11,
        translation=translation,
        allowed_local_start_offset=20,
    )
    plan = plan_rebuild([stored(0, 9), stored(20, 29)], start_offset=3)
    manifest = rebuilt_manifest(PARTITION, plan, gap_reason="lost", now_ms=NOW_MS, known=known)
    assert (manifest.start_offset, manifest.next_offset, manifest.gaps) == (3, 35, known.gaps)
    assert (manifest.began_at_ms, manifest.expired_at_ms) == (7, 11)
    assert (manifest.translation, manifest.allowed_local_start_offset) == (translation, 20)
    assert manifest.faults() == ()


def test_what_an_old_manifest_held_for_compactions_is_unsettled():
    """A rebuilt one does not know their objects any more: only a log could bring back what went."""
    known = PartitionManifest.begin(PARTITION, start_offset=0).appended([remote(0, 9), remote(10, 19)])
    left = remote(0, 9, writer_id="rewritten-0a", size_bytes=1)
    known = known.compacted([left], now_ms=5, winners_end=20)
    plan = plan_rebuild([stored(0, 9), stored(10, 19)])
    manifest = rebuilt_manifest(PARTITION, plan, gap_reason="lost", now_ms=NOW_MS, known=known)
    assert manifest.unsettled == Unsettled(0, 20)
    assert manifest.faults() == ()


def test_end_that_an_old_manifest_had_is_not_taken_back():
    """Offsets that were archived, and whose objects are gone, become a gap with the reason of now."""
    known = PartitionManifest.begin(PARTITION, start_offset=0).appended([remote(0, 9), remote(10, 19)])
    manifest = rebuilt_manifest(
        PARTITION, plan_rebuild([stored(0, 9)]), gap_reason="lost", now_ms=NOW_MS, known=known
    )
    assert (manifest.next_offset, manifest.gaps) == (20, (Gap(10, 19, "lost", NOW_MS),))


def test_archive_that_began_anew_does_not_hide_what_is_older():
    """A daemon that found no manifest began one where its log began; that is no retention."""
    known = PartitionManifest.begin(PARTITION, start_offset=20).appended([remote(20, 29)])
    plan = plan_rebuild([stored(0, 9), stored(10, 19), stored(20, 29)])
    manifest = rebuilt_manifest(PARTITION, plan, gap_reason="lost", now_ms=NOW_MS, known=known)
    assert (manifest.start_offset, manifest.next_offset) == (0, 30)
