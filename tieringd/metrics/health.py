"""
The health of the daemon: totals for alerts, which exist from the first scrape on.

A counter with a label has no series before its first event, so `increase()` never sees that event. The
totals here have no labels and begin at 0. They are summed up at each scrape, so that no event is counted
twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from cryptography import x509
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    # `tieringd.metrics` imports this module.
    from tieringd.metrics import Metrics

_STORE_FAILURES: Final = frozenset(
    {"StorageUnavailable", "StorageDenied", "BucketNotFound", "StoreFull", "CorruptDataError", "timeout"}
)
"""Outcomes of requests that are faults of the store. A missing object or a lost race is not one."""


class ReadinessSource(Protocol):
    """A source that knows whether the daemon is ready."""

    def readiness(self) -> Mapping[str, str]:
        """Return the current text of each reason, by its name; empty while it does not apply."""


class ReadinessCollector(Collector):
    """`tieringd_ready{reason}`, read at each scrape."""

    def __init__(self, source: ReadinessSource) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        """Yield one series for each possible reason."""
        family = GaugeMetricFamily(
            "tieringd_ready",
            "0 while this reason keeps the daemon from being ready, else 1",
            labels=("reason",),
        )
        for reason, fault in self._source.readiness().items():
            family.add_metric([reason], 0 if fault else 1)
        yield family


class HealthGauges:
    """When each loop of the daemon last succeeded, and whether the last reload did."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.succeeded_at = Gauge(
            "tieringd_loop_last_success_timestamp_seconds",
            "When a loop of the daemon last succeeded, in Unix time; before the first success, when it "
            "started",
            ("loop",),
            registry=registry,
        )
        self.reload_succeeded = Gauge(
            "tieringd_config_last_reload_successful",
            "1 unless the last reload found a fault in the configuration",
            registry=registry,
        )
        self.reload_succeeded.set(1)
        self._task_failures = Counter(
            "tieringd_task_failures",
            "Tasks that ended by a defect of the program and were started again",
            ("task",),
            registry=registry,
        )
        self.all = (self.succeeded_at, self.reload_succeeded, self._task_failures)

    def task_failed(self, task: str) -> None:
        """Count a task that ended by a defect of the program."""
        self._task_failures.labels(task).inc()

    def loop_succeeded(self, loop: str) -> None:
        """Note that *loop* has just succeeded, or begins."""
        self.succeeded_at.labels(loop).set_to_current_time()


class CertificateCollector(Collector):
    """When our certificates expire. A file is read again when it has changed, so a renewal is seen."""

    def __init__(self, files: Callable[[], Collection[Path]]) -> None:
        """Keep *files*, which returns the PEM files that begin with our certificate."""
        self._files = files
        self._known: dict[Path, tuple[tuple[int, int], float]] = {}

    def collect(self) -> Iterator[Metric]:
        """Yield one series for each file."""
        family = GaugeMetricFamily(
            "tieringd_certificate_expiry_timestamp_seconds",
            "When the certificate in a file ends, in Unix time; 0 where the file cannot be read",
            labels=("file",),
        )
        for file in self._files():
            family.add_metric([str(file)], self._expiry(file))
        yield family

    def _expiry(self, file: Path) -> float:
        try:
            status = file.stat()
            version = (status.st_mtime_ns, status.st_ino)
            if (known := self._known.get(file)) is None or known[0] != version:
                certificate = x509.load_pem_x509_certificate(file.read_bytes())
                known = self._known[file] = version, certificate.not_valid_after_utc.timestamp()
        except (OSError, ValueError):
            return 0.0
        return known[1]


class CredentialsCollector(Collector):
    """When the credentials for the object store expire, if they do."""

    def __init__(self, end: Callable[[], float | None]) -> None:
        """Keep *end*, which returns the expiry in Unix time."""
        self._end = end

    def collect(self) -> Iterator[Metric]:
        """Yield the expiry, or no series without one."""
        end = self._end()
        if end is not None:
            yield GaugeMetricFamily(
                "tieringd_store_credentials_expiry_timestamp_seconds",
                "When the credentials for the object store that are in use end, in Unix time",
                value=end,
            )


class DaemonTotals(Collector):
    """Totals of the labelled metrics of one daemon."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Yield every total."""
        metrics = self._metrics
        for name, meaning, value in (
            ("archive_gaps", "Gaps recorded in manifests", _sum(metrics.gaps)),
            (
                "archive_replaced_offsets",
                "Offsets replaced after unclean leader elections",
                _sum(metrics.replaced_offsets),
            ),
            ("upload_failures", "Archiver steps that failed", _sum(metrics.upload_failures)),
            (
                "trims_denied",
                "Trims that the broker refused because a permission is missing",
                _sum(metrics.trim_failures, error={"BrokerDenied"}),
            ),
            ("store_requests", "Object store requests, one for each attempt", _sum(metrics.store_requests)),
            (
                "store_failures",
                "Object store requests that failed because of the store",
                _sum(metrics.store_requests, outcome=_STORE_FAILURES),
            ),
            (
                "housekeeping_failures",
                "Housekeeping turns that failed",
                _sum(metrics.housekeeping.failures),
            ),
            (
                "cache_faults",
                "Cached files with wrong bytes, and files that could not be written to the cache's disk",
                _sum(metrics.cache.corrupt) + _sum(metrics.cache.put_failures, but_not={"reason": "full"}),
            ),
        ):
            yield CounterMetricFamily(f"tieringd_daemon_{name}", f"{meaning}, over all topics", value=value)
        pending = _by_labels(metrics.pending_bytes)
        near = [
            seconds for key, seconds in _by_labels(metrics.seconds_to_loss).items() if pending.get(key, 0) > 0
        ]
        for name, meaning, value in (
            (
                "upload_pending_bytes",
                "Bytes of closed, stable segments that are not durable yet, over all partitions",
                sum(pending.values()),
            ),
            (
                "upload_lag_seconds",
                "Age of the oldest closed segment of any partition that is not durable yet",
                max(_by_labels(metrics.lag_seconds).values(), default=0),
            ),
            (
                "seconds_to_loss",
                "Time until the broker's retention deletes what is not durable; +Inf when it will not",
                min(near, default=math.inf),
            ),
            (
                "held_by_transaction_seconds",
                "Longest time that a closed segment of any partition has waited for an open transaction",
                max(_by_labels(metrics.held_seconds).values(), default=0),
            ),
        ):
            yield GaugeMetricFamily(f"tieringd_daemon_{name}", meaning, value=value)


def _sum(
    counter: Counter,
    *,
    but_not: Mapping[str, str] | None = None,
    **wanted: Collection[str],
) -> float:
    """Return the sum of the counter's series with *wanted* label values, without those of *but_not*."""
    return sum(
        sample.value
        for family in counter.collect()
        for sample in family.samples
        if all(sample.labels[label] in values for label, values in wanted.items())
        and not any(sample.labels[label] == value for label, value in (but_not or {}).items())
    )


def _by_labels(gauge: Gauge) -> dict[tuple[str, ...], float]:
    """
    Return the values of a gauge per partition, by topic and partition.

    They are read from the library's internals: for ten thousand partitions `collect()` makes objects and
    dictionaries, which takes ten times as long as all the totals.
    """
    children: Any = gauge._metrics  # noqa: SLF001
    return {labels: child._value.get() for labels, child in children.copy().items()}  # noqa: SLF001
