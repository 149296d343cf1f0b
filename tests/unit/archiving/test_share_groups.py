"""What share groups still need: asked seldom, and held where it is not known."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from tieringd.archiving.share_groups import (
    FAILED_PAUSE_SECONDS,
    FORGET_AFTER_SECONDS,
    FRESH_SECONDS,
    GroupsNote,
    ShareGroups,
)
from tieringd.errors import BrokerDenied, BrokerUnavailable
from tieringd.metrics import Metrics
from tieringd.policies.trim_target import ShareGroupHold

HOLD_MS = 1_000_000


@pytest.fixture
def groups(broker, clock, metrics):
    return ShareGroups(broker, metrics=metrics, steady_ms=clock, hold_ms=HOLD_MS)


@pytest.fixture
def held(groups, writer):
    """Give a function that returns what is held of the partition."""
    return lambda: groups.hold(writer.name, now_ms=HOLD_MS)


async def test_slowest_group_decides(held, broker, writer):
    """The hold begins at the first record that the slowest group needs."""
    broker.share_groups = {"slow": {writer.name: 10}, "fast": {writer.name: 20}}
    assert await held() == ShareGroupHold(10, "share group slow needs offset 10 and later", 0)


async def test_group_that_has_not_begun_holds_everything(held, broker, writer):
    """A share group that has not begun holds every record: its first offset is not known."""
    broker.share_groups = {"new": {writer.name: -1}}
    assert await held() == ShareGroupHold(0, "share group new has not begun to read", 0)


async def test_other_partitions_and_other_clusters_hold_nothing(held, broker, writer):
    """A group holds what it reads."""
    assert await held() is None
    broker.share_groups = {"other": {writer.name._replace(partition=9): 0}}
    assert await held() is None


async def test_brokers_are_asked_once_in_a_while(held, broker, writer, clock):
    """Ten thousand partitions that are trimmed ask together."""
    broker.share_groups = {"work": {writer.name: 10}}
    for _ in range(3):
        assert (await held()).offset == 10
    broker.share_groups = {"work": {writer.name: 30}}
    assert (broker.calls["share_group_starts"], (await held()).offset) == (1, 10)
    clock.now_ms += int(FRESH_SECONDS * 1000)
    assert ((await held()).offset, broker.calls["share_group_starts"]) == (30, 2)


async def test_partitions_that_wait_for_a_slow_answer_do_not_ask_again_each(broker, writer, clock, metrics):
    """Ten thousand trims would come one answer after another, and the disk would fill."""
    asked, answers = 0, asyncio.Event()

    class Slow:
        """Brokers whose answer takes longer than an answer is fresh."""

        async def share_group_starts(self, *, known=()):
            nonlocal asked
            asked += 1
            await answers.wait()
            clock.now_ms += int(2 * FRESH_SECONDS * 1000)
            return {"work": {writer.name: 10}}

    groups = ShareGroups(Slow(), metrics=metrics, steady_ms=clock, hold_ms=HOLD_MS)
    waiting = [asyncio.create_task(groups.hold(writer.name, now_ms=HOLD_MS)) for _ in range(5)]
    await asyncio.sleep(0)
    answers.set()
    assert {(await hold).offset for hold in waiting} == {10}
    assert asked == 1
    await groups.hold(writer.name, now_ms=HOLD_MS)
    assert asked == 2


@pytest.mark.parametrize("error", [BrokerUnavailable("it is away"), BrokerDenied("it is secret")])
async def test_everything_is_held_while_the_offsets_are_not_known(held, broker, clock, metrics, error):
    """Said once, and once when it has ended. A gauge shows it meanwhile."""

    def is_shown() -> bool:
        return metrics.registry.get_sample_value("tieringd_share_group_offsets_unknown") == 1

    with capture_logs() as lines:
        for _ in range(2):
            broker.fail_next("share_group_starts", error)
            hold = await held()
            assert (hold.offset, hold.because.endswith(str(error)), is_shown()) == (0, True, True)
            clock.now_ms += int(FAILED_PAUSE_SECONDS * 1000)
        assert await held() is None
    assert not is_shown()
    assert [one["event"] for one in lines] == [
        "offsets of share groups are not known",
        "offsets of share groups are known again",
    ]


async def test_group_that_is_not_listed_any_more_is_held_for_a_while(held, broker, writer, clock):
    """The group's coordinator may be moving to another broker."""
    broker.share_groups = {"work": {writer.name: 10}}
    assert (await held()).offset == 10
    broker.share_groups = {}
    clock.now_ms += int(FRESH_SECONDS * 1000)
    assert (await held()).offset == 10
    clock.now_ms += int(FORGET_AFTER_SECONDS * 1000) - 1
    assert (await held()).offset == 10
    clock.now_ms += int(FRESH_SECONDS * 1000)
    assert await held() is None


@pytest.mark.parametrize("answer", [{}, {"work": {}}])
async def test_group_that_is_absent_after_a_pause_is_not_forgotten_at_once(
    held, broker, writer, clock, answer
):
    """The process stood still for an hour, or trimmed nothing: this answer is the first without the group."""
    broker.share_groups = {"work": {writer.name: 10}}
    assert (await held()).offset == 10
    clock.now_ms += 3_600_000
    broker.share_groups = answer
    assert (await held()).offset == 10


