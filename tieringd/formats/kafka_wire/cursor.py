"""
A position in bytes of Kafka's protocol, which never leaves them.

A cursor knows the protocol's primitives and no message. Reading past the end is an error of its own,
because a walk over a message that is still arriving only has to wait then.
"""

from __future__ import annotations

import struct
from typing import Any, Final
from uuid import UUID

from tieringd.errors import ProtocolViolation

MAX_STRING_BYTES: Final = 32_767
"""The limit of an int16 length. The compact form allows more, and no client uses that."""
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

    def skip_tags(self) -> None:
        """Skip a section of tagged fields."""
        for _ in range(self.uvarint()):
            self.uvarint()
            self.skip(self.uvarint())


def uvarint(value: int) -> bytes:
    """Return *value*, which is not negative, as an unsigned varint."""
    encoded = bytearray()
    while value >= 0x80:  # noqa: PLR2004  (seven bits a byte)
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
