"""
A compacted topic, read by key: brokers clean their logs, and daemons upload again what the cleaners left.

Two or three brokers with a daemon beside each. Producers write few keys, and tombstones. Each broker's
cleaner rewrites its own log, and drops tombstones `delete.retention.ms` after it has first seen them. Daemons
trim what is durable, so that cleaners do not see all that the archive has.

What counts is what a reader has: the archive, and the leader's log from where the archive ends. The latest
value of each key has to be there, and no deleted key comes back. That holds at each commit and each trim.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.fakes.archive import archive_in, values_in
from tests.simulation.cleaned_replica import CleanedReplica, latest_records, records_in, records_of
from tests.simulation.cluster import Cluster
from tests.simulation.cluster_broker import ClusterBroker
from tests.simulation.cluster_promises import ClusterPromises
from tests.simulation.replication import Replication
from tests.simulation.scrubbing import expect_clean
from tieringd.daemon.housekeeping_jobs import reupload_job
from tieringd.formats.object_keys import data_key

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from pathlib import Path

    from tests.simulation.faults import ClusterWire
    from tieringd.archiving.reconciler import Reconciler
    from tieringd.config import Config
    from tieringd.daemon.archive import Archive
    from tieringd.formats.records import Record
    from tieringd.housekeeping.partition_sweep import HousekeepingJob
    from tieringd.metrics import Metrics
    from tieringd.model.manifest import PartitionManifest

KEYS = [b"k%d" % number for number in range(6)]
DELETE_RETENTION_SECONDS = 120.0
"""Longer than any fault here keeps a segment from the archive, as `delete.retention.ms` has to be."""


class CompactedBroker(ClusterBroker):
    """A broker whose topic is compacted, and trimmed."""

    async def topic_configs(self, topics: Sequence[str]) -> Mapping[str, Mapping[str, str]]:
        """Return that the topic is compacted."""
        found = await super().topic_configs(topics)
        return {
            name: {
                **settings,
                "cleanup.policy": "compact,delete",
                "delete.retention.ms": str(round(DELETE_RETENTION_SECONDS * 1000)),
            }
            for name, settings in found.items()
        }


class CompactedPromises(ClusterPromises):
    """What must hold of a compacted topic: its bytes change, and what its keys have does not."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.unsure: set[bytes] = set()
        """Keys whose latest record a broker's cleaner had dropped for one that an election cut off."""
        self.views = 0

    def check_trim(self, broker: int, partition: Replication, before_offset: int) -> None:
        """See that a trim takes nothing that the archive lacks, and leaves every key as it is."""
        manifest = self.manifest_of(partition)
        if broker == partition.leader:
            assert manifest is not None, f"{partition.name}: trimmed, and nothing is archived"
            assert before_offset <= manifest.next_offset, f"{partition.name}: {before_offset} is not durable"
            if manifest.leader_epoch == partition.leader_epoch:
                self.check_keys(partition, manifest)

    def _check_change(self, broker: int, partition: Replication, manifest: PartitionManifest) -> None:
        name = str(partition.name)
        assert partition.leaders.get(manifest.leader_epoch) == broker, f"{name}: {broker} never led"
        if manifest.leader_epoch == partition.leader_epoch:
            self.check_keys(partition, manifest)

    def archived_records(self, partition: Replication, manifest: PartitionManifest) -> list[Record]:
        """Return what the objects of the archive hold."""
        found: list[Record] = []
        for segment in manifest.segments:
            data = self._object(data_key(manifest.partition, segment))
            assert data is not None, f"{partition.name}: the object of {segment} is not in the bucket"
            found += records_in(data)
        return found

    def check_keys(self, partition: Replication, manifest: PartitionManifest) -> None:
        """
        See that a reader has the latest value of each key, and none of a deleted one.

        An archive that still has records of a lineage that an election ended is not judged: its leader cuts
        it back first.
        """
        log = partition.log
        assert isinstance(log, CleanedReplica)
        name, archived = str(partition.name), self.archived_records(partition, manifest)
        written = {one.offset: one for one in records_of(log.written)}
        if any(written.get(one.offset) != one for one in archived):
            return
        self.views += 1
        wanted = latest_records(written.values())
        found = latest_records([*archived, *log.records_on_disk(manifest.next_offset)])
        for key in wanted.keys() - self.unsure:
            value, there = wanted[key].value, found.get(key)
            has = None if there is None else there.value
            assert value == has, f"{name}: {key!r} is {value!r} at {wanted[key].offset}, and reads as {there}"

    def expect_converged(self, partition: Replication) -> None:
        """All that is closed and stable is durable, and every key reads as it was written."""
        manifest, log, views = self.manifest_of(partition), partition.log, self.views
        assert manifest is not None, f"{partition.name}: nothing is archived"
        closed = [one for one in log.bases_on_disk if one <= log.last_stable_offset]
        assert manifest.next_offset >= closed[-1], (
            f"{partition.name}: {manifest.next_offset}, not {closed[-1]}"
        )
        self.check_keys(partition, manifest)
        assert self.views > views, f"{partition.name}: the archive has records that the leader never had"


