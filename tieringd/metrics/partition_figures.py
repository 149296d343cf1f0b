"""
The figures of partitions and topics: the detail page, and what the default page shows of it.

One record per partition holds its figures, and a scrape renders the series from these records. A gauge
object for each of a dozen figures would take half a kilobyte, and ten thousand partitions have 120,000 of
them. The text is made in parts, with a pause after each, because another thread makes it than the one that
archives: Python runs one of the two at a time.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final

from prometheus_client.core import GaugeMetricFamily, UnknownMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from tieringd.model.partition import TopicPartition

if TYPE_CHECKING:
    from prometheus_client import Counter
    from prometheus_client.metrics_core import Metric

_RENDERED_AT_ONCE, _ADDED_AT_ONCE = 250, 500
"""Partitions between two pauses. A part takes less than a millisecond."""
_PAUSE_SECONDS: Final = 0.0002


@dataclass(frozen=True, slots=True)
class PartitionFigures:
    """The figures of a led partition, as its last step or the last round found them."""

    pending_bytes: int = 0
    pending_segments: int = 0
    pending_offsets: int = 0
    lag_seconds: float = 0.0
    seconds_to_loss: float = float("inf")
    held_seconds: float = 0.0
    held_bytes: int = 0
    trim_held_bytes: int = 0
    next_offset: int = 0
    start_offset: int = 0
    gap_offsets: int = 0
    archived_bytes: int = 0
    archived_segments: int = 0
    local_bytes: int = 0
    local_start_offset: int = 0
    local_next_offset: int = 0

    @property
    def seconds_to_closed_loss(self) -> float:
        """
        Time until the broker deletes a closed segment that is not durable; infinity where none waits.

        The broker's retention does not spare what an open transaction holds back.
        """
        return self.seconds_to_loss if self.pending_bytes or self.held_bytes else math.inf


SERIES: Final[Mapping[str, tuple[str, str]]] = {
    "pending_bytes": (
        "tieringd_upload_pending_bytes",
        "Bytes of closed, stable segments that are not durable yet",
    ),
    "pending_segments": (
        "tieringd_upload_pending_segments",
        "Closed, stable segments that are not durable yet",
    ),
    "pending_offsets": (
        "vectorized_ntp_archiver_pending",
        "Offsets between the archive's end and the log's end (Redpanda's name)",
    ),
    "lag_seconds": (
        "tieringd_upload_lag_seconds",
        "Age of the oldest closed segment that is not durable yet",
    ),
    "seconds_to_loss": (
        "tieringd_seconds_to_loss",
        "Time until the broker's own retention deletes a segment that is not durable; +Inf when it will not",
    ),
    "held_seconds": (
        "tieringd_upload_held_by_transaction_seconds",
        "How long a closed segment has waited for an open transaction to end, 0 when none does",
    ),
    "held_bytes": (
        "tieringd_upload_held_by_transaction_bytes",
        "Bytes of closed segments that wait for an open transaction to end",
    ),
    "trim_held_bytes": (
        "tieringd_trim_held_by_share_groups_bytes",
        "Bytes on the local disk that are durable, and kept there only because a share group needs them",
    ),
    "next_offset": ("tieringd_archive_next_offset", "First offset that the manifest does not cover"),
    "start_offset": ("tieringd_archive_start_offset", "First offset that the archive holds"),
    "gap_offsets": (
        "tieringd_archive_gap_offsets",
        "Offsets recorded as lost before they could be copied",
    ),
    "archived_bytes": ("tieringd_archive_bytes", "Bytes of the segments that the archive holds"),
    "archived_segments": ("tieringd_archive_segments", "Segments that the archive holds"),
    "local_bytes": ("tieringd_local_log_bytes", "Bytes of the partition's log on the local disk"),
    "local_start_offset": ("tieringd_local_log_start_offset", "First offset that the local log holds"),
    "local_next_offset": (
        "tieringd_local_log_next_offset",
        "Offset of the next record that the local log will hold",
    ),
}
"""The name and the meaning of the series of each field of `PartitionFigures`."""

assert SERIES.keys() == {one.name for one in fields(PartitionFigures)}


class PartitionTable(Collector):
    """The figures of every led partition. The event loop changes them; any thread may read them."""

    def __init__(self) -> None:
        self._figures: dict[TopicPartition, PartitionFigures] = {}
        self._version = 0
        self._sums: tuple[int, Sums] = -1, Sums()
        """The last sums, with the version of the figures that they are of."""

    def show(self, partition: TopicPartition, figures: PartitionFigures) -> None:
        """Show *figures* from now on."""
        self._figures[partition] = figures
        self._version += 1

    def forget(self, partition: TopicPartition) -> None:
        """Show nothing of *partition* any more."""
        self._figures.pop(partition, None)
        self._version += 1

    def get(self, partition: TopicPartition) -> PartitionFigures | None:
        """Return the figures of a partition; None if it has none yet."""
        return self._figures.get(partition)

    def known(self) -> dict[TopicPartition, PartitionFigures]:
        """Return the figures of all partitions, as they are now."""
        return self._figures.copy()

    def sums(self) -> Sums:
        """Return the sums over all partitions; the same object again while no figure has changed. Blocks."""
        version, sums = self._sums
        if version != self._version:
            version, sums = self._version, Sums()
            for number, (partition, figures) in enumerate(self.known().items(), start=1):
                sums.add(partition.topic, figures)
                if number % _ADDED_AT_ONCE == 0:
                    time.sleep(_PAUSE_SECONDS)
            self._sums = version, sums
        return sums

    def collect(self) -> Iterator[Metric]:
        """Yield a gauge for each field."""
        known = self.known()
        for one_field, (name, meaning) in SERIES.items():
            family = GaugeMetricFamily(name, meaning, labels=_label_names(name))
            for partition, figures in known.items():
                labels = _label_values(name, partition)
                family.add_metric(labels, getattr(figures, one_field))
            yield family

    def text(self) -> Iterator[str]:
        """Yield what `collect` yields as text for Prometheus, in parts, with a pause after each. Blocks."""
        known = self.known()
        # Names of topics need no escaping: Kafka takes letters, digits, dots, dashes and underscores.
        labels = [f'partition="{one.partition}",topic="{one.topic}"}} ' for one in known]
        values = list(known.values())
        for one_field, (name, meaning) in SERIES.items():
            yield f"# HELP {name} {meaning}\n# TYPE {name} gauge\n"
            begin = f'{name}{{namespace="kafka",' if _has_namespace(name) else f"{name}{{"
            for first in range(0, len(values), _RENDERED_AT_ONCE):
                part = slice(first, first + _RENDERED_AT_ONCE)
                yield "".join(
                    f"{begin}{where}{_number(getattr(figures, one_field))}\n"
                    for where, figures in zip(labels[part], values[part], strict=True)
                )
                time.sleep(_PAUSE_SECONDS)


@dataclass(slots=True)
class TopicSums:
    """The sums of a topic's led partitions."""

    archived_bytes: int = 0
    archived_segments: int = 0
    local_bytes: int = 0


