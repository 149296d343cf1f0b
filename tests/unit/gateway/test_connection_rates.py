"""The number of connections that a host may open in a second: its tokens, and the gateway that takes them."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.gateway_peers import closed, plain_answer, plain_request, running
from tests.fakes.log_lines import listening
from tests.support.archive_endpoints import until
from tests.support.raw_kafka import connected
from tests.unit.gateway.test_proxy_protocol import IPV4, LOCAL, OTHER
from tieringd.gateway.connection_rates import HOSTS_KEPT, ConnectionRates

BURST = 3
SLOW = {"host_connections_per_second": 0.001, "host_connections_burst": BURST}
"""A host has three connections, and no fourth in the time of a test."""
TOO_OFTEN = "a client host opens connections too often; further ones are refused"


def admitted(rates, times, host="a"):
    """Return the times at which a connection was admitted."""
    return [now for now in times if rates.admits(host, now=now)]


def test_burst_comes_first_and_the_rate_after_it():
    """A host that was away for long enough has its whole burst again."""
    rates = ConnectionRates(2.0, burst=3)
    assert [rates.admits("a", now=0.0) for _ in range(4)] == [True, True, True, False]
    assert admitted(rates, [0.25, 0.5, 0.75, 1.0]) == [0.5, 1.0]
    assert len(admitted(rates, [100.0] * 5)) == 3


def test_each_host_has_its_own_tokens_and_none_is_needed_without_a_limit():
    """One host's loop takes nothing from another host."""
    rates = ConnectionRates(1.0, burst=1)
    assert rates.admits("a", now=0.0)
    assert not rates.admits("a", now=0.0)
    assert rates.admits("b", now=0.0)
    assert len(admitted(ConnectionRates(None, burst=1), [0.0] * 1000)) == 1000


def test_another_limit_holds_at_once():
    """A reload that changes nothing gives no tokens."""
    rates = ConnectionRates(1.0, burst=1)
    assert len(admitted(rates, [0.0] * 5)) == 1
    rates.set_limit(1.0, burst=1)
    assert len(admitted(rates, [0.0] * 5)) == 0
    rates.set_limit(1.0, burst=4)
    assert len(admitted(rates, [0.0] * 5)) == 4
    rates.set_limit(None, burst=4)
    assert len(admitted(rates, [0.0] * 5)) == 5


@given(
    st.floats(0.01, 1000),
    st.integers(1, 50),
    st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 100)), max_size=200),
)
def test_no_time_has_more_connections_than_burst_and_rate(per_second, burst, steps):
    """A host opens as many as the rate gives in any span, and the burst; and no fewer than it may."""
    rates, now = ConnectionRates(per_second, burst=burst), 0.0
    times = {"a": [], "b": []}
    tokens = {"a": float(burst), "b": float(burst)}
    seen = {"a": 0.0, "b": 0.0}
    for host, scaled in steps:
        now += scaled / per_second / 20
        tokens[host] = min(burst, tokens[host] + (now - seen[host]) * per_second)
        seen[host] = now
        is_admitted = rates.admits(host, now=now)
        if abs(tokens[host] - 1) > 1e-4:
            assert is_admitted == (tokens[host] > 1)
        tokens[host] -= is_admitted
        if is_admitted:
            times[host].append(now)
    for host in times.values():
        for first, began in enumerate(host):
            for last, ended in enumerate(host[first:]):
                assert last + 1 <= burst + (ended - began) * per_second + 1e-3


def test_memory_does_not_grow_with_hosts():
    """A host that floods is remembered among many others. Hosts that have all their tokens are forgotten."""
    rates = ConnectionRates(1.0, burst=2)
    assert len(admitted(rates, [0.0] * 9, "flood")) == 2
    for number in range(3 * HOSTS_KEPT):
        assert rates.admits(f"host {number}", now=0.0)
        if number % 1000 == 0:
            assert not rates.admits("flood", now=0.0)
        assert len(rates) <= HOSTS_KEPT
    assert len(rates) == HOSTS_KEPT
    for _ in range(HOSTS_KEPT):
        rates.admits("last", now=100.0)
    assert len(rates) == 1


