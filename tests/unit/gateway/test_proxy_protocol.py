"""The address of a client behind a load balancer, as the PROXY protocol tells it, in real bytes."""

from __future__ import annotations

import socket
from contextlib import AsyncExitStack

import pytest

from tests.fakes.gateway_peers import closed, plain_answer, plain_request, running
from tests.fakes.log_lines import listening
from tests.support.certificate import write_certificate
from tests.support.raw_kafka import connected
from tests.support.tls_relay import presenting, trusting

SIGNATURE = bytes.fromhex("0D0A0D0A000D0A515549540A")
IPV4 = SIGNATURE + bytes.fromhex("21 11 000C CB007107 C6336401 D903 2384")
"""203.0.113.7, port 55555, to 198.51.100.1, port 9092."""
IPV6 = SIGNATURE + bytes.fromhex(
    "21 21 0024 20010DB8000000000000000000000007 20010DB8000000000000000000000001 D903 2384"
)
OTHER = IPV4.replace(bytes([203, 0, 113, 7]), bytes([203, 0, 113, 8]))
WITH_FIELDS = SIGNATURE + bytes.fromhex("21 11 0013 CB007107 C6336401 D903 2384 03 0004 A9B8C7D6")
"""The same as `IPV4`, with a checksum field after the addresses."""
LOCAL = SIGNATURE + bytes.fromhex("20 00 0000")
UNSPECIFIED = SIGNATURE + bytes.fromhex("21 00 0000")
TOO_LARGE = b"\0\0\0\1"
"""The size of a request with too few bytes, which ends a connection with a line in the log."""
ENDED, UNINTRODUCED = "a gateway connection is closed", "a connection without a PROXY header is closed"
GARBAGE = {
    "a request": plain_request(1),
    "version 1": b"PROXY TCP4 203.0.113.7 198.51.100.1 55555 9092\r\n",
    "a later version": SIGNATURE + bytes.fromhex("31 11 000C") + IPV4[16:],
    "an unknown command": SIGNATURE + bytes.fromhex("22 11 000C") + IPV4[16:],
    "UDP": SIGNATURE + bytes.fromhex("21 12 000C") + IPV4[16:],
    "a local socket": SIGNATURE + bytes.fromhex("21 31 00D8") + bytes(216),
    "too few bytes": SIGNATURE + bytes.fromhex("21 11 0004 CB007107"),
    "IPv6 in the size of IPv4": SIGNATURE + bytes.fromhex("21 21 000C") + IPV4[16:],
    "too many bytes": SIGNATURE + bytes.fromhex("21 11 FFFF"),
}


async def answered(broker, client, number):
    """Pass a request to the broker, and its answer back."""
    client.writer.write(plain_request(number))
    _, _, answers = await broker.next()
    answers.write(plain_answer(number))
    assert await client.frame() == plain_answer(number)


@pytest.mark.parametrize(
    ("header", "host"),
    [
        (IPV4, "203.0.113.7"),
        (IPV6, "2001:db8::7"),
        (WITH_FIELDS, "203.0.113.7"),
        (LOCAL, "127.0.0.1"),
        (UNSPECIFIED, "127.0.0.1"),
    ],
    ids=["IPv4", "IPv6", "with fields", "local", "unspecified"],
)
@pytest.mark.parametrize("step", [1, 1000])
async def test_client_is_known_by_the_address_that_its_balancer_tells(broker, header, host, step):
    """The log names the client's own address, however the header arrives, and the request is served."""
    async with running(broker, proxy_protocol=True) as server, connected(server.port) as client:
        client.writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(header), step):
            client.writer.write(header[at : at + step])
            await client.writer.drain()
        await answered(broker, client, 1)
        with listening() as lines:
            client.writer.write(TOO_LARGE + bytes(20))
            assert await closed(client) == b""
        assert [line["client"] for line in lines.entries if line["event"] == ENDED] == [host]


