"""
The live Kafka broker beside us, through its own API.

Metadata gives the leaders of partitions and their epochs, ListOffsets the bounds of a log,
DescribeConfigs and DescribeClientQuotas the settings. DeleteRecords trims. Records are never fetched,
because the log directory has them.

All requests but Metadata go to the broker beside us, for the partitions that it leads. Only the log
directories and the ids of topics are requested from every broker.

`log_dir_sizes` asks every broker of a cluster for its log directories (Kafka's DescribeLogDirs). If a
broker does not answer, or refuses, its entry holds the error: an operator who inspects disks must see
the others.

The ids of topics are requested from every live broker. A broker answers from its own metadata, and a
broker that is cut off from the controller knows of no new topic. So `topic_ids` returns only names that
every broker answers for: a topic that one broker has is not gone.
"""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import structlog
from kio.schema.errors import ErrorCode

from tieringd.broker import kafka_permissions, kafka_quotas, kafka_topic_configs
from tieringd.broker.kafka_bounds import BoundsQuestion
from tieringd.broker.kafka_errors import DENIED_HINTS, refusal
from tieringd.broker.kafka_groups import GroupOffset, group_offsets
from tieringd.broker.kafka_kept import KeptQuestion
from tieringd.broker.kafka_protocol import (
    DELETE_RECORDS,
    METADATA,
    ApiVersionRange,
    KafkaConnections,
    KafkaRequest,
    KafkaSettings,
)
from tieringd.broker.kafka_share_groups import share_group_starts
from tieringd.errors import BrokerDenied, BrokerUnavailable, LeadershipChanged, TieringError
from tieringd.model.disk_state import QuotaEntity
from tieringd.model.local_log import LocalLog, LocalPartition, LogDirSizes, ReplicaSize
from tieringd.model.partition import NO_TOPIC_ID, ClusterView, Leadership, LogBounds, Replica, TopicPartition

if TYPE_CHECKING:
    from kio.schema.delete_records.v2 import DeleteRecordsResponse
    from kio.schema.metadata.v13 import MetadataResponse


__all__ = ["KafkaBroker", "KafkaSettings"]

log = structlog.get_logger()

DESCRIBE_LOG_DIRS: Final = ApiVersionRange("DescribeLogDirs", 35, min_version=1, max_version=4)

_WORTH_KEEPING: Final = 50
"""
A question about so many partitions is kept, because a round asks it again. One about fewer, as for a segment
that was just closed, costs little to ask anew, and would take the place of the round's.
"""
_WORTH_KEEPING_TOPICS: Final = 5
"""The same of topics whose settings are asked for: each has some 35."""


async def log_dir_sizes(
    connections: KafkaConnections, brokers: Mapping[int, tuple[str, int]]
) -> tuple[LogDirSizes, ...]:
    """Ask each of *brokers* (addresses by id) for its log directories; return them by id and path."""
    found = await asyncio.gather(*(_of_broker(connections, *broker) for broker in sorted(brokers.items())))
    return tuple(directory for directories in found for directory in directories)


async def _of_broker(
    connections: KafkaConnections, broker: int, address: tuple[str, int]
) -> list[LogDirSizes]:
    try:
        response = await connections.send(address, KafkaRequest(DESCRIBE_LOG_DIRS, _all_topics))
    except (BrokerUnavailable, BrokerDenied) as error:
        return [LogDirSizes(broker, "", error=str(error))]
    # Older versions send a caller without permission an empty response.
    refusal = getattr(response, "error_code", ErrorCode.none)
    if refusal is not ErrorCode.none:
        return [LogDirSizes(broker, "", error=refusal.name.upper())]
    return sorted((_directory(broker, result) for result in response.results), key=lambda one: one.path)


def _all_topics(module: ModuleType) -> Any:
    return module.DescribeLogDirsRequest(topics=None)


def _directory(broker: int, result: Any) -> LogDirSizes:
    error = "" if result.error_code is ErrorCode.none else result.error_code.name.upper()
    replicas = tuple(
        ReplicaSize(TopicPartition(topic.name, each.partition_index), each.partition_size)
        for topic in result.topics
        for each in topic.partitions
    )
    return LogDirSizes(broker, result.log_dir, replicas, error)


