"""
A cluster in rougher weather: what `cluster` has, and what only comes together now and then.

Two or three brokers. A daemon is stopped at any of its operations while leadership goes away and comes back,
cleanly or not. The store refuses commits for nothing, deletes late, flips bits and may take the announced
checksum on trust. Users delete records, disks need room, files on a broker's disk go bad, machines lose
power, and jobs of housekeeping merge and scrub beside it all.

Each kind of trouble has a stream of randomness of its own, named after it, so that a change to one leaves the
others as they were.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from tests.fakes.archive import tiered_config
from tests.fakes.store import DistantStore
from tests.fakes.trusting_store import TrustingStore
from tests.simulation.cluster import Cluster
from tests.simulation.faults import ClusterWire
from tests.simulation.node import ROUND_SECONDS
from tests.simulation.storm_broker import StormBroker
from tests.simulation.storm_promises import StormPromises
from tests.simulation.torn_layout import TornLayout
from tests.simulation.users import Users
from tieringd.daemon.housekeeping_jobs import merge_job
from tieringd.daemon.scrubbing import scrub_job
from tieringd.model import manifest as manifests
from tieringd.policies import lineage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence
    from pathlib import Path

    from tests.simulation.node import Node
    from tests.simulation.replication import Replication
    from tieringd.archiving.reconciler import Reconciler
    from tieringd.broker.layout import Layout
    from tieringd.config import Config
    from tieringd.daemon.archive import Archive
    from tieringd.housekeeping.partition_sweep import HousekeepingJob
    from tieringd.metrics import Metrics

BROKER_STOPS = ("replicas", "log_bounds", "trim", "delete_records")
RETENTION_MS = 60_000
SMALL_CLOCK_ERROR_MS = 20_000
"""How far a clock may be off unnoticed, in these histories."""
HOUR_MS = 3_600_000
STORE_STOPS = ("put", "head", "get", "delete_many", "list_page")


class Storm(Cluster):
    """Everything of one seed. Call `run` once, on a virtual loop."""

    def __init__(self, seed: int, root: Path) -> None:
        self._seed = seed
        shape = self.stream("shape")
        self._merges = shape.random() < 0.4
        self._scrubs = shape.random() < 0.3
        self._users_delete = shape.random() < 0.4
        self._disks_go_bad = shape.random() < 0.4
        super().__init__(seed, root, brokers=shape.choice([2, 2, 3]), partitions=1)
        self.elects_uncleanly = shape.random() < 0.6
        # Where disks go bad, files that are archived stay for a while: those are the ones at risk.
        self.target_bytes = 300 if self._disks_go_bad else shape.choice([1, 1, 300, -1])
        self._refusal_rate = shape.choice([0.0, 0.0, 0.1, 0.4])
        self._stops = self.stream("stops")
        self._refusals = self.stream("refusals")
        self._bad = self.stream("bad disks")
        self._bits = self.stream("bits")
        self._power = self.stream("power")
        self._users = self.stream("users")
        self._trusts = shape.random() < 0.3
        if self._trusts:
            # What was read back is not written over by a late request that is damaged as well.
            self.store = TrustingStore(
                tells=shape.random() < 0.5,
                may_damage=lambda key: key.endswith((".log", ".index")) and key not in self.store.objects,
            )
            self.tries_checksums = True
        for partition in self.partitions:
            for replica in partition.replicas:
                replica.counts_strays = False
        self.promises = self._promises()
        self._clocks = self.stream("clocks")
        self._retention_ms = RETENTION_MS if self._clocks.random() < 0.25 else None
        if self._retention_ms is not None:
            self._keep_time(self._retention_ms)
        self.users = Users(self.partitions[0], self._users, now_ms=self.now_ms)
        self._torn_rate = shape.choice([0.0, 0.25])
        self._notes_late = shape.random() < 0.3
        for replica in self.partitions[0].replicas if self._notes_late else ():
            replica.notes_epochs_after = self.stream("notes")
        self._delete_delay = "1s"
        self._misses_middle = False
        self._moving: set[asyncio.Task[None]] = set()
        self._dying: int | None = None
        """The broker whose daemon dies at its next commit."""
        self.damaged: dict[tuple[int, int], float] = {}
        """Broker and base offset of each damaged file, and since when, in loop time."""

    def stream(self, name: str) -> Random:
        """Return the stream of randomness of this name."""
        return Random(f"{name} {self._seed}")

    async def run(self) -> None:
        """Run the history, with limits that are reached within it."""
        self._begin_with_records(self.stream("begin"))
        # No setting has this limit, and a history is too short to reach 32 segments.
        remembered = self._segments_remembered()
        with (
            patch.object(manifests, "SEGMENTS_REMEMBERED", remembered),
            patch.object(lineage, "SEGMENTS_REMEMBERED", remembered),
        ):
            await super().run()

    def _segments_remembered(self) -> int:
        """Return for how many segments an archive remembers the transactions that cross them."""
        return self.stream("limits").choice([1, 2, manifests.SEGMENTS_REMEMBERED])

    def _keep_time(self, retention_ms: int) -> None:
        """Give the store a clock that is right, and the records their times; hosts' clocks go wrong."""
        self.store.now_ms = self.now_ms
        self.promises.old_before_ms = lambda: self.now_ms() - retention_ms + SMALL_CLOCK_ERROR_MS
        for replica in self.partitions[0].replicas:
            replica.dated_by = self.now_ms

    def _set_clock(self, _: Replication) -> None:
        """Set the clock of a host wrong, by a little or a lot, or right again."""
        wrong_ms = self._clocks.choice([SMALL_CLOCK_ERROR_MS, HOUR_MS, 400 * 24 * HOUR_MS])
        number = self._clocks.randrange(len(self.nodes))
        self.clock_errors_ms[number] = self._clocks.choice([0, -wrong_ms, wrong_ms, wrong_ms])

    def _begin_with_records(self, random: Random) -> None:
        """Let the log have segments before the first daemon starts, in some histories."""
        (partition,) = self.partitions
        for _ in range(random.choice([0, 0, 2, 6])):
            self._append_with(partition, random)
            if random.random() < 0.7:
                partition.log.roll()
            for broker in range(len(partition.replicas)):
                partition.fetch(broker)

    def _promises(self) -> StormPromises:
        return StormPromises(self.store, self.partitions)

    def config(self, log_dir: Path) -> Config:
        """Return what a daemon is configured with."""
        return tiered_config(
            log_dir,
            target_bytes=self.target_bytes,
            interval_ms=int(ROUND_SECONDS * 1000),
            retention_ms=self._retention_ms,
            delete_delay=self._delete_delay,
            more=f"""\
cloud_storage_enable_segment_merging: {str(self._merges).lower()}
cloud_storage_segment_size_target: 900
cloud_storage_segment_size_min: 500
cloud_storage_enable_scrubbing: {str(self._scrubs).lower()}
cloud_storage_partial_scrub_interval_ms: 20s
cloud_storage_full_scrub_interval_ms: 20s
cloud_storage_scrubbing_interval_jitter_ms: 0
archive_orphan_grace_ms: 60s
archive_quarantine_ms: 60s
""",
        )

    def store_over(self, wire: ClusterWire, number: int) -> DistantStore:
        """Return the bucket as a daemon reaches it."""
        return DistantStore(
            self.store,
            wire,
            on_put=lambda key: self.on_put(number, key),
            refuses=lambda: self._refuse(number),
            deletes_late=True,
        )

    def broker_over(self, wire: ClusterWire, number: int) -> StormBroker:
        """Return a broker as the daemon beside it reaches it."""
        return StormBroker(
            number,
            self.partitions,
            wire,
            on_trim=self.on_trim,
            elects_uncleanly=self.elects_uncleanly,
            before_trim=self._before_trim,
            on_allowed=self._on_allowed_trim,
        )

    def layout(self) -> Layout:
        """Return how a daemon reads the files of its broker."""
        return TornLayout(
            self.stream(f"torn {self._lives}"), rate=self._torn_rate, misses_middle=self._misses_middle
        )

    def jobs(
        self, config: Config, archive: Archive, reconciler: Reconciler, writer_id: str, metrics: Metrics
    ) -> Sequence[HousekeepingJob]:
        """Return the jobs of housekeeping that run in a daemon."""
        found: list[HousekeepingJob] = []
        if self._merges:
            found.append(
                merge_job(
                    config,
                    metrics,
                    archive.store,
                    reconciler=reconciler,
                    writer_id=writer_id,
                    now_ms=archive.clock,
                )
            )
        if self._scrubs:
            found.append(scrub_job(config, metrics, archive, reconciler=reconciler, writer_id=writer_id))
        return found

    def _refuse(self, number: int) -> str:
        """Say whether a conditional write is refused, `before` its effect or `after` it, or is `late`."""
        if self._dying == number:
            self._dying = None
            self._begin(self._restart(number))
            return "late"
        if self._refusals.random() >= self._refusal_rate:
            return ""
        return self._refusals.choice(["before", "after"])

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._moving.add(task)
        task.add_done_callback(self._moving.discard)

    def _die_committing(self, partition: Replication) -> None:
        """Let the leader's daemon die at its next commit, which takes effect when the next one runs."""
        self._dying = partition.leader

    async def _restart(self, number: int, *, before_start: Callable[[], None] = lambda: None) -> None:
        """End the daemon beside broker *number*, if it is not about to end already, and start another one."""
        place = next(row for row, node in enumerate(self.nodes) if node.number == number)
        old = self.nodes[place]
        if old in self._ended:
            return
        self._ended.append(old)
        await asyncio.sleep(0)
        await old.kill()
        before_start()
        self.nodes[place] = self._start(number)

    async def _crash(self, _: Replication) -> None:
        await self._restart(self.random.randrange(len(self.nodes)))

    def _chances(self) -> dict[Callable[[Replication], Awaitable[None] | None], int]:
        return {
            **super()._chances(),
            self._append: 30,
            self._roll: 30,
            self._drop_out: 1,
            self._elect_uncleanly: 4 if self.elects_uncleanly else 0,
            self._crash: 2,
            self._outage: 3,
            self._freeze: 1,
            self._stop_at: 10,
            self._lag: 6 if self.elects_uncleanly else 0,
            self._delete_records: 4 if self._users_delete else 0,
            self._go_bad: 8 if self._disks_go_bad else 0,
            # Where a replica that lags may lead, a trim for room takes a risk that is documented.
            self._cross: 6 if self.elects_uncleanly else 0,
            self._need_room: 0 if self.elects_uncleanly else 3,
            self._rescan_partition: 4,
            self._die_committing: 4,
            self._flip_bits: 4 if self._trusts else 0,
            self._lose_power: 2 if self.has_pins else 0,
            self._set_clock: 6 if self._retention_ms else 0,
        }

    # Leadership that goes and comes back while a daemon is stopped.

    def _stop_at(self, partition: Replication) -> None:
        """Stop the leader's daemon at one of its next operations, while leadership goes and comes back."""
        random = self._stops
        node = self.nodes[partition.leader]
        is_broker = random.random() < 0.6
        wire = node.broker_wire if is_broker else node.store_wire
        operation = random.choice(BROKER_STOPS if is_broker else STORE_STOPS)
        # A request that has left is not held up by its sender any more.
        is_after = operation in {"delete_records", "put", "delete_many"} or random.random() < 0.5
        wire.stops_at = operation, is_after
        wire.on_stop = lambda: self._stopped(node, partition)

    def _stopped(self, node: Node, partition: Replication) -> None:
        for wire in node.wires:
            wire.freeze()
        self._begin(self._away_and_back(node, partition))

    async def _away_and_back(self, node: Node, partition: Replication) -> None:
        """Move leadership away from *node*, and mostly back, then let its daemon go on."""
        random = self._stops
        others = sorted(set(range(len(partition.replicas))) - {node.number})
        clean = [one for one in others if one in partition.in_sync]
        wanted = others if self.elects_uncleanly else clean
        if partition.leader == node.number and wanted:
            partition.elect(random.choice(wanted))
            await self._write_some(partition, random)
            # Long enough, now and then, for the other daemon to archive what its broker has.
            await asyncio.sleep(random.choice([0.0, 8.0, 20.0]))
            if random.random() < 0.8:
                if node.number not in partition.in_sync:
                    partition.hear(node.number)
                    partition.fetch(node.number)
                if node.number in partition.in_sync:
                    partition.elect(node.number)
                    await self._write_some(partition, random)
        await asyncio.sleep(random.choice([0.5, 5.0, 60.0]) * random.random())
        for wire in node.wires:
            wire.thaw()

    async def _write_some(self, partition: Replication, random: Random) -> None:
        for broker in range(len(partition.replicas)):
            if random.random() < 0.8:
                partition.hear(broker)
        for _ in range(random.randint(0, 4)):
            self._append_with(partition, random)
            if random.random() < 0.5 and not partition.log.is_active_empty:
                partition.log.roll()
            for broker in range(len(partition.replicas)):
                if random.random() < 0.7:
                    partition.fetch(broker)
            await asyncio.sleep(random.uniform(0, 6))

    def _append_with(self, partition: Replication, random: Random) -> None:
        log = partition.log
        producer = random.choice([1, 2])
        kind = random.random()
        if kind < 0.5:
            log.append(*(b"%d" % random.randrange(100) for _ in range(3)))
        elif producer in log.open_producers and kind < 0.8:
            random.choice([log.commit, log.abort])(producer)
        else:
            log.append(b"transacted", b"in %d" % producer, producer_id=producer)
        partition.advance()

    def _lag(self, partition: Replication) -> None:
        """Let the followers fall behind, and the leader close a segment that they lack."""
        random = self._stops
        for follower in sorted(partition.in_sync - {partition.leader}):
            if random.random() < 0.8:
                partition.drop_out(follower)
        for _ in range(random.randint(1, 4)):
            self._append_with(partition, random)
        if not partition.log.is_active_empty:
            partition.log.roll()

    def _cross(self, partition: Replication) -> None:
        self._begin(self._cross_over(partition))

    async def _cross_over(self, partition: Replication) -> None:
        """
        Elect uncleanly a replica that has a transaction's records and not its end.

        The records are in a closed segment, and the marker in it as well, or after it, or in a closed one.
        """
        random, leader, log = self._stops, partition.leader, partition.log
        others = sorted(set(range(len(partition.replicas))) - {leader})
        log.append(b"crossing", producer_id=3)
        self._append_with(partition, random)
        if random.random() < 0.5:
            log.roll()
        for broker in others:
            partition.hear(broker)
            partition.fetch(broker)
            if random.random() < 0.3 and not partition.replicas[broker].is_active_empty:
                partition.replicas[broker].roll()
            partition.drop_out(broker)
        if 3 in log.open_producers:
            random.choice([log.commit, log.abort])(3)
        for _ in range(random.randint(0, 4)):
            self._append_with(partition, random)
            if random.random() < 0.6:
                log.roll()
        partition.advance()
        await asyncio.sleep(random.choice([4.0, 8.0, 16.0]))
        if partition.leader == leader and partition.in_sync == {leader}:
            partition.elect(random.choice(others))
            for broker in (leader, *others):
                partition.hear(broker)
            await self._go_on_otherwise(partition, random)

    async def _go_on_otherwise(self, partition: Replication, random: Random) -> None:
        """End the transaction that crossed over once more, and perhaps in another way."""
        if random.random() < 0.4:
            partition.log.delete_oldest()
        if 3 in partition.log.open_producers and random.random() < 0.7:
            random.choice([partition.log.commit, partition.log.abort])(3)
        await self._write_some(partition, random)

    # Users, disks and machines.

    def _delete_records(self, partition: Replication) -> None:
        """Delete records before an offset, as a user asks for it."""
        random, log = self._users, partition.log
        is_overtaken = self.elects_uncleanly and random.random() < 0.3
        if is_overtaken:
            self._lag(partition)
        offsets = range(log.log_start_offset + 1, log.stable_end + 1)
        if not offsets:
            return
        # Mostly at a batch, and mostly not the newest records.
        bases = [one for one in log.batch_bases if one in offsets] or offsets
        among = bases if random.random() < 0.7 else offsets
        offset = random.choice(among[: len(among) // 2 + 1] if random.random() < 0.7 else among)
        way = random.choice(["past all", "command", "gateway"])
        if way == "past all":
            partition.delete_records(offset)
        elif way == "command":
            wire = ClusterWire(random, fault_rate=random.choice([0.0, 0.1]))
            self._begin(self.users.delete_by_command(offset, self._store_of_users(wire)))
        else:
            node = self.nodes[partition.leader]
            node.aside(self.users.delete_by_gateway(offset, self._store_of_users(node.store_wire), node))
        if is_overtaken:
            self._begin(self._overtake(partition))

    async def _overtake(self, partition: Replication) -> None:
        """Elect a replica that lacks the newest records, while a deletion of them may be under way."""
        random, leader = self._users, partition.leader
        others = sorted(set(range(len(partition.replicas))) - partition.in_sync)
        await asyncio.sleep(random.uniform(0, 3))
        if others and partition.leader == leader:
            partition.elect(random.choice(others))
            for _ in range(3):
                await self._write_some(partition, random)

    def _store_of_users(self, wire: ClusterWire) -> DistantStore:
        """Return the bucket as a command, or a gateway, reaches it over *wire*: both edit manifests."""

        def on_put(key: str) -> None:
            (partition,) = self.partitions
            manifest = self.promises.manifest_of(partition)
            if manifest is not None:
                self.on_put(partition.leaders[manifest.leader_epoch], key)

        return DistantStore(self.store, wire, on_put=on_put)

    def _go_bad(self, partition: Replication) -> None:
        """Let one of the leader's closed files have other bytes, with the same bounds and size."""
        manifest, log = self.promises.manifest_of(partition), partition.log
        durable_to = manifest.next_offset if manifest else 0
        closed = [base for base, end, _ in log.closed_segments() if end <= durable_to]
        if closed:
            base_offset = self._bad.choice(closed)
            place = (partition.leader, base_offset)
            if place not in self.damaged:
                log.flip_byte(base_offset)
                self.damaged[place] = asyncio.get_running_loop().time()

    def _mend(self, partition: Replication) -> None:
        for broker, base_offset in self.damaged:
            replica = partition.replicas[broker]
            if base_offset in replica.bases_on_disk:
                replica.rewrite_file(base_offset)
        self.damaged.clear()

    def _before_trim(self, broker: int, partition: Replication, before_offset: int) -> None:
        """
        See that no file goes that was found with other bytes than were written.

        What is before the archive's start goes whatever its bytes are: it is past its retention, or deleted.
        """
        replica, node = partition.replicas[broker], self.nodes[broker]
        manifest = self.promises.manifest_of(partition)
        replaced_ms = max((one.replaced_at_ms for one in manifest.replacements), default=0) if manifest else 0
        if (
            node.has_reached_store_since(asyncio.get_running_loop().time() - 40)
            and self.now_ms() > replaced_ms + 20_000
        ):
            # No other leader changed the archive a moment ago, so the daemon can know what it holds.
            self._note_broken(lambda: self.promises.check_rested_trim(broker, partition, before_offset))
        start_offset = manifest.start_offset if manifest is not None else 0
        for base, end, _ in replica.closed_segments():
            since = self.damaged.get((broker, base)) if end > start_offset else None
            if since is not None and end <= before_offset and node.has_rested_since(since, seconds=8):
                path = replica.log_path(base)
                if path.read_bytes() != replica.bytes_between(base, end):
                    self._broken.append(AssertionError(f"{path} has other bytes, and is trimmed"))

    def _on_allowed_trim(self, broker: int, partition: Replication, before_offset: int) -> None:
        """See that a replica that may be elected without being in sync could replace nothing that goes."""
        if self.elects_uncleanly and broker == partition.leader:
            self._note_broken(lambda: self.promises.check_replicated(partition, before_offset))

    def _need_room(self, partition: Replication) -> None:
        """Ask the leader's daemon for room, as far as the last stable offset and past it."""
        node = self.nodes[partition.leader]
        for leadership, _, _ in list(node.reconciler.archived()):
            if leadership.partition == partition.log.identified:
                node.reconciler.request_space(leadership, self._bad.randint(0, partition.log.next_offset + 9))

    def _rescan_partition(self, partition: Replication) -> None:
        """Tell the leader's daemon that something changed in the partition's directory."""
        node = self.nodes[partition.leader]
        path = str(partition.log.path)
        if path in node.reconciler.paths():
            node.aside(node.reconciler.rescan_partitions([path]))

    def _flip_bits(self, _: Replication) -> None:
        assert isinstance(self.store, TrustingStore)
        self.store.flips = self._bits.randint(1, 2)

    async def _lose_power(self, partition: Replication) -> None:
        """
        Cut a machine's power: its daemon dies, and what it had not forced onto the disk is gone or cut short.

        The broker's own log is as replicated as ever; of ours these are the pins and the note beside them.
        """
        number = self._power.randrange(len(self.nodes))
        replica = partition.replicas[number]
        await self._restart(number, before_start=lambda: replica.lose_pins(self._power))

    def _waits_for_operator(self, partition: Replication) -> bool:
        """
        Say whether a daemon waits for an operator, as it may.

        Also where pins are of another log than the archive, and the leader's history begins after both:
        nothing can tell any more which of the two was acknowledged.
        """
        if super()._waits_for_operator(partition):
            return True
        manifest = self.promises.manifest_of(partition)
        is_forgotten = manifest is not None and partition.log.epochs[0][1] >= manifest.next_offset
        faults = self.nodes[partition.leader].faults.values()
        return is_forgotten and any("is not the log that was archived" in why for why in faults)

    async def _settle(self) -> None:
        for node in (*self._ended, *self.nodes):
            for wire in node.wires:
                wire.stops_at = None
                wire.end_faults()
        self._refusal_rate, self._dying = 0.0, None
        self.clock_errors_ms.clear()
        while self._moving:
            await asyncio.wait(self._moving)
        for node in self.nodes:
            for wire in node.wires:
                wire.stops_at = None
                wire.end_faults()
        if isinstance(self.store, TrustingStore):
            self.store.flips = 0
        for partition in self.partitions:
            self._mend(partition)
        await super()._settle()
        for partition in self.partitions:
            if partition.name not in self._held:
                self.promises.expect_deleted(partition)
