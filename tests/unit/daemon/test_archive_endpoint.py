"""What an archive endpoint needs to start, where it listens, and what it says when it cannot."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, suppress

import pytest

from tests.fakes.archive import archive_in
from tests.fakes.log_writer import LogWriter
from tests.fakes.memory_store import MemoryStore
from tests.support.archive_endpoints import (
    archive_topic,
    asking,
    endpoint_config,
    metadata,
    running_endpoint,
    until,
)
from tests.support.raw_kafka import connected
from tieringd.config import parse_config
from tieringd.daemon.archive_endpoint import archive_endpoint_of
from tieringd.daemon.gateway_service import divided, gateway_settings
from tieringd.daemon.gateway_tls import GatewayTls
from tieringd.errors import ConfigError
from tieringd.formats.object_keys import TopicKey
from tieringd.metrics import Metrics

PROXY_HEADER = bytes.fromhex("0D0A0D0A000D0A515549540A 21 11 000C CB007107 C6336401 D903 2384")
"""203.0.113.7, port 55555, to 198.51.100.1, port 9092, in version 2."""


@pytest.fixture
def archive():
    """Give the services of an empty bucket."""
    return archive_in(MemoryStore())


async def refused(archive, config, **options):
    """Return the error with which an endpoint does not start."""
    with pytest.raises(ConfigError) as error:
        async with archive_endpoint_of(config, archive, Metrics(), **({"from_cluster": None} | options)):
            pass
    return str(error.value)


async def register(archive, cluster, topic, number=1):
    """Put a topic's manifest into the bucket, and no partition."""
    key = TopicKey(cluster, topic, f"{number:022d}")
    await archive.manifests.ensure_topic(key, partition_count=1)


async def test_endpoint_listens_on_this_host_only(archive, tmp_path):
    """An endpoint listens on the loopback address by default, because it asks for no password."""
    async with running_endpoint(archive, tmp_path) as endpoint:
        assert endpoint.server._listened.listener.getsockname()[0] == "127.0.0.1"
    async with running_endpoint(archive, tmp_path, host="127.0.0.2") as endpoint:
        assert endpoint.server._listened.listener.getsockname()[0] == "127.0.0.2"


@pytest.mark.parametrize("host", ["0.0.0.0", "'::'"])
async def test_address_that_stands_for_all_needs_one_for_clients(archive, tmp_path, host):
    """Clients connect to the address in the metadata, and the wildcard address is not one they can reach."""
    config = endpoint_config(tmp_path, host=host, archive_only_for_everyone="true")
    assert "gateway.advertised" in await refused(archive, config)


@pytest.mark.parametrize("host", ["0.0.0.0", "'::'", "192.0.2.7", "archive.example.com"])
async def test_address_of_other_hosts_needs_the_word_that_everyone_may_read(archive, tmp_path, host):
    """The endpoint knows no users, and a daemon's configuration may name such an address."""
    config = endpoint_config(tmp_path, host=host, advertised="'archive.example.com:9095'")
    assert "gateway.archive_only_for_everyone" in await refused(archive, config)


async def test_clients_are_sent_to_the_advertised_address(archive, tmp_path):
    """Clients resolve the advertised address, which need not be one of this host's."""
    settings = {
        "host": "0.0.0.0",
        "advertised": "'archive.example.com:9095'",
        "archive_only_for_everyone": "true",
    }
    async with asking(archive, tmp_path, **settings) as client:
        (node,) = (await metadata(client, everything=True)).brokers
    assert (node.host, node.port) == ("archive.example.com", 9095)


async def test_topics_of_one_name_and_two_clusters_are_for_the_operator(archive, tmp_path):
    """The error names them, and the option that chooses; then only that cluster is served."""
    for cluster, topic in (("east", "orders"), ("west", "orders"), ("west", "audit")):
        await register(archive, cluster, topic)
    message = await refused(archive, endpoint_config(tmp_path))
    assert "orders of east and west" in message
    assert "--from-cluster" in message
    async with asking(archive, tmp_path, from_cluster="west") as client:
        answer = await metadata(client, everything=True)
    assert answer.cluster_id == "west"
    assert [one.name for one in answer.topics] == ["audit", "orders"]


async def test_clusters_without_a_common_name_are_served_together(archive, tmp_path):
    """Several clusters together get an id of their own, because they never were one cluster."""
    await register(archive, "east", "orders")
    await register(archive, "west", "audit")
    async with asking(archive, tmp_path) as client:
        answer = await metadata(client, everything=True)
    assert [one.name for one in answer.topics] == ["audit", "orders"]
    assert answer.cluster_id not in {"east", "west"}


