"""
The archive endpoint: a bucket served to Kafka clients, with no broker behind it, from start to end.

It reads, and writes consumer groups if it is told to keep any. A broker's ACLs are not known here: users
and topic rules come from a file of the endpoint's own. Without one, every client that reaches the port can
read everything. It then listens on this host only, unless the configuration allows reads without a login.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final

import structlog

from tieringd.archive.group_store import GroupStore
from tieringd.config import Config
from tieringd.daemon.admin import serving
from tieringd.daemon.archive import Archive, opened_archive
from tieringd.daemon.certificates import certificate_files
from tieringd.daemon.file_archive import claim_file_root
from tieringd.daemon.gateway_service import divided, gateway_settings
from tieringd.daemon.gateway_tls import LOOK_SECONDS, GatewayTls
from tieringd.daemon.read_cache import ReadCache
from tieringd.daemon.reloading import Reloader, on_hangup
from tieringd.daemon.service_manager import ServiceManager
from tieringd.daemon.state_lock import sole_owner
from tieringd.endpoint.cluster_answers import ClusterAnswers, DescriptionAnswers
from tieringd.endpoint.endpoint_connection import EndpointConnection
from tieringd.endpoint.endpoint_nodes import EndpointLeases, Nodes, SoleNode
from tieringd.endpoint.endpoint_settings import ADVERTISED, ADVERTISED_WITH_GROUPS, EndpointSettings
from tieringd.endpoint.fetch_answers import FetchAnswers
from tieringd.endpoint.group_answers import GroupAnswers
from tieringd.endpoint.group_coordinator import GroupCoordinator
from tieringd.endpoint.offset_answers import OffsetAnswers
from tieringd.endpoint.refusals import Refusals
from tieringd.endpoint.request_handlers import RequestHandlers
from tieringd.endpoint.served_manifests import ServedPartitions, ServedTopics
from tieringd.endpoint.users_file import UserDirectory
from tieringd.errors import ConfigError, StorageDenied
from tieringd.formats.group_documents import GROUPS_PREFIX
from tieringd.gateway.connection import ConnectionContext, GatewaySettings
from tieringd.gateway.read_rates import HOST, ReadRates
from tieringd.gateway.server import GatewayServer
from tieringd.metrics import Metrics
from tieringd.metrics.readers import READER
from tieringd.metrics.restarts import restarted
from tieringd.pauses import AwakeClock
from tieringd.policies.group_membership import GroupLimits
from tieringd.policies.prices import LIST_PRICES
from tieringd.reading.partition_reader import PartitionReader
from tieringd.storage.at_once import cancelled
from tieringd.storage.checked_puts import PROBE_PREFIX
from tieringd.storage.store_opening import bucket_name, store_limits
from tieringd.topics.topic_registry import TopicRegistry

if TYPE_CHECKING:
    # That module builds on this one.
    from tieringd.daemon.workers.worker import WorkerParts

log = structlog.get_logger(__name__)

_THIS_HOST: Final = "127.0.0.1"
_EVERYWHERE: Final = frozenset({"0.0.0.0", "::", "0", "*", ""})  # noqa: S104 they are looked for, not used


@dataclass(frozen=True, slots=True)
class KeptGroups:
    """The parts that keep consumer groups in the bucket."""

    leases: EndpointLeases
    coordinator: GroupCoordinator
    awake: AwakeClock
    """Measures the silence of members and of other endpoints."""

    def tasks(self, on_failure: Callable[[str], None]) -> Sequence[Coroutine[None, None, None]]:
        """Return what runs until it is cancelled. *on_failure* is that of `restarted`."""
        return (
            restarted("endpoint_pauses", self.awake.run, on_failure=on_failure),
            restarted("endpoint_lease", self.leases.run, on_failure=on_failure),
            restarted("endpoint_groups", self.coordinator.run, on_failure=on_failure),
            restarted("endpoint_old_offsets", self.coordinator.run_keeping, on_failure=on_failure),
        )

    async def end(self) -> None:
        """End waits, so that clients go to another endpoint."""
        self.coordinator.end_waits()
        await self.leases.end()


@dataclass(frozen=True, slots=True)
class ArchiveEndpoint:
    """The parts that serve clients."""

    cache: ReadCache
    server: GatewayServer
    topics: ServedTopics
    users: UserDirectory
    tls: GatewayTls
    """Renews the certificate while the endpoint runs."""
    groups: KeptGroups | None = None
    """None where this endpoint keeps no consumer groups."""
    on_failure: Callable[[str], None] = lambda _: None
    """Called with the name of a task that failed by a defect, for a metric."""
    worker: WorkerParts | None = None
    """The parts of the worker in which it serves; None where it is the only process."""
    _is_changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the users file is to be looked at before its time."""

    def set_config(self, config: Config) -> None:
        """Use the limits of *config* from now on, and look at the users file."""
        self.server.set_limits(_settings_of(config, self.tls, self.worker))
        self._is_changed.set()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until *stop* is set."""
        renewing = restarted("gateway_certificates", self.tls.run, on_failure=self.on_failure)
        async with asyncio.TaskGroup() as tasks:
            helpers = [
                *(tasks.create_task(each) for each in self.cache.tasks(self.on_failure)),
                tasks.create_task(self.server.watch()),
                tasks.create_task(renewing),
                *(() if self.groups is None else map(tasks.create_task, self.groups.tasks(self.on_failure))),
                tasks.create_task(restarted("endpoint_users", self._renew_users, on_failure=self.on_failure)),
            ]
            await stop.wait()
            for helper in helpers:
                helper.cancel()

    async def _renew_users(self) -> None:
        """Look at the users file until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._is_changed.wait()
            self._is_changed.clear()
            await asyncio.to_thread(self.users.renew)


