"""The gateway's own counts, read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


class GatewaySource(Protocol):
    """The figures that a gateway reports."""

    @property
    def open_connections(self) -> int:
        """Return how many clients are connected."""

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes that all connections hold in memory."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Return the counts since the start, by the names in `GatewayCollector.COUNTS`."""


class GatewayCollector(Collector):
    """Collects the gateway's own counts at each scrape, so that a message is counted only once."""

    COUNTERS: Final = {
        "accepted_connections": "Client connections that were accepted",
        "slow_connections": "Connections closed because the client did not log in, or was too slow",
        "broken_connections": "Connections closed because of an invalid message or a refusal by the broker",
        "failed_connections": "Connections closed because of a defect of the program",
        "from_client_bytes": "Bytes that clients sent",
        "from_broker_bytes": "Bytes that the broker sent",
        "archived_answers": "Responses with archived data",
        "delayed_answers": "Responses with archived data that were delayed by the limits in bytes per second",
        "archived_bytes": "Bytes of responses with archived data",
        "unread_answers": "Responses to Fetch in which a partition was not read in time",
        "late_partitions": "Archived partitions that had to wait for a later Fetch beside large batches",
        "prepared_answers": "Responses with archived data that were ready when they were requested",
        "unanswered_hosts": "Times that the kernel was told not to answer a host that connects too often",
    }
    REFUSALS: Final = {
        "connections": "refused_when_full",
        "host_connections": "refused_by_host",
        "host_rate": "refused_by_host_rate",
    }
    """The reasons why connections are refused, and the name of the count of each."""
    COUNTS: Final = (*COUNTERS, *REFUSALS.values())
    """The names of all counts."""

    def __init__(self, gateway: GatewaySource) -> None:
        self._gateway = gateway

    def collect(self) -> Iterator[Metric]:
        """Yield the current values."""
        gateway = self._gateway
        yield GaugeMetricFamily(
            "tieringd_gateway_connections", "Clients that are connected", value=gateway.open_connections
        )
        yield GaugeMetricFamily(
            "tieringd_gateway_buffered_bytes",
            "Bytes that the gateway's connections hold in memory",
            value=gateway.buffered_bytes,
        )
        counts = gateway.counts
        for name, meaning in self.COUNTERS.items():
            yield CounterMetricFamily(f"tieringd_gateway_{name}", meaning, value=counts[name])
        refused = CounterMetricFamily(
            "tieringd_gateway_refused_connections",
            "Client connections that were refused because of a limit of connections, by the limit",
            labels=("reason",),
        )
        for reason, name in self.REFUSALS.items():
            refused.add_metric([reason], counts[name])
        yield refused


class WorkerMetrics(Collector):
    """The processes that serve the gateway's clients, where it has any."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.wanted = Gauge(
            "tieringd_gateway_workers_wanted",
            "Processes that should serve the gateway's clients; 0 where the daemon itself does",
            registry=registry,
        )
        self.serving = Gauge(
            "tieringd_gateway_workers", "Processes that serve the gateway's clients", registry=registry
        )
        self.ends = Counter(
            "tieringd_gateway_worker_ends",
            "Workers of the gateway that ended unasked and were replaced, by how they ended",
            ("how",),
            registry=registry,
        )
        self.all = (self.wanted, self.serving, self.ends)
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the families that only workers fill."""
        yield GaugeMetricFamily(
            "tieringd_gateway_workers_resident_bytes",
            "Memory of all workers of the gateway together",
            value=0,
        )
        yield CounterMetricFamily(
            "tieringd_gateway_workers_cpu_seconds",
            "Processor time of all workers of the gateway together",
            value=0,
        )


class NoClients:
    """The figures of a gateway whose clients are served by workers: the workers' are added to these."""

    open_connections = 0
    buffered_bytes = 0
    counts: Final = dict.fromkeys(GatewayCollector.COUNTS, 0)