def test_refusals_of_a_host_are_told_once_a_second():
    """Another host is told by itself."""
    rates = ConnectionRates(1.0, burst=1)
    times = [0.0, 0.5, 0.99, 1.0, 1.5, 2.0]
    assert [now for now in times if rates.is_to_be_told("a", now=now)] == [0.0, 1.0, 2.0]
    assert rates.is_to_be_told("b", now=1.5)


async def served(broker, client, number):
    """Send a request, and have the broker answer it."""
    client.writer.write(plain_request(number))
    head, _, answers = await broker.next()
    answers.write(plain_answer(head.correlation_id))
    assert await client.frame() == plain_answer(number)


async def connect_until_full(broker, server, host):
    """Use all connections that *host* may open, one after another."""
    for number in range(BURST):
        async with connected(server.port, host=host) as client:
            await served(broker, client, number)


async def refused(server, host):
    """Connect from *host* in vain. The reset may come before the client has seen that it is connected."""
    before = server.counters.refused_by_host_rate
    with suppress(ConnectionResetError):
        async with connected(server.port, host=host) as client:
            assert await closed(client) == b""
    assert server.counters.refused_by_host_rate == before + 1


async def test_host_that_connects_in_a_loop_is_refused_and_others_are_served(broker):
    """The refusal is counted by its reason and logged, with the setting to change."""
    with listening() as lines:
        async with running(broker, **SLOW) as server:
            await connect_until_full(broker, server, "127.0.0.2")
            await refused(server, "127.0.0.2")
            async with connected(server.port, host="127.0.0.3") as other:
                await served(broker, other, 9)
            assert server.counters.accepted_connections == 4
            assert server.counters.refused_by_host_rate == server.counters.refused_connections == 1
            assert server.counters.refused_when_full == server.counters.refused_by_host == 0
    (line,) = [line for line in lines.entries if line["event"] == TOO_OFTEN]
    assert line["client"] == "127.0.0.2"
    assert "gateway.host_connections_per_second" in line["hint"]


async def test_host_is_the_one_that_a_balancer_tells(broker):
    """One host behind the balancer is refused, and the kernel goes on to answer the balancer."""
    async with running(broker, proxy_protocol=True, **SLOW) as server:
        for number in range(3):
            async with connected(server.port) as client:
                client.writer.write(IPV4)
                await served(broker, client, number)
        async with connected(server.port) as refused:
            refused.writer.write(IPV4)
            assert await closed(refused) == b""
        async with connected(server.port) as other:
            other.writer.write(OTHER)
            await served(broker, other, 9)
        assert server.counters.refused_by_host_rate == 1
        assert server.counters.unanswered_hosts == 0


async def test_connections_to_a_full_gateway_are_not_those_of_its_balancer(broker):
    """A refusal of a full gateway is counted as one, and the balancer's own checks keep their tokens."""
    with listening() as lines:
        async with running(broker, proxy_protocol=True, max_connections=1, **SLOW) as server:
            async with connected(server.port) as client:
                client.writer.write(IPV4)
                await served(broker, client, 1)
                for _ in range(BURST + 2):
                    async with connected(server.port) as refused:
                        assert await closed(refused) == b""
                assert server.counters.refused_when_full == BURST + 2
            await until(lambda: not server.open_connections)
            async with connected(server.port) as check:
                check.writer.write(LOCAL)
                await served(broker, check, 2)
            assert server.counters.refused_by_host_rate == 0
    assert TOO_OFTEN not in [line["event"] for line in lines.entries]


@pytest.mark.parametrize("per_second", [None, 100_000.0])
async def test_limit_changes_while_the_gateway_serves(broker, per_second):
    """A reload takes the limit away, or raises it, and the host is served again."""
    async with running(broker, **SLOW) as server:
        await connect_until_full(broker, server, "127.0.0.2")
        settings = server._settings
        server.set_limits(
            type(settings)(
                settings.host,
                settings.port,
                host_connections_per_second=per_second,
                host_connections_burst=BURST,
            )
        )
        async with connected(server.port, host="127.0.0.2") as client:
            await served(broker, client, 9)
        await until(lambda: not server.open_connections)
