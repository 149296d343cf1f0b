"""
What operators and users do in a swarm, and unclean elections: each with a topic of its own, checked at once.

What is expected is exact: after an unclean election the log of the new leader, and after a deletion what was
not deleted. A reader through the gateways that begins at the start has to see that and nothing else.
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import RecordsToDelete

from tests.e2e.archives import archived_manifest, archived_manifests
from tests.support.cluster import cluster_admin, start_broker
from tests.support.daemon import run_well
from tests.support.kafka import admin_of
from tests.swarm.ending import in_thread
from tests.swarm.faults import NODES, OPERATED, Fault
from tests.swarm.sharing import SHARED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tests.support.daemon import Daemon

_VALUE_BYTES = 100_000
_SEGMENT_RECORDS = 11
"""A segment of 1 MiB has no more records than this."""
_CONFIGS = {"segment.bytes": str(1 << 20), "retention.ms": "-1", "file.delete.delay.ms": "100"}
_PAUSED_ROUNDS = 3
_KEPT_BYTES = 3 << 20
_PATIENCE_SECONDS = 90
_REPLACED = "archive's tail replaced: another leader's log took its place"
_LARGE = {"max_batch_size": 200_000}


def _values(count: int, *, first: int) -> list[bytes]:
    return [b"%d:" % number + bytes(_VALUE_BYTES) for number in range(first, first + count)]


class Operation(Fault):
    """One change to a topic of its own. `inject` makes it and checks what comes of it."""

    configs: ClassVar[Mapping[str, str]] = {}

    @property
    def topic(self) -> str:
        """Return the name of the topic."""
        return f"{OPERATED}{self.step.number}"

    def replicas(self) -> list[int]:
        """Return the nodes of the only partition, the leader first."""
        return list(NODES)

    async def inject(self) -> None:
        """Create the topic, and do it."""
        self._proof = ""
        await self.create()
        self._proof = await self.happen()

    async def create(self) -> None:
        """Create the topic; return when all replicas are in sync."""
        cluster = self.parts.cluster
        await cluster.create_topic(
            self.topic, replicas=[self.replicas()], configs={**_CONFIGS, **self.configs}
        )
        async with cluster_admin(cluster) as admin:
            await admin.until_in_sync(self.topic)

    @abstractmethod
    async def happen(self) -> str:
        """Do it, and return the proof."""

    async def proof(self) -> str:
        """Say what was done."""
        return self._proof

    async def heal(self) -> None:
        """Delete the topic. A topic that was not created fails here, and an earlier error says why."""
        await self.parts.cluster.delete_topic(self.topic)

    async def produce(self, values: list[bytes]) -> None:
        """Write to the topic."""
        await self.parts.cluster.produce(self.topic, values, **_LARGE)

    async def until_archived(self, count: int) -> Daemon:
        """Return the daemon that has archived the segments of *count* records, but for the active one."""
        wanted = count - _SEGMENT_RECORDS
        return await in_thread(
            self.parts.daemons.until_one,
            lambda daemon: (daemon.next_offset(self.topic) or 0) >= wanted,
            f"{wanted} records of {self.topic} are archived",
        )

    async def check_read(self, expected: Sequence[tuple[int, bytes]]) -> None:
        """Read the topic from its start through the gateways, and note what is not as expected."""
        partition = TopicPartition(self.topic, 0)
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self.parts.gateways, enable_auto_commit=False, auto_offset_reset="none"
        )
        await consumer.start()
        try:
            consumer.assign([partition])
            start = (await consumer.beginning_offsets([partition]))[partition]
            end = (await consumer.end_offsets([partition]))[partition]
            consumer.seek(partition, start)
            found = []
            while await consumer.position(partition) < end:
                record = await consumer.getone()
                found.append((record.offset, record.value))
        finally:
            await consumer.stop()
        if found != list(expected):
            told = [[(offset, value[:8]) for offset, value in each] for each in (found, expected)]
            self.parts.broken.append(f"{self.step.kind}: {self.topic} has {told[0]} in place of {told[1]}")


class UncleanElection(Operation):
    """A replica leads that lacks what its leader alone has acknowledged and archived."""

    is_slow = True

    configs: ClassVar = {"unclean.leader.election.enable": "true", "min.insync.replicas": "1"}

    def replicas(self) -> list[int]:
        """Place the topic on two nodes."""
        return [self.step.node_id, self.step.node_id % len(NODES) + 1]

    async def happen(self) -> str:
        """Write while the second replica is away, and let it lead while the first one is."""
        cluster, daemons = self.parts.cluster, self.parts.daemons
        first, second = (cluster.brokers[node_id - 1] for node_id in self.replicas())
        shared, lost, new = _values(25, first=0), _values(30, first=100), _values(40, first=200)
        await self.produce(shared)
        await second.stop()
        await self.produce(lost)
        await self.until_archived(len(shared + lost))
        await first.kill()
        second.launch()
        others = [one for one in NODES if one != first.node_id]
        async with cluster_admin(cluster, *others) as admin:
            await admin.until_led_by(self.topic, second.node_id)
            # The old leader comes back as a follower: a second unclean election would give its log back.
            await admin.configure(self.topic, {"unclean.leader.election.enable": "false"})
        daemon = daemons[second.node_id]
        await in_thread(
            daemon.until, lambda: daemon.events(_REPLACED, topic=self.topic), "the archive's tail is replaced"
        )
        await start_broker(cluster, first)
        await second.wait_until_ready(len(NODES))
        await self.produce(new)
        await self.until_archived(len(shared + new))
        await self.check_read(list(enumerate(shared + new)))
        told = [
            (one["base_offset"], one["last_offset"])
            for one in await in_thread(daemons.events, _REPLACED, topic=self.topic)
        ]
        if len(told) != 1 or not told[0][0] <= len(shared) <= told[0][1]:
            self.parts.broken.append(
                f"{self.step.kind}: the logs of {self.topic} part at {len(shared)}, and {told} is reported"
            )
        return f"node {second.node_id} led; its daemon replaced offsets {told}"

    async def heal(self) -> None:
        """Start what does not run, and delete the topic."""
        for node in self.parts.cluster.brokers:
            if node.process is None:
                node.launch()
        for node in self.parts.cluster.brokers:
            await node.wait_until_ready(len(NODES))
        await super().heal()


class DeletesRecords(Operation):
    """A user deletes records through a gateway, up to the middle of a segment."""

    async def happen(self) -> str:
        """Delete, and read what is left."""
        values = _values(55, first=0)
        await self.produce(values)
        await self.until_archived(len(values))
        # The first of these is often trimmed from the local log already, and the second one is there.
        before = 15 if self.step.number % 2 else 37
        async with admin_of(self.parts.gateways) as admin:
            await admin.delete_records({TopicPartition(self.topic, 0): RecordsToDelete(before)})
        await self.check_read(list(enumerate(values))[before:])
        return f"offsets below {before} are gone"


class RecreatesTopic(Operation):
    """A topic is deleted, and one of the same name is created."""

    is_slow = True

    async def happen(self) -> str:
        """Delete the archived topic, create it again, and read only what the second one has."""
        await self.produce(_values(35, first=0))
        await self.until_archived(35)
        await self.parts.cluster.delete_topic(self.topic)
        await self.create()
        # The second archive has to reach further than the first one did.
        new = _values(55, first=100)
        await self.produce(new)
        await self.until_archived(len(new))
        await self.check_read(list(enumerate(new)))
        ids = await in_thread(archived_manifests, self.parts.store.objects, self.topic)
        return f"topics {sorted(ids)}" if len(ids) == 2 else ""


class Pauses(Operation):
    """An operator pauses a topic, and resumes it."""

    is_slow = True

    async def happen(self) -> str:
        """Pause, write, check that the archive does not grow, resume, and check that it grows."""
        first, second = _values(25, first=0), _values(30, first=25)
        await self.produce(first)
        daemon = await self.until_archived(len(first))
        await self._topic("pause")
        await in_thread(
            daemon.until, lambda: self.topic in daemon.status()["paused_topics"], "the topic is paused"
        )
        before = await self._end()
        await self.produce(second)
        await in_thread(daemon.until_rounds, _PAUSED_ROUNDS)
        after = await self._end()
        await self._topic("resume")
        await self.until_archived(len(first + second))
        await self.check_read(list(enumerate(first + second)))
        if after != before:
            self.parts.broken.append(
                f"{self.step.kind}: {self.topic} went from {before} to {after} while it was paused"
            )
        return f"the archive stayed at {after} for {_PAUSED_ROUNDS} rounds, and reached {await self._end()}"

    async def _end(self) -> int:
        return (await in_thread(archived_manifest, self.parts.store.objects, self.topic)).next_offset

    async def _topic(self, verb: str) -> None:
        await in_thread(run_well, "topic", verb, self.topic, "--config", str(self.parts.daemons.config()))


class ChangesRetention(Operation):
    """An operator bounds the bytes of a topic, and then takes the bound away."""

    is_slow = True

    async def happen(self) -> str:
        """Bound a topic that is archived, and read what is left; what comes afterwards stays."""
        values, more = _values(55, first=0), _values(25, first=55)
        await self.produce(values)
        await self.until_archived(len(values))
        await self._keep(_KEPT_BYTES)
        start = await self._until_start(lambda at: at > 0)
        await self._keep(-1)
        await self.produce(more)
        await self.until_archived(len(values + more))
        # Two observations had to agree, so the start may have gone on until the bound was away.
        start = await self._until_start(lambda at: at >= start)
        kept = (len(values) - start) * _VALUE_BYTES
        if not _KEPT_BYTES - _SEGMENT_RECORDS * _VALUE_BYTES <= kept <= _KEPT_BYTES:
            self.parts.broken.append(
                f"{self.step.kind}: {self.topic} was to keep {_KEPT_BYTES} bytes, and begins at {start} of "
                f"{len(values)} records"
            )
        await self.check_read(list(enumerate(values + more))[start:])
        return f"the topic begins at {start}"

    async def _keep(self, kept_bytes: int) -> None:
        async with cluster_admin(self.parts.cluster) as admin:
            await admin.configure(self.topic, {"retention.bytes": str(kept_bytes)})

    async def _until_start(self, is_so: Callable[[int], bool]) -> int:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            start = (await in_thread(archived_manifest, self.parts.store.objects, self.topic)).start_offset
            if is_so(start):
                return start
            assert time.monotonic() < deadline, f"the archive of {self.topic} still begins at {start}"
            await asyncio.sleep(0.2)


class ShareGroupHangs(Fault):
    """A share group's consumers are stopped (SIGSTOP) until a trim has to wait for them."""

    is_slow = True
    archives_meanwhile = True

    async def inject(self) -> None:
        """Stop them."""
        self.parts.share_group.pause()

    def _held_bytes(self) -> float:
        running = [self.parts.daemons[one] for one in NODES]
        return sum(
            one.metric("tieringd_trim_held_by_share_groups_bytes", topic=SHARED) or 0 for one in running
        )

    async def proof(self) -> str:
        """Ask the daemons what they leave on the broker for the group."""
        held = await in_thread(self._held_bytes)
        return f"a trim left {held:.0f} bytes to the group" if held else ""

    async def heal(self) -> None:
        """Let them go on."""
        self.parts.share_group.resume()


OPERATIONS: dict[str, type[Fault]] = {
    "a leader is elected uncleanly": UncleanElection,
    "a user deletes records": DeletesRecords,
    "a topic is deleted and created again": RecreatesTopic,
    "an operator pauses and resumes a topic": Pauses,
    "an operator changes retention": ChangesRetention,
    "a share group hangs": ShareGroupHangs,
}
