"""Space plan: the five phases, their order, what each takes, and why the rest stays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.policies.spaces import (
    EVERYTHING,
    demand_for,
    segments_of,
    space_partition,
    taken,
    topic_partition,
)
from tieringd.policies.space_plan import (
    EMPTY,
    ENOUGH,
    ONLY_ACTIVE,
    KeptPartition,
    Phase,
    PhasePlan,
    Removal,
    SpaceDemand,
    SpacePlan,
    plan_space,
)


def plan(partitions, wanted_bytes=EVERYTHING, *, cursor=None) -> SpacePlan:
    """Return the plan for *wanted_bytes* over the target, by default more than there is."""
    return plan_space(
        partitions,
        demand_for(wanted_bytes, partitions),
        cursor=topic_partition(cursor) if cursor else None,
    )


def reasons(found: SpacePlan) -> dict[str, str]:
    return {str(one.topic_partition): one.because for one in found.kept}


EXPLICIT = {"has_explicit_target": True}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        pytest.param({}, {3: 4, 5: 1}, id="default settings"),
        pytest.param(EXPLICIT, {4: 4, 5: 1}, id="explicit settings"),
        pytest.param({"retention": 2}, {1: 2, 3: 2, 5: 1}, id="retention first"),
        pytest.param({"retention": 2} | EXPLICIT, {1: 2, 4: 2, 5: 1}, id="retention, then explicit"),
        pytest.param({"retention": 5}, {1: 5}, id="retention goes down to the active segment"),
        pytest.param({"retention": 9}, {1: 5}, id="retention past the log"),
        pytest.param({"local_retention": 3}, {2: 3, 3: 1, 5: 1}, id="past the local target"),
        pytest.param({"retention": 1, "local_retention": 3}, {1: 1, 2: 2, 3: 1, 5: 1}, id="four phases"),
        pytest.param({"retention": 3, "local_retention": 2}, {1: 3, 3: 1, 5: 1}, id="no second time"),
        pytest.param({"local_retention": 5}, {2: 5}, id="local target down to the active segment"),
        pytest.param({"durable": 0}, {}, id="nothing durable"),
        pytest.param({"durable": 2}, {3: 2}, id="durable in part"),
        pytest.param({"durable": 4}, {3: 4}, id="all durable but the newest"),
        pytest.param({"durable": 1, "retention": 3}, {1: 1}, id="retention past durable"),
        pytest.param({"durable": 2, "local_retention": 3}, {2: 2}, id="local retention past durable"),
        pytest.param({"gone": 2, "retention": 3}, {1: 1, 3: 1, 5: 1}, id="some on their way out"),
        pytest.param({"gone": 4}, {5: 1}, id="at two segments already"),
        pytest.param({"gone": 5}, {}, id="at the active segment already"),
        pytest.param({"gone": 9}, {}, id="log start past the log"),
        pytest.param({"gone": 3, "durable": 1}, {}, id="log start past durable"),
        pytest.param({"not_reclaimable": "not tiered", "retention": 3}, {}, id="not reclaimable"),
        pytest.param(
            {"not_reclaimable": "it differs", "not_reclaimable_from": 25, "retention": 1},
            {1: 1, 3: 1},
            id="reclaimable in part",
        ),
    ],
)
def test_each_phase_takes_what_is_its_own(facts, expected):
    """Each phase takes what no earlier phase took, and none goes past its limit, under any pressure."""
    assert taken(plan([space_partition("a-0", [1] * 5, **facts)])) == ({"a-0": expected} if expected else {})


def test_limit_inside_a_segment_keeps_the_segment():
    """A segment goes only when the limit is at or past its end."""
    one = space_partition("a-0", [1] * 5)
    inside = replace(one, durable_next_offset=29, retention_next_offset=15)
    assert taken(plan([inside])) == {"a-0": {1: 1, 3: 1}}


def test_log_without_an_active_segment_keeps_its_newest_closed_one_to_the_last_phase():
    """A log of closed segments only loses all but the newest by phase 3, and the newest by phase 5."""
    assert taken(plan([space_partition("a-0", [1] * 3, active=None)])) == {"a-0": {3: 2, 5: 1}}


def order_of_phases():
    """Return a partition for each phase, none of which has anything for an earlier one."""
    return [
        space_partition("e-0", [1], active=7),
        space_partition("d-0", [1, 1], has_explicit_target=True, durable=1),
        space_partition("c-0", [1, 1], durable=1),
        space_partition("b-0", [1, 1], local_retention=1, durable=1),
        space_partition("a-0", [1, 1], retention=1, durable=1),
    ]


@pytest.mark.parametrize(
    ("wanted_bytes", "expected"),
    [
        (0, []),
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (4, [1, 2, 3, 4]),
        (5, [1, 2, 3, 4, 5]),
        (6, [1, 2, 3, 4, 5]),
    ],
)
def test_phases_follow_each_other_until_there_is_enough(wanted_bytes, expected):
    """No phase begins before the ones before it are empty, and none after there is enough."""
    found = plan(order_of_phases(), wanted_bytes)
    assert [one.phase for one in found.phases] == list(Phase)
    assert [one.phase for one in found.phases if one.removals] == expected
    assert found.removed_bytes == min(wanted_bytes, 5)
    assert found.short_by_bytes == max(0, wanted_bytes - 5)


def test_explicit_settings_are_taken_only_after_all_default_ones():
    """Phase 4 waits for the last topic of phase 3, however small what is left is."""
    partitions = [
        space_partition("explicit-0", [100] * 9, has_explicit_target=True),
        space_partition("default-0", [1] * 9),
    ]
    assert taken(plan(partitions, 8)) == {"default-0": {3: 8}}
    assert taken(plan(partitions, 9)) == {"default-0": {3: 8}, "explicit-0": {4: 1}}


@pytest.mark.parametrize(
    ("wanted_bytes", "expected"),
    [
        pytest.param(1, {"big-0": 1}, id="one segment is enough"),
        pytest.param(20, {"big-0": 1}, id="exactly one"),
        pytest.param(21, {"big-0": 2}, id="a byte more"),
        pytest.param(60, {"big-0": 3}, id="all of the largest"),
        pytest.param(61, {"big-0": 3, "many-0": 1}, id="then the next"),
        pytest.param(96, {"big-0": 3, "many-0": 5, "small-0": 1}, id="then the smallest"),
    ],
)
def test_retention_phase_takes_the_largest_removal_first(wanted_bytes, expected):
    """Phase 1 goes by the bytes that a partition may give, and not by segments, names or the whole log."""
    partitions = [
        space_partition("big-0", [20] * 3, retention=3),
        space_partition("huge-0", [1000] * 9),
        space_partition("many-0", [7] * 5, retention=5),
        space_partition("small-0", [9] * 5, retention=1),
    ]
    found = plan(partitions, wanted_bytes)
    assert taken(found) == {name: {1: count} for name, count in expected.items()}
    assert found.cursor is None, "only laps move the cursor"


def test_retention_phase_takes_every_partition_of_the_same_size():
    """Several partitions with equally large removals are all of them taken, in turn after the cursor."""
    partitions = [space_partition(f"{name}-0", [10] * 2, retention=2) for name in "dbca"]
    found = plan(partitions, 70, cursor="b-0")
    assert [str(one.topic_partition) for one in found.phases[0].removals] == ["c-0", "d-0", "a-0", "b-0"]
    assert taken(found)["b-0"] == {1: 1}


@pytest.mark.parametrize(
    ("phase", "facts"),
    [
        pytest.param(2, {"local_retention": 9}, id="phase 2"),
        pytest.param(3, {}, id="phase 3"),
        pytest.param(4, EXPLICIT, id="phase 4"),
    ],
)
def test_laps_take_one_oldest_segment_of_each_partition(phase, facts):
    """A partition with more, or larger, segments gives no more in a lap than any other."""
    partitions = [
        space_partition("a-0", [10] * 4, **facts),
        space_partition("b-0", [50] * 9, **facts),
        space_partition("c-0", [10] * 3, **facts),
    ]
    assert taken(plan(partitions, 71)) == {"a-0": {phase: 2}, "b-0": {phase: 1}, "c-0": {phase: 1}}
    assert taken(plan(partitions, 141)) == {"a-0": {phase: 3}, "b-0": {phase: 2}, "c-0": {phase: 2}}


def test_last_phase_is_fair_too():
    """Phase 5 takes the newest closed segments in turn, and begins after the cursor."""
    partitions = [space_partition(f"{name}-0", [10]) for name in "abc"]
    found = plan(partitions, 15, cursor="b-0")
    assert taken(found) == {"c-0": {5: 1}, "a-0": {5: 1}}
    assert str(found.cursor) == "a-0"


def test_no_phase_takes_an_empty_segment_more():
    """An empty segment goes with those before it that are needed, and not for its own sake."""
    by_retention = space_partition("a-0", [10, 0, 10, 0], retention=4)
    assert taken(plan([by_retention], 20)) == {"a-0": {1: 3}}
    in_laps = space_partition("a-0", [10, 0, 10, 0, 0, 10])
    assert taken(plan([in_laps], 20)) == {"a-0": {3: 3}}


def test_lap_that_is_just_enough_ends_with_its_last_partition():
    """The cursor stands at the last partition of a lap that was needed as a whole, wherever the lap began."""
    partitions = [space_partition("a-0", [10] * 3), space_partition("b-0", [10] * 3)]
    assert str(plan(partitions, 20).cursor) == "b-0"
    assert str(plan(partitions, 20, cursor="a-0").cursor) == "a-0"


def test_laps_pass_over_a_partition_that_has_no_more():
    """A partition that has given all it may is left out of later laps; the others go on."""
    partitions = [space_partition("a-0", [10] * 2), space_partition("b-0", [10] * 9)]
    assert taken(plan(partitions, 50)) == {"a-0": {3: 1}, "b-0": {3: 4}}


def test_lap_goes_from_topic_to_topic():
    """A topic with many partitions does not give twice before the other topics have given once."""
    partitions = [space_partition(f"wide-{number}", [10] * 9) for number in range(5)]
    partitions += [space_partition(f"narrow{number}-0", [10] * 9) for number in range(3)]
    found = taken(plan(partitions, 40))
    assert sorted(found) == ["narrow0-0", "narrow1-0", "narrow2-0", "wide-0"]


@pytest.mark.parametrize(
    ("cursor", "first", "last"),
    [
        pytest.param(None, "a-0", "a-0", id="none: the first"),
        pytest.param("a-0", "b-0", "b-0", id="after the cursor"),
        pytest.param("c-0", "a-1", "a-1", id="the next partition number"),
        pytest.param("b-1", "a-0", "a-0", id="round to the first"),
        pytest.param("bb-0", "c-0", "c-0", id="a partition that is gone"),
        pytest.param("zz-99", "a-0", "a-0", id="past all of them"),
    ],
)
def test_laps_begin_after_the_cursor(cursor, first, last):
    """The cursor is a name, so it holds when partitions come and go."""
    partitions = [space_partition(name, [10] * 9) for name in ("a-0", "a-1", "b-0", "b-1", "c-0")]
    found = plan(partitions, 10, cursor=cursor)
    assert taken(found) == {first: {3: 1}}
    assert str(found.cursor) == last


def test_rounds_that_take_little_take_from_everyone_in_turn():
    """Each partition is taken from once in so many rounds, if the cursor is carried from round to round."""
    partitions = [space_partition(f"t-{number}", [10] * 9) for number in range(6)]
    cursor, given = None, []
    for _ in range(12):
        found = plan(partitions, 5, cursor=cursor)
        given += list(taken(found))
        cursor = str(found.cursor)
    assert given == [f"t-{number}" for number in range(6)] * 2


def test_cursor_stays_when_no_lap_ends_early():
    """Whole laps treat all partitions alike, so the next round begins where this one did."""
    partitions = [space_partition("a-0", [10] * 3), space_partition("b-0", [10] * 3)]
    assert str(plan(partitions, EVERYTHING, cursor="a-0").cursor) == "a-0"
    assert str(plan(partitions, 0, cursor="a-0").cursor) == "a-0"


def demand(used, target, *, segment=100, overage=1.0) -> SpaceDemand:
    return SpaceDemand(used, target, segment_bytes=segment, overage_coefficient=overage)


@pytest.mark.parametrize(
    ("asked", "excess", "wanted"),
    [
        pytest.param(demand(4000, 5000), 0, 0, id="under the target"),
        pytest.param(demand(5000, 5000), 0, 0, id="at the target"),
        pytest.param(demand(5100, 5000), 100, 0, id="over by one segment"),
        pytest.param(demand(5101, 5000), 101, 101, id="over by more"),
        pytest.param(demand(5101, 5000, overage=2.0), 101, 202, id="with overage"),
        pytest.param(demand(5101, 5000, overage=1.5), 101, 152, id="overage is rounded up"),
        pytest.param(demand(5100, 5000, overage=2.0), 100, 0, id="the dead band is of the excess"),
        pytest.param(demand(1050, 1000), 50, 0, id="small disk: a twentieth of the target"),
        pytest.param(demand(1051, 1000), 51, 51, id="small disk: over that"),
        pytest.param(demand(1, 0), 1, 1, id="no log area"),
    ],
)
def test_demand_has_a_dead_band_and_an_overage(asked, excess, wanted):
    """
    Nothing is removed up to one segment over the target.

    Over that, the excess times the coefficient is.
    """
    partitions = [space_partition("a-0", [1] * 400)]
    found = plan_space(partitions, asked)
    assert (found.excess_bytes, found.wanted_bytes) == (excess, wanted)
    assert (found.removed_bytes, found.short_by_bytes) == (wanted, 0)


def test_overage_that_is_not_found_is_no_shortage():
    """Short is what is missing to the target, and not to what was wanted on top."""
    found = plan_space([space_partition("a-0", [1] * 150)], demand(5101, 5000, overage=2.0))
    assert (found.wanted_bytes, found.removed_bytes, found.short_by_bytes) == (202, 150, 0)


def test_bytes_on_their_way_out_are_not_removed_again():
    """Segments below log start count as gone: two rounds before the broker frees a file ask for it once."""
    before = space_partition("a-0", [100] * 9)
    first = plan_space([before], demand(5200, 5000))
    after = replace(before, log_start_offset=first.cloud_gc_offsets()[before.topic_partition])
    second = plan_space([after], demand(5200, 5000))
    assert (first.removed_bytes, first.leaving_bytes) == (200, 0)
    assert (second.removed_bytes, second.leaving_bytes, second.excess_bytes) == (0, 200, 0)


def test_bytes_on_their_way_out_count_for_every_partition():
    """Segments below a log's start are leaving, even of a partition that may give nothing itself."""
    partitions = [space_partition("a-0", [100] * 3, gone=2, not_reclaimable="this broker is not its leader")]
    found = plan_space(partitions, demand(5300, 5000))
    assert (found.leaving_bytes, found.excess_bytes) == (200, 100)


