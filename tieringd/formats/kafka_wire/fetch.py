"""
Fetch: requests made session-less in place, and responses in which the archive answers for a partition.

A broker with a session sends only the changes since its last response, and the gateway changes
responses. So consumers get no sessions: the fields that request one have a fixed place and are
overwritten. A request is read in full only when its response needs it. Requests of replicas are left alone.

`FetchResponseWalk` walks over a response while it passes: partition headers are read, records are
skipped. It decides nothing about their content. The caller can still overwrite an unwanted error code or
log start in the bytes that `feed` has just taken, because a partition's fixed fields are taken together.

`rebuilt` and `composed` make responses with replaced partitions: in place of some of a broker's, or
without a broker. All other bytes are the broker's, unchanged, and records are never copied. The caller
decides about the content of a replacement.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final
from uuid import UUID

from tieringd.errors import ProtocolViolation
from tieringd.formats.kafka_wire.cursor import SIZE_BYTES, Cursor, PartitionsWalk, uvarint
from tieringd.formats.kafka_wire.pieces import FileRegion, Piece, size_of
from tieringd.formats.kafka_wire.request_header import (
    MAX_PARTITIONS,
    InspectedApi,
    RequestHead,
    is_flexible,
    request_body,
)

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
"""Size of the tag, its size field, the replica's id and epoch, and an empty section of tagged fields."""
_TOPIC_ID_BYTES: Final = 16
_INT32: Final = struct.Struct(">i")
_INT64: Final = struct.Struct(">q")

OFFSET_OUT_OF_RANGE: Final = 1
ERROR_AT: Final = 4
"""Position of the error code in a partition's header."""
LOG_START_AT: Final = 22
"""Position of the log start in a partition's header, in versions that have it."""
FIRST_LOG_START: Final = 5
_CORRELATION_ID_BYTES: Final = 4
_THROTTLE_BYTES: Final = 4
_HEAD_BYTES: Final = 10
"""Size of throttle time, error code and session id."""
_ABORTED_BYTES: Final = 16

_MAX_SIZE: Final = 2**31 - 1
_SIZE: Final = struct.Struct(">i")
_HEAD: Final = struct.Struct(">ihqq")
_ABORTED: Final = struct.Struct(">qq")
_INT16: Final = struct.Struct(">h")
_ERROR_AND_SESSION: Final = struct.Struct(">hi")
_ADDRESSED_BYTES: Final = 8
"""Size and correlation id, which begin every response."""
_SMALL_BYTES: Final = 4096
_THROTTLE_ROOM_BYTES: Final = 64
"""The throttle time of a response is in its first bytes."""
_NOT_THROTTLED: Final = bytes(4)
_NO_REPLICA: Final = struct.pack(">i", -1)
_NO_TAGS: Final = b"\x00"
_MORE_FOLLOWS: Final = 0x80
"""From this value on, a byte of a varint has another one after it."""


@dataclass(frozen=True, slots=True)
class AskedPartition:
    """The fields of a Fetch request for one partition."""

    fetch_offset: int
    max_bytes: int
    current_leader_epoch: int = -1


@dataclass(frozen=True, slots=True)
class AskedFetch:
    """The fields of a Fetch request."""

    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    read_committed: bool
    partitions: dict[tuple[str | UUID, int], AskedPartition]
    """The partitions asked for, by topic (its id from version 13 on) and partition number."""

    def at(self, offsets: Mapping[tuple[str | UUID, int], int]) -> AskedFetch:
        """Return the same Fetch at the fetch offsets in *offsets*, as `with_offsets` does with its bytes."""
        partitions = {
            key: AskedPartition(offsets.get(key, one.fetch_offset), one.max_bytes, one.current_leader_epoch)
            for key, one in self.partitions.items()
        }
        return replace(self, partitions=partitions)


def _limits_at(body: int, version: int) -> int:
    return body if version >= FIRST_REPLICA_TAG else body + 4


