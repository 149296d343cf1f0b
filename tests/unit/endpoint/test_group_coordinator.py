"""
Two endpoints that keep the same groups, on a virtual clock, one case at a time.

`tests/simulation/test_groups.py` has whole histories.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from random import Random

import pytest
from structlog.testing import capture_logs

from tests.simulation.groups import GROUP, TOPIC, Endpoint, SlowStore, simulated
from tieringd.endpoint.endpoint_nodes import LEASE_SECONDS
from tieringd.endpoint.group_coordinator import (
    _KEPT_SECONDS,
    _OPEN_MAX,
    TICK_SECONDS,
    CommitSource,
    OvertakenRequest,
)
from tieringd.errors import ObjectTooLarge, StorageUnavailable, TieringError
from tieringd.formats.group_documents import group_key, lease_key
from tieringd.model.consumer_group import CommittedOffset, GroupMember, GroupState, SubscribedTopic
from tieringd.policies.consumer_protocol import JOINS, ConsumerHeartbeat
from tieringd.policies.group_membership import GroupError, JoinRequest, SyncRequest, leave
from tieringd.policies.group_offsets import CommitRequest, commit, deleted, offset_of


def member(name, endpoint, **changes):
    """Return a member at an endpoint."""
    return GroupMember(
        name, None, name, "10.0.0.1", endpoint.leases.endpoint_id,
        **({"session_timeout_ms": 10_000, "rebalance_timeout_ms": 20_000} | changes),
        protocols=(("range", b""),),
    )  # fmt: skip


async def in_group(name, endpoint, group=GROUP):
    """Let a lone member join and take its assignment."""
    joined = await endpoint.coordinator.join(
        group, JoinRequest(member(name, endpoint), is_new=True, protocol_type="consumer")
    )
    generation = joined.answer.generation
    asked = SyncRequest(name, None, generation, None, None, endpoint.leases.endpoint_id, {name: b"all"})
    assert await endpoint.coordinator.sync(group, asked) == (GroupError.NONE, b"all")
    return generation


def committing(name, endpoint, generation, offset, metadata=""):
    """Return a transition that commits one offset."""
    asked = CommitRequest(
        name,
        None,
        generation,
        endpoint.leases.endpoint_id,
        {TOPIC: {0: CommittedOffset(offset, 0, metadata, 0)}},
    )
    return lambda group: commit(group, asked)


@pytest.mark.parametrize("is_commit", [True, False])
def test_endpoint_that_stood_still_commits_for_no_member_that_was_expired(is_commit):
    """The write of its last request arrives after another endpoint has removed the member."""

    async def history():
        store = SlowStore()
        first, second = await Endpoint(store, 1).start(), await Endpoint(store, 2).start()
        generation = await in_group("a", first)
        await first.coordinator.apply(GROUP, committing("a", first, generation, 5))
        await second.coordinator.read(GROUP)
        first.kill()  # It stands still: its memory is as it was.
        await asyncio.sleep(LEASE_SECONDS + 3 + 10 + 5)
        assert (await second.coordinator.read(GROUP)).state is GroupState.EMPTY
        assert first.coordinator._open[GROUP].group.members, "it does not know of the expiry"
        if is_commit:
            error = await first.coordinator.apply(GROUP, committing("a", first, generation, 9))
        else:
            error = await first.coordinator.heartbeat(GROUP, "a", None, generation)
        assert error is GroupError.UNKNOWN_MEMBER_ID
        assert offset_of(await second.coordinator.read(GROUP), TOPIC, 0).offset == 5

    simulated(0, history)


def test_stall_of_the_process_is_not_silence_of_its_members():
    """A member whose requests wait in a socket is not removed when the process goes on."""

    async def history():
        endpoint = await Endpoint(SlowStore(), 1).start()
        generation = await in_group("a", endpoint)
        asyncio.get_running_loop().pass_time(60)
        await asyncio.sleep(2)
        assert await endpoint.coordinator.heartbeat(GROUP, "a", None, generation) is GroupError.NONE
        await asyncio.sleep(15)
        beat = await endpoint.coordinator.heartbeat(GROUP, "a", None, generation)
        assert beat is GroupError.UNKNOWN_MEMBER_ID

    simulated(0, history)


def test_stall_while_a_look_waits_for_the_store_is_not_silence_either():
    """The process is stopped when a look is under way, and the look's answer comes first when it goes on."""

    async def history():
        endpoint = await Endpoint(SlowStore(), 1).start()
        generation = await in_group("a", endpoint)
        endpoint.store.waits_for = answer = asyncio.Event()
        for _ in range(12):
            await asyncio.sleep(1)
            endpoint.coordinator._hear(endpoint.coordinator._open[GROUP], "a")
        with capture_logs() as events:
            asyncio.get_running_loop().pass_time(60)
            endpoint.store.waits_for = None
            answer.set()
            await asyncio.sleep(2)
        assert [one["event"] for one in events] == ["this process stood still"]
        assert await endpoint.coordinator.heartbeat(GROUP, "a", None, generation) is GroupError.NONE

    simulated(0, history)


