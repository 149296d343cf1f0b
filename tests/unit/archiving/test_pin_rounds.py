"""
Rounds of pins that remember which partitions are quiet plan what rounds that remember nothing plan.

Logs, manifests, the clock, settings, pins and archivers change at random between the rounds.
"""

from __future__ import annotations

import asyncio
import math
import sys
from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.fakes.virtual_loop import virtually
from tests.support.examples import examples
from tests.unit.model.values import local_log, remote, stored
from tieringd.archiving.observer import BrokerSnapshot, Observation
from tieringd.archiving.pin_rounds import PinRounds
from tieringd.archiving.pinner import PIN_UNKNOWN_AFTER_SECONDS
from tieringd.archiving.resting import ChangeFeed, Resting
from tieringd.config.topic import TopicConfig
from tieringd.model.partition import Leadership, LogBounds, TopicIdPartition
from tieringd.policies.local_retention import LocalLimit, LocalTarget
from tieringd.policies.pinning import Pin, plan_pins

BEGAN_MS = 1_000_000
RETENTIONS_MS = (None, 10_000, 100_000)
UNLIMITED = LocalLimit(None, None, "the default", is_explicit=False)
TOPIC = TopicConfig(remote_write=True, remote_read=True, local_target=LocalTarget(UNLIMITED, UNLIMITED))


class NotingPinner:
    """Notes what it is given, and pins nothing."""

    is_used = True

    def __init__(self) -> None:
        self.facts = ()
        self.others = ()
        self.is_complete = None

    async def step(self, partitions, *, others, idle, is_complete):
        self.facts, self.others, self.is_complete = partitions, others, is_complete

    def to_do(self) -> dict:
        """Return the facts of the partitions that have pins or need some, by partition."""
        return {
            one.log.partition: one
            for one in self.facts
            if one.pins
            or plan_pins(
                one.log, one.pins, next_offset=one.next_offset, expiring_end=one.expiring_end, gaps=one.gaps
            ).make
        }


