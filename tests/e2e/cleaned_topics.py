"""Topics that a real broker compacts, when a test lets it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.topic_config import set_topic_config

if TYPE_CHECKING:
    from tests.support.kafka import KafkaCluster


async def create(cluster: KafkaCluster, topic: str, policy: str) -> None:
    """Create a topic whose records are not compacted before a test lets the cleaner at them."""
    configs = {
        "cleanup.policy": policy,
        "segment.bytes": str(1 << 20),
        "retention.ms": "-1",
        "file.delete.delay.ms": "100",
        "delete.retention.ms": "0",
        "min.cleanable.dirty.ratio": "0.01",
        "min.compaction.lag.ms": "86400000",
    }
    await cluster.create_topic(topic, configs=configs)


def let_cleaner_at(cluster: KafkaCluster, topic: str) -> None:
    """Let the broker compact whatever is closed."""
    set_topic_config(cluster.bootstrap, topic, "min.compaction.lag.ms", "0")


def cleaned_to(cluster: KafkaCluster, topic: str) -> int:
    """Return how far the broker's cleaner has come, as it notes it."""
    path = cluster.log_dir() / "cleaner-offset-checkpoint"
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[2]) for line in lines if line.startswith(f"{topic} 0 ")), 0)
