"""Degraded mode: several daemons of one cluster, on a virtual clock, with a bucket and brokers that fail."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from random import Random

import pytest
from structlog.testing import capture_logs

from tests.fakes.archive import Clock
from tests.fakes.broker import FakeBroker
from tests.fakes.memory_store import MemoryStore
from tests.fakes.store import DistantStore
from tests.fakes.virtual_loop import run_virtual
from tests.fakes.wire import UnreliableWire
from tieringd.errors import BrokerDenied, BrokerUnavailable, PreconditionFailed, StorageUnavailable
from tieringd.metrics import Metrics
from tieringd.model.disk_state import EVERY_PRODUCER, PRODUCER_BYTE_RATE, DiskState, quota_entity
from tieringd.space.degraded_mode import (
    INTERVAL_SECONDS,
    STALE_SECONDS,
    TURN_SECONDS,
    DegradedMode,
    DegradedParts,
    DegradedSettings,
    DiskStateBoard,
)
from tieringd.space.producer_brake import ProducerBrake

RATE = 1000
ALICE = quota_entity(user="alice")
BEFORE = {ALICE: {PRODUCER_BYTE_RATE: 5e6}}
LOWERED = {ALICE: {PRODUCER_BYTE_RATE: 1000.0}, EVERY_PRODUCER: {PRODUCER_BYTE_RATE: 1000.0}}
OK, LOW, DEGRADED = DiskState


class Node:
    """One broker with its daemon: its disk is as a test says."""

    def __init__(self, node_id, store, quotas, *, wire=None, holds_back=True, refuses=False, ahead_seconds=0):
        self.node_id = node_id
        self.ahead_seconds = ahead_seconds
        self.state = OK
        self.metrics = Metrics()
        self.broker = FakeBroker(wire=wire)
        self.broker.quotas, self.broker.node = quotas, node_id
        self.store = DistantStore(store, wire) if wire else store
        self.mode = DegradedMode(
            self.connect,
            own_state=lambda: self.state,
            settings=DegradedSettings(holds_back=holds_back, rate=RATE, refuses=refuses),
            metrics=self.metrics,
        )

    async def connect(self):
        cluster, node_id = await self.broker.cluster_id(), await self.broker.node_id()
        loop, start_ms = asyncio.get_running_loop(), Clock()()

        def now_ms():
            return start_ms + int((loop.time() + self.ahead_seconds) * 1000)

        board = DiskStateBoard(self.store, cluster=cluster, node_id=node_id, now_ms=now_ms, now=loop.time)
        brake = ProducerBrake(self.store, self.broker, cluster=cluster, node_id=node_id, now_ms=now_ms)
        return DegradedParts(board, brake)

    def become(self, state):
        self.state = state
        self.mode.hint()

    def shown(self, name):
        return self.metrics.registry.get_sample_value(f"tieringd_{name}")


@asynccontextmanager
async def running(*nodes):
    tasks = [asyncio.create_task(node.mode.run()) for node in nodes]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def quotas():
    return {entity: dict(values) for entity, values in BEFORE.items()}


@pytest.fixture
def nodes(store, quotas):
    return [Node(node_id, store, quotas) for node_id in (1, 2, 3)]


@pytest.mark.looptime
async def test_one_full_disk_holds_producers_of_the_whole_cluster_back(nodes, quotas):
    """
    Quotas are lowered within a moment of the disk's change, and put back as fast.

    All see it in a round.
    """
    async with running(*nodes):
        await asyncio.sleep(1)
        assert [node.shown("degraded_brokers") for node in nodes] == [0, 0, 0]
        nodes[1].become(DEGRADED)
        await asyncio.sleep(0.1)
        assert quotas == LOWERED
        await asyncio.sleep(INTERVAL_SECONDS)
        assert [node.shown("degraded_brokers") for node in nodes] == [1, 1, 1]
        assert [node.shown("producers_held_back") for node in nodes] == [1, 1, 1]
        nodes[1].become(LOW)
        await asyncio.sleep(0.1)
        assert quotas == BEFORE
        await asyncio.sleep(INTERVAL_SECONDS)
        assert [node.shown("producers_held_back") for node in nodes] == [0, 0, 0]
        assert [node.shown("degraded_brokers") for node in nodes] == [0, 0, 0]


@pytest.mark.looptime
async def test_producers_are_held_back_until_the_last_disk_has_room(nodes, quotas):
    """The broker with the lowest id acts; when it is well again another one does."""
    async with running(*nodes):
        nodes[0].become(DEGRADED)
        nodes[2].become(DEGRADED)
        await asyncio.sleep(INTERVAL_SECONDS)
        assert nodes[2].shown("degraded_brokers") == 2
        assert [node.broker.quota_orders for node in nodes] == [1, 0, 0]
        # An operator removes the quotas by hand, as if nothing had been lowered yet.
        del quotas[EVERY_PRODUCER]
        await asyncio.sleep(2 * INTERVAL_SECONDS)
        assert [node.broker.quota_orders for node in nodes] == [2, 0, 0]
        nodes[0].become(OK)
        await asyncio.sleep(3 * INTERVAL_SECONDS)
        assert quotas == LOWERED
        nodes[2].become(OK)
        await asyncio.sleep(INTERVAL_SECONDS)
        assert quotas == BEFORE


@pytest.mark.looptime
async def test_others_leave_it_to_the_broker_with_the_lowest_id(nodes, quotas):
    """Daemons that only see that it is degraded neither lower quotas nor put them back, in any order."""
    nodes[0].state = nodes[2].state = DEGRADED
    nodes[0].broker.fail_next("alter_client_quotas", BrokerUnavailable("away"))
    for node in (nodes[0], nodes[1], nodes[2]):
        await node.mode.step()
    assert quotas == BEFORE
    await nodes[0].mode.step()
    for node in nodes[1:]:
        await node.mode.step()
    assert quotas == LOWERED
    assert [node.broker.quota_orders for node in nodes] == [1, 0, 0]


class Halted(FakeBroker):
    """A broker that a full disk has stopped, after it has answered which node it is."""

    async def client_quotas(self):
        raise BrokerUnavailable("connection refused")


@pytest.mark.looptime
async def test_next_daemon_acts_where_the_first_broker_has_stopped(store, quotas):
    """Daemons take turns: each degraded broker's waits for those before it, which cannot act."""
    nodes = [Node(node_id, store, quotas) for node_id in (1, 2, 3)]
    for node in nodes[:2]:
        node.broker = Halted()
        node.broker.node = node.node_id
        node.state = DEGRADED
    nodes[2].state = DEGRADED
    async with running(*nodes):
        await asyncio.sleep(2 * TURN_SECONDS)
        assert quotas == BEFORE
        await asyncio.sleep(2 * INTERVAL_SECONDS)
        assert quotas == LOWERED
        # A quota that an operator sets meanwhile is lowered too, after as long.
        quotas[quota_entity(user="bob")] = {PRODUCER_BYTE_RATE: 7e6}
        await asyncio.sleep(2 * TURN_SECONDS + 2 * INTERVAL_SECONDS)
        assert quotas[quota_entity(user="bob")] == {PRODUCER_BYTE_RATE: 1000.0}
        # Nor do the daemons of the stopped brokers keep the third from putting the quotas back.
        for node in nodes:
            node.become(OK)
        await asyncio.sleep(2 * INTERVAL_SECONDS)
        assert quotas == BEFORE | {quota_entity(user="bob"): {PRODUCER_BYTE_RATE: 7e6}}