@dataclass(slots=True)
class Sums:
    """The sums of all led partitions, and the worst of their times."""

    pending_bytes: int = 0
    pending_segments: int = 0
    archived_bytes: int = 0
    archived_segments: int = 0
    local_bytes: int = 0
    gap_offsets: int = 0
    trim_held_bytes: int = 0
    lag_seconds: float = 0.0
    held_seconds: float = 0.0
    seconds_to_loss: float = math.inf
    """The least of all partitions with closed segments that wait; infinity if none has any."""
    topics: defaultdict[str, TopicSums] = field(default_factory=lambda: defaultdict(TopicSums))

    def add(self, topic: str, figures: PartitionFigures) -> None:
        """Add one partition."""
        self.pending_bytes += figures.pending_bytes
        self.pending_segments += figures.pending_segments
        self.gap_offsets += figures.gap_offsets
        self.trim_held_bytes += figures.trim_held_bytes
        self.lag_seconds = max(self.lag_seconds, figures.lag_seconds)
        self.held_seconds = max(self.held_seconds, figures.held_seconds)
        self.seconds_to_loss = min(self.seconds_to_loss, figures.seconds_to_closed_loss)
        for sums in (self, self.topics[topic]):
            sums.archived_bytes += figures.archived_bytes
            sums.archived_segments += figures.archived_segments
            sums.local_bytes += figures.local_bytes


