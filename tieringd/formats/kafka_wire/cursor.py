"""
A position in bytes of Kafka's protocol; it never moves past their end.

A cursor knows the protocol's primitives and no message. Reading past the end is an error of its own,
because a walk over a message that is still arriving only has to wait then.

A `MessageWalk` reads a message while it passes: fields are read whole, and large parts are skipped. It keeps
no bytes. Bytes that it did not take must be offered again with more; they are never longer than one topic
name and the fixed fields around it. So no byte is passed on before it is read. The subclass for a message
knows the meaning of the fields.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final
from uuid import UUID

from tieringd.errors import ProtocolViolation

SIZE_BYTES: Final = 4
"""Size of the size field, which precedes every request and response and does not count itself."""
MAX_STRING_BYTES: Final = 32_767
"""The limit of an int16 length. The compact form allows more, and no client uses that."""
MAX_TAGS: Final = 64
"""
The most fields in one section of tagged fields. Clients and brokers send fewer than ten.

An empty field takes two bytes, so that a message has room for millions of them.
"""
_MAX_VARINT_BYTES: Final = 5
_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")


class IncompleteMessage(ProtocolViolation):
    """The bytes end inside a field: a violation, unless the rest of the message is still to come."""


class Cursor:
    """Reads fields one after another from *view*, beginning at *at*."""

    __slots__ = ("at", "view")

    def __init__(self, view: memoryview, at: int = 0) -> None:
        self.view = view
        self.at = at

    def skip(self, size: int) -> None:
        """Skip *size* bytes."""
        if size > len(self.view) - self.at:
            raise IncompleteMessage(
                f"the message ends {size - len(self.view) + self.at} bytes inside a field"
            )
        self.at += size

    def fixed(self, layout: struct.Struct) -> tuple[Any, ...]:
        """Read fields of fixed size."""
        begin = self.at
        self.skip(layout.size)
        return layout.unpack_from(self.view, begin)

    def int16(self) -> int:
        """Read an int16."""
        return int(self.fixed(_INT16)[0])

    def int32(self) -> int:
        """Read an int32."""
        return int(self.fixed(_INT32)[0])

    def uvarint(self) -> int:
        """Read an unsigned varint of at most 32 bits."""
        value = 0
        for number in range(_MAX_VARINT_BYTES):
            begin = self.at
            self.skip(1)
            byte = self.view[begin]
            value |= (byte & 0x7F) << 7 * number
            if byte < 0x80:  # noqa: PLR2004  (the bit that says that more follows)
                return value
        raise ProtocolViolation("a varint is longer than five bytes")

    def length(self, *, compact: bool) -> int:
        """Read the length of an array or of bytes; -1 is null."""
        length = self.uvarint() - 1 if compact else self.int32()
        if length < -1:
            raise ProtocolViolation(f"a length is {length}")
        return length

    def string(self, *, compact: bool) -> bytes | None:
        """Read a string of at most `MAX_STRING_BYTES`."""
        length = self.uvarint() - 1 if compact else self.int16()
        if not -1 <= length <= MAX_STRING_BYTES:
            raise ProtocolViolation(f"a string of {length} bytes")
        if length < 0:
            return None
        begin = self.at
        self.skip(length)
        return bytes(self.view[begin : self.at])

    def text(self, *, compact: bool) -> str:
        """Read a UTF-8 string; null is read as empty."""
        raw = self.string(compact=compact)
        try:
            return (raw or b"").decode()
        except UnicodeDecodeError as error:
            raise ProtocolViolation("a string is not UTF-8") from error

    def uuid(self) -> UUID:
        """Read a UUID."""
        begin = self.at
        self.skip(16)
        return UUID(bytes=bytes(self.view[begin : self.at]))

    def topic(self, *, by_id: bool, compact: bool) -> str | UUID:
        """Read the name or id of a topic, as this version of a message has it."""
        return self.uuid() if by_id else self.text(compact=compact)

    def tag_count(self) -> int:
        """Read how many fields a section of tagged fields has, at most `MAX_TAGS`."""
        count = self.uvarint()
        if count > MAX_TAGS:
            raise ProtocolViolation(
                f"a message has {count} tagged fields in one place, and at most {MAX_TAGS} are read"
            )
        return count

    def skip_tags(self) -> int:
        """Skip a section of tagged fields. Return how many it has."""
        count = self.tag_count()
        for _ in range(count):
            self.uvarint()
            self.skip(self.uvarint())
        return count


def uvarint(value: int) -> bytes:
    """Return *value*, which is not negative, as an unsigned varint."""
    encoded = bytearray()
    while value >= 0x80:  # noqa: PLR2004  (seven bits a byte)
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


class MessageWalk:
    """
    A walk over one message of *size* bytes after its size field; *position* is its progress.

    A step takes whole fields from the cursor, sets the next step, and returns how many bytes after those
    fields can be skipped. A step that finds too few bytes changes nothing.
    """

    def __init__(self, size: int, *, compact: bool) -> None:
        self.position = 0
        self.end = SIZE_BYTES + size
        self._compact = compact
        self._step: Callable[[Cursor], int] = self._finish
        self._skipping = 0
        self._tags = 0
        self._after_tags: Callable[[Cursor], int] = self._finish
        self._is_finished = False

    @property
    def is_done(self) -> bool:
        """Return whether the walk has reached the end of the message."""
        return self._is_finished

    @property
    def passing(self) -> int:
        """Return how many of the next bytes need no inspection: they may be counted by `passed` instead."""
        return self._skipping

    def passed(self, size: int) -> None:
        """Count *size* bytes, at most `passing`, that passed without being offered to `feed`."""
        assert size <= self._skipping, "bytes that must be read were passed"
        self._skipping -= size
        self.position += size

    def feed(self, view: memoryview) -> int:
        """
        MessageWalk over the bytes at `position` and return how many were taken.

        *view* may hold more than this message; no byte is taken beyond its end.

        Raises:
            ProtocolViolation: It is no message of this kind and version.
        """
        begin = self.position
        view = view[: self.end - begin]
        try:
            self._walk(Cursor(view))
        except IncompleteMessage:
            if begin + len(view) == self.end:
                raise
        if self._is_finished and self.position != self.end:
            raise ProtocolViolation(f"a message is {self.end - self.position} bytes longer than its fields")
        return self.position - begin

    def _walk(self, cursor: Cursor) -> None:
        while not self._is_finished:
            if self._skipping:
                size = min(self._skipping, len(cursor.view) - cursor.at)
                if not size:
                    return
                self.passed(size)
                cursor.at += size
            else:
                before = cursor.at
                skip = self._step(cursor)
                self.position += cursor.at - before
                self._skip(skip)

    def _skip(self, size: int) -> None:
        left = self.end - self.position
        if size > left:
            raise ProtocolViolation(f"a field of {size} bytes in a message that has {left} left")
        self._skipping = size

    def _to_tags(self, after: Callable[[Cursor], int]) -> None:
        """Continue with a section of tagged fields, if this version has them, and then with *after*."""
        self._after_tags = after
        self._step = self._tag_count if self._compact else after

    def _tag_count(self, cursor: Cursor) -> int:
        self._tags = cursor.tag_count()
        self._step = self._tag if self._tags else self._after_tags
        return 0

    def _tag(self, cursor: Cursor) -> int:
        cursor.uvarint()
        size = cursor.uvarint()
        self._tags -= 1
        if not self._tags:
            self._step = self._after_tags
        return size

    def _finish(self, _cursor: Cursor) -> int:
        self._is_finished = True
        return 0


class PartitionsWalk(MessageWalk):
    """
    A walk over a message that names partitions by topic: a count of topics, and in each one of partitions.

    A subclass begins with a step that sets `_topics` and returns `_next_topic()`. Its `_partition_begin`
    is the first step of each partition, and the last one ends with `_next_partition()`.
    """

    def __init__(self, size: int, *, compact: bool, by_id: bool) -> None:
        super().__init__(size, compact=compact)
        self._by_id = by_id
        self._topic: str | UUID = ""
        self._topics = 0
        self._topic_partitions = 0

    def _partition_begin(self, cursor: Cursor) -> int:
        raise NotImplementedError

    def _after_topics(self) -> int:
        """Set the step after the last topic."""
        self._to_tags(self._finish)
        return 0

    def _enter_topic(self) -> None:
        """Begin with a topic, whose name and count of partitions are known."""

    def _next_topic(self) -> int:
        if self._topics <= 0:
            return self._after_topics()
        self._step = self._topic_begin
        return 0

    def _topic_begin(self, cursor: Cursor) -> int:
        topic = cursor.topic(by_id=self._by_id, compact=self._compact)
        partitions = cursor.length(compact=self._compact)
        self._topics -= 1
        self._topic, self._topic_partitions = topic, partitions
        self._enter_topic()
        return self._next_partition()

    def _next_partition(self) -> int:
        if self._topic_partitions > 0:
            self._topic_partitions -= 1
            self._step = self._partition_begin
        else:
            self._to_tags(lambda _: self._next_topic())
        return 0