def remove_session(view: memoryview, head: RequestHead) -> bool:
    """
    Overwrite the session in *view*, a whole Fetch request with its size.

    Returns False for the request of a replica: the request stays as it is, and its response must stay too.

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
    """Return the session that *view*, a whole Fetch request with its size, continues; 0 is none."""
    if head.version < FIRST_SESSIONS:
        return 0
    at = _limits_at(request_body(view, head), head.version) + _LIMITS.size
    return Cursor(view, at).int32()


def limit_bytes(view: memoryview, head: RequestHead, max_bytes: int) -> None:
    """Lower the maximum response size in *view*, a whole Fetch request with its size."""
    at = _limits_at(request_body(view, head), head.version) + 8
    asked = Cursor(view, at).int32()
    _INT32.pack_into(view, at, min(asked, max_bytes))


def _is_of_replica(view: memoryview, body: int, version: int) -> bool:
    if version < FIRST_REPLICA_TAG:
        return Cursor(view, body).int32() >= 0
    # The replica's field is the last of the message. Brokers write nothing after it, so two bytes
    # identify most consumers without a walk over all of their partitions.
    if bytes(view[-_REPLICA_TAG_BYTES:][:2]) != _REPLICA_TAG_FIELD:
        return False
    cursor = Cursor(view, body)
    _skip_to_topics(cursor, version)
    left = _skip_topics(cursor, _LAYOUTS[version].size, have_tags=True, left=MAX_PARTITIONS)
    # These are the topics that the replica forgets.
    _skip_topics(cursor, _INT32.size, have_tags=False, left=left)
    cursor.string(compact=True)
    return _replica_id(cursor) >= 0


def _replica_id(cursor: Cursor) -> int:
    for _ in range(cursor.uvarint()):
        tag, size = cursor.uvarint(), cursor.uvarint()
        if tag == _REPLICA_TAG:
            return cursor.int32()
        cursor.skip(size)
    return -1


def _skip_topics(cursor: Cursor, item_bytes: int, *, have_tags: bool, left: int) -> int:
    """
    Skip topics with ids, and their partitions of *item_bytes*. Return what remains of *left*.

    Any client may make the gateway do this for a large request. So it is a tight loop without calls, except
    for what clients do not send. *left* limits topics, partitions and tagged fields together.
    """
    view, end = cursor.view, len(cursor.view)
    for _ in range(cursor.length(compact=True)):
        at = cursor.at + _TOPIC_ID_BYTES
        if at < end and 0 < view[at] < _MORE_FOLLOWS:
            count, cursor.at = view[at] - 1, at + 1
        else:
            cursor.skip(_TOPIC_ID_BYTES)
            count = max(cursor.length(compact=True), 0)
        left -= 1 + count
        if left < 0:
            raise _too_many()
        if not have_tags:
            cursor.skip(item_bytes * count)
        for _ in range(count if have_tags else 0):
            at = cursor.at + item_bytes
            if at < end and not view[at]:
                cursor.at = at + 1
            else:
                cursor.skip(item_bytes)
                left -= cursor.skip_tags()
                if left < 0:
                    raise _too_many()
        if cursor.at < end and not view[cursor.at]:
            cursor.at += 1
        else:
            left -= cursor.skip_tags()
    return left


def _too_many() -> ProtocolViolation:
    return ProtocolViolation(f"a Fetch request names more than {MAX_PARTITIONS} partitions")


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
    """Read the fields before the topics; return the values of `_LIMITS`."""
    cursor.skip(0 if version >= FIRST_REPLICA_TAG else 4)
    max_wait_ms, min_bytes, max_bytes, isolation = cursor.fixed(_LIMITS)
    cursor.skip(_SESSION.size if version >= FIRST_SESSIONS else 0)
    return max_wait_ms, min_bytes, max_bytes, isolation


def _each_partition(
    cursor: Cursor, version: int
) -> Iterator[tuple[tuple[str | UUID, int], int, AskedPartition]]:
    """Read the topics; yield each partition with the position of its fields."""
    compact = is_flexible(1, version)
    layout = _LAYOUTS[version]
    left = MAX_PARTITIONS
    for _ in range(cursor.length(compact=compact)):
        topic = cursor.topic(by_id=version >= FIRST_TOPIC_IDS, compact=compact)
        count = cursor.length(compact=compact)
        left -= max(count, 1)
        if left < 0:
            raise _too_many()
        for _ in range(count):
            begin = cursor.at
            index, *epoch, offset, partition_bytes = cursor.fixed(layout)
            if compact:
                cursor.skip_tags()
            yield (topic, index), begin, AskedPartition(offset, partition_bytes, *epoch)
        if compact:
            cursor.skip_tags()


def with_offsets(view: memoryview, head: RequestHead, offsets: Mapping[tuple[str | UUID, int], int]) -> bytes:
    """
    Return a copy of *view*, a whole Fetch request with its size, with the fetch offsets in *offsets*.

    Partitions that are not in *offsets* keep theirs.

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


