"""An archive-only endpoint whose clients are served by two workers: real processes, real clients."""

# Long: daemons and their workers start as new interpreters.

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack, suppress

import pytest

from tests.e2e.archives import archived_manifest
from tests.e2e.sample_topics import SAMPLE_TOPICS, TRANSACTIONS, consumed
from tests.e2e.test_archive_only import read_confluent, serving
from tests.support.kafka_messages import fetch_request
from tests.support.processes import wait_until_ended
from tests.support.raw_kafka import connected


@pytest.fixture
def endpoint(seaweedfs, samples, tmp_path):
    """Give an endpoint with two workers."""
    with serving(seaweedfs, tmp_path, samples.prefix, gateway={"port": 0, "workers": 2}) as endpoint:
        yield endpoint


def port_of(endpoint):
    """Return the port that clients connect to."""
    return int(endpoint.bootstrap.rpartition(":")[2])


def workers_of(endpoint):
    """Return the entries of the workers that serve, by number."""
    found = endpoint.status()["gateway_workers"]
    return {one["number"]: one for one in found if one["is_serving"]}


async def read_first(client, topic=TRANSACTIONS):
    """Fetch the first records of a topic on one connection."""
    answer = await client.ask(fetch_request(12, {topic: {0: {}}}, max_bytes=1000))
    (partition,) = answer.responses[0].partitions
    assert partition.error_code.value == 0
    assert partition.records
    return partition


async def test_workers_serve_what_one_process_serves(kafka, endpoint, sample_objects):
    """Every kind of topic, record by record; the workers' figures are together on one page."""
    for topic in SAMPLE_TOPICS:
        end = archived_manifest(sample_objects, topic).next_offset
        expected = [one for one in await consumed(kafka, topic, "read_committed") if one.offset < end]
        assert (
            await asyncio.to_thread(read_confluent, endpoint.bootstrap, topic, "read_committed") == expected
        )
    assert endpoint.metric("tieringd_gateway_workers") == 2
    assert endpoint.metric("tieringd_gateway_workers_resident_bytes") > 20 << 20


async def test_dead_worker_takes_only_its_own_connections_along(endpoint):
    """Four connections are spread evenly; after a kill two go on, and a new worker takes new clients."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(port_of(endpoint))) for _ in range(4)]
        for client in clients:
            await read_first(client)
        assert [one["connections"] for one in workers_of(endpoint).values()] == [2, 2]
        before = endpoint.metric("tieringd_gateway_archived_answers_total")
        assert before == 4
        killed = workers_of(endpoint)[0]["pid"]
        os.kill(killed, signal.SIGKILL)
        lost = 0
        for client in clients:
            try:
                await read_first(client)
            except (OSError, EOFError):
                lost += 1
        assert lost == 2
        await asyncio.to_thread(
            endpoint.until, lambda: len(workers_of(endpoint)) == 2, "another worker takes its place"
        )
        assert workers_of(endpoint)[0]["pid"] != killed
        assert workers_of(endpoint)[0]["last_end"] == "by SIGKILL"
        assert endpoint.metric("tieringd_gateway_worker_ends_total", how="signal") == 1
        assert endpoint.metric("tieringd_gateway_archived_answers_total") == before + 2, "nothing falls"
        async with connected(port_of(endpoint)) as client:
            await read_first(client)
        assert workers_of(endpoint)[0]["connections"] + workers_of(endpoint)[1]["connections"] >= 2


async def test_workers_end_with_their_daemon(endpoint):
    """However the daemon ends: nothing is served any more, and no process stays."""
    pids = [one["pid"] for one in workers_of(endpoint).values()]
    async with connected(port_of(endpoint)) as client:
        await read_first(client)
        endpoint.server.kill()
        with pytest.raises((OSError, EOFError)):
            await read_first(client)
    await asyncio.to_thread(wait_until_ended, pids)


async def test_cache_is_kept_within_its_limit_for_all(seaweedfs, samples, tmp_path, endpoint):
    """The daemon counts what both workers have written."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(port_of(endpoint))) for _ in range(2)]
        for topic in SAMPLE_TOPICS:
            for client in clients:
                with suppress(AssertionError):
                    await read_first(client, topic)
    cached = sum(
        file.stat().st_size
        for file in (tmp_path / "endpoint" / "cloud_storage_cache").rglob("*.*")
        if file.is_file()
    )
    assert endpoint.metric("tieringd_cache_bytes") > 0
    assert endpoint.metric("tieringd_cache_bytes") <= cached