@pytest.mark.looptime
async def test_next_daemon_finishes_what_the_first_could_only_record(nodes, quotas):
    """A record of lowered quotas proves nothing: the broker may have stopped before they were lowered."""
    for _ in range(100):
        nodes[0].broker.fail_next("alter_client_quotas", BrokerUnavailable("away"))
    async with running(*nodes):
        nodes[0].become(DEGRADED)
        await asyncio.sleep(INTERVAL_SECONDS / 2)
        nodes[1].become(DEGRADED)
        await asyncio.sleep(TURN_SECONDS + 2 * INTERVAL_SECONDS)
        assert quotas == LOWERED


@pytest.mark.parametrize("ends_by", ["settings", "room"])
@pytest.mark.looptime
async def test_daemons_with_different_settings_do_not_undo_each_others_work(store, quotas, ends_by):
    """An alert-only daemon does not let go what another degraded broker's daemon has lowered."""
    first, second = Node(1, store, quotas, holds_back=False), Node(2, store, quotas)
    first.state = second.state = DEGRADED
    async with running(first, second):
        await asyncio.sleep(TURN_SECONDS + 2 * INTERVAL_SECONDS)
        for _ in range(10):
            assert quotas == LOWERED
            await asyncio.sleep(INTERVAL_SECONDS / 2)
        if ends_by == "settings":
            second.mode.set_settings(DegradedSettings(holds_back=False, rate=RATE))
        else:
            second.become(OK)
        await asyncio.sleep(1 if ends_by == "settings" else INTERVAL_SECONDS + 1)
        assert quotas == BEFORE


