"""
Redpanda segments for tests, built with a header layout of their own.

`RedpandaLog` appends batches as a partition's leader would, keeps count of both kinds of
offsets, and knows what a Kafka client would be served.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from crc32c import crc32c

from tests.builders import DEFAULT_TIME_MS
from tieringd.formats.compression import Codec
from tieringd.formats.record_batch import COMMIT_MARKER, NewRecord, encode_batch, encode_marker

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

DATA, CONFIGURATION, TX_FENCE, ARCHIVAL, PLACEHOLDER = 1, 2, 10, 19, 29

_AFTER_HEADER_CRC = struct.Struct("<iqbIhiqqqhii")
_CHECKED_FIELDS = struct.Struct(">hiqqqhii")
_KAFKA_HEADER_BYTES = 61


def raw_batch(kafka_batch: bytes, *, raw_offset: int, batch_type: int = DATA, **changed: int) -> bytes:
    """Return a Kafka batch as Redpanda stores it; *changed* header fields get right checksums."""
    names = ("attributes", "last_offset_delta", "base_time", "max_time")
    names += ("producer_id", "producer_epoch", "base_sequence", "record_count")
    fields = dict(zip(names, _CHECKED_FIELDS.unpack_from(kafka_batch, 21), strict=True))
    fields |= {name: value for name, value in changed.items() if name in fields}
    body = kafka_batch[_KAFKA_HEADER_BYTES:]
    size_bytes = changed.get("size_bytes", 61 + len(body))
    crc = crc32c(_CHECKED_FIELDS.pack(*fields.values()) + body)
    rest = _AFTER_HEADER_CRC.pack(size_bytes, raw_offset, batch_type, crc, *fields.values())
    return struct.pack("<I", crc32c(rest)) + rest + body


def zero_tail(size_bytes: int = 8192) -> bytes:
    """Return room that was allocated ahead, less of it than Redpanda takes."""
    return bytes(size_bytes)


def base_index(
    *,
    base_offset: int = 0,
    max_offset: int = 0,
    times_ms: tuple[int, int] = (DEFAULT_TIME_MS, DEFAULT_TIME_MS),
    broker_time_ms: int | None = None,
    entries: Sequence[tuple[int, int, int]] = ((0, 1 << 31, 0),),
    flags: Sequence[bool] = (True, True, False),
    compactible: int | None = 0,
    compacted_ms: int | None = None,
    tombstones: bool = True,
    version: int = 9,
    needed: int = 4,
    more_fields: bytes = b"",
    more: bytes = b"",
) -> bytes:
    """Return the `base_index` of a segment as Redpanda of *version* writes it."""
    fields = bytes(4)
    for value in (base_offset, max_offset, *times_ms):
        fields += _little(value, 8)
    for column, size_bytes in zip(range(3), (4, 4, 8), strict=True):
        fields += _little(len(entries), 4)
        fields += b"".join(_little(entry[column], size_bytes) for entry in entries)
    added = {
        5: bytes(flags),
        6: _optional(broker_time_ms),
        7: _optional(compactible),
        8: _optional(compacted_ms),
        9: bytes([tombstones]),
    }
    fields += b"".join(part for since, part in added.items() if version >= since)
    return index_envelope(fields + more_fields, version=version, needed=needed, more=more)


def index_envelope(fields: bytes, *, version: int = 9, needed: int = 4, more: bytes = b"") -> bytes:
    """Return any *fields* with a right checksum and right lengths."""
    rest = _little(len(fields), 4) + fields + _little(crc32c(fields), 4) + more
    return bytes([version, needed]) + _little(len(rest), 4) + rest


def _little(value: int, size_bytes: int) -> bytes:
    return value.to_bytes(size_bytes, "little", signed=value < 0)


def _optional(value: int | None) -> bytes:
    return b"\x00" if value is None else b"\x01" + _little(value, 8)


@dataclass
class RedpandaLog:
    """A log in the making: one raw segment after the other, and the Kafka view of it all."""

    term: int = 1
    next_raw_offset: int = 0
    delta: int = 0
    segments: list[Segment] = field(default_factory=list)
    served: list[bytes] = field(default_factory=list)
    """The data batches in Kafka's format, at their Kafka offsets."""

    @property
    def next_offset(self) -> int:
        return self.next_raw_offset - self.delta

    def roll(self, *, term: int | None = None) -> RedpandaLog:
        """Begin a segment; with another *term*, as its new leader does, with a configuration."""
        elected = term is not None and (term != self.term or not self.segments)
        self.term = self.term if term is None else term
        self.segments.append(Segment(self.next_raw_offset, self.delta, self.term))
        return self.bookkeeping() if elected else self

    def data(
        self, records: Sequence[NewRecord | bytes], *, codec: Codec = Codec.NONE, **fields: object
    ) -> RedpandaLog:
        """Append a batch of a client's records."""
        rows = [
            NewRecord(row, timestamp_ms=DEFAULT_TIME_MS) if isinstance(row, bytes) else row for row in records
        ]
        kafka = encode_batch(self.next_offset, rows, codec=codec, leader_epoch=self.term, **fields)
        return self._append(kafka, DATA)

    def marker(self, producer_id: int, marker: int = COMMIT_MARKER) -> RedpandaLog:
        """Append the control batch that ends a transaction."""
        kafka = encode_marker(
            self.next_offset, producer_id=producer_id, marker=marker, leader_epoch=self.term
        )
        return self._append(kafka, DATA)

    def bookkeeping(self, batch_type: int = CONFIGURATION, *, records: int = 1) -> RedpandaLog:
        """Append a batch that no client receives; whether it counts depends on its type."""
        rows = [NewRecord(b"own", key=b"%d" % number) for number in range(records)]
        last = max(records - 1, 0)
        return self._append(encode_batch(0, rows, last_offset_delta=last), batch_type)

    def hole(self, offsets: int) -> RedpandaLog:
        """Leave out offsets, as compaction does."""
        self.next_raw_offset += offsets
        return self

    def allocated(self, size_bytes: int = 8192) -> RedpandaLog:
        """Append zeros to the last segment."""
        self.segments[-1].data += zero_tail(size_bytes)
        return self

    def write_to(self, directory: Path) -> RedpandaLog:
        """Write every segment's file, and an index beside it."""
        directory.mkdir(parents=True, exist_ok=True)
        ends = [*(segment.raw_base_offset for segment in self.segments[1:]), self.next_raw_offset]
        for segment, end in zip(self.segments, ends, strict=True):
            (directory / segment.name).write_bytes(segment.data)
            index = base_index(
                base_offset=segment.raw_base_offset,
                max_offset=end - 1,
                broker_time_ms=segment.broker_time_ms,
            )
            (directory / segment.index_name).write_bytes(index)
        return self

    def _append(self, kafka: bytes, batch_type: int) -> RedpandaLog:
        if not self.segments:
            self.roll()
        raw = raw_batch(kafka, raw_offset=self.next_raw_offset, batch_type=batch_type)
        self.segments[-1].data += raw
        self.segments[-1].batches.append(raw)
        (last_offset_delta,) = struct.unpack_from(">i", kafka, 23)
        self.next_raw_offset += last_offset_delta + 1
        if batch_type in {CONFIGURATION, ARCHIVAL}:
            self.delta += last_offset_delta + 1
        if batch_type == DATA:
            self.served.append(kafka)
            self.segments[-1].served.append(kafka)
        return self


