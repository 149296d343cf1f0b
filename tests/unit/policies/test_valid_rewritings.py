"""Which rewritings a rebuild goes by: what was taken out stays out, and nothing else is lost."""

from __future__ import annotations

import sys
import tracemalloc
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.unit.model.values import remote
from tieringd.model.segment import Rewriting, RewritingKind, SegmentIdentity
from tieringd.policies.manifest_rebuild import (
    NOT_CHOSEN,
    SUPERSEDED,
    UNFINISHED,
    RebuildPlan,
    StoredSegment,
    plan_rebuild,
)
from tieringd.policies.valid_rewritings import (
    UNDER_WAY_MS,
    Candidate,
    RecordedRewriting,
    valid_rewritings,
)

MERGED, REWRITTEN, COMPACTED = RewritingKind


def stored(base, last, *, writer="0a", epoch=3, at=0, epochs=None) -> StoredSegment:
    """Return a stored segment; a writer in capitals has rewritten it."""
    writer_id = f"rewritten-{writer.lower()}" if writer.isupper() else writer
    segment = remote(base, last, leader_epoch=epoch, uploaded_at_ms=at, writer_id=writer_id)
    return StoredSegment(segment, ((epoch, base),) if epochs is None else epochs)


def record(kind, parts, segments, *, at) -> RecordedRewriting:
    return RecordedRewriting(
        Rewriting.of(kind, tuple(one.segment for one in parts), tuple(one.segment for one in segments)), at
    )


A, B, C = stored(0, 9, at=1), stored(10, 19, at=1), stored(20, 29, at=1)
NEW_A, NEW_B, NEW_C = (stored(base, base + 9, writer="E1", at=2) for base in (0, 10, 20))


def chosen_of(plan: RebuildPlan) -> set[StoredSegment]:
    return set(plan.chosen)


def planned(*segments, records=()) -> RebuildPlan:
    return plan_rebuild(segments, recorded=tuple(records))


def test_recorded_segments_win_over_what_they_were_made_of():
    """Recorded segments win over their sources, and over merges of these sources before and after."""
    merged_before = stored(0, 19, at=0)
    merged_too_late = stored(0, 19, at=9, writer="0b", epoch=4, epochs=((3, 0),))
    plan = planned(
        A,
        B,
        C,
        merged_before,
        merged_too_late,
        NEW_A,
        NEW_B,
        records=[record(REWRITTEN, [A, B], [NEW_A, NEW_B], at=3)],
    )
    assert plan.chosen == (NEW_A, NEW_B, C)
    assert dict(plan.left_out) == dict.fromkeys([A, B, merged_before, merged_too_late], SUPERSEDED)


@pytest.mark.parametrize("at", [2, 9])
def test_rewritten_segments_without_a_record_are_left_out(at):
    """A job was killed before it had stored all: one that is later than what it was made of as well."""
    new = stored(0, 19, writer="E1", at=at)
    plan = planned(A, B, new)
    assert (plan.chosen, plan.left_out, plan.unfinished) == ((A, B), ((new, UNFINISHED),), ())


def test_rewritten_segments_without_a_record_are_better_than_nothing():
    """A rewritten segment without a record is chosen if nothing else has its offsets. The plan says so."""
    over_both = stored(5, 14, writer="E1", at=9)
    plan = planned(A, C, NEW_B, over_both)
    assert (plan.chosen, plan.unfinished) == ((A, NEW_B, C), (NEW_B,))
    assert dict(plan.left_out) == {over_both: UNFINISHED}


def test_compaction_counts_as_a_whole():
    """No segment of a compaction counts if one of them is missing, unless there is nothing else."""
    records = [record(COMPACTED, [A, B, C], [NEW_A, NEW_B, NEW_C], at=3)]
    assert planned(A, B, C, NEW_A, NEW_B, NEW_C, records=records).chosen == (NEW_A, NEW_B, NEW_C)
    assert planned(A, B, C, NEW_A, NEW_C, records=records).chosen == (A, B, C)
    assert planned(A, B, C, NEW_A, NEW_B, records=records).chosen == (A, B, C)
    alone = planned(NEW_A, NEW_C, records=records)
    assert (alone.chosen, alone.unfinished) == ((NEW_A, NEW_C), (NEW_A, NEW_C))


