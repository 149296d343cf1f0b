"""The gateway's own counts, read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final, Protocol

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
        """Return the counts since the start, by the names in `GatewayCollector`."""


class GatewayCollector(Collector):
    """Collects the gateway's own counts at each scrape, so that a message is counted only once."""

    COUNTERS: Final = {
        "accepted_connections": "Client connections that were accepted",
        "refused_connections": "Client connections that were refused because of the limit of connections",
        "broken_connections": "Connections closed because of an invalid message or a refusal by the broker",
        "failed_connections": "Connections closed because of a defect of the program",
        "from_client_bytes": "Bytes that clients sent",
        "from_broker_bytes": "Bytes that the broker sent",
        "archived_answers": "Responses with archived data",
        "delayed_answers": "Responses with archived data that were delayed by the limits in bytes per second",
        "late_partitions": "Archived partitions that had to wait for a later Fetch beside large batches",
        "prepared_answers": "Responses with archived data that were ready when they were requested",
    }

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