def test_member_that_is_heard_while_its_removal_is_tried_again_stays():
    """Another endpoint writes first. Meanwhile a heartbeat of the member is answered from memory."""

    async def history():
        store = SlowStore()
        first, second = await Endpoint(store, 1).start(), await Endpoint(store, 2).start()
        generation = await in_group("a", first)
        one = first.coordinator._open[GROUP]
        await asyncio.sleep(one.heard["a"] + 9.4 - first.awake.now())
        held = store.held = asyncio.Event()
        await asyncio.sleep(one.heard["a"] + 10.6 - first.awake.now())
        assert one.work is not None, "its removal is under way"
        store.held = None
        asked = JoinRequest(member("b", second), is_new=True, protocol_type="consumer")
        joining = asyncio.create_task(second.coordinator.join(GROUP, asked))
        await asyncio.sleep(0.1)
        assert await first.coordinator.heartbeat(GROUP, "a", None, generation) is GroupError.NONE
        held.set()
        await asyncio.sleep(1)
        beat = await first.coordinator.heartbeat(GROUP, "a", None, generation)
        assert beat is GroupError.REBALANCE_IN_PROGRESS
        joining.cancel()

    simulated(0, history)


def test_lease_in_a_late_answer_is_as_young_as_the_answer():
    """The store answers a look late: until then the lease may have been renewed."""

    async def history():
        store = SlowStore()
        first, second = await Endpoint(store, 1).start(), await Endpoint(store, 2).start()
        second.tasks[0].cancel()
        first.tasks[0].cancel()
        second.store.waits_for = answer = asyncio.Event()
        looking = asyncio.create_task(second.leases._look())
        await asyncio.sleep(LEASE_SECONDS)
        await first.leases._renew()
        answer.set()
        second.store.waits_for = None
        await looking
        await second.leases._look()
        assert second.leases.gone_since(first.leases.endpoint_id) is None

    simulated(0, history)


def test_looks_are_as_old_as_their_questions():
    """An answer that comes late tells nothing of now: no member of another endpoint is removed by it."""

    async def history():
        store = SlowStore()
        endpoint = await Endpoint(store, 1).start()
        endpoint.tasks[0].cancel()
        endpoint.store.waits_for = answer = asyncio.Event()
        looking = asyncio.create_task(endpoint.leases._look())
        await asyncio.sleep(LEASE_SECONDS + 1)
        answer.set()
        endpoint.store.waits_for = None
        await looking
        assert not endpoint.leases.is_judging

    simulated(0, history)


