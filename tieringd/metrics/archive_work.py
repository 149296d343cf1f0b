"""Work on the archive after uploads: retention, merging, compaction, scrubbing, purging, housekeeping."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge


class ExpiryCounters:
    """Segments that total retention removed from the archive, by topic."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"tieringd_archive_{name}", text, ("topic",), registry=registry)

        self.segments = counter("expired_segments", "Archived segments removed by total retention")
        self.size_bytes = counter("expired_bytes", "Bytes of archived segments removed by total retention")
        self.deleted_segments = counter(
            "deleted_segments", "Segments whose objects were deleted from the archive"
        )
        self.all = (self.segments, self.size_bytes, self.deleted_segments)


class PurgeMetrics:
    """The archives of deleted topics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.topics = Gauge(
            "tieringd_archive_topics",
            "Topics in the bucket of this cluster, by the state of their archive",
            ("lifecycle",),
            registry=registry,
        )
        self.purged_topics = Counter(
            "tieringd_archive_purged_topics", "Topics whose archive was purged", registry=registry
        )
        self.purged_objects = Counter(
            "tieringd_archive_purged_objects",
            "Objects of deleted topics that were deleted",
            registry=registry,
        )
        self.all = (self.topics, self.purged_topics, self.purged_objects)


class MergeCounters:
    """Merging of adjacent segments."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"tieringd_archive_{name}", text, ("topic", *labels), registry=registry)

        self.segments = counter("merged_segments", "Archived segments that were merged with neighbours")
        self.size_bytes = counter("merged_bytes", "Bytes of archived segments that were merged")
        self.host_bytes = counter(
            "merge_host_bytes",
            "Bytes of merged segments that passed through this host, because the store could not join them",
        )
        self.failures = counter("merge_failures", "Runs of segments that can never be merged", "error")

        self.by_topic = (self.segments, self.size_bytes, self.host_bytes)

    @property
    def all(self) -> tuple[Counter, ...]:
        """Return every counter."""
        return (*self.by_topic, self.failures)


class HousekeepingMetrics:
    """Work on the archive that waits for an idle object store."""

    STATES: Final = ("active", "paused", "idle")

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"tieringd_housekeeping_{name}", text, labels, registry=registry)

        self.state = Gauge(
            "tieringd_housekeeping_state",
            "1 for what housekeeping does: active, paused by traffic, or idle with nothing to do",
            ("state",),
            registry=registry,
        )
        self.covered_at = Gauge(
            "tieringd_housekeeping_last_success_timestamp_seconds",
            "When a kind of work last processed all partitions, in Unix time",
            ("task",),
            registry=registry,
        )
        self.rounds = counter("rounds", "Rounds in which each kind of work finished all that was due")
        self.turns = counter(
            "turns",
            "Turns given to a kind of work, because the store was idle or because the work was overdue",
            "task",
            "reason",
        )
        self.requests = counter("requests", "Approximate number of object store requests of turns", "task")
        self.failures = counter("failures", "Turns that failed, and are retried later", "task", "error")
        self.pauses = counter("pauses", "Times that work had to wait for the object store to be idle")

    @property
    def all(self) -> tuple[Counter | Gauge, ...]:
        """Return every metric."""
        return tuple(vars(self).values())

    def show_state(self, state: str) -> None:
        """Show the current state of housekeeping."""
        for one in self.STATES:
            self.state.labels(one).set(one == state)


class ReuploadCounters:
    """Archived segments that were replaced by their compacted form."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"tieringd_archive_{name}", text, ("topic", *labels), registry=registry)

        self.segments = counter(
            "compacted_segments", "Archived segments replaced by their form after the broker's compaction"
        )
        self.bytes_before = counter(
            "compacted_bytes_before", "Bytes of the archived segments before compaction"
        )
        self.bytes_after = counter(
            "compacted_bytes_after", "Bytes of the compacted segments that replaced them"
        )
        self.failures = counter("compacted_failures", "Compacted segments that cannot be read", "error")

        self.by_topic = (self.segments, self.bytes_before, self.bytes_after)

    @property
    def all(self) -> tuple[Counter, ...]:
        """Return every counter."""
        return (*self.by_topic, self.failures)


class ScrubMetrics:
    """Faults that scrubbing found in the archive, and its repairs."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"tieringd_scrub_{name}", text, labels, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"tieringd_scrub_{name}", text, labels, registry=registry)

        self.faults = gauge(
            "faults", "Faults of led partitions that the last scrubs found and did not repair", "kind"
        )
        self.interval_seconds = gauge(
            "interval_seconds", "Planned time between two complete scrubs; 0: scrubbing is off"
        )
        self.orphans = gauge(
            "orphans", "Objects that no manifest names, not in quarantine, at the last search"
        )
        self.orphan_bytes = gauge(
            "orphan_bytes",
            "Bytes of the objects that no manifest names, not in quarantine, at the last search",
        )
        self.last_full = gauge(
            "last_full_timestamp_seconds",
            "Time of the oldest last complete scrub among the led partitions; 0: a partition has had none "
            "yet, or none is led",
        )
        self.objects = counter("objects", "Objects that were compared with their manifests")
        self.size_bytes = counter(
            "bytes", "Bytes of the data objects that were compared with their manifests"
        )
        self.mended = counter("mended", "Faults that were repaired", "kind")
        self.quarantined = counter("quarantined_objects", "Orphans that were put into quarantine")
        self.deleted = counter("deleted_objects", "Orphans that were deleted after their time in quarantine")
        self.all = tuple(vars(self).values())
