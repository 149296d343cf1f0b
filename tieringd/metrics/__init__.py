"""
Every metric: name, labels, unit, meaning.

The other modules hold the metrics of the gateway, of work on the archive and of the daemon's health.
Gauges that change with each round carry topic and partition; counters carry the topic only, so that ten
thousand partitions do not become a hundred thousand series. Services get a `Metrics` object and use its
fields. Only this package uses the metrics library to record values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)

from tieringd.metrics.archive_work import (
    ExpiryCounters,
    HousekeepingMetrics,
    MergeCounters,
    PurgeMetrics,
    ReuploadCounters,
    ScrubMetrics,
)
from tieringd.metrics.gateway import GatewayCollector, GatewaySource
from tieringd.metrics.health import (
    CertificateCollector,
    CredentialsCollector,
    DaemonTotals,
    HealthGauges,
    ReadinessCollector,
    ReadinessSource,
)
from tieringd.model.partition import TopicPartition

# A series for the creation time of each counter would double the counters, and no rule reads it.
disable_created_metrics()  # type: ignore[no-untyped-call]

_PARTITION = ("topic", "partition")
_LOG_DIR = ("log_dir",)
_DISK = ("directory",)
_REQUEST_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class DiskGauges:
    """The figures of disks, under Redpanda's names and ours; one series for each filesystem."""

    def __init__(self, kind: str, whose: str, registry: CollectorRegistry) -> None:
        def pair(name: str, meaning: str) -> tuple[Gauge, Gauge]:
            redpanda = Gauge(
                f"redpanda_storage_{kind}_{name}", f"{meaning} (Redpanda's name)", _DISK, registry=registry
            )
            return redpanda, Gauge(f"tieringd_{kind}_{name}", meaning, _DISK, registry=registry)

        self.total_bytes = pair("total_bytes", f"Size of {whose} filesystem")
        self.free_bytes = pair("free_bytes", f"Free space of {whose} filesystem, as the broker sees it")
        self.alert = pair("free_space_alert", f"State of {whose} filesystem: 0 ok, 1 low, 2 degraded")

    @property
    def all(self) -> tuple[Gauge, ...]:
        """Return every gauge."""
        return (*self.total_bytes, *self.free_bytes, *self.alert)

    def set(self, directory: str, *, total_bytes: int, free_bytes: int, state: int) -> None:
        """Show the figures of the filesystem whose first directory this is."""
        values = ((self.total_bytes, total_bytes), (self.free_bytes, free_bytes), (self.alert, state))
        for gauges, value in values:
            for gauge in gauges:
                gauge.labels(directory).set(value)

    def forget(self, directory: str) -> None:
        """Drop the series of a filesystem that is no longer measured."""
        for gauge in self.all:
            gauge.remove_by_labels(dict.fromkeys(_DISK, directory))


class ClockGauges:
    """This host's clock, compared with the object store's."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.error_seconds = Gauge(
            "tieringd_host_clock_error_seconds",
            "How far this host's clock is ahead of the object store's; negative when it is behind",
            registry=registry,
        )
        self.is_doubted = Gauge(
            "tieringd_host_clock_doubted",
            "1 while the time is uncertain, and nothing is deleted by age",
            registry=registry,
        )
        self.all = (self.error_seconds, self.is_doubted)


class StrayPins:
    """Pins that are kept and never uploaded, because they may belong to another log."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.pins = Gauge(
            "tieringd_stray_pins", "Pinned segments that are kept and never uploaded", registry=registry
        )
        self.size_bytes = Gauge(
            "tieringd_stray_pin_bytes", "Bytes of pins that are kept and never uploaded", registry=registry
        )
        self.all = (self.pins, self.size_bytes)


