"""
The admin page: /metrics, /healthz, /readyz and /status over HTTP.

Healthy means that the event loop answers. Ready means that the last round of reconciliation succeeded,
that each log directory could be read, and that the object store accepted the last requests.
`tieringd_ready{reason}` shows the same as a metric. An archive endpoint without a broker has no rounds
and no status: it is always ready. The page changes nothing, and has no login: it listens on this host by
default.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
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
from tieringd.model.partition import Leadership, TopicIdPartition
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

    def application(self) -> web.Application:
        """Return the application with its routes."""
        application = web.Application()
        application.add_routes(
            [
                web.get("/metrics", self.metrics),
                web.get("/healthz", self.healthz),
                web.get("/readyz", self.readyz),
            ]
        )
        if self._reconciler is not None:
            application.router.add_get("/status", self.status)
        return application

    async def metrics(self, _request: web.Request) -> web.Response:
        """Serve the metrics in Prometheus' text format."""
        return web.Response(
            body=generate_latest(self._metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

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
                "waits_for_operator": status.operator_wait
                and asdict(status.operator_wait)
                | {"command": f"tieringd archive resolve {_name(leadership)}"},
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


def _name(leadership: Leadership) -> str:
    return f"{leadership.partition.topic}-{leadership.partition.partition}"


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
    runner = web.AppRunner(AdminPage(metrics, reconciler, gate).application(), access_log=None)
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
