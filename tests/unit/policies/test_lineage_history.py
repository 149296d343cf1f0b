"""Lineage against whole logs: replicas that diverge, one archive, and any order of elections."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.unit.model.values import PARTITION, local_log, remote
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Gap
from tieringd.model.partition import LogBounds
from tieringd.model.segment_table import SegmentTable
from tieringd.policies.epoch_history import clipped, without_below, without_from
from tieringd.policies.lineage import Lineage, plan_replacement

if TYPE_CHECKING:
    from tieringd.model.segment import EpochStart
    from tieringd.policies.lineage import LineagePlan

REPLICAS = 3


@dataclass(frozen=True)
class Term:
    """What happens from one election to the next. No term need be clean: anyone is elected."""

    who: int
    skipped_epochs: int
    appended: int
    observed: bool
    """Whether the leader's archiver had its scan before the next election."""
    uploaded: tuple[int, ...]
    """The lengths of the segments that the leader's archiver uploads after its scan."""
    replicated: tuple[int | None, ...]
    """How many records each replica gets from the leader; None where it never reaches it."""
    trimmed: int
    local_bases: tuple[int, ...]
    """Where the local log is cut, from its start on."""
    high_watermark_lag: int


terms = st.builds(
    Term,
    who=st.integers(0, REPLICAS - 1),
    skipped_epochs=st.integers(1, 2),
    appended=st.integers(0, 9),
    observed=st.booleans(),
    uploaded=st.lists(st.integers(1, 6), max_size=4).map(tuple),
    replicated=st.tuples(*[st.one_of(st.none(), st.integers(0, 20))] * REPLICAS),
    trimmed=st.one_of(st.just(0), st.integers(0, 9)),
    local_bases=st.lists(st.integers(1, 12), max_size=3).map(tuple),
    high_watermark_lag=st.integers(0, 9),
)


@dataclass
class Replica:
    """A log with its history, and, for the test alone, the records that retention took from it."""

    next_offset: int = 0
    records: dict[int, str] = field(default_factory=dict)
    epochs: tuple[EpochStart, ...] = ()

    def assign(self, epoch: int) -> None:
        """Note where *epoch* begins, as a broker does: what contradicts it goes."""
        if not self.epochs or self.epochs[-1][0] != epoch:
            self.epochs = (*without_from(self.epochs, self.next_offset), (epoch, self.next_offset))

    def append(self, epoch: int, record: str) -> None:
        self.assign(epoch)
        self.records[self.next_offset] = record
        self.next_offset += 1

    def truncate(self, next_offset: int) -> None:
        self.records = {offset: one for offset, one in self.records.items() if offset < next_offset}
        self.epochs = without_from(self.epochs, next_offset)
        self.next_offset = next_offset

    def trim(self, start_offset: int) -> None:
        """Give up what is below *start_offset*; a log that ends there already begins anew."""
        self.epochs = without_below(self.epochs, start_offset)
        if self.next_offset < start_offset:
            self.records, self.epochs, self.next_offset = {}, (), start_offset

    def forget_below(self, start_offset: int, *, as_in: Replica) -> None:
        """Take over what *as_in* once held there: the lineage is the leader's, and retention hid it."""
        gone = {offset: one for offset, one in as_in.records.items() if offset < start_offset}
        self.records = gone | {offset: one for offset, one in self.records.items() if offset >= start_offset}


