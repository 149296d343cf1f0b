"""
Access times: when each file of the chunk cache was last read, kept over restarts.

An envelope (`TRDA`) around compressed text: one line per file with its time in milliseconds, a space,
and its name. Access times are advice only: a cache that has lost them evicts in a worse order until it
has recorded new ones.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from tieringd.errors import CorruptDataError
from tieringd.formats.envelope import seal, unseal

MAGIC = b"TRDA"
VERSION = 1

_FASTEST = 1
_MAX_BYTES = 1 << 30
"""Ten times the size of a million names."""


def encode_access_times(times: Mapping[str, int]) -> bytes:
    """Return *times* (milliseconds by name) as bytes."""
    text = "\n".join(f"{time_ms} {name}" for name, time_ms in times.items())
    return seal(MAGIC, VERSION, zlib.compress(text.encode(), _FASTEST))


def decode_access_times(data: bytes) -> dict[str, int]:
    """
    Return the times in *data*, in milliseconds by name.

    Raises:
        CorruptDataError: The bytes are not access times of a known version.
    """
    _version, body = unseal(data, MAGIC, newest_version=VERSION, kind="list of access times")
    try:
        return _times(_inflated(body).decode())
    except (ValueError, zlib.error) as error:
        raise CorruptDataError(f"list of access times cannot be read: {error}") from error


def _inflated(body: bytes) -> bytes:
    inflate = zlib.decompressobj()
    data = inflate.decompress(body, _MAX_BYTES)
    if not inflate.eof:
        raise ValueError("the file is incomplete")
    return data


def _times(text: str) -> dict[str, int]:
    times = {}
    for line in text.split("\n") if text else ():
        time_ms, _, name = line.partition(" ")
        times[name] = int(time_ms)
    return times