async def run_archive_endpoint(
    config: Config,
    *,
    from_cluster: str | None,
    load: Callable[[], Config],
    on_change: Callable[[Config], None],
) -> None:
    """
    Serve until a signal asks to stop.

    On SIGHUP *load* reads the configuration again, and *on_change* gets the one in use after that.

    Raises:
        ConfigError: The configuration cannot be used here, or does not say which topics are meant.
        StorageError: The bucket does not exist, or the credentials are refused.
        StorageUnavailable: The store does not answer at the start.
    """
    metrics = Metrics()
    stop, hangup = asyncio.Event(), asyncio.Event()
    with stopped_by_signals(stop), sole_owner(config):
        await asyncio.to_thread(claim_file_root, config, only_reads=True)
        async with on_hangup(hangup.set), opened_archive(config, metrics) as archive:
            let_only_groups_be_written(archive)
            async with (
                archive_endpoint_of(config, archive, metrics, from_cluster=from_cluster) as endpoint,
                serving(config.admin, metrics, None, reload=hangup.set),
            ):

                def apply(changed: Config) -> None:
                    on_change(changed)
                    archive.store.set_limits(store_limits(changed))
                    endpoint.cache.set_config(changed)
                    endpoint.set_config(changed)

                metrics.watch_certificates(lambda: certificate_files(config))
                host, port = listening_host(config), endpoint.server.port
                log.info("archive endpoint listens", host=host, port=port, cluster=endpoint.topics.cluster_id)
                async with reloading(config, hangup, load=load, apply=apply, metrics=metrics):
                    await endpoint.run(stop)
                log.info("stopping")
    log.info("stopped")


@asynccontextmanager
async def reloading(
    config: Config,
    asked: asyncio.Event,
    *,
    load: Callable[[], Config],
    apply: Callable[[Config], None],
    metrics: Metrics,
) -> AsyncIterator[None]:
    """Reload each time *asked* is set, for the time of the context."""
    reloader = Reloader(config, load=load, apply=apply, health=metrics.health, manager=ServiceManager())
    running = asyncio.create_task(
        restarted("reload", lambda: reloader.run(asked), on_failure=metrics.health.task_failed)
    )
    try:
        yield
    finally:
        await cancelled((running,))


def let_only_groups_be_written(archive: Archive) -> None:
    """Refuse every write to the bucket but those of consumer groups, and of the check that they need."""
    archive.store.hold_writes(
        "an archive-only endpoint writes nothing but consumer groups", allowed=(GROUPS_PREFIX, PROBE_PREFIX)
    )


