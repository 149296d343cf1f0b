"""Three brokers with producers running throughout: trouble of every kind, and each record once."""

# Long: three brokers, and a minute of producing under faults of every kind.

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as ClientPartition

from tests.e2e.archives import (
    archived_manifest,
    assert_whole,
    base_of_active,
    read_records,
    stored_segments,
)
from tests.e2e.sample_topics import SEGMENTS
from tests.support.cluster import cluster_admin, restart_broker, start_broker
from tests.support.writers import Writers, number_of
from tieringd.formats.record_batch import parse_header

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import ClusterAdmin, DaemonsBeside
    from tests.support.kafka import KafkaCluster
    from tests.support.seaweedfs import SeaweedFS
    from tests.support.writers import Writer

_OUTAGE_SECONDS = 30
_SAFE = SEGMENTS | {"min.insync.replicas": "2"}
_UNSAFE = SEGMENTS | {"unclean.leader.election.enable": "true"}
_PLACES = ([1, 2, 3], [2, 3, 1], [3, 1, 2])
_NODES = (1, 2, 3)


class Storm:
    """One cluster, its daemons, and what is done to them. Blocking waits go to threads where others run."""

    def __init__(
        self, brokers: KafkaCluster, daemons: DaemonsBeside, admin: ClusterAdmin, topic: str
    ) -> None:
        self.brokers = brokers
        self.daemons = daemons
        self.admin = admin
        self.topic = topic

    async def until_all_go_on(self) -> None:
        """Return when every partition's archive has grown once more, and all replicas are in sync."""
        for number in range(len(_PLACES)):
            await self.admin.until_in_sync(self.topic, number=number)
            await self.until_grown(self.topic, number)

    async def until_grown(self, topic: str, number: int = 0) -> None:
        """Return when the leader's daemon has archived more of a partition."""
        begun = await self.until_archived(topic, number, at_least=0)
        await self.until_archived(topic, number, at_least=begun + 1)

    async def until_archived(self, topic: str, number: int = 0, *, at_least: float) -> float:
        """Return when the leader's daemon has archived a partition to *at_least*; return how far it has."""
        async with asyncio.timeout(180):
            while True:
                # Another broker may lead meanwhile: the start of one can fence another on a busy machine.
                state = await self.admin.until(topic, lambda one: one.leader > 0, "it is led", number=number)
                reached = self.daemons[state.leader].next_offset(topic, number)
                if reached is not None and reached >= at_least:
                    return reached
                await asyncio.sleep(0.1)

    async def until_all_is_archived(self, topic: str, number: int = 0) -> None:
        """Return when every closed segment of a partition to which nobody writes is archived."""
        state = await self.admin.until(topic, lambda one: one.leader > 0, "it is led", number=number)
        directory = self.brokers.log_dir(state.leader) / f"{topic}-{number}"
        await self.until_archived(topic, number, at_least=base_of_active(directory))

    async def move_all_leaders(self) -> None:
        """Let every partition be led by its next replica."""
        for number in range(len(_PLACES)):
            state = (await self.admin.partitions(self.topic))[number]
            following = state.replicas[(state.replicas.index(state.leader) + 1) % len(state.replicas)]
            await self.admin.move_leader(self.topic, following, number=number)

    async def restart_every_broker(self, unsafe: str) -> None:
        """Stop and start one broker after the other, each when the last one is in sync again."""
        for node_id in _NODES:
            await restart_broker(self.brokers, node_id)
            for number in range(len(_PLACES)):
                await self.admin.until_in_sync(self.topic, number=number)
            # Else the next stop would already elect a leader uncleanly.
            await self.admin.until_in_sync(unsafe)

    def kill_every_daemon(self) -> None:
        """Kill each daemon as a crash does, and start it again."""
        for node_id in _NODES:
            self.daemons.kill(node_id)
        self.daemons.launch()

    async def freeze_a_leaders_daemon(self) -> None:
        """Freeze a leader's daemon, let another broker lead and archive, and let the daemon go on."""
        leader = (await self.admin.partitions(self.topic))[0].leader
        following = leader % len(_NODES) + 1
        self.daemons[leader].server.pause()
        try:
            await self.admin.move_leader(self.topic, following)
            await self.until_grown(self.topic)
        finally:
            self.daemons[leader].server.resume()

    async def take_the_store_away(self, store: SeaweedFS) -> None:
        """Freeze the store for half a minute; daemons and a broker are killed, and leaders move meanwhile."""
        began = time.monotonic()
        store.pause()
        try:
            self.kill_every_daemon()
            await self.move_all_leaders()
            await restart_broker(self.brokers, 3, kill=True)
            # The outage is this long, whatever else has happened in it.
            await asyncio.sleep(max(0.0, began + _OUTAGE_SECONDS - time.monotonic()))
        finally:
            store.resume()

    async def elect_uncleanly(self, topic: str) -> int:
        """Elect a leader that lacks archived records; return the first offset that it lacks."""
        old_leader, new_leader = self.brokers.brokers[0], self.brokers.brokers[1]
        await self.admin.until_in_sync(topic)
        await new_leader.stop()
        first_lacked = end_of(self.brokers.log_dir(new_leader.node_id) / f"{topic}-0")
        await self.until_archived(topic, at_least=first_lacked + 50)
        await old_leader.kill()
        new_leader.launch()
        await self.admin.until_led_by(topic, new_leader.node_id)
        # The old leader comes back as a follower. On a busy machine the start of a broker can fence another
        # one, and a second unclean election would give the old leader's log back.
        await self.admin.configure(topic, {"unclean.leader.election.enable": "false"})
        await start_broker(self.brokers, old_leader)
        await new_leader.wait_until_ready(len(_NODES))
        await self.admin.until_in_sync(topic)
        return first_lacked


