"""
The broker seam: leadership, log bounds, topic configuration, client quotas and trimming.

`broker.kafka` sends requests to a live broker. `broker.directory_broker` replaces a broker that does not run:
it reads the log directory alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Final, Protocol

from tieringd.errors import BrokerDenied, TieringError
from tieringd.model.disk_state import QuotaEntity
from tieringd.model.local_log import LocalLog, LocalPartition, LogDirSizes
from tieringd.model.partition import ClusterView, Leadership, LogBounds, TopicPartition

EFFECT_WITHIN_SECONDS: Final = 2.0
"""
How long after its last check a request that changes something may still be sent.

A process that was stopped in between sends nothing when it continues. Leadership that moves to another
broker and back takes longer than this.
"""


class Broker(Protocol):
    """
    The broker whose log directories we read.

    Any call may raise `BrokerUnavailable` (try again) or `BrokerDenied` (an operator must act).
    """

    async def cluster_id(self) -> str:
        """Return the id of the cluster. It is part of every object's key."""

    async def node_id(self) -> int:
        """
        Return the id of the broker beside us.

        Raises:
            BrokerDenied: There is no broker, or the configuration does not identify it.
        """

    async def topic_ids(self, topics: Collection[str]) -> Mapping[str, frozenset[str]]:
        """
        Return the current ids of the topics with these names, as every live broker of the cluster reports.

        A name has several ids where brokers disagree, and none where all of them report that there is no
        such topic. A name is left out where its ids are not known for certain: only an entry proves that
        a topic is gone.
        """

    async def replicas(
        self, found: Sequence[LocalPartition], *, held: Collection[str] | None = None
    ) -> ClusterView:
        """
        Return this broker's role for each partition among *found*.

        A partition whose topic id on disk differs from the cluster's is left out: its directory belongs
        to a deleted incarnation. An unchanged view may be the same object as before, so it is not changed.

        A scan, which finds all partitions, gives *held*: the directories in which no name has changed since
        their logs were read (`Layout.held`). What reads roles from files need not read those again.
        """

    async def log_bounds(
        self, logs: Sequence[LocalLog], *, leader_epochs: Mapping[TopicPartition, int]
    ) -> Mapping[TopicPartition, LogBounds | TieringError]:
        """
        Return the bounds of each log, or the error that prevented reading this log's bounds.

        *leader_epochs* gives the epoch under which this broker was last seen to lead each partition.
        Epochs only grow, so bounds that are returned under an epoch prove that the broker has led under
        it ever since. An implementation may keep both for a comparison, so a caller changes neither later.

        Every log has an entry. An error is `BrokerUnavailable`, `BrokerDenied`, or `LeadershipChanged`
        where the epoch is another one. Without a broker the bounds are read from the files, and an error
        may also be `LocalFileError` or `CorruptDataError`.
        """

    async def log_dir_sizes(self) -> Sequence[LogDirSizes]:
        """Return the contents of the log directories of every live broker, or a broker's error instead."""

    async def topic_configs(self, topics: Sequence[str]) -> Mapping[str, Mapping[str, str] | BrokerDenied]:
        """
        Return the properties that are set on each topic; defaults are left out.

        The exceptions are `cleanup.policy`, `retention.ms`, `retention.bytes` and
        `unclean.leader.election.enable`: they are always included, where the broker has such a setting.
        A topic that the cluster does not know is left out. A topic whose settings this user may not read has
        the error instead.
        """

    async def topic_overrides(self, topic: str) -> Mapping[str, str]:
        """Return only the properties that are set on one topic itself."""

    async def alter_topic(
        self, topic: str, changes: Mapping[str, str | None], *, send_by: float = math.inf
    ) -> None:
        """
        Set properties of a topic and leave all others as they are; None removes a property's setting.

        Nothing is sent after *send_by*, in loop time.

        Raises:
            BrokerUnavailable: The broker does not answer, or it is later than *send_by*.
            BrokerDenied: This user may not, or there is no broker.
        """

    async def client_quotas(self) -> Mapping[QuotaEntity, Mapping[str, float]]:
        """
        Return every client quota that is set in the cluster, by its entity.

        Raises:
            BrokerDenied: This user may not ask, or there is no broker.
        """

    async def alter_client_quotas(
        self, changes: Mapping[QuotaEntity, Mapping[str, float | None]], *, send_by: float = math.inf
    ) -> None:
        """
        Set client quotas and leave all others as they are; None removes one.

        Nothing is sent after *send_by*, in loop time.

        Raises:
            BrokerUnavailable: The broker does not answer, or it is later than *send_by*.
            BrokerDenied: This user may not, or there is no broker. Some quotas may have been set.
        """

    async def share_group_starts(
        self, *, known: Collection[str] = ()
    ) -> Mapping[str, Mapping[TopicPartition, int]]:
        """
        Return the first offset that each share group of the cluster still needs, by group and partition.

        It is negative where the group has not begun. A broker without share groups has none. A group in
        *known* that is not in the result is gone: the broker that coordinates it has said so.

        Raises:
            BrokerUnavailable: A live broker does not answer, or cannot tell the offsets now. Or no broker
                coordinates a group in *known* now.
            BrokerDenied: This user may not see the offsets of a group.
        """

    async def trim(
        self, leadership: Leadership, log: LocalLog, *, before_offset: int, needs_every_replica: bool = False
    ) -> int:
        """
        Release the local records before *before_offset*, which is a segment's base offset.

        *leadership* is the leadership under which the trim was decided. Right before the trim, the
        broker is asked under which epoch it leads, and a trim that would be sent later than
        `EFFECT_WITHIN_SECONDS` after that question is refused. With *needs_every_replica* the trim is
        also refused unless all replicas are in sync: then each of them holds the released records, and
        no later leader can have other records there.

        Returns the local log start offset afterwards. Only whole closed segments at the head are
        released, never the active one. Their files may be deleted later (see `broker.kafka`).

        Raises:
            LeadershipChanged: This broker does not lead the partition under that epoch any more.
            BrokerUnavailable: A replica is not in sync, or the broker does not answer.
            BrokerDenied: The broker never trims this topic, or this user may not.
        """

    async def close(self) -> None:
        """Release connections."""


async def topic_settings(broker: Broker, topic: str) -> Mapping[str, str]:
    """
    Return the properties of one topic, as `Broker.topic_configs` does; empty if the cluster does not know it.

    Raises:
        BrokerUnavailable: The broker does not answer.
        BrokerDenied: This user may not read them.
    """
    found = (await broker.topic_configs([topic])).get(topic, {})
    if isinstance(found, BrokerDenied):
        raise found
    return found