def test_compaction_whose_beginning_has_expired_stands():
    """The expired segments that the compaction replaced do not come back."""
    records = [record(COMPACTED, [A, B, C], [NEW_A, NEW_B, NEW_C], at=3)]
    plan = planned(A, B, C, NEW_B, NEW_C, records=records)
    assert (plan.chosen, dict(plan.left_out)[A]) == ((NEW_B, NEW_C), SUPERSEDED)
    assert planned(A, B, C, records=records).chosen == (A, B, C)


def test_erasure_counts_segment_by_segment():
    """A missing segment of an erasure makes no difference to the others."""
    records = [record(REWRITTEN, [A, B], [NEW_A, NEW_B], at=3)]
    assert planned(A, B, C, NEW_B, records=records).chosen == (A, NEW_B, C)


@pytest.mark.parametrize("are_parts_gone", [False, True])
def test_erasure_on_top_of_a_compaction(are_parts_gone):
    """An erasure replaces one segment of a compaction, which is whole all the same."""
    twice = stored(10, 19, writer="E2", at=4)
    records = [
        record(COMPACTED, [A, B, C], [NEW_A, NEW_B, NEW_C], at=3),
        record(REWRITTEN, [NEW_B], [twice], at=3),
    ]
    gone = [] if are_parts_gone else [NEW_B]
    for some in (records, records[::-1]):
        plan = planned(A, B, C, NEW_A, *gone, NEW_C, twice, records=some)
        assert plan.chosen == (NEW_A, twice, NEW_C)


def test_descent_is_known_over_what_is_gone():
    """A merge of what was erased on top of a compaction is all that is left of both."""
    merged = stored(0, 29, writer="0B", at=6)
    twice = stored(10, 19, writer="E2", at=4)
    records = [
        record(COMPACTED, [A, B, C], [NEW_A, NEW_B, NEW_C], at=3),
        record(REWRITTEN, [NEW_B], [twice], at=5),
        record(MERGED, [NEW_A, twice, NEW_C], [merged], at=7),
    ]
    assert planned(A, B, C, merged, records=records).chosen == (merged,)


def test_later_merge_of_something_else_shows_that_a_job_had_died():
    """The record of what it was made of has gone with that."""
    other = stored(0, 9, writer="E2", at=5)
    merged = stored(0, 19, writer="0B", at=6)
    records = [
        record(COMPACTED, [A, B], [NEW_A, NEW_B], at=3),
        record(MERGED, [other, B], [merged], at=7),
    ]
    assert planned(A, B, NEW_A, NEW_B, merged, records=records).chosen == (merged,)
    beside = [stored(20, 29, writer="E2", at=5), stored(10, 29, writer="0C", at=6)]
    for late_ms, chosen in ((3 + UNDER_WAY_MS, (NEW_A, NEW_B)), (4 + UNDER_WAY_MS, (A, beside[1]))):
        records[1] = record(MERGED, [B, beside[0]], [beside[1]], at=late_ms)
        assert planned(A, B, C, NEW_A, NEW_B, beside[1], records=records).chosen[:2] == chosen


def test_merge_of_rewritten_segments_stands_for_them():
    """
    A recorded merge of rewritten segments is chosen.

    Without its record, the segments that it joined are.
    """
    merged = stored(0, 29, writer="0B", at=5)
    records = [
        record(REWRITTEN, [A, B], [NEW_A, NEW_B], at=3),
        record(MERGED, [NEW_A, NEW_B, C], [merged], at=6),
    ]
    plan = planned(A, B, C, NEW_A, NEW_B, merged, records=records)
    assert plan.chosen == (merged,)
    assert dict(plan.left_out) == {
        A: SUPERSEDED,
        B: SUPERSEDED,
        C: SUPERSEDED,
        NEW_A: SUPERSEDED,
        NEW_B: SUPERSEDED,
    }
    assert planned(A, B, C, merged, records=records).chosen == (merged,)
    assert planned(A, B, C, NEW_A, NEW_B, merged, records=records[:1]).chosen == (NEW_A, NEW_B, C)


