"""
The space plan against its rules, for random logs, settings and pressures.

`sequence` is the model: every segment that may go, in the order in which it goes, found with plain
lists and one segment at a time. A plan is the shortest prefix of it that is enough. The rules of the
issue are checked by themselves as well, so that the model and the plan cannot be wrong together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.support.examples import examples
from tests.unit.policies.spaces import STEP, demand_for, segments_of, space_partition
from tieringd.model.partition import TopicPartition
from tieringd.policies.space_plan import ENOUGH, Phase, SpaceDemand, SpacePartition, plan_space

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieringd.model.segment import LocalSegment
    from tieringd.policies.space_plan import SpacePlan

Step = tuple[Phase, TopicPartition, "LocalSegment"]

_names = st.builds(TopicPartition, st.sampled_from(["a", "b", "c", "d"]), st.integers(0, 3))
_count = st.integers(0, 9)


# Few different sizes, so that sums are often just enough.
_size = st.sampled_from([0, 1, 1, 1, 2, 5])


@st.composite
def partitions_of(draw: st.DrawFn, name: TopicPartition) -> SpacePartition:
    """Draw a partition: up to eight closed segments, and limits that need not agree with each other."""
    closed = draw(st.lists(_size, max_size=8))
    one = space_partition(
        str(name),
        closed,
        active=draw(st.sampled_from([1, 1, 5, None])),
        gone=draw(st.sampled_from([0, 0, 0, 1, 2, 9])),
        durable=draw(st.just(len(closed)) | _count),
        retention=draw(st.just(0) | _count),
        local_retention=draw(st.just(0) | _count),
        has_explicit_target=draw(st.booleans()),
        not_reclaimable=draw(st.sampled_from(["", "", "", "not tiered"])),
        not_reclaimable_from=draw(st.just(0) | _count) * STEP,
    )
    # A limit inside a segment, as a deletion by offset or an open upload leaves it.
    return replace(one, durable_next_offset=one.durable_next_offset + draw(st.sampled_from([0, 0, 4])))


@dataclass(frozen=True)
class Situation:
    """A filesystem that is over its target."""

    partitions: tuple[SpacePartition, ...]
    wanted_bytes: int
    cursor: TopicPartition | None

    def plan(self, *, more_bytes: int = 0) -> SpacePlan:
        demand = demand_for(self.wanted_bytes + more_bytes, self.partitions)
        return plan_space(self.partitions, demand, cursor=self.cursor)


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """Draw partitions, a cursor that is mostly one of them, and any pressure up to more than there is."""
    names = draw(st.lists(_names, unique=True, max_size=8))
    partitions = tuple(draw(partitions_of(name)) for name in names)
    available = sum(segment.size_bytes for one in partitions for segment in may_go(one))
    cursors = st.none() | _names
    return Situation(
        partitions,
        draw(st.integers(0, available + 2)),
        draw(st.sampled_from(names) | cursors if names else cursors),
    )


def closed_of(one: SpacePartition) -> list[LocalSegment]:
    return [segment for segment in one.segments if segment.next_offset is not None]


def may_go(one: SpacePartition) -> list[LocalSegment]:
    """Return the segments that may go at all: closed, durable, not leaving, and before what is excepted."""
    return [
        segment
        for segment in closed_of(one)
        if one.log_start_offset < segment.next_offset <= one.durable_next_offset
        and not (one.not_reclaimable and segment.next_offset > one.not_reclaimable_from)
    ]


def in_phase(one: SpacePartition, phase: Phase) -> list[LocalSegment]:
    """Return the segments that may go in *phase* or in one before it."""
    newest_closed = closed_of(one)[-1:]
    limits = [
        lambda segment: segment.next_offset <= one.retention_next_offset,
        lambda segment: segment.next_offset <= one.local_retention_next_offset,
        lambda segment: not one.has_explicit_target and segment not in newest_closed,
        lambda segment: one.has_explicit_target and segment not in newest_closed,
        lambda _segment: True,
    ]
    return [segment for segment in may_go(one) if any(limit(segment) for limit in limits[:phase])]


def sequence(partitions: Sequence[SpacePartition], cursor: TopicPartition | None) -> list[Step]:
    """Return every segment that may go, in the order in which it goes."""
    steps: list[Step] = []
    gone: set[tuple[TopicPartition, int]] = set()

    def waiting(phase: Phase) -> dict[TopicPartition, list[LocalSegment]]:
        return {
            one.topic_partition: [
                segment
                for segment in in_phase(one, phase)
                if (one.topic_partition, segment.base_offset) not in gone
            ]
            for one in in_turn(partitions, cursor)
        }

    def take(phase: Phase, name: TopicPartition, segment: LocalSegment) -> None:
        steps.append((phase, name, segment))
        gone.add((name, segment.base_offset))

    allowed = waiting(Phase.RETENTION)
    sizes = {name: sum(segment.size_bytes for segment in rows) for name, rows in allowed.items()}
    for name in sorted(allowed, key=lambda name: -sizes[name]):
        for segment in allowed[name]:
            take(Phase.RETENTION, name, segment)
    for phase in list(Phase)[1:]:
        while any(left := waiting(phase).values()):
            del left
            for name, rows in waiting(phase).items():
                if rows:
                    take(phase, name, rows[0])
    return steps


def in_turn(partitions: Sequence[SpacePartition], cursor: TopicPartition | None) -> list[SpacePartition]:
    def turn(name: TopicPartition) -> tuple[int, str]:
        return name.partition, name.topic

    ordered = sorted(partitions, key=lambda one: turn(one.topic_partition))
    if cursor is None:
        return ordered
    after = [one for one in ordered if turn(one.topic_partition) > turn(cursor)]
    return after + [one for one in ordered if one not in after]


def prefix(steps: list[Step], wanted_bytes: int) -> list[Step]:
    """Return the shortest prefix of *steps* that has *wanted_bytes*; all of them when none has."""
    sums = [0, *accumulate(segment.size_bytes for _, _, segment in steps)]
    enough = next((count for count, found in enumerate(sums) if found >= wanted_bytes), len(steps))
    return steps[:enough]


def planned(plan: SpacePlan, partitions: Sequence[SpacePartition]) -> set[tuple[Phase, TopicPartition, int]]:
    """Return phase, partition and base offset of each segment in *plan*, and see that its sums are right."""
    by_name = {one.topic_partition: one for one in partitions}
    reached: dict[TopicPartition, int] = {}
    found = set()
    for phase in plan.phases:
        for removal in phase.removals:
            name = removal.topic_partition
            begins = reached.get(name, by_name[name].log_start_offset)
            rows = [
                segment
                for segment in closed_of(by_name[name])
                if begins < segment.next_offset <= removal.next_offset
            ]
            assert rows, "a removal removes something"
            assert rows[-1].next_offset == removal.next_offset, "a removal ends with a segment"
            assert (len(rows), sum(segment.size_bytes for segment in rows)) == (
                removal.segment_count,
                removal.size_bytes,
            )
            found |= {(phase.phase, name, segment.base_offset) for segment in rows}
            reached[name] = removal.next_offset
    assert reached == plan.cloud_gc_offsets()
    return found


def check_rules(plan: SpacePlan, partitions: Sequence[SpacePartition]) -> None:
    """See that *plan* keeps every rule of space management."""
    assert [one.phase for one in plan.phases] == list(Phase)
    found = planned(plan, partitions)
    for one in partitions:
        check_limits(one, plan)
    taken = {(name, base) for _, name, base in found}
    check_amount(plan, partitions, taken)
    for phase in Phase:
        if any(later > phase for later, _, _ in found):
            exhausted = {
                (one.topic_partition, segment.base_offset)
                for one in partitions
                for segment in in_phase(one, phase)
            }
            assert exhausted <= taken, f"phase {phase} is not at its end"
    for phase in list(Phase)[1:]:
        check_fairness(phase, partitions, found)
    check_largest_first(plan, partitions)


def check_limits(one: SpacePartition, plan: SpacePlan) -> None:
    offset = plan.cloud_gc_offsets().get(one.topic_partition)
    (kept,) = [each for each in plan.kept if each.topic_partition == one.topic_partition]
    assert kept.because, "what stays has a reason"
    if offset is None:
        return
    assert not one.not_reclaimable or offset <= one.not_reclaimable_from
    assert one.log_start_offset < offset <= one.durable_next_offset, "nothing past durable"
    assert all(segment.base_offset >= offset for segment in one.segments if segment.next_offset is None)
    assert kept.size_bytes == sum(
        segment.size_bytes
        for segment in one.segments
        if segment.next_offset is None or segment.next_offset > offset
    )


def check_amount(plan: SpacePlan, partitions: Sequence[SpacePartition], taken: set) -> None:
    """See that enough goes, if there is enough, and not more than one segment beyond it."""
    available = sum(segment.size_bytes for one in partitions for segment in may_go(one))
    assert plan.removed_bytes >= min(plan.wanted_bytes, available)
    newest = [
        max(
            (segment for segment in may_go(one) if (one.topic_partition, segment.base_offset) in taken),
            key=lambda segment: segment.base_offset,
        )
        for one in partitions
        if one.topic_partition in plan.cloud_gc_offsets()
    ]
    if taken:
        assert any(plan.removed_bytes - segment.size_bytes < plan.wanted_bytes for segment in newest)
    assert plan.short_by_bytes == max(0, plan.wanted_bytes - plan.removed_bytes)
    if plan.short_by_bytes:
        assert all(each.because != ENOUGH for each in plan.kept)


def check_fairness(phase: Phase, partitions: Sequence[SpacePartition], found: set) -> None:
    """Check that in a lap phase no partition gives two segments more than one that could still give."""
    given = {
        one.topic_partition: sum((phase, one.topic_partition) == each[:2] for each in found)
        for one in partitions
    }
    taken = {each[1:] for each in found}
    could_give = [
        one.topic_partition
        for one in partitions
        if any((one.topic_partition, segment.base_offset) not in taken for segment in in_phase(one, phase))
    ]
    if could_give:
        assert max(given.values()) <= min(given[name] for name in could_give) + 1


def check_largest_first(plan: SpacePlan, partitions: Sequence[SpacePartition]) -> None:
    """See that phase 1 ends with the one partition that gives in part, and passes over only smaller ones."""
    allowed = {
        one.topic_partition: sum(segment.size_bytes for segment in in_phase(one, Phase.RETENTION))
        for one in partitions
    }
    removals = plan.phases[0].removals
    sizes = [allowed[one.topic_partition] for one in removals]
    assert sizes == sorted(sizes, reverse=True)
    assert all(one.size_bytes == allowed[one.topic_partition] for one in removals[:-1])
    passed_over = allowed.keys() - {one.topic_partition for one in removals}
    if removals:
        assert all(allowed[name] <= sizes[-1] for name in passed_over)


@given(situation=situations())
def test_space_plan_keeps_every_rule(situation):
    """A plan never goes past durable segments, the active one, or its need. It is in order, and fair."""
    check_rules(situation.plan(), situation.partitions)


@settings(max_examples=examples(300))
@given(situation=situations())
def test_space_plan_is_the_shortest_prefix_that_is_enough(situation):
    """The laps that are taken in one go are those that one segment at a time would take."""
    found = situation.plan()
    steps = prefix(sequence(situation.partitions, situation.cursor), situation.wanted_bytes)
    assert planned(found, situation.partitions) == {
        (phase, name, segment.base_offset) for phase, name, segment in steps
    }
    is_enough = sum(segment.size_bytes for _, _, segment in steps) >= situation.wanted_bytes
    ends_in_lap = bool(steps) and is_enough and steps[-1][0] is not Phase.RETENTION
    assert found.cursor == (steps[-1][1] if ends_in_lap else situation.cursor)


@given(situation=situations(), more_bytes=st.integers(0, 50))
def test_space_plan_of_more_pressure_never_takes_less(situation, more_bytes):
    """A plan under more pressure removes all that a plan under less does, in the same phases."""
    less, more = situation.plan(), situation.plan(more_bytes=more_bytes)
    assert planned(less, situation.partitions) <= planned(more, situation.partitions)


@given(
    situation=situations(),
    used=st.lists(st.integers(0, 100), min_size=2, max_size=2).map(sorted),
    target_bytes=st.integers(0, 100),
    segment_bytes=st.integers(0, 10),
    overage=st.sampled_from([1.0, 1.5, 2.0]),
)
def test_space_plan_is_monotone_through_dead_band_and_overage(
    *, situation, used, target_bytes, segment_bytes, overage
):
    """More bytes in use never plan less, and the overage never takes a partition past its limits."""
    less, more = (
        plan_space(situation.partitions, SpaceDemand(each, target_bytes, segment_bytes, overage))
        for each in used
    )
    assert planned(less, situation.partitions) <= planned(more, situation.partitions)
    assert less.wanted_bytes <= more.wanted_bytes
    assert more.wanted_bytes in (0, -int(-more.excess_bytes * overage // 1))
    assert more.wanted_bytes or more.excess_bytes <= segment_bytes
    for one in situation.partitions:
        check_limits(one, more)


@given(situation=situations(), random=st.randoms(use_true_random=False))
def test_space_plan_does_not_depend_on_the_order_of_the_partitions(situation, random):
    """A scan may find the partitions in any order."""
    shuffled = tuple(random.sample(situation.partitions, len(situation.partitions)))
    assert replace(situation, partitions=shuffled).plan() == situation.plan()


@dataclass
class Log:
    """One partition of the machine's disk."""

    sizes: list[int]
    """Of every closed segment there ever was; the number of each is its place here."""
    on_disk: int = 0
    """The number of the oldest that the broker has not deleted."""
    gone: int = 0
    """The number at which the log starts: what is on disk before it is on its way out."""
    durable: int = 0
    is_explicit: bool = False


