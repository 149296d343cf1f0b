"""
The workers of a gateway beside a broker: what the daemon tells them, and what they ask.

The daemon tells them which partitions are on the broker's disks, whether clients may write, what clients have
deleted, and its configuration. They ask it for manifests and bounds, one partition at a time, from the same
`ReadablePartitions` that serves a gateway in the daemon's loop. The daemon alone writes to the bucket.

A deletion by a client is confirmed by every worker that serves, before that client is answered. A worker that
does not confirm it in time is killed, since it might serve what was deleted.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Final
from uuid import UUID

from tieringd.archiving.reconciler import Reconciler
from tieringd.broker.base import Broker
from tieringd.config import Config
from tieringd.daemon.archive import Archive
from tieringd.daemon.gateway_service import (
    Gateway,
    divided,
    gateway_settings,
    readable_partitions_of,
)
from tieringd.daemon.gateway_tls import GatewayTls
from tieringd.daemon.read_cache import ReadCache
from tieringd.daemon.workers.cache_room import CacheRooms
from tieringd.daemon.workers.link import Handlers
from tieringd.daemon.workers.worker import GATEWAY, WorkerParts, WorkerStart
from tieringd.daemon.workers.worker_pool import Worker, WorkerPool
from tieringd.errors import TieringError
from tieringd.gateway.connection import GatewaySettings
from tieringd.gateway.known_partitions import PublishedNames
from tieringd.gateway.published_partitions import KEPT_MAX, FoundPartition, PublishedPartitions
from tieringd.gateway.readable_partitions import ReadablePartitions
from tieringd.gateway.remote_answers import RemoteAnswers
from tieringd.gateway.server import GatewayServer
from tieringd.gateway.shared_port import listening_socket
from tieringd.gateway.wire import MemoryBudget
from tieringd.metrics import Metrics
from tieringd.metrics.gateway import NoClients
from tieringd.metrics.restarts import restarted
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import RecordDeletion
from tieringd.model.partition import TopicIdPartition
from tieringd.policies.prices import LIST_PRICES
from tieringd.processors import usable_processors
from tieringd.reading.partition_reader import PartitionReader
from tieringd.storage.at_once import cancelled
from tieringd.storage.store_opening import bucket_name

_CONFIRM_SECONDS: Final = 5.0
"""How long a worker may take to confirm a deletion."""
_STATE_SECONDS: Final = 0.25
"""How soon workers are told whether clients may write."""


@dataclass(frozen=True, slots=True)
class GatewayDetails:
    """Facts for the workers of a gateway alone."""

    names: PublishedNames | None
    deletions: Mapping[TopicIdPartition, tuple[RecordDeletion, ...]]
    may_produce: bool


class _SentManifests:
    """The manifests that one worker has got from the daemon, as far as the daemon remembers."""

    def __init__(self) -> None:
        self._versions = count(1)
        self._sent: OrderedDict[TopicIdPartition, tuple[int, PartitionManifest]] = OrderedDict()

    def version_of(self, manifest: PartitionManifest) -> int:
        """Return the version of a manifest for this worker: a new one unless it was the last one sent."""
        known = self._sent.pop(manifest.partition, None)
        if known is None or known[1] is not manifest:
            known = (next(self._versions), manifest)
        self._sent[manifest.partition] = known
        if len(self._sent) > KEPT_MAX:
            self._sent.popitem(last=False)
        return known[0]


def partition_handlers(partitions: ReadablePartitions, publish_names: Callable[[], None]) -> Handlers:
    """Return what one worker may ask about *partitions*. *publish_names* tells it which ones there are."""
    sent = _SentManifests()

    async def find(topic: str | UUID, number: int, since: float, version: int) -> FoundPartition | None:
        found = await partitions.find(topic, number, since=since)
        # The worker must know the partition by the time it gets this.
        publish_names()
        if found is None:
            return None
        current = sent.version_of(found.manifest)
        return FoundPartition(
            current,
            None if current == version else found.manifest,
            found.bounds,
            found.pins,
            found.deleted_before,
            found.as_of,
            found.unarchived,
        )

    return {
        "find": find,
        "leader_epoch": partitions.leader_epoch,
        "archived_bytes": partitions.archived_bytes,
        "record_deletion": partitions.record_in_bucket,
    }


class GatewayWorkers:
    """The daemon's side of a gateway with workers. Listens once, and is closed once."""

    def __init__(
        self,
        config: Config,
        command: Sequence[str],
        *,
        partitions: ReadablePartitions,
        reconciler: Reconciler,
        cache: ReadCache,
        may_produce: Callable[[], bool],
        on_logged: Callable[[str, Mapping[str, Any]], None],
        metrics: Metrics,
    ) -> None:
        """
        Keep the arguments. *command* starts a worker; *on_logged* gets its warnings and errors.

        *may_produce* says whether the disks have room for clients' writes.
        """
        self._config = config
        self._partitions = partitions
        self._reconciler = reconciler
        self._cache = cache
        self._may_produce = may_produce
        self._on_logged = on_logged
        self._metrics = metrics
        self._rooms = CacheRooms(cache.keeper)
        self._names: PublishedNames | None = None
        self._count = config.gateway.worker_count(usable_processors())
        self.pool = WorkerPool(
            command,
            count=self._count,
            listen=lambda: listening_socket(config.gateway.host, config.gateway.port),
            greeting=self._greeting,
            handlers=self._handlers,
            metrics=metrics.workers,
            on_end=self._rooms.end,
            on_failure=metrics.health.task_failed,
        )
        cache.keeper.on_evicted = lambda names: self.pool.tell("cache_evicted", tuple(names))
        metrics.watch_gateway(NoClients())

    def set_config(self, config: Config) -> None:
        """Use *config* from now on, as far as it can change; the workers as well."""
        self._config = config
        self._cache.set_config(config)
        self.pool.tell("config", config)

    async def listen(self) -> None:
        """
        Start the workers, and return when all of them serve.

        Raises:
            ConfigError: The address cannot be listened on, or a worker cannot use the configuration.
        """
        # Workers ask for room in the cache from their start on, and are told what changes.
        await self.pool.start()

    async def run(self) -> None:
        """Tell and replace the workers until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for task in self._cache.tasks(self._metrics.health.task_failed):
                tasks.create_task(task)
            for name, run in (
                ("gateway_names", self._tell_names),
                ("gateway_state", self._tell_state),
                ("gateway_workers", self.pool.run),
            ):
                tasks.create_task(restarted(name, run, on_failure=self._metrics.health.task_failed))

    async def close(self) -> None:
        """Let the workers finish the answers that are due, and end them."""
        await self.pool.close()

    def _greeting(self, number: int) -> WorkerStart:
        # The other workers get the same names: what is published is what all workers know.
        self._publish_names()
        details = GatewayDetails(self._names, dict(self._partitions.noted_deletions), self._may_produce())
        return WorkerStart(self._config, number, self._count, self.pool.port, GATEWAY, details)

    async def _tell_names(self) -> None:
        while True:
            self._publish_names()
            await self._reconciler.next_scan()

    def _publish_names(self) -> None:
        """Tell the workers which partitions there are, if that has changed."""
        names = self._partitions.published()
        if names is not None and names != self._names:
            self._names = names
            self.pool.tell("names", names)

    async def _tell_state(self) -> None:
        told: bool | None = None
        while True:
            if (now := self._may_produce()) != told:
                told = now
                self.pool.tell("may_produce", now)
            await asyncio.sleep(_STATE_SECONDS)

    def _handlers(self, worker: Worker) -> Handlers:
        async def note_deletion(partition: TopicIdPartition, deletion: RecordDeletion) -> None:
            await self._hide(worker, partition, deletion)

        return {
            **self._rooms.handlers(worker),
            **partition_handlers(self._partitions, self._publish_names),
            "note_deletion": note_deletion,
            "logged": self._on_logged,
        }

    async def _hide(self, deleting: Worker, partition: TopicIdPartition, deletion: RecordDeletion) -> None:
        """Hide deleted records in the daemon and in every worker but the *deleting* one, which did it."""
        self._partitions.hide(partition, deletion)

        async def confirmed(worker: Worker) -> None:
            if worker.link is None or not worker.is_greeted:
                # It is told when it is greeted.
                return
            if not worker.is_serving:
                # It reads this before it serves.
                worker.link.tell("deleted", partition, deletion)
                return
            try:
                async with asyncio.timeout(_CONFIRM_SECONDS):
                    await worker.link.ask("deleted", partition, deletion)
            except TimeoutError:
                worker.kill("it did not confirm that records were deleted")
                await worker.process.wait()
            except TieringError:
                # It has ended, or is about to: its link is over.
                await worker.process.wait()

        others = [one for one in self.pool.workers if one is not deleting]
        await asyncio.gather(*(confirmed(worker) for worker in others))


@asynccontextmanager
async def gateway_with_workers(
    config: Config,
    archive: Archive,
    command: Sequence[str],
    *,
    broker: Broker,
    reconciler: Reconciler,
    cache: ReadCache,
    may_produce: Callable[[], bool],
    on_logged: Callable[[str, Mapping[str, Any]], None],
    metrics: Metrics,
) -> AsyncIterator[GatewayWorkers]:
    """Build a gateway whose clients are served by workers, and close it at the end. Nothing runs yet."""
    partitions = readable_partitions_of(archive, broker=broker, reconciler=reconciler)
    gateway = GatewayWorkers(
        config,
        command,
        partitions=partitions,
        reconciler=reconciler,
        cache=cache,
        may_produce=may_produce,
        on_logged=on_logged,
        metrics=metrics,
    )
    try:
        yield gateway
    finally:
        await gateway.close()
        await partitions.close()
        await cache.hydrator.close()


@asynccontextmanager
async def gateway_worker(parts: WorkerParts) -> AsyncIterator[ServingGateway]:
    """Serve with the parts of one worker."""
    config, metrics, archive = parts.start.config, parts.metrics, parts.archive
    details: GatewayDetails = parts.start.details
    partitions = PublishedPartitions(
        parts.link,
        archive.manifests,
        names=details.names,
        deletions=details.deletions,
        now=time.monotonic,
    )
    state = _WorkerState(details.may_produce)
    tls = GatewayTls(config, has_broker=True)

    def settings_of(config: Config) -> GatewaySettings:
        return divided(gateway_settings(config, tls), parts.start.workers)

    settings = settings_of(config)
    budget = MemoryBudget(settings.buffered_bytes)
    answers = RemoteAnswers(
        partitions,
        PartitionReader(parts.cache.hydrator, archive.manifests.spillovers),
        records=archive.records,
        history=archive.history,
        bucket=bucket_name(config) if config.kafka_enable_describe_log_dirs_remote_storage else None,
        may_produce=lambda: state.may_produce,
        budget=budget,
        now=time.monotonic,
        on_answer=metrics.durations.archived_answer.observe,
        on_topic=metrics.readers.count_topic,
    )
    if (prices := LIST_PRICES.get(config.backend or "")) is not None:
        metrics.watch_cost(prices)
    server = GatewayServer(
        settings,
        answers,
        on_failure=metrics.health.task_failed,
        readers=metrics.readers,
        port=parts.port,
        budget=budget,
    )
    metrics.watch_gateway(server)
    parts.handlers.update(
        names=partitions.set_names, may_produce=state.set_may_produce, deleted=partitions.hide
    )
    parts.on_config.append(lambda changed: server.set_limits(settings_of(changed)))
    try:
        await parts.begin(server)
        yield ServingGateway(Gateway(parts.cache, server, tls, metrics.health.task_failed))
    finally:
        await server.close()
        await answers.close()
        await parts.cache.hydrator.close()


@dataclass(slots=True)
class _WorkerState:
    may_produce: bool

    def set_may_produce(self, may_produce: bool) -> None:  # noqa: FBT001 the daemon's message
        self.may_produce = may_produce


@dataclass(frozen=True, slots=True)
class ServingGateway:
    """A gateway that serves in a worker."""

    gateway: Gateway

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until *stop* is set."""
        running = asyncio.create_task(self.gateway.run())
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
        finally:
            with suppress(asyncio.CancelledError):
                await cancelled((running, stopping))
