"""The read gateway of a daemon: its reader and its listener, built and run together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from tieringd.archiving.reconciler import Reconciler
from tieringd.broker.base import Broker
from tieringd.config import Config
from tieringd.daemon.archive import Archive
from tieringd.daemon.gateway_tls import GatewayTls
from tieringd.daemon.read_cache import ReadCache
from tieringd.gateway.connection import GatewaySettings
from tieringd.gateway.connection_rates import BURST_SECONDS
from tieringd.gateway.readable_partitions import ReadablePartitions
from tieringd.gateway.remote_answers import RemoteAnswers
from tieringd.gateway.server import GatewayServer
from tieringd.gateway.wire import MemoryBudget
from tieringd.metrics import Metrics
from tieringd.metrics.restarts import restarted
from tieringd.reading.partition_reader import PartitionReader
from tieringd.storage.store_opening import bucket_name


@dataclass(frozen=True, slots=True)
class Gateway:
    """The parts that serve clients."""

    cache: ReadCache
    server: GatewayServer
    tls: GatewayTls
    """Renews certificates while the gateway runs."""
    on_failure: Callable[[str], None] = lambda _: None
    """Gets the name of a task that failed by a defect, for a metric."""

    def set_config(self, config: Config) -> None:
        """Use *config* from now on, as far as it can change."""
        self.cache.set_config(config)
        self.server.set_limits(gateway_settings(config, self.tls))

    async def listen(self) -> None:
        """
        Begin to listen; `run` serves.

        Raises:
            ConfigError: The address cannot be listened on.
        """
        await self.server.start()

    async def run(self) -> None:
        """Serve until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for task in self.cache.tasks(self.on_failure):
                tasks.create_task(task)
            renewing = restarted("gateway_certificates", self.tls.run, on_failure=self.on_failure)
            tasks.create_task(renewing)
            await self.server.watch()


def readable_partitions_of(archive: Archive, *, broker: Broker, reconciler: Reconciler) -> ReadablePartitions:
    """Return what this daemon knows of its broker's partitions."""
    return ReadablePartitions(
        reconciler,
        archive.manifests,
        archive.history,
        now=time.monotonic,
        now_ms=archive.clock,
        broker=broker,
    )


@asynccontextmanager
async def gateway_of(
    config: Config,
    archive: Archive,
    *,
    broker: Broker,
    reconciler: Reconciler,
    cache: ReadCache,
    may_produce: Callable[[], bool],
    metrics: Metrics,
) -> AsyncIterator[Gateway]:
    """Build a gateway that serves in this process, and close it at the end."""
    tls = GatewayTls(config, has_broker=True)
    settings = gateway_settings(config, tls)
    budget = MemoryBudget(settings.buffered_bytes)
    answers = RemoteAnswers(
        readable_partitions_of(archive, broker=broker, reconciler=reconciler),
        PartitionReader(cache.hydrator, archive.manifests.spillovers),
        records=archive.records,
        history=archive.history,
        bucket=bucket_name(config) if config.kafka_enable_describe_log_dirs_remote_storage else None,
        may_produce=may_produce,
        budget=budget,
        now=time.monotonic,
        on_answer=metrics.durations.archived_answer.observe,
        on_topic=metrics.readers.count_topic,
    )
    server = GatewayServer(
        settings,
        answers,
        on_failure=metrics.health.task_failed,
        readers=metrics.readers,
        budget=budget,
    )
    metrics.watch_gateway(server)
    try:
        yield Gateway(cache, server, tls, metrics.health.task_failed)
    finally:
        await server.close()
        await answers.close()
        await cache.hydrator.close()


def divided(settings: GatewaySettings, workers: int) -> GatewaySettings:
    """
    Return the settings of one of *workers*: an equal part of each limit, so that all keep it together.

    The limit of connections stays whole: the workers count them together. So does the number that a host may
    open at once: these connections are not spread evenly.
    """

    def part(limit: int | None) -> int | None:
        return None if limit is None else max(1, limit // workers)

    per_host = settings.max_connections_per_host or max(1, settings.max_connections // 2)
    dollars = settings.principal_dollars_per_day
    new_connections = settings.host_connections_per_second
    return replace(
        settings,
        max_connections_per_host=max(1, per_host // workers),
        host_connections_per_second=None if new_connections is None else new_connections / workers,
        buffered_bytes=settings.buffered_bytes // workers,
        archive_bytes_per_second=part(settings.archive_bytes_per_second),
        client_archive_bytes_per_second=part(settings.client_archive_bytes_per_second),
        principal_bytes_per_second=part(settings.principal_bytes_per_second),
        principal_dollars_per_day=None if dollars is None else dollars / workers,
    )


def gateway_settings(config: Config, tls: GatewayTls) -> GatewaySettings:
    """Return the listener's settings. An archive endpoint has them too, and no broker behind it."""
    gateway = config.gateway
    host, _, port = gateway.broker.rpartition(":")
    return GatewaySettings(
        host=gateway.host,
        port=gateway.port,
        broker_host=host.strip("[]"),
        broker_port=int(port),
        proxy_protocol=gateway.proxy_protocol,
        client_tls=tls.clients,
        broker_tls=tls.broker,
        max_connections=gateway.max_connections,
        max_connections_per_host=gateway.max_connections_per_host,
        host_connections_per_second=gateway.host_connections_per_second,
        host_connections_burst=(gateway.host_connections_per_second or 1) * BURST_SECONDS,
        idle_timeout_seconds=gateway.connections_max_idle_ms / 1000,
        slow_timeout_seconds=gateway.slow_client_timeout_ms / 1000,
        max_request_bytes=gateway.max_request_bytes,
        max_held_bytes=gateway.max_inspected_bytes,
        buffered_bytes=gateway.buffer_bytes,
        archive_bytes_per_second=gateway.archive_bytes_per_second,
        client_archive_bytes_per_second=gateway.client_archive_bytes_per_second,
        principal_bytes_per_second=gateway.principal_archive_bytes_per_second,
        principal_dollars_per_day=gateway.principal_store_dollars_per_day,
        slow_fetch_seconds=gateway.slow_fetch_ms / 1000,
    )
