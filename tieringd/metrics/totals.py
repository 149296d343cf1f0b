"""
Totals of one daemon, whose number does not grow with partitions or topics.

A counter with a label has no series before its first event, so `increase()` never sees that event. The
totals here have no labels and begin at 0. They are summed up at each scrape, so that no event is counted
twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, UnknownMetricFamily
from prometheus_client.registry import Collector

from tieringd.metrics.partition_figures import by_labels
from tieringd.policies.prices import Prices

if TYPE_CHECKING:
    from prometheus_client import Counter
    from prometheus_client.metrics_core import Metric

    # `tieringd.metrics` imports this module.
    from tieringd.metrics import Metrics

_STORE_FAILURES: Final = frozenset(
    {
        "StorageUnavailable",
        "StorageDenied",
        "BucketNotFound",
        "StoreFull",
        "CorruptDataError",
        "timeout",
        "throttled",
    }
)
"""Outcomes of requests that are faults of the store. A missing object or a lost race is not one."""

_READS: Final = frozenset({"get", "get_range", "head", "list_page"})
_WRITES: Final = frozenset({"put", "join"})


class ForgottenTopics:
    """
    The counts of topics whose series were dropped.

    Totals include these counts. A total that falls looks like a restart, and rules count the rest as new.
    The event loop drops series; any thread may sum them up.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: defaultdict[Counter, defaultdict[tuple[str, ...], float]] = defaultdict(
            lambda: defaultdict(float)
        )
        """By the values of the labels, with no topic among them."""

    def drop(self, counter: Counter, topic: str) -> None:
        """Drop the series of *topic*, and keep what they counted."""
        names: tuple[str, ...] = counter._labelnames  # noqa: SLF001
        at = names.index("topic")
        with self._lock:
            kept = self._counts[counter]
            # A counter with no other label has one series of the topic: the others need no search.
            found = {(topic,): _count(counter.labels(topic))} if len(names) == 1 else by_labels(counter)
            for labels, value in found.items():
                if labels[at] == topic:
                    kept[*labels[:at], "", *labels[at + 1 :]] += value
                    counter.remove(*labels)

    def values(self, counter: Counter) -> list[tuple[tuple[str, ...], float]]:
        """Return the values of a counter by the values of its labels, and what was kept of dropped series."""
        with self._lock:
            return list(chain(by_labels(counter).items(), self._counts[counter].items()))


