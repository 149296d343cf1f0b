"""
A broker in this process, over the logs of `LogWriter`s.

It answers from the records of the writers, never from the files. It trims as Kafka does: the log start offset
moves at once, and whole segments are deleted, at once or after a delay.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict, deque
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tests.fakes.log_writer import CLUSTER
from tests.fakes.wire import Wire
from tieringd.errors import BrokerDenied, BrokerUnavailable, LeadershipChanged, TieringError
from tieringd.model.local_log import LogDirSizes, ReplicaSize
from tieringd.model.partition import ClusterView, Replica

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from tests.fakes.log_writer import LogWriter
    from tieringd.model.disk_state import QuotaEntity
    from tieringd.model.local_log import LocalLog, LocalPartition
    from tieringd.model.partition import Leadership, LogBounds, TopicPartition


def broker_unavailable(operation: str, outcome_unknown: bool = False) -> BrokerUnavailable:  # noqa: FBT001, FBT002 - the wire calls it
    return BrokerUnavailable(f"{operation}: the broker does not answer ({outcome_unknown=})")


def require_time(send_by: float) -> None:
    """Refuse a request after *send_by*, in seconds of the loop's clock."""
    if asyncio.get_running_loop().time() > send_by:
        raise BrokerUnavailable("the last check is too long ago")