async def test_limits_are_for_the_clients_address(broker):
    """One address behind the balancer takes its places only, and another one still has its own."""
    limits = {"proxy_protocol": True, "max_connections": 8, "max_connections_per_host": 2}
    async with running(broker, **limits) as server, AsyncExitStack() as stack:
        for number, header in enumerate([IPV4, IPV4, OTHER, OTHER]):
            client = await stack.enter_async_context(connected(server.port))
            client.writer.write(header)
            await answered(broker, client, number)
        async with connected(server.port) as third:
            third.writer.write(IPV4)
            assert await closed(third) == b""
        assert server.counters.refused_connections == 1
        assert server.counters.accepted_connections == 4


async def test_header_comes_before_tls(broker, tmp_path):
    """The header is in clear, and not one byte of the handshake is taken with it."""
    certificate = write_certificate(tmp_path / "certificate.pem")
    settings = {"proxy_protocol": True, "client_tls": presenting(certificate)}
    async with running(broker, **settings) as server, connected(server.port) as client:
        client.writer.write(IPV4)
        await client.writer.start_tls(trusting(certificate), server_hostname="127.0.0.1")
        await answered(broker, client, 1)
        assert server.counters.accepted_connections == 1


async def test_check_of_health_costs_nothing(broker):
    """A balancer that connects and closes is neither a client nor a fault."""
    with listening() as lines:
        async with running(broker, proxy_protocol=True) as server:
            async with connected(server.port) as client:
                client.writer.write_eof()
                assert await closed(client) == b""
            async with connected(server.port) as client:
                client.writer.write(IPV4)
                await answered(broker, client, 1)
            assert server.counters.broken_connections == 0
            assert server.counters.accepted_connections == 1
    assert [line for line in lines.entries if line["event"] == UNINTRODUCED] == []


@pytest.mark.parametrize("begun", [b"", IPV4[:20]], ids=["silent", "in the middle"])
async def test_header_has_a_deadline(broker, begun):
    """A connection that is not introduced in time is closed."""
    settings = {"proxy_protocol": True, "connect_timeout_seconds": 0.1}
    async with running(broker, **settings) as server, connected(server.port) as client:
        client.writer.write(begun)
        assert await closed(client) == b""
        assert server.counters.broken_connections == 1
        assert server.open_connections == 0


async def test_connections_before_their_header_are_counted(broker):
    """Connections before their header cannot take more places than there are."""
    async with (
        running(broker, proxy_protocol=True, max_connections=1) as server,
        connected(server.port) as silent,
    ):
        async with connected(server.port) as second:
            second.writer.write(IPV4)
            assert await closed(second) == b""
        assert server.counters.refused_connections == 1
        silent.writer.write(IPV4)
        await answered(broker, silent, 1)


@pytest.mark.parametrize("settings", [{}, {"max_request_bytes": 1 << 30}], ids=["default", "large requests"])
async def test_header_is_refused_where_none_is_expected(broker, settings):
    """The header looks like a request of 209 MiB. No byte of it reaches the broker, whatever the limit."""
    with listening() as lines:
        async with running(broker, **settings) as server, connected(server.port) as client:
            client.writer.write(IPV4 + plain_request(1))
            assert await closed(client) == b""
            assert server.counters.broken_connections == 1
        assert broker.requests.empty()
    (line,) = [line for line in lines.entries if line["event"] == ENDED]
    assert line["client"] == "127.0.0.1"
    assert "Set gateway.proxy_protocol to true" in line["reason"]


@pytest.mark.parametrize("what", GARBAGE)
async def test_connection_without_a_header_is_closed(broker, what):
    """Nothing of it reaches the broker."""
    with listening() as lines:
        async with running(broker, proxy_protocol=True) as server, connected(server.port) as client:
            client.writer.write(GARBAGE[what])
            assert await closed(client) == b""
            assert server.counters.broken_connections == 1
            assert server.counters.accepted_connections == 0
        assert broker.connections == 0
    (line,) = [line for line in lines.entries if line["event"] == UNINTRODUCED]
    assert "set it to false" in line["reason"]