class DiskMachine(RuleBasedStateMachine):
    """
    A disk in use: logs grow and become durable, rounds plan and trim, the broker frees files later.

    The cursor goes from round to round, partitions come and go, and a broker may forget a trim.
    """

    @initialize(target_bytes=st.integers(20, 120))
    def begin(self, target_bytes: int) -> None:
        self.target_bytes = target_bytes
        self.logs: dict[TopicPartition, Log] = {}
        self.cursor: TopicPartition | None = None

    @rule(name=_names, sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), is_explicit=st.booleans())
    def grow(self, name: TopicPartition, sizes: list[int], is_explicit: bool) -> None:  # noqa: FBT001 drawn by name
        log = self.logs.setdefault(name, Log([], is_explicit=is_explicit))
        log.sizes += sizes

    @rule(name=_names)
    def upload(self, name: TopicPartition) -> None:
        if name in self.logs:
            self.logs[name].durable = len(self.logs[name].sizes)

    @rule(name=_names)
    def delete_topic_partition(self, name: TopicPartition) -> None:
        self.logs.pop(name, None)

    @rule()
    def free_files(self) -> None:
        for log in self.logs.values():
            log.on_disk = max(log.on_disk, log.gone)

    @rule(name=_names)
    def forget_trim(self, name: TopicPartition) -> None:
        if name in self.logs:
            self.logs[name].gone = self.logs[name].on_disk

    def used_bytes(self, *, with_leaving: bool) -> int:
        return sum(
            sum(log.sizes[log.on_disk if with_leaving else log.gone :]) + 1 for log in self.logs.values()
        )

    def facts(self) -> list[SpacePartition]:
        return [
            SpacePartition(
                name,
                segments_of(log.sizes[log.on_disk :], active=1, first=log.on_disk),
                log_start_offset=log.gone * STEP,
                durable_next_offset=log.durable * STEP,
                retention_next_offset=0,
                local_retention_next_offset=0,
                has_explicit_target=log.is_explicit,
            )
            for name, log in self.logs.items()
        ]

    @precondition(lambda self: self.logs)
    @rule()
    def run_round(self) -> None:
        partitions = self.facts()
        used = self.used_bytes(with_leaving=True)
        demand = SpaceDemand(used, self.target_bytes, segment_bytes=0, overage_coefficient=1)
        plan = plan_space(partitions, demand, cursor=self.cursor)
        check_rules(plan, partitions)
        for name, offset in plan.cloud_gc_offsets().items():
            log = self.logs[name]
            assert log.gone * STEP < offset <= log.durable * STEP, "only what is durable is let go"
            log.gone = offset // STEP
        self.cursor = plan.cursor
        left = self.used_bytes(with_leaving=False)
        assert left <= self.target_bytes + plan.short_by_bytes, (
            "usage is at its target, or the plan says by how much not"
        )
        again = plan_space(self.facts(), demand, cursor=self.cursor)
        assert again.removed_bytes == 0, "what is on its way out is not removed twice"


DiskMachine.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=30, deadline=None)


class TestDiskInUse(DiskMachine.TestCase):
    """Round after round, the disk comes back to its target with only what is durable let go."""
