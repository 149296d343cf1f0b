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
        "accepted_connections": "Clients that were let in",
        "refused_connections": "Clients that were turned away at the limit of connections",
        "broken_connections": "Connections that were ended for what came on them, or by the broker's refusal",
        "from_client_bytes": "Bytes that clients sent",
        "from_broker_bytes": "Bytes that the broker sent",
        "archived_answers": "Answers with something of the archive in them",
        "delayed_answers": "Those of them after which a client had to wait, by the limits in bytes a second",
        "prepared_answers": "Those of them that were ready when they were asked for",
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
