"""Bytes made wrong in the ways in which disks, networks and other programs make them wrong."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Callable, Sequence

_INTERESTING = (
    0,
    1,
    -1,
    2,
    7,
    127,
    128,
    255,
    256,
    32767,
    65535,
    2**31 - 1,
    -(2**31),
    2**32 - 1,
    2**63 - 1,
    -(2**63),
)
_WIDTHS = {1: "b", 2: "h", 4: "i", 8: "q"}
_NUMBER = re.compile(rb"-?\d+")
_TEXTS = (
    b"null",
    b"true",
    b"{}",
    b"[]",
    b'""',
    b"NaN",
    b"1e999",
    b"-0",
    b"[" * 2_000,
    b'{"":' * 2_000,
    b"\xff\xfe",
    b"\x00",
)
_MOST_BYTES = 1 << 20


def mutated(data: bytes, others: Sequence[bytes], draw: random.Random) -> bytes:
    """Return *data* with one to four changes. *others* are documents of the same kind, to take parts of."""
    for _ in range(draw.choice((1, 1, 1, 2, 3, 4))):
        data = draw.choice(_CHANGES)(data, others, draw)
    return data[:_MOST_BYTES]


def _flip_bit(data: bytes, _: Sequence[bytes], draw: random.Random) -> bytes:
    if not data:
        return data
    changed = bytearray(data)
    changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _put_integer(data: bytes, _: Sequence[bytes], draw: random.Random) -> bytes:
    width = draw.choice(tuple(_WIDTHS))
    value = draw.choice((*_INTERESTING, len(data), len(data) - 1, len(data) + 1, draw.getrandbits(63)))
    bits = 8 * width
    value = (value + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)
    packed = struct.pack(draw.choice("<>") + _WIDTHS[width], value)
    at = draw.randrange(len(data) + 1)
    return data[:at] + packed + data[at + width :]


def _cut(data: bytes, _: Sequence[bytes], draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def _remove(data: bytes, _: Sequence[bytes], draw: random.Random) -> bytes:
    begin, end = _range(data, draw)
    return data[:begin] + data[end:]


def _repeat(data: bytes, _: Sequence[bytes], draw: random.Random) -> bytes:
    begin, end = _range(data, draw)
    return data[:end] + data[begin:end] * draw.choice((1, 1, 2, 50)) + data[end:]


def _insert(data: bytes, _: Sequence[bytes], draw: random.Random) -> bytes:
    at = draw.randrange(len(data) + 1)
    return data[:at] + draw.randbytes(draw.choice((1, 2, 8, 100))) + data[at:]


def _splice(data: bytes, others: Sequence[bytes], draw: random.Random) -> bytes:
    other = draw.choice(others)
    return data[: draw.randrange(len(data) + 1)] + other[draw.randrange(len(other) + 1) :]


def _put_number(data: bytes, _: Sequence[bytes], draw: random.Random) -> bytes:
    """Change a number that is written in digits."""
    found = list(_NUMBER.finditer(data))
    if not found:
        return data
    one = draw.choice(found)
    number = str(draw.choice((*_INTERESTING, 10**30, 10**400))).encode()
    return data[: one.start()] + number + data[one.end() :]


def _put_text(data: bytes, _: Sequence[bytes], draw: random.Random) -> bytes:
    begin, end = _range(data, draw)
    return data[:begin] + draw.choice(_TEXTS) + data[end:]


def _zero(data: bytes, _: Sequence[bytes], draw: random.Random) -> bytes:
    """Zero a range, as a crash leaves a file that had been allocated."""
    begin, end = _range(data, draw)
    return data[:begin] + bytes(end - begin) + data[end:]


def _range(data: bytes, draw: random.Random) -> tuple[int, int]:
    begin = draw.randrange(len(data) + 1)
    return begin, min(len(data), begin + draw.choice((1, 2, 4, 8, 30, 200)))


_CHANGES: tuple[Callable[[bytes, Sequence[bytes], random.Random], bytes], ...] = (
    _flip_bit,
    _flip_bit,
    _put_integer,
    _put_integer,
    _cut,
    _remove,
    _repeat,
    _insert,
    _splice,
    _put_number,
    _put_text,
    _zero,
)