@pytest.mark.looptime
async def test_low_disk_holds_no_producer_back(nodes, quotas):
    """State 1 is a line in the log and a metric, and no more."""
    async with running(*nodes):
        nodes[0].become(LOW)
        await asyncio.sleep(2 * INTERVAL_SECONDS)
        assert quotas == BEFORE


@pytest.mark.looptime
async def test_alert_only_shows_it_and_changes_nothing(store, quotas):
    """The operator's choice: the state is published and shown, the quotas stay."""
    node = Node(1, store, quotas, holds_back=False)
    node.state = DEGRADED
    async with running(node):
        await asyncio.sleep(2 * INTERVAL_SECONDS)
    assert quotas == BEFORE
    assert (node.shown("degraded_brokers"), node.shown("producers_held_back")) == (1, 0)


@pytest.mark.looptime
async def test_choice_can_be_changed_while_producers_are_held_back(nodes, quotas):
    """Alert only puts the quotas back at once, though the disk is as full as before."""
    async with running(*nodes):
        nodes[0].become(DEGRADED)
        await asyncio.sleep(1)
        assert quotas == LOWERED
        nodes[0].mode.set_settings(DegradedSettings(holds_back=False, rate=RATE))
        await asyncio.sleep(0.1)
        assert quotas == BEFORE


@pytest.mark.looptime
async def test_daemon_that_died_while_its_disk_was_full_is_not_waited_for(nodes, quotas):
    """The state of the dead daemon becomes unknown. Another finds the record and puts the quotas back."""
    async with running(*nodes) as tasks:
        nodes[0].become(DEGRADED)
        await asyncio.sleep(1)
        tasks[0].cancel()
        await asyncio.sleep(STALE_SECONDS - 2 * INTERVAL_SECONDS)
        assert quotas == LOWERED
        await asyncio.sleep(4 * INTERVAL_SECONDS)
        assert quotas == BEFORE
        assert nodes[1].shown("degraded_brokers") == 0


@pytest.mark.looptime
async def test_daemon_that_starts_after_all_died_puts_the_quotas_back(store, quotas):
    """Nothing but the bucket is needed to know what was before."""
    first = Node(1, store, quotas)
    first.state = DEGRADED
    async with running(first):
        await asyncio.sleep(1)
    assert quotas == LOWERED
    async with running(Node(1, store, quotas)):
        await asyncio.sleep(1)
    assert quotas == BEFORE