class BallastGauges:
    """The current and the wanted size of the ballast file."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.size_bytes = Gauge(
            "tieringd_ballast_bytes", "Size of the ballast file, 0 when there is none", registry=registry
        )
        self.wanted_bytes = Gauge(
            "tieringd_ballast_wanted_bytes",
            "Configured size of the ballast file, 0 when none is configured",
            registry=registry,
        )
        self.all = (self.size_bytes, self.wanted_bytes)


class SpaceMetrics:
    """The space manager's figures for the filesystems of the log directories, each by its first directory."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"tieringd_space_{name}", text, _LOG_DIR, registry=registry)

        self.log_bytes = gauge("log_bytes", "Bytes that the logs use on a filesystem")
        self.log_area_bytes = gauge("log_area_bytes", "Bytes of a filesystem that are reserved for the logs")

        def cache_gauge(name: str, text: str) -> Gauge:
            return Gauge(f"tieringd_space_{name}", text, _DISK, registry=registry)

        self.cache_bytes = cache_gauge("cache_bytes", "Bytes that the chunk cache uses on its filesystem")
        self.cache_area_bytes = cache_gauge(
            "cache_area_bytes", "Bytes of its filesystem that the chunk cache may currently use"
        )
        self.short_bytes = gauge(
            "short_bytes", "Bytes by which the logs exceed their area, and that cannot be reclaimed"
        )
        self.planned_bytes = Counter(
            "tieringd_space_planned_bytes",
            "Bytes that the space manager planned to trim, by phase",
            ("phase",),
            registry=registry,
        )
        self.all = (
            self.log_bytes,
            self.log_area_bytes,
            self.cache_bytes,
            self.cache_area_bytes,
            self.short_bytes,
            self.planned_bytes,
        )


