"""
Produce: whether a request gets a response, and walks over requests and responses while they pass.

A request without acknowledgement has no response, so every Produce request must be read up to that
field: otherwise responses would be assigned to the wrong requests. Records are skipped.

`ProduceRequestWalk` walks over a request that will be refused. `ProduceResponseWalk` finds the position
of each partition's log start in a response. It decides nothing about its value. The caller can still
overwrite an unwanted log start in the bytes that `feed` has just taken, because a partition's fixed
fields are taken together.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from tieringd.errors import ProtocolViolation
from tieringd.formats.kafka_wire.cursor import (
    MAX_STRING_BYTES,
    SIZE_BYTES,
    Cursor,
    IncompleteMessage,
    PartitionsWalk,
)
from tieringd.formats.kafka_wire.request_header import (
    KNOWN_VERSIONS,
    InspectedApi,
    RequestHead,
    is_flexible,
    request_body,
)

FIRST_LOG_START: Final = 5
"""The first version of Produce whose responses have a log start."""
_FIRST_RECORD_ERRORS: Final = 8
_FIRST_TOPIC_IDS: Final = 13
_CORRELATION_ID_BYTES: Final = 4
_THROTTLE_BYTES: Final = 4
_PARTITION: Final = struct.Struct(">ihqqq")
"""Index, error code, base offset, append time and log start."""
_LOG_START_AT: Final = 22

MAX_PARTITIONS: Final = 10_000
"""The most partitions, and topics, that a refusal may have to name. No client comes near it."""
_FIRST_TRANSACTIONS: Final = 3
_ALL_VERSIONS: Final = range(KNOWN_VERSIONS[InspectedApi.PRODUCE].stop)
_BEGINNING_BYTES_MAX: Final = 2 * MAX_STRING_BYTES + 1024
"""Size of two strings, of the fields around them, and of the tagged fields that a newer client may have."""


@dataclass(slots=True)
class ProducedPartition:
    """One partition in a Produce response; positions count from the response's size field."""

    topic: str | UUID
    index: int
    error_code: int
    log_start_offset: int
    begin: int

    @property
    def log_start_at(self) -> int:
        """Return the position of the log start."""
        return self.begin + _LOG_START_AT


class ProduceResponseWalk(PartitionsWalk):
    """
    A walk over one response of *size* bytes (without the size field), in *version*, 5 or newer.

    *partitions* are those that the walk has passed; the caller may empty the list at any time.
    """

    def __init__(self, version: int, size: int) -> None:
        compact, by_id = is_flexible(InspectedApi.PRODUCE, version), version >= _FIRST_TOPIC_IDS
        super().__init__(size, compact=compact, by_id=by_id)
        self.partitions: list[ProducedPartition] = []
        self._version = version
        self._step = self._head
        self._record_errors = 0

    def _head(self, cursor: Cursor) -> int:
        cursor.skip(SIZE_BYTES + _CORRELATION_ID_BYTES)
        if self._compact:
            cursor.skip_tags()
        self._topics = cursor.length(compact=self._compact)
        return self._next_topic()

    def _after_topics(self) -> int:
        self._step = self._throttle
        return 0

    def _partition_begin(self, cursor: Cursor) -> int:
        begin = self.position
        index, error_code, _, _, log_start_offset = cursor.fixed(_PARTITION)
        errors = cursor.length(compact=self._compact) if self._version >= _FIRST_RECORD_ERRORS else 0
        self._record_errors = errors
        self.partitions.append(ProducedPartition(self._topic, index, error_code, log_start_offset, begin))
        return self._next_record_error()

    def _next_record_error(self) -> int:
        if self._record_errors > 0:
            self._step = self._record_error
        elif self._version >= _FIRST_RECORD_ERRORS:
            self._step = self._error_message
        else:
            self._to_tags(self._partition_end)
        return 0

    def _record_error(self, cursor: Cursor) -> int:
        cursor.skip(4)
        cursor.string(compact=self._compact)
        self._record_errors -= 1
        self._to_tags(self._record_error_end)
        return 0

    def _record_error_end(self, _cursor: Cursor) -> int:
        return self._next_record_error()

    def _error_message(self, cursor: Cursor) -> int:
        cursor.string(compact=self._compact)
        self._to_tags(self._partition_end)
        return 0

    def _partition_end(self, _cursor: Cursor) -> int:
        return self._next_partition()

    def _throttle(self, cursor: Cursor) -> int:
        cursor.skip(_THROTTLE_BYTES)
        self._to_tags(self._finish)
        return 0


