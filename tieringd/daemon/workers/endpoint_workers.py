"""
The workers of an archive-only endpoint.

The bucket is all that they serve, so they share nothing but the port, the cache directory and the limits.
Each lists the topics and reads the manifests itself, as endpoints side by side do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

import structlog

from tieringd.config import Config
from tieringd.daemon.admin import serving
from tieringd.daemon.archive_endpoint import (
    ArchiveEndpoint,
    archive_endpoint_of,
    let_only_groups_be_written,
    listening_host,
    stopped_by_signals,
)
from tieringd.daemon.assembly import sole_owner
from tieringd.daemon.certificates import certificate_files
from tieringd.daemon.file_archive import claim_file_root
from tieringd.daemon.read_cache import cache_keeper_of
from tieringd.daemon.workers.cache_room import CacheRooms
from tieringd.daemon.workers.worker import WorkerParts, WorkerStart
from tieringd.daemon.workers.worker_pool import WorkerPool, done_before
from tieringd.gateway.shared_port import listening_socket
from tieringd.metrics import Metrics
from tieringd.metrics.gateway import NoClients
from tieringd.metrics.restarts import restarted
from tieringd.policies.prices import LIST_PRICES
from tieringd.processors import usable_processors
from tieringd.storage.at_once import cancelled

log = structlog.get_logger(__name__)

ENDPOINT: Final = "endpoint"


@dataclass(frozen=True, slots=True)
class EndpointDetails:
    """Facts for the workers of an endpoint alone."""

    from_cluster: str | None


@asynccontextmanager
async def endpoint_worker(parts: WorkerParts) -> AsyncIterator[ArchiveEndpoint]:
    """Serve with the parts of one worker."""
    details: EndpointDetails = parts.start.details
    let_only_groups_be_written(parts.archive)
    async with archive_endpoint_of(
        parts.start.config,
        parts.archive,
        parts.metrics,
        from_cluster=details.from_cluster,
        worker=parts,
    ) as endpoint:
        yield endpoint


async def run_endpoint_workers(config: Config, command: Sequence[str], *, from_cluster: str | None) -> None:
    """
    Serve by workers until a signal asks to stop. *command* starts a worker.

    Raises:
        ConfigError: The configuration cannot be used here, or does not say which topics are meant.
        StorageError: The bucket does not exist, or the credentials are refused.
        StorageUnavailable: The store does not answer at the start.
    """
    metrics = Metrics()
    stop = asyncio.Event()
    with stopped_by_signals(stop), sole_owner(config):
        await asyncio.to_thread(claim_file_root, config, only_reads=True)
        async with (
            endpoint_pool(config, metrics, command, stop, from_cluster=from_cluster) as pool,
            serving(config.admin, metrics, None, workers=pool),
        ):
            metrics.watch_certificates(lambda: certificate_files(config))
            if not stop.is_set():
                log.info("archive endpoint listens", host=listening_host(config), port=pool.port)
            replacing = asyncio.create_task(pool.run())
            stopping = asyncio.create_task(stop.wait())
            try:
                await asyncio.wait({replacing, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if replacing.done():
                    replacing.result()
            finally:
                await cancelled((replacing, stopping))
            log.info("stopping")
    log.info("stopped")


@asynccontextmanager
async def endpoint_pool(
    config: Config, metrics: Metrics, command: Sequence[str], stop: asyncio.Event, *, from_cluster: str | None
) -> AsyncIterator[WorkerPool]:
    """
    Run the workers of an endpoint for the time of the context.

    All of them serve when it begins, unless *stop* is set before.

    Raises:
        TieringError: A worker cannot serve, and another try would not help.
    """
    host = listening_host(config)
    keeper = cache_keeper_of(config, metrics)
    rooms = CacheRooms(keeper)
    count = config.gateway.worker_count(usable_processors())

    def greeting(number: int) -> WorkerStart:
        return WorkerStart(config, number, count, pool.port, ENDPOINT, EndpointDetails(from_cluster))

    pool = WorkerPool(
        command,
        count=count,
        listen=lambda: listening_socket(host, config.gateway.port),
        greeting=greeting,
        handlers=lambda worker: {**rooms.handlers(worker), "logged": lambda *_: None},
        metrics=metrics.workers,
        on_end=rooms.end,
        on_failure=metrics.health.task_failed,
    )
    keeper.on_evicted = lambda names: pool.tell("cache_evicted", tuple(names))
    metrics.watch_gateway(NoClients())
    if (prices := LIST_PRICES.get(config.backend or "")) is not None:
        metrics.watch_cost(prices)
    keeping = asyncio.create_task(
        restarted("cache_keeper", keeper.run, on_failure=metrics.health.task_failed)
    )
    try:
        try:
            await done_before(stop, pool.start())
            yield pool
        finally:
            await pool.close()
    finally:
        with suppress(asyncio.CancelledError):
            await cancelled((keeping,))
