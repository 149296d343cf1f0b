"""
The worker's side: a process that serves clients of the daemon's port, until the daemon drains it or ends.

It is an ordinary process with a store client and a part of each limit, and it writes nothing but files of the
cache. What it knows comes from the bucket, from the broker's answers and from the daemon. Without the daemon
that knowledge grows old: so it ends at once when the daemon does, and its connections are cut.

Signals that ask a process to stop are ignored. A service manager sends them to all processes of the unit, and
the daemon drains its workers when it has finished its own work.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import structlog

from tieringd.config import Config
from tieringd.daemon.archive import Archive, opened_archive
from tieringd.daemon.garbage_collection import long_lived_objects_spared
from tieringd.daemon.heaps import keep_arenas_few
from tieringd.daemon.loop_lag import measure_loop
from tieringd.daemon.read_cache import ReadCache
from tieringd.daemon.workers.cache_room import RemoteRoom
from tieringd.daemon.workers.end_with_daemon import ORPHANED
from tieringd.daemon.workers.link import PULSE, Link, error_parts
from tieringd.errors import TieringError
from tieringd.gateway.server import GatewayServer
from tieringd.gateway.shared_port import ConnectionCounts, SharedPort
from tieringd.metrics import Metrics
from tieringd.metrics.merged import Figures, figures_of
from tieringd.reading.shared_cache import SharedCacheKeeper
from tieringd.storage.at_once import cancelled
from tieringd.storage.store_opening import store_limits

log = structlog.get_logger(__name__)

GATEWAY: Final = "gateway"
"""The kind of workers beside a broker."""
ENDPOINT: Final = "endpoint"
"""The kind of workers of an archive-only endpoint."""
_FORWARDED: Final = frozenset({"warning", "error", "exception", "critical"})


class Part(Protocol):
    """The part of a worker that serves clients."""

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until *stop* is set."""


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """The first message to a worker."""

    config: Config
    """The configuration that the daemon uses, which its file may not have any more."""
    number: int
    workers: int
    port: int
    kind: str
    details: Any = None
    """Facts for workers of this kind alone."""


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """The parts that every kind of worker is built on."""

    start: WorkerStart
    archive: Archive
    cache: ReadCache
    metrics: Metrics
    link: Link
    handlers: dict[str, Callable[..., Any]]
    """Functions for the messages of the daemon, by name. A kind of worker adds its own."""
    port: SharedPort
    on_config: list[Callable[[Config], None]]
    """Get each configuration of a later reload. A kind of worker adds its own."""

    async def begin(self, server: GatewayServer) -> None:
        """Accept clients from now on. The daemon counts this worker as serving from here."""
        self.link.resume()
        await self.link.ask("serving")
        await server.start()


Kind = Callable[[WorkerParts], AbstractAsyncContextManager[Part]]


async def run_worker(
    descriptors: tuple[int, int, int],
    *,
    kinds: dict[str, Kind],
    configure_log: Callable[[Config], None],
    change_log: Callable[[Config], None],
) -> int:
    """
    Serve until the daemon drains this worker, and return the exit code.

    *descriptors* are those of the link, the listening socket and the counts of connections. *kinds* has what
    each kind of worker serves with. *configure_log* and *change_log* set up the log by a configuration.
    """
    _ignore_stop_signals()
    keep_arenas_few()
    link_fd, listener_fd, counts_fd = descriptors
    started: asyncio.Future[WorkerStart] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()

    def begin(start: WorkerStart) -> None:
        # Later messages are for parts that are not built yet.
        link.hold()
        started.set_result(start)

    handlers: dict[str, Callable[..., Any]] = {
        "start": begin,
        PULSE: lambda: None,
        "drain": lambda grace_seconds: stop.set(),  # noqa: ARG005 the server has the same grace
    }
    link = await Link.over(socket.socket(fileno=link_fd), handlers, other_side="the daemon")
    messages = asyncio.create_task(link.run())
    messages.add_done_callback(lambda _: _end_as_orphan(stop))
    start = await started
    configure_log(start.config)
    structlog.contextvars.bind_contextvars(worker=start.number)
    counts = ConnectionCounts(counts_fd, workers=start.workers, own=start.number)
    listener = socket.socket(fileno=listener_fd)
    listener.setblocking(False)
    with _forwarding(link):
        try:
            async with (
                _parts(start, link, handlers, SharedPort(listener, counts), change_log) as parts,
                kinds[start.kind](parts) as part,
            ):
                with long_lived_objects_spared():
                    await part.run(stop)
        except TieringError as error:
            link.tell("failed", *error_parts(error))
            await link.drained()
            log.error("the worker ends by an error", error=str(error))  # noqa: TRY400 its text is enough
            return 1
    return 0


@asynccontextmanager
async def _parts(
    start: WorkerStart,
    link: Link,
    handlers: dict[str, Callable[..., Any]],
    port: SharedPort,
    change_log: Callable[[Config], None],
) -> AsyncIterator[WorkerParts]:
    metrics, config = Metrics(), start.config
    async with opened_archive(config, metrics) as archive:
        cache = ReadCache(config, archive, metrics, room=RemoteRoom(link), workers=start.workers)
        assert isinstance(cache.keeper, SharedCacheKeeper), "the room is in another process"

        on_config: list[Callable[[Config], None]] = [
            change_log,
            lambda changed: archive.store.set_limits(store_limits(changed)),
            cache.set_config,
        ]

        def change_config(changed: Config) -> None:
            for change in on_config:
                change(changed)

        def figures() -> Figures:
            return figures_of((metrics.default_page, metrics.by_topic))

        handlers |= {
            "cache_evicted": cache.keeper.note_evicted,
            "config": change_config,
            "figures": figures,
        }
        lag = asyncio.create_task(measure_loop(metrics))
        try:
            yield WorkerParts(start, archive, cache, metrics, link, handlers, port, on_config)
        finally:
            await cancelled((lag,))


def _end_as_orphan(stop: asyncio.Event) -> None:
    """End the process: the daemon has ended, and without it nothing may be served any more."""
    if stop.is_set():
        return
    try:
        log.error("the daemon has ended, so its worker ends and cuts its connections")
    finally:
        # The log may go to a pipe that has ended with the daemon. An error of it must not keep the worker.
        os._exit(ORPHANED)


def _ignore_stop_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def _forwarding(link: Link) -> Iterator[None]:
    """Tell the daemon of each warning and error, for its status page."""

    def forward(_logger: object, name: str, event: Any) -> Any:
        if name in _FORWARDED:
            link.tell("logged", name, {key: str(value) for key, value in event.items()})
        return event

    processors: Any = structlog.get_config()["processors"]
    processors.insert(0, forward)
    try:
        yield
    finally:
        processors.remove(forward)