def test_log_start_that_comes_back_lower_is_planned_again():
    """A broker that forgot a trim has the segments again, and they are in use again."""
    partitions = [space_partition("a-0", [100] * 9, gone=0)]
    assert taken(plan_space(partitions, demand(5200, 5000))) == {"a-0": {3: 2}}


@pytest.mark.parametrize(
    ("facts", "wanted_bytes", "expected"),
    [
        pytest.param({}, 0, (35, ENOUGH), id="nothing is wanted"),
        pytest.param({}, 20, (15, ENOUGH), id="some went"),
        pytest.param({}, EVERYTHING, (5, ONLY_ACTIVE), id="all went"),
        pytest.param(
            {"durable": 1},
            EVERYTHING,
            (25, "segment 10 is not known to be durable: the archive ends at 10"),
            id="not durable",
        ),
        pytest.param({"durable": 1}, 10, (25, "segment 10 is not"), id="just enough was durable"),
        pytest.param({"not_reclaimable": "not tiered"}, EVERYTHING, (35, "not tiered"), id="not tiered"),
        pytest.param({"not_reclaimable": "not tiered", "gone": 1}, 0, (25, "not tiered"), id="in part gone"),
        pytest.param(
            {"not_reclaimable": "it differs", "not_reclaimable_from": 10},
            EVERYTHING,
            (25, "it differs"),
            id="reclaimable in part",
        ),
        pytest.param(
            {"not_reclaimable": "it differs", "not_reclaimable_from": 10},
            0,
            (35, ENOUGH),
            id="not asked for it",
        ),
        pytest.param({"active": None, "retention": 3}, EVERYTHING, (0, EMPTY), id="nothing left"),
    ],
)
def test_kept_says_why_the_next_segment_stays(facts, wanted_bytes, expected):
    """Every partition is named with the bytes that it keeps, and why its oldest segment stays."""
    (kept,) = plan([space_partition("a-0", [10] * 3, **({"active": 5} | facts))], wanted_bytes).kept
    size_bytes, because = expected
    assert kept.size_bytes == size_bytes
    assert kept.because.startswith(because)


