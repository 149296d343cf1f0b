"""
Fetch requests: made session-less in place, and read only when an answer needs it.

A broker that keeps a session answers with what changed since the last answer, and the gateway
changes answers. So consumers get no sessions: the fields that ask for one have a fixed place and
are overwritten. Requests of replicas are left alone.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tieringd.errors import ProtocolViolation
from tieringd.formats.kafka_wire.cursor import Cursor
from tieringd.formats.kafka_wire.request_header import RequestHead, is_flexible, request_body

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from uuid import UUID

FIRST_SESSIONS: Final = 7
FIRST_EPOCHS: Final = 9
FIRST_RACK: Final = 11
FIRST_TOPIC_IDS: Final = 13
FIRST_REPLICA_TAG: Final = 15
_LIMITS: Final = struct.Struct(">iiib")
"""Maximum wait, minimum bytes, maximum bytes and isolation level."""
_SESSION: Final = struct.Struct(">ii")
_NO_SESSION: Final = (0, -1)
_REPLICA_TAG: Final = 1
_REPLICA_TAG_FIELD: Final = b"\x01\x0d"
_REPLICA_TAG_BYTES: Final = 15
"""Of the tag, its size, the replica's id and epoch, and an empty section of tagged fields."""
_INT32: Final = struct.Struct(">i")
_INT64: Final = struct.Struct(">q")


@dataclass(frozen=True, slots=True)
class AskedPartition:
    """What a Fetch request asks of one partition."""

    fetch_offset: int
    max_bytes: int
    current_leader_epoch: int = -1


@dataclass(frozen=True, slots=True)
class AskedFetch:
    """What a Fetch request asks."""

    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    read_committed: bool
    partitions: dict[tuple[str | UUID, int], AskedPartition]
    """By topic (its id from version 13 on) and partition number."""


def _limits_at(body: int, version: int) -> int:
    return body if version >= FIRST_REPLICA_TAG else body + 4


def remove_session(view: memoryview, head: RequestHead) -> bool:
    """
    Overwrite the session in *view*, a whole Fetch request with its size.

    Return false for the request of a replica, which stays as it is and whose answer must too.

    Raises:
        ProtocolViolation: It is no Fetch request of this version.
    """
    body = request_body(view, head)
    if _is_of_replica(view, body, head.version):
        return False
    at = _limits_at(body, head.version) + _LIMITS.size
    if head.version >= FIRST_SESSIONS:
        Cursor(view, at).skip(_SESSION.size)
        _SESSION.pack_into(view, at, *_NO_SESSION)
    return True


def session_of(view: memoryview, head: RequestHead) -> int:
    """Return the session that *view*, a whole Fetch request with its size, goes on with; 0 is none."""
    if head.version < FIRST_SESSIONS:
        return 0
    at = _limits_at(request_body(view, head), head.version) + _LIMITS.size
    return Cursor(view, at).int32()


def limit_bytes(view: memoryview, head: RequestHead, max_bytes: int) -> None:
    """Lower the maximum size of the answer in *view*, a whole Fetch request with its size."""
    at = _limits_at(request_body(view, head), head.version) + 8
    asked = Cursor(view, at).int32()
    _INT32.pack_into(view, at, min(asked, max_bytes))


def _is_of_replica(view: memoryview, body: int, version: int) -> bool:
    if version < FIRST_REPLICA_TAG:
        return Cursor(view, body).int32() >= 0
    # The field that says so is the last of the message. Brokers write nothing after it, so two
    # bytes tell consumers apart without a walk over all of their partitions.
    if bytes(view[-_REPLICA_TAG_BYTES:][:2]) != _REPLICA_TAG_FIELD:
        return False
    cursor = Cursor(view, body)
    _partitions(cursor, version)
    _skip_forgotten(cursor, version)
    cursor.string(compact=True)
    return _replica_id(cursor) >= 0


