"""
The partitions on this broker's disks, by the broker's view of them and by their topics' configurations.

Of ten thousand partitions nearly all are the same in any two scans. So what follows from their names and
roles alone is a value, which the observer makes anew only when one of these has changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tieringd.config import TopicConfig
from tieringd.formats.object_keys import TopicKey, topic_key
from tieringd.model.local_log import LocalPartition
from tieringd.model.partition import ClusterView, TopicIdPartition, TopicPartition


@dataclass(frozen=True, slots=True, eq=False)
class ListedPartitions:
    """The partitions on disk, by the broker's view of them."""

    cluster: str
    found: tuple[LocalPartition, ...]
    """The partitions of the scan."""
    view: ClusterView
    local: tuple[LocalPartition, ...]
    """Those of `found` that the cluster lists, under their topics' current ids."""
    unnamed: tuple[LocalPartition, ...]
    """The others."""
    topic_ids: Mapping[str, str]
    """The ids of the topics of `local`, by name."""
    leader_epochs: Mapping[TopicPartition, int]
    led_topics: tuple[TopicKey, ...]
    """The topics whose partition 0 this broker leads."""

    @classmethod
    def of(cls, cluster: str, found: tuple[LocalPartition, ...], view: ClusterView) -> ListedPartitions:
        """Derive it."""
        replicas, ids = view.replicas, view.topic_ids
        local = tuple(
            _with_topic_id(one, ids.get(one.topic_partition.topic, one.topic_id))
            for one in found
            if one.topic_partition in replicas
        )
        return cls(
            cluster=cluster,
            found=found,
            view=view,
            local=local,
            unnamed=tuple(one for one in found if one.topic_partition not in replicas),
            topic_ids={one.topic_partition.topic: one.topic_id for one in local},
            leader_epochs={name: replica.leader_epoch for name, replica in replicas.items()},
            led_topics=tuple(
                topic_key(identify(cluster, one))
                for one in local
                if one.topic_partition.partition == 0 and replicas[one.topic_partition].is_leader
            ),
        )

    def is_of(self, cluster: str, found: tuple[LocalPartition, ...], view: ClusterView) -> bool:
        """Say whether it follows from these."""
        # Unchanged parts are the same objects, which takes no time to compare.
        return self.cluster == cluster and self.found == found and self.view == view


@dataclass(frozen=True, slots=True, eq=False)
class TieredPartitions:
    """The partitions that the cluster lists, by the configurations of their topics."""

    listed: ListedPartitions
    topics: Mapping[str, TopicConfig]
    archived: tuple[LocalPartition, ...]
    """The partitions of topics that are archived."""
    untiered: tuple[LocalPartition, ...]
    """The others."""
    keys: frozenset[TopicKey]
    """The topics of `archived`."""
    followed: frozenset[TopicPartition]
    """Those of `archived` that another broker leads."""

    @classmethod
    def of(cls, listed: ListedPartitions, topics: Mapping[str, TopicConfig]) -> TieredPartitions:
        """Derive it."""
        archived = tuple(one for one in listed.local if topics[one.topic_partition.topic].remote_write)
        names = {(one.topic_partition.topic, one.topic_id) for one in archived}
        replicas = listed.view.replicas
        return cls(
            listed=listed,
            topics=topics,
            archived=archived,
            untiered=tuple(one for one in listed.local if not topics[one.topic_partition.topic].remote_write),
            keys=frozenset(TopicKey(listed.cluster, *each) for each in names),
            followed=frozenset(
                one.topic_partition for one in archived if not replicas[one.topic_partition].is_leader
            ),
        )


def identify(cluster: str, partition: LocalPartition) -> TopicIdPartition:
    """Return the name of *partition* in *cluster*."""
    name = partition.topic_partition
    return TopicIdPartition(cluster, name.topic, partition.topic_id, name.partition)


def _with_topic_id(partition: LocalPartition, topic_id: str) -> LocalPartition:
    return partition if partition.topic_id == topic_id else replace(partition, topic_id=topic_id)