def test_member_goes_on_at_another_endpoint_without_a_rebalance():
    """The endpoint that it was connected to has died; another one watches over it from then on."""

    async def history():
        store = SlowStore()
        first, second = await Endpoint(store, 1).start(), await Endpoint(store, 2).start()
        generation = await in_group("a", first)
        first.kill()
        for _ in range(30):
            await asyncio.sleep(2)
            assert await second.coordinator.heartbeat(GROUP, "a", None, generation) is GroupError.NONE
        assert (await second.coordinator.read(GROUP)).generation == generation
        assert [one.port for one in second.leases.all()] == [2]

    simulated(0, history)


def ids(endpoint):
    """Return the ids of the nodes that clients of an endpoint see."""
    return [one.node_id for one in endpoint.leases.all()]


@pytest.mark.parametrize("apart_seconds", [0, 1, 60.5])
def test_endpoint_that_starts_is_listed_by_the_others_before_it_serves(apart_seconds):
    """
    All endpoints tell clients of the same nodes.

    librdkafka drops a node that the next endpoint does not list, and what it asked there it asks again only
    minutes later.
    """

    async def history():
        store = SlowStore()
        first = await Endpoint(store, 1).start()
        await asyncio.sleep(apart_seconds)
        second = await Endpoint(store, 2).start()
        assert ids(first) == ids(second) == sorted(one.leases.own.node_id for one in (first, second))
        third = await Endpoint(store, 3).start()
        assert ids(first) == ids(second) == ids(third)
        assert len(ids(first)) == 3

    simulated(0, history)


@pytest.mark.parametrize("seed", [None, *range(10)])
@pytest.mark.parametrize("count", [2, 4])
def test_endpoints_that_start_together_do_not_wait_for_each_other(count, seed):
    """Each is in its own start, where it waits for the others, and all of them serve soon."""

    async def history():
        store = SlowStore(None if seed is None else Random(seed))
        endpoints = [Endpoint(store, 1 + number) for number in range(count)]
        began = asyncio.get_running_loop().time()
        with capture_logs() as events:
            await asyncio.gather(*(one.start() for one in endpoints))
        assert asyncio.get_running_loop().time() - began < 3
        assert not [one for one in events if "may not list" in one["event"]]
        assert {tuple(ids(one)) for one in endpoints} == {tuple(ids(endpoints[0]))}
        assert len(ids(endpoints[0])) == count

    simulated(seed or 0, history)


@pytest.mark.parametrize("port", [1, 2])
def test_endpoint_waits_for_no_other_that_died(port):
    """A lease at the own address is what the process before has left. Another one is waited for, a while."""

    async def history():
        store = SlowStore()
        first = await Endpoint(store, 1).start()
        await asyncio.sleep(20)
        first.kill()
        began = asyncio.get_running_loop().time()
        await Endpoint(store, port).start()
        waited_seconds = asyncio.get_running_loop().time() - began
        assert waited_seconds < 1 if port == 1 else 6 <= waited_seconds < LEASE_SECONDS

    simulated(0, history)


def test_store_that_goes_away_while_an_endpoint_waits_does_not_end_it(monkeypatch):
    """It has its lease, and has looked at the others. A running endpoint lives through such a time, too."""

    async def history():
        store = SlowStore()
        (await Endpoint(store, 1).start()).kill()
        second = Endpoint(store, 2)
        look, looks = second.leases._look, 0

        async def failing():
            nonlocal looks
            looks += 1
            if looks > 1:
                raise StorageUnavailable("the store is away")
            await look()

        monkeypatch.setattr(second.leases, "_look", failing)
        await second.start()
        assert looks == 2

    simulated(0, history)


def test_heartbeats_cost_no_request():
    """Only the lease and the looks at the group do, whatever the number of heartbeats."""

    async def history():
        store = SlowStore()
        endpoint = await Endpoint(store, 1).start()
        generation = await in_group("a", endpoint)
        await asyncio.sleep(8)  # A new endpoint renews its lease soon, and then less often.
        store.requests.clear()
        for _ in range(600):
            await asyncio.sleep(0.1)
            assert await endpoint.coordinator.heartbeat(GROUP, "a", None, generation) is GroupError.NONE
        kinds = [operation for operation, _ in store.requests]
        assert kinds.count("put") == kinds.count("list_page") == 20
        assert kinds.count("head") == 6
        assert len(kinds) == 2 * 20 + 6

    simulated(0, history)


