"""
A cluster of brokers with a daemon beside each, in which everything goes wrong that may.

One seed is one history: producers append, followers fetch, leadership moves (uncleanly, too),
brokers delete by their retention; the store fails, hangs and loses answers, daemons die, are
stopped and go on. The promises are checked after each event and at each commit. In the end all
faults stop, and the cluster has to come to rest with every acknowledged record in one place.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from tests.builders import DEFAULT_TIME_MS
from tests.fakes.archive import archive_in, tiered_config, values_in
from tests.fakes.log_writer import CLUSTER, TOPIC_ID
from tests.fakes.memory_store import MemoryStore
from tests.fakes.store import DistantStore
from tests.simulation.cluster_broker import ClusterBroker
from tests.simulation.cluster_promises import ClusterPromises, cut_by_gaps, values_at
from tests.simulation.node import ROUND_SECONDS, Node
from tests.simulation.replica import Replica
from tests.simulation.replication import Replication
from tests.simulation.scrubbing import expect_clean
from tieringd.archiving.pinner import Pinner
from tieringd.broker.layout import KafkaLayout
from tieringd.formats.object_keys import TopicKey
from tieringd.formats.topic_manifest import Archiving

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from pathlib import Path

    from tests.simulation.faults import ClusterWire
    from tieringd.broker.layout import Layout
    from tieringd.broker.pins import PinDirectory
    from tieringd.config import Config
    from tieringd.housekeeping.partition_sweep import HousekeepingJob
    from tieringd.metrics import Metrics
    from tieringd.model.partition import TopicPartition

EVENTS = 70
PRODUCERS = (1, 2)
IDLE_INTERVAL_SECONDS = 20
CONVERGENCE_SECONDS = 500
_TOPIC = TopicKey(CLUSTER, "orders", TOPIC_ID)


class Cluster:
    """Everything of one seed. Call `run` once, on a virtual loop."""

    event_count = EVENTS
    """How many events a history has before all faults end."""

    def __init__(self, seed: int, root: Path, *, brokers: int = 2, partitions: int = 2) -> None:
        self.random = Random(seed)
        self.store = MemoryStore()
        self._root = root
        self.tries_checksums = False
        self.has_pins = seed % 4 != 0
        self.max_interval_ms = IDLE_INTERVAL_SECONDS * 1000 if seed % 2 else None
        self.target_bytes = self.random.choice([-1, 1, 400])
        self.elects_uncleanly = seed % 3 == 1
        self._deletes_by_itself = self.random.random() < 0.6
        self.partitions = [self._partition(number, brokers) for number in range(partitions)]
        self.promises = self._promises()
        self.nodes: list[Node] = []
        self._lives = 0
        self.clock_errors_ms: dict[int, int] = {}
        """How far the clock of each broker's host is ahead, where it is wrong."""
        self._held: set[TopicPartition] = set()
        """Partitions that wait for an operator: no daemon may give up what only the archive holds."""
        self._broken: list[AssertionError] = []
        self._ended: list[Node] = []
        self.events: list[str] = []

    def _promises(self) -> ClusterPromises:
        return ClusterPromises(self.store, self.partitions)

    def directories(self, broker: int) -> tuple[Path, Path]:
        """Return a broker's log directory and the directory of its pins."""
        return self._root / f"broker-{broker}" / "log", self._root / f"broker-{broker}" / "pins"

    def _partition(self, number: int, brokers: int) -> Replication:
        journal: dict[int, set[bytes]] = {}
        partition = Replication(
            [Replica(*self.directories(broker), number, journal) for broker in range(brokers)]
        )
        if number % brokers:
            partition.elect(number % brokers)
        for broker in range(brokers):
            partition.hear(broker)
        return partition

    def config(self, log_dir: Path) -> Config:
        """Return what the daemon beside the broker with this log directory is configured with."""
        return tiered_config(log_dir, target_bytes=self.target_bytes, interval_ms=int(ROUND_SECONDS * 1000))

    def store_over(self, wire: ClusterWire, number: int) -> DistantStore:
        """Return the bucket as the daemon beside broker *number* reaches it."""
        return DistantStore(self.store, wire, on_put=lambda key: self.on_put(number, key))

    def broker_over(self, wire: ClusterWire, number: int) -> ClusterBroker:
        """Return broker *number* as the daemon beside it reaches it."""
        return ClusterBroker(
            number,
            self.partitions,
            wire,
            on_trim=self.on_trim,
            elects_uncleanly=self.elects_uncleanly,
        )

    def layout(self) -> Layout:
        """Return how a daemon reads the files of its broker."""
        return KafkaLayout()

    def pinner_of(self, directories: Mapping[str, PinDirectory], metrics: Metrics) -> Pinner:
        """Return what keeps the pins in a daemon's directories."""
        return Pinner(directories, budget_bytes=10**12, metrics=metrics)

    def jobs(self, *_: object) -> Sequence[HousekeepingJob]:
        """Return the jobs of housekeeping that run in a daemon: none."""
        return ()

    def now_ms(self) -> int:
        """Return the wall-clock time of this world."""
        return DEFAULT_TIME_MS + round(asyncio.get_running_loop().time() * 1000)

    def on_put(self, broker: int, key: str) -> None:
        """Check the promises each time that the bucket holds something new."""
        self._note_broken(lambda: self.promises.check_put(key))
        if key.endswith("/manifest"):
            self._note_broken(lambda: self.promises.check_commit(broker, key))

    def on_trim(self, broker: int, partition: Replication, before_offset: int) -> None:
        """Check that what a daemon lets go is durable."""
        self._note_broken(lambda: self.promises.check_trim(broker, partition, before_offset))

    def _note_broken(self, check: Callable[[], None]) -> None:
        """Keep what a check within a daemon's own call finds: the daemon would only log it."""
        try:
            check()
        except AssertionError as error:
            self._broken.append(error)

    def _check(self) -> None:
        """Fail for what was broken since the last check, or is now."""
        for error in self._broken:
            raise error
        self.promises.check()
        for node in self.nodes if self.has_pins else ():
            self.promises.check_pins(node, self.now_ms())

    async def run(self) -> None:
        """Let everything happen, then let all faults end, and see that nothing is left undone."""
        brokers = len(self.partitions[0].replicas)
        self.nodes = [self._start(broker) for broker in range(brokers)]
        for _ in range(self.event_count):
            await self._one_event()
            self._check()
            await asyncio.sleep(self.random.expovariate(0.7))
        await self._settle()
        self._check()
        for node in self.nodes:
            await node.kill()

    def _chances(self) -> dict[Callable[[Replication], Awaitable[None] | None], int]:
        """Return how likely each event is."""
        return {
            self._append: 20,
            self._transact: 8,
            self._roll: 18,
            self._fetch: 30,
            self._hear: 6,
            self._delete_oldest: 8 if self._deletes_by_itself else 0,
            self._drop_out: 3 if self.elects_uncleanly else 1,
            self._elect: 5,
            self._elect_uncleanly: 4 if self.elects_uncleanly else 0,
            self._append_deposed: 3,
            self._crash: 3,
            self._outage: 4,
            self._freeze: 3,
            self._pause: 2,
        }

    async def _one_event(self) -> None:
        chances = self._chances()
        (event,) = self.random.choices(list(chances), list(chances.values()))
        self.events.append(event.__name__)
        done = event(self.random.choice(self.partitions))
        if done is not None:
            await done

    def _append(self, partition: Replication) -> None:
        for _ in range(self.random.randint(1, 3)):
            partition.log.append(*(b"%d" % self.random.randrange(100) for _ in range(3)))
        partition.advance()

    def _transact(self, partition: Replication) -> None:
        """Go on with a transaction of one of the producers, or end it."""
        log = partition.log
        producer = self.random.choice([*PRODUCERS, *2 * log.open_producers])
        if producer in log.open_producers and self.random.random() < 0.8:
            self.random.choice([log.commit, log.abort])(producer)
        else:
            log.append(b"transacted", b"in %d" % producer, producer_id=producer)
        partition.advance()

    def _roll(self, partition: Replication) -> None:
        """Roll some replicas, in different places."""
        for replica in partition.replicas:
            if (replica is partition.log or self.random.random() < 0.5) and not replica.is_active_empty:
                replica.roll()

    def _fetch(self, partition: Replication) -> None:
        for broker in range(len(partition.replicas)):
            if broker in partition.in_sync or self.random.random() < 0.3:
                partition.fetch(broker, self.random.choice([1, 3, 1000]))

    def _hear(self, partition: Replication) -> None:
        partition.hear(self.random.randrange(len(partition.replicas)))

    def _delete_oldest(self, partition: Replication) -> None:
        """Let brokers delete by their retention, each its own oldest segments."""
        for replica in partition.replicas:
            for _ in range(self.random.randint(0, 3)):
                replica.delete_oldest()

    def _drop_out(self, partition: Replication) -> None:
        others = sorted(partition.in_sync - {partition.leader})
        if others:
            partition.drop_out(self.random.choice(others))

    def _elect(self, partition: Replication) -> None:
        others = sorted(partition.in_sync - {partition.leader})
        if others:
            partition.elect(self.random.choice(others))
            self._spread(partition)

    def _elect_uncleanly(self, partition: Replication) -> None:
        others = sorted(set(range(len(partition.replicas))) - partition.in_sync)
        if others:
            partition.elect(self.random.choice(others))
            self._spread(partition)

    def _spread(self, partition: Replication) -> None:
        for broker in range(len(partition.replicas)):
            if self.random.random() < 0.6:
                partition.hear(broker)

    def _append_deposed(self, partition: Replication) -> None:
        """Let a leader that does not know that it is deposed append records that are never replicated."""
        for broker, replica in enumerate(partition.replicas):
            if broker != partition.leader and partition.believes_to_lead(broker):
                replica.append(b"never acknowledged")

    async def _crash(self, _: Replication) -> None:
        place = self.random.randrange(len(self.nodes))
        old = self.nodes[place]
        await old.kill()
        self._ended.append(old)
        self.nodes[place] = self._start(old.number)

    def _outage(self, _: Replication) -> None:
        """Let the store or a broker be out of reach for a while, for one daemon or several."""
        loop = asyncio.get_running_loop()
        seconds = self.random.choice([1, 5, 40])
        is_hanging = self.random.random() < 0.4
        for node in self.nodes:
            wire = node.store_wire if self.random.random() < 0.8 else node.broker_wire
            if self.random.random() < 0.8:
                wire.hangs, wire.is_down = is_hanging, not is_hanging
                loop.call_later(self.random.uniform(0.5, seconds), wire.restore)

    def _freeze(self, _: Replication) -> None:
        """Stop a daemon for a while, mostly through a change of leadership."""
        node = self.random.choice(self.nodes)
        for wire in node.wires:
            wire.freeze()
        for partition in self.partitions:
            if partition.leader == node.number and self.random.random() < 0.6:
                self._elect(partition)
        seconds = self.random.uniform(2, 90)
        for wire in node.wires:
            asyncio.get_running_loop().call_later(seconds, wire.thaw)

    async def _pause(self, _: Replication) -> None:
        await self._set_archiving(self.random.choice(list(Archiving)))

    async def _set_archiving(self, archiving: Archiving) -> None:
        manifests = archive_in(self.store, writer_id="operator", now_ms=self.now_ms).manifests
        if await manifests.load_topic(_TOPIC) is not None:
            await manifests.change_topic(_TOPIC, lambda found: replace(found, archiving=archiving))

    def _start(self, broker: int) -> Node:
        self._lives += 1
        return Node(self, broker, f"{self._lives:04x}", fault_rate=self._fault_rate())

    def _fault_rate(self) -> float:
        """Return how many requests of the next daemon get lost."""
        return self.random.choice([0.0, 0.02, 0.08])

    async def _settle(self) -> None:
        """End all faults, and expect the daemons, as they are, to finish the work."""
        for node in (*self._ended, *self.nodes):
            for wire in node.wires:
                wire.end_faults()
        await self._set_archiving(Archiving.ON)
        for partition in self.partitions:
            for producer in partition.log.open_producers:
                partition.log.commit(producer)
            self._replicate(partition)
        await self._converge()
        if self.random.random() < 0.3:
            await self._expect_pause_to_hold()
        if self.max_interval_ms is not None:
            await self._expect_no_long_wait()
        await self._converge()
        for partition in self.partitions:
            if partition.name not in self._held:
                await self._expect_read_once(partition)

    def _replicate(self, partition: Replication) -> None:
        """Bring every replica to the leader's end, with a closed segment and a record after it."""
        for broker in range(len(partition.replicas)):
            partition.hear(broker)
        partition.log.append(b"closed")
        self._fetch_all(partition)
        partition.log.roll()
        partition.log.append(b"active")
        self._fetch_all(partition)

    def _fetch_all(self, partition: Replication) -> None:
        for _ in range(2):
            for broker in range(len(partition.replicas)):
                partition.fetch(broker)

    async def _converge(self) -> None:
        """Wait until every partition is at rest, and fail when that takes too long."""
        loop = asyncio.get_running_loop()
        until = loop.time() + CONVERGENCE_SECONDS
        waiting = [each for each in self.partitions if each.name not in self._held]
        while waiting:
            await asyncio.sleep(3 * ROUND_SECONDS)
            self._check()
            try:
                self.promises.expect_converged(waiting[-1])
            except AssertionError as error:
                if self._waits_for_operator(waiting[-1]):
                    self._held.add(waiting.pop().name)
                elif loop.time() > until:
                    faults = {node.number: node.faults for node in self.nodes}
                    raise AssertionError(f"{error}; daemons say {faults}") from error
            else:
                waiting.pop()

    def _waits_for_operator(self, partition: Replication) -> bool:
        """Say whether a daemon says that nothing tells which records of the archive's tail are right."""
        faults = self.nodes[partition.leader].faults
        return any(
            str(partition.name) in name and "an operator has to decide" in why for name, why in faults.items()
        )

    async def _expect_pause_to_hold(self) -> None:
        """Assert that nothing is uploaded while a topic is paused, and that nothing is missing afterwards."""
        await self._set_archiving(Archiving.PAUSED)
        await asyncio.sleep(4 * ROUND_SECONDS)
        before = [self.promises.manifest_of(each) for each in self.partitions]
        for partition in self.partitions:
            self._replicate(partition)
        await asyncio.sleep(4 * ROUND_SECONDS)
        assert before == [self.promises.manifest_of(each) for each in self.partitions]
        await self._set_archiving(Archiving.ON)
        await self._converge()

    async def _expect_no_long_wait(self) -> None:
        """Assert that each stable record is durable an idle interval and three scans later."""
        loop = asyncio.get_running_loop()
        stable: list[tuple[float, Replication, int]] = []
        patience = IDLE_INTERVAL_SECONDS + 3 * ROUND_SECONDS
        until = loop.time() + 2 * patience
        while loop.time() < until:
            for partition in (each for each in self.partitions if each.name not in self._held):
                if self.random.random() < 0.5:
                    partition.log.append(b"waits")
                    self._fetch_all(partition)
                stable.append((loop.time(), partition, partition.log.last_stable_offset))
            await asyncio.sleep(ROUND_SECONDS)
            for since, partition, offset in stable:
                manifest = self.promises.manifest_of(partition)
                if since < loop.time() - patience:
                    assert manifest.next_offset >= offset, f"{partition.name}: {offset} waits since {since}"

    async def _expect_read_once(self, partition: Replication) -> None:
        """Each acknowledged record is in the archive or in the leader's log, as it was written."""
        manifest = self.promises.manifest_of(partition)
        assert manifest is not None
        archive = archive_in(self.store)
        for read_committed in (False, True):
            found = await values_in(archive, manifest, read_committed=read_committed)
            wanted = values_at(partition.log, manifest, read_committed=read_committed)
            unjudged, others = self.promises.unjudged_offsets(partition, manifest)
            for offset in unjudged if read_committed else others:
                found.pop(offset, None)
                wanted.pop(offset, None)
            assert found.items() <= wanted.items(), partition.name
            missing = wanted.keys() - found.keys()
            assert missing <= (cut_by_gaps(partition.log, manifest) if read_committed else set()), missing
        await expect_clean(archive, manifest.partition)
        self.promises.expect_all_on_disk(partition, manifest)