def test_partition_without_segments_is_named():
    """A directory without a segment gives nothing, and is not an error."""
    nothing = replace(space_partition("a-0", []), segments=())
    found = plan([nothing])
    assert (found.removed_bytes, reasons(found)) == (0, {"a-0": EMPTY})


def test_partitions_that_are_not_reclaimable_say_so_and_the_others_pay():
    """A partition that cannot be reclaimed is shown with its reason. The missing bytes are shown too."""
    partitions = [
        space_partition(
            "compacted-0", [10] * 9, not_reclaimable="compact-only: the broker refuses to trim it"
        ),
        space_partition("plain-0", [10] * 9, not_reclaimable="not tiered"),
        space_partition("tiered-0", [10] * 3),
    ]
    found = plan(partitions, 100)
    assert taken(found) == {"tiered-0": {3: 2, 5: 1}}
    assert found.short_by_bytes == 70
    assert reasons(found) == {
        "compacted-0": "compact-only: the broker refuses to trim it",
        "plain-0": "not tiered",
        "tiered-0": ONLY_ACTIVE,
    }


def test_plan_is_told_whole():
    """A plan has every figure, every phase, every partition and every offset."""
    partitions = [
        space_partition("b-0", [10, 20, 30], active=4, retention=1),
        space_partition("a-1", [10, 20, 30], active=4, not_reclaimable="not tiered"),
        space_partition("a-0", [10, 20, 30], active=4, gone=1),
    ]
    a0, a1, b0 = sorted(one.topic_partition for one in partitions)
    found = plan_space(partitions, SpaceDemand(192, 150, segment_bytes=0, overage_coefficient=1))
    assert found == SpacePlan(
        excess_bytes=32,
        wanted_bytes=32,
        leaving_bytes=10,
        phases=(
            PhasePlan(Phase.RETENTION, (Removal(b0, 10, 1, 10),)),
            PhasePlan(Phase.LOCAL_RETENTION),
            PhasePlan(Phase.DEFAULT_TARGETS, (Removal(a0, 20, 1, 20), Removal(b0, 20, 1, 20))),
            PhasePlan(Phase.EXPLICIT_TARGETS),
            PhasePlan(Phase.ACTIVE_SEGMENT),
        ),
        kept=(
            KeptPartition(a0, 34, ENOUGH),
            KeptPartition(a1, 64, "not tiered"),
            KeptPartition(b0, 34, ENOUGH),
        ),
        cursor=b0,
    )
    assert found.cloud_gc_offsets() == {a0: 20, b0: 20}
    assert found.removed_bytes == 50


def test_plan_of_an_empty_disk_is_empty():
    """No partition at all is no error, and the missing bytes are reported."""
    found = plan_space([], demand(5200, 5000))
    assert (found.removed_bytes, found.short_by_bytes, found.kept, found.cursor) == (0, 200, (), None)


def test_plan_shares_the_segments_that_it_is_given():
    """A partition's sequence is used as it is, whatever kind of sequence."""
    segments = segments_of([10] * 5)
    listed = replace(space_partition("a-0", [10] * 5), segments=list(segments))
    assert plan([listed], 25) == plan([space_partition("a-0", [10] * 5)], 25)


def test_overage_below_one_is_a_programming_error():
    """A coefficient that never reaches the target is refused."""
    with pytest.raises(AssertionError):
        demand(2, 1, overage=0.5)


def test_every_phase_has_a_title():
    """The command line shows each phase in words of its own."""
    titles = [phase.title for phase in Phase]
    assert all(titles)
    assert len(set(titles)) == len(Phase)