def test_heartbeat_asks_the_bucket_while_the_lease_is_not_renewed():
    """Others may count this endpoint as dead, and have removed the member."""

    async def history():
        store = SlowStore()
        endpoint = await Endpoint(store, 1).start()
        generation = await in_group("a", endpoint)
        store.fail_next("put", lambda: StorageUnavailable("refused"), times=100)
        await asyncio.sleep(LEASE_SECONDS + 3)
        assert not endpoint.leases.is_in_force
        await endpoint.coordinator.read(GROUP)
        store.requests.clear()
        assert await endpoint.coordinator.heartbeat(GROUP, "a", None, generation) is GroupError.NONE
        assert ("head", group_key("c", GROUP)) in store.requests

    simulated(0, history)


def test_commits_at_once_are_one_write():
    """Those that arrive while a write is under way share the next one."""

    async def history():
        store = SlowStore(Random(1))
        endpoint = await Endpoint(store, 1).start()
        generation = await in_group("a", endpoint)
        store.requests.clear()
        commits = (
            endpoint.coordinator.apply(GROUP, committing("a", endpoint, generation, offset))
            for offset in range(50)
        )
        assert set(await asyncio.gather(*commits)) == {GroupError.NONE}
        written = [key for operation, key in store.requests if operation == "put" and "consumer" in key]
        assert written == [group_key("c", GROUP)]
        assert offset_of(await endpoint.coordinator.read(GROUP), TOPIC, 0).offset == 49

    simulated(0, history)


def test_store_that_is_away_expires_no_member():
    """Requests fail, and clients try again; when the store is back, the group goes on as it was."""

    async def history():
        store = SlowStore()
        first, second = await Endpoint(store, 1).start(), await Endpoint(store, 2).start()
        generation = await in_group("a", first)
        await second.coordinator.read(GROUP)
        store.is_away = True
        for _ in range(30):
            await asyncio.sleep(2)
            with suppress(StorageUnavailable):
                await first.coordinator.heartbeat(GROUP, "a", None, generation)
        with pytest.raises(StorageUnavailable):
            await first.coordinator.apply(GROUP, committing("a", first, generation, 5))
        store.is_away = False
        await asyncio.sleep(5)
        assert await first.coordinator.heartbeat(GROUP, "a", None, generation) is GroupError.NONE
        assert first.metrics.groups.failures._value.get() > 0

    simulated(0, history)


def test_group_that_would_be_too_large_is_refused_alone():
    """Other commits of the same write are kept."""

    async def history():
        endpoint = await Endpoint(SlowStore(Random(1)), 1, group_bytes=4096).start()
        generation = await in_group("a", endpoint)
        large = committing("a", endpoint, generation, 6, metadata="x" * 5000)
        found = await asyncio.gather(
            endpoint.coordinator.apply(GROUP, committing("a", endpoint, generation, 5)),
            endpoint.coordinator.apply(GROUP, large),
            return_exceptions=True,
        )
        assert found[0] is GroupError.NONE
        assert isinstance(found[1], ObjectTooLarge)
        assert endpoint.refusals == 1
        assert offset_of(await endpoint.coordinator.read(GROUP), TOPIC, 0).offset == 5

    simulated(0, history)


def test_there_are_as_many_groups_as_allowed():
    """One more is refused until another one is deleted."""

    async def history():
        endpoint = await Endpoint(SlowStore(), 1, groups=2).start()
        for number in range(2):
            await endpoint.coordinator.apply(f"g{number}", committing("", endpoint, -1, 5))
        assert await endpoint.coordinator.is_full("g2")
        assert not await endpoint.coordinator.is_full("g1")
        joined = await endpoint.coordinator.join(
            "g2", JoinRequest(member("a", endpoint), is_new=True, protocol_type="consumer")
        )
        assert joined.answer.error is GroupError.POLICY_VIOLATION

    simulated(0, history)


