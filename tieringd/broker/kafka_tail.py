"""
The tail of a partition, read from the cluster as any consumer does.

It is for operators who want to see the records after the archive's end. The daemon itself never fetches
records, because the log directory has them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Self

from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as ClientPartition
from aiokafka.errors import (
    GroupAuthorizationFailedError,
    KafkaError,
    OffsetOutOfRangeError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)

from tieringd.broker.kafka_protocol import KafkaSettings, tls_context
from tieringd.errors import BrokerDenied, BrokerUnavailable, ProtocolViolation
from tieringd.formats.records import Record
from tieringd.model.partition import TopicPartition

_POLL_MS = 500
_DENIED = (TopicAuthorizationFailedError, GroupAuthorizationFailedError)


class KafkaTail:
    """One partition, read by a consumer of its own. Open it with `async with`."""

    def __init__(self, settings: KafkaSettings, partition: TopicPartition, *, read_committed: bool) -> None:
        self._bootstrap = ",".join(settings.bootstrap)
        self._partition = ClientPartition(partition.topic, partition.partition)
        self._consumer: Any = AIOKafkaConsumer(
            bootstrap_servers=list(settings.bootstrap),
            client_id=settings.client_id,
            enable_auto_commit=False,
            auto_offset_reset="none",
            isolation_level="read_committed" if read_committed else "read_uncommitted",
            request_timeout_ms=int(settings.request_timeout_seconds * 1000),
            security_protocol=settings.security_protocol,
            sasl_mechanism=settings.sasl_mechanism,
            sasl_plain_username=settings.sasl_username,
            sasl_plain_password=settings.sasl_password,
            ssl_context=tls_context(settings),
        )

    async def __aenter__(self) -> Self:
        """
        Connect.

        Raises:
            BrokerUnavailable: The cluster cannot be reached.
            BrokerDenied: The cluster refuses us.
        """
        try:
            await self._consumer.start()
            self._consumer.assign([self._partition])
        except (KafkaError, OSError) as error:
            await self._consumer.stop()
            raise self._translated(error) from error
        return self

    async def __aexit__(self, *_: object) -> None:
        """Disconnect."""
        await self._consumer.stop()

    async def bounds(self) -> tuple[int, int]:
        """Return the cluster's first offset, and the end of the readable records (exclusive)."""
        try:
            first = await self._consumer.beginning_offsets([self._partition])
            end = await self._consumer.end_offsets([self._partition])
        except (KafkaError, OSError) as error:
            raise self._translated(error) from error
        return first[self._partition], end[self._partition]

    async def offset_for_time(self, timestamp_ms: int) -> int | None:
        """Return the offset of the first record with *timestamp_ms* or later; None when there is none."""
        try:
            found = await self._consumer.offsets_for_times({self._partition: timestamp_ms})
        except (KafkaError, OSError) as error:
            raise self._translated(error) from error
        answer = found[self._partition]
        return None if answer is None else int(answer.offset)

    async def records(self, *, from_offset: int, end_offset: int | None) -> AsyncGenerator[Record]:
        """
        Yield the records from *from_offset* to before *end_offset*. None means without end.

        Raises:
            BrokerUnavailable: The cluster does not answer, or has deleted the next records.
            BrokerDenied: This user may not read the topic.
            ProtocolViolation: The client library cannot decode a record. All records before it are yielded.
        """
        self._consumer.seek(self._partition, from_offset)
        position = from_offset
        count_max = None
        while end_offset is None or position < end_offset:
            try:
                fetched = await self._consumer.getmany(
                    self._partition, timeout_ms=_POLL_MS, max_records=count_max
                )
                position = await self._consumer.position(self._partition)
            except (KafkaError, OSError) as error:
                raise self._translated(error) from error
            except UnicodeDecodeError as error:
                if count_max is None:
                    # The library drops the records before the one that it cannot decode, so they are read
                    # again, one by one.
                    count_max = 1
                    continue
                raise ProtocolViolation(
                    f"the batch of {self._partition.topic}-{self._partition.partition} at offset {position} "
                    "has a record header whose name is not UTF-8, which tieringd cannot read from a broker",
                    hint="Read it with --archive-only once its segment is archived",
                ) from error
            for one in fetched.get(self._partition, ()):
                if end_offset is None or one.offset < end_offset:
                    yield Record(
                        one.offset, one.timestamp, one.timestamp_type, one.key, one.value, tuple(one.headers)
                    )

    def _translated(self, error: Exception) -> BrokerUnavailable | BrokerDenied:
        name = f"{self._partition.topic}-{self._partition.partition}"
        if isinstance(error, _DENIED):
            return BrokerDenied(
                f"the cluster at {self._bootstrap} does not allow tieringd to read {name}",
                hint="Grant READ on the topic, or read the archive alone with --archive-only",
            )
        if isinstance(error, OffsetOutOfRangeError):
            return BrokerUnavailable(f"the cluster deleted offsets of {name} while they were read")
        if isinstance(error, UnknownTopicOrPartitionError):
            return BrokerUnavailable(f"the cluster at {self._bootstrap} has no partition {name}")
        reason = str(error) or type(error).__name__
        return BrokerUnavailable(f"the cluster at {self._bootstrap} cannot be read: {reason}")