class Cluster:
    """
    Replicas of one partition, and the archive that their leaders write one after the other.

    Each record is a text of its own, so two logs hold the same at an offset only where one was
    replicated from the other. The policy sees epochs and bounds; the test compares the records.
    """

    def __init__(self) -> None:
        self.replicas = [Replica() for _ in range(REPLICAS)]
        self.leader = self.replicas[0]
        self.epoch, self.start_offset, self.written = 0, 0, 0
        self.manifest = PartitionManifest.begin(PARTITION, start_offset=0)
        self.archived: dict[int, str] = {}

    def play(self, term: Term) -> None:
        self.epoch += term.skipped_epochs
        self.leader = self.replicas[term.who]
        self.leader.assign(self.epoch)
        for _ in range(term.appended):
            self.written += 1
            self.leader.append(self.epoch, f"record {self.written} under {self.epoch}")
        if term.observed:
            self._archive(term)
        for follower, count in zip(self.replicas, term.replicated, strict=True):
            self._replicate(follower, count)
        self.start_offset = min(self.start_offset + term.trimmed, self.leader.next_offset)
        for replica in self.replicas:
            replica.trim(self.start_offset)

    def _replicate(self, follower: Replica, count: int | None) -> None:
        leader = self.leader
        if follower is leader or count is None:
            return
        wrong = (
            offset
            for offset in range(self.start_offset, follower.next_offset)
            if follower.records[offset] != leader.records.get(offset)
        )
        follower.truncate(next(wrong, follower.next_offset))
        follower.forget_below(self.start_offset, as_in=leader)
        end = min(follower.next_offset + count, leader.next_offset)
        for offset in range(follower.next_offset, end):
            record = leader.records[offset]
            follower.append(int(record.rsplit(" ", 1)[1]), record)

    def _archive(self, term: Term) -> None:
        plan = self._observe(term)
        if plan.lineage is Lineage.UNDECIDED:
            # The archiver waits: less of the leader's log is known just now than the archive has of it.
            assert self.manifest.next_offset > self._high_watermark(term)
            return
        self._check(plan)
        if plan.lineage is Lineage.DIVERGES:
            self._cut_back(plan.resume_offset)
            assert self._observe(term).lineage is Lineage.HOLDS, "what is left is on the lineage"
        self._upload(term.uploaded, before_offset=self._high_watermark(term))
        assert self._observe(term).lineage is Lineage.HOLDS, "what was just uploaded is on the lineage"

    def _high_watermark(self, term: Term) -> int:
        return max(self.start_offset, self.leader.next_offset - term.high_watermark_lag)

    def _observe(self, term: Term) -> LineagePlan:
        """Judge the archive by the leader's log, however that is cut and however far it is known."""
        start, end = self.start_offset, self.leader.next_offset
        bases = sorted({start, *(min(start + base, end) for base in term.local_bases)})
        log = replace(local_log(bases), epochs=self.leader.epochs)
        high_watermark = self._high_watermark(term)
        bounds = LogBounds(start, high_watermark, high_watermark)
        return plan_replacement(self.manifest, log, bounds, leader_epoch=self.epoch)

    def _check(self, plan: LineagePlan) -> None:
        off = [
            offset for offset, record in self.archived.items() if record != self.leader.records.get(offset)
        ]
        if plan.replacement is None:
            assert plan.lineage is Lineage.HOLDS
            assert plan.resume_offset == self.manifest.next_offset
            assert not [offset for offset in off if offset >= self.start_offset], (
                "an off-lineage record stays"
            )
            return
        found = plan.replacement
        beyond = {offset for offset in self.archived if offset >= found.divergence_offset}
        assert beyond, "a replacement drops at least one record"
        assert beyond <= set(off), "a record on the lineage counts as off it"
        assert {offset for offset in off if offset >= self.start_offset} <= beyond, (
            "an off-lineage record stays"
        )

        entries = [*self.manifest.segments, *self.manifest.gaps]
        holder = next(one for one in entries if one.base_offset <= found.divergence_offset < one.next_offset)
        assert found.base_offset == plan.resume_offset == holder.base_offset
        assert found.last_offset == self.manifest.next_offset - 1
        assert found.segment_count == sum(
            segment.base_offset >= found.base_offset for segment in self.manifest.segments
        )
        self._check_what_is_lost(plan)

    def _check_what_is_lost(self, plan: LineagePlan) -> None:
        found = plan.replacement
        wanted = range(found.base_offset, self.start_offset)
        assert _offsets(found.missing) == [*wanted]
        assert _offsets(found.only_archived) == [
            offset for offset in wanted if offset in self.archived and offset < found.divergence_offset
        ]
        assert (found.local_base_offset is None) == bool(wanted)

    def _cut_back(self, next_offset: int) -> None:
        kept = [one for one in self.manifest.segments if one.base_offset < next_offset]
        self.archived = {offset: one for offset, one in self.archived.items() if offset < next_offset}
        self.manifest = replace(
            self.manifest,
            next_offset=next_offset,
            segments=SegmentTable.of(kept),
            gaps=tuple(gap for gap in self.manifest.gaps if gap.base_offset < next_offset),
            epochs=without_from(self.manifest.epochs, next_offset),
        )
        assert self.manifest.faults() == ()

    def _upload(self, lengths: tuple[int, ...], *, before_offset: int) -> None:
        """Archive that many records at a time; none at or past *before_offset* is stable."""
        for length in lengths:
            if self.manifest.next_offset < self.start_offset < self.leader.next_offset:
                gap = Gap(self.manifest.next_offset, self.start_offset - 1, "trimmed", 1)
                self.manifest = self.manifest.with_gap(gap)
            base = self.manifest.next_offset
            end = min(base + length, before_offset)
            if base < self.start_offset or end <= base:
                return
            epochs = clipped(self.leader.epochs, base_offset=base, next_offset=end)
            self.manifest = self.manifest.appended([remote(base, end - 1, leader_epoch=self.epoch)], epochs)
            self.manifest = replace(self.manifest, leader_epoch=self.epoch)
            self.archived |= {offset: self.leader.records[offset] for offset in range(base, end)}


def _offsets(found) -> list[int]:
    return [] if found is None else [*range(found.base_offset, found.last_offset + 1)]


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(terms, min_size=2, max_size=12))
def test_the_archive_keeps_what_its_leader_holds_and_nothing_off_its_lineage(history):
    """A scan keeps exactly the segments whose every record the leader holds, after any elections."""
    cluster = Cluster()
    for term in history:
        cluster.play(term)
