"""One broker of a simulated cluster, as the daemon beside it sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.fakes.broker import broker_unavailable
from tests.fakes.log_writer import CLUSTER
from tieringd.errors import BrokerDenied, BrokerUnavailable, TieringError
from tieringd.model.partition import ClusterView, Replica

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tests.fakes.wire import Wire
    from tests.simulation.replication import Replication
    from tieringd.model.local_log import LocalLog, LocalPartition
    from tieringd.model.partition import LogBounds, TopicIdPartition, TopicPartition


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
    ) -> None:
        self._number = number
        self._partitions = {each.name: each for each in partitions}
        self._wire = wire
        self._on_trim = on_trim

    async def cluster_id(self) -> str:
        """Return the cluster's id."""
        return await self._answer("cluster_id", lambda: CLUSTER)

    async def replicas(self, found: Sequence[LocalPartition]) -> ClusterView:
        """Return what this broker believes to be to each partition."""

        def view() -> ClusterView:
            names = {each.topic_partition for each in found}
            return ClusterView(
                {
                    name: Replica(each.heard[self._number][1], each.believes_to_lead(self._number))
                    for name, each in self._partitions.items()
                    if name in names
                },
                {name.topic: len(self._partitions) for name in self._partitions},
            )

        return await self._answer("replicas", view)

    async def log_bounds(self, logs: Sequence[LocalLog]) -> Mapping[TopicPartition, LogBounds | TieringError]:
        """Return the bounds of each log that this broker believes to lead."""

        def bounds(name: TopicPartition) -> LogBounds | TieringError:
            partition = self._partitions[name]
            if not partition.believes_to_lead(self._number):
                return BrokerUnavailable(f"{name} is led by another broker")
            return partition.bounds_at(self._number)

        names = [each.partition.topic_partition for each in logs]
        return await self._answer("log_bounds", lambda: {name: bounds(name) for name in names})

    async def topic_configs(self, topics: Sequence[str]) -> Mapping[str, Mapping[str, str]]:
        """Return that nothing is set on any topic."""
        return await self._answer("topic_configs", lambda: {each: {} for each in topics})

    async def topic_overrides(self, topic: str) -> Mapping[str, str]:
        """Return that nothing is set."""
        return await self._answer("topic_overrides", dict)

    async def alter_topic(self, topic: str, changes: Mapping[str, str | None]) -> None:
        """Refuse: no topic here has managed retention."""
        raise BrokerDenied(f"{topic} may not be altered", hint="Leave the retention as it is")

    async def trim(self, partition: TopicIdPartition, log: LocalLog, *, before_offset: int) -> int:
        """Move the log start, and let the segments below it go."""
        return await self._answer("trim", lambda: self._let_go(partition, before_offset))

    async def close(self) -> None:
        """Do nothing: there is no connection."""

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

    async def _answer(self, operation: str, effect: Callable[[], Any]) -> Any:
        async def happen() -> Any:
            return effect()

        return await self._wire.carry(operation, happen, lost=broker_unavailable)
