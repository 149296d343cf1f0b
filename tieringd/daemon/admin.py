"""
The admin page: metrics, health and status over HTTP, and the status page for a person at `/`.

Healthy means that the event loop answers. Ready means that the last round of reconciliation succeeded,
that each log directory could be read, that the object store accepted the last requests, and that a worker of
the gateway serves clients, where it has workers. `tieringd_ready{reason}` shows the same as a metric. An
archive endpoint has no rounds: without workers it is always ready. To read takes no login: the page listens
on this host by default.

One request changes something: `POST /reload` does what SIGHUP does. It is refused unless an admin token is
configured and the request carries it, so without a token the page is read-only.

Everything long is rendered and compressed in one thread of its own, so that the event loop, which archives
and serves clients, does not wait for it.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import structlog
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from tieringd.archiving.reconciler import Reconciler
from tieringd.archiving.upload_gate import UploadGate
from tieringd.config.model import AdminConfig
from tieringd.daemon.overview import OverviewMaker
from tieringd.daemon.readiness import Readiness
from tieringd.daemon.status_page import CONTENT_POLICY, page
from tieringd.daemon.workers.worker_pool import WorkerPool
from tieringd.errors import ConfigError
from tieringd.metrics import Metrics
from tieringd.metrics.merged import MergedPage
from tieringd.model.partition import Leadership, TopicIdPartition
from tieringd.policies.upload_control import held_because

log = structlog.get_logger(__name__)

_HTML = "text/html; charset=utf-8"
_JSON = "application/json"
_GZIP = zlib.MAX_WBITS | 16


@dataclass(frozen=True)
class AdminControl:
    """The changes that requests may make, and the token that they must carry."""

    token: str | None
    """None refuses every change."""
    reload: Callable[[], None]
    """Ask for the configuration to be read again, as SIGHUP does. Returns at once."""


class AdminPage:
    """The HTTP handlers and the parts that they show."""

    def __init__(
        self,
        metrics: Metrics,
        reconciler: Reconciler | None,
        gate: UploadGate | None = None,
        overview: OverviewMaker | None = None,
        control: AdminControl | None = None,
        *,
        workers: WorkerPool | None = None,
    ) -> None:
        self._metrics = metrics
        self._workers = workers
        self._readiness = Readiness(reconciler, workers)
        self._control = control
        self._overview = overview
        self._reconciler = reconciler
        self._gate = gate
        self._renderer = ThreadPoolExecutor(1, thread_name_prefix="admin-page")

    def close(self) -> None:
        """End the thread."""
        self._renderer.shutdown(wait=False, cancel_futures=True)

    def application(self) -> web.Application:
        """Return the application with its routes."""
        application = web.Application()
        application.add_routes(
            [
                web.get("/metrics", self.metrics),
                web.get("/metrics/partitions", self.partition_metrics),
                web.get("/healthz", self.healthz),
                web.get("/readyz", self.readyz),
            ]
        )
        if self._reconciler is not None or self._workers is not None:
            application.router.add_get("/status", self.status)
        if self._overview is not None:
            application.router.add_get("/", self.page)
            application.router.add_get("/status/overview", self.overview)
        if self._control is not None:
            application.router.add_post("/reload", partial(self.reload, self._control))
        return application

    async def reload(self, control: AdminControl, request: web.Request) -> web.Response:
        """Ask for a reload, if the request carries the token. The log and the metric say how it ends."""
        if control.token is None:
            raise web.HTTPForbidden(text="the admin page is read-only: admin.token is not set\n")
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not hmac.compare_digest(given, f"Bearer {control.token}".encode()):
            log.warning(
                "a change without the admin token is refused", path=request.path, client=request.remote
            )
            raise web.HTTPUnauthorized(
                text="send the header Authorization: Bearer TOKEN, with the token in admin.token\n",
                headers={"WWW-Authenticate": "Bearer"},
            )
        log.info("a reload is asked for through the admin page", client=request.remote)
        control.reload()
        return web.Response(
            status=202, text="asked for; tieringd_config_last_reload_successful and the log say how it ends\n"
        )

    async def metrics(self, request: web.Request) -> web.Response:
        """Serve the daemon's metrics in Prometheus' text format."""
        page = await self._with_workers(self._metrics.default_page)
        return await self._rendered(request, lambda: [generate_latest(page)], CONTENT_TYPE_LATEST)

    async def partition_metrics(self, request: web.Request) -> web.Response:
        """Serve the metrics of every topic and partition in Prometheus' text format."""
        by_topic = await self._with_workers(self._metrics.by_topic)

        def parts() -> Iterator[bytes]:
            yield generate_latest(by_topic)
            yield from (part.encode() for part in self._metrics.partitions.text())

        return await self._rendered(request, parts, CONTENT_TYPE_LATEST)

    async def _with_workers(self, registry: CollectorRegistry) -> Any:
        """Return a registry, or what renders like one, with what the workers have counted up to now."""
        if self._workers is None:
            return registry
        await self._workers.gather_figures()
        return MergedPage(registry, self._workers.figures)

    async def _rendered(
        self, request: web.Request, parts: Callable[[], Iterable[bytes]], content_type: str
    ) -> web.Response:
        """Render the *parts* of a page in the thread, compressed for a client that takes that."""
        is_compressed = "gzip" in request.headers.get("Accept-Encoding", "")

        def body() -> bytes:
            if not is_compressed:
                return b"".join(parts())
            # Part by part: neither joining nor compressing a long page is one long turn of the interpreter.
            packer = zlib.compressobj(1, wbits=_GZIP)
            return b"".join([*(packer.compress(part) for part in parts()), packer.flush()])

        headers = {"Content-Type": content_type, "Vary": "Accept-Encoding"}
        if is_compressed:
            headers["Content-Encoding"] = "gzip"
        loop = asyncio.get_running_loop()
        return web.Response(body=await loop.run_in_executor(self._renderer, body), headers=headers)

    async def healthz(self, _request: web.Request) -> web.Response:
        """Say that the process answers."""
        return web.Response(text="ok\n")

    async def readyz(self, _request: web.Request) -> web.Response:
        """Say whether the daemon is ready, and if not, why."""
        if faults := self._readiness.faults():
            return web.Response(status=503, text="".join(f"{fault}\n" for fault in faults))
        return web.Response(text="ok\n")

    async def page(self, request: web.Request) -> web.Response:
        """Serve the status page for a person."""
        maker = self._overview
        assert maker is not None, "there is no such page without one"
        response = await self._rendered(request, lambda: [page(maker.make()).encode()], _HTML)
        response.headers["Content-Security-Policy"] = CONTENT_POLICY
        return response

    async def overview(self, request: web.Request) -> web.Response:
        """Serve what the status page shows, as JSON."""
        maker = self._overview
        assert maker is not None, "there is no such page without one"
        return await self._rendered(request, lambda: [json.dumps(asdict(maker.make())).encode()], _JSON)

    async def status(self, request: web.Request) -> web.Response:
        """Serve the status of each archiver and of each worker of the gateway, as JSON."""
        return await self._rendered(request, lambda: [json.dumps(self._status()).encode()], _JSON)

    def _status(self) -> dict[str, object]:
        found = {} if self._reconciler is None else self._archiving(self._reconciler)
        if self._workers is not None:
            found["gateway_workers"] = [asdict(one) for one in self._workers.status()]
        return found

    def _archiving(self, reconciler: Reconciler) -> dict[str, object]:
        partitions = [
            {
                "topic": leadership.partition.topic,
                "partition": leadership.partition.partition,
                "leader_epoch": leadership.leader_epoch,
                "uploaded": status.uploaded,
                "trimmed": status.trimmed,
                "pending_segments": status.pending_segments,
                "fault": status.fault or None,
                "waits_because": self._held_because(leadership.partition) or status.waits_because or None,
                "waits_for_operator": status.operator_wait
                and asdict(status.operator_wait)
                | {"command": f"tieringd archive resolve {_name(leadership)}"},
            }
            for leadership, status in sorted(
                reconciler.statuses().items(), key=lambda item: item[0].partition
            )
        ]
        return {
            "rounds": reconciler.rounds,
            "problems": dict(reconciler.problems),
            "paused_topics": reconciler.paused_topics,
            "partitions": partitions,
        }

    def _held_because(self, partition: TopicIdPartition) -> str | None:
        held = self._gate.held(partition) if self._gate is not None else None
        return None if held is None else held_because(*held)