_PARTITION: Final = {
    version: struct.Struct(">ihqqq" if version >= FIRST_LOG_START else ">ihqq") for version in range(4, 19)
}


@dataclass(slots=True)
class FetchedPartition:
    """The header of one partition in a Fetch response; positions count from the response's size field."""

    topic: str | UUID
    index: int
    error_code: int
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    """-1 in version 4, which does not have it."""
    begin: int
    records_begin: int = -1
    """Position of the records' bytes; -1 until the walk is there."""
    records_bytes: int = 0
    end: int = -1
    """Position of the next partition; -1 until the walk is there."""

    @property
    def error_at(self) -> int:
        """Return the position of the error code."""
        return self.begin + ERROR_AT

    @property
    def log_start_at(self) -> int:
        """Return the position of the log start; version 4 has none."""
        return self.begin + LOG_START_AT


class FetchResponseWalk(PartitionsWalk):
    """
    A walk over one response of *size* bytes (without the size field) in *version*.

    *partitions* are those that the walk has passed; the caller may empty the list at any time.
    """

    def __init__(self, version: int, size: int) -> None:
        compact, by_id = is_flexible(InspectedApi.FETCH, version), version >= FIRST_TOPIC_IDS
        super().__init__(size, compact=compact, by_id=by_id)
        self.partitions: list[FetchedPartition] = []
        self._version = version
        self._layout = _PARTITION[version]
        self._step = self._head
        self._aborted = 0
        self._partition: FetchedPartition | None = None

    def _head(self, cursor: Cursor) -> int:
        cursor.skip(SIZE_BYTES + _CORRELATION_ID_BYTES)
        if self._compact:
            cursor.skip_tags()
        cursor.skip(_HEAD_BYTES if self._version >= FIRST_SESSIONS else _THROTTLE_BYTES)
        self._topics = cursor.length(compact=self._compact)
        return self._next_topic()

    def _partition_begin(self, cursor: Cursor) -> int:
        begin = self.position
        index, error_code, high_watermark, stable, *log_start = cursor.fixed(self._layout)
        aborted = cursor.length(compact=self._compact)
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


@dataclass(frozen=True, slots=True)
class PartitionData:
    """The answer for one partition that replaces the broker's."""

    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    records: tuple[Piece, ...] = ()
    aborted: tuple[tuple[int, int], ...] | None = None
    """Producer id and first offset of aborted transactions; None for a reader of uncommitted records."""
    error_code: int = 0


@dataclass(frozen=True, slots=True)
class RebuiltResponse:
    """A whole response with its size field, to be sent piece by piece."""

    pieces: tuple[Piece, ...]
    size: int
    """Size of all pieces together, in bytes."""


def rebuilt(
    response: memoryview, version: int, replaced: Iterable[tuple[FetchedPartition, PartitionData]]
) -> RebuiltResponse:
    """
    Return *response*, whole and with its size field, with some of its partitions replaced.

    *replaced* is in the order of the walk that found the partitions.

    Raises:
        ProtocolViolation: The response would be larger than 2 GiB.
    """
    pieces: list[Piece] = []
    at = SIZE_BYTES
    for partition, replacement in replaced:
        assert at <= partition.begin < partition.end, "the walk is not over, or the order is another"
        pieces += [_kept(response[at : partition.begin]), *_partition(partition.index, version, replacement)]
        at = partition.end
    pieces.append(_kept(response[at:]))
    size = size_of(pieces)
    if size > _MAX_SIZE:
        raise ProtocolViolation(f"a Fetch response of {size} bytes")
    return RebuiltResponse(tuple(_joined([_SIZE.pack(size), *pieces])), SIZE_BYTES + size)