class Compacted(Cluster):
    """Everything of one seed. Call `run` once, on a virtual loop."""

    promises: CompactedPromises
    event_count = 50

    def __init__(self, seed: int, root: Path) -> None:
        super().__init__(seed, root, brokers=2 + seed % 2, partitions=1)
        self.has_pins = seed % 2 == 1
        self._file_bytes = self.random.choice([200, 600, 2000])
        self._tombstone_rate = self.random.choice([0.2, 0.5])

    def _promises(self) -> CompactedPromises:
        return CompactedPromises(self.store, self.partitions)

    def _partition(self, number: int, brokers: int) -> Replication:
        journal: dict[int, set[bytes]] = {}
        return Replication(
            [CleanedReplica(*self.directories(broker), number, journal) for broker in range(brokers)]
        )

    def broker_over(self, wire: ClusterWire, number: int) -> CompactedBroker:
        """Return a broker as the daemon beside it reaches it."""
        return CompactedBroker(
            number, self.partitions, wire, on_trim=self.on_trim, elects_uncleanly=self.elects_uncleanly
        )

    def jobs(self, *arguments: object) -> Sequence[HousekeepingJob]:
        """Return the jobs of housekeeping that run in a daemon."""
        return self._reuploads(*arguments)

    def _reuploads(
        self, _: Config, archive: Archive, reconciler: Reconciler, __: str, metrics: Metrics
    ) -> Sequence[HousekeepingJob]:
        return [reupload_job(metrics, archive.remote_log, reconciler=reconciler, now_ms=archive.clock)]

    def _chances(self) -> dict[Callable[[Replication], Awaitable[None] | None], int]:
        return {
            self._append: 24,
            self._roll: 16,
            self._fetch: 24,
            self._hear: 6,
            self._clean: 16,
            self._wait_long: 4,
            self._hold_trims: 5,
            self._delete_what_was_trimmed: 3,
            self._drop_out: 3 if self.elects_uncleanly else 1,
            self._elect: 4,
            self._elect_uncleanly: 3 if self.elects_uncleanly else 0,
            self._crash: 3,
            self._outage: 3,
            self._freeze: 3,
        }

    def _append(self, partition: Replication) -> None:
        """Write some keys, and delete some."""
        random = self.random
        for _ in range(random.randint(1, 3)):
            keys = random.choices(KEYS, k=random.randint(1, 3))
            partition.log.append(
                *(
                    None if random.random() < self._tombstone_rate else b"%d" % random.randrange(10**9)
                    for _ in keys
                ),
                keys=keys,
            )
        partition.advance()

    def _clean(self, partition: Replication) -> None:
        """Let the cleaners of some brokers run."""
        for replica in partition.replicas:
            if self.random.random() < 0.7:
                self._clean_replica(replica)

    def _clean_replica(self, replica: object) -> None:
        assert isinstance(replica, CleanedReplica)
        replica.clean(delete_retention_seconds=DELETE_RETENTION_SECONDS, file_bytes=self._file_bytes)

    async def _wait_long(self, _: Replication) -> None:
        """Let time pass, so that cleaners may drop tombstones."""
        await asyncio.sleep(self.random.uniform(0.3, 1.2) * DELETE_RETENTION_SECONDS)

    def _hold_trims(self, _: Replication) -> None:
        """
        Let brokers take no DeleteRecords for a while.

        Daemons trim a compacted topic as soon as it is durable. What is archived and not trimmed is there for
        the cleaners then, and for re-uploads.
        """
        for node in self.nodes:
            node.broker_wire.refuses_writes = True
            seconds = self.random.uniform(0.5, 3) * DELETE_RETENTION_SECONDS
            asyncio.get_running_loop().call_later(seconds, node.broker_wire.restore)

    async def _delete_what_was_trimmed(self, partition: Replication) -> None:
        """
        Let keys be trimmed, then deleted; the cleaner drops the tombstones from a log without those keys.

        Only the archive has what the tombstones hide, unless the trim came too late.
        """
        random, log = self.random, partition.log
        keys = random.sample(KEYS, random.randint(1, 3))
        log.append(*(b"%d" % random.randrange(10**9) for _ in keys), keys=keys)
        log.roll()
        self._fetch_all(partition)
        await asyncio.sleep(random.choice([4.0, 12.0]))
        if partition.log is not log:
            return
        self._hold_trims(partition)
        log.append(*(None for _ in keys), keys=keys)
        self._append(partition)
        if random.random() < 0.5:
            log.roll()
            self._append(partition)
        log.roll()
        self._fetch_all(partition)
        await asyncio.sleep(random.choice([4.0, 12.0]))
        self._clean(partition)
        await asyncio.sleep(random.uniform(0.9, 1.2) * DELETE_RETENTION_SECONDS)
        self._clean(partition)
        await asyncio.sleep(12.0)

    def _elect(self, partition: Replication) -> None:
        super()._elect(partition)
        self._note_lost(partition)

    def _elect_uncleanly(self, partition: Replication) -> None:
        super()._elect_uncleanly(partition)
        self._note_lost(partition)

    def _note_lost(self, partition: Replication) -> None:
        assert isinstance(partition.log, CleanedReplica)
        lost = partition.log.lost_keys()
        assert self.elects_uncleanly or not lost, f"the broker's model lost {lost}"
        self.promises.unsure |= lost

    async def _settle(self) -> None:
        """Clean everything once faults have ended, until no tombstone has to stay, and look again."""
        await super()._settle()
        for _ in range(3):
            for partition in self.partitions:
                for replica in partition.replicas:
                    self._clean_replica(replica)
            await self._converge()
            await asyncio.sleep(DELETE_RETENTION_SECONDS)
        await self._converge()
        for partition in self.partitions:
            if partition.name not in self._held:
                await self._expect_read_once(partition)

    async def _expect_read_once(self, partition: Replication) -> None:
        """A reader of the archive has what its objects hold, and a scrub finds nothing."""
        manifest = self.promises.manifest_of(partition)
        assert manifest is not None
        archive = archive_in(self.store)
        found = await values_in(archive, manifest)
        wanted = {one.offset: one.value for one in self.promises.archived_records(partition, manifest)}
        assert found == wanted, partition.name
        assert not manifest.gaps, f"{partition.name}: {manifest.gaps}"
        await expect_clean(archive, manifest.partition)