async def test_group_that_is_there_again_is_held_anew(held, broker, writer, clock):
    """Its earlier absence does not count against it."""
    for offset in (10, 20):
        broker.share_groups = {"work": {writer.name: offset}}
        clock.now_ms += int(FRESH_SECONDS * 1000)
        assert (await held()).offset == offset
        broker.share_groups = {}
        for seconds in (FRESH_SECONDS, FORGET_AFTER_SECONDS - FRESH_SECONDS):
            clock.now_ms += int(seconds * 1000)
            assert (await held()).offset == offset


async def test_groups_that_were_there_are_asked_for_by_name(held, broker, writer, clock):
    """A broker that lists no group says nothing of those whose coordination moves."""
    asked = []
    starts = broker.share_group_starts

    async def noted(*, known):
        asked.append(set(known))
        return await starts(known=known)

    broker.share_group_starts = noted
    broker.share_groups = {"work": {writer.name: 10}}
    for _ in range(2):
        await held()
        clock.now_ms += int(FRESH_SECONDS * 1000)
    assert asked == [set(), {"work"}]


@pytest.fixture
def restarted(tmp_path, broker, clock, metrics, writer):
    """Give a function that returns what is held of the partition by a daemon that starts now."""
    note = GroupsNote(tmp_path / "share_groups.json")

    async def held_by_a_new_process():
        groups = ShareGroups(broker, metrics=metrics, steady_ms=clock, hold_ms=HOLD_MS, note=note)
        return await groups.hold(writer.name, now_ms=HOLD_MS)

    return held_by_a_new_process


async def test_groups_of_the_process_before_are_asked_for_by_name(restarted, broker, writer):
    """A daemon may start while the coordination of a group moves, and no broker lists the group."""
    broker.share_groups = {"work": {writer.name: 10}}
    assert (await restarted()).offset == 10
    starts = broker.share_group_starts

    async def moving(*, known):
        if known:
            raise BrokerUnavailable(f"no broker coordinates {sorted(known)}")
        return {}

    broker.share_group_starts = moving
    assert "no broker coordinates ['work']" in (await restarted()).because
    broker.share_group_starts = starts
    assert (await restarted()).offset == 10


async def test_group_of_the_process_before_is_forgotten_in_time(restarted, tmp_path, broker, writer, clock):
    """Its coordinator may say that it is gone, and then the partition is held for a while, and no other."""
    broker.share_groups = {"work": {writer.name: 10}}
    groups = ShareGroups(
        broker, metrics=Metrics(), steady_ms=clock, hold_ms=HOLD_MS, note=GroupsNote(tmp_path / "note.json")
    )
    await groups.hold(writer.name, now_ms=HOLD_MS)
    broker.share_groups = {}
    groups = ShareGroups(
        broker, metrics=Metrics(), steady_ms=clock, hold_ms=HOLD_MS, note=GroupsNote(tmp_path / "note.json")
    )
    assert (await groups.hold(writer.name, now_ms=HOLD_MS)).offset == 0
    assert await groups.hold(writer.name._replace(partition=9), now_ms=HOLD_MS) is None
    clock.now_ms += int(FORGET_AFTER_SECONDS * 1000)
    assert await groups.hold(writer.name, now_ms=HOLD_MS) is None
    assert GroupsNote(tmp_path / "note.json").read() == {}


@pytest.mark.parametrize("note", ["", "{", '{"version": 2}', '{"version": 1, "groups": {"work": 7}}'])
async def test_note_that_cannot_be_used_is_said_and_left_alone(restarted, tmp_path, broker, writer, note):
    """The brokers tell nearly always."""
    (tmp_path / "share_groups.json").write_text(note)
    broker.share_groups = {"work": {writer.name: 10}}
    with capture_logs() as lines:
        assert (await restarted()).offset == 10
    assert [one["event"] for one in lines] == ["note of share groups is not used"]
    assert GroupsNote(tmp_path / "share_groups.json").read() == {"work": {"orders": [0]}}


async def test_note_that_cannot_be_written_holds_nothing_up(restarted, tmp_path, broker, writer):
    """The disk of the state directory may be full."""
    (tmp_path / "share_groups.json").mkdir()
    broker.share_groups = {"work": {writer.name: 10}}
    assert (await restarted()).offset == 10


async def test_without_a_time_to_hold_nothing_is_asked(held, groups, broker, writer):
    """The operator has decided that share groups do not matter."""
    broker.share_groups = {"work": {writer.name: 10}}
    groups.hold_ms = 0
    assert await held() is None
    assert not broker.calls["share_group_starts"]


async def test_reload_without_a_time_to_hold_ends_the_alert(held, groups, broker, writer, metrics):
    """Nothing waits for the brokers then. They are asked again before a later reload lets anything go."""
    broker.share_groups = {"work": {writer.name: 10}}
    broker.fail_next("share_group_starts", BrokerUnavailable("it is away"))
    await held()
    groups.hold_ms = 0
    assert await held() is None
    assert metrics.registry.get_sample_value("tieringd_share_group_offsets_unknown") == 0
    groups.hold_ms = HOLD_MS
    assert (await held()).offset == 10


async def test_brokers_that_do_not_tell_are_left_alone_for_a_while(held, broker, clock):
    """Each attempt may take a request timeout, for which uploads would wait as well."""
    broker.fail_next("share_group_starts", BrokerUnavailable("it is away"))
    for _ in range(3):
        assert (await held()).offset == 0
        clock.now_ms += int(FRESH_SECONDS * 1000)
    assert broker.calls["share_group_starts"] == 1
    clock.now_ms += int(FAILED_PAUSE_SECONDS * 1000)
    assert await held() is None
