"""A gateway in front of a real broker. The broker's second listener advertises the gateway to clients."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from tests.support.kafka import KafkaCluster, Listener
from tests.support.ports import free_ports
from tieringd.gateway.connection import GatewaySettings
from tieringd.gateway.server import GatewayServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tieringd.gateway.archive_answers import ArchiveAnswers

LISTENER = "TIERED"


class BrokerBehind:
    """A cluster of one broker, and the port on which its gateway has to listen."""

    def __init__(self, cluster: KafkaCluster, port: int) -> None:
        self.cluster = cluster
        self.port = port

    @classmethod
    async def start(cls, directory: Path, *, protocol: str = "PLAINTEXT", **settings: Any) -> BrokerBehind:
        """Start the broker. The caller starts the gateway."""
        (port,) = free_ports(1)
        listeners = [Listener(LISTENER, protocol, advertised_ports=(port,))]
        return cls(await KafkaCluster.start(directory, listeners=listeners, **settings), port)

    @property
    def bootstrap(self) -> str:
        """Return the gateway's `host:port`."""
        return f"127.0.0.1:{self.port}"

    @property
    def gateway_config(self) -> dict[str, Any]:
        """Return a daemon's `gateway` block, with the address that the broker advertises."""
        return {
            "enabled": True,
            "host": "127.0.0.1",
            "port": self.port,
            "broker": f"127.0.0.1:{self.cluster.broker.listener_ports[LISTENER]}",
        }

    @asynccontextmanager
    async def gateway(
        self, archive: ArchiveAnswers | None = None, **settings: Any
    ) -> AsyncIterator[GatewayServer]:
        """Run the gateway."""
        broker_port = self.cluster.broker.listener_ports[LISTENER]
        server = GatewayServer(
            GatewaySettings("127.0.0.1", self.port, "127.0.0.1", broker_port, **settings), archive
        )
        await server.start()
        try:
            yield server
        finally:
            await server.close()
