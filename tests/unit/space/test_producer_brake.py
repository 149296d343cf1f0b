"""The producers' brake: quotas are lowered after they are recorded, and put back after any crash."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.archive import Clock
from tests.fakes.broker import FakeBroker, require_time
from tests.fakes.memory_store import MemoryStore
from tests.fakes.slow_store import SlowStore
from tests.fakes.store import DistantStore
from tests.fakes.virtual_loop import virtually
from tests.fakes.wire import CrashingWire
from tieringd.errors import (
    BrokerDenied,
    BrokerUnavailable,
    CorruptDataError,
    ObjectNotFound,
    PreconditionFailed,
    StorageUnavailable,
)
from tieringd.formats.disk_state import QuotaPhase, decode_quota_record
from tieringd.formats.object_keys import client_quotas_key
from tieringd.model.disk_state import EVERY_PRODUCER, PRODUCER_BYTE_RATE, quota_entity
from tieringd.space.producer_brake import ORDER_WITHIN_SECONDS, SETTLE_MS, TAKE_OVER_MS, ProducerBrake

CLUSTER = "cluster"
RATE = 1000
ALICE, BOB = quota_entity(user="alice"), quota_entity(user="bob", client_id=None)
BEFORE = {ALICE: {PRODUCER_BYTE_RATE: 5e6, "consumer_byte_rate": 7.0}, BOB: {PRODUCER_BYTE_RATE: 10.0}}
LOWERED = {
    ALICE: {PRODUCER_BYTE_RATE: 1000.0, "consumer_byte_rate": 7.0},
    BOB: {PRODUCER_BYTE_RATE: 10.0},
    EVERY_PRODUCER: {PRODUCER_BYTE_RATE: 1000.0},
}


def copied(quotas):
    return {entity: dict(values) for entity, values in quotas.items()}


async def stored_record(store):
    """Return the record in the bucket, and its version; None when there is none."""
    try:
        data, info = await store.get(client_quotas_key(CLUSTER))
    except ObjectNotFound:
        return None, None
    return decode_quota_record(data), info.version


class WatchedBroker(FakeBroker):
    """A broker that sees to it that no quota of the cluster is away from its own without a record."""

    def __init__(self, store, quotas, **options):
        super().__init__(**options)
        self.bucket = store
        self.quotas = quotas
        self.orders = 0

    async def alter_client_quotas(self, changes, *, send_by):
        require_time(send_by)
        record, _ = await stored_record(self.bucket)
        assert record is not None
        assert record.phase is not QuotaPhase.RESTORED
        assert changes.keys() <= {one.entity for one in record.changes}
        self.orders += 1
        await super().alter_client_quotas(changes, send_by=send_by)


class Side:
    """One daemon's brake, over the quotas and the bucket of all."""

    def __init__(self, store, quotas, clock, node_id=1, wire=None):
        self.store = store
        self.broker = WatchedBroker(store, quotas, wire=wire)
        self.brake = ProducerBrake(
            DistantStore(store, wire) if wire else store,
            self.broker,
            cluster=CLUSTER,
            node_id=node_id,
            now_ms=clock,
        )

    async def refresh(self):
        _, version = await stored_record(self.store)
        await self.brake.refresh(version)

    async def hold_back(self, rate=RATE, *, after_seconds=0):
        await self.refresh()
        await self.brake.hold_back(rate, after_seconds=after_seconds)

    async def let_go(self):
        await self.refresh()
        await self.brake.let_go()


@pytest.fixture
def quotas():
    return copied(BEFORE)


@pytest.fixture
def side(store, quotas, clock):
    return Side(store, quotas, clock)


@pytest.fixture
def other(store, quotas, clock):
    return Side(store, quotas, clock, node_id=2)


async def phase(store):
    record, _ = await stored_record(store)
    return record.phase


async def test_quotas_are_lowered_and_put_back_as_they_were(side, store, quotas):
    """Other kinds of quotas stay, what was less stays, and what was not set is not set afterwards."""
    await side.hold_back()
    assert quotas == LOWERED
    assert await phase(store) is QuotaPhase.LOWERED
    assert side.brake.is_on
    await side.let_go()
    assert quotas == BEFORE
    assert await phase(store) is QuotaPhase.RESTORED
    assert not side.brake.is_on


async def test_second_round_changes_nothing(side, store, quotas):
    """Lowered is lowered and restored is restored: no order and no write for what is so already."""
    for step in (side.hold_back, side.let_go):
        await step()
        orders, (_, version) = side.broker.orders, await stored_record(store)
        await step()
        await step()
        assert (side.broker.orders, (await stored_record(store))[1]) == (orders, version)


async def test_cluster_that_was_never_held_back_is_left_alone(side, store, quotas):
    """Nothing is recorded and nothing asked of the broker when there is nothing to put back."""
    side.broker.fail_next("client_quotas", BrokerDenied("denied"))
    await side.let_go()
    assert (await stored_record(store), quotas) == ((None, None), BEFORE)