class TopicIdsQuestion:
    """The question for the ids of topics, which each broker of a cluster is asked."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self._by_address: dict[tuple[str, int], KeptQuestion[dict[str, frozenset[str]]]] = {}

    async def asked(
        self, connections: KafkaConnections, brokers: Iterable[tuple[str, int]]
    ) -> dict[str, frozenset[str]]:
        """
        Ask each of *brokers*. Return all ids by name; no ids where no broker has the topic.

        A name is left out if one broker does not answer for it.

        Raises:
            BrokerUnavailable: A broker does not answer.
        """
        build = metadata_request(self.names)
        self._by_address = {
            address: self._by_address.get(address) or KeptQuestion(METADATA, build, _ids_of)
            for address in brokers
        }
        answers: list[dict[str, frozenset[str]]] = await asyncio.gather(
            *(connections.send(address, one.request()) for address, one in self._by_address.items())
        )
        told = self.names.intersection(*answers) if answers else set()
        return {name: frozenset[str]().union(*(answer[name] for answer in answers)) for name in told}


@lru_cache(maxsize=4096)
def _replica(leader_epoch: int, *, is_leader: bool, has_all_in_sync: bool) -> Replica:
    """Return a role. Nearly all partitions have the role of another one, or of the round before."""
    return Replica(leader_epoch, is_leader=is_leader, has_all_in_sync=has_all_in_sync)


def metadata_request(topics: Iterable[str]) -> Any:
    """Return a function that builds a metadata request for *topics*, which creates none of them."""
    names = sorted(topics)

    def build(module: ModuleType) -> Any:
        # Topic ids came with version 10. Redpanda also speaks older versions.
        ids = {"topic_id": None} if has_field(module.MetadataRequestTopic, "topic_id") else {}
        flags = {
            flag: False
            for flag in (
                "allow_auto_topic_creation",
                "include_cluster_authorized_operations",
                "include_topic_authorized_operations",
            )
            if has_field(module.MetadataRequest, flag)
        }
        topics = tuple(module.MetadataRequestTopic(name=name, **ids) for name in names)
        return module.MetadataRequest(topics=topics, **flags)

    return build


def has_field(message: type[Any], name: str) -> bool:
    """Return whether a message has a field in its version."""
    return name in message.__dataclass_fields__


def text_of(topic_id: UUID | None) -> str:
    """Return a topic id as text: base64url without padding, as in `partition.metadata`."""
    if topic_id is None:
        return NO_TOPIC_ID
    return base64.urlsafe_b64encode(topic_id.bytes).decode().rstrip("=")


def _ids_of(response: MetadataResponse) -> dict[str, frozenset[str]]:
    told: dict[str, frozenset[str]] = {}
    for topic in response.topics:
        if topic.name is None:
            continue
        if topic.error_code is ErrorCode.none:
            told[topic.name] = frozenset({text_of(getattr(topic, "topic_id", None))})
        elif topic.error_code is ErrorCode.unknown_topic_or_partition:
            told[topic.name] = frozenset()
    return told


@dataclass(frozen=True, slots=True, eq=False)
class _Told:
    """What an answer says of brokers, topics, and the roles of the broker beside us."""

    brokers: Mapping[int, tuple[str, int]]
    """The addresses of the live brokers, by id."""
    topic_ids: Mapping[str, str]
    """The ids of the topics that the broker answers for, by name."""
    counts: Mapping[str, int]
    """How many partitions each of them has."""
    replicas: Mapping[TopicPartition, Replica]
    """Those partitions of which the broker beside us is a replica."""
    refused: tuple[tuple[str | None, ErrorCode], ...]
    """The other topics, each with the broker's error."""


@dataclass(frozen=True, slots=True, eq=False)
class _Viewed:
    """A view, and what it follows from."""

    told: _Told
    found: tuple[LocalPartition, ...]
    view: ClusterView


