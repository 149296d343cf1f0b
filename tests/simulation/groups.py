"""
Endpoints that keep the same groups, on a virtual clock: members of both, crashes, stalls, a store that fails.

Each member works through its partitions from the committed offsets on, and commits what it has done. A client
that gets no answer gives up, and goes on at another endpoint; what it has asked the first one may still be
carried out there. The world knows every acknowledged commit, and checks that no older one undoes it, that the
next owner begins there, and that nothing is skipped.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from inspect import iscoroutinefunction
from random import Random

from tests.fakes.memory_store import MemoryStore
from tests.fakes.virtual_loop import VirtualLoop
from tieringd.archive.group_store import GroupStore
from tieringd.endpoint.endpoint_nodes import EndpointLeases
from tieringd.endpoint.group_coordinator import CommitSource, GroupCoordinator
from tieringd.errors import StorageUnavailable, TieringError
from tieringd.metrics import Metrics
from tieringd.model.consumer_group import CommittedOffset, GroupMember, GroupTopic
from tieringd.pauses import AwakeClock
from tieringd.policies.group_membership import GroupError, GroupLimits, JoinRequest, SyncRequest
from tieringd.policies.group_offsets import CommitRequest, commit, offset_of

TOPIC = GroupTopic("orders", "A" * 22)
PARTITIONS = 6
RECORDS = 40
GROUP, LONERS = "readers", "loners"
PATIENCE_SECONDS = 1.5
"""How long a client waits for the answer to a commit."""


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


class StallingStore:
    """A store as one endpoint reaches it: its requests may have to wait."""

    def __init__(self, store):
        self._store = store
        self.waits_for = None
        """While it is set, requests wait for this event."""

    def __getattr__(self, name):
        found = getattr(self._store, name)
        if not iscoroutinefunction(found):
            return found

        async def waiting(*arguments, **options):
            while self.waits_for is not None:
                await self.waits_for.wait()
            return await found(*arguments, **options)

        return waiting


class GaveUp(TieringError):
    """A client has waited long enough."""


class Endpoint:
    """The parts of one endpoint that keep groups, without its sockets."""

    def __init__(self, store, port, **limits):
        self.store = store = StallingStore(store)
        self.limits = GroupLimits(**({"first_round_ms": 0} | limits))
        self.awake = AwakeClock()
        self.leases = EndpointLeases(store, cluster="c", host="h", port=port, awake=self.awake)
        self.metrics = Metrics()
        self.coordinator = GroupCoordinator(
            GroupStore(
                store, cluster="c", writer_id=self.leases.endpoint_id, max_bytes=self.limits.group_bytes
            ),
            self.leases,
            limits=self.limits,
            metrics=self.metrics.groups,
            awake=self.awake,
            now_ms=now_ms,
            ages_ms=now_ms,
        )
        self.tasks = []
        self.is_alive = False

    async def start(self):
        """Take a lease, and look after groups from now on."""
        await self.leases.start()
        loop = asyncio.get_running_loop()
        self.tasks = [
            loop.create_task(one()) for one in (self.leases.run, self.coordinator.run, self.awake.run)
        ]
        self.is_alive = True
        return self

    @property
    def refusals(self):
        """Return how many requests were refused because their group cannot be stored or read."""
        return self.metrics.registry.get_sample_value("tieringd_endpoint_group_refusals_total")

    async def stall(self, seconds):
        """Reach the store no more for a while."""
        self.store.waits_for = asyncio.Event()
        await asyncio.sleep(seconds)
        reached, self.store.waits_for = self.store.waits_for, None
        reached.set()

    async def commit(self, client, group_id, asked):
        """
        Commit for a client that gives up after a while and closes its connection.

        The close does not arrive where that is not the only sign: the host is cut off.
        """
        coordinator, is_open = self.coordinator, [True]
        partitions = [(topic, number) for topic, numbers in asked.offsets.items() for number in numbers]
        arrived = coordinator.arrival(group_id, asked.member_id)
        known = coordinator._open.get(group_id)
        has_other_sign = (
            arrived.was_here if asked.member_id else known is not None and known.known is not None
        )
        is_cut_off = has_other_sign and client.world.random.random() < 0.5
        committing = asyncio.create_task(
            coordinator.apply(
                group_id,
                lambda group: commit(group, asked),
                member_id=asked.member_id,
                arrived=arrived,
                source=CommitSource(lambda: is_open[0], () if asked.member_id else partitions),
            )
        )
        client.world.requests.append(committing)
        done, _ = await asyncio.wait({committing}, timeout=PATIENCE_SECONDS)
        if done:
            return committing.result()
        is_open[0] = is_cut_off
        raise GaveUp("no answer came")

    def kill(self):
        """End without a word."""
        self.is_alive = False
        for task in self.tasks:
            task.cancel()


def now_ms():
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
            try:
                error = await self.commit(here, positions)
            except GaveUp:
                # It goes on elsewhere, in the same generation.
                here = self.world.other_than(here)
                continue
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
        offsets = {number: CommittedOffset(at, 0, "", now_ms()) for number, at in positions.items()}
        asked = CommitRequest(
            self.member_id, None, self.generation, here.leases.endpoint_id, {TOPIC: offsets}
        )
        error = await here.commit(self, GROUP, asked)
        if error is GroupError.NONE:
            self.world.acknowledge(positions)
        return error


class Loner:
    """A consumer that commits without being a member."""

    def __init__(self, world):
        self.world = world
        self.acknowledged = 0

    async def run(self):
        """Commit one offset after another."""
        here, at = self.world.endpoints[0], 0
        while self.acknowledged < RECORDS:
            at = min(at + 1, RECORDS)
            offsets = {TOPIC: {0: CommittedOffset(at, 0, "", now_ms())}}
            asked = CommitRequest("", None, -1, here.leases.endpoint_id, offsets)
            try:
                assert await here.commit(self, LONERS, asked) is GroupError.NONE
                self.acknowledged = at
            except TieringError:
                here = self.world.other_than(here)
            await asyncio.sleep(self.world.random.uniform(0.1, 0.6))


class Groups:
    """
    Three members and a consumer that is none, over two endpoints. Call `run` once, on a virtual loop.

    One endpoint dies and another one comes, a member dies, and endpoints do not reach the store for a while.
    """

    def __init__(self, seed, _root=None):
        self.random = Random(seed)
        self.store = SlowStore(self.random, fault_share=0.0 if seed % 3 == 0 else 0.05)
        self.endpoints = []
        self.acknowledged = {}
        self.read_up_to = {}
        self.requests = []
        self.events = []
        self.loner = Loner(self)

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
    def alive(self):
        """Return the endpoints that are alive."""
        return [one for one in self.endpoints if one.is_alive]

    def other_than(self, endpoint):
        """Return an endpoint that is alive, another one where there is one."""
        others = [one for one in self.alive if one is not endpoint]
        return self.random.choice(others or self.alive)

    @property
    def is_done(self):
        """Say whether all records were read and committed."""
        return all(self.acknowledged.get(number, 0) >= RECORDS for number in range(PARTITIONS))

    async def started(self, port):
        """Start an endpoint, as often as it takes."""
        while True:
            with suppress(TieringError):
                return await Endpoint(self.store, port).start()
            await asyncio.sleep(0.5)

    async def run(self):
        """Run the history; fail at the first promise that is broken."""
        self.endpoints = [await self.started(port) for port in (1, 2)]
        consumers = [Consumer(f"c{number}", self) for number in range(3)]
        helpers = [asyncio.create_task(one) for one in (self.watch(), self.stall())]
        try:
            async with asyncio.timeout(900):
                working = [asyncio.create_task(one.run()) for one in (*consumers, self.loner)]
                failing = asyncio.gather(*working, self.change(consumers))
                await asyncio.wait({failing, *helpers}, return_when=asyncio.FIRST_COMPLETED)
                for one in helpers:
                    if one.done():
                        one.result()
                await failing
        finally:
            for one in (*helpers, *self.requests):
                one.cancel()
            await asyncio.gather(*helpers, *self.requests, return_exceptions=True)
        assert self.is_done
        assert self.read_up_to == dict.fromkeys(range(PARTITIONS), RECORDS)
        for one in self.endpoints:
            one.kill()

    async def change(self, consumers):
        """Let an endpoint and a member die, and another endpoint come."""
        await asyncio.sleep(self.random.uniform(1, 12))
        self.endpoints[0].kill()
        await asyncio.sleep(self.random.uniform(0, 12))
        consumers[0].is_killed = True
        self.endpoints.append(await self.started(3))

    async def stall(self):
        """Keep one endpoint after the other from the store for some seconds."""
        while True:
            await asyncio.sleep(self.random.uniform(1, 4))
            one = self.random.choice(self.alive)
            self.events.append(("stall", one.leases.endpoint_id))
            await one.stall(self.random.uniform(PATIENCE_SECONDS, 3 * PATIENCE_SECONDS))

    async def watch(self):
        """Check all the time that no acknowledged commit was undone."""
        while True:
            await asyncio.sleep(0.5)
            here = self.random.choice(self.alive)
            before, alone = dict(self.acknowledged), self.loner.acknowledged
            try:
                group, loners = await here.coordinator.read(GROUP), await here.coordinator.read(LONERS)
            except TieringError:
                continue
            for partition, offset in before.items():
                found = offset_of(group, TOPIC, partition)
                reached = 0 if found is None else found.offset
                assert reached >= offset, f"a commit of partition {partition} was undone"
            found = offset_of(loners, TOPIC, 0)
            reached = 0 if found is None else found.offset
            assert reached >= alone, "a commit without a member was undone"


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
