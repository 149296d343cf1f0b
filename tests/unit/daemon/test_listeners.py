"""What runs a listener ends when the listener does: it is started again, where it would only look alive."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.archive import archive_in
from tests.support.archive_endpoints import endpoint_config
from tests.support.raw_kafka import connected
from tieringd.daemon.archive_endpoint import ArchiveEndpoint
from tieringd.daemon.gateway_service import Gateway, ReadCache
from tieringd.endpoint.served_manifests import ServedTopics
from tieringd.gateway.connection import GatewaySettings
from tieringd.gateway.server import GatewayServer
from tieringd.metrics import Metrics
from tieringd.storage.memory import MemoryStore
from tieringd.topics.topic_registry import TopicRegistry


class FaultyServer(GatewayServer):
    """A listener that fails with its first client."""

    def __init__(self):
        self.is_started = asyncio.Event()
        super().__init__(GatewaySettings("127.0.0.1", 0), connect=self._fail)

    def _fail(self, sock, *_):
        sock.close()
        raise RuntimeError("a fault of ours")

    async def start(self):
        await super().start()
        self.is_started.set()


async def fails_with_its_first_client(server, running):
    """Expect *running* to end with the fault of *server* when a client comes."""
    task = asyncio.create_task(running)
    async with asyncio.timeout(20):
        await server.is_started.wait()
        async with connected(server.port):
            with pytest.raises(ExceptionGroup) as error:
                await task
    assert error.group_contains(RuntimeError, match="a fault of ours")
    await server.close()


async def test_gateway_ends_with_its_listener(tmp_path):
    """And so does the daemon, which does not run on without one of its parts."""
    cache = ReadCache(endpoint_config(tmp_path), archive_in(MemoryStore()), Metrics())
    server = FaultyServer()
    gateway = Gateway(cache, server)
    await gateway.listen()
    await fails_with_its_first_client(server, gateway.run())
    await cache.hydrator.close()


async def test_archive_endpoint_ends_with_its_listener(tmp_path):
    """Nobody asks it to stop."""
    archive = archive_in(MemoryStore())
    cache = ReadCache(endpoint_config(tmp_path), archive, Metrics())
    server = FaultyServer()
    topics = ServedTopics(
        TopicRegistry(archive.store, archive.manifests), from_cluster=None, interval_seconds=60
    )
    await server.start()
    endpoint = ArchiveEndpoint(cache, server, topics)
    await fails_with_its_first_client(server, endpoint.run(asyncio.Event()))
    await cache.hydrator.close()