def _replica_id(cursor: Cursor) -> int:
    for _ in range(cursor.uvarint()):
        tag, size = cursor.uvarint(), cursor.uvarint()
        if tag == _REPLICA_TAG:
            return cursor.int32()
        cursor.skip(size)
    return -1


def _skip_forgotten(cursor: Cursor, version: int) -> None:
    compact = is_flexible(1, version)
    for _ in range(cursor.length(compact=compact)):
        cursor.topic(by_id=version >= FIRST_TOPIC_IDS, compact=compact)
        cursor.skip(4 * max(cursor.length(compact=compact), 0))
        cursor.skip_tags()


def asked_of(view: memoryview, head: RequestHead) -> AskedFetch:
    """
    Read *view*, a whole Fetch request with its size.

    Raises:
        ProtocolViolation: It is no Fetch request of this version.
    """
    cursor = Cursor(view, request_body(view, head))
    return _partitions(cursor, head.version)


def _partition_layout(version: int) -> struct.Struct:
    """Return the layout of a partition; fields that a version lacks are zero bytes wide."""
    leader_epoch = "i" if version >= FIRST_EPOCHS else "0i"
    last_epoch = "4x" if is_flexible(1, version) else ""
    log_start = "8x" if version >= 5 else ""  # noqa: PLR2004  (the version that brought it)
    return struct.Struct(f">i{leader_epoch}q{last_epoch}{log_start}i")


_LAYOUTS: Final = {version: _partition_layout(version) for version in range(4, 19)}


def _partitions(cursor: Cursor, version: int) -> AskedFetch:
    """Read from the beginning of the body to the end of the topics."""
    max_wait_ms, min_bytes, max_bytes, isolation = _skip_to_topics(cursor, version)
    asked = {key: partition for key, _, partition in _each_partition(cursor, version)}
    if isolation not in {0, 1}:
        raise ProtocolViolation(f"a Fetch request has isolation level {isolation}")
    return AskedFetch(max_wait_ms, min_bytes, max_bytes, isolation == 1, asked)


def _skip_to_topics(cursor: Cursor, version: int) -> tuple[int, int, int, int]:
    """Read what comes before the topics; return the values of `_LIMITS`."""
    cursor.skip(0 if version >= FIRST_REPLICA_TAG else 4)
    max_wait_ms, min_bytes, max_bytes, isolation = cursor.fixed(_LIMITS)
    cursor.skip(_SESSION.size if version >= FIRST_SESSIONS else 0)
    return max_wait_ms, min_bytes, max_bytes, isolation


def _each_partition(
    cursor: Cursor, version: int
) -> Iterator[tuple[tuple[str | UUID, int], int, AskedPartition]]:
    """Read the topics, and yield of each partition also where its fields begin."""
    compact = is_flexible(1, version)
    layout = _LAYOUTS[version]
    for _ in range(cursor.length(compact=compact)):
        topic = cursor.topic(by_id=version >= FIRST_TOPIC_IDS, compact=compact)
        for _ in range(cursor.length(compact=compact)):
            begin = cursor.at
            index, *epoch, offset, partition_bytes = cursor.fixed(layout)
            if compact:
                cursor.skip_tags()
            yield (topic, index), begin, AskedPartition(offset, partition_bytes, *epoch)
        if compact:
            cursor.skip_tags()


def with_offsets(view: memoryview, head: RequestHead, offsets: Mapping[tuple[str | UUID, int], int]) -> bytes:
    """
    Return *view*, a whole Fetch request with its size, with other offsets for the partitions of *offsets*.

    Raises:
        ProtocolViolation: It is no Fetch request of this version.
    """
    changed = bytearray(view)
    cursor = Cursor(view, request_body(view, head))
    _skip_to_topics(cursor, head.version)
    before_offset = 8 if head.version >= FIRST_EPOCHS else 4
    for key, begin, _ in _each_partition(cursor, head.version):
        if key in offsets:
            _INT64.pack_into(changed, begin + before_offset, offsets[key])
    return bytes(changed)