def _name(leadership: Leadership) -> str:
    return f"{leadership.partition.topic}-{leadership.partition.partition}"


@asynccontextmanager
async def serving(
    config: AdminConfig,
    metrics: Metrics,
    reconciler: Reconciler | None,
    gate: UploadGate | None = None,
    overview: OverviewMaker | None = None,
    *,
    reload: Callable[[], None] | None = None,
    workers: WorkerPool | None = None,
) -> AsyncIterator[None]:
    """
    Serve the admin page for the time of the context. Without *reload* no request changes anything.

    The figures of *workers* are added to those of this process.

    Raises:
        ConfigError: The address cannot be listened on.
    """
    if not config.enabled:
        yield
        return
    metrics.watch_readiness(Readiness(reconciler, workers))
    if reconciler is not None:
        metrics.watch_faults(reconciler)
    metrics.max_topics = config.metrics_topics
    token = None if config.token is None else config.token.get_secret_value()
    control = None if reload is None else AdminControl(token, reload)
    admin = AdminPage(metrics, reconciler, gate, overview, control, workers=workers)
    runner = web.AppRunner(admin.application(), access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, config.host, config.port).start()
        except OSError as error:
            raise ConfigError(
                f"the admin page cannot listen on {config.host}:{config.port}: {error.strerror}",
                hint="Choose another admin.port, or 0 to let the system choose one",
            ) from error
        host, port = runner.addresses[0][:2]
        log.info("admin page listens", host=host, port=port)
        yield
    finally:
        await runner.cleanup()
        admin.close()
