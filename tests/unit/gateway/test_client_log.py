"""What clients do is logged a few times for each address and minute, and the rest is counted."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from tests.fakes.archive import archive_in
from tests.fakes.fixtures import store
from tests.fakes.gateway_peers import NoArchive, closed, running
from tests.fakes.scripted_broker import scripted_broker
from tests.support.archive_endpoints import running_endpoint
from tests.support.raw_kafka import connected
from tieringd.gateway.client_log import ADDRESSES_MAX, LINES_PER_ADDRESS, OTHERS, ClientLog

__all__ = ["store"]

CONNECTIONS = 40
TOO_LARGE = (1 << 30).to_bytes(4) + bytes([0, 3, 0, 9]) + bytes(4)


async def cut_off(port):
    """Connect, and send what ends the connection."""
    async with connected(port) as client:
        client.writer.write(TOO_LARGE)
        assert await closed(client) == b""


@pytest.mark.parametrize("kind", ["gateway", "endpoint"])
async def test_hostile_client_cannot_fill_the_log(tmp_path, store, kind):
    """The address is in each line, and the number of those left out comes at the latest with the end."""
    event = "a gateway connection is closed" if kind == "gateway" else "a client's connection is closed"
    with capture_logs() as lines:
        if kind == "gateway":
            async with scripted_broker() as broker, running(broker, NoArchive()) as server:
                for _ in range(CONNECTIONS):
                    await cut_off(server.port)
        else:
            async with running_endpoint(archive_in(store), tmp_path / "state") as endpoint:
                for _ in range(CONNECTIONS):
                    await cut_off(endpoint.server.port)
    said = [line for line in lines if line["event"] == event]
    assert len(said) == LINES_PER_ADDRESS
    assert {line["client"] for line in said} == {"127.0.0.1"}
    (left_out,) = (line for line in lines if line["event"] == "lines about a client were left out")
    assert (left_out["client"], left_out["repeated"]) == ("127.0.0.1", CONNECTIONS - LINES_PER_ADDRESS)


async def test_next_minute_has_lines_again_and_the_count_of_the_last():
    """Nothing has to happen for the count to come."""
    client_log = ClientLog(window_seconds=0)
    with capture_logs() as lines:
        assert [client_log.admits("a") for _ in range(7)] == [True] * 5 + [False] * 2
        # The end of a window of no length is due in the next turn of the loop.
        await asyncio.sleep(0.001)
        assert client_log.admits("a")
        assert lines == [
            {
                "event": "lines about a client were left out",
                "log_level": "info",
                "client": "a",
                "repeated": 2,
            }
        ]
        client_log.close()
    assert len(lines) == 1


async def test_addresses_beyond_a_limit_share_one_allowance():
    """One client may have many addresses, and their table must not grow."""
    client_log = ClientLog()
    with capture_logs() as lines:
        admitted = sum(client_log.admits(str(number)) for number in range(10 * ADDRESSES_MAX))
        assert admitted == ADDRESSES_MAX + LINES_PER_ADDRESS
        assert client_log.admits("0")
        client_log.close()
    (line,) = lines
    assert (line["client"], line["repeated"]) == (OTHERS, 9 * ADDRESSES_MAX - LINES_PER_ADDRESS)
