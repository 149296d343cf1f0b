"""One broker of a simulated cluster, as the daemon beside it sees it."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

from tests.fakes.broker import broker_unavailable, require_time
from tests.fakes.log_writer import CLUSTER
from tieringd.broker.base import EFFECT_WITHIN_SECONDS
from tieringd.errors import BrokerDenied, BrokerUnavailable, LeadershipChanged, TieringError
from tieringd.model.partition import ClusterView, Replica

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from tests.fakes.wire import Wire
    from tests.simulation.replication import Replication
    from tieringd.model.local_log import LocalLog, LocalPartition
    from tieringd.model.partition import Leadership, LogBounds, TopicIdPartition, TopicPartition


class ClusterBroker:
    """
    Broker *number*'s answers, over *wire*.

    *on_trim* hears of a trim before it happens: the broker, the partition and the offset.
    """

    def __init__(
        self,
        number: int,
        partitions: Sequence[Replication],
        wire: Wire,
        *,
        on_trim: Callable[[int, Replication, int], None],
        elects_uncleanly: bool = False,
    ) -> None:
        self._number = number
        self._partitions = {each.name: each for each in partitions}
        self._wire = wire
        self._on_trim = on_trim
        self._elects_uncleanly = elects_uncleanly

    async def cluster_id(self) -> str:
        """Return the cluster's id."""
        return await self._answer("cluster_id", lambda: CLUSTER)

    async def replicas(
        self,
        found: Sequence[LocalPartition],
        *,
        held: Collection[str] | None = None,
    ) -> ClusterView:
        """Return what this broker believes to be to each partition."""

        def view() -> ClusterView:
            names = {each.topic_partition for each in found}
            return ClusterView(
                {
                    name: Replica(each.heard[self._number][1], is_leader=each.believes_to_lead(self._number))
                    for name, each in self._partitions.items()
                    if name in names
                },
                {name.topic: len(self._partitions) for name in self._partitions},
            )

        return await self._answer("replicas", view)

    async def log_bounds(
        self, logs: Sequence[LocalLog], *, leader_epochs: Mapping[TopicPartition, int]
    ) -> Mapping[TopicPartition, LogBounds | TieringError]:
        """Return the bounds of each log that this broker believes to lead under the epoch given for it."""

        def bounds(name: TopicPartition) -> LogBounds | TieringError:
            partition = self._partitions[name]
            if not partition.believes_to_lead(self._number):
                return BrokerUnavailable(f"{name} is led by another broker")
            if partition.heard[self._number][1] != leader_epochs[name]:
                return LeadershipChanged(f"{name} is led under epoch {partition.heard[self._number][1]}")
            return partition.bounds_at(self._number)

        names = [each.partition.topic_partition for each in logs]
        return await self._answer("log_bounds", lambda: {name: bounds(name) for name in names})

    async def topic_configs(self, topics: Sequence[str]) -> Mapping[str, Mapping[str, str]]:
        """Return that nothing is set on any topic, and whether a replica that is not in sync may lead."""
        settings = {"unclean.leader.election.enable": str(self._elects_uncleanly).lower()}
        return await self._answer("topic_configs", lambda: dict.fromkeys(topics, settings))

    async def topic_overrides(self, topic: str) -> Mapping[str, str]:
        """Return that nothing is set."""
        return await self._answer("topic_overrides", dict)

    async def alter_topic(
        self, topic: str, changes: Mapping[str, str | None], *, send_by: float = math.inf
    ) -> None:
        """Refuse: no topic here has managed retention."""
        raise BrokerDenied(f"{topic} may not be altered", hint="Leave the retention as it is")

    async def share_group_starts(
        self,
        *,
        known: Collection[str] = (),
    ) -> Mapping[str, Mapping[TopicPartition, int]]:
        """Return that there are no share groups."""
        return {}

    async def trim(
        self, leadership: Leadership, log: LocalLog, *, before_offset: int, needs_every_replica: bool = False
    ) -> int:
        """
        Move the log start, and let the segments below it go.

        As `broker.kafka` does it: the broker is asked for the leader. DeleteRecords, which names no epoch,
        follows soon or not at all. It may arrive long after it was given up.
        """
        send_by = asyncio.get_running_loop().time() + EFFECT_WITHIN_SECONDS
        await self._answer("trim", lambda: self._require_leadership(leadership, needs_every_replica))
        return await self._answer(
            "delete_records",
            lambda: self._let_go(leadership.partition, before_offset),
            send_by=send_by,
            may_be_late=True,
        )

    async def close(self) -> None:
        """Do nothing: there is no connection."""

    def _require_leadership(self, leadership: Leadership, needs_every_replica: bool) -> None:  # noqa: FBT001 - as the request has it
        replication = self._partitions[leadership.partition.topic_partition]
        leader, leader_epoch = replication.heard[self._number]
        if (leader, leader_epoch) != (self._number, leadership.leader_epoch):
            raise LeadershipChanged(f"{leadership.partition} is led by {leader} under epoch {leader_epoch}")
        if needs_every_replica and len(replication.in_sync) < len(replication.replicas):
            raise BrokerUnavailable(f"a replica of {leadership.partition} is not in sync")

    def _let_go(self, partition: TopicIdPartition, before_offset: int) -> int:
        replication = self._partitions[partition.topic_partition]
        if not replication.believes_to_lead(self._number):
            raise BrokerUnavailable(f"{partition} is led by another broker")
        replica = replication.replicas[self._number]
        if before_offset > replica.stable_end:
            raise BrokerUnavailable(f"{before_offset} is past the high watermark of {partition}")
        self._on_trim(self._number, replication, before_offset)
        replica.log_start_offset = max(replica.log_start_offset, before_offset)
        # A deposed leader whose daemon cannot reach the bucket trims by what was durable before. It
        # is off the lineage then, and missed only if another unclean election brings it back.
        replica.delete_below_start(is_requested=replication.leader == self._number)
        return replica.log_start_offset

    async def _answer(
        self,
        operation: str,
        effect: Callable[[], Any],
        *,
        send_by: float = math.inf,
        may_be_late: bool = False,
    ) -> Any:
        async def happen() -> Any:
            return effect()

        await self._wire.sendable()
        require_time(send_by)
        detach = (lambda: happen) if may_be_late else None
        return await self._wire.carry(operation, happen, lost=broker_unavailable, detach=detach)
