"""
The nodes that clients see: this endpoint alone, or all endpoints of the archive that are alive.

Endpoints that keep consumer groups have leases in the bucket: one small object each, renewed every few
seconds. By them clients learn of all endpoints and go on when one dies, partitions and groups are spread,
and every endpoint learns whose members have lost theirs. All endpoints choose alike (`chosen`), so that the
members of a group usually meet at one endpoint. No answer depends on it: each endpoint serves any partition
and any group. But a client that learns of two nodes from one endpoint, and of one node from the other, drops
the second with all that it asked there, and some clients (librdkafka) ask again only minutes later. So an
endpoint that starts takes clients once the others list it.

A lease is judged by the clock of the endpoint that looks at it: it has ended when it was not renewed between
two looks that lie far enough apart. Time in which this process stood still does not count, and while the
store is away nothing is judged.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import structlog
import xxhash
from crc32c import crc32c

from tieringd.endpoint.endpoint_settings import NODE_ID
from tieringd.errors import CorruptDataError, ObjectNotFound, StorageUnavailable, TieringError
from tieringd.formats.group_documents import (
    EndpointLease,
    decode_lease,
    encode_lease,
    lease_key,
    leases_prefix,
    parse_lease_key,
)
from tieringd.pauses import AwakeClock
from tieringd.storage.at_once import cancelled
from tieringd.storage.base import ObjectStore
from tieringd.storage.listing import list_objects

log = structlog.get_logger(__name__)

RENEWAL_SECONDS: Final = 3.0
_FIRST_RENEWAL_SECONDS: Final = 0.25
"""Endpoints often start together. So a new one renews soon, and then half as often each time."""
LEASE_SECONDS: Final = 9.0
"""A lease that was not renewed for this time has ended."""
_SEEN_SECONDS_MAX: Final = 2 * RENEWAL_SECONDS
"""How long a start waits for the others to see it: one that stands still is not waited for."""
_SEEN_LOOK_SECONDS: Final = 0.1
_LOOK_TAKES_SECONDS: Final = 0.5
"""How long another endpoint may take from the renewal of its lease until it has seen the new ones."""
_FORGOTTEN_SECONDS: Final = 3600.0
"""The object of a lease that ended so long ago is deleted."""
_NODE_ID_MAX: Final = 2**30 - 1
"""Clients derive the id of a coordinator's connection from a node's id, and add to it."""


@dataclass(frozen=True, slots=True)
class Node:
    """A broker, as clients see it."""

    node_id: int
    host: str
    port: int


class Nodes(Protocol):
    """The nodes of the cluster, at this moment."""

    @property
    def own(self) -> Node:
        """Return this endpoint."""

    def all(self) -> Sequence[Node]:
        """Return every node that is alive, this one included, by id."""


@dataclass(frozen=True, slots=True)
class SoleNode:
    """A cluster of this endpoint alone: it neither knows others nor tells of itself."""

    own: Node

    @classmethod
    def at(cls, host: str, port: int) -> SoleNode:
        """Return the only node, at an address."""
        return cls(Node(NODE_ID, host, port))

    def all(self) -> Sequence[Node]:
        """Return this endpoint."""
        return (self.own,)


def chosen(nodes: Iterable[Node], key: str) -> Node:
    """Return the node for *key*. When a node comes or goes, only keys that it gets or had change theirs."""
    return max(nodes, key=lambda one: (xxhash.xxh32_intdigest(f"{key}/{one.node_id}".encode()), one.node_id))


def node_id_of(host: str, port: int) -> int:
    """Return the id of the node at an address: the same after a restart, and for all behind one balancer."""
    return 1 + xxhash.xxh32_intdigest(f"{host}:{port}".encode()) % _NODE_ID_MAX


@dataclass(slots=True)
class _SeenLease:
    """Another endpoint's lease, as it was seen last."""

    version: str
    changed_at: float
    """When this version was seen first, on the awake clock. It was written before."""
    lease: EndpointLease | None
    """None while it could not be read."""