class World:
    """Partitions with their logs, manifests and archivers. Each method but a few is a change."""

    def __init__(self) -> None:
        self.leaderships = [
            Leadership(TopicIdPartition("cluster", "orders", "id", number), 0) for number in range(4)
        ]
        self.now_ms = BEGAN_MS
        self.bases = {one: [0] for one in self.leaderships}
        self.manifests = {}
        self.pins = dict.fromkeys(self.leaderships, ())
        self.retention_ms = dict.fromkeys(self.leaderships)
        self.modified_ms = dict.fromkeys(self.leaderships, BEGAN_MS)
        self.archivers, self.changes = Resting(), ChangeFeed()
        self.running = set()
        self.wanted = {}
        for number in range(len(self.leaderships)):
            self.archive(number)
            self.observe(number)
        self.pinner = NotingPinner()
        self.rounds = self.new_rounds(self.pinner)

    def new_rounds(self, pinner: NotingPinner) -> PinRounds:
        return PinRounds(
            pinner,
            followed_manifests=None,
            manifest_of=self.manifests.get,
            archivers=self.archivers,
            changes=self.changes,
            now_ms=lambda: self.now_ms,
        )

    def snapshot(self) -> BrokerSnapshot:
        return BrokerSnapshot("cluster", self.wanted, followed=(), problems={})

    def observe(self, number: int, *, is_handed_over: bool = True) -> None:
        """A scan has another observation, and the archiver gets it."""
        one = self.leaderships[number]
        log = local_log(self.bases[one])
        active = replace(log.segments[-1], modified_ns=self.modified_ms[one] * 1_000_000)
        directory = replace(log.partition, path=f"/logs/orders-{number}")
        log = replace(log, partition=directory, segments=(*log.segments[:-1], active))
        end = self.bases[one][-1] + 5
        topic = replace(TOPIC, broker_retention_ms=self.retention_ms[one])
        seen = Observation(log, LogBounds(0, end, end), topic, self.pins[one], scan_number=1)
        self.wanted = self.wanted | {one: seen}
        if is_handed_over:
            self.changes.note(one)
            self.archivers.wake(one)

    def close_untold(self, number: int) -> None:
        """A scan finds a closed segment, and the archiver does not hear of it."""
        self.bases[self.leaderships[number]].append(self.bases[self.leaderships[number]][-1] + 10)
        self.observe(number, is_handed_over=False)

    def close(self, number: int) -> None:
        self.bases[self.leaderships[number]].append(self.bases[self.leaderships[number]][-1] + 10)
        self.modified_ms[self.leaderships[number]] = self.now_ms
        self.observe(number)

    def configure(self, number: int) -> None:
        self.retention_ms[self.leaderships[number]] = RETENTIONS_MS[number % len(RETENTIONS_MS)]
        self.observe(number)

    def pin(self, number: int) -> None:
        """The pinner has made a pin, or let it go, and a scan finds it so."""
        one = self.leaderships[number]
        segments = self.wanted[one].log.closed_segments if one in self.wanted else ()
        self.pins[one] = () if self.pins[one] else tuple(Pin(each, is_held=False) for each in segments)
        self.observe(number)

    def begin_step(self, number: int) -> None:
        """A step begins, and changes the manifest before it ends: it cuts the archive to its half."""
        self.archivers.wake(self.leaderships[number])
        self._hold(number, self.bases[self.leaderships[number]][-1] // 2)

    def archive(self, number: int) -> None:
        """A step stores all that is closed, and the archiver rests."""
        one = self.leaderships[number]
        self.archivers.wake(one)
        self._hold(number, self.bases[one][-1])
        self._end_step(one)

    def cut(self, number: int) -> None:
        """A step cuts the archive to nothing, and the archiver rests."""
        one = self.leaderships[number]
        self.archivers.wake(one)
        self._hold(number, 0)
        self._end_step(one)

    def fence(self, number: int) -> None:
        """The archiver ends, and no round starts another."""
        one = self.leaderships[number]
        self.manifests.pop(one, None)
        self.archivers.forget(one)
        self.changes.note(one)

    def leave(self, number: int) -> None:
        one = self.leaderships[number]
        self.wanted = {each: seen for each, seen in self.wanted.items() if each != one}
        self.fence(number)

    def wait(self, number: int) -> None:
        self.now_ms += (1_000, 8_000, 60_000, 0)[number]

    def set_clock_back(self, number: int) -> None:
        self.now_ms -= 10_000 * number

    def _hold(self, number: int, next_offset: int) -> None:
        rows = [remote(0, next_offset - 1)] if next_offset else []
        self.manifests[self.leaderships[number]] = stored(rows, start_offset=0)

    def _end_step(self, one: Leadership) -> None:
        self.changes.note(one)
        self.archivers.rest(one, until_ms=math.inf)


CHANGES = (
    *("observe", "close", "configure", "pin", "begin_step", "archive", "cut", "fence", "leave", "wait"),
    *("close_untold", "set_clock_back"),
)
ROUNDS = st.lists(
    st.lists(st.tuples(st.sampled_from(CHANGES), st.integers(0, 3)), max_size=4), min_size=1, max_size=8
)


@given(rounds=ROUNDS)
@example(rounds=[[("close", 0)], [("archive", 0)], [], [("cut", 0)], [("archive", 0)]])
@example(rounds=[[("close", 0), ("archive", 0)], [], [("begin_step", 0)], [("archive", 0)]])
@example(rounds=[[("configure", 1), ("archive", 1)], [], [("wait", 2)], [("set_clock_back", 3)]])
@example(
    rounds=[[("close", 2), ("archive", 2)], [("pin", 2)], [], [("pin", 2)], [("leave", 2)], [("close", 2)]]
)
@example(rounds=[[("archive", 3)], [], [("fence", 3)], [("close", 3)]])
@example(rounds=[[("archive", 3)], [], [("close_untold", 3)], []])
@settings(max_examples=examples(150), deadline=None)
def test_rounds_that_remember_plan_what_rounds_that_do_not_plan(rounds):
    """A partition that has pins or needs some is planned in the next round, whatever changed."""

    @virtually
    async def run() -> None:
        world = World()
        await world.rounds.step(world.snapshot(), good_until=math.inf)
        for changes in rounds:
            for what, number in changes:
                getattr(world, what)(number)
            # Nothing is unknown for the first time: both know it since long ago.
            await asyncio.sleep(PIN_UNKNOWN_AFTER_SECONDS)
            await world.rounds.step(world.snapshot(), good_until=math.inf)
            await asyncio.sleep(PIN_UNKNOWN_AFTER_SECONDS)
            await world.rounds.step(world.snapshot(), good_until=math.inf)
            new = NotingPinner()
            forgetful = world.new_rounds(new)
            await forgetful.step(world.snapshot(), good_until=math.inf)
            await asyncio.sleep(PIN_UNKNOWN_AFTER_SECONDS)
            await forgetful.step(world.snapshot(), good_until=math.inf)
            assert world.pinner.to_do() == new.to_do()
            assert {one.path for one in world.pinner.others} == {one.path for one in new.others}
            assert world.pinner.is_complete
            assert new.is_complete

    run()


@virtually
async def test_quiet_partition_is_not_planned_again():
    """A round gives the pinner nothing of partitions without a pin and without a need for one."""
    world = World()
    for number in range(4):
        world.archive(number)
    await world.rounds.step(world.snapshot(), good_until=math.inf)
    asked = []
    world.rounds._manifest_of = lambda one: asked.append(one) or world.manifests.get(one)
    await world.rounds.step(world.snapshot(), good_until=math.inf)
    assert (asked, list(world.pinner.facts)) == ([], [])
    world.cut(1)
    await world.rounds.step(world.snapshot(), good_until=math.inf)
    assert asked == [world.leaderships[1]]


@virtually
async def test_rounds_without_pins_keep_nothing():
    """Leaderships that come and go for years do not gather in a daemon that pins no segments."""
    world = World()
    pinner = NotingPinner()
    pinner.is_used = False
    world.changes = ChangeFeed()
    rounds = world.new_rounds(pinner)
    leadership = Leadership(world.leaderships[0].partition, 7)
    references = sys.getrefcount(leadership)
    world.changes.note(leadership)
    await rounds.step(world.snapshot(), good_until=math.inf)
    assert sys.getrefcount(leadership) == references