def test_old_offsets_and_members_without_endpoint_are_found():
    """An endpoint finds both by going over all groups, though no client asks for them."""

    async def history():
        store = SlowStore()
        first = await Endpoint(store, 1).start()
        await first.coordinator.apply("old", committing("", first, -1, 5))
        await in_group("a", first)
        first.kill()
        second = await Endpoint(store, 2, offsets_retention_ms=60_000).start()
        await asyncio.sleep(LEASE_SECONDS + 5)
        await second.coordinator.keep_all()
        await asyncio.sleep(15)
        assert not (await second.coordinator.read("old")).exists
        assert (await second.coordinator.read(GROUP)).state is GroupState.EMPTY

    simulated(0, history)


def test_endpoint_that_ends_sends_its_clients_away():
    """A member that waits for others gets an answer at once, and the lease is gone."""

    async def history():
        store = SlowStore()
        endpoint = await Endpoint(store, 1, first_round_ms=60_000).start()
        asked = JoinRequest(member("a", endpoint), is_new=True, protocol_type="consumer")
        waiting = asyncio.create_task(endpoint.coordinator.join(GROUP, asked))
        await asyncio.sleep(5)
        assert not waiting.done()
        endpoint.coordinator.end_waits()
        await endpoint.leases.end()
        assert (await waiting).answer.error is GroupError.COORDINATOR_NOT_AVAILABLE
        endpoint.kill()
        assert [key for key in store.objects if "endpoints" in key] == []
        with pytest.raises(StorageUnavailable):
            await endpoint.coordinator.apply(GROUP, lambda group: leave(group, [("a", None)], now_ms=0))

    simulated(0, history)


def test_damaged_group_is_an_error_of_its_own():
    """Other groups go on; the damaged one is read again with each request, so that it can be mended."""

    async def history():
        store = SlowStore()
        endpoint = await Endpoint(store, 1).start()
        store.add(group_key("c", "broken"), b"{}")
        for _ in range(2):
            with pytest.raises(TieringError, match="broken"):
                await endpoint.coordinator.read("broken")
        assert endpoint.refusals == 2
        assert await in_group("a", endpoint) == 1
        store.remove(group_key("c", "broken"))
        assert not (await endpoint.coordinator.read("broken")).exists

    simulated(0, history)


@pytest.mark.parametrize("is_slow", [True, False])
def test_older_commit_of_a_member_that_moved_is_refused(is_slow):
    """The member went on at another endpoint and committed there. Its older commit comes too late."""

    async def history():
        store = SlowStore()
        first, second = await Endpoint(store, 1).start(), await Endpoint(store, 2).start()
        generation = await in_group("a", first)
        await first.coordinator.apply(GROUP, committing("a", first, generation, 5), member_id="a")
        older = committing("a", first, generation, 10)
        newer = committing("a", second, generation, 20)
        if is_slow:
            # Its write is under way when the other endpoint's is done.
            held = store.held = asyncio.Event()
            waiting = asyncio.create_task(first.coordinator.apply(GROUP, older, member_id="a"))
            await asyncio.sleep(0.1)
            store.held = None
            assert await second.coordinator.apply(GROUP, newer, member_id="a") is GroupError.NONE
            held.set()
        else:
            # It waits in the socket of an endpoint that stands still.
            first.kill()
            assert await second.coordinator.apply(GROUP, newer, member_id="a") is GroupError.NONE
            waiting = asyncio.create_task(first.coordinator.apply(GROUP, older, member_id="a"))
        with pytest.raises(OvertakenRequest):
            await waiting
        assert offset_of(await second.coordinator.read(GROUP), TOPIC, 0).offset == 20
        # A member that comes back is served.
        again = committing("a", first, generation, 30)
        assert await first.coordinator.apply(GROUP, again, member_id="a") is GroupError.NONE

    simulated(0, history)


