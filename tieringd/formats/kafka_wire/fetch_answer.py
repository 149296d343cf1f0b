"""
Fetch responses with answers that are not a broker's: in place of some of its own, or alone.

Everything that is not replaced is the broker's bytes, unchanged; records are never copied. What
stands in an answer is the caller's business.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from uuid import UUID

from tieringd.errors import ProtocolViolation
from tieringd.formats.kafka_wire.cursor import uvarint
from tieringd.formats.kafka_wire.fetch_request import FIRST_RACK, FIRST_SESSIONS
from tieringd.formats.kafka_wire.fetch_walk import FIRST_LOG_START
from tieringd.formats.kafka_wire.pieces import Piece, size_of
from tieringd.formats.kafka_wire.request_header import SIZE_BYTES, Api, is_flexible

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tieringd.formats.kafka_wire.fetch_walk import FetchedPartition

_MAX_SIZE: Final = 2**31 - 1
_SIZE: Final = struct.Struct(">i")
_HEAD: Final = struct.Struct(">ihqq")
_INT64: Final = struct.Struct(">q")
_ABORTED: Final = struct.Struct(">qq")
_INT16: Final = struct.Struct(">h")
_ERROR_AND_SESSION: Final = struct.Struct(">hi")
_ADDRESSED_BYTES: Final = 8
"""Size and correlation id, with which every response begins."""
_SMALL_BYTES: Final = 4096
_NOT_THROTTLED: Final = bytes(4)
_NO_REPLICA: Final = struct.pack(">i", -1)
_NO_TAGS: Final = b"\x00"


@dataclass(frozen=True, slots=True)
class Replacement:
    """What a client is told of one partition instead of the broker's answer."""

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
    """Of all pieces together."""


def rebuilt(
    response: memoryview, version: int, replaced: Iterable[tuple[FetchedPartition, Replacement]]
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
    """Return a whole response, whose first piece is bytes of ours, as the answer to another request."""
    first, *rest = pieces
    assert isinstance(first, bytes), "a response begins with its size"
    return (first[:SIZE_BYTES] + _SIZE.pack(correlation_id) + first[_ADDRESSED_BYTES:], *rest)


def composed(
    correlation_id: int,
    version: int,
    topics: Mapping[str | UUID, Mapping[int, Replacement]],
    *,
    error_code: int = 0,
) -> RebuiltResponse:
    """
    Return a whole response that no broker had a part in: without a session, and never throttled.

    *topics* have names, or ids where the version has them; *error_code* is for all of it.
    """
    compact = is_flexible(Api.FETCH, version)
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
    """Return a part of a broker's response: small ones may be joined, and records are not copied."""
    return bytes(part) if len(part) < _SMALL_BYTES else part


def _topic(topic: str | UUID, *, compact: bool) -> bytes:
    if isinstance(topic, UUID):
        return topic.bytes
    name = topic.encode()
    return (uvarint(len(name) + 1) if compact else _INT16.pack(len(name))) + name


def _joined(pieces: Iterable[Piece]) -> Iterable[Piece]:
    """Return the same bytes with small neighbours in one piece: each piece is one send."""
    small: list[bytes] = []
    for piece in pieces:
        if isinstance(piece, bytes):
            small.append(piece)
            continue
        yield from [b"".join(small)] if small else []
        small.clear()
        yield piece
    yield from [b"".join(small)] if small else []


def _partition(index: int, version: int, new: Replacement) -> Iterable[Piece]:
    compact = is_flexible(Api.FETCH, version)
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
