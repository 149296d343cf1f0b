"""The job that purges the archives of deleted topics, put together from a daemon's parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieringd.housekeeping.topic_purge import TopicPurge, TopicPurger
from tieringd.topics.topic_registry import TopicRegistry

if TYPE_CHECKING:
    from tieringd.broker.base import Broker
    from tieringd.config import Config
    from tieringd.daemon.archive import Archive
    from tieringd.metrics import Metrics


def topic_purge_job(
    config: Config,
    metrics: Metrics,
    archive: Archive,
    broker: Broker,
    *,
    writer_id: str,
) -> TopicPurge:
    """Return the job; it has a topic registry of its own, as one task at a time changes one."""
    return TopicPurge(
        broker=broker,
        registry=TopicRegistry(archive.store, archive.manifests),
        purger=TopicPurger(archive.store, archive.manifests, metrics=metrics.purge),
        history=archive.history,
        owner=writer_id,
        grace_ms=config.cloud_storage_topic_purge_grace_period_ms,
        is_to_stay=config.keeps_deleted,
        clock=archive.clock,
        metrics=metrics.purge,
    )
