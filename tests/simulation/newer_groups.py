"""
Members of the newer group protocol (KIP-848) over endpoints and a store that fails, on a virtual clock.

Members come and leave one after the other, and an endpoint dies. Each heartbeat goes to the endpoint of the
one before, or to another one when that gave no answer, while the endpoint still works on what it was asked.
The world checks at each reply that no partition has two readers, and in the end that each partition has one.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from random import Random

from tests.simulation.groups import GROUP, PATIENCE_SECONDS, Endpoint, SlowStore
from tieringd.errors import StorageUnavailable, TieringError
from tieringd.model.consumer_group import GroupMember, SubscribedTopic
from tieringd.policies.consumer_protocol import JOINS, LEAVES, ConsumerHeartbeat
from tieringd.policies.group_membership import GroupError

TOPICS = {"orders": SubscribedTopic("0a" * 16, 6)}
ALL = {(one.topic_id, number) for one in TOPICS.values() for number in range(one.partition_count)}
FAULT_SHARE = 0.15
MEMBERS_AT_ONCE = 4
MEMBERS = 20
SETTLES_SECONDS = 150
"""How long the group may take to settle once all faults have ended."""


class NewerConsumer:
    """A member as clients write them: it tells all after an error, and otherwise what has changed."""

    def __init__(self, name, world):
        self.name, self.world = name, world
        self.here = world.endpoint()
        self.epoch = JOINS
        self.owned = set()
        self.tells_all = True
        self.tells_owned = False

    def request(self, **values):
        """Return a heartbeat."""
        member = GroupMember(
            self.name, None, self.name, "10.0.0.1", self.here.leases.endpoint_id, 45_000, 20_000
        )
        return ConsumerHeartbeat(
            member, **({"epoch": self.epoch, "subscribed": None, "assignor": None, "owned": None} | values)
        )

    async def run(self):
        """Send a heartbeat every second or so, until cancelled."""
        while True:
            await self.beat()
            await asyncio.sleep(self.world.random.uniform(0.2, 1.2))

    async def beat(self):
        """Send one heartbeat, and follow the reply."""
        request = self.request(
            subscribed=tuple(TOPICS) if self.tells_all else None,
            owned=frozenset(self.owned) if self.tells_all or self.tells_owned else None,
        )
        try:
            reply = await self.world.asked(self.here, request)
        except TieringError:
            self.tells_all = True
            self.here = self.world.endpoint()
            return
        if reply.error is not GroupError.NONE:
            self.tells_all = True
            if reply.error in {GroupError.UNKNOWN_MEMBER_ID, GroupError.FENCED_MEMBER_EPOCH}:
                self.epoch, self.owned = JOINS, set()
            return
        self.epoch, self.tells_all, self.tells_owned = reply.epoch, False, False
        if reply.assigned is not None and reply.assigned != self.owned:
            self.owned, self.tells_owned = set(reply.assigned), True
            self.world.check(self)

    async def leave(self):
        """Leave the group, and try it a few times."""
        for _ in range(10):
            with suppress(TieringError):
                await self.world.asked(self.here, self.request(epoch=LEAVES))
                return
            self.here = self.world.endpoint()
            await asyncio.sleep(0.5)


class NewerGroups:
    """
    Twenty members, four at a time, over two endpoints. Call `run` once, on a virtual loop.

    One endpoint dies, and another one comes.
    """

    def __init__(self, seed, _root=None):
        self.random = Random(seed)
        self.store = SlowStore(self.random)
        self.endpoints = []
        self.members = {}
        """Each member with the task that it runs in."""
        self.leaving = []
        self.requests = []
        self.events = []

    def endpoint(self):
        """Return an endpoint that is alive."""
        return self.random.choice([one for one in self.endpoints if one.is_alive])

    async def asked(self, here, request):
        """Return an endpoint's reply. What it was asked goes on there when the client gives up."""
        arrived = here.coordinator.arrival(GROUP, request.member.member_id)
        asking = asyncio.create_task(
            here.coordinator.consumer_heartbeat(GROUP, request, TOPICS.get, arrived=arrived)
        )
        self.requests.append(asking)
        # It ends with the process.
        here.tasks.append(asking)
        await asyncio.wait({asking}, timeout=PATIENCE_SECONDS)
        if not asking.done() or asking.cancelled():
            raise StorageUnavailable("no answer came")
        return asking.result()

    def check(self, one):
        """Fail where a partition that *one* reads has another reader."""
        for other in self.members:
            shared = other.owned & one.owned
            assert other is one or not shared, f"{one.name} and {other.name} both read {sorted(shared)}"

    def come(self, number):
        """Let a member come."""
        one = NewerConsumer(f"m{number}", self)
        self.events.append(("come", one.name))
        self.members[one] = asyncio.create_task(one.run())

    def go(self):
        """Let a member leave."""
        one = self.random.choice(list(self.members))
        self.events.append(("leave", one.name))
        self.members.pop(one).cancel()
        self.leaving.append(asyncio.create_task(one.leave()))

    async def run(self):
        """Run the history; fail at the first promise that is broken."""
        self.endpoints = [await Endpoint(self.store, port).start() for port in (1, 2)]
        try:
            await self.change()
            await self.settle()
        finally:
            tasks = [*self.members.values(), *self.leaving, *self.requests]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for one in self.endpoints:
                one.kill()

    async def change(self):
        """Let members come and leave, and an endpoint die, while the store fails."""
        self.store.fault_share = FAULT_SHARE
        dies_with = self.random.randrange(MEMBERS_AT_ONCE, MEMBERS)
        for number in range(MEMBERS):
            if number >= MEMBERS_AT_ONCE:
                self.go()
            if number == dies_with:
                await self.replace_endpoint()
            self.come(number)
            await self.sleep(self.random.uniform(0, 8))
        self.store.fault_share = 0.0

    async def replace_endpoint(self):
        """Let an endpoint die, and another one come."""
        self.events.append(("die", self.endpoints[0].leases.endpoint_id))
        self.endpoints[0].kill()
        one = Endpoint(self.store, 3)
        while not one.is_alive:
            with suppress(TieringError):
                await one.start()
        self.endpoints.append(one)

    async def settle(self):
        """Wait until each partition has a reader."""
        for _ in range(SETTLES_SECONDS):
            if set().union(*(one.owned for one in self.members)) == ALL:
                return
            await self.sleep(1)
        group = await self.endpoint().coordinator.read(GROUP)
        known = {name: sorted(one.consumer.assigned) for name, one in group.members.items()}
        told = {one.name: sorted(one.owned) for one in self.members}
        raise AssertionError(
            f"a partition has no reader: the group has {known}, its members were told {told}"
        )

    async def sleep(self, seconds):
        """Let the members go on; fail where one has."""
        failed, _ = await asyncio.wait(
            self.members.values(), timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
        for task in failed:
            task.result()
