"""
The broker seam: leadership, log bounds, topic configuration, client quotas and trimming.

`broker.kafka` asks a live broker. `broker.directory` stands in where there is none and the
log directory is all there is.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from tieringd.errors import TieringError
    from tieringd.model.disk_state import QuotaEntity
    from tieringd.model.local_log import LocalLog, LocalPartition, LogDirSizes
    from tieringd.model.partition import ClusterView, Leadership, LogBounds, TopicPartition

EFFECT_WITHIN_SECONDS: Final = 2.0
"""
So long after its last check a request that changes something may leave. A process that was stopped in
between sends nothing when it goes on. Leadership that goes to another broker and back takes longer.
"""


class Broker(Protocol):
    """
    The broker whose log directories we read.

    Any call may raise `BrokerUnavailable` (try again) or `BrokerDenied` (an operator must act).
    """

    async def cluster_id(self) -> str:
        """Return the id of the cluster; it is part of every object's key."""

    async def node_id(self) -> int:
        """
        Return the id of the broker beside us.

        Raises:
            BrokerDenied: There is no broker, or the configuration does not tell which one it is.
        """

    async def topic_ids(self, topics: Collection[str]) -> Mapping[str, frozenset[str]]:
        """
        Return which ids the topics of these names have now, as every live broker of the cluster tells.

        More than one where brokers disagree; none where all of them say that there is no such topic. A
        name is left out where that is not known for certain: only what is there proves that a topic is gone.
        """

    async def replicas(self, found: Sequence[LocalPartition]) -> ClusterView:
        """
        Return what this broker is to each partition among *found*.

        A partition whose topic id on disk differs from the cluster's is left out: its directory
        belongs to a deleted incarnation.
        """

    async def log_bounds(
        self, logs: Sequence[LocalLog], *, leader_epochs: Mapping[TopicPartition, int]
    ) -> Mapping[TopicPartition, LogBounds | TieringError]:
        """
        Return the bounds of each log, or the error that kept this one log from having them.

        *leader_epochs* names the epoch under which this broker was seen to lead each of them. Epochs only
        grow, so bounds that are given under it prove that the broker led under it all the time since.

        Every log has an entry. An error is `BrokerUnavailable` or `BrokerDenied`, and `LeadershipChanged`
        where the epoch is another one; with no broker, where the bounds are read from the files, also
        `LocalFileError` or `CorruptDataError`.
        """

    async def log_dir_sizes(self) -> Sequence[LogDirSizes]:
        """Return what is in the log directories of every live broker; one that cannot tell says why."""

    async def topic_configs(self, topics: Sequence[str]) -> Mapping[str, Mapping[str, str]]:
        """
        Return what the broker itself has set on each topic; defaults are left out.

        But `cleanup.policy`, `retention.ms`, `retention.bytes` and `unclean.leader.election.enable` are
        there in any case, where the broker has such a setting.
        """

    async def topic_overrides(self, topic: str) -> Mapping[str, str]:
        """Return only what is set on one topic itself."""

    async def alter_topic(
        self, topic: str, changes: Mapping[str, str | None], *, send_by: float = math.inf
    ) -> None:
        """
        Set properties of a topic and leave all others as they are; None takes a property's setting away.

        Nothing is sent after *send_by*, in loop time.

        Raises:
            BrokerUnavailable: The broker does not answer, or it is later than *send_by*.
            BrokerDenied: We may not, or there is no broker.
        """

    async def client_quotas(self) -> Mapping[QuotaEntity, Mapping[str, float]]:
        """
        Return every client quota that is set in the cluster, by its name.

        Raises:
            BrokerDenied: We may not ask, or there is no broker.
        """

    async def alter_client_quotas(
        self, changes: Mapping[QuotaEntity, Mapping[str, float | None]], *, send_by: float = math.inf
    ) -> None:
        """
        Set client quotas and leave all others as they are; None takes one away.

        Nothing is sent after *send_by*, in loop time.

        Raises:
            BrokerUnavailable: The broker does not answer, or it is later than *send_by*.
            BrokerDenied: We may not, or there is no broker. Some may have been set.
        """

    async def trim(
        self, leadership: Leadership, log: LocalLog, *, before_offset: int, needs_every_replica: bool = False
    ) -> int:
        """
        Let go of the local records before *before_offset*, which is a segment's base offset.

        *leadership* is the one that the trim was decided under. The broker is asked which epoch it leads
        under right before, and a trim that leaves later than `EFFECT_WITHIN_SECONDS` after that question
        is refused. *needs_every_replica* refuses it as well unless all replicas are in sync: then each of
        them holds what is let go of, and no later leader can have other records there.

        Returns the local log start offset afterwards. Whole closed segments only, from the
        head only, never the active one. Files may go later (see `broker.kafka`).

        Raises:
            LeadershipChanged: This broker does not lead the partition under that epoch any more.
            BrokerUnavailable: A replica is not in sync, or the broker does not answer.
            BrokerDenied: The broker never trims this topic, or we may not.
        """

    async def close(self) -> None:
        """Release connections."""
