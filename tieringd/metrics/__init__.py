"""
Every metric: name, labels, unit, meaning.

The other modules hold the metrics of partitions, of the gateway, of work on the archive and of the daemon's
health. What carries the name of a topic is on the detail page (`/metrics/partitions`). The default page
(`/metrics`) has totals of it, whose number does not grow with partitions or topics, and the largest topics.
Services get a `Metrics` object and use its fields. Only this package uses the metrics library to record
values.
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
from tieringd.metrics.gateway import GatewayCollector, GatewaySource, WorkerMetrics
from tieringd.metrics.groups import GroupMetrics
from tieringd.metrics.health import (
    CertificateCollector,
    CredentialsCollector,
    FaultsCollector,
    FaultsSource,
    HealthGauges,
    ReadinessCollector,
    ReadinessSource,
)
from tieringd.metrics.partition_figures import LargestTopics, PartitionTable, RedpandaTopicCounters
from tieringd.metrics.readers import ReaderCounts
from tieringd.metrics.totals import DaemonTotals, ForgottenTopics, RedpandaTotals, StoreCost
from tieringd.model.partition import TopicPartition
from tieringd.policies.prices import Prices

# A series for the creation time of each counter would double the counters, and no rule reads it.
disable_created_metrics()  # type: ignore[no-untyped-call]

_LOG_DIR = ("log_dir",)
_DISK = ("directory",)
_REQUEST_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_DURABLE_SECONDS = (1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 21600, 86400)
_LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
MAX_TOPICS = 50
"""How many topics have series of their own on the default page, unless the configuration says otherwise."""


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
        self._gauges = (
            self.log_bytes,
            self.log_area_bytes,
            self.cache_bytes,
            self.cache_area_bytes,
            self.short_bytes,
        )
        self.all = (*self._gauges, self.planned_bytes)

    def forget(self) -> None:
        """Drop the figures of all filesystems: the space manager is switched off."""
        for each in self._gauges:
            each.clear()

    def forget_logs(self, log_dir: str) -> None:
        """Drop the figures of the filesystem of *log_dir*, which is no longer measured."""
        for each in (self.log_bytes, self.log_area_bytes, self.short_bytes):
            each.remove_by_labels(dict.fromkeys(_LOG_DIR, log_dir))


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
        self.hydration_seconds = Histogram(
            "tieringd_cache_hydration_seconds",
            "Time from a miss until the chunk or the index was there, with waits for other downloads",
            ("kind",),
            buckets=_REQUEST_SECONDS,
            registry=registry,
        )
        self.hits = counter("hits", "Requests that the cache answered", "kind")
        self.misses = counter("misses", "Requests that had to wait for the object store", "kind")
        self.hydrated_bytes = counter("hydrated_bytes", "Bytes downloaded for readers", "kind")
        self.streamed_bytes = counter("streamed_bytes", "Bytes of chunks served without being cached")
        self.in_place_bytes = counter(
            "in_place_bytes", "Bytes of chunks on the cache's own disk, checked where they are and not copied"
        )
        self.prefetches = counter("prefetched_chunks", "Chunks hydrated before a reader asked for them")
        self.second_requests = counter(
            "second_requests", "Ranges asked for a second time because they were late", "outcome"
        )
        self.evictions = counter("evictions", "Files evicted from the cache", "kind")
        self.evicted_bytes = counter("evicted_bytes", "Bytes of files evicted from the cache")
        self.put_failures = counter("put_failures", "Files that the cache could not store", "reason")
        self.corrupt = counter("corrupt", "Files or downloads whose bytes were wrong", "source")
        self.all = tuple(vars(self).values())


class Durations:
    """How long things take, as histograms."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"tieringd_{name}", text, buckets=buckets, registry=registry)

        self.durable = histogram(
            "upload_durable_seconds",
            "Time from the last write to a closed segment until the segment was durable",
            _DURABLE_SECONDS,
        )
        self.archived_answer = histogram(
            "gateway_archived_answer_seconds",
            "Time that the archive took to answer a client's Fetch",
            _REQUEST_SECONDS,
        )
        self.loop_lag = histogram(
            "event_loop_lag_seconds",
            "How late the event loop ran a timer, measured once in a second",
            _LAG_SECONDS,
        )
        self.all = (self.durable, self.archived_answer, self.loop_lag)


