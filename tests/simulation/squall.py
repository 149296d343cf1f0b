"""
A storm that concentrates on one kind of trouble: each history has one theme, and much of it.

A history with everything in it has little of each. Here the seed decides which few events a history has,
and how its world is made for them. Some events are whole sequences, which come together by chance too seldom:
an archive that is ahead of the leader to be, a daemon that is stopped until leadership is back. Their sizes
and delays are drawn, and the daemons do meanwhile what they do.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.simulation.storm import RETENTION_MS, STORE_STOPS, Storm
from tieringd.model import manifest as manifests

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path

    from tests.simulation.replication import Replication

ARCHIVED_SECONDS = (4.0, 8.0, 16.0)
"""How long daemons are left alone to archive what there is."""


@dataclass(frozen=True)
class Theme:
    """What happens in a history, and what its world is like."""

    name: str
    events: Mapping[str, int]
    """The methods of `Squall`, or of what it is made of, that are its events, each with its weight."""
    targets: tuple[int, ...] = (1, 300, -1)
    """How many bytes stay on the broker."""
    elects_uncleanly: bool | None = None
    """Whether a replica that is not in sync may lead by itself; None where the seed decides."""
    has_pins: bool | None = None
    fault_rates: tuple[float, ...] = (0.0,)
    torn_rates: tuple[float, ...] = (0.0,)
    middle_torn: bool = False
    """Whether a scan may also miss files between others."""
    refusal_rates: tuple[float, ...] = (0.0,)
    remembered: tuple[int, ...] = (1, manifests.SEGMENTS_REMEMBERED)
    notes_late: bool = False
    merges: bool = False
    scrubs: bool = False
    delete_delays: tuple[str, ...] = ("1s", "1200s")
    has_retention: bool = False
    pause_seconds: float = 1.5
    """How long a history waits after an event, on average."""
    event_count: int = 25
    ordinary: Mapping[str, int] = field(default_factory=lambda: {"_append": 6, "_roll": 4, "_fetch": 8})
    """What brings records, beside the events."""


THEMES = (
    Theme(
        "transactions that cross",
        {"_cross_far": 10},
        elects_uncleanly=True,
        remembered=(1,),
        targets=(-1, 300),
        event_count=14,
    ),
    Theme("good part", {"_outlive": 10}, elects_uncleanly=True, targets=(-1,), event_count=14),
    Theme("early history", {"_hand_over": 10}, elects_uncleanly=False, notes_late=True, event_count=14),
    Theme("there and back", {"_come_back": 10}, elects_uncleanly=True, targets=(1, 1, 300), event_count=14),
    Theme(
        "deposed unheard",
        {"_depose_unheard": 10},
        elects_uncleanly=False,
        targets=(1, 200, 400),
        delete_delays=("1200s",),
        event_count=10,
    ),
    Theme(
        "torn scans",
        {"_burst": 10, "_rescan_partition": 6, "_need_room": 6, "_crash": 1, "_go_bad": 3},
        elects_uncleanly=False,
        torn_rates=(0.3, 0.6),
        targets=(-1, 1, 300),
        merges=True,
    ),
    Theme(
        "bad disks",
        {"_go_bad": 10, "_burst": 4, "_elect": 1},
        torn_rates=(0.0, 0.0, 0.3),
        elects_uncleanly=False,
        targets=(300, 500),
    ),
    Theme(
        "cut elsewhere",
        {"_elect": 4, "_roll_apart": 10},
        elects_uncleanly=False,
        targets=(100, 300),
    ),
    Theme("begun anew", {"_begin_anew": 10}, elects_uncleanly=True, has_pins=True, event_count=8),
    Theme("stale pins", {"_stop_releasing": 10}, elects_uncleanly=True, has_pins=True, event_count=8),
    Theme(
        "replaced before archived",
        {"_replace_pinned": 10},
        elects_uncleanly=True,
        has_pins=True,
        event_count=8,
    ),
    Theme("refused commits", {"_burst": 10}, refusal_rates=(0.3, 0.6), delete_delays=("1s",), event_count=14),
    Theme(
        "lagging followers",
        {"_lag": 6, "_elect_uncleanly": 1, "_hear": 4},
        elects_uncleanly=True,
        targets=(1,),
    ),
    Theme(
        "housekeeping",
        {"_burst": 8, "_cut_small": 1, "_rescan_partition": 2},
        elects_uncleanly=True,
        merges=True,
        scrubs=True,
        fault_rates=(0.0, 0.05),
        targets=(-1,),
        pause_seconds=10.0,
    ),
    Theme(
        "users overtaken",
        {"_delete_overtaken": 10, "_delete_records": 4},
        elects_uncleanly=True,
        delete_delays=("1s",),
        event_count=14,
    ),
    Theme(
        "torn and crossing",
        {"_cross_far": 10},
        elects_uncleanly=True,
        remembered=(1,),
        targets=(-1, 300),
        torn_rates=(0.5, 0.8),
        middle_torn=True,
        event_count=14,
    ),
    Theme(
        "retention",
        {"_set_clock": 3, "_depose_unheard": 4, "_burst": 4},
        elects_uncleanly=False,
        has_retention=True,
        targets=(-1,),
        delete_delays=("1200s",),
        pause_seconds=8.0,
        event_count=14,
    ),
    Theme(
        "gaps",
        {"_lose_head": 10, "_elect": 3, "_crash": 1},
        has_pins=False,
        fault_rates=(0.0, 0.1),
    ),
)


class Squall(Storm):
    """Everything of one seed. Call `run` once, on a virtual loop."""

    themes = THEMES
    """Each seed has one of them, one after the other."""

    def __init__(self, seed: int, root: Path) -> None:
        self.theme = theme = self.themes[seed % len(self.themes)]
        super().__init__(seed, root)
        self._drawn = random = self.stream("squall")
        self.event_count = theme.event_count
        self.target_bytes = random.choice(theme.targets)
        if theme.elects_uncleanly is not None:
            self.elects_uncleanly = theme.elects_uncleanly
        if theme.has_pins is not None:
            self.has_pins = theme.has_pins
        self._deletes_by_itself = False
        self._merges, self._scrubs = theme.merges, theme.scrubs
        self._torn_rate = random.choice(theme.torn_rates)
        self._misses_middle = theme.middle_torn
        self._refusal_rate = random.choice(theme.refusal_rates)
        self._remembered = random.choice(theme.remembered)
        self._delete_delay = random.choice(theme.delete_delays)
        for replica in self.partitions[0].replicas:
            replica.notes_epochs_after = self.stream("notes") if theme.notes_late else None
        self.promises.compares_pinned = theme.name == "replaced before archived"
        if theme.scrubs:
            # The ages of objects are those of this world.
            self.store.now_ms = self.now_ms
        if theme.has_retention and self._retention_ms is None:
            self._retention_ms = RETENTION_MS
            self._keep_time(RETENTION_MS)
        elif not theme.has_retention:
            self._retention_ms = None

    def _segments_remembered(self) -> int:
        return self._remembered

    def _fault_rate(self) -> float:
        return self._drawn.choice(self.theme.fault_rates)

    def _chances(self) -> dict[Callable[[Replication], Awaitable[None] | None], int]:
        named = {**self.theme.ordinary, **self.theme.events}
        return {getattr(self, name): weight for name, weight in named.items()}

    async def _one_event(self) -> None:
        await super()._one_event()
        await asyncio.sleep(self._drawn.expovariate(1 / self.theme.pause_seconds))

    # What sequences are made of.

    async def _archive(self) -> None:
        """Give the daemons time to archive what is closed, and mostly enough."""
        await asyncio.sleep(self._drawn.choice(ARCHIVED_SECONDS))

    def _sync(self, partition: Replication) -> None:
        """Let all followers have all that the leader has."""
        for broker in range(len(partition.replicas)):
            partition.hear(broker)
        self._fetch_all(partition)

    def _others(self, partition: Replication) -> list[int]:
        return sorted(set(range(len(partition.replicas))) - {partition.leader})

    def _write(self, partition: Replication, least: int, most: int, *, roll_rate: float = 0.5) -> None:
        """Let the leader append some batches, and close some segments."""
        random, log = self._drawn, partition.log
        for _ in range(random.randint(least, most)):
            log.append(*(b"%d" % random.randrange(10**9) for _ in range(random.randint(1, 3))))
            if random.random() < roll_rate:
                log.roll()
        partition.advance()

    def _close(self, partition: Replication) -> None:
        if not partition.log.is_active_empty:
            partition.log.roll()

    def _leave_behind(self, partition: Replication) -> None:
        """Let the leader have records that no other replica has."""
        for follower in self._others(partition):
            partition.drop_out(follower)
        self._write(partition, 1, 4)
        self._close(partition)

    def _end_transactions(self, partition: Replication) -> None:
        for producer in partition.log.open_producers:
            self._drawn.choice([partition.log.commit, partition.log.abort])(producer)
        partition.advance()

    # The sequences.

    def _burst(self, partition: Replication) -> None:
        """Write several segments at once, everywhere."""
        self._write(partition, 2, 6, roll_rate=0.8)
        self._sync(partition)
        for broker in self._others(partition):
            if self._drawn.random() < 0.5 and not partition.replicas[broker].is_active_empty:
                partition.replicas[broker].roll()

    def _roll_apart(self, partition: Replication) -> None:
        """Write records, and let each replica close its segments elsewhere."""
        for _ in range(self._drawn.randint(1, 4)):
            self._write(partition, 1, 2, roll_rate=0.0)
            self._sync(partition)
            for replica in partition.replicas:
                if self._drawn.random() < 0.4 and not replica.is_active_empty:
                    replica.roll()

    def _lose_head(self, partition: Replication) -> None:
        """Write segments, and let brokers delete their oldest before they are copied."""
        self._burst(partition)
        for replica in partition.replicas:
            if self._drawn.random() < 0.7:
                for _ in range(self._drawn.randint(1, 6)):
                    replica.delete_oldest()

    async def _cross_far(self, partition: Replication) -> None:
        """
        Elect uncleanly a replica that has a transaction's records and not its end.

        The marker, and segments after it, are archived by then. Afterwards the transaction ends otherwise.
        """
        random, leader = self._drawn, partition.leader
        self._end_transactions(partition)
        self._write(partition, 0, 2)
        if random.random() < 0.7:
            self._close(partition)
        partition.log.append(b"crossing", producer_id=3)
        self._write(partition, 0, 1)
        self._close(partition)
        if random.random() < 0.4:
            self._write(partition, 1, 1, roll_rate=0.0)
        self._sync(partition)
        for broker in self._others(partition):
            partition.drop_out(broker)
        is_committed = random.random() < 0.5
        (partition.log.commit if is_committed else partition.log.abort)(3)
        self._write(partition, 1, 4, roll_rate=0.8)
        self._close(partition)
        await self._archive()
        if partition.leader != leader:
            return
        partition.elect(random.choice(self._others(partition)))
        partition.log.append(b"of the new leader")
        if random.random() < 0.7:
            (partition.log.abort if is_committed else partition.log.commit)(3)
            self._write(partition, 1, 2)
        for broker in self._others(partition):
            partition.hear(broker)
        self._close(partition)
        self._sync(partition)
        await self._archive()

    async def _outlive(self, partition: Replication) -> None:
        """Elect uncleanly a replica whose log begins, and ends, within an archived segment."""
        random = self._drawn
        self._sync(partition)
        self._end_transactions(partition)
        self._write(partition, 2, 4, roll_rate=0.0)
        self._sync(partition)
        others = self._others(partition)
        for broker in others:
            if not partition.replicas[broker].is_active_empty:
                partition.replicas[broker].roll()
        self._write(partition, 1, 3, roll_rate=0.0)
        self._sync(partition)
        self._leave_behind(partition)
        await self._archive()
        await self._archive()
        for broker in others:
            for _ in range(random.randint(1, 5)):
                partition.replicas[broker].delete_oldest()
        partition.elect(random.choice(others))
        self._write(partition, 1, 3)
        await self._archive()
        self._sync(partition)

    async def _hand_over(self, partition: Replication) -> None:
        """Elect a replica in sync that does not know yet how far the log is replicated."""
        random = self._drawn
        self._sync(partition)
        self._write(partition, 1, 4)
        self._close(partition)
        for broker in self._others(partition):
            partition.fetch(broker)
        await self._archive()
        others = sorted(partition.in_sync - {partition.leader})
        if others:
            partition.elect(random.choice(others))
        await asyncio.sleep(random.uniform(0, 8))
        self._sync(partition)

    async def _come_back(self, partition: Replication) -> None:
        """Stop the leader's daemon at an operation, until a replica that lags has led for a while."""
        random, number = self._drawn, partition.leader
        node = next(one for one in self.nodes if one.number == number)
        self._sync(partition)
        self._end_transactions(partition)
        self._leave_behind(partition)
        stopped = asyncio.Event()
        is_broker = random.random() < 0.4
        wire = node.broker_wire if is_broker else node.store_wire
        operations = ("replicas", "log_bounds", "topic_configs", "trim") if is_broker else STORE_STOPS
        wire.stops_at = random.choice([random.choice(operations), "replicas" if is_broker else "put"]), True
        wire.stops_after = random.randint(0, 6)

        def stop() -> None:
            for one in node.wires:
                one.freeze()
            stopped.set()

        wire.on_stop = stop
        try:
            async with asyncio.timeout(random.choice([9.0, 30.0])):
                await stopped.wait()
        except TimeoutError:
            wire.stops_at = None
            stop()
        other = random.choice(self._others(partition))
        successor = next(one for one in self.nodes if one.number == other)
        if random.random() < 0.4:
            for one in successor.wires:
                one.freeze()
        partition.elect(other)
        self._write(partition, 1, 4, roll_rate=0.7)
        await asyncio.sleep(random.choice([0.0, 4.0, 8.0]))
        self._sync(partition)
        partition.elect(number)
        self._sync(partition)
        self._write(partition, 0, 2)
        self._sync(partition)
        for one in node.wires:
            one.thaw()
        await self._archive()
        for one in successor.wires:
            one.thaw()
        await self._archive()

    async def _depose_unheard(self, partition: Replication) -> None:
        """
        Let a leader that has not heard of it be deposed by a replica that lags, by an operator's order.

        It appends in vain meanwhile, so that its log outgrows its target. Its broker may carry out no trims
        until then.
        """
        random, deposed = self._drawn, partition.leader
        node = next(one for one in self.nodes if one.number == deposed)
        self._sync(partition)
        self._end_transactions(partition)
        node.broker_wire.refuses_writes = random.random() < 0.8
        self._leave_behind(partition)
        await self._archive()
        await self._archive()
        others = self._others(partition)
        partition.elect(random.choice(others))
        self._write(partition, 1, 4, roll_rate=0.7)
        for broker in others:
            partition.hear(broker)
            partition.fetch(broker)
        await asyncio.sleep(random.choice([10.0, 45.0]))
        node.broker_wire.refuses_writes = False
        for _ in range(random.randint(1, 8)):
            partition.replicas[deposed].append(b"never acknowledged" * 4)
        await asyncio.sleep(random.choice([4.0, 9.0]))
        self._sync(partition)
        await self._archive()

    async def _begin_anew(self, partition: Replication) -> None:
        """Let a replica with pins come back to a log that begins after them, and is another one."""
        random, first = self._drawn, partition.leader
        self._sync(partition)
        self._end_transactions(partition)
        await self._archive()
        for node in self.nodes:
            node.store_wire.is_down = True
        self._leave_behind(partition)
        await asyncio.sleep(random.choice([5.0, 9.0]))
        partition.elect(random.choice(self._others(partition)))
        self._write(partition, 3, 8, roll_rate=0.8)
        self._close(partition)
        self._write(partition, 1, 1, roll_rate=0.0)
        for _ in range(random.randint(1, 8)):
            partition.log.delete_oldest()
        self._sync(partition)
        partition.elect(first)
        self._sync(partition)
        await asyncio.sleep(random.choice([0.0, 4.0]))
        for node in self.nodes:
            node.store_wire.restore()
        await self._archive()

    async def _stop_releasing(self, partition: Replication) -> None:
        """
        Stop a daemon that is about to release pins, while what was durable is cut off the archive.

        Its broker deletes the files by its own retention meanwhile, and leads when the daemon goes on.
        """
        random, stays = self._drawn, partition.leader
        node = next(one for one in self.nodes if one.number == stays)
        self._sync(partition)
        self._end_transactions(partition)
        self._leave_behind(partition)
        # The segments are pinned by the next scan, then archived, then their pins are released.
        node.store_wire.stops_at = random.choice(STORE_STOPS), True
        node.store_wire.stops_after = random.randint(0, 12)

        def stop() -> None:
            for one in node.wires:
                one.freeze()

        node.store_wire.on_stop = stop
        await self._archive()
        stop()
        other = random.choice(self._others(partition))
        partition.elect(other)
        self._write(partition, 0, 2)
        await asyncio.sleep(random.choice([5.0, 9.0, 20.0]))
        partition.elect(stays)
        for _ in range(random.randint(1, 6)):
            partition.log.delete_oldest()
        await asyncio.sleep(random.uniform(0, 6))
        node.store_wire.stops_at = None
        for one in node.wires:
            one.thaw()
        await self._archive()
        self._sync(partition)

    async def _replace_pinned(self, partition: Replication) -> None:
        """Elect a replica that lags while the bucket cannot be written, and let its broker delete early."""
        random = self._drawn
        self._sync(partition)
        self._end_transactions(partition)
        self._leave_behind(partition)
        await self._archive()
        other = random.choice(self._others(partition))
        for node in self.nodes:
            node.store_wire.refuses_writes = True
        partition.elect(other)
        self._write(partition, 1, 5, roll_rate=0.8)
        self._close(partition)
        await asyncio.sleep(random.choice([4.0, 9.0, 100.0]))
        self._check()
        for _ in range(random.randint(1, 4)):
            partition.log.delete_oldest()
        await asyncio.sleep(random.uniform(0, 6))
        for node in self.nodes:
            node.store_wire.refuses_writes = False
        await self._archive()
        self._sync(partition)

    async def _cut_small(self, partition: Replication) -> None:
        """Let an unclean election cut a little off the archive, and let its log go on in its way."""
        random = self._drawn
        self._sync(partition)
        self._end_transactions(partition)
        self._leave_behind(partition)
        await asyncio.sleep(random.uniform(2, 20))
        partition.elect(random.choice(self._others(partition)))
        self._write(partition, 1, 6, roll_rate=0.8)
        self._sync(partition)

    async def _delete_overtaken(self, partition: Replication) -> None:
        """Delete records for a user, and let a replica that lacks some of them lead meanwhile."""
        random = self._drawn
        self._sync(partition)
        self._end_transactions(partition)
        if random.random() < 0.5:
            self._leave_behind(partition)
        else:
            self._lag(partition)
        await asyncio.sleep(random.choice([0.0, 5.0, 9.0]))
        self._delete_records(partition)
        await asyncio.sleep(random.uniform(0, 3))
        others = sorted(set(range(len(partition.replicas))) - partition.in_sync)
        if others:
            partition.elect(random.choice(others))
            self._write(partition, 1, 5)
            if random.random() < 0.5:
                self._delete_records(partition)
        await self._archive()
        self._sync(partition)
