"""
A squall of one directed sequence, for guards that matter only where several things meet in one moment.

As in a squall the seed decides on a theme, and sizes and delays are drawn. What such a moment needs of the
world is made for it: a broker that misreads a topic's settings once, a store that tells no time, a daemon
that is stopped between its scan and its pins, a DeleteRecords that arrives long after it was sent.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from tests.fakes.store import DistantStore, store_unavailable
from tests.simulation.cluster import IDLE_INTERVAL_SECONDS
from tests.simulation.faults import ClusterWire
from tests.simulation.squall import Squall, Theme
from tests.simulation.storm import HOUR_MS, SMALL_CLOCK_ERROR_MS
from tests.simulation.storm_broker import StormBroker
from tieringd.archive.scrub.orphan_search import OrphanSearch
from tieringd.archiving.pinner import Pinner
from tieringd.daemon import scrubbing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from random import Random

    from tests.simulation.node import Node
    from tests.simulation.replication import Replication
    from tieringd.archive.scrub.orphan_search import OrphanPage
    from tieringd.broker.pins import PinDirectory
    from tieringd.metrics import Metrics
    from tieringd.storage.base import Body, Condition, ObjectInfo

SEARCH_SECONDS = 150.0
"""How long a slow search takes. What was archived as it began is older than the grace of orphans by then."""
MISREAD_EVERY_SECONDS = (40.0, 120.0)
"""Long enough apart that two checks of retention in a row do not both see a misread setting."""

GUSTS = (
    Theme(
        "asked again",
        {"_ask_again": 10},
        elects_uncleanly=False,
        has_pins=False,
        torn_rates=(0.6, 0.9),
        targets=(-1,),
        event_count=10,
    ),
    Theme(
        "gaps overtaken",
        {"_overtake_gap": 10},
        elects_uncleanly=True,
        has_pins=False,
        targets=(-1,),
        event_count=8,
        ordinary={"_burst": 3},
    ),
    Theme(
        "slow searches",
        {"_burst": 10, "_elect": 1, "_crash": 1},
        elects_uncleanly=False,
        scrubs=True,
        targets=(-1,),
        pause_seconds=16.0,
        event_count=30,
    ),
    Theme(
        "stopped before the pins",
        {"_stop_pinning": 10},
        elects_uncleanly=True,
        has_pins=True,
        targets=(-1,),
        event_count=6,
        ordinary={"_burst": 3},
    ),
    Theme(
        "a store without a clock",
        {"_restart_with_clock": 6, "_burst": 10, "_elect": 2},
        elects_uncleanly=False,
        has_retention=True,
        targets=(-1,),
        pause_seconds=8.0,
        event_count=20,
    ),
    Theme(
        "misread settings",
        {"_burst": 10, "_elect": 1, "_crash": 1},
        elects_uncleanly=False,
        has_retention=True,
        targets=(-1,),
        pause_seconds=15.0,
        event_count=16,
    ),
    Theme(
        "late trims",
        {"_trim_late": 10},
        elects_uncleanly=False,
        has_pins=True,
        targets=(1,),
        delete_delays=("1200s",),
        event_count=6,
        ordinary={"_burst": 2},
    ),
    Theme(
        "expired unheard",
        {"_expire_unheard": 10},
        elects_uncleanly=False,
        has_retention=True,
        targets=(-1,),
        delete_delays=("1200s",),
        event_count=6,
        ordinary={"_burst": 2},
    ),
    Theme(
        "topics unrecorded", {"_burst": 10, "_crash": 1}, elects_uncleanly=False, targets=(1,), event_count=8
    ),
    Theme(
        "merges overtaken",
        {"_overtake_merge": 10},
        elects_uncleanly=False,
        merges=True,
        targets=(-1,),
        delete_delays=("1s",),
        event_count=6,
        ordinary={"_burst": 2},
    ),
)


class StoppablePinner(Pinner):
    """Stops its daemon once before it goes over the pins, and waits until the daemon goes on."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.on_stop: Callable[[], Any] | None = None
        self.running = asyncio.Event()
        self.running.set()

    async def step(self, *arguments: Any, **options: Any) -> None:
        """See `Pinner.step`."""
        if self.on_stop is not None:
            on_stop, self.on_stop = self.on_stop, None
            self.running.clear()
            on_stop()
        await self.running.wait()
        await super().step(*arguments, **options)