@asynccontextmanager
async def archive_endpoint_of(
    config: Config,
    archive: Archive,
    metrics: Metrics,
    *,
    from_cluster: str | None,
    worker: WorkerParts | None = None,
) -> AsyncIterator[ArchiveEndpoint]:
    """
    Build the endpoint and start listening; close it at the end.

    In a worker the port is the daemon's, the cache is shared, and each limit is divided.
    """
    if not config.cloud_storage_enabled:
        raise ConfigError(
            "cloud_storage_enabled is false, so there is no archive to serve",
            hint="Set cloud_storage_enabled: true, and the properties that name the bucket",
        )
    tls = GatewayTls(config, has_broker=False)
    users = await asyncio.to_thread(UserDirectory, config.gateway.users_file)

    host, port = _advertised(config)
    interval_seconds = config.cloud_storage_readreplica_manifest_sync_timeout_ms / 1000
    topics = await _opened_topics(config, archive, from_cluster, interval_seconds)
    partitions = ServedPartitions(archive.manifests, interval_seconds=interval_seconds)
    cache = ReadCache(config, archive, metrics) if worker is None else worker.cache
    cluster = cluster_of_groups(topics, from_cluster) if config.gateway.consumer_groups else None
    groups: KeptGroups | None = None

    def connect(
        sock: socket.socket,
        host: str,
        shared: ConnectionContext,
        on_closed: Callable[[EndpointConnection], None],
    ) -> EndpointConnection:
        return EndpointConnection(
            sock,
            host,
            shared,
            on_closed,
            api=api,
            users=users,
            offers_plain=config.gateway.sasl_plain,
        )

    server = GatewayServer(
        _settings_of(config, tls, worker),
        connect=connect,
        on_failure=metrics.health.task_failed,
        readers=metrics.readers,
        port=None if worker is None else worker.port,
    )
    metrics.watch_gateway(server)
    _watch_cost(config, metrics)
    try:
        if worker is None:
            # The port that the system chose is known only now. Clients wait until the others list
            # this endpoint.
            server.listen()
        bound = server.port if worker is None else worker.start.port
        own = EndpointSettings(
            host, port or bound, bucket_name(config), sync_interval_seconds=interval_seconds
        )
        if cluster is not None:
            groups = _kept_groups(config, archive, metrics, own, cluster)
        api = _handlers(
            archive,
            own,
            topics=topics,
            partitions=partitions,
            cache=cache,
            server=server,
            groups=groups,
            metrics=metrics,
        )
        if groups is not None:
            await _begin(groups, archive, place=own.bucket)
        endpoint = ArchiveEndpoint(
            cache, server, topics, users, tls, groups, metrics.health.task_failed, worker
        )
        if worker is None:
            await server.start()
        else:
            worker.on_config.append(endpoint.set_config)
            await worker.begin(server)
        yield endpoint
    finally:
        partitions.end_waits()
        if groups is not None:
            await groups.end()
        await server.close()
        if groups is not None:
            await groups.coordinator.close()
        await topics.close()
        await partitions.close()
        await cache.hydrator.close()


def _settings_of(config: Config, tls: GatewayTls, worker: WorkerParts | None) -> GatewaySettings:
    settings = replace(gateway_settings(config, tls), host=listening_host(config))
    return settings if worker is None else divided(settings, worker.start.workers)


async def _opened_topics(
    config: Config, archive: Archive, from_cluster: str | None, interval_seconds: float
) -> ServedTopics:
    """Return the topics of the bucket, listed once."""
    topics = ServedTopics(
        TopicRegistry(archive.store, archive.manifests),
        from_cluster=from_cluster,
        interval_seconds=interval_seconds,
    )
    await topics.start()
    if not topics.all():
        log.warning("the bucket holds no topic yet", bucket=bucket_name(config))
    return topics


def _watch_cost(config: Config, metrics: Metrics) -> None:
    if (prices := LIST_PRICES.get(config.backend or "")) is not None:
        metrics.watch_cost(prices)


def _handlers(
    archive: Archive,
    own: EndpointSettings,
    *,
    topics: ServedTopics,
    partitions: ServedPartitions,
    cache: ReadCache,
    server: GatewayServer,
    groups: KeptGroups | None,
    metrics: Metrics,
) -> RequestHandlers:
    """Return what answers each kind of request."""
    nodes: Nodes = SoleNode.at(own.advertised_host, own.advertised_port) if groups is None else groups.leases
    return RequestHandlers(
        cluster=ClusterAnswers(
            topics,
            partitions,
            nodes,
            versions=ADVERTISED if groups is None else ADVERTISED_WITH_GROUPS,
        ),
        offsets=OffsetAnswers(topics, partitions, archive.records, own, history=archive.history),
        fetch=FetchAnswers(
            topics,
            partitions,
            PartitionReader(cache.hydrator, archive.manifests.spillovers),
            own,
            budget=server.budget,
            history=archive.history,
            on_topic=metrics.readers.count_topic,
            bytes_max=lambda: _answer_bytes(server.rates),
        ),
        description=DescriptionAnswers(topics, partitions, own, nodes),
        refusals=Refusals(own),
        groups=None if groups is None else GroupAnswers(topics, groups.coordinator, nodes),
    )