async def commit_as_none(endpoint, offset, *, partition=0, is_connected=lambda: True):
    """Commit one offset as a consumer that is no member."""
    offsets = {TOPIC: {partition: CommittedOffset(offset, 0, "", 0)}}
    asked = CommitRequest("", None, -1, endpoint.leases.endpoint_id, offsets)
    return await endpoint.coordinator.apply(
        GROUP,
        lambda group: commit(group, asked),
        source=CommitSource(is_connected, [(TOPIC, partition)]),
    )


@pytest.mark.parametrize("is_slow", [True, False])
def test_older_commit_of_a_consumer_that_is_no_member_is_refused(is_slow):
    """The consumer went on at another endpoint and committed there. Its older commit comes too late."""

    async def history():
        store = SlowStore()
        first, second = await Endpoint(store, 1).start(), await Endpoint(store, 2).start()
        assert await commit_as_none(first, 5) is GroupError.NONE
        if is_slow:
            held = store.held = asyncio.Event()
            waiting = asyncio.create_task(commit_as_none(first, 10))
            await asyncio.sleep(0.1)
            store.held = None
            assert await commit_as_none(second, 20) is GroupError.NONE
            held.set()
        else:
            # It waits in the socket of an endpoint that stands still.
            first.kill()
            assert await commit_as_none(second, 20) is GroupError.NONE
            waiting = asyncio.create_task(commit_as_none(first, 10))
        with pytest.raises(OvertakenRequest):
            await waiting
        assert offset_of(await second.coordinator.read(GROUP), TOPIC, 0).offset == 20
        # A consumer that comes back is served, also one that goes back.
        assert await commit_as_none(first, 7) is GroupError.NONE
        assert offset_of(await second.coordinator.read(GROUP), TOPIC, 0).offset == 7

    simulated(0, history)


def test_commit_of_a_consumer_that_has_gone_is_refused():
    """The endpoint has never worked on the group, so only the closed connection tells."""

    async def history():
        store = SlowStore()
        first, second = await Endpoint(store, 1).start(), await Endpoint(store, 2).start()
        assert await commit_as_none(second, 20) is GroupError.NONE
        with pytest.raises(OvertakenRequest):
            await commit_as_none(first, 10, is_connected=lambda: False)
        assert offset_of(await second.coordinator.read(GROUP), TOPIC, 0).offset == 20

    simulated(0, history)


def test_consumers_of_other_partitions_do_not_refuse_each_other():
    """Two of them share a group's name, each at its own endpoint. Commits at once refuse none either."""

    async def history():
        store = SlowStore()
        endpoints = await Endpoint(store, 1).start(), await Endpoint(store, 2).start()
        for offset in range(5):
            done = await asyncio.gather(
                *(
                    commit_as_none(one, offset, partition=number)
                    for number, one in enumerate(endpoints)
                    for _ in range(3)
                )
            )
            assert set(done) == {GroupError.NONE}

    simulated(0, history)


def test_deleted_group_makes_room_for_another_one():
    """An endpoint that has counted it before does not count it for ever."""

    async def history():
        endpoint = await Endpoint(SlowStore(), 1, groups=2).start()
        for number in range(2):
            await endpoint.coordinator.apply(f"g{number}", committing("", endpoint, -1, 5))
        assert await endpoint.coordinator.is_full("g2")
        assert await endpoint.coordinator.apply("g0", deleted) is GroupError.NONE
        assert not await endpoint.coordinator.is_full("g2")

    simulated(0, history)