def end_of(directory: Path) -> int:
    """Return the offset after the last record of a partition whose broker is stopped."""
    path = directory / f"{base_of_active(directory):020d}.log"
    data, position, end = path.read_bytes(), 0, int(path.stem)
    while position < len(data):
        header = parse_header(data, position)
        position, end = position + header.size_bytes, header.next_offset
    return end


async def read_all(
    brokers: KafkaCluster, daemons: DaemonsBeside, objects, topic: str, number: int
) -> list[tuple[int, bytes]]:
    """Read a partition as a consumer of both tiers would: the archive to its end, then the brokers."""
    found = [(one.offset, one.value) for one in read_records(daemons.config(), topic, number=number)]
    partition = ClientPartition(topic, number)
    consumer = AIOKafkaConsumer(bootstrap_servers=brokers.bootstrap, enable_auto_commit=False)
    await consumer.start()
    try:
        consumer.assign([partition])
        consumer.seek(partition, archived_manifest(objects, topic, number).next_offset)
        end_offset = (await consumer.end_offsets([partition]))[partition]
        while await consumer.position(partition) < end_offset:
            record = await consumer.getone()
            found.append((record.offset, record.value))
        first_local = (await consumer.beginning_offsets([partition]))[partition]
        assert first_local > 0, "nothing was trimmed, so the archive was not needed"
    finally:
        await consumer.stop()
    return found


def assert_each_once(found: list[tuple[int, bytes]]) -> None:
    """Assert that no offset and no value is there twice, and that offsets ascend without a hole."""
    assert [offset for offset, _ in found] == list(range(len(found)))
    assert len({value for _, value in found}) == len(found)


def lost(writer: Writer, found: list[tuple[int, bytes]]) -> list[tuple[int, int]]:
    """Return offset and number of the acknowledged records that are not where they were put."""
    values = dict(found)
    return [
        (offset, number)
        for offset, number in writer.acknowledged
        if values.get(offset) != writer.value(number)
    ]


# Long: a minute of producing under faults of every kind, then all is read.
@pytest.mark.timeout(1800)
async def test_every_acknowledged_record_is_read_once_after_a_storm(
    brokers, seaweedfs, daemons_of, objects, topic
):
    """Archive and local log hold each record once, whatever happens to brokers, daemons and store."""
    unsafe = f"{topic}-unsafe"
    await brokers.create_topic(topic, replicas=_PLACES, configs=_SAFE)
    await brokers.create_topic(unsafe, replicas=[[1, 2]], configs=_UNSAFE)
    daemons = daemons_of(
        topics={
            name: {"redpanda.remote.write": True, "retention.local.target.bytes": 2 << 20}
            for name in (topic, unsafe)
        }
    )
    daemons.launch()
    async with cluster_admin(brokers) as admin:
        storm = Storm(brokers, daemons, admin, topic)
        with Writers(brokers, {topic: len(_PLACES), unsafe: 1}) as writers:
            await storm.until_all_go_on()
            await storm.move_all_leaders()
            await storm.until_all_go_on()
            await storm.restart_every_broker(unsafe)
            await storm.until_all_go_on()
            await storm.freeze_a_leaders_daemon()
            await storm.take_the_store_away(seaweedfs)
            await storm.until_all_go_on()
            storm.kill_every_daemon()
            first_lost = await storm.elect_uncleanly(unsafe)
            await storm.until_all_go_on()
            await storm.until_grown(unsafe)
            writers.stop()

        # An archive that grows between the two parts of a reading would leave out what it grew by.
        for name, count in ((topic, len(_PLACES)), (unsafe, 1)):
            for number in range(count):
                await storm.until_all_is_archived(name, number)
        for number in range(len(_PLACES)):
            found = await read_all(brokers, daemons, objects, topic, number)
            writer = writers.writer(topic, number)
            assert_each_once(found)
            assert len(writer.acknowledged) > 300
            assert lost(writer, found) == []
        found = await read_all(brokers, daemons, objects, unsafe, 0)

    assert_each_once(found)
    missing = lost(writers.writer(unsafe), found)
    survivors = [number_of(value) for offset, value in found if offset >= first_lost]
    # Only what the old leader alone had is missing: nothing below, and nothing written afterwards.
    replaced_tails = daemons.events("archive's tail replaced: another leader's log took its place")
    assert min(offset for offset, _ in missing) == first_lost, replaced_tails
    assert max(number for _, number in missing) < min(survivors)
    (replaced,) = replaced_tails
    assert replaced["topic"] == unsafe
    assert replaced["base_offset"] <= first_lost <= replaced["last_offset"]

    for name, count in ((topic, len(_PLACES)), (unsafe, 1)):
        for number in range(count):
            manifest = archived_manifest(objects, name, number)
            assert (manifest.start_offset, manifest.gaps, manifest.faults()) == (0, (), ())
            assert None not in stored_segments(objects, manifest).values()
    assert not daemons.events("local segment differs from its stored copy; it is not trimmed")
    assert not daemons.events("archiver failed; starting it anew")
    assert_whole(daemons.config())