def acks_of(view: memoryview, head: RequestHead) -> int:
    """
    Return the acknowledgements that a Produce request of any version asks for; 0 is none.

    Raises:
        IncompleteMessage: *view* ends before them.
        ProtocolViolation: The version is newer than the known ones, or too many bytes are before them.
    """
    if head.version not in _ALL_VERSIONS:
        raise ProtocolViolation(
            f"a client sent a Produce request of version {head.version}, which was not offered"
        )
    # The beginning is read anew with each piece that arrives, so it must not be long.
    begun = view[:_BEGINNING_BYTES_MAX]
    try:
        return _skip_to_topics(Cursor(begun, request_body(begun, head)), head)
    except IncompleteMessage:
        if len(begun) < _BEGINNING_BYTES_MAX:
            raise
    raise ProtocolViolation(
        f"a client sent a Produce request with more than {_BEGINNING_BYTES_MAX} bytes before its topics"
    )


def _skip_to_topics(cursor: Cursor, head: RequestHead) -> int:
    if head.version >= _FIRST_TRANSACTIONS:
        cursor.string(compact=head.is_flexible)
    acks = cursor.int16()
    cursor.skip(4)
    return acks


class ProduceRequestWalk(PartitionsWalk):
    """
    A walk over one known Produce request that lists the partitions it writes to.

    A request that declares more than `MAX_PARTITIONS` is a violation before any partition is listed: an
    empty partition takes a few bytes on the wire, and far more as a part of a response.
    """

    def __init__(self, head: RequestHead) -> None:
        super().__init__(head.size, compact=head.is_flexible, by_id=head.version >= _FIRST_TOPIC_IDS)
        self.partitions: dict[str | UUID, list[int]] = {}
        self.head = head
        self._step = self._begin
        self._listed = 0
        self._indexes: list[int] = []

    def _begin(self, cursor: Cursor) -> int:
        # The whole head is one step: it is as small as two strings.
        start = Cursor(cursor.view, cursor.at + request_body(cursor.view[cursor.at :], self.head))
        _skip_to_topics(start, self.head)
        topics = start.length(compact=self._compact)
        self._limit("topics", topics)
        cursor.at, self._topics = start.at, topics
        return self._next_topic()

    def _limit(self, what: str, count: int) -> None:
        if count > MAX_PARTITIONS:
            raise ProtocolViolation(
                f"a client wrote to {count} {what} with one request",
                hint=f"Requests may name at most {MAX_PARTITIONS}",
            )

    def _enter_topic(self) -> None:
        self._listed += max(self._topic_partitions, 0)
        self._limit("partitions", self._listed)
        self._indexes = self.partitions.setdefault(self._topic, [])

    def _partition_begin(self, cursor: Cursor) -> int:
        index = cursor.int32()
        records_bytes = cursor.length(compact=self._compact)
        self._indexes.append(index)
        self._to_tags(self._partition_end)
        return max(records_bytes, 0)

    def _partition_end(self, _cursor: Cursor) -> int:
        return self._next_partition()

    def _after_topics(self) -> int:
        self._to_tags(self._skip_rest)
        return 0

    def _skip_rest(self, _cursor: Cursor) -> int:
        # A broker ignores bytes after a request.
        self._step = self._finish
        return self.end - self.position