async def test_nothing_is_lowered_that_could_not_be_recorded(side, store, quotas):
    """The bucket comes first: without it the quotas stay as they are."""
    store.fail_next("put", lambda: StorageUnavailable("away"))
    with pytest.raises(StorageUnavailable):
        await side.hold_back()
    assert (quotas, side.broker.orders) == (BEFORE, 0)


async def test_record_whose_write_was_not_answered_is_gone_on_with(side, store, quotas):
    """The next round finds it in the bucket, and lowers what it says."""
    store.fail_next("put", lambda: StorageUnavailable("no answer", outcome_unknown=True), after_effect=True)
    with pytest.raises(StorageUnavailable):
        await side.hold_back()
    assert quotas == BEFORE
    await side.hold_back()
    assert quotas == LOWERED


async def test_nothing_is_recorded_where_all_quotas_are_low_already(side, store, quotas):
    """Quotas that an operator set low already are not put back."""
    quotas.clear()
    quotas[EVERY_PRODUCER] = {PRODUCER_BYTE_RATE: float(RATE)}
    await side.hold_back()
    assert await stored_record(store) == (None, None)


async def test_quota_that_an_operator_sets_meanwhile_stays(side, quotas):
    """A quota that an operator raises while the disk is full is kept, also afterwards."""
    await side.hold_back()
    quotas[ALICE][PRODUCER_BYTE_RATE] = 1e9
    await side.hold_back()
    assert quotas[ALICE][PRODUCER_BYTE_RATE] == 1e9
    await side.let_go()
    assert quotas == {**BEFORE, ALICE: {**BEFORE[ALICE], PRODUCER_BYTE_RATE: 1e9}}


async def test_quota_that_is_new_meanwhile_is_lowered_and_put_back_too(side, quotas):
    """A quota that a user gets while the disk is full is lowered too."""
    await side.hold_back()
    carol = quota_entity(user="carol")
    quotas[carol] = {PRODUCER_BYTE_RATE: 1e9}
    await side.hold_back()
    assert quotas[carol] == {PRODUCER_BYTE_RATE: 1000.0}
    await side.let_go()
    assert quotas == {**BEFORE, carol: {PRODUCER_BYTE_RATE: 1e9}}


async def test_lowered_quotas_keep_their_rate_when_the_setting_changes(side, store, quotas):
    """The recorded rate is the one that is looked for when quotas are put back."""
    await side.hold_back()
    await side.hold_back(rate=5)
    assert quotas == LOWERED
    await side.let_go()
    assert quotas == BEFORE


async def test_of_two_daemons_one_records(side, other, store, quotas):
    """The daemon that loses the swap changes nothing, and finds everything done in its next round."""
    await side.refresh()
    await other.refresh()
    await side.brake.hold_back(RATE)
    # The other saw the quotas before they were lowered.
    other.broker.quotas = copied(BEFORE)
    with pytest.raises(PreconditionFailed):
        await other.brake.hold_back(RATE)
    assert other.broker.orders == 0
    other.broker.quotas = quotas
    await other.hold_back()
    assert other.broker.orders == 0
    await other.let_go()
    assert quotas == BEFORE


@virtually
async def test_daemon_that_waits_for_its_turn_lowers_what_is_left(side, other, quotas):
    """The time counts from when something was left to lower, and begins anew when another daemon did it."""
    await other.hold_back(after_seconds=20)
    assert quotas == BEFORE
    await side.hold_back()
    await asyncio.sleep(15)
    await other.hold_back(after_seconds=20)
    del quotas[EVERY_PRODUCER]
    for seconds in (5, 15):
        await asyncio.sleep(seconds)
        await other.hold_back(after_seconds=20)
        assert other.broker.orders == 0
    await asyncio.sleep(5)
    await other.hold_back(after_seconds=20)
    assert (side.broker.orders, other.broker.orders, quotas) == (1, 1, LOWERED)


async def test_daemon_that_restores_is_left_to_it_for_a_while(side, other, store, quotas, clock):
    """Another one helps only when it does not end."""
    await side.hold_back()
    await side.refresh()
    side.broker.fail_next("alter_client_quotas", BrokerDenied("no"))
    with pytest.raises(BrokerDenied):
        await side.brake.let_go()
    assert await phase(store) is QuotaPhase.RESTORING
    clock.now_ms += TAKE_OVER_MS - 1
    await other.let_go()
    assert quotas == LOWERED
    clock.now_ms += 1
    await other.let_go()
    assert quotas == BEFORE
    assert (await stored_record(store))[0].node_id == 2


async def test_restoring_is_turned_back_when_a_disk_is_full_again(side, other, store, quotas):
    """The record of the first time still says what was before, and is lowered by again."""
    await side.hold_back()
    await side.refresh()
    side.broker.fail_next("alter_client_quotas", BrokerDenied("no"))
    with pytest.raises(BrokerDenied):
        await side.brake.let_go()
    await other.hold_back()
    assert (quotas, await phase(store)) == (LOWERED, QuotaPhase.LOWERED)
    with pytest.raises(PreconditionFailed):
        await side.brake.let_go()
    await side.let_go()
    assert quotas == BEFORE