@pytest.mark.parametrize("at", [4, 9])
def test_rewriting_wins_over_a_merge_of_the_same_segments(at):
    """Only one of them took place. The merge still holds what was to go, whenever it was stored."""
    twice, merged = stored(0, 9, writer="E2", at=5), stored(0, 19, writer="0B", at=at)
    records = [
        record(REWRITTEN, [A, B], [NEW_A, NEW_B], at=3),
        record(REWRITTEN, [NEW_A], [twice], at=6),
        record(MERGED, [NEW_A, NEW_B], [merged], at=at),
    ]
    assert planned(A, B, NEW_A, NEW_B, twice, merged, records=records).chosen == (twice, NEW_B)


def test_job_that_was_run_again_after_it_was_killed():
    """The second one was made of what the first one should have replaced: so that never took place."""
    again = [stored(0, 9, writer="E2", at=6), stored(10, 29, writer="E2", at=6)]
    records = [
        record(COMPACTED, [A, B, C], [NEW_A, NEW_B, NEW_C], at=3),
        record(COMPACTED, [A, B, C], again, at=7),
    ]
    plan = planned(A, B, C, NEW_A, NEW_B, NEW_C, *again, records=records)
    assert plan.chosen == tuple(again)
    erased = stored(10, 19, writer="E3", at=8)
    records = [records[0], record(REWRITTEN, [B], [erased], at=9)]
    plan = planned(A, B, C, NEW_A, NEW_B, NEW_C, erased, records=records)
    assert plan.chosen == (A, erased, C)


def test_archive_that_went_on_without_a_rewriting_keeps_all():
    """A job was killed just before its swap. What was then merged holds offsets that nothing else does."""
    records = [record(COMPACTED, [A, B], [NEW_A, NEW_B], at=3)]
    for at in (3 - UNDER_WAY_MS, 4 - UNDER_WAY_MS, 4 + UNDER_WAY_MS):
        merged = stored(10, 29, at=at, writer="0b")
        assert planned(A, B, C, NEW_A, NEW_B, merged, records=records).chosen == (NEW_A, NEW_B, C)
        is_lost = at == 3 - UNDER_WAY_MS
        chosen = planned(A, NEW_A, NEW_B, merged, records=records).chosen
        assert chosen == ((NEW_A, NEW_B) if is_lost else (A, merged))


def test_merge_that_came_too_late_does_not_bring_back_what_expired():
    """The merged segment holds offsets that nothing else does, because they have left the archive."""
    records = [record(COMPACTED, [B, C], [NEW_B, NEW_C], at=3)]
    for at in (4, 3 + UNDER_WAY_MS, 4 + UNDER_WAY_MS):
        merged = stored(0, 19, at=at, writer="0b")
        chosen = planned(C, NEW_B, NEW_C, merged, records=records).chosen
        assert chosen == ((merged, C) if at > 3 + UNDER_WAY_MS else (NEW_B, NEW_C))


def test_newer_leader_undoes_what_was_rewritten():
    """A newer leader's log is the archive from its first offset on. The compaction below it still counts."""
    new = stored(20, 49, epoch=4, at=9, epochs=((4, 20),))
    records = [record(COMPACTED, [A, B, C], [NEW_A, NEW_B, NEW_C], at=3)]
    for rewritten in ([NEW_A, NEW_B, NEW_C], [NEW_A, NEW_B]):
        assert planned(A, B, C, *rewritten, new, records=records).chosen == (NEW_A, NEW_B, new)


def test_what_was_taken_out_and_is_back_is_told():
    """
    The old segments count if a job's segments are missing, or if others were stored later.

    It is reported.
    """
    erasure = [record(REWRITTEN, [A, B], [NEW_A, NEW_B], at=3)]
    compaction = [record(COMPACTED, [A, B, C], [NEW_A, NEW_B, NEW_C], at=3)]
    merged = stored(10, 29, at=4 + UNDER_WAY_MS, writer="0b")
    for some, records, back in (
        ((A, B, C, NEW_B), erasure, (A,)),
        ((A, B, C, NEW_A, NEW_C), compaction, (A, B, C)),
        ((A, NEW_A, NEW_B, merged), erasure, (merged,)),
    ):
        assert planned(*some, records=records).brought_back == (("rewritten-e1", back),)
    twice = stored(0, 9, writer="E2", at=5)
    plan = planned(A, B, NEW_A, NEW_B, records=[*erasure, record(REWRITTEN, [NEW_A], [twice], at=6)])
    assert (plan.chosen, plan.brought_back) == ((NEW_A, NEW_B), (("rewritten-e2", (NEW_A,)),))


