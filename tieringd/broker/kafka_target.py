"""
A live cluster that records are written to: its topics, and one transactional writer per partition.

A writer sends a bounded number of records and, in the same transaction, the mark with its progress. So a
mark is true whenever it can be read: no record is written twice or left out, however an attempt ends. A
second writer of the same partition fences the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import TopicPartition as ClientPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    GroupAuthorizationFailedError,
    InvalidTimestampError,
    KafkaError,
    MessageSizeTooLargeError,
    ProducerFenced,
    RecordListTooLargeError,
    TopicAuthorizationFailedError,
    TransactionalIdAuthorizationFailed,
    UnknownTopicOrPartitionError,
    for_code,
)
from aiokafka.structs import OffsetAndMetadata

from tieringd.broker.kafka import KafkaBroker
from tieringd.broker.kafka_groups import GroupOffset, OffsetsNotKnownYet
from tieringd.broker.kafka_protocol import KafkaSettings, tls_context
from tieringd.errors import BrokerDenied, BrokerUnavailable, FencedError
from tieringd.formats.records import Record
from tieringd.formats.recovery_mark import RecoveryMark, decode_mark, encode_mark
from tieringd.model.segment import NO_TIMESTAMP

_BATCH_BYTES_MAX = 512 << 10
_REQUEST_TIMEOUT_MS = 40_000
_TRANSACTION_TIMEOUT_MS = 60_000
_TRIES = 60
_BACKOFF_SECONDS = 0.5
_DENIED = (
    ClusterAuthorizationFailedError,
    GroupAuthorizationFailedError,
    TopicAuthorizationFailedError,
    TransactionalIdAuthorizationFailed,
)
_BATCH_OVERHEAD_BYTES = 512


@dataclass(frozen=True, slots=True)
class TargetTopic:
    """A topic of the cluster, in its current state."""

    name: str
    topic_id: str
    partition_count: int
    settings: Mapping[str, str]
    """The effective settings, whether set on the topic or by default."""

    @property
    def max_message_bytes(self) -> int:
        """Return the size limit of a batch in bytes."""
        return int(self.settings.get("max.message.bytes", _BATCH_BYTES_MAX))


class TargetCluster:
    """The cluster's topics and the recovery marks on them. Open it with `async with`."""

    def __init__(self, settings: KafkaSettings, *, backoff_seconds: float = _BACKOFF_SECONDS) -> None:
        """Connect later, with `async with`. *backoff_seconds* is the time between two tries of a request."""
        self._backoff_seconds = backoff_seconds
        self._client = _client_settings(settings)
        self._bootstrap = ",".join(settings.bootstrap)
        self._admin: Any = AIOKafkaAdminClient(**self._client)
        # This client requests topics without creating them, and knows their ids.
        self._broker = KafkaBroker(settings)

    async def __aenter__(self) -> Self:
        """
        Connect.

        Raises:
            BrokerUnavailable: The cluster cannot be reached.
        """
        try:
            with self._translated("be reached"):
                await self._admin.start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Disconnect."""
        await self._admin.close()
        await self._broker.close()

    async def cluster_id(self) -> str:
        """Return the id of the cluster."""
        return await self._broker.cluster_id()

    async def topic(self, name: str) -> TargetTopic | None:
        """Return a topic with its settings; None if the cluster has no topic of that name."""
        found = await self._broker.topic_shape(name)
        if found is None:
            return None
        with self._translated(f"describe topic {name}"):
            (answer,) = await self._admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name)])
            ((code, message, _kind, _name, entries),) = answer.resources
            if code == UnknownTopicOrPartitionError.errno:
                # Another broker was asked than for the shape. It learns of a new topic a moment later.
                return None
            if code:
                raise for_code(code)(message)
        topic_id, partition_count = found
        settings = {entry[0]: entry[1] for entry in entries if entry[1] is not None}
        return TargetTopic(name, topic_id, partition_count, settings)

    async def create(
        self, name: str, *, partitions: int, replication_factor: int, settings: Mapping[str, str]
    ) -> TargetTopic:
        """
        Create a topic, and return it when the cluster shows it.

        Raises:
            BrokerDenied: The cluster refuses: because of the settings, our permissions, or an existing
                topic.
            BrokerUnavailable: The cluster does not answer, or does not show the topic yet.
        """
        new = NewTopic(name, partitions, 1, topic_configs=dict(settings))
        # The constructor refuses -1, which the broker reads as the cluster's default.
        new.replication_factor = replication_factor
        with self._translated(f"create topic {name}"):
            response = await self._admin.create_topics([new])
        for _name, code, message in (error[:3] for error in response.topic_errors):
            if code:
                raise BrokerDenied(
                    f"the cluster at {self._bootstrap} does not create topic {name}: "
                    f"{message or for_code(code).__name__}",
                    hint="Check --topic-config, --replication-factor, and that this user may create topics",
                )
        for _ in range(_TRIES):
            found = await self.topic(name)
            if found is not None and found.partition_count == partitions:
                return found
            await asyncio.sleep(self._backoff_seconds)
        raise BrokerUnavailable(f"topic {name} was created, but the cluster does not list it yet")

    async def marks(
        self, group: str, topic: TargetTopic, settled: Collection[int] | None = None
    ) -> dict[int, RecoveryMark]:
        """
        Return the marks of a recovery on *topic*, by partition. Marks of an earlier topic are left out.

        With *settled*, only marks of these partitions are read, and the call waits until no transaction
        over them is open. A committed transaction counts as open until its marker is in the group's log:
        until then the mark of before is read, or none. Without it, a mark may be one transaction behind.

        Raises:
            CorruptDataError: The group's offsets are not ours.
            BrokerDenied: This user may not read them.
            BrokerUnavailable: The cluster does not answer, or a transaction stays open.
        """
        partitions = range(topic.partition_count) if settled is None else settled
        found = await self._group_offsets(group, topic.name, partitions, settled=settled is not None)
        marks = {number: decode_mark(each.offset, each.metadata) for number, each in found.items()}
        return {number: mark for number, mark in marks.items() if mark.target_topic_id == topic.topic_id}

    async def end_offsets(self, topic: TargetTopic) -> dict[int, int]:
        """
        Return the end offset of each partition (exclusive); 0 for one that never had a record.

        Raises:
            BrokerUnavailable: The cluster does not answer.
        """
        partitions = [ClientPartition(topic.name, number) for number in range(topic.partition_count)]
        consumer: Any = AIOKafkaConsumer(**self._client)
        try:
            with self._translated(f"find the end of {topic.name}"):
                await consumer.start()
                found = await consumer.end_offsets(partitions)
        finally:
            await consumer.stop()
        return {partition.partition: offset for partition, offset in found.items()}

    async def _group_offsets(
        self, group: str, topic: str, partitions: Collection[int], *, settled: bool
    ) -> Mapping[int, GroupOffset]:
        for number in range(_TRIES):
            try:
                return await self._broker.group_offsets(group, topic, partitions, settled=settled)
            except OffsetsNotKnownYet:
                # The first request for a group in a new cluster makes it create the coordinator's own topic.
                if number == _TRIES - 1:
                    raise
                await asyncio.sleep(self._backoff_seconds)
        raise AssertionError("the last try returns or raises")

    @asynccontextmanager
    async def writer(
        self, topic: TargetTopic, *, name: str, group: str, compression: str | None
    ) -> AsyncIterator[TargetWriter]:
        """
        Open a writer. An earlier writer of the same *name* is fenced, and its open transaction aborted.

        Raises:
            BrokerDenied: This user may not write there.
            BrokerUnavailable: The cluster does not answer.
        """
        producer: Any = AIOKafkaProducer(
            **self._client,
            transactional_id=name,
            transaction_timeout_ms=_TRANSACTION_TIMEOUT_MS,
            compression_type=compression,
            max_batch_size=max(1, min(_BATCH_BYTES_MAX, topic.max_message_bytes - _BATCH_OVERHEAD_BYTES)),
            max_request_size=1 << 30,
        )
        try:
            with self._translated(f"begin to write to {topic.name}"):
                await producer.start()
            yield TargetWriter(producer, topic, group, self._translated)
        finally:
            await producer.stop()

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        """Turn the client's errors into ours; *what* names the operation."""
        try:
            yield
        except ProducerFenced as error:
            raise FencedError(
                f"the cluster at {self._bootstrap} refused to {what}: another recovery of the same "
                "partition is running",
                hint="Let only one of them run; it continues from the progress of both",
            ) from error
        except _DENIED as error:
            raise BrokerDenied(
                f"the cluster at {self._bootstrap} refused to {what}: {type(error).__name__}",
                hint="Grant Create, Describe, DescribeConfigs and Write on the topic, Read on the group "
                "tieringd-recover-*, and Write on the transactional id tieringd-recover-*",
            ) from error
        except (MessageSizeTooLargeError, RecordListTooLargeError) as error:
            raise BrokerDenied(
                f"the cluster at {self._bootstrap} cannot {what}: a record is larger than max.message.bytes",
                hint="Raise max.message.bytes of the topic, and run the command again: it continues there",
            ) from error
        except InvalidTimestampError as error:
            raise BrokerDenied(
                f"the cluster at {self._bootstrap} cannot {what}: it refuses the timestamp of a record",
                hint="Raise message.timestamp.before.max.ms and message.timestamp.after.max.ms of the "
                "topic, and run the command again: it continues there",
            ) from error
        except (KafkaError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise BrokerUnavailable(f"the cluster at {self._bootstrap} could not {what}: {reason}") from error


class TargetWriter:
    """Writes records and marks to one topic, all of each call or nothing. Owned by one task."""

    def __init__(self, producer: Any, topic: TargetTopic, group: str, translated: Any) -> None:
        self._producer = producer
        self._topic = topic
        self._group = group
        self._translated = translated

    async def set_marks(self, marks: Mapping[int, RecoveryMark]) -> None:
        """Set marks of partitions without writing records."""
        with self._translated(f"store the progress of {self._topic.name}"):
            async with self._producer.transaction():
                await self._commit_marks(marks)

    async def write(self, partition: int, records: Sequence[Record], mark: RecoveryMark) -> RecoveryMark:
        """
        Append *records* in their order, and set *mark*; return the mark with the written positions.

        Raises:
            FencedError: Another recovery writes there.
            BrokerDenied: The cluster refuses a record; nothing of this call is visible.
            BrokerUnavailable: The cluster does not answer; nothing of this call is visible.
        """
        with self._translated(f"write to {self._topic.name}-{partition}"):
            async with self._producer.transaction():
                sent = []
                for batch in self._batches(records):
                    sent.append(await self._producer.send_batch(batch, self._topic.name, partition=partition))
                    last_records = batch.record_count()
                told = await asyncio.gather(*sent)
                if told:
                    mark = replace(
                        mark,
                        records=mark.records + len(records),
                        first_source=records[0].offset if mark.first_source is None else mark.first_source,
                        first_target=told[0].offset if mark.first_target is None else mark.first_target,
                        last_source=records[-1].offset,
                        last_target=told[-1].offset + last_records - 1,
                    )
                await self._commit_marks({partition: mark})
        return mark

    def _batches(self, records: Sequence[Record]) -> Iterator[Any]:
        batch = self._producer.create_batch()
        first_ms = records[0].timestamp_ms if records else NO_TIMESTAMP
        for record in records:
            row = {
                "key": record.key,
                "value": record.value,
                "timestamp": record.timestamp_ms,
                "headers": list(record.headers),
            }
            # The client's builder gives records without a time, at the front of a batch, the time of the
            # first record that has one. So a batch that begins without a time has no record with one.
            cannot_join = first_ms == NO_TIMESTAMP != record.timestamp_ms
            if cannot_join or batch.append(**row) is None:
                batch.close()
                yield batch
                batch = self._producer.create_batch()
                batch.append(**row)
                first_ms = record.timestamp_ms
        if batch.record_count():
            batch.close()
            yield batch

    async def _commit_marks(self, marks: Mapping[int, RecoveryMark]) -> None:
        offsets = {
            ClientPartition(self._topic.name, number): OffsetAndMetadata(mark.next_offset, encode_mark(mark))
            for number, mark in marks.items()
        }
        await self._producer.send_offsets_to_transaction(offsets, self._group)


def _client_settings(settings: KafkaSettings) -> dict[str, Any]:
    return {
        "bootstrap_servers": list(settings.bootstrap),
        "client_id": settings.client_id,
        "request_timeout_ms": _REQUEST_TIMEOUT_MS,
        "security_protocol": settings.security_protocol,
        "sasl_mechanism": settings.sasl_mechanism,
        "sasl_plain_username": settings.sasl_username,
        "sasl_plain_password": settings.sasl_password,
        "ssl_context": tls_context(settings),
    }