@pytest.mark.parametrize("is_store_away", [True, False])
def test_lease_that_had_ended_before_a_pause_is_looked_at_again(is_store_away):
    """No look was made meanwhile, and the other endpoint renews its lease again: its members stay."""

    async def history():
        store = SlowStore()
        first, second = await Endpoint(store, 1).start(), await Endpoint(store, 2).start()
        generation = await in_group("a", first)
        first.tasks[0].cancel()  # It does not renew its lease for a while.
        while second.leases.gone_since(first.leases.endpoint_id) is None:
            await asyncio.sleep(1)
            await second.coordinator.read(GROUP)
            await first.coordinator.heartbeat(GROUP, "a", None, generation)
        first.tasks[0] = asyncio.create_task(first.leases.run())
        if is_store_away:
            store.is_away = True
            for _ in range(20):
                await asyncio.sleep(2)
                with suppress(StorageUnavailable):
                    await first.coordinator.heartbeat(GROUP, "a", None, generation)
            store.is_away = False
        else:
            asyncio.get_running_loop().pass_time(60)
        await asyncio.sleep(2)
        assert await first.coordinator.heartbeat(GROUP, "a", None, generation) is GroupError.NONE

    simulated(0, history)


class LosesOneAnswer(SlowStore):
    """A store whose next write of the group has no answer: it takes effect, and another one follows."""

    meanwhile = None
    """The other write, a coroutine."""

    async def put(self, key, body, *, crc32c, condition=None):
        """Store an object."""
        info = await super().put(key, body, crc32c=crc32c, condition=condition)
        if self.meanwhile is not None and key == group_key("c", GROUP):
            meanwhile, self.meanwhile = self.meanwhile, None
            await meanwhile
            raise StorageUnavailable("no answer", outcome_unknown=True)
        return info


async def newer_beat(endpoint, name, epoch, *, subscribed=None, owned=None):
    """Let a member of the newer protocol send a heartbeat."""
    telling = GroupMember(name, None, name, "10.0.0.1", endpoint.leases.endpoint_id, 45_000, 60_000)
    topics = {"orders": SubscribedTopic("0a" * 16, 2)}
    request = ConsumerHeartbeat(telling, epoch, subscribed, None, owned)
    return await endpoint.coordinator.consumer_heartbeat(GROUP, request, topics.get)


def test_partition_is_told_although_the_answer_of_its_write_was_lost():
    """The heartbeat is decided anew, from a group that has its change already."""

    async def history():
        store = LosesOneAnswer()
        first, second = await Endpoint(store, 1).start(), await Endpoint(store, 2).start()
        a = await newer_beat(second, "a", JOINS, subscribed=("orders",), owned=frozenset())
        b = await newer_beat(first, "b", JOINS, subscribed=("orders",), owned=frozenset())
        assert (len(a.assigned), len(b.assigned)) == (2, 0)
        await asyncio.sleep(4)
        a = await newer_beat(second, "a", a.epoch)
        a = await newer_beat(second, "a", a.epoch, owned=a.assigned)
        await asyncio.sleep(4)
        store.meanwhile = second.coordinator.apply(GROUP, committing("a", second, a.epoch, 7))
        b = await newer_beat(first, "b", b.epoch)
        group = await second.coordinator.read(GROUP)
        assert store.meanwhile is None
        assert b.assigned == group.members["b"].consumer.assigned
        assert len(b.assigned) == 1

    simulated(0, history)


def test_member_that_comes_back_is_told_what_it_may_read_now():
    """The endpoint knows it from before, when it was to read more: the member has given that up elsewhere."""

    async def history():
        store = SlowStore()
        first, second = await Endpoint(store, 1).start(), await Endpoint(store, 2).start()
        a = await newer_beat(second, "a", JOINS, subscribed=("orders",), owned=frozenset())
        await newer_beat(first, "b", JOINS, subscribed=("orders",), owned=frozenset())
        a = await newer_beat(first, "a", a.epoch, owned=a.assigned)
        assert len(a.assigned) == 1
        with pytest.raises(OvertakenRequest):
            await newer_beat(second, "a", a.epoch, owned=a.assigned)
        again = await newer_beat(second, "a", a.epoch, owned=a.assigned)
        assert again.assigned == a.assigned

    simulated(0, history)