def readdressed(pieces: tuple[Piece, ...], correlation_id: int) -> tuple[Piece, ...]:
    """Return a whole response, whose first piece is bytes of ours, as the response to another request."""
    first, *rest = pieces
    assert isinstance(first, bytes), "a response begins with its size"
    return (first[:SIZE_BYTES] + _SIZE.pack(correlation_id) + first[_ADDRESSED_BYTES:], *rest)


def throttled(pieces: tuple[Piece, ...], version: int, throttle_ms: int) -> tuple[Piece, ...]:
    """Return a whole response with a throttle time of at least *throttle_ms*, in milliseconds."""
    head, rest = bytearray(), list(pieces)
    # The header may have tagged fields of the broker's. Few are ever sent, and they are in the first bytes.
    while rest and len(head) < _THROTTLE_ROOM_BYTES and not isinstance(rest[0], FileRegion):
        head += rest.pop(0)  # type: ignore[arg-type]
    cursor = Cursor(memoryview(head), _ADDRESSED_BYTES)
    if is_flexible(InspectedApi.FETCH, version):
        cursor.skip_tags()
    at = cursor.at
    (before,) = _SIZE.unpack_from(head, at)
    _SIZE.pack_into(head, at, max(before, throttle_ms))
    return (bytes(head), *rest)


def composed(
    correlation_id: int,
    version: int,
    topics: Mapping[str | UUID, Mapping[int, PartitionData]],
    *,
    error_code: int = 0,
) -> RebuiltResponse:
    """
    Return a whole response made without a broker: without a session, and never throttled.

    *topics* have names, or ids in versions with ids; *error_code* is that of the whole response.
    """
    compact = is_flexible(InspectedApi.FETCH, version)
    pieces: list[Piece] = [_SIZE.pack(correlation_id) + (_NO_TAGS if compact else b"") + _NOT_THROTTLED]
    if version >= FIRST_SESSIONS:
        pieces.append(_ERROR_AND_SESSION.pack(error_code, 0))
    pieces.append(_length(len(topics), compact=compact))
    for topic, partitions in topics.items():
        pieces += [_topic(topic, compact=compact), _length(len(partitions), compact=compact)]
        for index, answer in partitions.items():
            pieces += _partition(index, version, answer)
        pieces += [_NO_TAGS] if compact else []
    pieces += [_NO_TAGS] if compact else []
    size = size_of(pieces)
    return RebuiltResponse(tuple(_joined([_SIZE.pack(size), *pieces])), SIZE_BYTES + size)


def _kept(part: memoryview) -> Piece:
    """Return a part of a broker's response. Small parts are copied, so that they may be joined."""
    return bytes(part) if len(part) < _SMALL_BYTES else part


def _topic(topic: str | UUID, *, compact: bool) -> bytes:
    if isinstance(topic, UUID):
        return topic.bytes
    name = topic.encode()
    return (uvarint(len(name) + 1) if compact else _INT16.pack(len(name))) + name


def _joined(pieces: Iterable[Piece]) -> Iterable[Piece]:
    """Yield the same bytes with small neighbours joined into one piece, because each piece is one send."""
    small: list[bytes] = []
    for piece in pieces:
        if isinstance(piece, bytes):
            small.append(piece)
            continue
        yield from [b"".join(small)] if small else []
        small.clear()
        yield piece
    yield from [b"".join(small)] if small else []


def _partition(index: int, version: int, new: PartitionData) -> Iterable[Piece]:
    compact = is_flexible(InspectedApi.FETCH, version)
    size = size_of(new.records)
    head = [_HEAD.pack(index, new.error_code, new.high_watermark, new.last_stable_offset)]
    if version >= FIRST_LOG_START:
        head.append(_INT64.pack(new.log_start_offset))
    head.append(_length(None if new.aborted is None else len(new.aborted), compact=compact))
    for transaction in new.aborted or ():
        head += [_ABORTED.pack(*transaction), _NO_TAGS if compact else b""]
    if version >= FIRST_RACK:
        head.append(_NO_REPLICA)
    head.append(_length(size, compact=compact))
    return [b"".join(head), *new.records, *([_NO_TAGS] if compact else ())]


def _length(length: int | None, *, compact: bool) -> bytes:
    if compact:
        return uvarint(0 if length is None else length + 1)
    return _SIZE.pack(-1 if length is None else length)
