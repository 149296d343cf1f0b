"""Consumer groups of the archive-only endpoint."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_COMMIT_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class GroupMetrics:
    """What this endpoint does for consumer groups."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.groups = Gauge(
            "tieringd_endpoint_groups",
            "Consumer groups that this archive-only endpoint works on now",
            registry=registry,
        )
        self.members = Gauge(
            "tieringd_endpoint_group_members",
            "Members of consumer groups that are connected to this archive-only endpoint",
            registry=registry,
        )
        self.rebalances = Counter(
            "tieringd_endpoint_group_rebalances",
            "Generations of consumer groups that this archive-only endpoint began",
            registry=registry,
        )
        self.expired_members = Counter(
            "tieringd_endpoint_group_expired_members",
            "Members of consumer groups that this archive-only endpoint removed because they had gone silent",
            registry=registry,
        )
        self.conflicts = Counter(
            "tieringd_endpoint_group_conflicts",
            "Writes of consumer groups that another endpoint was ahead of, so that they were decided anew",
            registry=registry,
        )
        self.write_seconds = Histogram(
            "tieringd_endpoint_group_write_seconds",
            "Time that a change of a consumer group, such as a commit of offsets, takes until it is in the "
            "bucket; without the wait for the write before it",
            buckets=_COMMIT_SECONDS,
            registry=registry,
        )
        self.failures = Counter(
            "tieringd_endpoint_group_failures",
            "Requests of consumer groups that failed because the object store did not answer",
            registry=registry,
        )
        self.refusals = Counter(
            "tieringd_endpoint_group_refusals",
            "Requests of consumer groups that failed because their group cannot be stored or read: the "
            "object store refuses it, or its object is damaged or would be too large",
            registry=registry,
        )
        self.endpoints = Gauge(
            "tieringd_endpoint_live_endpoints",
            "Archive-only endpoints of this archive that are alive, as this one sees it; 0 without groups",
            registry=registry,
        )
