"""
The bounds of logs in Kafka's messages: ListOffsets for the first offset and the two ends.

This module has the messages only; `broker.kafka` sends them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from kio.schema.errors import ErrorCode

from tieringd.broker.kafka_errors import refusal
from tieringd.broker.kafka_kept import KeptQuestion
from tieringd.broker.kafka_protocol import LIST_OFFSETS, KafkaRequest
from tieringd.errors import BrokerUnavailable, TieringError
from tieringd.model.partition import LogBounds, TopicPartition

if TYPE_CHECKING:
    from kio.schema.list_offsets.v9 import ListOffsetsResponse

_EARLIEST: Final = -2
_LATEST: Final = -1
_READ_UNCOMMITTED: Final = 0
_READ_COMMITTED: Final = 1
_CONSUMER: Final = -1

_Offsets: TypeAlias = Mapping[TopicPartition, int | TieringError]
"""One special offset of each partition, or the broker's error for it."""


class BoundsQuestion:
    """The question for the bounds of some logs, under the epochs in which this broker must lead them."""

    def __init__(self, leader_epochs: Mapping[TopicPartition, int]) -> None:
        """Take the leader epoch of each partition to ask for."""
        self.leader_epochs = leader_epochs
        # The names of the answers are the same objects as those of the question, which saves their memory.
        self._names = {name: name for name in leader_epochs}
        # In this order each value is a lower bound of its value at the time of the next request: a log
        # start, then a last stable offset, then a high watermark that is not behind it.
        self._questions = tuple(
            KeptQuestion(LIST_OFFSETS, self._request_for(timestamp, isolation_level), self._offsets)
            for timestamp, isolation_level in (
                (_EARLIEST, _READ_UNCOMMITTED),
                (_LATEST, _READ_COMMITTED),
                (_LATEST, _READ_UNCOMMITTED),
            )
        )
        self._answers: tuple[_Offsets, ...] = ()
        self._bounds: dict[TopicPartition, LogBounds | TieringError] = {}

    async def asked(
        self, ask: Callable[[KafkaRequest], Awaitable[Any]]
    ) -> Mapping[TopicPartition, LogBounds | TieringError]:
        """
        Return the bounds of each log, or the error that prevented reading this log's bounds.

        The mapping is the same object as before while all answers of the broker are the same.
        """
        answers = tuple([await ask(question.request()) for question in self._questions])
        # An answer that is the same is the same object.
        if not self._answers or any(map(_differ, answers, self._answers)):
            self._bounds = {each: _bounds(each, *answers) for each in self.leader_epochs}
            self._answers = answers
        return self._bounds

    def _request_for(self, timestamp: int, isolation_level: int) -> Callable[[ModuleType], Any]:
        def build(module: ModuleType) -> Any:
            by_topic: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
            for each, leader_epoch in self.leader_epochs.items():
                by_topic[each.topic].append((each.partition, leader_epoch))
            topics = tuple(
                module.ListOffsetsTopic(
                    name=name,
                    partitions=tuple(
                        module.ListOffsetsPartition(
                            partition_index=number, current_leader_epoch=leader_epoch, timestamp=timestamp
                        )
                        for number, leader_epoch in partitions
                    ),
                )
                for name, partitions in by_topic.items()
            )
            return module.ListOffsetsRequest(
                replica_id=_CONSUMER, isolation_level=isolation_level, topics=topics
            )

        return build

    def _offsets(self, response: ListOffsetsResponse) -> _Offsets:
        offsets: dict[TopicPartition, int | TieringError] = {}
        for topic in response.topics:
            for result in topic.partitions:
                name = TopicPartition(topic.name, result.partition_index)
                each = self._names.get(name, name)
                offsets[each] = (
                    result.offset
                    if result.error_code is ErrorCode.none
                    else refusal(f"the offsets of {each}", result.error_code)
                )
        return offsets


def _differ(answer: _Offsets, earlier: _Offsets) -> bool:
    return answer is not earlier


def _bounds(partition: TopicPartition, *answers: _Offsets) -> LogBounds | TieringError:
    offsets: list[int] = []
    for answer in answers:
        offset = answer.get(partition)
        if isinstance(offset, TieringError):
            return offset
        if offset is None or offset < 0:
            return BrokerUnavailable(f"the broker's response has no offset of {partition}")
        offsets.append(offset)
    start, stable, end = offsets
    # A new leader's high watermark may be behind the old one's: the offset that both had is stable.
    return LogBounds(log_start_offset=start, last_stable_offset=min(stable, end), log_end_offset=end)
