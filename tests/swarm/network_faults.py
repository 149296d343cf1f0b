"""
Partitions of the network: what a part sends to another one stays on its way, until the network is whole.

No connection ends, and no part is told: each has to find out by its own deadlines.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from tests.swarm.faults import NODES, SERVERS, Fault, leaders_elsewhere, others_than

if TYPE_CHECKING:
    from tests.support.network import Passage

BETWEEN_BROKERS = ("replication", "controller")
TO_BROKER = "daemons to broker"
TO_STORE = "daemon to store"
BEHIND_GATEWAY = "gateway to broker"
TO_GATEWAY = "clients to gateway"


class NetworkPartition(Fault):
    """Some connections hold what goes through them."""

    archives_meanwhile = True

    @abstractmethod
    def is_cut(self, passage: Passage) -> bool:
        """Return whether a connection is one of them."""

    async def inject(self) -> None:
        """Cut them."""
        self.parts.network.cut(self.is_cut)

    async def proof(self) -> str:
        """Count the connections on which something was held."""
        held = self.parts.network.held_connections
        return f"{held} connections held" if held else ""

    async def heal(self) -> None:
        """Make the network whole."""
        self.parts.network.mend()


class BrokerIsCutOff(NetworkPartition):
    """A broker and its controller reach no other broker, and are reached by none. Clients and daemons are."""

    is_slow = True

    async def inject(self) -> None:
        """Cut what begins at the broker or leads to it."""
        self._pids = {one.pid: one.node_id for one in self.parts.cluster.brokers}
        await super().inject()

    def is_cut(self, passage: Passage) -> bool:
        """Return whether one of its two ends is the broker."""
        if passage.kind not in BETWEEN_BROKERS:
            return False
        source = passage.source(self._pids)
        return (passage.node_id == self.step.node_id) != (self._pids.get(source) == self.step.node_id)

    async def proof(self) -> str:
        """Count what was held, and tell that others lead."""
        held = await super().proof()
        leaders = await leaders_elsewhere(self.parts, self.step.node_id)
        return f"{held}, leaders {leaders}" if held and leaders else ""

    def idle_daemons(self) -> set[int]:
        """Return its node: its broker may go on to believe that it leads."""
        return {self.step.node_id}

    def knowing_nodes(self) -> tuple[int, ...]:
        """Return the others."""
        return others_than(self.step.node_id)


class DaemonIsCutOff(NetworkPartition):
    """A daemon does not reach any broker. Its gateway does."""

    def is_cut(self, passage: Passage) -> bool:
        """Return whether the daemon has connected."""
        return passage.kind == TO_BROKER and bool(
            passage.source([self.parts.daemons[self.step.node_id].server.pid])
        )

    def idle_daemons(self) -> set[int]:
        """Return its node."""
        return {self.step.node_id}


class BrokerIsCutOffFromDaemons(NetworkPartition):
    """No daemon reaches one of the brokers."""

    def is_cut(self, passage: Passage) -> bool:
        """Return whether it leads there."""
        return (passage.kind, passage.node_id) == (TO_BROKER, self.step.node_id)

    def idle_daemons(self) -> set[int]:
        """Return its node."""
        return {self.step.node_id}


class StoreIsCutOff(NetworkPartition):
    """One daemon does not reach the store; the others do."""

    stores = SERVERS

    def is_cut(self, passage: Passage) -> bool:
        """Return whether it is that daemon's way."""
        return (passage.kind, passage.node_id) == (TO_STORE, self.step.node_id)

    def idle_daemons(self) -> set[int]:
        """Return its node."""
        return {self.step.node_id}


class GatewayIsCutOffFromBroker(NetworkPartition):
    """A gateway does not reach the broker behind it."""

    def is_cut(self, passage: Passage) -> bool:
        """Return whether it leads there."""
        return (passage.kind, passage.node_id) == (BEHIND_GATEWAY, self.step.node_id)


class ClientsAreCutOff(NetworkPartition):
    """No client reaches any gateway."""

    def is_cut(self, passage: Passage) -> bool:
        """Return whether it leads to a gateway."""
        return passage.kind == TO_GATEWAY and passage.node_id in NODES


NETWORK_FAULTS: dict[str, type[Fault]] = {
    "broker is cut off from the others": BrokerIsCutOff,
    "daemon is cut off from the brokers": DaemonIsCutOff,
    "daemons are cut off from a broker": BrokerIsCutOffFromDaemons,
    "daemon is cut off from the store": StoreIsCutOff,
    "gateway is cut off from its broker": GatewayIsCutOffFromBroker,
    "clients are cut off from the gateways": ClientsAreCutOff,
}
