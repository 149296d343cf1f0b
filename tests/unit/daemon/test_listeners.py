"""What runs a listener ends when the listener does: it is started again, where it would only look alive."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.archive import archive_in
from tests.fakes.memory_store import MemoryStore
from tests.support.archive_endpoints import endpoint_config
from tieringd.daemon.archive_endpoint import ArchiveEndpoint
from tieringd.daemon.gateway_service import Gateway
from tieringd.daemon.gateway_tls import GatewayTls
from tieringd.daemon.read_cache import ReadCache
from tieringd.endpoint.served_manifests import ServedTopics
from tieringd.endpoint.users_file import UserDirectory
from tieringd.errors import ConfigError
from tieringd.gateway.connection import GatewaySettings
from tieringd.gateway.server import GatewayServer
from tieringd.metrics import Metrics
from tieringd.topics.topic_registry import TopicRegistry


class FaultyServer(GatewayServer):
    """A listener that ends with an error that an operator has to act on."""

    def __init__(self):
        super().__init__(GatewaySettings("127.0.0.1", 0))

    async def _accept(self, listener):
        raise ConfigError("the listener cannot go on")


async def fails_with_its_listener(server, running):
    """Expect *running* to end with the error of *server*."""
    async with asyncio.timeout(60):
        with pytest.raises(ExceptionGroup) as error:
            await running
    assert error.group_contains(ConfigError, match="the listener cannot go on")
    await server.close()


async def test_gateway_ends_with_its_listener(tmp_path):
    """The daemon ends as well: it does not run without one of its parts."""
    cache = ReadCache(endpoint_config(tmp_path), archive_in(MemoryStore()), Metrics())
    server = FaultyServer()
    gateway = Gateway(cache, server, GatewayTls(endpoint_config(tmp_path), has_broker=True))
    await gateway.listen()
    await fails_with_its_listener(server, gateway.run())
    await cache.hydrator.close()


async def test_archive_endpoint_ends_with_its_listener(tmp_path):
    """No request asks it to stop."""
    archive = archive_in(MemoryStore())
    cache = ReadCache(endpoint_config(tmp_path), archive, Metrics())
    server = FaultyServer()
    topics = ServedTopics(
        TopicRegistry(archive.store, archive.manifests), from_cluster=None, interval_seconds=60
    )
    await server.start()
    tls = GatewayTls(endpoint_config(tmp_path), has_broker=False)
    endpoint = ArchiveEndpoint(cache, server, topics, UserDirectory(None), tls)
    await fails_with_its_listener(server, endpoint.run(asyncio.Event()))
    await cache.hydrator.close()