class EndpointLeases:
    """The lease of this endpoint, and what is known of the others'. Belongs to one event loop."""

    def __init__(self, store: ObjectStore, *, cluster: str, host: str, port: int, awake: AwakeClock) -> None:
        self._store = store
        self._cluster = cluster
        self._awake = awake
        self.endpoint_id = secrets.token_hex(8)
        self.own = Node(node_id_of(host, port), host, port)
        self._renewals = 0
        self._renewed_at: float | None = None
        """When the last renewal that succeeded was begun."""
        self._others: dict[str, _SeenLease] = {}
        self._gone: dict[str, float] = {}
        """On the awake clock: since when each lease is known to have ended, also of endpoints without any."""
        self._looked_at: float | None = None
        """When the last look at the others' leases was begun, in loop time."""

    async def start(self) -> None:
        """
        Write the lease for the first time, look for others, and wait until they list this endpoint.

        Raises:
            StorageDenied: The credentials may not list, write or delete.
            StorageUnavailable: The store does not answer.
        """
        await self._renew()
        # So that a missing permission shows now, and not when an object is left behind.
        await self._store.delete_many([lease_key(self._cluster, "none")])
        await self._look()
        await self._wait_until_seen()

    async def run(self) -> None:
        """Renew the lease and look at the others until cancelled."""
        pause_seconds = _FIRST_RENEWAL_SECONDS
        looks: list[asyncio.Task[None]] = []
        try:
            while True:
                await asyncio.sleep(pause_seconds)
                pause_seconds = min(2 * pause_seconds, RENEWAL_SECONDS)
                try:
                    await self._renew()
                except TieringError as error:
                    log.warning("the lease of this endpoint is not renewed", error=str(error))
                    continue
                if looks and looks[0].done():
                    looks.pop().result()
                # A look that takes long holds up no renewal.
                if not looks:
                    looks.append(asyncio.get_running_loop().create_task(self._try_to_look()))
        finally:
            await cancelled(looks)

    async def _try_to_look(self) -> None:
        try:
            await self._look()
        except TieringError as error:
            log.warning("the leases of other endpoints are not looked at", error=str(error))

    async def end(self) -> None:
        """Delete the lease, so that others need not wait for its end."""
        self._renewed_at = None
        try:
            await self._store.delete_many([lease_key(self._cluster, self.endpoint_id)])
        except TieringError as error:
            log.warning("the lease of this endpoint is left to end by itself", error=str(error))

    @property
    def is_in_force(self) -> bool:
        """Say whether the own lease was renewed lately, so that others count this endpoint as alive."""
        return self._renewed_at is not None and self._now() - self._renewed_at < LEASE_SECONDS

    def all(self) -> Sequence[Node]:
        """Return every endpoint that is alive, this one included, each address once, by id."""
        others = (
            Node(seen.lease.node_id, seen.lease.host, seen.lease.port)
            for endpoint_id, seen in self._others.items()
            if seen.lease is not None and endpoint_id not in self._gone
        )
        return sorted({self.own, *others}, key=lambda one: one.node_id)

    @property
    def is_alone(self) -> bool:
        """Say whether no other endpoint is known to be alive."""
        return all(endpoint_id in self._gone for endpoint_id in self._others)

    def gone_since(self, endpoint_id: str) -> float | None:
        """Return since when, on the awake clock, a lease is known to have ended; None while it lives."""
        if endpoint_id == self.endpoint_id:
            return None
        if endpoint_id not in self._others:
            return self._gone.setdefault(endpoint_id, self._awake.now())
        return self._gone.get(endpoint_id)

    @property
    def is_judging(self) -> bool:
        """Say whether the others' leases were looked at lately. What ended before may be renewed by now."""
        return self._looked_at is not None and self._now() - self._looked_at < LEASE_SECONDS

    async def _renew(self) -> None:
        began = self._now()
        self._renewals += 1
        lease = EndpointLease(
            self.endpoint_id, self.own.node_id, self.own.host, self.own.port, self._renewals
        )
        data = encode_lease(lease)
        # No condition: no other process writes this object.
        await self._store.put(lease_key(self._cluster, self.endpoint_id), data, crc32c=crc32c(data))
        self._renewed_at = began

    async def _wait_until_seen(self) -> None:
        """Wait until every other endpoint has renewed its lease, and has looked at the leases after that."""
        unseen = {
            endpoint_id: seen.version
            for endpoint_id, seen in self._others.items()
            # A lease with the own address is a worker of the same port, or what the process before left.
            if seen.lease is not None and (seen.lease.host, seen.lease.port) != (self.own.host, self.own.port)
        }
        if not unseen:
            return
        try:
            async with asyncio.timeout(_SEEN_SECONDS_MAX):
                # Another one that starts now waits for a renewal of this lease, as this one does for its.
                await self._renew()
                while unseen:
                    await asyncio.sleep(_SEEN_LOOK_SECONDS)
                    await self._look()
                    unseen = {
                        endpoint_id: version
                        for endpoint_id, version in unseen.items()
                        if endpoint_id in self._others and self._others[endpoint_id].version == version
                    }
        except (TimeoutError, StorageUnavailable):
            log.info("other endpoints of this archive may not list this one yet", endpoints=sorted(unseen))
        else:
            # The last one that renewed is looking now.
            await asyncio.sleep(_LOOK_TAKES_SECONDS)

    async def _look(self) -> None:
        began, awake_began = self._now(), self._awake.now()
        found: dict[str, str] = {}
        async for info in list_objects(self._store, leases_prefix(self._cluster)):
            endpoint_id = parse_lease_key(self._cluster, info.key)
            if endpoint_id is not None and endpoint_id != self.endpoint_id:
                found[endpoint_id] = info.version
        if not self.is_judging:
            # The store's absence does not count against others.
            self._gone = dict.fromkeys(self._gone, self._awake.now())
        for endpoint_id in self._others.keys() - found.keys():
            del self._others[endpoint_id]
            # Its end was orderly, or long ago.
            self._gone.setdefault(endpoint_id, awake_began)
        for endpoint_id, version in found.items():
            await self._take(endpoint_id, version, awake_began)
        self._looked_at = began
        forgotten = [
            endpoint_id
            for endpoint_id, seen in self._others.items()
            if awake_began - seen.changed_at >= _FORGOTTEN_SECONDS
        ]
        if forgotten:
            await self._store.delete_many([lease_key(self._cluster, one) for one in forgotten])

    async def _take(self, endpoint_id: str, version: str, asked_at: float) -> None:
        seen = self._others.get(endpoint_id)
        if seen is None or seen.version != version:
            lease = None if seen is None else seen.lease
            # It may have been written until now, when the answer is here.
            self._others[endpoint_id] = _SeenLease(
                version, self._awake.now(), lease or await self._read(endpoint_id)
            )
            if self._gone.pop(endpoint_id, None) is not None or seen is None:
                log.info("another endpoint of this archive is seen", endpoint=endpoint_id)
        elif asked_at - seen.changed_at >= LEASE_SECONDS and endpoint_id not in self._gone:
            self._gone[endpoint_id] = asked_at
            log.warning("the lease of another endpoint has ended", endpoint=endpoint_id)

    async def _read(self, endpoint_id: str) -> EndpointLease | None:
        try:
            data, _ = await self._store.get(lease_key(self._cluster, endpoint_id))
            return decode_lease(data)
        except ObjectNotFound:
            return None
        except CorruptDataError as error:
            log.warning(
                "the lease of another endpoint cannot be read", endpoint=endpoint_id, error=str(error)
            )
            return None

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
