"""
Names of partitions, and what a broker tells about a partition.

A topic that is deleted and created again has a new topic id and shares nothing with the old one. So
every stored object carries a `TopicIdPartition`, never a bare name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

NO_TOPIC_ID = "AAAAAAAAAAAAAAAAAAAAAA"
"""Kafka's zero UUID: a directory without `partition.metadata` (brokers before 2.8)."""


# A round over ten thousand partitions hashes each name about eight times, and a tuple hashes itself several
# times as fast as a dataclass does.
class TopicPartition(NamedTuple):
    """A topic's name and a partition number."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


@dataclass(frozen=True, slots=True, order=True)
class TopicIdPartition:
    """A partition of one incarnation of a topic, in one cluster."""

    cluster: str
    topic: str
    topic_id: str
    """Kafka's UUID in its 22-character base64url form."""
    partition: int

    @property
    def topic_partition(self) -> TopicPartition:
        """Return the name without the incarnation."""
        return TopicPartition(self.topic, self.partition)

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


@dataclass(frozen=True, slots=True)
class LogBounds:
    """The first offset and the end offsets of a partition's log, on the broker that leads it."""

    log_start_offset: int
    last_stable_offset: int
    """Exclusive: records at or past this offset may still be undone, so none of them is uploaded."""
    log_end_offset: int
    """Exclusive. On a replicated log this is the high watermark."""


@dataclass(frozen=True, slots=True)
class Leadership:
    """The fact that this broker leads a partition, and since which leader epoch."""

    partition: TopicIdPartition
    leader_epoch: int


@dataclass(frozen=True, slots=True)
class Replica:
    """The role of this broker for a partition that it holds."""

    leader_epoch: int
    is_leader: bool
    has_all_in_sync: bool = True
    """Whether every replica of the partition is in sync: then each has every committed record."""


@dataclass(frozen=True, slots=True)
class ClusterView:
    """What the cluster reports of the partitions that this broker holds, at one moment."""

    replicas: Mapping[TopicPartition, Replica]
    """Partitions whose topic id on disk differs from the cluster's are left out."""
    partition_counts: Mapping[str, int]
    """How many partitions each of their topics has in the whole cluster."""
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    """The ids of topics whose directories do not contain them."""
    refused: frozenset[str] = frozenset()
    """Topics of which the cluster tells this user nothing. None of their partitions is in `replicas`."""