def cluster_of_groups(topics: ServedTopics, from_cluster: str | None) -> str:
    """
    Return the cluster whose groups are kept.

    Raises:
        ConfigError: The bucket does not tell, or could tell another one at the next start.
    """
    clusters = sorted({one.manifest.key.cluster for one in topics.all()})
    if from_cluster is not None:
        return from_cluster
    if len(clusters) != 1:
        raise ConfigError(
            f"gateway.consumer_groups needs to know of which cluster the groups are, and the bucket holds "
            f"topics of {', '.join(clusters) or 'none'}",
            hint="Choose a cluster with --from-cluster" if clusters else "Start when a topic was archived",
        )
    return clusters[0]


async def _begin(groups: KeptGroups, archive: Archive, *, place: str) -> None:
    """
    Write to the bucket for the first time.

    Raises:
        ConfigError: The store ignores conditions of writes, or the credentials may not write.
        StorageError: An operator must act.
        StorageUnavailable: The store does not answer.
    """
    try:
        await archive.check_store()
        await groups.leases.start()
    except StorageDenied as error:
        if error.may_pass:
            raise
        raise ConfigError(
            f"gateway.consumer_groups needs to write below {GROUPS_PREFIX} and {PROBE_PREFIX} at {place}, "
            f"and the store refuses it: {error}",
            hint="Allow this endpoint's credentials to list, read, write and delete objects there (S3: "
            "ListBucket, GetObject, PutObject, DeleteObject; Google Cloud Storage: storage.objects.list, "
            "get, create and delete; Azure: Storage Blob Data Contributor; a directory: write permission), "
            "or set gateway.consumer_groups: false",
        ) from error


def _kept_groups(
    config: Config, archive: Archive, metrics: Metrics, own: EndpointSettings, cluster: str
) -> KeptGroups:
    awake = AwakeClock()
    leases = EndpointLeases(
        archive.store,
        cluster=cluster,
        host=own.advertised_host,
        port=own.advertised_port,
        awake=awake,
    )
    gateway = config.gateway
    limits = GroupLimits(
        groups=gateway.groups_max,
        members=gateway.group_members_max,
        offset_metadata_bytes=gateway.group_offset_metadata_bytes,
        first_round_ms=gateway.group_initial_rebalance_delay_ms,
        offsets_retention_ms=gateway.group_offsets_retention_ms,
        newer_session_timeout_ms=gateway.consumer_group_session_timeout_ms,
    )
    store = GroupStore(
        archive.store, cluster=cluster, writer_id=leases.endpoint_id, max_bytes=limits.group_bytes
    )
    coordinator = GroupCoordinator(
        store,
        leases,
        limits=limits,
        metrics=metrics.groups,
        awake=awake,
        now_ms=archive.clock,
        ages_ms=archive.clock.ages_ms,
    )
    return KeptGroups(leases, coordinator, awake)


def _answer_bytes(rates: ReadRates) -> float:
    """Return how many bytes the answer to the current Fetch should have."""
    reader, now = READER.get(), asyncio.get_running_loop().time()
    return rates.answer_bytes(now=now, host=HOST.get(), principal=reader.principal if reader else "")


def listening_host(config: Config) -> str:
    """
    Return the address to listen on: this host only, unless the configuration names another.

    Raises:
        ConfigError: Other hosts reach the address, and the configuration does not say that all may read.
    """
    host = config.gateway.host if "host" in config.gateway.model_fields_set else _THIS_HOST
    gateway = config.gateway
    is_guarded = gateway.users_file is not None or gateway.archive_only_for_everyone
    if not _is_of_this_host(host) and not is_guarded:
        raise ConfigError(
            f"gateway.host {host} is reached by other hosts, and this archive-only endpoint knows no users: "
            "every client that reaches its port can read every topic",
            hint="Set gateway.users_file to a file with users and rules, or "
            "gateway.archive_only_for_everyone: true if that is wanted, or gateway.host: 127.0.0.1",
        )
    return host


def _is_of_this_host(host: str) -> bool:
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _advertised(config: Config) -> tuple[str, int]:
    """Return the address that clients are sent to; port 0 stands for the listening port."""
    advertised, host = config.gateway.advertised, listening_host(config)
    if advertised is None:
        if host in _EVERYWHERE:
            raise ConfigError(
                f"gateway.host {host} means all addresses of this host, which cannot be advertised to "
                "clients",
                hint="Set gateway.advertised to the host:port by which clients reach this host",
            )
        return host, config.gateway.port
    name, _, port = advertised.rpartition(":")
    return name.strip("[]"), int(port)


@contextmanager
def stopped_by_signals(stop: asyncio.Event) -> Iterator[None]:
    """Let SIGTERM and SIGINT set *stop* for the time of the context."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
