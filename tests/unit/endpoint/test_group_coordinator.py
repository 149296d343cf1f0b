"""
Two endpoints that keep the same groups, on a virtual clock: members of both, crashes, and a store that fails.

Each member works through its partitions from the committed offsets on, and commits what it has done. The test
knows every acknowledged commit, and checks that the next owner begins there: nothing is skipped, and nothing
that was acknowledged before is read again.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from random import Random

import pytest

from tests.fakes.memory_store import MemoryStore
from tests.fakes.virtual_loop import VirtualLoop
from tieringd.archive.group_store import GroupStore
from tieringd.endpoint.endpoint_nodes import LEASE_SECONDS, EndpointLeases
from tieringd.endpoint.group_coordinator import GroupCoordinator, MemberlessCommit, OvertakenRequest
from tieringd.errors import ObjectTooLarge, StorageUnavailable, TieringError
from tieringd.formats.group_documents import group_key
from tieringd.metrics import Metrics
from tieringd.model.consumer_group import CommittedOffset, GroupMember, GroupState, GroupTopic
from tieringd.policies.group_membership import GroupError, GroupLimits, JoinRequest, SyncRequest, leave
from tieringd.policies.group_offsets import CommitRequest, commit, deleted, offset_of

TOPIC = GroupTopic("orders", "A" * 22)
PARTITIONS = 6
RECORDS = 40
GROUP = "readers"


class SlowStore(MemoryStore):
    """A store that answers after a while, and sometimes not at all."""

    def __init__(self, random=None, *, fault_share=0.0):
        super().__init__(latency_seconds=0.0)
        self.random, self.fault_share = random, fault_share
        self.is_away = False
        self.held = None
        """While it is set, writes wait for this event."""

    async def _interrupted(self, work, *, is_write):
        if is_write and self.held is not None:
            await self.held.wait()
        if self.random is not None:
            await asyncio.sleep(self.random.uniform(0, 0.2))
        if self.is_away:
            raise StorageUnavailable("the store is away")
        if self.random is not None and self.random.random() < self.fault_share:
            if is_write and self.random.random() < 0.5:
                # It arrives, and the answer is lost; perhaps it arrives late.
                if self.random.random() < 0.5:
                    await work()
                else:
                    asyncio.get_running_loop().call_later(
                        self.random.uniform(0, 2), lambda: _in_background(work())
                    )
                raise StorageUnavailable("no answer", outcome_unknown=True)
            raise StorageUnavailable("refused")
        return await work()

    async def put(self, key, body, *, crc32c, condition=None):
        """Store an object, slowly."""
        work = super().put
        return await self._interrupted(
            lambda: work(key, body, crc32c=crc32c, condition=condition), is_write=True
        )

    async def get(self, key):
        """Return an object, slowly."""
        work = super().get
        return await self._interrupted(lambda: work(key), is_write=False)

    async def head(self, key):
        """Return what is known of an object, slowly."""
        work = super().head
        return await self._interrupted(lambda: work(key), is_write=False)


_TASKS = set()


def _in_background(work):
    async def late():
        with suppress(TieringError):
            await work

    task = asyncio.get_running_loop().create_task(late())
    _TASKS.add(task)
    task.add_done_callback(_TASKS.discard)


class Endpoint:
    """The parts of one endpoint that keep groups, without its sockets."""

    def __init__(self, store, port, **limits):
        self.store = store
        self.limits = GroupLimits(**({"first_round_ms": 0} | limits))
        self.leases = EndpointLeases(store, cluster="c", host="h", port=port)
        self.metrics = Metrics()
        self.coordinator = GroupCoordinator(
            GroupStore(
                store, cluster="c", writer_id=self.leases.endpoint_id, max_bytes=self.limits.group_bytes
            ),
            self.leases,
            limits=self.limits,
            metrics=self.metrics.groups,
            now_ms=_now_ms,
            ages_ms=_now_ms,
        )
        self.tasks = []
        self.is_alive = False

    async def start(self):
        """Take a lease, and look after groups from now on."""
        await self.leases.start()
        loop = asyncio.get_running_loop()
        self.tasks = [loop.create_task(one()) for one in (self.leases.run, self.coordinator.run)]
        self.is_alive = True
        return self

    @property
    def refusals(self):
        """Return how many requests were refused because their group cannot be stored or read."""
        return self.metrics.registry.get_sample_value("tieringd_endpoint_group_refusals_total")

    def kill(self):
        """End without a word."""
        self.is_alive = False
        for task in self.tasks:
            task.cancel()


def _now_ms():
    return 1_700_000_000_000 + int(asyncio.get_running_loop().time() * 1000)


class Consumer:
    """A member as clients write them: join, sync, work, commit, and all over again when it is told to."""

    def __init__(self, name, world):
        self.name, self.world = name, world
        self.member_id = f"{name}-id"
        self.is_known = False
        self.generation = -1
        self.has_ended = False
        self.is_killed = False

    def endpoint(self):
        """Return an endpoint that is alive."""
        return self.world.random.choice([one for one in self.world.endpoints if one.is_alive])

    async def run(self):
        """Work until all is done or the consumer is killed."""
        while not self.is_killed and not self.world.is_done:
            here = self.endpoint()
            session = asyncio.create_task(self.session(here))
            # Its connection breaks when the endpoint dies.
            here.tasks.append(session)
            try:
                await session
            except TieringError:
                await asyncio.sleep(0.3)
            except asyncio.CancelledError:
                if here.is_alive:
                    raise
        self.has_ended = True

    async def session(self, here):
        """Be a member at one endpoint, for one generation."""
        member = GroupMember(
            self.member_id, None, self.name, "10.0.0.1", here.leases.endpoint_id, 10_000, 20_000,
            (("range", b""),),
        )  # fmt: skip
        joined = await here.coordinator.join(
            GROUP, JoinRequest(member, is_new=not self.is_known, protocol_type="consumer")
        )
        answer = joined.answer
        if answer.error is GroupError.UNKNOWN_MEMBER_ID:
            self.is_known, self.member_id = False, f"{self.member_id}+"
        if answer.error is not GroupError.NONE:
            await asyncio.sleep(0.2)
            return
        self.is_known, self.generation = True, answer.generation
        names = sorted(one.member_id for one in answer.members)
        assignments = {
            name: bytes(number for number in range(PARTITIONS) if number % len(names) == at)
            for at, name in enumerate(names)
        }
        error, assignment = await here.coordinator.sync(
            GROUP,
            SyncRequest(
                self.member_id, None, self.generation, None, None, here.leases.endpoint_id, assignments
            ),
        )
        if error is GroupError.NONE:
            await self.work(here, list(assignment))

    async def work(self, here, partitions):
        """Read and commit until a rebalance begins."""
        positions = {}
        for partition in partitions:
            before = self.world.acknowledged.get(partition, 0)
            group = await here.coordinator.read(GROUP)
            found = offset_of(group, TOPIC, partition)
            positions[partition] = 0 if found is None else found.offset
            assert positions[partition] >= before, "an acknowledged commit is read again"
        while not self.is_killed and here.is_alive and not self.world.is_done:
            await asyncio.sleep(self.world.random.uniform(0.1, 0.6))
            for partition in partitions:
                if positions[partition] < RECORDS:
                    self.world.read(partition, positions[partition])
                positions[partition] = min(positions[partition] + 1, RECORDS)
            error = await self.commit(here, positions)
            if error is GroupError.NONE:
                error = await here.coordinator.heartbeat(GROUP, self.member_id, None, self.generation)
            if error is not GroupError.NONE:
                if error is GroupError.UNKNOWN_MEMBER_ID:
                    self.is_known, self.member_id = False, f"{self.member_id}+"
                return

    async def commit(self, here, positions):
        """Commit, and note what was acknowledged."""
        if not positions:
            return GroupError.NONE
        offsets = {number: CommittedOffset(at, 0, "", _now_ms()) for number, at in positions.items()}
        asked = CommitRequest(
            self.member_id, None, self.generation, here.leases.endpoint_id, {TOPIC: offsets}
        )
        error = await here.coordinator.apply(
            GROUP, lambda group: commit(group, asked), member_id=self.member_id
        )
        if error is GroupError.NONE:
            self.world.acknowledge(positions)
        return error


class World:
    """Endpoints, consumers, and what was acknowledged."""

    def __init__(self, seed, *, fault_share):
        self.random = Random(seed)
        self.store = SlowStore(self.random, fault_share=fault_share)
        self.endpoints = []
        self.acknowledged = {}
        self.read_up_to = {}

    def read(self, partition, offset):
        """Note that a record was read. None is read before those ahead of it."""
        assert offset <= self.read_up_to.get(partition, 0), f"records of partition {partition} are skipped"
        self.read_up_to[partition] = max(self.read_up_to.get(partition, 0), offset + 1)

    def acknowledge(self, positions):
        """Note an acknowledged commit. It is never behind another one."""
        for partition, offset in positions.items():
            assert offset >= self.acknowledged.get(partition, 0), "a stale member has committed"
            self.acknowledged[partition] = offset

    @property
    def is_done(self):
        """Say whether all records were read and committed."""
        return all(self.acknowledged.get(number, 0) >= RECORDS for number in range(PARTITIONS))


def simulated(seed, work):
    """Run *work* on a virtual loop."""
    loop = VirtualLoop(seed)
    try:
        return loop.run_until_complete(work())
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
            with suppress(asyncio.CancelledError, TieringError):
                loop.run_until_complete(task)
        loop.close()


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_skipped_and_nothing_committed_comes_back(seed):
    """Three members over two endpoints; one endpoint dies and another comes, and a member dies."""

    async def history():
        world = World(seed, fault_share=0.0 if seed % 3 == 0 else 0.05)
        world.endpoints = [await started(world, port) for port in (1, 2)]
        consumers = [Consumer(f"c{number}", world) for number in range(3)]
        running = [asyncio.create_task(one.run()) for one in consumers]
        await asyncio.sleep(world.random.uniform(1, 12))
        world.endpoints[0].kill()
        await asyncio.sleep(world.random.uniform(0, 12))
        consumers[0].is_killed = True
        world.endpoints.append(await started(world, 3))
        await asyncio.wait_for(asyncio.gather(*running), 600)
        assert world.is_done
        assert world.read_up_to == dict.fromkeys(range(PARTITIONS), RECORDS)

    simulated(seed, history)


async def started(world, port):
    """Start an endpoint, as often as it takes."""
    while True:
        with suppress(TieringError):
            return await Endpoint(world.store, port).start()
        await asyncio.sleep(0.5)


def member(name, endpoint, **changes):
    """Return a member at an endpoint."""
    return GroupMember(
        name, None, name, "10.0.0.1", endpoint.leases.endpoint_id,
        **({"session_timeout_ms": 10_000, "rebalance_timeout_ms": 20_000} | changes),
        protocols=(("range", b""),),
    )  # fmt: skip


async def in_group(name, endpoint):
    """Let a lone member join and take its assignment."""
    joined = await endpoint.coordinator.join(
        GROUP, JoinRequest(member(name, endpoint), is_new=True, protocol_type="consumer")
    )
    generation = joined.answer.generation
    asked = SyncRequest(name, None, generation, None, None, endpoint.leases.endpoint_id, {name: b"all"})
    assert await endpoint.coordinator.sync(GROUP, asked) == (GroupError.NONE, b"all")
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


def test_heartbeats_cost_no_request():
    """Only the lease and the looks at the group do, whatever the number of heartbeats."""

    async def history():
        store = SlowStore()
        endpoint = await Endpoint(store, 1).start()
        generation = await in_group("a", endpoint)
        store.requests.clear()
        for _ in range(595):
            await asyncio.sleep(0.1)
            assert await endpoint.coordinator.heartbeat(GROUP, "a", None, generation) is GroupError.NONE
        kinds = [operation for operation, _ in store.requests]
        assert kinds.count("put") == kinds.count("list_page") == 19
        assert kinds.count("head") == 5
        assert len(kinds) == 2 * 19 + 5

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
        memberless=MemberlessCommit([(TOPIC, partition)], is_connected),
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