@pytest.mark.parametrize("ahead_seconds", [600, -600])
@pytest.mark.looptime
async def test_daemon_that_starts_with_a_wrong_clock_lets_no_producers_go(store, quotas, ahead_seconds):
    """A fresh state looks old to it, so it watches the peer first; one that is gone is not waited for."""
    first, third = Node(1, store, quotas), Node(3, store, quotas, ahead_seconds=ahead_seconds)
    first.state = DEGRADED
    async with running(first) as (task,):
        await asyncio.sleep(1)
        async with running(third):
            for _ in range(900):
                await asyncio.sleep(0.1)
                assert quotas == LOWERED
            task.cancel()
            await asyncio.sleep(STALE_SECONDS + 2 * INTERVAL_SECONDS)
            assert quotas == BEFORE


@pytest.mark.looptime
async def test_daemon_that_does_not_know_its_disks_says_and_does_nothing(store, quotas):
    """A monitor that has not measured yet is no reason to let producers go, or to tell anything."""
    first = Node(1, store, quotas)
    first.state = DEGRADED
    await first.mode.step()
    blind = Node(1, store, quotas)
    blind.state = None
    requests = len(store.requests)
    async with running(blind):
        await asyncio.sleep(5 * INTERVAL_SECONDS)
    assert quotas == LOWERED
    assert len(store.requests) == requests


@pytest.mark.looptime
async def test_fault_is_said_once_and_tried_again(store, quotas):
    """A broker that refuses is logged when that begins and after it was well, not every ten seconds."""
    node = Node(1, store, quotas)
    node.state = DEGRADED
    with capture_logs() as lines:
        for fault in (BrokerDenied("no"), BrokerDenied("no"), BrokerUnavailable("away"), None) * 2:
            quotas.clear()
            quotas.update({entity: dict(values) for entity, values in BEFORE.items()})
            if fault is not None:
                node.broker.fail_next("alter_client_quotas", fault)
            await node.mode.step()
    faults = [line["error"] for line in lines if line["event"] == "degraded mode cannot act"]
    assert faults == ["no", "away"] * 2


@pytest.mark.looptime
async def test_fault_that_comes_back_is_said_again(store, quotas):
    """A good round in between makes it news."""
    node = Node(1, store, quotas)
    with capture_logs() as lines:
        for fails in (True, False, True):
            if fails:
                store.fail_next("list_page", lambda: StorageUnavailable("away"))
            node.metrics.health.succeeded_at.clear()
            await node.mode.step()
            succeeded = node.metrics.registry.get_sample_value(
                "tieringd_loop_last_success_timestamp_seconds", {"loop": "degraded_mode"}
            )
            assert (succeeded is None) == fails
    assert [line["error"] for line in lines] == ["away", "away"]


@pytest.mark.looptime
async def test_lost_race_is_no_fault(store, quotas):
    """Another daemon was faster, which is what a swap is for: nothing is wrong and nothing was changed."""
    node = Node(1, store, quotas)
    await node.mode.step()
    node.state = DEGRADED
    store.fail_next("put", lambda: PreconditionFailed("not this version"), times=2)
    with capture_logs() as lines:
        await node.mode.step()
        await node.mode.step()
    assert [line for line in lines if line["event"] == "degraded mode cannot act"] == []
    assert quotas == BEFORE
    await node.mode.step()
    assert quotas == LOWERED


@pytest.mark.looptime
async def test_unreachable_bucket_or_broker_leaves_quotas_as_they_are(store, quotas):
    """
    Nothing is lowered without a record in the bucket.

    The next round lowers when bucket and broker are back.
    """
    node = Node(1, store, quotas)
    node.state = DEGRADED
    node.broker.fail_next("node_id", BrokerUnavailable("away"))
    store.fail_next("list_page", lambda: StorageUnavailable("away"))
    async with running(node):
        await asyncio.sleep(INTERVAL_SECONDS + 1)
        assert quotas == BEFORE
        await asyncio.sleep(INTERVAL_SECONDS)
        assert quotas == LOWERED


