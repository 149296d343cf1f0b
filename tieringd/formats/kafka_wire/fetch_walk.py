"""
A walk over a Fetch response while it passes: partition headers are read, records are skipped.

It decides nothing about what it sees. An error code or a log start that is not wanted can still be
overwritten in the bytes that `feed` took just now: a partition's fixed fields are taken together.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tieringd.formats.kafka_wire.fetch_request import FIRST_RACK, FIRST_SESSIONS, FIRST_TOPIC_IDS
from tieringd.formats.kafka_wire.request_header import SIZE_BYTES, Api, is_flexible
from tieringd.formats.kafka_wire.walk import Walk

if TYPE_CHECKING:
    from uuid import UUID

    from tieringd.formats.kafka_wire.cursor import Cursor

OFFSET_OUT_OF_RANGE: Final = 1
ERROR_AT: Final = 4
"""Where in a partition's header its error code stands."""
LOG_START_AT: Final = 22
"""Where in a partition's header its log start stands, in versions that have it."""
FIRST_LOG_START: Final = 5
_CORRELATION_ID_BYTES: Final = 4
_THROTTLE_BYTES: Final = 4
_HEAD_BYTES: Final = 10
"""Throttle time, error code and session id."""
_PARTITION: Final = {
    version: struct.Struct(">ihqqq" if version >= FIRST_LOG_START else ">ihqq") for version in range(4, 19)
}
_ABORTED_BYTES: Final = 16


@dataclass(slots=True)
class FetchedPartition:
    """What a Fetch response says of one partition; positions count from the response's size field."""

    topic: str | UUID
    index: int
    error_code: int
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    """-1 in version 4, which does not have it."""
    begin: int
    records_begin: int = -1
    """Where the bytes of the records field begin; -1 until the walk is there."""
    records_bytes: int = 0
    end: int = -1
    """Where the next partition begins; -1 until the walk is there."""

    @property
    def error_at(self) -> int:
        """Return the position of the error code."""
        return self.begin + ERROR_AT

    @property
    def log_start_at(self) -> int:
        """Return the position of the log start; version 4 has none."""
        return self.begin + LOG_START_AT


class FetchResponseWalk(Walk):
    """
    Walk over one response of *size* bytes (without the size field) in *version*.

    *partitions* is what the walk has seen; the caller may empty the list at any time.
    """

    def __init__(self, version: int, size: int) -> None:
        super().__init__(size, compact=is_flexible(Api.FETCH, version))
        self.partitions: list[FetchedPartition] = []
        self._version = version
        self._layout = _PARTITION[version]
        self._step = self._head
        self._topic: str | UUID = ""
        self._topics = 0
        self._topic_partitions = 0
        self._aborted = 0
        self._partition: FetchedPartition | None = None

    def _head(self, cursor: Cursor) -> int:
        cursor.skip(SIZE_BYTES + _CORRELATION_ID_BYTES)
        if self._compact:
            cursor.skip_tags()
        cursor.skip(_HEAD_BYTES if self._version >= FIRST_SESSIONS else _THROTTLE_BYTES)
        self._topics = cursor.length(compact=self._compact)
        return self._next_topic()

    def _next_topic(self) -> int:
        if self._topics > 0:
            self._step = self._topic_begin
        else:
            self._to_tags(self._finish)
        return 0

    def _topic_begin(self, cursor: Cursor) -> int:
        topic = cursor.topic(by_id=self._version >= FIRST_TOPIC_IDS, compact=self._compact)
        partitions = cursor.length(compact=self._compact)
        self._topics -= 1
        self._topic, self._topic_partitions = topic, partitions
        return self._next_partition()

    def _next_partition(self) -> int:
        if self._topic_partitions > 0:
            self._step = self._partition_begin
        else:
            self._to_tags(self._topic_end)
        return 0

    def _topic_end(self, _cursor: Cursor) -> int:
        return self._next_topic()

    def _partition_begin(self, cursor: Cursor) -> int:
        begin = self.position
        index, error_code, high_watermark, stable, *log_start = cursor.fixed(self._layout)
        aborted = cursor.length(compact=self._compact)
        self._topic_partitions -= 1
        self._partition = FetchedPartition(
            self._topic, index, error_code, high_watermark, stable, log_start[0] if log_start else -1, begin
        )
        self.partitions.append(self._partition)
        if self._compact and aborted > 0:
            self._aborted, self._step = aborted, self._aborted_transaction
            return 0
        self._step = self._records_length
        return _ABORTED_BYTES * max(aborted, 0)

    def _aborted_transaction(self, cursor: Cursor) -> int:
        cursor.skip(_ABORTED_BYTES)
        cursor.skip_tags()
        self._aborted -= 1
        if not self._aborted:
            self._step = self._records_length
        return 0

    def _records_length(self, cursor: Cursor) -> int:
        begin = cursor.at
        if self._version >= FIRST_RACK:
            cursor.skip(4)
        size = max(cursor.length(compact=self._compact), 0)
        partition = self._partition
        assert partition is not None
        partition.records_begin = self.position + cursor.at - begin
        partition.records_bytes = size
        self._to_tags(self._partition_end)
        return size

    def _partition_end(self, _cursor: Cursor) -> int:
        assert self._partition is not None
        self._partition.end = self.position
        return self._next_partition()