class Metrics:
    """The metrics of one daemon, in registries of their own."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry, self.default_page, self.by_topic = (
            registry or CollectorRegistry(),
            CollectorRegistry(),
            CollectorRegistry(),
        )
        """All metrics; those of the default page; and the counters of topics, which the detail page has."""
        for one in (self.default_page, self.by_topic):
            self.registry.register(one)
        # Memory, processor time, descriptors: read at each scrape.
        ProcessCollector(registry=self.default_page)
        gauge, counter = self._gauge, self._counter
        self.max_topics = MAX_TOPICS
        """How many topics have series of their own on the default page."""

        self.partitions, self.forgotten = PartitionTable(), ForgottenTopics()
        self.led_partitions = gauge("led_partitions", "Partitions that this daemon archives")
        self.followed_partitions = gauge(
            "followed_partitions",
            "Partitions that another broker leads, and that this broker could take over",
        )
        self.upload_share = gauge(
            "upload_share_ratio",
            "Part of the partitions of all archived topics of this broker that this broker leads, 0 to 1",
        )
        self.space, self.cache = SpaceMetrics(self.default_page), CacheMetrics(self.default_page)
        self.paused_topics = gauge("paused_topics", "Topics of this broker that an operator has paused")
        self.pinned_bytes = gauge(
            "pinned_bytes",
            "Bytes that exist only as pins: the broker has deleted them before they were durable",
        )
        self.pinned_segments = gauge("pinned_segments", "Segments that exist only as pins")
        self.stray, self.clock = StrayPins(self.default_page), ClockGauges(self.default_page)
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
        self.unknown_loss_partitions, self.unreadable_paths = (
            gauge(
                "partitions_with_unknown_loss",
                "Led partitions whose manifest is not known, so that no figure tells what is not durable, or "
                "for how long the broker keeps it",
            ),
            gauge("unreadable_paths", "Files, directories and archived topics the last scan could not read"),
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
            ExpiryCounters(self.by_topic),
            MergeCounters(self.by_topic),
            ReuploadCounters(self.by_topic),
            ScrubMetrics(self.default_page),
            PurgeMetrics(self.default_page),
            HousekeepingMetrics(self.default_page),
        )
        self.replaced_offsets = counter(
            "archive_replaced_offsets", "Offsets replaced after an unclean leader election", ("topic",)
        )
        self.gaps = counter("archive_gaps", "Gaps recorded in manifests", ("topic",))

        self.pin_failures = counter("pin_failures", "Pins that could not be made or removed", ())
        self.pins_given_up = counter(
            "pins_given_up",
            "Pins removed at their limit, or with their partition, that alone held their data: it is lost",
            (),
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
            registry=self.default_page,
        )
        self.store_in_flight = gauge(
            "store_requests_in_flight", "Object store requests under way, each on a connection of its own"
        )
        self.store_connections = gauge(
            "store_connections_limit", "How many object store requests may be under way at once"
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
            DiskGauges("disk", "the log directories'", self.default_page),
            DiskGauges("cache_disk", "the cache's", self.default_page),
        )
        self.degraded_brokers = gauge(
            "degraded_brokers", "Brokers of the cluster that are known to have a degraded disk"
        )
        self.producers_held_back = gauge(
            "producers_held_back", "1 while producers' quotas are lowered because of a degraded disk"
        )
        self.ballast, self.health = BallastGauges(self.default_page), HealthGauges(self.default_page)
        self.reconcile_seconds = gauge("reconcile_last_duration_seconds", "Duration of the last round")
        self.reconciled_at, self.reconcile_interval = (
            gauge(
                "reconcile_last_success_timestamp_seconds",
                "When a round last ended with no obstacle to readiness, in Unix time; 0: never yet",
            ),
            gauge(
                "reconcile_interval_seconds", "Longest time from the last round to the next; 0: no round yet"
            ),
        )
        self.durations, self.groups = Durations(self.default_page), GroupMetrics(self.default_page)
        self.readers, self.workers = (
            ReaderCounts(self.default_page, self.by_topic),
            WorkerMetrics(self.default_page),
        )
        self._register_sums()

    def watch_faults(self, source: FaultsSource) -> None:
        """Report from now on how many partitions have which fault."""
        self.default_page.register(FaultsCollector(source))

    def watch_cost(self, prices: Prices) -> None:
        """Report from now on what the object store costs, by *prices*."""
        self.default_page.register(StoreCost(self, prices))
        self.readers.prices = prices

    def watch_readiness(self, source: ReadinessSource) -> None:
        """Report from now on whether the daemon is ready, and why not."""
        self.default_page.register(ReadinessCollector(source))

    def watch_certificates(self, files: Callable[[], Collection[Path]]) -> None:
        """Report from now on when the certificates in *files* expire."""
        self.default_page.register(CertificateCollector(files))

    def watch_credentials(self, end: Callable[[], float | None]) -> None:
        """Report from now on when the credentials for the object store expire, in Unix time."""
        self.default_page.register(CredentialsCollector(end))

    def watch_gateway(self, gateway: GatewaySource) -> None:
        """Report the counts of *gateway* from now on."""
        self.default_page.register(GatewayCollector(gateway))

    def forget_partition(self, partition: TopicPartition) -> None:
        """Drop the series of a partition that this daemon no longer archives."""
        self.partitions.forget(partition)

    def forget_topic(self, topic: str) -> None:
        """Drop the counts of a topic of which this broker has no partition any more."""
        for counter in self._topic_counters:
            self.forgotten.drop(counter, topic)
        self.waiting_for_operator.remove_by_labels({"topic": topic})

    def record_store_request(self, operation: str, outcome: str, seconds: float, size_bytes: int) -> None:
        """Count one attempt of an object store request."""
        self.store_requests.labels(operation, outcome).inc()
        self.store_seconds.labels(operation).observe(seconds)
        self.store_bytes.labels(operation).inc(size_bytes)
        self.readers.count_store_request(operation)

    def _register_sums(self) -> None:
        """Add what is computed from the other metrics at each scrape."""
        redpanda = RedpandaTopicCounters(
            {
                "redpanda_cloud_storage_uploaded_bytes": (self.upload_bytes, "Bytes uploaded of a topic"),
                "redpanda_cloud_storage_deleted_segments": (
                    self.expired.deleted_segments,
                    "Segments whose objects were deleted",
                ),
            }
        )
        self._topic_counters = _topic_counters(self.by_topic)
        self.by_topic.register(redpanda)
        # The detail page renders this one itself, because its text is long.
        self.registry.register(self.partitions)
        for collector in (
            DaemonTotals(self, self._topic_counters),
            RedpandaTotals(self),
            LargestTopics(self.partitions, lambda: self.max_topics),
        ):
            self.default_page.register(collector)

    def _gauge(self, name: str, meaning: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(f"tieringd_{name}", meaning, labels, registry=self.default_page)

    def _counter(self, name: str, meaning: str, labels: tuple[str, ...]) -> Counter:
        page = self.by_topic if "topic" in labels else self.default_page
        return Counter(f"tieringd_{name}", meaning, labels, registry=page)


def _topic_counters(registry: CollectorRegistry) -> tuple[Counter, ...]:
    return tuple(one for one in registry._collector_to_names if isinstance(one, Counter))  # noqa: SLF001
