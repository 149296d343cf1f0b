"""
Mutated frames against both listeners: each ends at most its own connection.

No frame takes long, or much memory, and none meets a defect. `make fuzz MINUTES=` runs these for longer.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager, suppress
from random import Random

import pytest

from tests.fakes.archive import archive_in
from tests.fakes.fixtures import store
from tests.fakes.gateway_peers import TopicArchive, running
from tests.fakes.scripted_broker import scripted_broker
from tests.support.archive_endpoints import running_endpoint
from tests.support.counted_calls import counted_calls
from tests.support.frame_fuzz import PASSWORD, USER, fuzzed, is_of_login, mutated, resident_bytes
from tests.support.raw_kafka import connected
from tieringd.endpoint.access import AccessRule, Operation
from tieringd.endpoint.users_file import Users
from tieringd.formats.object_keys import TopicKey
from tieringd.gateway.archive_answers import ListedOffset
from tieringd.metrics import Metrics
from tieringd.metrics.readers import OTHER

__all__ = ["store"]

MIB = 1 << 20
SEED = 25
_CALLS_OF_A_FRAME = 50_000
"""Ten times the calls for the most expensive frame."""


class WholeArchive(TopicArchive):
    """Answers every question at once."""

    async def list_offsets(self, asked, *, read_committed):
        return dict.fromkeys(asked, ListedOffset(1, -1, 0))


@asynccontextmanager
async def gateway(tmp_path, store):
    """Run a gateway before a broker whose answers are mutated requests: it may be broken as well."""
    random = Random(SEED)
    async with scripted_broker() as broker:

        async def answer():
            while True:
                head, frame, answers = await broker.requests.get()
                said = bytearray(mutated(random, frame[:4] + frame[8:12] + frame[12:] + bytes(20)))
                if random.random() < 0.9:
                    said[4:8] = head.correlation_id.to_bytes(4, signed=True)
                with suppress(ConnectionError):
                    answers.write(said)

        answering = asyncio.create_task(answer())
        async with running(broker, WholeArchive(), max_request_bytes=MIB, buffered_bytes=8 * MIB) as server:
            yield server
        answering.cancel()


@asynccontextmanager
async def endpoint(tmp_path, store):
    """Run an archive-only endpoint."""
    async with running_endpoint(archive_in(store), tmp_path / "state", buffer_bytes=8 * MIB) as found:
        yield found.server


@asynccontextmanager
async def endpoint_with_groups(tmp_path, store):
    """Run an archive-only endpoint that keeps groups, with one topic for their offsets."""
    archive = archive_in(store)
    await archive.manifests.ensure_topic(TopicKey("cluster", "old", "A" * 21 + "Q"), partition_count=3)
    settings = {"consumer_groups": "true", "group_initial_rebalance_delay_ms": 0, "groups_max": 50}
    async with running_endpoint(archive, tmp_path / "state", buffer_bytes=8 * MIB, **settings) as found:
        yield found.server


@asynccontextmanager
async def endpoint_with_users(tmp_path, store):
    """Run an archive-only endpoint that knows the user whose logins are among the frames."""
    path = tmp_path / "users.yaml"
    rule = AccessRule(f"User:{USER}", frozenset({Operation.READ}), "*")
    Users(rules=(rule,)).with_user(USER, PASSWORD).write(path)
    settings = {"users_file": str(path), "sasl_plain": "true", "sasl_plain_without_tls": "true"}
    metrics = Metrics()
    async with running_endpoint(
        archive_in(store), tmp_path / "state", buffer_bytes=8 * MIB, metrics=metrics, **settings
    ) as found:
        yield found.server
    samples = [sample for metric in metrics.readers.collect() for sample in metric.samples]
    # Some were answered after a login, and none without one.
    assert {sample.labels["principal"] for sample in samples} - {OTHER} == {f"User:{USER}"}


async def settled(server, seen):
    """Let the listener handle what was sent: a few turns of the loop without anything new."""
    for _ in range(50):
        await asyncio.sleep(0)
        if server.counters.from_client_bytes > seen:
            break
    await asyncio.sleep(0)


@pytest.mark.parametrize("listener", [gateway, endpoint, endpoint_with_groups, endpoint_with_users])
async def test_no_mutated_frame_harms_others(tmp_path, store, listener):
    """
    Time and calls are those of this thread, which runs the listener, for each frame.

    Memory is that of the process. Without a login no Fetch is answered where there are users.
    """
    longest, most_calls, before = 0.0, 0, 0
    async with listener(tmp_path, store) as server:
        with counted_calls() as calls:
            for session in fuzzed(SEED):
                async with connected(server.port) as client:
                    for frame in session:
                        if client.reader.at_eof():
                            break
                        seen = server.counters.from_client_bytes
                        began, calls_before = time.thread_time(), calls()
                        with suppress(ConnectionError):
                            client.writer.write(frame)
                            await client.writer.drain()
                        await settled(server, seen)
                        if is_of_login(frame) and listener is not gateway:
                            # It is answered, or the connection ends. A password is verified in a thread.
                            with suppress(ConnectionError):
                                await client.reader.read(1 << 16)
                        longest = max(longest, time.thread_time() - began)
                        most_calls = max(most_calls, calls() - calls_before)
                before = before or resident_bytes()
        assert resident_bytes() - before < 96 * MIB
        assert server.counters.failed_connections == 0
        assert server.counters.broken_connections > 0
    assert longest < 0.25
    assert most_calls < _CALLS_OF_A_FRAME