class DaemonTotals(Collector):
    """Totals of the metrics of one daemon that carry a topic, a partition or another label."""

    def __init__(self, metrics: Metrics, topic_counters: Sequence[Counter]) -> None:
        """Keep *metrics*, and the counters by topic, each of which gets a total of the same name."""
        self._metrics = metrics
        self._topic_counters = topic_counters

    def collect(self) -> Iterator[Metric]:
        """Yield every total."""
        for counter in self._topic_counters:
            name = counter._name.removeprefix("tieringd_")  # noqa: SLF001
            meaning = counter._documentation  # noqa: SLF001
            yield CounterMetricFamily(
                f"tieringd_daemon_{name}",
                f"{meaning}, over all topics",
                value=_sum(counter, forgotten=self._metrics.forgotten),
            )
        metrics = self._metrics
        for name, meaning, value in (
            (
                "trims_denied",
                "Trims that the broker refused because a permission is missing",
                _sum(metrics.trim_failures, forgotten=metrics.forgotten, error={"BrokerDenied"}),
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
        yield from self._gauges()

    def _gauges(self) -> Iterator[Metric]:
        sums = self._metrics.partitions.sums()
        for name, meaning, value in (
            (
                "upload_pending_bytes",
                "Bytes of closed, stable segments that are not durable yet, over all partitions",
                sums.pending_bytes,
            ),
            (
                "upload_pending_segments",
                "Closed, stable segments that are not durable yet, over all partitions",
                sums.pending_segments,
            ),
            (
                "upload_lag_seconds",
                "Age of the oldest closed segment of any partition that is not durable yet",
                sums.lag_seconds,
            ),
            (
                "seconds_to_loss",
                "Time until the broker's retention deletes what is not durable; +Inf when it will not",
                sums.seconds_to_loss,
            ),
            (
                "held_by_transaction_seconds",
                "Longest time that a closed segment of any partition has waited for an open transaction",
                sums.held_seconds,
            ),
            (
                "trim_held_by_share_groups_bytes",
                "Bytes that are durable and stay on the local disk only because a share group needs them",
                sums.trim_held_bytes,
            ),
            (
                "archive_bytes",
                "Bytes that the archive holds of the led partitions",
                sums.archived_bytes,
            ),
            (
                "archive_segments",
                "Segments that the archive holds of the led partitions",
                sums.archived_segments,
            ),
            (
                "local_log_bytes",
                "Bytes on the local disk of the led partitions",
                sums.local_bytes,
            ),
            (
                "archive_gap_offsets",
                "Offsets recorded as lost before they could be copied, over all led partitions",
                sums.gap_offsets,
            ),
        ):
            yield GaugeMetricFamily(f"tieringd_daemon_{name}", meaning, value=value)


class RedpandaTotals(Collector):
    """The figures that Redpanda's dashboards read and that have no topic, under Redpanda's names."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Yield the present values. The library would add `_total` to the names of counters."""
        metrics, cache = self._metrics, self._metrics.cache
        requests, forgotten = metrics.store_requests, metrics.forgotten
        for name, meaning, value in (
            (
                "storage_cache_space_size_bytes",
                "Bytes of the files in the chunk cache",
                _sum(cache.size_bytes),
            ),
            ("storage_cache_space_files", "Files in the chunk cache", _sum(cache.objects)),
            ("storage_cache_op_hit", "Requests that the cache answered", _sum(cache.hits)),
            ("storage_cache_op_miss", "Requests that had to wait for the object store", _sum(cache.misses)),
            ("storage_cache_op_in_progress_files", "Downloads under way", _sum(cache.in_progress)),
            ("storage_active_segments", "Chunks whose file is open", _sum(cache.open_chunks)),
            (
                "storage_segment_uploads_total",
                "Segments made durable",
                _sum(metrics.uploads, forgotten=forgotten),
            ),
            (
                "storage_partition_manifest_uploads_total",
                "Manifests stored",
                _sum(metrics.manifest_commits, forgotten=forgotten),
            ),
            (
                "client_uploads",
                "Requests that stored an object",
                _sum(requests, operation=_WRITES, outcome={"ok"}),
            ),
            (
                "client_downloads",
                "Requests that read an object",
                _sum(requests, operation={"get", "get_range"}, outcome={"ok"}),
            ),
            (
                "client_not_found",
                "Requests for an object that is not there",
                _sum(requests, outcome={"ObjectNotFound"}),
            ),
        ):
            yield UnknownMetricFamily(f"redpanda_cloud_{name}", f"{meaning} (Redpanda's name)", value=value)
        errors = UnknownMetricFamily(
            "redpanda_cloud_storage_errors_total",
            "Object store requests that failed because of the store (Redpanda's name)",
            labels=("redpanda_direction",),
        )
        for direction, failed in (
            ("rx", _sum(requests, operation=_READS, outcome=_STORE_FAILURES)),
            (
                "tx",
                _sum(requests, outcome=_STORE_FAILURES)
                - _sum(requests, operation=_READS, outcome=_STORE_FAILURES),
            ),
        ):
            errors.add_metric((direction,), failed)
        yield errors


class StoreCost(Collector):
    """An estimate of what the object store costs, by its list prices."""

    def __init__(self, metrics: Metrics, prices: Prices) -> None:
        self._metrics = metrics
        self._prices = prices

    def collect(self) -> Iterator[Metric]:
        """Yield the cost of requests since the start, and the cost of a day of what is stored."""
        requests, prices = self._metrics.store_requests, self._prices
        cost = CounterMetricFamily(
            "tieringd_store_request_cost_dollars",
            "Estimate by list prices of what requests have cost since the start, each attempt counted",
            labels=("kind",),
        )
        reads = _sum(requests, operation=_READS - {"list_page"})
        writes = _sum(requests, operation=_WRITES | {"list_page"})
        cost.add_metric(("read",), prices.read_cost(reads))
        cost.add_metric(("write",), prices.write_cost(writes))
        yield cost
        stored = self._metrics.partitions.sums().archived_bytes
        yield GaugeMetricFamily(
            "tieringd_store_storage_cost_dollars_per_day",
            "Estimate by list prices of what a day of storing the archive of the led partitions costs",
            value=prices.day_of_storage_cost(stored),
        )


def _sum(
    metric: Any,
    *,
    forgotten: ForgottenTopics | None = None,
    but_not: Mapping[str, str] | None = None,
    **wanted: Collection[str],
) -> float:
    """
    Return the sum of a metric's series with *wanted* label values, without those of *but_not*.

    *forgotten* has what a counter by topic has counted for topics that have no series any more.
    """
    names: tuple[str, ...] = metric._labelnames  # noqa: SLF001
    if not names:
        return _count(metric)
    total = 0.0
    for values, value in by_labels(metric).items() if forgotten is None else forgotten.values(metric):
        labels = dict(zip(names, values, strict=True))
        is_wanted = all(labels[label] in chosen for label, chosen in wanted.items())
        if is_wanted and not any(labels[label] == one for label, one in (but_not or {}).items()):
            total += value
    return total


def _count(metric: Any) -> float:
    """Return the value of a metric without labels."""
    value: float = metric._value.get()  # noqa: SLF001
    return value