async def test_cluster_that_is_not_in_the_bucket_is_an_error(archive, tmp_path):
    """The error names the clusters that the bucket has."""
    await register(archive, "east", "orders")
    message = await refused(archive, endpoint_config(tmp_path), from_cluster="weast")
    assert "weast" in message
    assert "It holds topics of: east" in message


async def test_endpoint_without_an_archive_is_refused(archive, tmp_path):
    """A bucket has to be switched on."""
    config = parse_config(f"state_directory: {tmp_path}\n", source="t", environ={}, needs_broker=False)
    assert "cloud_storage_enabled" in await refused(archive, config)


async def test_configuration_of_a_daemon_will_do(archive, tmp_path):
    """The broker of a daemon's configuration is not looked for: it may be what was lost."""
    writer = LogWriter(tmp_path)
    writer.closed_segment()
    await archive_topic(writer, archive)
    text = f"""\
broker: {{kind: kafka, log_dirs: [/nowhere/logs], bootstrap: ['127.0.0.1:1']}}
state_directory: {tmp_path}/state
cloud_storage_enabled: true
cloud_storage_backend: file
cloud_storage_file_root: /nowhere/archive
gateway: {{enabled: true, port: 0, host: 127.0.0.1}}
"""
    config = parse_config(text, source="t", environ={}, needs_broker=False)
    async with archive_endpoint_of(config, archive, Metrics(), from_cluster=None) as endpoint:
        assert [one.name for one in endpoint.topics.all()] == ["orders"]


async def test_client_behind_a_load_balancer_is_served_after_its_header(archive, tmp_path):
    """
    A client with the balancer's header is served, and one without it is closed.

    The configuration says that every connection has the header.
    """
    async with running_endpoint(archive, tmp_path, proxy_protocol="true") as endpoint:
        async with connected(endpoint.server.port) as client:
            client.writer.write(PROXY_HEADER)
            assert len((await metadata(client, everything=True)).brokers) == 1
        async with connected(endpoint.server.port) as client:
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await metadata(client, everything=True)
        assert endpoint.server.counters.broken_connections == 1


async def test_header_that_is_not_expected_ends_its_connection(archive, tmp_path):
    """No request is taken from what follows it."""
    async with asking(archive, tmp_path, max_request_bytes=1 << 30) as client:
        client.writer.write(PROXY_HEADER)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await metadata(client, everything=True)


@pytest.mark.parametrize(
    ("set_to", "workers", "per_second", "burst"),
    [({}, 1, 20, 200), ({}, 4, 5, 200), ({"host_connections_per_second": 3}, 2, 1.5, 30)],
)
def test_rate_of_a_hosts_connections_is_divided_and_its_burst_is_not(
    tmp_path, set_to, workers, per_second, burst
):
    """Each worker has a part of the rate, and the whole burst."""
    config = endpoint_config(tmp_path, broker="'127.0.0.1:9092'", **set_to)
    settings = divided(gateway_settings(config, GatewayTls(config, has_broker=True)), workers)
    assert settings.host_connections_per_second == per_second
    assert settings.host_connections_burst == burst


async def test_endpoint_without_a_broker_limits_a_hosts_connections(archive, tmp_path):
    """Ten seconds' worth at once, and no more. Null is without limit, for all workers too."""
    async with (
        running_endpoint(archive, tmp_path, host_connections_per_second=1) as endpoint,
        AsyncExitStack() as stack,
    ):
        began, served = time.monotonic(), 0
        # The rate admits one more for each second that the machine has taken.
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while served <= 10 + time.monotonic() - began:
                client = await stack.enter_async_context(connected(endpoint.server.port, host="127.0.0.2"))
                await metadata(client, everything=True)
                served += 1
        assert 10 <= served <= 10 + time.monotonic() - began
        await until(lambda: endpoint.server.counters.refused_by_host_rate)
        other = await stack.enter_async_context(connected(endpoint.server.port, host="127.0.0.3"))
        await metadata(other, everything=True)
    config = endpoint_config(tmp_path, broker="'127.0.0.1:9092'", host_connections_per_second="null")
    settings = divided(gateway_settings(config, GatewayTls(config, has_broker=True)), 2)
    assert settings.host_connections_per_second is None


@pytest.mark.parametrize("is_set", [False, True])
def test_gateway_before_a_broker_takes_the_same_setting(tmp_path, is_set):
    """The property reaches the listener."""
    config = endpoint_config(
        tmp_path, broker="'127.0.0.1:9092'", **({"proxy_protocol": "true"} if is_set else {})
    )
    assert gateway_settings(config, GatewayTls(config, has_broker=True)).proxy_protocol is is_set
