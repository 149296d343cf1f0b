"""
The admin page: /metrics, /metrics/partitions, /healthz, /readyz and /status over HTTP.

Healthy means that the event loop answers. Ready means that the last round of reconciliation succeeded,
that each log directory could be read, and that the object store accepted the last requests.
`tieringd_ready{reason}` shows the same as a metric. An archive endpoint without a broker has no rounds
and no status: it is always ready. The page changes nothing, and has no login: it listens on this host by
default.

Everything long is rendered and compressed in one thread of its own, so that the event loop, which archives
and serves clients, does not wait for it.
"""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict

import structlog
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from tieringd.archiving.reconciler import Reconciler
from tieringd.archiving.upload_gate import UploadGate
from tieringd.config.model import AdminConfig
from tieringd.errors import ConfigError
from tieringd.metrics import Metrics
from tieringd.model.partition import TopicIdPartition
from tieringd.policies.upload_control import held_because

log = structlog.get_logger(__name__)


class AdminPage:
    """The HTTP handlers and the parts that they show."""

    def __init__(
        self, metrics: Metrics, reconciler: Reconciler | None, gate: UploadGate | None = None
    ) -> None:
        self._metrics = metrics
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
        if self._reconciler is not None:
            application.router.add_get("/status", self.status)
        return application

    async def metrics(self, request: web.Request) -> web.Response:
        """Serve the daemon's metrics in Prometheus' text format."""
        return await self._rendered(
            request, lambda: generate_latest(self._metrics.default_page), CONTENT_TYPE_LATEST
        )

    async def partition_metrics(self, request: web.Request) -> web.Response:
        """Serve the metrics of every topic and partition in Prometheus' text format."""

        def page() -> bytes:
            parts = "".join(self._metrics.partitions.text())
            return generate_latest(self._metrics.by_topic) + parts.encode()

        return await self._rendered(request, page, CONTENT_TYPE_LATEST)

    async def _rendered(
        self, request: web.Request, page: Callable[[], bytes], content_type: str
    ) -> web.Response:
        """Render *page* in the thread, compressed for a client that takes that."""
        is_compressed = "gzip" in request.headers.get("Accept-Encoding", "")

        def body() -> bytes:
            plain = page()
            return gzip.compress(plain, compresslevel=1) if is_compressed else plain

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
        if self._reconciler is not None and self._reconciler.fault:
            return web.Response(status=503, text=f"{self._reconciler.fault}\n")
        return web.Response(text="ok\n")

    async def status(self, _request: web.Request) -> web.Response:
        """Serve the status of each archiver, as JSON."""
        reconciler = self._reconciler
        assert reconciler is not None, "there is no such page without one"
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
                "waits_for_operator": status.operator_wait and asdict(status.operator_wait),
            }
            for leadership, status in sorted(
                reconciler.statuses().items(), key=lambda item: item[0].partition
            )
        ]
        return web.json_response(
            {
                "rounds": reconciler.rounds,
                "problems": reconciler.problems,
                "paused_topics": reconciler.paused_topics,
                "partitions": partitions,
            }
        )

    def _held_because(self, partition: TopicIdPartition) -> str | None:
        held = self._gate.held(partition) if self._gate is not None else None
        return None if held is None else held_because(*held)


class _AlwaysReady:
    """Readiness of an archive endpoint without a broker, which listens only when it is ready."""

    def readiness(self) -> dict[str, str]:
        """Return that nothing prevents readiness."""
        return {"starting": ""}


@asynccontextmanager
async def serving(
    config: AdminConfig,
    metrics: Metrics,
    reconciler: Reconciler | None,
    gate: UploadGate | None = None,
) -> AsyncIterator[None]:
    """
    Serve the admin page for the time of the context.

    Raises:
        ConfigError: The address cannot be listened on.
    """
    if not config.enabled:
        yield
        return
    metrics.watch_readiness(reconciler or _AlwaysReady())
    if reconciler is not None:
        metrics.watch_faults(reconciler)
    metrics.max_topics = config.metrics_topics
    page = AdminPage(metrics, reconciler, gate)
    runner = web.AppRunner(page.application(), access_log=None)
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
        page.close()