class SilentStore(DistantStore):
    """A bucket whose answers tell no time; the times of its objects are right."""

    def _tell_time(self) -> None:
        self._times.note(None)


class UnrecordedStore(DistantStore):
    """A bucket that takes no manifest of a topic for a while, and everything else."""

    recorded_after_seconds = 0.0
    """Until when it takes none, in loop time."""

    async def put(
        self, key: str, body: Body, *, crc32c: int, condition: Condition | None = None
    ) -> ObjectInfo:
        """See `DistantStore.put`."""
        is_early = asyncio.get_running_loop().time() < self.recorded_after_seconds
        if is_early and key.endswith("/topic_manifest.json"):
            raise store_unavailable("put")
        return await super().put(key, body, crc32c=crc32c, condition=condition)


class SlowSearch(OrphanSearch):
    """A search that knows which objects were named a while ago, as in a bucket of millions of objects."""

    async def page(self, *arguments: Any, **options: Any) -> OrphanPage:
        """See `OrphanSearch.page`."""
        await asyncio.sleep(SEARCH_SECONDS)
        return await super().page(*arguments, **options)


class MisreadingBroker(StormBroker):
    """A broker that now and then leaves a topic's own settings out of an answer, and has them in the next."""

    def __init__(self, *arguments: Any, settings: Mapping[str, str], random: Random, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._settings = settings
        self._random = random
        self._whole_until = self._next()

    def _next(self) -> float:
        return asyncio.get_running_loop().time() + self._random.uniform(*MISREAD_EVERY_SECONDS)

    async def topic_configs(self, topics: Sequence[str]) -> Mapping[str, Mapping[str, str]]:
        """Return what is set on each topic, but now and then only a part of it."""
        found = await super().topic_configs(topics)
        if asyncio.get_running_loop().time() >= self._whole_until:
            self._whole_until = self._next()
            return found
        return {name: {**settings, **self._settings} for name, settings in found.items()}


class Gust(Squall):
    """Everything of one seed. Call `run` once, on a virtual loop."""

    themes = GUSTS

    def __init__(self, seed: int, root: Path) -> None:
        super().__init__(seed, root)
        name = self.theme.name
        self._is_silent = name == "a store without a clock"
        self._is_misread = name == "misread settings"
        self._recorded_after_seconds = self._drawn.uniform(10, 40) if name == "topics unrecorded" else 0.0
        if self._is_silent:
            self.store.has_own_clock = False
        if name == "late trims":
            # What is not closed is archived too, and is not trimmed.
            self.max_interval_ms = IDLE_INTERVAL_SECONDS * 1000
        if self._is_misread:
            self.promises.old_before_ms = lambda: self.now_ms() - HOUR_MS + SMALL_CLOCK_ERROR_MS

    async def run(self) -> None:
        """Run the history, in a large bucket where its theme needs one."""
        if self.theme.name != "slow searches":
            await super().run()
            return
        with patch.object(scrubbing, "OrphanSearch", SlowSearch):
            await super().run()

    def store_over(self, wire: ClusterWire, number: int) -> DistantStore:
        """Return the bucket as a daemon reaches it."""
        if self._recorded_after_seconds:
            late = UnrecordedStore(self.store, wire, on_put=lambda key: self.on_put(number, key))
            late.recorded_after_seconds = self._recorded_after_seconds
            return late
        if not self._is_silent:
            return super().store_over(wire, number)
        return SilentStore(self.store, wire, on_put=lambda key: self.on_put(number, key), deletes_late=True)

    def broker_over(self, wire: ClusterWire, number: int) -> StormBroker:
        """Return a broker as the daemon beside it reaches it."""
        if not self._is_misread:
            return super().broker_over(wire, number)
        return MisreadingBroker(
            number,
            self.partitions,
            wire,
            on_trim=self.on_trim,
            elects_uncleanly=self.elects_uncleanly,
            before_trim=self._before_trim,
            on_allowed=self._on_allowed_trim,
            settings={"retention.ms": str(HOUR_MS)},
            random=self.stream(f"misread {self._lives}"),
        )

    def pinner_of(self, directories: Mapping[str, PinDirectory], metrics: Metrics) -> Pinner:
        """Return what keeps the pins in a daemon's directories."""
        return StoppablePinner(directories, budget_bytes=10**12, metrics=metrics)

    def _node_of(self, number: int) -> Node:
        return next(one for one in self.nodes if one.number == number)

    def _freeze_node(self, node: Node) -> None:
        for wire in node.wires:
            wire.freeze()

    def _thaw_node(self, node: Node) -> None:
        for wire in node.wires:
            wire.stops_at = None
            wire.thaw()

    async def _wait(self, event: asyncio.Event, *, seconds: float) -> bool:
        """Wait until something has happened, and say whether it has in that time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()
        return event.is_set()

    # The sequences.

    async def _ask_again(self, partition: Replication) -> None:
        """Write segments, and ask for room again and again, so that steps have the same scan before them."""
        self._burst(partition)
        for _ in range(self._drawn.randint(6, 14)):
            await asyncio.sleep(self._drawn.uniform(0.2, 0.9))
            self._need_room(partition)

    async def _overtake_gap(self, partition: Replication) -> None:
        """
        Let the leader lose records before they are archived, and be deposed while it records that.

        Its daemon is stopped at a write. A replica that lags leads then, with other records at the offsets.
        """
        random, node = self._drawn, self._node_of(partition.leader)
        self._sync(partition)
        self._end_transactions(partition)
        await self._archive()
        node.store_wire.refuses_writes = True
        for follower in self._others(partition):
            partition.drop_out(follower)
        self._write(partition, 3, 6, roll_rate=0.9)
        self._close(partition)
        lost_to = partition.log.next_offset
        self._write(partition, 1, 4, roll_rate=0.6)
        self._close(partition)
        while partition.log.bases_on_disk[0] < lost_to and partition.log.delete_oldest():
            pass
        node.store_wire.stops_at = "put", True
        node.store_wire.stops_after = random.choice([0, 0, 0, 1, 2])
        node.store_wire.on_stop = lambda: self._freeze_node(node)
        node.store_wire.refuses_writes = False
        await asyncio.sleep(random.uniform(8, 14))
        self._freeze_node(node)
        partition.elect(random.choice(self._others(partition)))
        self._write(partition, 3, 8, roll_rate=0.4)
        self._close(partition)
        self._write(partition, 1, 1, roll_rate=0.0)
        await self._archive()
        self._thaw_node(node)
        self._sync(partition)
        await self._archive()

    async def _stop_pinning(self, partition: Replication) -> None:
        """
        Stop a daemon that is about to release pins, by what its scan has shown.

        What was durable is cut off the archive meanwhile, its broker deletes the files by its own retention,
        and leads when the daemon goes on.
        """
        random, stays = self._drawn, partition.leader
        node = self._node_of(stays)
        pinner = node.pinner
        assert isinstance(pinner, StoppablePinner)
        self._sync(partition)
        self._end_transactions(partition)
        # Pinned by one scan, archived, and to be released by the next.
        node.store_wire.is_down = True
        self._leave_behind(partition)
        await asyncio.sleep(random.uniform(7, 10))
        node.store_wire.restore()
        await asyncio.sleep(random.uniform(0.1, 3))
        pinner.on_stop = lambda: self._freeze_node(node)
        await asyncio.sleep(random.uniform(3.5, 6))
        self._freeze_node(node)
        other = random.choice(self._others(partition))
        partition.elect(other)
        self._write(partition, 1, 3, roll_rate=0.6)
        # Longer than a scan may be acted on.
        await asyncio.sleep(random.uniform(35, 60))
        partition.elect(stays)
        for _ in range(random.randint(2, 6)):
            partition.log.delete_oldest()
        await asyncio.sleep(random.uniform(0, 3))
        self._thaw_node(node)
        pinner.running.set()
        await self._archive()
        self._sync(partition)

    async def _overtake_merge(self, partition: Replication) -> None:
        """
        Stop the leader's daemon while it stores a merge, and let a user delete some of what it merges.

        Only merges are stored meanwhile: all that is closed is archived.
        """
        random, node = self._drawn, self._node_of(partition.leader)
        self._end_transactions(partition)
        for _ in range(2):
            self._burst(partition)
        await self._archive()
        node.store_wire.stops_at = "put", True
        node.store_wire.stops_after = random.choice([0, 0, 1])
        stopped = asyncio.Event()

        def stop() -> None:
            self._freeze_node(node)
            stopped.set()

        node.store_wire.on_stop = stop
        if await self._wait(stopped, seconds=20):
            manifest = self.promises.manifest_of(partition)
            bases = [one.base_offset for one in manifest.segments][1:] if manifest else []
            if bases:
                store = self._store_of_users(ClusterWire(random, fault_rate=0.0))
                await self.users.delete_by_command(random.choice(bases), store)
        self._thaw_node(node)
        await self._archive()

    async def _restart_with_clock(self, partition: Replication) -> None:
        """Start a daemon anew with a clock that is behind, or right again, and let it archive."""
        random = self._drawn
        number = partition.leader if random.random() < 0.8 else random.randrange(len(self.nodes))
        behind_ms = random.choice([0, HOUR_MS, 400 * 24 * HOUR_MS])
        await self._restart(number, before_start=lambda: self.clock_errors_ms.update({number: -behind_ms}))
        if behind_ms:
            self._burst(partition)
            await self._archive()

    async def _trim_late(self, partition: Replication) -> None:
        """
        Let a DeleteRecords arrive when its sender leads again, and its log was written anew in between.

        The log has a segment over the offset by then, and so has the archive. Where the archive does not have
        that much in time, the request never arrives: what a late one may delete then is documented.
        """
        random, number = self._drawn, partition.leader
        wire = self._node_of(number).broker_wire
        self._end_transactions(partition)
        self._sync(partition)
        await self._archive()
        wire.refuses_writes = True
        self._leave_behind(partition)
        await self._archive()
        wire.restore()
        asked = asyncio.Event()

        def hang() -> None:
            wire.hangs = True
            asked.set()

        wire.stops_at, wire.on_stop = ("delete_records", False), hang
        self._write(partition, 1, 1, roll_rate=1.0)
        await self._wait(asked, seconds=12)
        wire.stops_at = None
        wire.restore()
        trimmed_to = partition.log.next_offset
        partition.elect(random.choice(self._others(partition)))
        while partition.log.next_offset < trimmed_to + 2:
            self._write(partition, 1, 2, roll_rate=0.0)
        for _ in range(40):
            await asyncio.sleep(2)
            manifest = self.promises.manifest_of(partition)
            is_archived = (
                manifest is not None
                and manifest.leader_epoch == partition.leader_epoch
                and manifest.next_offset >= trimmed_to
            )
            if is_archived:
                break
        else:
            for task in wire.late:
                task.cancel()
        self._sync(partition)
        partition.elect(number)
        self._sync(partition)
        if wire.late:
            await asyncio.wait(wire.late)
        await self._archive()
        self._check()
        self._close(partition)
        self._sync(partition)

    async def _expire_unheard(self, partition: Replication) -> None:
        """
        Let retention move the archive's start, and depose the leader uncleanly before its log follows.

        It does not hear of it. The replica that leads then ends below that start.
        """
        random, deposed = self._drawn, partition.leader
        wire = self._node_of(deposed).broker_wire
        self._sync(partition)
        self._end_transactions(partition)
        wire.refuses_writes = True
        self._leave_behind(partition)
        self._write(partition, 1, 2, roll_rate=1.0)
        await asyncio.sleep(random.uniform(75, 100))
        others = self._others(partition)
        partition.elect(random.choice(others))
        self._write(partition, 1, 4, roll_rate=0.7)
        for broker in others:
            partition.hear(broker)
            partition.fetch(broker)
        await asyncio.sleep(random.uniform(10, 45))
        wire.restore()
        for _ in range(random.randint(1, 4)):
            partition.replicas[deposed].append(b"never acknowledged" * 4)
        await asyncio.sleep(random.uniform(4, 9))
        self._check()
        self._sync(partition)
        await self._archive()
