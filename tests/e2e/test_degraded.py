"""Degraded mode on two real brokers: the disk of one of them fills up, and has room again."""

# Long: two brokers with disks of their own, which are filled and emptied.

from __future__ import annotations

import asyncio
import json
import os
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.e2e.conftest import BUCKET
from tests.support.cluster import DaemonsBeside, cluster_admin
from tests.support.kafka import KafkaCluster
from tests.support.single_produce import throttle_ms_of
from tests.support.small_disks import small_disk_at
from tieringd.broker.kafka import KafkaBroker, KafkaSettings
from tieringd.formats.object_keys import client_quotas_key, disk_state_key
from tieringd.model.disk_state import EVERY_PRODUCER, PRODUCER_BYTE_RATE, quota_entity

if TYPE_CHECKING:
    from pathlib import Path

_PATIENCE_SECONDS = 180
_POLL_SECONDS = 0.1
_MIB = 1 << 20
_DISK_BYTES = 160 * _MIB
_MIN_FREE_BYTES = 64 * _MIB
_LEFT_WHEN_FULL_BYTES = 40 * _MIB
_BALLAST_BYTES = 8 * _MIB
_RATE = 65_536
_BURST = bytes(950_000)
"""More than the rate allows in the ten seconds over which Kafka averages."""
_SETTINGS = {
    "storage_min_free_bytes": _MIN_FREE_BYTES,
    "storage_space_alert_free_threshold_percent": 0,
    "storage_degraded_producer_byte_rate": _RATE,
}
ANYBODY = quota_entity(user="ANONYMOUS")
"""Every client of a listener without passwords."""
BEFORE = {ANYBODY: {PRODUCER_BYTE_RATE: 50_000_000.0, "consumer_byte_rate": 70_000_000.0}}
LOWERED = {
    ANYBODY: {PRODUCER_BYTE_RATE: float(_RATE), "consumer_byte_rate": 70_000_000.0},
    EVERY_PRODUCER: {PRODUCER_BYTE_RATE: float(_RATE)},
}
IN_SYNC_OF_TWO = {"min.insync.replicas": "2"}
"""A record is acknowledged only when both brokers have it."""


class Disk:
    """The filesystem of broker 1, which an unrelated file fills."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._filler = root / "filler"

    @property
    def free_bytes(self) -> int:
        found = os.statvfs(self.root)
        return found.f_bavail * found.f_frsize

    def fill(self) -> None:
        self._filler.write_bytes(bytes(self.free_bytes - _LEFT_WHEN_FULL_BYTES))

    def empty(self) -> None:
        self._filler.unlink(missing_ok=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def disk_and_pair(tmp_path_factory):
    """Give two running brokers, and the small disk that the first of them has for itself."""
    root = tmp_path_factory.mktemp("pair")
    with small_disk_at(root / "broker-1", _DISK_BYTES) as mounted:
        pair = await KafkaCluster.start(root, brokers=2, heap_mib=384)
        try:
            yield Disk(mounted), pair
        finally:
            # Two controllers that stop together wait a minute for each other.
            await pair.kill()


@pytest.fixture
def disk(disk_and_pair):
    """Give the disk of broker 1, and let it be empty afterwards."""
    yield disk_and_pair[0]
    disk_and_pair[0].empty()


@pytest.fixture
def pair(disk_and_pair):
    """Give the two brokers."""
    return disk_and_pair[1]


@pytest.fixture
def daemons(pair, seaweedfs, prefix, tmp_path):
    """Give a daemon for each broker; none runs yet."""
    with DaemonsBeside(pair, seaweedfs, tmp_path, bucket=BUCKET, prefix=prefix, changes=_SETTINGS) as daemons:
        yield daemons


@pytest.fixture
async def operators_quotas(pair):
    """Let an operator have set quotas of its own, and take all away in the end."""
    async with asked(pair, 1) as broker:
        await broker.alter_client_quotas(BEFORE)
        yield
        left = await broker.client_quotas()
        await broker.alter_client_quotas({entity: dict.fromkeys(values) for entity, values in left.items()})


@asynccontextmanager
async def asked(pair, node_id):
    address = pair.brokers[node_id - 1].bootstrap
    broker = KafkaBroker(KafkaSettings((address,), node_id=node_id, request_timeout_seconds=60))
    try:
        yield broker
    finally:
        await broker.close()


async def quotas(pair, node_id):
    """Return every quota that a broker goes by."""
    async with asked(pair, node_id) as broker:
        return await broker.client_quotas()


async def until_quotas(pair, expected):
    """Return when both brokers go by these quotas: each learns of a change a moment after it was made."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    for node_id in (1, 2):
        async with asked(pair, node_id) as broker:
            while (seen := await broker.client_quotas()) != expected:
                assert time.monotonic() < deadline, f"broker {node_id} stays at {seen}, not {expected}"
                await asyncio.sleep(_POLL_SECONDS)


def until_degraded(daemons, *, by):
    for node_id in (1, 2):
        daemon = daemons[node_id]
        daemon.until(
            lambda daemon=daemon: daemon.metric("tieringd_degraded_brokers") == by,
            f"daemon {node_id} knows of {by} degraded brokers",
        )


