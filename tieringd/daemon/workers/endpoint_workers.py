"""
The workers of an archive-only endpoint.

The bucket is all that they serve, so they share nothing but the port, the cache directory and the limits.
Each lists the topics and reads the manifests itself, as endpoints side by side do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import structlog

from tieringd.config import Config
from tieringd.daemon.admin import serving
from tieringd.daemon.archive_endpoint import (
    ArchiveEndpoint,
    archive_endpoint_of,
    let_only_groups_be_written,
    listening_host,
    reloading,
    stopped_by_signals,
)
from tieringd.daemon.certificates import certificate_files
from tieringd.daemon.file_archive import claim_file_root
from tieringd.daemon.read_cache import cache_keeper_of, keeper_settings_of
from tieringd.daemon.reloading import on_hangup
from tieringd.daemon.state_lock import sole_owner
from tieringd.daemon.workers.cache_room import CacheRooms
from tieringd.daemon.workers.worker import ENDPOINT, WorkerParts, WorkerStart
from tieringd.daemon.workers.worker_pool import WorkerPool, done_before
from tieringd.gateway.shared_port import listening_socket
from tieringd.metrics import Metrics
from tieringd.metrics.gateway import NoClients
from tieringd.metrics.restarts import restarted
from tieringd.policies.prices import LIST_PRICES
from tieringd.processors import usable_processors
from tieringd.storage.at_once import cancelled

log = structlog.get_logger(__name__)


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


async def run_endpoint_workers(
    config: Config,
    command: Sequence[str],
    *,
    from_cluster: str | None,
    load: Callable[[], Config],
    on_change: Callable[[Config], None],
) -> None:
    """
    Serve by workers until a signal asks to stop. *command* starts a worker.

    On SIGHUP *load* reads the configuration again. *on_change* and the workers get the one in use after that.

    Raises:
        ConfigError: The configuration cannot be used here, or does not say which topics are meant.
        StorageError: The bucket does not exist, or the credentials are refused.
        StorageUnavailable: The store does not answer at the start.
    """
    metrics = Metrics()
    stop, hangup = asyncio.Event(), asyncio.Event()
    with stopped_by_signals(stop), sole_owner(config):
        await asyncio.to_thread(claim_file_root, config, only_reads=True)
        async with (
            on_hangup(hangup.set),
            endpoint_workers_of(config, metrics, command, stop, from_cluster=from_cluster) as workers,
            serving(config.admin, metrics, None, reload=hangup.set, workers=workers.pool),
        ):
            pool = workers.pool

            def apply(changed: Config) -> None:
                on_change(changed)
                workers.set_config(changed)

            metrics.watch_certificates(lambda: certificate_files(config))
            if not stop.is_set():
                log.info("archive endpoint listens", host=listening_host(config), port=pool.port)
            replacing = asyncio.create_task(pool.run())
            stopping = asyncio.create_task(stop.wait())
            try:
                async with reloading(config, hangup, load=load, apply=apply, metrics=metrics):
                    await asyncio.wait({replacing, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if replacing.done():
                    replacing.result()
            finally:
                await cancelled((replacing, stopping))
            log.info("stopping")
    log.info("stopped")


class EndpointWorkers:
    """The daemon's side: the workers, and the cache directory that they share."""

    def __init__(
        self, config: Config, metrics: Metrics, command: Sequence[str], *, from_cluster: str | None
    ) -> None:
        """Keep the arguments. *command* starts a worker."""
        self._config = config
        self._details = EndpointDetails(from_cluster)
        self._count = config.gateway.worker_count(usable_processors())
        host = listening_host(config)
        self.keeper = cache_keeper_of(config, metrics)
        rooms = CacheRooms(self.keeper)
        self.pool = WorkerPool(
            command,
            count=self._count,
            listen=lambda: listening_socket(host, config.gateway.port),
            greeting=self._greeting,
            handlers=lambda worker: {**rooms.handlers(worker), "logged": lambda *_: None},
            metrics=metrics.workers,
            on_end=rooms.end,
            on_failure=metrics.health.task_failed,
        )
        self.keeper.on_evicted = lambda names: self.pool.tell("cache_evicted", tuple(names))

    def set_config(self, config: Config) -> None:
        """Use *config* from now on, as far as it can change; the workers as well."""
        self._config = config
        self.keeper.set_settings(keeper_settings_of(config))
        self.pool.tell("config", config)

    def _greeting(self, number: int) -> WorkerStart:
        return WorkerStart(self._config, number, self._count, self.pool.port, ENDPOINT, self._details)


@asynccontextmanager
async def endpoint_workers_of(
    config: Config, metrics: Metrics, command: Sequence[str], stop: asyncio.Event, *, from_cluster: str | None
) -> AsyncIterator[EndpointWorkers]:
    """
    Run the workers of an endpoint for the time of the context.

    All of them serve when it begins, unless *stop* is set before.

    Raises:
        TieringError: A worker cannot serve, and another try would not help.
    """
    workers = EndpointWorkers(config, metrics, command, from_cluster=from_cluster)
    metrics.watch_gateway(NoClients())
    if (prices := LIST_PRICES.get(config.backend or "")) is not None:
        metrics.watch_cost(prices)
    keeping = asyncio.create_task(
        restarted("cache_keeper", workers.keeper.run, on_failure=metrics.health.task_failed)
    )
    try:
        try:
            await done_before(stop, workers.pool.start())
            yield workers
        finally:
            await workers.pool.close()
    finally:
        with suppress(asyncio.CancelledError):
            await cancelled((keeping,))