def test_nothing_is_told_where_nothing_is_back():
    """All counts, nothing else is there, or another job has done it again."""
    erasure = [record(REWRITTEN, [A, B], [NEW_A, NEW_B], at=3)]
    again = [stored(base, base + 9, writer="E2", at=6) for base in (0, 10)]
    repeated = [*erasure, record(REWRITTEN, [A, B], again, at=7)]
    compaction = [record(COMPACTED, [A, B, C], [NEW_A, NEW_B, NEW_C], at=3)]
    for some, records in (
        ((A, B, C, NEW_A, NEW_B), erasure),
        ((A, B, C, *again), repeated),
        ((NEW_A, NEW_C), compaction),
        ((C,), compaction[:0]),
    ):
        assert planned(*some, records=records).brought_back == ()


def test_rewritten_segment_may_hold_batches_of_a_newer_epoch_than_its_name_has():
    """The leader was elected again meanwhile, so its records were not cut off."""
    old, new = (
        stored(0, 9, writer=writer, at=at, epochs=((3, 0), (4, 5))) for writer, at in (("0a", 1), ("E1", 2))
    )
    assert planned(old, new, records=[record(REWRITTEN, [old], [new], at=3)]).chosen == (new,)


def test_index_that_was_made_again_changes_nothing():
    """The segment has another name then; what it holds is the same."""
    renamed = replace(NEW_A, segment=replace(NEW_A.segment, index_crc32c=5))
    plan = planned(A, renamed, records=[record(REWRITTEN, [A], [NEW_A], at=3)])
    assert plan.chosen == (renamed,)


def test_others_of_the_same_offsets_are_told_apart():
    """Each segment that is left out has its own reason."""
    other = stored(10, 19, at=0, writer="0c")
    plan = planned(A, B, other, NEW_A, NEW_B, records=[record(REWRITTEN, [A], [NEW_A], at=3)])
    assert plan.chosen == (NEW_A, B)
    assert dict(plan.left_out) == {A: SUPERSEDED, other: NOT_CHOSEN, NEW_B: UNFINISHED}


TICK_MS = UNDER_WAY_MS // 4


@dataclass(repr=False)
class Life:
    """An archive under jobs, merges and retention; what each object has lost is kept by hand."""

    named: list[StoredSegment] = field(default_factory=list)
    left: list[StoredSegment] = field(default_factory=list)
    records: list[RecordedRewriting] = field(default_factory=list)
    lost: dict[StoredSegment, frozenset[int]] = field(default_factory=dict)
    """Offsets whose records were taken out."""
    pairs: list[tuple[int, int]] = field(default_factory=list)
    """Offsets of a tombstone and of the record that it hides: the first never goes without the other."""
    erased: set[int] = field(default_factory=set)
    """Offsets whose records were, or would have been."""
    retired: list[StoredSegment] = field(default_factory=list)
    """What is deleted, in that order."""
    prepared: list[tuple[list[StoredSegment], StoredSegment]] = field(default_factory=list)
    """Merges that no manifest names yet."""
    dead: list[tuple[list[StoredSegment], RecordedRewriting | None]] = field(default_factory=list)
    """What killed jobs have left."""
    time_ms: int = 0

    def __repr__(self) -> str:
        names = [
            " ".join(f"{_base(one)}-{one.segment.last_offset}/{one.segment.writer_id[-5:]}" for one in some)
            for some in (self.named, self.left)
        ]
        return f"named {names[0]}; left {names[1]}; pairs {self.pairs}; {self.records}"

    @property
    def dead_records(self) -> list[RecordedRewriting]:
        """Return the records of killed jobs."""
        return [one for _, one in self.dead if one is not None and one in self.records]

    def store(self, base: int, last: int, writer: str, lost: frozenset[int]) -> StoredSegment:
        self.time_ms += TICK_MS
        made = stored(base, last, writer=writer, at=self.time_ms)
        self.lost[made] = frozenset(offset for offset in lost if base <= offset <= last)
        return made

    def upload(self, length: int) -> None:
        base = self.named[-1].segment.next_offset if self.named else 0
        self.named.append(self.store(base, base + length - 1, f"{self.time_ms // TICK_MS:04x}", frozenset()))

    def taken(self, some: list[StoredSegment]) -> frozenset[int]:
        return frozenset().union(*(self.lost[one] for one in some))

    def swap(self, some: list[StoredSegment], made: list[StoredSegment]) -> bool:
        if not all(one in self.named for one in some):
            self.left += made
            return False
        row = self.named.index(some[0])
        self.named[row : row + len(some)] = made
        self.retired += some
        return True

    def rewrite(
        self, groups: list[list[StoredSegment]], offsets: set[int], kind: RewritingKind, end: str
    ) -> None:
        """Run a job up to one of its ends; *groups* of neighbours become one each."""
        writer = f"E{self.time_ms // TICK_MS:04X}"
        made = [
            self.store(
                group[0].segment.base_offset,
                group[-1].segment.last_offset,
                writer,
                self.taken(group) | offsets,
            )
            for group in groups
        ]
        parts = [one for group in groups for one in group]
        if end == "early":
            self.left += made[:-1]
            self.dead.append((made[:-1], None))
            return
        self.time_ms += TICK_MS
        written = record(kind, parts, made, at=self.time_ms)
        self.records.append(written)
        if end == "late":
            self.left += made
            self.dead.append((made, written))
            return
        for group, one in zip(groups, made, strict=True):
            self.swap(group, [one])

    def prepare_merge(self, some: list[StoredSegment]) -> None:
        """Store what a daemon merges."""
        is_marked = any(one.segment.is_rewritten for one in some)
        made = self.store(
            some[0].segment.base_offset,
            some[-1].segment.last_offset,
            f"{0xE000 + self.time_ms // TICK_MS:04{'X' if is_marked else 'x'}}",
            self.taken(some),
        )
        if is_marked:
            self.time_ms += TICK_MS
            self.records.append(record(MERGED, some, [made], at=self.time_ms))
        self.prepared.append((some, made))