def test_request_that_makes_room_does_not_end_the_watch():
    """It closes a group that is closed for its age in the same turn, after the round has listed it."""

    async def history():
        endpoint = await Endpoint(SlowStore(), 1).start()
        watching = endpoint.tasks[1]
        for number in range(_OPEN_MAX):
            await endpoint.coordinator.read(f"g{number}")
        begun = asyncio.get_running_loop().time()
        assert begun == 0, "reads take no time, so that the request comes in just the turn of the watches"
        await asyncio.sleep(_KEPT_SECONDS - TICK_SECONDS / 2)
        await asyncio.sleep(TICK_SECONDS / 2)
        assert len(endpoint.coordinator._open) == _OPEN_MAX
        await endpoint.coordinator.read("new")
        await asyncio.sleep(2 * TICK_SECONDS)
        assert not watching.done()
        assert list(endpoint.coordinator._open) == ["new"]

    simulated(0, history)


class OneSlowObject(SlowStore):
    """A store that is slow to read one object."""

    slow_key = ""
    slow_reads = 0
    slow_reads_max = math.inf

    async def head(self, key):
        """Return what is known of an object."""
        await self._read(key)
        return await super().head(key)

    async def get(self, key):
        """Return an object."""
        await self._read(key)
        return await super().get(key)

    async def _read(self, key):
        if key == self.slow_key and self.slow_reads < self.slow_reads_max:
            self.slow_reads += 1
            await asyncio.sleep(25)


def test_slow_object_holds_up_its_own_group_alone():
    """The look at one group takes 25 seconds. A round of another group ends when it is over."""

    async def history():
        store = OneSlowObject()
        endpoint = await Endpoint(store, 1, first_round_ms=3000).start()
        await in_group("a", endpoint, "slow")
        store.slow_key = group_key("c", "slow")
        while not store.slow_reads:
            endpoint.coordinator._hear(endpoint.coordinator._open["slow"], "a")
            await asyncio.sleep(1)
        begun = asyncio.get_running_loop().time()
        await in_group("b", endpoint, "fast")
        assert asyncio.get_running_loop().time() - begun < 5
        assert store.slow_reads == 1, "the slow group has one watch"

    simulated(0, history)


def test_member_whose_join_waits_is_heard_while_a_look_is_slow():
    """The look takes longer than its session timeout."""

    async def history():
        store = OneSlowObject()
        endpoint = await Endpoint(store, 1, first_round_ms=60_000).start()
        joins = JoinRequest(
            member("a", endpoint, rebalance_timeout_ms=60_000), is_new=True, protocol_type="consumer"
        )
        joining = asyncio.create_task(endpoint.coordinator.join(GROUP, joins))
        await asyncio.sleep(0.1)
        store.slow_key = group_key("c", GROUP)
        await asyncio.sleep(20)
        assert store.slow_reads == 1
        store.slow_key = ""
        assert (await joining).answer.error is GroupError.NONE

    simulated(0, history)


def test_lease_is_renewed_while_a_look_at_another_one_is_slow():
    """Another endpoint goes on to see this one alive, and removes none of its members."""

    async def history():
        store = OneSlowObject()
        first, second = await Endpoint(store, 1).start(), await Endpoint(store, 2).start()
        generation = await in_group("a", first)
        await second.coordinator.read(GROUP)
        third = Endpoint(store, 3)
        store.slow_key, store.slow_reads_max = lease_key("c", third.leases.endpoint_id), 1
        starting = asyncio.create_task(third.start())
        for _ in range(25):
            await asyncio.sleep(1)
            assert await first.coordinator.heartbeat(GROUP, "a", None, generation) is GroupError.NONE
            assert first.leases.gone_since(second.leases.endpoint_id) is None
            assert second.leases.gone_since(first.leases.endpoint_id) is None
        assert store.slow_reads == 1
        await starting

    simulated(0, history)
