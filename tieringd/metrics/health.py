"""
The health of the daemon: readiness, faults, loops, certificates and credentials.

Every reason and every kind of fault has a series from the first scrape on, so that rules see the first event.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from cryptography import x509
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


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
    """The last success of each loop of the daemon, whether the last reload succeeded, and what runs."""

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
        self.config = Gauge(
            "tieringd_config_info",
            "1; the label has a hash of the configuration in use, without its secrets",
            ("hash",),
            registry=registry,
        )
        self.build = Gauge(
            "tieringd_build_info",
            "1; the labels have the versions of tieringd and of Python",
            ("version", "python"),
            registry=registry,
        )
        self.pins_available = Gauge(
            "tieringd_pins_available",
            "1 where segments of a log directory can be pinned, 0 where they cannot; no series without pins",
            ("log_dir",),
            registry=registry,
        )
        self.share_groups_unknown = Gauge(
            "tieringd_share_group_offsets_unknown",
            "1 while trims wait because the brokers do not tell the offsets of share groups",
            registry=registry,
        )
        self.all = (
            self.succeeded_at,
            self.reload_succeeded,
            self.config,
            self.build,
            self.pins_available,
            self.share_groups_unknown,
            self._task_failures,
        )

    def show_config(self, digest: str) -> None:
        """Show the hash of the configuration in use, and no earlier one."""
        self.config.clear()
        self.config.labels(digest).set(1)

    def task_failed(self, task: str) -> None:
        """Count a task that ended by a defect of the program."""
        self._task_failures.labels(task).inc()

    def loop_succeeded(self, loop: str) -> None:
        """Note that *loop* has just succeeded, or begins."""
        self.succeeded_at.labels(loop).set_to_current_time()


class CertificateCollector(Collector):
    """Expiry times of our certificates. A changed file is read again, so that a renewal is seen."""

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
    """Expiry time of the credentials for the object store, if they expire."""

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


class FaultsSource(Protocol):
    """A source that knows how many partitions have a fault."""

    def faults(self) -> Mapping[str, int]:
        """Return the number of partitions by the kind of their fault, also of those that none has."""


class FaultsCollector(Collector):
    """`tieringd_partitions_in_fault{fault}`, read at each scrape."""

    def __init__(self, source: FaultsSource) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        """Yield one series for each kind of fault."""
        family = GaugeMetricFamily(
            "tieringd_partitions_in_fault",
            "Partitions that are not archived as they should be, by what is wrong with them",
            labels=("fault",),
        )
        for fault, partitions in self._source.faults().items():
            family.add_metric([fault], partitions)
        yield family
