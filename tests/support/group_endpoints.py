"""Two archive endpoints over one bucket that keep consumer groups, and members of groups for tests."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import confluent_kafka

from tests.support.archive_endpoints import endpoint_config
from tieringd.daemon.archive_endpoint import archive_endpoint_of
from tieringd.metrics import Metrics


@asynccontextmanager
async def group_endpoint(archive, state, *, metrics=None, **gateway):
    """Run an endpoint that keeps groups, with all its tasks."""
    settings = {"consumer_groups": "true", "group_initial_rebalance_delay_ms": 0, **gateway}
    config = endpoint_config(state, **settings)
    async with archive_endpoint_of(config, archive, metrics or Metrics(), from_cluster=None) as endpoint:
        stop = asyncio.Event()
        running = asyncio.create_task(endpoint.run(stop))
        try:
            yield endpoint
        finally:
            stop.set()
            await running


@asynccontextmanager
async def group_endpoints(archive, state, count=2, **gateway):
    """Run several endpoints over one bucket."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(group_endpoint(archive, state / str(number), **gateway))
            for number in range(count)
        ]


def bootstrap_of(*endpoints):
    """Return the addresses of endpoints, as clients take them."""
    return ",".join(f"127.0.0.1:{one.server.port}" for one in endpoints)


def read_on(bootstrap, group, count, **settings):
    """Return the offsets of records that a member of librdkafka reads, and let it leave with a commit."""
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": bootstrap, "group.id": group, "auto.offset.reset": "earliest", **settings}
    )
    found = []
    try:
        consumer.subscribe(["orders"])
        while len(found) < count:
            message = consumer.poll(120)
            assert message is not None, f"nothing came after {found}"
            assert message.error() is None, message.error()
            found.append(message.offset())
        return found
    finally:
        consumer.close()