@dataclass
class Segment:
    """One file of a `RedpandaLog`."""

    raw_base_offset: int
    delta: int
    """At the base."""
    term: int
    data: bytes = b""
    batches: list[bytes] = field(default_factory=list)
    served: list[bytes] = field(default_factory=list)
    broker_time_ms: int | None = None
    """What its index says of the last append; None where it says nothing."""

    @property
    def base_offset(self) -> int:
        return self.raw_base_offset - self.delta

    @property
    def name(self) -> str:
        return f"{self.raw_base_offset}-{self.term}-v1.log"

    @property
    def index_name(self) -> str:
        return f"{self.raw_base_offset}-{self.term}-v1.base_index"

    @property
    def kafka(self) -> bytes:
        """What the segment holds for clients, byte for byte."""
        return b"".join(self.served)

    def damaged(self, position: int, mask: int = 0xFF) -> Segment:
        """Return the segment with one byte changed."""
        data = bytearray(self.data)
        data[position] ^= mask
        return replace(self, data=bytes(data))


def ordinary_log(values: Iterable[bytes] = (b"a", b"b", b"c", b"d")) -> RedpandaLog:
    """Return a log of two terms and three segments, the last one active with room allocated."""
    log = RedpandaLog().roll(term=1)
    rows = list(values)
    log.data(rows).bookkeeping(ARCHIVAL, records=2).data(rows)
    log.roll().data(rows)
    log.roll(term=3).data(rows).allocated()
    return log