def neighbours(draw, life: Life) -> list[StoredSegment]:
    first = draw(st.integers(0, len(life.named) - 1))
    return life.named[first : first + draw(st.integers(1, 3))]


def step(draw, life: Life, what: str) -> None:
    """Let one thing happen."""
    end = draw(st.sampled_from(["done", "done", "early", "late"]))
    if what == "upload":
        life.upload(draw(st.integers(1, 4)))
    elif what == "erase":
        some = neighbours(draw, life)
        offsets = {one.segment.base_offset for one in some}
        offsets -= {offset for pair in life.pairs for offset in pair}
        life.erased |= offsets
        life.rewrite([[one] for one in some], offsets, REWRITTEN, end)
    elif what == "compact":
        some = draw(st.lists(st.sampled_from(range(len(life.named))), min_size=2, max_size=2))
        inside = life.named[min(some) : max(some) + 1]
        hidden, tombstone = inside[0].segment.base_offset, inside[-1].segment.last_offset
        used = life.erased.union(*life.pairs)
        if hidden < tombstone and not used & {hidden, tombstone}:
            life.pairs.append((tombstone, hidden))
            life.rewrite([[one] for one in inside], {hidden, tombstone}, COMPACTED, end)
    elif what == "prepare" and len(some := neighbours(draw, life)) > 1:
        life.prepare_merge(some)
    elif what == "commit" and life.prepared:
        some, made = life.prepared.pop(0)
        if life.time_ms - made.segment.uploaded_at_ms < UNDER_WAY_MS:
            life.swap(some, [made])
        else:
            life.left.append(made)
    elif what == "expire" and len(life.named) > 1:
        life.retired.append(life.named.pop(0))


@st.composite
def lives(draw) -> Life:
    """Draw a life; of what no manifest names any part may be deleted, as a killed job's only as a whole."""
    life = Life()
    for _ in range(draw(st.integers(2, 4))):
        life.upload(draw(st.integers(1, 4)))
    for what in draw(
        st.lists(
            st.sampled_from(["upload", "erase", "compact", "prepare", "commit", "expire"]),
            min_size=1,
            max_size=8,
        )
    ):
        step(draw, life, what)
    life.left += [made for _, made in life.prepared]
    for made, written in life.dead:
        if draw(st.booleans()):
            life.left = [one for one in life.left if one not in made]
            life.records = [one for one in life.records if one is not written]
    untouchable = [one for made, _ in life.dead for one in made]
    life.left = [one for one in life.left if one in untouchable or draw(st.booleans())]
    life.left += life.retired[draw(st.integers(0, len(life.retired))) :]
    if not life.dead_records and draw(st.booleans()):
        # As scrub does it.
        is_any_left = any(one.segment.is_rewritten for one in (*life.named, *life.left))
        life.records = life.records if is_any_left else []
    return life