class KafkaBroker:
    """
    The broker whose log directories we read, as its clients see it.

    It belongs to the event loop that uses it. It survives restarts of the broker: a call raises
    `BrokerUnavailable` while the broker is down, and a later one connects again. A call takes at most
    one request timeout per bootstrap address and one per request.
    """

    def __init__(self, settings: KafkaSettings) -> None:
        """
        Read the TLS files and check the settings; nothing is connected yet.

        Raises:
            ConfigError: A setting is wrong, or a TLS file cannot be used.
        """
        self._connections = KafkaConnections(settings)
        self._settings = settings
        self._node_id = settings.node_id
        self._node_address: tuple[str, int] | None = None
        self._reported: set[str] = set()
        """Topics on our disk that this user may not see, as far as this was logged."""
        self._roles_question: tuple[frozenset[str], KeptQuestion[_Told]] | None = None
        """The topics whose metadata was asked for last, where it was worth keeping."""
        self._viewed: _Viewed | None = None
        self._configs_questions = kafka_topic_configs.ConfigsQuestions(())
        self._bounds_question: BoundsQuestion | None = None
        self._bounds_asked: tuple[tuple[LocalLog, ...], Mapping[TopicPartition, int]] = ((), {})
        """The logs and leader epochs that the question was made for."""
        self._ids_question: TopicIdsQuestion | None = None

    async def cluster_id(self) -> str:
        """Return the id of the cluster. It is part of every object's key."""
        response = await self._metadata(())
        if not response.cluster_id:
            raise BrokerUnavailable("the broker does not know its cluster's id yet")
        return response.cluster_id

    async def node_id(self) -> int:
        """Return the id of the broker beside us."""
        if self._node_id is None:
            await self._metadata(())
        return _required(self._node_id)

    async def topic_id(self, topic: str) -> str | None:
        """Return the current id of the topic with this name; None without such a topic or without ids."""
        found = await self.topic_shape(topic)
        return None if found is None or found[0] == NO_TOPIC_ID else found[0]

    async def topic_shape(self, topic: str) -> tuple[str, int] | None:
        """Return the id and the number of partitions of a topic; None if the cluster has no such topic."""
        for found in (await self._metadata({topic})).topics:
            if found.name == topic and found.error_code is ErrorCode.none:
                return text_of(getattr(found, "topic_id", None)), len(found.partitions)
        return None

    async def topic_ids(self, topics: Collection[str]) -> Mapping[str, frozenset[str]]:
        """
        Return the ids that live brokers report, by topic name; no ids where all report no such topic.

        A name is left out if one broker does not answer for it.

        Raises:
            BrokerUnavailable: A live broker does not answer.
        """
        brokers = (await self._metadata(())).brokers
        names = frozenset(topics)
        if self._ids_question is None or self._ids_question.names != names:
            self._ids_question = TopicIdsQuestion(names)
        return await self._ids_question.asked(
            self._connections, [(each.host, int(each.port)) for each in brokers]
        )

    async def replicas(
        self,
        found: Sequence[LocalPartition],
        *,
        held: Collection[str] | None = None,  # noqa: ARG002 the interface
    ) -> ClusterView:
        """
        Return this broker's role for each partition among *found*.

        A partition whose topic id on disk differs from the cluster's is left out: its directory belongs
        to a deleted incarnation.
        """
        if not found:
            return ClusterView({}, {})
        topics = frozenset(each.topic_partition.topic for each in found)
        self._reported &= topics
        if self._roles_question is not None and self._roles_question[0] == topics:
            question = self._roles_question[1]
        else:
            question = KeptQuestion(METADATA, metadata_request(topics), self._told)
            if len(found) >= _WORTH_KEEPING:
                self._roles_question = topics, question
        told: _Told = await self._first_answer(question.request)
        self._learn(told.brokers)
        self._report(told)
        viewed, partitions = self._viewed, tuple(found)
        # A tuple of a tuple is that tuple itself, and a scan that finds the same returns the same one.
        if viewed is not None and viewed.told is told and viewed.found is partitions:
            return viewed.view
        view = self._view(told, partitions)
        if len(found) >= _WORTH_KEEPING:
            self._viewed = _Viewed(told, partitions, view)
        return view

    def _told(self, response: MetadataResponse) -> _Told:
        """Return what *response* says of brokers, topics, and this broker's roles in their partitions."""
        brokers = _addresses_of(response)
        node_id = _required(self._node_id_among(brokers))
        ids: dict[str, str] = {}
        counts: dict[str, int] = {}
        replicas: dict[TopicPartition, Replica] = {}
        refused: list[tuple[str | None, ErrorCode]] = []
        for topic in response.topics:
            if topic.name is None or topic.error_code is not ErrorCode.none:
                refused.append((topic.name, topic.error_code))
                continue
            ids[topic.name] = text_of(getattr(topic, "topic_id", None))
            counts[topic.name] = len(topic.partitions)
            for partition in topic.partitions:
                # A directory that is no replica any more will be deleted after a reassignment.
                if node_id in partition.replica_nodes:
                    name = TopicPartition(topic.name, partition.partition_index)
                    replicas[name] = _replica(
                        partition.leader_epoch,
                        is_leader=partition.leader_id == node_id,
                        has_all_in_sync=set(partition.replica_nodes) <= set(partition.isr_nodes),
                    )
        return _Told(brokers, ids, counts, replicas, tuple(refused))

    def _view(self, told: _Told, found: Sequence[LocalPartition]) -> ClusterView:
        """Return the roles for *found*, whose topics are those of *told*."""
        replicas, ids = told.replicas, told.topic_ids
        held = {
            each.topic_partition: replicas[each.topic_partition]
            for each in found
            if each.topic_partition in replicas
            and (not self._settings.has_topic_ids_on_disk or ids[each.topic_partition.topic] == each.topic_id)
        }
        return ClusterView(
            held,
            told.counts,
            {} if self._settings.has_topic_ids_on_disk else ids,
            frozenset(
                topic
                for topic, error in told.refused
                if topic is not None and error is ErrorCode.topic_authorization_failed
            ),
        )

    async def log_bounds(
        self, logs: Sequence[LocalLog], *, leader_epochs: Mapping[TopicPartition, int]
    ) -> Mapping[TopicPartition, LogBounds | TieringError]:
        """
        Return the bounds of each log, or the error that prevented reading this log's bounds.

        The broker compares each epoch with the one under which it leads, and refuses another.
        """
        if not logs:
            return {}
        now_asked = (tuple(logs), leader_epochs)
        # The comparison passes over objects that are the same without a call for each.
        if self._bounds_question is None or self._bounds_asked != now_asked:
            asked = {name: leader_epochs[name] for name in (one.partition.topic_partition for one in logs)}
            if len(asked) < _WORTH_KEEPING:
                return await BoundsQuestion(asked).asked(self._ask)
            if self._bounds_question is None or self._bounds_question.leader_epochs != asked:
                self._bounds_question = BoundsQuestion(asked)
        self._bounds_asked = now_asked
        return await self._bounds_question.asked(self._ask)

    async def log_dir_sizes(self) -> Sequence[LogDirSizes]:
        """Return the contents of the log directories of every live broker, or a broker's error instead."""
        brokers = (await self._metadata(())).brokers
        addresses = {int(each.node_id): (each.host, int(each.port)) for each in brokers}
        return await log_dir_sizes(self._connections, addresses)

    async def topic_configs(self, topics: Sequence[str]) -> Mapping[str, Mapping[str, str] | BrokerDenied]:
        """
        Return the properties set on each topic, and the effective ones for deletion and leader election.

        The latter come from the topic or from a default of the broker. A topic that the cluster does not
        know is left out, and one whose settings this user may not read has the error.
        """
        questions = self._configs_questions
        if tuple(topics) != questions.topics:
            questions = kafka_topic_configs.ConfigsQuestions(tuple(topics))
            if len(topics) >= _WORTH_KEEPING_TOPICS:
                self._configs_questions = questions
        return await questions.asked(self._ask)

    async def topic_overrides(self, topic: str) -> Mapping[str, str]:
        """Return only the properties that are set on one topic itself."""
        request = kafka_topic_configs.describe_request([topic])
        return kafka_topic_configs.overrides(topic, await self._ask(request))

    async def alter_topic(
        self, topic: str, changes: Mapping[str, str | None], *, send_by: float = math.inf
    ) -> None:
        """
        Set properties of a topic and leave all others as they are; None removes a property's setting.

        Raises:
            BrokerUnavailable: The broker does not answer, or it is later than *send_by*.
            BrokerDenied: This user may not: it needs the ACL ALTER_CONFIGS on the topic.
        """
        request = kafka_topic_configs.alter_request(topic, changes, send_by=send_by)
        kafka_topic_configs.check_altered(topic, changes, await self._ask(request))

    async def permissions(self, topics: Collection[str]) -> kafka_permissions.Permissions:
        """Return the ACL operations that this user may do with the cluster and with *topics*."""
        return await kafka_permissions.asked(self._ask, topics)

    async def group_offsets(
        self, group: str, topic: str, partitions: Collection[int], *, settled: bool
    ) -> Mapping[int, GroupOffset]:
        """
        Return what *group* has committed for *partitions* of *topic*, by partition; see `kafka_groups`.

        Raises:
            OffsetsNotKnownYet: The coordinator is not ready, or with *settled* a transaction has not ended.
            BrokerDenied: This user may not ask.
            BrokerUnavailable: A broker does not answer.
        """
        brokers = (await self._metadata(())).brokers
        if not brokers:
            raise BrokerUnavailable("the cluster lists no live broker")
        address = (brokers[0].host, int(brokers[0].port))
        return await group_offsets(self._connections, address, group, topic, partitions, settled=settled)

    async def client_quotas(self) -> Mapping[QuotaEntity, Mapping[str, float]]:
        """Return every client quota that is set. This needs the ACL DESCRIBE_CONFIGS on the cluster."""
        return kafka_quotas.described(await self._ask(kafka_quotas.describe_request()))

    async def alter_client_quotas(
        self, changes: Mapping[QuotaEntity, Mapping[str, float | None]], *, send_by: float = math.inf
    ) -> None:
        """
        Set client quotas and leave all others as they are; None removes one.

        Raises:
            BrokerUnavailable: The broker does not answer, or it is later than *send_by*.
            BrokerDenied: This user may not: it needs the ACL ALTER_CONFIGS on the cluster.
        """
        kafka_quotas.check_altered(await self._ask(kafka_quotas.alter_request(changes, send_by=send_by)))

    async def share_group_starts(
        self, *, known: Collection[str] = ()
    ) -> Mapping[str, Mapping[TopicPartition, int]]:
        """
        Return the first offset that each share group of the cluster still needs, by group and partition.

        Every live broker is asked for the groups that it coordinates, and for *known* groups that none lists.
        """
        brokers = (await self._metadata(())).brokers
        node_id = _required(self._node_id)
        addresses = {int(each.node_id): (each.host, int(each.port)) for each in brokers}
        own = addresses.pop(node_id, None)
        if own is None:
            raise BrokerUnavailable(f"broker {node_id} is not among the live brokers of the cluster")
        return await share_group_starts(self._connections, own, addresses.values(), known=known)

    async def trim(
        self, leadership: Leadership, log: LocalLog, *, before_offset: int, needs_every_replica: bool = False
    ) -> int:
        """
        Move the log start offset of every replica to *before_offset*; return the offset it has now.

        DeleteRecords names neither a leader epoch nor a topic id: the broker applies it to whatever log
        it leads under this name when the request arrives. So the broker itself is asked for both right
        before, and the request is sent within `EFFECT_WITHIN_SECONDS` of that question or not at all.
        The remaining risk is the time that the request itself travels; docs/concepts.md explains what
        that means.

        The broker deletes the files at its next retention check, plus `file.delete.delay.ms`.

        Raises:
            LeadershipChanged: This broker does not lead the partition under that epoch any more, or it
                is uncertain whether it did when it applied the request.
            BrokerUnavailable: A replica is not in sync, or the broker does not answer.
            BrokerDenied: The broker never trims this topic, or this user may not.
        """
        partition = leadership.partition
        loop = asyncio.get_running_loop()
        send_by = loop.time() + self._settings.effect_within_seconds
        replica = await self._require_leadership(leadership, log.partition)
        if needs_every_replica and not replica.has_all_in_sync:
            raise BrokerUnavailable(
                f"{partition} is not trimmed now: a replica is not in sync, and could be elected leader"
            )
        build = self._deletion(partition.topic_partition, before_offset)
        response: DeleteRecordsResponse = await self._ask(
            KafkaRequest(DELETE_RECORDS, build, send_by=send_by)
        )
        if loop.time() > send_by:
            # The broker may have applied it long after the question which broker leads.
            await self._require_leadership(leadership, log.partition)
        for topic in response.topics:
            for result in topic.partitions:
                if result.error_code is ErrorCode.offset_out_of_range:
                    raise BrokerUnavailable(
                        f"{partition} cannot be trimmed to offset {before_offset}: the broker holds no "
                        "committed record there",
                        hint="Its high watermark may lag behind; the next attempt uses new bounds",
                    )
                if result.error_code is not ErrorCode.none:
                    raise refusal(f"to trim {partition}", result.error_code)
                return result.low_watermark
        raise BrokerUnavailable(f"the broker's response has no result for trimming {partition}")

    async def close(self) -> None:
        """Release connections."""
        await self._connections.close()

    async def _require_leadership(self, leadership: Leadership, local: LocalPartition) -> Replica:
        """
        Check that the broker beside us leads a partition under exactly this epoch; return its role.

        No other broker is asked, because it may have older metadata.

        Raises:
            LeadershipChanged: It does not lead, or the topic is another one by now.
        """
        partition = leadership.partition
        name = partition.topic_partition
        question = KeptQuestion(METADATA, metadata_request({name.topic}), self._told)
        told: _Told = await self._ask(question.request())
        self._learn(told.brokers)
        self._report(told)
        replica = self._view(told, [local]).replicas.get(name)
        if partition.topic_id != local.topic_id or replica is None or not replica.is_leader:
            raise LeadershipChanged(
                f"this broker does not lead {partition} with topic id {partition.topic_id} now"
            )
        if replica.leader_epoch != leadership.leader_epoch:
            raise LeadershipChanged(
                f"this broker leads {partition} under leader epoch {replica.leader_epoch} now, not "
                f"{leadership.leader_epoch}"
            )
        return replica

    async def _metadata(self, topics: Iterable[str]) -> MetadataResponse:
        """Ask the first broker that answers for the metadata of *topics*."""
        build = metadata_request(topics)
        response: MetadataResponse = await self._first_answer(lambda: KafkaRequest(METADATA, build))
        self._learn(_addresses_of(response))
        return response

    async def _first_answer(self, make_request: Callable[[], KafkaRequest]) -> Any:
        """Ask the first broker that answers: the one beside us, or one of the bootstrap addresses."""
        failures: list[BrokerUnavailable] = []
        for address in self._known_addresses():
            try:
                return await self._connections.send(address, make_request())
            except BrokerUnavailable as error:
                failures.append(error)
        raise BrokerUnavailable("; ".join(error.message for error in failures)) from failures[-1]

    def _known_addresses(self) -> list[tuple[str, int]]:
        own = [] if self._node_address is None else [self._node_address]
        return list(dict.fromkeys([*own, *self._connections.bootstrap]))

    def _learn(self, live: Mapping[int, tuple[str, int]]) -> None:
        """Keep the id and the address of the broker beside us. The address may change when it restarts."""
        self._node_id = self._node_id_among(live)
        self._node_address = None if self._node_id is None else live.get(self._node_id)

    def _node_id_among(self, live: Mapping[int, tuple[str, int]]) -> int | None:
        """Return the id of the broker beside us, which never changes once it is known."""
        if self._node_id is not None:
            return self._node_id
        named = [node for node, address in live.items() if address in self._connections.bootstrap]
        return named[0] if len(named) == 1 else None

    async def _ask(self, request: KafkaRequest) -> Any:
        """Send *request* to the broker beside us."""
        if self._node_address is None:
            await self._metadata(())
        if self._node_address is None:
            node_id = _required(self._node_id)
            raise BrokerUnavailable(f"broker {node_id} is not among the live brokers of the cluster")
        try:
            return await self._connections.send(self._node_address, request)
        except BrokerUnavailable:
            # It may have come back at another address: the next call asks for it.
            self._node_address = None
            raise

    def _deletion(self, partition: TopicPartition, before_offset: int) -> Callable[[ModuleType], Any]:
        # The broker's response has to arrive before we stop waiting for it.
        timeout = timedelta(seconds=self._settings.request_timeout_seconds * 0.8)

        def build(module: ModuleType) -> Any:
            deleted = module.DeleteRecordsPartition(partition_index=partition.partition, offset=before_offset)
            topic = module.DeleteRecordsTopic(name=partition.topic, partitions=(deleted,))
            return module.DeleteRecordsRequest(topics=(topic,), timeout=timeout)

        return build

    def _report(self, told: _Told) -> None:
        """Warn once that this user may not see a topic on our disk. A deleted topic is not reported."""
        self._reported -= told.topic_ids.keys()
        for topic, error in told.refused:
            if topic is None or topic in self._reported:
                continue
            if error is ErrorCode.topic_authorization_failed:
                self._reported.add(topic)
                log.warning(
                    "topic is not archived: its metadata is not visible",
                    topic=topic,
                    hint=DENIED_HINTS[error],
                )


def _required(node_id: int | None) -> int:
    if node_id is None:
        raise BrokerDenied(
            "the broker beside this daemon cannot be identified: none, or more than one, of the "
            "cluster's brokers advertises an address of broker.bootstrap",
            hint="Set broker.node_id to the node.id in the broker's own configuration",
        )
    return node_id


def _addresses_of(response: MetadataResponse) -> dict[int, tuple[str, int]]:
    """Return the addresses of the live brokers by their ids."""
    return {int(each.node_id): (each.host, int(each.port)) for each in response.brokers}
