"""
Produce requests: whether they get an answer, and a walk over one that is to be refused.

A request without acknowledgement has no response, so every Produce request must be looked at
this far, or answers would be given to the wrong requests. Records are skipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tieringd.errors import ProtocolViolation
from tieringd.formats.kafka_wire.cursor import Cursor
from tieringd.formats.kafka_wire.request_header import KNOWN_VERSIONS, Api, request_body
from tieringd.formats.kafka_wire.walk import Walk

if TYPE_CHECKING:
    from uuid import UUID

    from tieringd.formats.kafka_wire.request_header import RequestHead

MAX_PARTITIONS: Final = 10_000
"""What a refusal may have to name; no client comes near it. As many topics may be named."""
_FIRST_TRANSACTIONS: Final = 3
_FIRST_TOPIC_IDS: Final = 13
_ALL_VERSIONS: Final = range(KNOWN_VERSIONS[Api.PRODUCE].stop)


def acks_of(view: memoryview, head: RequestHead) -> int:
    """
    Return the acknowledgements that a Produce request of any version asks for; 0 is none.

    Raises:
        IncompleteMessage: *view* ends before them.
        ProtocolViolation: The version is newer than what is understood.
    """
    if head.version not in _ALL_VERSIONS:
        raise ProtocolViolation(
            f"a client writes with version {head.version} of Produce, which was not offered"
        )
    return _skip_to_topics(Cursor(view, request_body(view, head)), head)


def _skip_to_topics(cursor: Cursor, head: RequestHead) -> int:
    if head.version >= _FIRST_TRANSACTIONS:
        cursor.string(compact=head.is_flexible)
    acks = cursor.int16()
    cursor.skip(4)
    return acks


class ProduceRequestWalk(Walk):
    """
    Walk over one known Produce request, and list the partitions that it writes to.

    A request that says it has more than `MAX_PARTITIONS` is a violation before any is listed:
    an empty partition takes a few bytes on the wire, and far more as a part of an answer.
    """

    def __init__(self, head: RequestHead) -> None:
        super().__init__(head.size, compact=head.is_flexible)
        self.partitions: dict[str | UUID, list[int]] = {}
        self.head = head
        self._step = self._begin
        self._topics = 0
        self._topic_partitions = 0
        self._listed = 0
        self._indexes: list[int] = []

    def _begin(self, cursor: Cursor) -> int:
        # The whole head in one step: it is as small as two strings.
        start = Cursor(cursor.view, cursor.at + request_body(cursor.view[cursor.at :], self.head))
        _skip_to_topics(start, self.head)
        topics = start.length(compact=self._compact)
        self._limit("topics", topics)
        cursor.at, self._topics = start.at, topics
        return self._next_topic()

    def _limit(self, what: str, count: int) -> None:
        if count > MAX_PARTITIONS:
            raise ProtocolViolation(
                f"a client writes to {count} {what} with one request",
                hint=f"Requests may name up to {MAX_PARTITIONS}",
            )

    def _next_topic(self) -> int:
        if self._topics > 0:
            self._step = self._topic
        else:
            self._to_tags(self._finish)
        return 0

    def _topic(self, cursor: Cursor) -> int:
        topic = cursor.topic(by_id=self.head.version >= _FIRST_TOPIC_IDS, compact=self._compact)
        partitions = cursor.length(compact=self._compact)
        self._listed += max(partitions, 0)
        self._limit("partitions", self._listed)
        self._topics -= 1
        self._topic_partitions = partitions
        self._indexes = self.partitions.setdefault(topic, [])
        return self._next_partition()

    def _next_partition(self) -> int:
        if self._topic_partitions > 0:
            self._step = self._partition
        else:
            self._to_tags(self._topic_end)
        return 0

    def _topic_end(self, _cursor: Cursor) -> int:
        return self._next_topic()

    def _partition(self, cursor: Cursor) -> int:
        index = cursor.int32()
        records_bytes = cursor.length(compact=self._compact)
        self._topic_partitions -= 1
        self._indexes.append(index)
        self._to_tags(self._partition_end)
        return max(records_bytes, 0)

    def _partition_end(self, _cursor: Cursor) -> int:
        return self._next_partition()