def _base(one: StoredSegment) -> int:
    return one.segment.base_offset


@given(lives())
@settings(max_examples=examples(400), deadline=None)
def test_what_was_taken_out_stays_out_and_all_else_is_there(life):
    """Every archived offset is held; nothing erased is back; no value whose tombstone is gone."""
    plan = plan_rebuild([*life.named, *life.left], recorded=life.records)
    begin, end = life.named[0].segment.base_offset, life.named[-1].segment.next_offset
    held = {offset for one in plan.chosen for offset in range(_base(one), one.segment.next_offset)}
    if life.dead_records:
        # What was merged with the first segments just then counts as expired with them.
        begin = max(begin, _base(plan.chosen[0]))
    assert held >= set(range(begin, end))
    note(repr(life))
    note([f"{_base(one)}-{one.segment.last_offset} {one.segment.writer_id}" for one in plan.chosen])
    lost = {offset for offset in life.taken(list(plan.chosen)) if offset >= begin}
    assert lost >= {offset for offset in life.taken(life.named) if offset >= begin}
    for tombstone, hidden in life.pairs:
        if hidden >= begin and tombstone in lost:
            assert hidden in lost


@pytest.mark.timeout(180)
def test_many_rewritten_segments_take_no_time():
    """Each is compared with those at its own offsets only: it takes seconds, and not minutes."""
    count = 20_000
    old = [stored(10 * row, 10 * row + 9, at=1) for row in range(count)]
    new = [stored(10 * row, 10 * row + 9, writer="E1", at=2) for row in range(count)]
    newest = [stored(10 * row, 10 * row + 9, writer="E2", at=2) for row in range(count)]
    records = [record(REWRITTEN, old, new, at=3), record(REWRITTEN, new, newest, at=4)]
    assert planned(*old, *new, *newest, records=records).chosen == tuple(newest)


SEGMENTS = 20


def daily_jobs(days: int):
    """Return the arguments of `valid_rewritings` after a job of each day has rewritten every segment."""

    def identity(row: int, day: int) -> SegmentIdentity:
        return SegmentIdentity(row * 100, row * 100 + 99, 1000 - day, 0, f"rewritten-{day:x}" if day else "a")

    recorded = [
        RecordedRewriting(
            Rewriting(
                COMPACTED,
                tuple(identity(row, day - 1) for row in range(SEGMENTS)) if day > 1 else (),
                tuple(identity(row, day) for row in range(SEGMENTS)),
            ),
            day * 86_400_000,
        )
        for day in range(1, days + 1)
    ]
    stored = {identity(row, days): 0 for row in range(SEGMENTS)}
    return recorded, stored, [Candidate(one, days * 86_400_000) for one in stored], {0: 0}


def calls_of(work) -> int:
    """Return how many calls of functions *work* makes."""
    calls = 0

    def count(_frame, event, _argument) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def test_work_grows_with_the_jobs_and_not_with_their_square():
    """All records stay for as long as any rewritten segment is named: a year has 365 of them."""
    few, many = (calls_of(lambda days=days: valid_rewritings(*daily_jobs(days))) for days in (40, 160))
    assert many < 5 * few


def test_a_year_of_jobs_takes_little_memory():
    """A thousand segments may take 200 MiB; these are fewer, and take their share."""
    arguments = daily_jobs(365)
    tracemalloc.start()
    try:
        found = valid_rewritings(*arguments)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found.named) == SEGMENTS
    assert peak_bytes < (200 << 20) * SEGMENTS // 1000


def test_ring_of_records_relates_all_of_its_segments():
    """No program writes one. It ends, and nothing in it supersedes anything."""
    rows = [
        replace(one, segment=replace(one.segment, size_bytes=size)) for size, one in enumerate([NEW_A] * 3, 1)
    ]
    records = [record(REWRITTEN, [rows[n - 1]], [rows[n]], at=3) for n in range(3)]
    found = valid_rewritings(
        records, {one.identity: 3 for one in rows}, [Candidate(one.identity, 3) for one in rows], {3: 0}
    )
    assert found.superseded == frozenset()
    assert set(found.named) == {one.identity for one in rows}