async def test_order_that_arrives_late_is_undone(side, other, store, quotas, clock):
    """A lowering that was given before quotas were put back, and carried out after it, does not last."""
    await side.hold_back()
    await side.let_go()
    quotas.clear()
    quotas.update(copied(LOWERED))
    clock.now_ms += SETTLE_MS - 1
    await other.let_go()
    assert quotas == BEFORE
    assert await phase(store) is QuotaPhase.RESTORED


async def test_late_order_is_undone_before_quotas_are_lowered_again(side, store, quotas):
    """The rate would otherwise be recorded as the earlier quota, and stay for ever."""
    await side.hold_back()
    await side.let_go()
    quotas.clear()
    quotas.update(copied(LOWERED))
    for _ in range(2):
        await side.hold_back()
    assert (quotas, await phase(store)) == (LOWERED, QuotaPhase.LOWERED)
    await side.let_go()
    assert quotas == BEFORE


async def test_restored_record_is_not_watched_for_ever(side, store, quotas, clock):
    """An operator may set the very same rate later, and the broker is not asked every round."""
    await side.hold_back()
    await side.let_go()
    quotas.clear()
    quotas.update(copied(LOWERED))
    clock.now_ms += SETTLE_MS
    side.broker.fail_next("client_quotas", BrokerDenied("denied"))
    await side.let_go()
    assert quotas == LOWERED


async def test_old_record_is_replaced_by_what_is_set_now(side, store, quotas, clock):
    """The second time a disk is full, what is put back is what was there just before."""
    await side.hold_back()
    await side.let_go()
    clock.now_ms += SETTLE_MS
    quotas[ALICE][PRODUCER_BYTE_RATE] = 6e6
    await side.hold_back()
    assert quotas == LOWERED
    await side.let_go()
    assert quotas[ALICE][PRODUCER_BYTE_RATE] == 6e6


async def test_damaged_record_stops_everything(side, store, quotas):
    """The earlier quotas are unknown then. An operator has to inspect the object that the error names."""
    await side.hold_back()
    store.add(client_quotas_key(CLUSTER), b"{}")
    version = (await store.head(client_quotas_key(CLUSTER))).version
    for _ in range(2):
        with pytest.raises(CorruptDataError, match=client_quotas_key(CLUSTER)):
            await side.brake.refresh(version)
    assert quotas == LOWERED


async def test_record_is_read_only_when_it_has_changed(side, other, store):
    """A version that is known, such as the one that was written here, is not asked for again."""
    await side.hold_back()
    await other.refresh()
    _, version = await stored_record(store)
    before = len(store.requests)
    for brake in (side.brake, other.brake):
        await brake.refresh(version)
        assert brake.is_on
    assert len(store.requests) == before


async def test_record_that_was_removed_is_not_there(side, store, quotas):
    """A version that a listing showed is no record once its object is gone."""
    await side.brake.refresh("1")
    await side.brake.let_go()
    assert not side.brake.is_on


def crash_points():
    """Return how many points a daemon can crash at from lowering to restored, and at each of them where."""

    async def count():
        store, wire = MemoryStore(), CrashingWire()
        side = Side(store, copied(BEFORE), Clock(), wire=wire)
        await side.hold_back()
        await side.let_go()
        return wire.points

    return range(1, asyncio.run(count()) + 1)


@pytest.mark.parametrize("at", crash_points())
@pytest.mark.parametrize("goes_on", ["let_go", "hold_back"])
async def test_crash_at_any_point_leaves_what_another_daemon_finishes(store, quotas, clock, at, goes_on):
    """The next daemon ends with the producers' old quotas, wherever one dies and whatever comes first."""
    wire = CrashingWire(at)
    crashing = Side(store, quotas, clock, wire=wire)

    async def live():
        await crashing.hold_back()
        await crashing.let_go()

    task = asyncio.create_task(live())
    await wire.crashed.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    clock.now_ms += TAKE_OVER_MS
    helper = Side(store, quotas, clock, node_id=2)
    if goes_on == "hold_back":
        await helper.hold_back()
        await helper.hold_back()
        assert quotas == LOWERED
    await helper.let_go()
    assert quotas == BEFORE
    record, _ = await stored_record(store)
    assert record is None or record.phase is QuotaPhase.RESTORED


@virtually
async def test_order_of_a_process_that_was_stopped_for_long_is_not_sent(clock):
    """Another daemon has put the quotas back, and looked after them for as long as it does."""
    store, quotas = SlowStore(), copied(BEFORE)
    stopped, other = Side(store, quotas, clock), Side(store, quotas, clock, node_id=2)
    store.seconds = ORDER_WITHIN_SECONDS + 1
    waiting = asyncio.create_task(stopped.hold_back())
    await asyncio.sleep(1)
    store.seconds = 0
    await other.let_go()
    assert await phase(store) is QuotaPhase.RESTORED
    clock.now_ms += SETTLE_MS
    with pytest.raises(BrokerUnavailable):
        await waiting
    assert quotas == BEFORE
    await stopped.let_go()
    assert quotas == BEFORE