class FakeBroker:
    """
    The leader of the partitions in *epochs*.

    With *keeps_trimmed_files* the files of trimmed segments stay until `delete_trimmed`, as with Kafka's
    periodic retention check. Topics in *denied* are never trimmed.
    """

    def __init__(
        self, *writers: LogWriter, wire: Wire | None = None, keeps_trimmed_files: bool = False
    ) -> None:
        self._writers = {each.name: each for each in writers}
        self._wire = wire or Wire()
        self._keeps_trimmed_files = keeps_trimmed_files
        self._faults: defaultdict[str, deque[TieringError]] = defaultdict(deque)
        self.epochs: dict[TopicPartition, int] = {each.name: each.epochs[-1][0] for each in writers}
        self.followed: dict[TopicPartition, int] = {}
        """Partitions that another broker leads, with that leader's epoch."""
        self.cluster_topics: dict[str, set[str]] = {
            each.identified.topic: {each.identified.topic_id} for each in writers
        }
        """The topic ids of the cluster's topics, by name."""
        self.untold: set[str] = set()
        """Topics of which the cluster reports neither existence nor configuration."""
        self.hidden: set[str] = set()
        """Topics whose settings this user may not read."""
        self.refused: set[str] = set()
        """Topics of which the cluster tells this user nothing at all."""
        self.configs: dict[str, dict[str, str]] = {}
        self.bounds_errors: dict[TopicPartition, TieringError] = {}
        self.node = 0
        self.quotas: dict[QuotaEntity, dict[str, float]] = {}
        """The client quotas of the cluster. Brokers of one cluster may share one dictionary."""
        self.quota_orders = 0
        """The number of requests to this broker that changed quotas."""
        self.share_groups: dict[str, dict[TopicPartition, int]] = {}
        """The start offsets of the cluster's share groups."""
        self.denied: set[str] = set()
        self.lagging: set[TopicPartition] = set()
        self.calls: Counter[str] = Counter()
        """How often each operation was called."""
        self.created_again: set[str] = set()
        """Topics whose directories here are those of a deleted topic with the same name."""
        """Partitions with a replica that is not in sync."""
        self.trims: list[tuple[TopicPartition, int]] = []
        """Every requested trim: the partition and the offset."""

    def add(self, writer: LogWriter) -> None:
        """Add a partition, of which this broker is the leader."""
        self._writers[writer.name] = writer
        self.epochs[writer.name] = writer.epochs[-1][0]

    def fail_next(self, operation: str, error: TieringError) -> None:
        """Make the next call of *operation* raise *error*."""
        self._faults[operation].append(error)

    async def cluster_id(self) -> str:
        """Return the cluster's id."""
        return await self._answer("cluster_id", lambda: CLUSTER)

    async def topic_ids(self, topics: Collection[str]) -> Mapping[str, frozenset[str]]:
        """Return the ids of the topics in `cluster_topics`, without the topics in `untold`."""
        return await self._answer(
            "topic_ids",
            lambda: {
                name: frozenset(self.cluster_topics.get(name, set()))
                for name in topics
                if name not in self.untold
            },
        )

    async def replicas(
        self,
        found: Sequence[LocalPartition],
        *,
        held: Collection[str] | None = None,
    ) -> ClusterView:
        """Return the partitions of *found* that this broker leads, and those of `followed` as followed."""
        names = {each.topic_partition for each in found}

        def view() -> ClusterView:
            replicas = {
                name: Replica(epoch, is_leader=True, has_all_in_sync=name not in self.lagging)
                for name, epoch in self.epochs.items()
            }
            replicas |= {name: Replica(epoch, is_leader=False) for name, epoch in self.followed.items()}
            held = {
                name: replica
                for name, replica in replicas.items()
                if name in names and name.topic not in self.created_again | self.refused
            }
            return ClusterView(
                held,
                Counter(name.topic for name in replicas if name.topic not in self.refused),
                refused=frozenset(self.refused & {name.topic for name in names}),
            )

        return await self._answer("replicas", view)

    async def log_bounds(
        self, logs: Sequence[LocalLog], *, leader_epochs: Mapping[TopicPartition, int]
    ) -> Mapping[TopicPartition, LogBounds | TieringError]:
        """Return each log's bounds, or an error if this broker does not lead it with the given epoch."""

        def bounds(name: TopicPartition) -> LogBounds | TieringError:
            if self.epochs.get(name) != leader_epochs[name]:
                return LeadershipChanged(f"{name} is led under {self.epochs.get(name)}")
            return self.bounds_errors.get(name) or self._writers[name].bounds()

        names = [each.partition.topic_partition for each in logs]
        return await self._answer("log_bounds", lambda: {name: bounds(name) for name in names})

    async def log_dir_sizes(self) -> Sequence[LogDirSizes]:
        """Return the log directories of this broker's logs, as those of broker 1."""

        def sizes() -> list[LogDirSizes]:
            by_path: defaultdict[str, list[ReplicaSize]] = defaultdict(list)
            for writer in self._writers.values():
                log = writer.local_log()
                by_path[log.partition.log_dir].append(ReplicaSize(writer.name, log.size_bytes))
            return [LogDirSizes(1, path, tuple(replicas)) for path, replicas in sorted(by_path.items())]

        return await self._answer("log_dir_sizes", sizes)

    async def topic_configs(self, topics: Sequence[str]) -> Mapping[str, Mapping[str, str] | BrokerDenied]:
        """Return the settings of each topic, without those in `untold`; an error for each in `hidden`."""
        hidden = {each: BrokerDenied(f"the settings of topic {each} are hidden") for each in self.hidden}
        return await self._answer(
            "topic_configs",
            lambda: {
                each: hidden.get(each) or self.configs.get(each, {})
                for each in topics
                if each not in self.untold
            },
        )

    async def topic_overrides(self, topic: str) -> Mapping[str, str]:
        """Return the settings of one topic itself."""
        return await self._answer("topic_overrides", lambda: dict(self.configs.get(topic, {})))

    async def alter_topic(
        self, topic: str, changes: Mapping[str, str | None], *, send_by: float = math.inf
    ) -> None:
        """Set or remove settings of a topic; None removes one."""
        require_time(send_by)

        def change() -> None:
            if topic in self.denied:
                raise BrokerDenied(f"{topic} may not be altered", hint="Grant ALTER_CONFIGS on the topic")
            kept = {**self.configs.get(topic, {}), **changes}
            self.configs[topic] = {name: value for name, value in kept.items() if value is not None}

        await self._answer("alter_topic", change)

    async def node_id(self) -> int:
        """Return the id of this broker."""
        return await self._answer("node_id", lambda: self.node)

    async def client_quotas(self) -> Mapping[QuotaEntity, Mapping[str, float]]:
        """Return all quotas."""
        return await self._answer(
            "client_quotas", lambda: {entity: dict(values) for entity, values in self.quotas.items()}
        )

    async def alter_client_quotas(
        self, changes: Mapping[QuotaEntity, Mapping[str, float | None]], *, send_by: float = math.inf
    ) -> None:
        """Set or remove quotas; None removes one."""
        require_time(send_by)

        def change() -> None:
            self.quota_orders += 1
            for entity, values in changes.items():
                kept = {**self.quotas.get(entity, {}), **values}
                self.quotas[entity] = {name: value for name, value in kept.items() if value is not None}
                if not self.quotas[entity]:
                    del self.quotas[entity]

        await self._answer("alter_client_quotas", change, may_be_late=True)

    async def share_group_starts(
        self,
        *,
        known: Collection[str] = (),
    ) -> Mapping[str, Mapping[TopicPartition, int]]:
        """Return the share groups' start offsets. A cluster without any answers at once."""
        if not self.share_groups and not self._faults["share_group_starts"]:
            return {}
        return await self._answer(
            "share_group_starts",
            lambda: {group: dict(starts) for group, starts in self.share_groups.items()},
        )

    async def trim(
        self, leadership: Leadership, log: LocalLog, *, before_offset: int, needs_every_replica: bool = False
    ) -> int:
        """Move the log start offset, delete the segments below it, and return the new log start offset."""
        name = leadership.partition.topic_partition
        writer = self._writers[name]
        self.trims.append((name, before_offset))

        def let_go() -> None:
            if name in self.lagging and needs_every_replica:
                raise BrokerUnavailable(f"a replica of {name} is not in sync")
            self._let_go(name, before_offset, leader_epoch=leadership.leader_epoch)

        await self._answer("trim", let_go)
        return writer.log_start_offset

    def delete_trimmed(self) -> None:
        """Delete the segment files below each log start offset."""
        for writer in self._writers.values():
            for base_offset in self._trimmed_bases(writer):
                writer.trim_file(base_offset)

    async def close(self) -> None:
        """Do nothing: there is no connection."""

    def _let_go(self, name: TopicPartition, before_offset: int, *, leader_epoch: int) -> None:
        if name.topic in self.denied:
            raise BrokerDenied(f"{name.topic} is never trimmed", hint="Grant DELETE on the topic")
        if self.epochs.get(name) != leader_epoch:
            raise LeadershipChanged(f"{name} is led under {self.epochs.get(name)}")
        writer = self._writers[name]
        assert before_offset <= writer.stable_end, f"{before_offset} is past the high watermark"
        writer.log_start_offset = max(writer.log_start_offset, before_offset)
        if not self._keeps_trimmed_files:
            for base_offset in self._trimmed_bases(writer):
                writer.trim_file(base_offset)

    def _trimmed_bases(self, writer: LogWriter) -> list[int]:
        bases = writer.bases_on_disk
        return [base for base, following in pairwise(bases) if following <= writer.log_start_offset]

    async def _answer(self, operation: str, effect: Callable[[], Any], *, may_be_late: bool = False) -> Any:
        async def happen() -> Any:
            self.calls[operation] += 1
            if self._faults[operation]:
                raise self._faults[operation].popleft()
            return effect()

        detach = (lambda: happen) if may_be_late else None
        return await self._wire.carry(operation, happen, lost=broker_unavailable, detach=detach)
