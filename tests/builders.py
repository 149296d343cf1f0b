"""Readable batches and segments for tests: every argument has a default that means "ordinary"."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from tieringd.formats.compression import Codec
from tieringd.formats.record_batch import NewRecord, encode_batch

if TYPE_CHECKING:
    from collections.abc import Iterable

GOLDEN = Path(__file__).parent / "golden"
"""Files that a real Kafka broker wrote; see the README there."""

DEFAULT_TIME_MS = 1_700_000_000_000

_OLD_BODY_V0 = struct.pack(">bbii", 0, 0, -1, 46) + b"x" * 46
_OLD_BODY_V1 = struct.pack(">bbqii", 1, 0, 1_700_000_000_000, -1, 46) + b"x" * 46
OLD_MESSAGE_V0 = struct.pack(">qiI", 5, 60, zlib.crc32(_OLD_BODY_V0)) + _OLD_BODY_V0
OLD_MESSAGE_V1 = struct.pack(">qiI", 5, 68, zlib.crc32(_OLD_BODY_V1)) + _OLD_BODY_V1
"""Messages of the formats before batches, built by hand: no broker since Kafka 4 writes them."""


def batch(
    base_offset: int = 0,
    values: Iterable[bytes | None] = (b"a", b"b", b"c"),
    *,
    keys: Iterable[bytes | None] | None = None,
    timestamp_ms: int = DEFAULT_TIME_MS,
    codec: Codec = Codec.NONE,
    **fields: object,
) -> bytes:
    """Return a batch of *values*, one millisecond apart; *fields* go to `encode_batch`."""
    rows = list(values)
    names = [b"k%d" % number for number in range(len(rows))] if keys is None else keys
    records = [
        NewRecord(value, key=key, timestamp_ms=timestamp_ms + number)
        for number, (key, value) in enumerate(zip(names, rows, strict=True))
    ]
    return encode_batch(base_offset, records, codec=codec, **fields)


def segment_bytes(
    base_offset: int = 0,
    *,
    batches: int = 4,
    records_per_batch: int = 3,
    value: bytes = b"v",
    timestamp_ms: int = DEFAULT_TIME_MS,
    **fields: object,
) -> bytes:
    """Return consecutive batches; the next offset is `base_offset + batches * records_per_batch`."""
    return b"".join(
        batch(
            base_offset + number * records_per_batch,
            [value] * records_per_batch,
            timestamp_ms=timestamp_ms + number * records_per_batch,
            **fields,
        )
        for number in range(batches)
    )


def golden_log(topic: str, base_offset: int = 0) -> bytes:
    """Return a segment's `.log` as a real broker wrote it."""
    return (GOLDEN / topic / f"{base_offset:020d}.log").read_bytes()