def be_away(store):
    """Let the store refuse every request from now on."""
    for operation in ("put", "list_page", "get"):
        store.fail_next(operation, lambda: StorageUnavailable("away"), times=10_000)


@pytest.mark.looptime
async def test_gateway_refuses_writes_to_a_full_disk_while_the_store_is_away(store, quotas):
    """A store that is away is why the disk fills up, and what this broker's disk is like needs no store."""
    node = Node(1, store, quotas, refuses=True)
    async with running(node):
        await asyncio.sleep(1)
        be_away(store)
        node.become(DEGRADED)
        await asyncio.sleep(INTERVAL_SECONDS)
        assert node.mode.is_refusing
        assert (node.shown("degraded_brokers"), quotas) == (1, BEFORE)
        node.become(OK)
        await asyncio.sleep(INTERVAL_SECONDS)
        assert not node.mode.is_refusing


@pytest.mark.looptime
async def test_peer_that_was_degraded_is_unknown_when_the_store_was_away_for_long(store, quotas):
    """What a peer published counts for as long as when the store answers."""
    node, peer = Node(1, store, quotas, refuses=True), Node(2, store, quotas)
    peer.state = DEGRADED
    await peer.mode.step()
    async with running(node):
        await asyncio.sleep(1)
        be_away(store)
        await asyncio.sleep(STALE_SECONDS - 3 * INTERVAL_SECONDS)
        assert node.mode.is_refusing
        await asyncio.sleep(5 * INTERVAL_SECONDS)
        assert not node.mode.is_refusing


@pytest.mark.looptime
async def test_change_of_the_cluster_is_said_once(nodes):
    """One line when it begins, with the brokers, and one when it ends."""
    with capture_logs() as lines:
        async with running(nodes[0]):
            nodes[0].become(DEGRADED)
            await asyncio.sleep(5 * INTERVAL_SECONDS)
            nodes[0].become(OK)
            await asyncio.sleep(5 * INTERVAL_SECONDS)
    said = [(line["event"], line.get("brokers")) for line in lines if line["event"].startswith("cluster is")]
    assert said == [
        ("cluster is degraded: brokers are out of disk space", [1]),
        ("cluster is not degraded any more", None),
    ]


@pytest.mark.parametrize("seed", range(50))
def test_quotas_end_as_they_were_however_requests_fare(seed):
    """
    Disks fill and empty, daemons die, requests are lost and orders come late: it ends well.

    While a disk stays full the quotas become low, and when none is they become what they were.
    """
    run_virtual(_bad_day(Random(seed)), seed=seed)


async def _bad_day(random: Random) -> None:
    store, quotas = MemoryStore(), {entity: dict(values) for entity, values in BEFORE.items()}
    wires = [UnreliableWire(random, fault_rate=0.1, latency_seconds=0.1) for _ in range(3)]
    nodes = [Node(number, store, quotas, wire=wire) for number, wire in enumerate(wires, start=1)]
    tasks = [asyncio.create_task(node.mode.run()) for node in nodes]
    for _ in range(random.randint(5, 40)):
        number = random.randrange(3)
        nodes[number].become(random.choice([OK, LOW, DEGRADED, DEGRADED]))
        if random.random() < 0.1:
            tasks[number].cancel()
            await asyncio.gather(tasks[number], return_exceptions=True)
            nodes[number] = Node(number + 1, store, quotas, wire=wires[number])
            tasks[number] = asyncio.create_task(nodes[number].mode.run())
        await asyncio.sleep(random.expovariate(1 / random.choice([0.5, 5, 60])))
    last = random.randrange(3)
    for wire in wires:
        wire.become_reliable()
    nodes[last].become(DEGRADED)
    await asyncio.sleep(120)
    assert quotas == LOWERED
    for node in nodes:
        node.become(OK)
    await asyncio.sleep(120)
    assert quotas == BEFORE
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