class CacheMetrics:
    """The contents of the chunk cache, and the outcomes of readers' requests to it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"tieringd_cache_{name}", text, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"tieringd_cache_{name}", text, labels, registry=registry)

        self.size_bytes = gauge("bytes", "Bytes of the files in the chunk cache")
        self.objects = gauge("objects", "Files in the chunk cache")
        self.limit_bytes = gauge("limit_bytes", "Bytes that the chunk cache may hold now")
        self.open_chunks = gauge("open_chunks", "Chunks whose file is open, with or without a reader")
        self.in_progress = gauge("hydrations_in_progress", "Downloads from the archive under way")
        self.hits = counter("hits", "Requests that the cache answered", "kind")
        self.misses = counter("misses", "Requests that had to wait for the object store", "kind")
        self.hydrated_bytes = counter("hydrated_bytes", "Bytes downloaded for readers", "kind")
        self.streamed_bytes = counter("streamed_bytes", "Bytes of chunks served without being cached")
        self.prefetches = counter("prefetched_chunks", "Chunks hydrated before a reader asked for them")
        self.evictions = counter("evictions", "Files evicted from the cache", "kind")
        self.evicted_bytes = counter("evicted_bytes", "Bytes of files evicted from the cache")
        self.put_failures = counter("put_failures", "Files that the cache could not store", "reason")
        self.corrupt = counter("corrupt", "Files or downloads whose bytes were wrong", "source")
        self.all = tuple(vars(self).values())


class Metrics:
    """The metrics of one daemon, in a registry of their own."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        ProcessCollector(registry=self.registry)  # Memory, processor time, descriptors: read at each scrape.
        gauge, counter = self._gauge, self._counter

        self.pending_bytes = gauge(
            "upload_pending_bytes", "Bytes of closed, stable segments that are not durable yet", _PARTITION
        )
        self.pending_segments = gauge(
            "upload_pending_segments", "Closed, stable segments that are not durable yet", _PARTITION
        )
        self.archiver_pending = Gauge(
            "vectorized_ntp_archiver_pending",
            "Offsets between the archive's end and the log's end (Redpanda's name)",
            ("namespace", *_PARTITION),
            registry=self.registry,
        )
        self.lag_seconds = gauge(
            "upload_lag_seconds", "Age of the oldest closed segment that is not durable yet", _PARTITION
        )
        self.seconds_to_loss = gauge(
            "seconds_to_loss",
            "Time until the broker's own retention deletes a segment that is not durable; +Inf when it "
            "will not",
            _PARTITION,
        )
        self.held_seconds = gauge(
            "upload_held_by_transaction_seconds",
            "How long a closed segment has waited for an open transaction to end, 0 when none does",
            _PARTITION,
        )
        self.next_offset = gauge(
            "archive_next_offset", "First offset that the manifest does not cover", _PARTITION
        )
        self.start_offset = gauge("archive_start_offset", "First offset that the archive holds", _PARTITION)
        self.gap_offsets = gauge(
            "archive_gap_offsets", "Offsets recorded as lost before they could be copied", _PARTITION
        )
        self.led_partitions = gauge("led_partitions", "Partitions that this daemon archives")
        self.followed_partitions = gauge(
            "followed_partitions",
            "Partitions that another broker leads, and that this broker could take over",
        )
        self.upload_share = gauge(
            "upload_share_ratio",
            "Part of the partitions of all archived topics of this broker that this broker leads, 0 to 1",
        )
        self.space, self.cache = SpaceMetrics(self.registry), CacheMetrics(self.registry)
        self.paused_topics = gauge("paused_topics", "Topics of this broker that an operator has paused")
        self.pinned_bytes = gauge(
            "pinned_bytes",
            "Bytes that exist only as pins: the broker has deleted them before they were durable",
        )
        self.pinned_segments = gauge("pinned_segments", "Segments that exist only as pins")
        self.stray, self.clock = StrayPins(self.registry), ClockGauges(self.registry)
        self.quarantined_partitions = gauge(
            "quarantined_partitions", "Partitions that are not archived because their local data is corrupt"
        )
        self.fenced_partitions, self.waiting_for_operator = (
            gauge(
                "fenced_partitions",
                "Partitions that another daemon has taken over under the same leader epoch",
            ),
            gauge(
                "partitions_waiting_for_operator",
                "Partitions that wait because only an operator can decide about records in the archive",
                ("topic", "reason"),
            ),
        )
        self.unreadable_paths = gauge(
            "unreadable_paths", "Files and directories the last scan could not read"
        )

        self.uploads = counter("uploads", "Segments made durable", ("topic",))
        self.upload_bytes = counter("upload_bytes", "Bytes of segments made durable", ("topic",))
        self.upload_failures, self.operator_decisions = (
            counter("upload_failures", "Archiver steps that failed", ("topic", "error")),
            counter(
                "operator_decisions",
                "Decisions of `tieringd archive resolve` that this daemon has carried out or refused",
                ("topic", "outcome"),
            ),
        )
        self.manifest_commits = counter("manifest_commits", "Manifests stored", ("topic",))
        self.trims = counter("trimmed_segments", "Local segments that were trimmed", ("topic",))
        self.trimmed_bytes = counter("trimmed_bytes", "Bytes of local segments that were trimmed", ("topic",))
        self.trim_failures = counter("trim_failures", "Trims that were refused or failed", ("topic", "error"))
        self.expired, self.merged, self.reuploaded, self.scrub, self.purge, self.housekeeping = (
            ExpiryCounters(self.registry),
            MergeCounters(self.registry),
            ReuploadCounters(self.registry),
            ScrubMetrics(self.registry),
            PurgeMetrics(self.registry),
            HousekeepingMetrics(self.registry),
        )
        self.replaced_offsets = counter(
            "archive_replaced_offsets", "Offsets replaced after an unclean leader election", ("topic",)
        )
        self.gaps = counter("archive_gaps", "Gaps recorded in manifests", ("topic",))

        self.pin_failures = counter("pin_failures", "Pins that could not be made or removed", ())
        self.pins_given_up = counter(
            "pins_given_up", "Pins removed because of their limit: their data is lost", ()
        )

        self.store_requests = counter(
            "store_requests", "Object store requests by outcome", ("operation", "outcome")
        )
        self.store_bytes = counter("store_bytes", "Bytes of object store request bodies", ("operation",))
        self.store_seconds = Histogram(
            "tieringd_store_request_seconds",
            "Duration of object store requests, one attempt each",
            ("operation",),
            buckets=_REQUEST_SECONDS,
            registry=self.registry,
        )
        self.upload_shares = gauge("upload_shares", "Shares that the upload controller gives to uploads")
        self.upload_controller_error = gauge(
            "upload_controller_error",
            "Setpoint less backlog, in thousandths of the disk that was free at start",
        )
        self.upload_backlog_bytes = gauge(
            "upload_backlog_bytes", "Backlog that the upload controller acts on"
        )
        self.upload_held_seconds = counter(
            "upload_held_seconds",
            "Seconds in which closed segments waited for upload, by what delayed them: the hard limit, the "
            "load of other programs, a pause to measure that load, or the number of concurrent uploads",
            ("by",),
        )
        self.oldest_upload_seconds = gauge(
            "oldest_upload_in_flight_seconds", "Age of the oldest upload in flight, 0 when there is none"
        )
        self.disk, self.cache_disk = (
            DiskGauges("disk", "the log directories'", self.registry),
            DiskGauges("cache_disk", "the cache's", self.registry),
        )
        self.degraded_brokers = gauge(
            "degraded_brokers", "Brokers of the cluster that are known to have a degraded disk"
        )
        self.producers_held_back = gauge(
            "producers_held_back", "1 while producers' quotas are lowered because of a degraded disk"
        )
        self.ballast, self.health = BallastGauges(self.registry), HealthGauges(self.registry)
        self.reconcile_seconds = gauge("reconcile_last_duration_seconds", "Duration of the last round")
        self.reconciled_at = gauge(
            "reconcile_last_success_timestamp_seconds",
            "When a round last ended with no obstacle to readiness, in Unix time; 0: never yet",
        )
        self.registry.register(DaemonTotals(self))

    def watch_readiness(self, source: ReadinessSource) -> None:
        """Report from now on whether the daemon is ready, and why not."""
        self.registry.register(ReadinessCollector(source))

    def watch_certificates(self, files: Callable[[], Collection[Path]]) -> None:
        """Report from now on when the certificates in *files* expire."""
        self.registry.register(CertificateCollector(files))

    def watch_credentials(self, end: Callable[[], float | None]) -> None:
        """Report from now on when the credentials for the object store expire, in Unix time."""
        self.registry.register(CredentialsCollector(end))

    def watch_gateway(self, gateway: GatewaySource) -> None:
        """Report the counts of *gateway* from now on."""
        self.registry.register(GatewayCollector(gateway))

    def forget_partition(self, partition: TopicPartition) -> None:
        """Drop the series of a partition that this daemon no longer archives."""
        labels = (partition.topic, str(partition.partition))
        for series in (
            self.pending_bytes,
            self.pending_segments,
            self.lag_seconds,
            self.held_seconds,
            self.seconds_to_loss,
            self.next_offset,
            self.start_offset,
            self.gap_offsets,
        ):
            series.remove(*labels)
        self.archiver_pending.remove("kafka", *labels)

    def forget_topic(self, topic: str) -> None:
        """Drop the counts of a topic of which this broker has no partition any more."""
        for counter in (
            self.uploads,
            self.upload_bytes,
            self.manifest_commits,
            self.trims,
            self.trimmed_bytes,
            self.replaced_offsets,
            self.gaps,
            *self.expired.all,
            *self.merged.by_topic,
            *self.reuploaded.by_topic,
        ):
            counter.remove(topic)
        for by_reason in (
            self.waiting_for_operator,
            self.operator_decisions,
            self.upload_failures,
            self.trim_failures,
            self.merged.failures,
            self.reuploaded.failures,
        ):
            by_reason.remove_by_labels({"topic": topic})

    def record_store_request(self, operation: str, outcome: str, seconds: float, size_bytes: int) -> None:
        """Count one attempt of an object store request."""
        self.store_requests.labels(operation, outcome).inc()
        self.store_seconds.labels(operation).observe(seconds)
        self.store_bytes.labels(operation).inc(size_bytes)

    def _gauge(self, name: str, meaning: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(f"tieringd_{name}", meaning, labels, registry=self.registry)

    def _counter(self, name: str, meaning: str, labels: tuple[str, ...]) -> Counter:
        return Counter(f"tieringd_{name}", meaning, labels, registry=self.registry)
