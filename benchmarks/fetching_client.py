"""
A client of the Fetch API that takes next to nothing of the machine.

It asks as clients do by default: for all partitions at once, a mebibyte of each, the one that came last at
the end. It checks the checksum of each batch and that the offsets follow each other, and reads no records.
So what is measured with it is the server. A client of records takes several CPU seconds for a GiB, which on
one machine with the server hides most of a difference between two servers.
"""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING, Final

from crc32c import crc32c

if TYPE_CHECKING:
    from collections.abc import Mapping

_FETCH, _VERSION = 1, 11
"""The last version whose lists have lengths of four bytes."""
_MAX_WAIT_MS, _MIN_BYTES, _MAX_BYTES, _PARTITION_BYTES = 500, 1, 50 << 20, 1 << 20
_NO_SESSION: Final = (0, -1)
_ANSWER_SECONDS = 60
_HEADER_BYTES = 61
_CRC_AT, _CHECKED_FROM = 17, 21


class FetchingClient:
    """Reads a whole topic from one address on one connection."""

    def __init__(self, port: int, topic: str, partitions: int, records: int) -> None:
        self._port = port
        self._topic = topic.encode()
        self._partitions = partitions
        self._records = records
        self._buffer = bytearray(_PARTITION_BYTES)
        self._next_offsets: dict[int, int] = {}

    def upload(self) -> None:
        """Read every batch once."""
        self._next_offsets = dict.fromkeys(range(self._partitions), 0)
        with socket.create_connection(("127.0.0.1", self._port), timeout=_ANSWER_SECONDS) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while sum(self._next_offsets.values()) < self._records:
                connection.sendall(self._request())
                self._read_answer(self._received(connection))

    def sent(self) -> Mapping[str, bytes]:
        """Return the end of each partition."""
        return {str(number): b"%d" % offset for number, offset in self._next_offsets.items()}

    def close(self) -> None:
        """Nothing is left open."""

    def _request(self) -> bytes:
        partitions = b"".join(
            struct.pack(">iiqqi", number, -1, offset, -1, _PARTITION_BYTES)
            for number, offset in self._next_offsets.items()
        )
        body = b"".join(
            (
                struct.pack(">hhih", _FETCH, _VERSION, 0, -1),
                struct.pack(">iiiib", -1, _MAX_WAIT_MS, _MIN_BYTES, _MAX_BYTES, 0),
                struct.pack(">ii", *_NO_SESSION),
                struct.pack(f">ih{len(self._topic)}s", 1, len(self._topic), self._topic),
                struct.pack(">i", len(self._next_offsets)),
                partitions,
                # No forgotten topics, and no rack.
                struct.pack(">ih", 0, 0),
            )
        )
        return struct.pack(">i", len(body)) + body

    def _received(self, connection: socket.socket) -> memoryview:
        """Return the next answer, without its size; it is valid until the next one."""
        head = bytearray(4)
        _fill(connection, memoryview(head))
        (size,) = struct.unpack(">i", head)
        if size > len(self._buffer):
            self._buffer = bytearray(size)
        answer = memoryview(self._buffer)[:size]
        _fill(connection, answer)
        return answer

    def _read_answer(self, answer: memoryview) -> None:
        _correlation, _throttle, error, _session, topics = struct.unpack_from(">iihii", answer)
        assert (error, topics) == (0, 1), f"the answer has error {error} and {topics} topics"
        position = 18
        (length,) = struct.unpack_from(">h", answer, position)
        position += 2 + length
        (partitions,) = struct.unpack_from(">i", answer, position)
        position += 4
        for _ in range(partitions):
            number, error = struct.unpack_from(">ih", answer, position)
            assert error == 0, f"partition {number} has error {error}"
            (aborted,) = struct.unpack_from(">i", answer, position + 30)
            position += 34 + 16 * max(0, aborted) + 4
            (size,) = struct.unpack_from(">i", answer, position)
            position += 4
            if size > 0:
                self._read_batches(number, answer[position : position + size])
                position += size

    def _read_batches(self, number: int, batches: memoryview) -> None:
        position, expected = 0, self._next_offsets[number]
        while position + _HEADER_BYTES <= len(batches):
            base_offset, length = struct.unpack_from(">qi", batches, position)
            end = position + 12 + length
            if end > len(batches):
                # The last batch of an answer may be cut off.
                break
            (checksum,) = struct.unpack_from(">I", batches, position + _CRC_AT)
            (last_offset_delta,) = struct.unpack_from(">i", batches, position + _CHECKED_FROM + 2)
            assert crc32c(batches[position + _CHECKED_FROM : end]) == checksum, "a batch is corrupt"
            last_offset = base_offset + last_offset_delta
            # A read may begin in the middle of a batch.
            assert base_offset <= expected <= last_offset, f"offset {expected} of {number} is missing"
            position, expected = end, last_offset + 1
        if expected > self._next_offsets[number]:
            # As clients do: what came goes to the end of the next request.
            del self._next_offsets[number]
            self._next_offsets[number] = expected


def _fill(connection: socket.socket, view: memoryview) -> None:
    while view:
        size = connection.recv_into(view, len(view), socket.MSG_WAITALL)
        assert size, "the connection was closed"
        view = view[size:]