def published(objects, pair, node_id):
    """Return what a daemon has told its peers."""
    return json.loads(objects.read(disk_state_key(pair.cluster_id, node_id)))["state"]


async def until_throttled(pair, daemons):
    """Return when both daemons know, and both brokers hold producers back."""
    until_degraded(daemons, by=1)
    await until_quotas(pair, LOWERED)


# Long: a disk fills, and producers wait for quotas.
@pytest.mark.usefixtures("operators_quotas")
async def test_full_disk_of_one_broker_holds_producers_of_both_back_until_it_has_room(
    pair, disk, daemons, objects, topic
):
    """Clients wait at the broker that has room as well, replicas go on, and then all is as it was."""
    await pair.create_topic(topic, replicas=[[2, 1]], configs=IN_SYNC_OF_TWO)
    leader = pair.brokers[1]
    daemons.launch()
    until_degraded(daemons, by=0)
    assert await throttle_ms_of(leader, topic, _BURST) == 0

    disk.fill()
    await until_throttled(pair, daemons)
    assert [published(objects, pair, node_id) for node_id in (1, 2)] == ["degraded", "ok"]
    assert daemons[1].metric("redpanda_storage_disk_free_space_alert") == 2
    assert daemons[2].metric("redpanda_storage_disk_free_space_alert") == 0
    assert await throttle_ms_of(leader, topic, _BURST) > 0
    async with cluster_admin(pair) as admin:
        await admin.until_in_sync(topic)
    daemons[2].until(
        lambda: daemons[2].metric("tieringd_producers_held_back") == 1, "the other daemon shows it as well"
    )

    disk.empty()
    until_degraded(daemons, by=0)
    await until_quotas(pair, BEFORE)
    assert published(objects, pair, 1) == "ok"
    assert await throttle_ms_of(leader, topic, _BURST) == 0
    for node_id in (1, 2):
        daemons[node_id].until(
            lambda node_id=node_id: daemons[node_id].metric("tieringd_producers_held_back") == 0,
            "no daemon shows producers as held back",
        )


@pytest.mark.usefixtures("operators_quotas")
async def test_daemons_that_were_killed_while_producers_were_held_back_let_them_go(
    pair, disk, daemons, objects, topic
):
    """The record of lowered quotas is in the bucket, so a new daemon on a disk with room restores them."""
    await pair.create_topic(topic, replicas=[[1]])
    daemons.launch()
    disk.fill()
    await until_throttled(pair, daemons)
    daemons.kill(1)
    daemons.kill(2)
    disk.empty()
    assert [await quotas(pair, node_id) for node_id in (1, 2)] == [LOWERED, LOWERED]
    assert json.loads(objects.read(client_quotas_key(pair.cluster_id)))["phase"] == "lowered"

    daemons.launch()
    until_degraded(daemons, by=0)
    await until_quotas(pair, BEFORE)
    assert await throttle_ms_of(pair.broker, topic, _BURST) == 0


# Long: a disk fills, and producers wait for quotas.
@pytest.mark.usefixtures("operators_quotas")
async def test_quota_that_an_operator_sets_while_producers_are_held_back_stays(pair, disk, daemons):
    """Only what still is as the daemon made it is put back."""
    daemons.launch()
    disk.fill()
    await until_throttled(pair, daemons)
    operators = {ANYBODY: {PRODUCER_BYTE_RATE: 1000.0, "consumer_byte_rate": 70_000_000.0}}
    async with asked(pair, 1) as broker:
        await broker.alter_client_quotas({ANYBODY: {PRODUCER_BYTE_RATE: 1000.0}})
    # The daemon of the other broker may be the one that puts quotas back, and asks that broker.
    await until_quotas(pair, LOWERED | operators)
    disk.empty()
    until_degraded(daemons, by=0)
    await until_quotas(pair, operators)


async def test_ballast_goes_when_the_disk_is_degraded_and_comes_back_with_the_room(pair, disk, daemons):
    """The ballast gives its bytes back to the broker's disk, and is made again once the disk has room."""
    path = disk.root / "ballast"
    daemons.change(
        1,
        storage_degraded_action="alert",
        tune_ballast_file=True,
        ballast_file_path=str(path),
        ballast_file_size=_BALLAST_BYTES,
        ballast_release_when_degraded=True,
    )
    daemons.launch(1)
    daemon = daemons[1]
    daemon.until(lambda: daemon.metric("tieringd_ballast_bytes") == _BALLAST_BYTES, "the ballast is made")
    assert path.stat().st_blocks * 512 == _BALLAST_BYTES

    disk.fill()
    daemon.until(lambda: not path.exists(), "the ballast is let go")
    daemon.until(lambda: daemon.metric("tieringd_ballast_bytes") == 0, "the metric says so")
    assert daemon.metric("tieringd_disk_free_space_alert") == 2
    assert disk.free_bytes > _LEFT_WHEN_FULL_BYTES + _BALLAST_BYTES // 2

    disk.empty()
    daemon.until(lambda: daemon.metric("tieringd_ballast_bytes") == _BALLAST_BYTES, "it is made again")
    assert path.stat().st_blocks * 512 == _BALLAST_BYTES
    assert daemon.metric("tieringd_disk_free_space_alert") == 0
