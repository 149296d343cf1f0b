"""Two archive endpoints over one bucket that keep consumer groups, and members of groups for tests."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

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