class LargestTopics(Collector):
    """The sizes of the largest topics, as many as the configuration allows, and of all topics together."""

    _NAMES: Final = (
        ("archived_bytes", "tieringd_topic_archive_bytes", "Bytes that the archive holds of a topic"),
        (
            "archived_segments",
            "tieringd_topic_archive_segments",
            "Segments that the archive holds of a topic",
        ),
        ("local_bytes", "tieringd_topic_local_bytes", "Bytes on the local disk of an archived topic"),
        (
            "archived_bytes",
            "redpanda_cloud_storage_cloud_log_size",
            "Bytes that the archive holds of a topic (Redpanda's name)",
        ),
        (
            "archived_segments",
            "redpanda_cloud_storage_segments",
            "Segments that the archive holds of a topic (Redpanda's name)",
        ),
    )

    def __init__(self, table: PartitionTable, limit: Callable[[], int]) -> None:
        """Keep *table*, and *limit*, which returns how many topics have series."""
        self._table = table
        self._limit = limit

    def collect(self) -> Iterator[Metric]:
        """Yield the sizes of the largest topics; of equal ones the first by name."""
        topics = self._table.sums().topics
        largest = sorted(topics, key=lambda name: (-topics[name].archived_bytes, name))[: self._limit()]
        for one_field, name, meaning in self._NAMES:
            family = GaugeMetricFamily(
                name, f"{meaning}; only the largest topics have series", labels=topic_labels(name)
            )
            for topic in largest:
                labels = ("kafka", topic) if len(topic_labels(name)) > 1 else (topic,)
                family.add_metric(labels, getattr(topics[topic], one_field))
            yield family


class RedpandaTopicCounters(Collector):
    """Counters by topic under Redpanda's names, for its dashboards."""

    def __init__(self, counters: Mapping[str, tuple[Counter, str]]) -> None:
        """Keep our *counters* and their meanings, by Redpanda's names."""
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        """Yield the present values."""
        for name, (counter, meaning) in self._counters.items():
            # The library adds `_total` to the names of counters, and Redpanda does not.
            family = UnknownMetricFamily(
                name, f"{meaning} (Redpanda's name)", labels=("redpanda_namespace", "redpanda_topic")
            )
            for (topic,), value in by_labels(counter).items():
                family.add_metric(("kafka", topic), value)
            yield family


def topic_labels(name: str) -> tuple[str, ...]:
    """Return the labels of a topic's series: ours, or Redpanda's."""
    return ("redpanda_namespace", "redpanda_topic") if name.startswith("redpanda_") else ("topic",)


def by_labels(metric: Any) -> dict[tuple[str, ...], float]:
    """
    Return the values of a gauge or counter by the values of its labels.

    They are read from the library's internals: `collect()` makes objects and dictionaries for each series,
    which takes ten times as long.
    """
    return {labels: child._value.get() for labels, child in metric._metrics.copy().items()}  # noqa: SLF001


def _has_namespace(name: str) -> bool:
    return name.startswith("vectorized_")


def _label_names(name: str) -> tuple[str, ...]:
    return ("namespace", "topic", "partition") if _has_namespace(name) else ("topic", "partition")


def _label_values(name: str, partition: TopicPartition) -> Sequence[str]:
    values = (partition.topic, str(partition.partition))
    return ("kafka", *values) if _has_namespace(name) else values


def _number(value: float) -> str:
    return str(value) if type(value) is int else str(floatToGoString(value))  # type: ignore[no-untyped-call]
