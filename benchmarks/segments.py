"""
Segments to upload: a partition's directory of real v2 batches, with the side files a broker writes.

The batches are what a producer with the default `batch.size` sends without compression: 16 KiB, of
records of 1 KiB whose values are random. Each segment differs from every other by its offsets.
"""

from __future__ import annotations

import random
import struct
from functools import cache
from typing import TYPE_CHECKING

from tieringd.formats.index_files import OffsetEntry, TimeEntry, encode_offset_index, encode_time_index
from tieringd.formats.record_batch import NewRecord, encode_batch

if TYPE_CHECKING:
    from pathlib import Path

SEGMENT_BYTES = 64 << 20
RECORDS_PER_BATCH = 16
_VALUE_BYTES = 992
"""With a key, the record's own header and a sixteenth of the batch's, 1 KiB at most."""

_TIME_MS = 1_700_000_000_000
_OFFSET = struct.Struct(">q")


def write_partition(directory: Path, *, segments: int, segment_bytes: int = SEGMENT_BYTES) -> list[Path]:
    """
    Write *segments* closed segments and an empty active one; return the closed ones' `.log` files.

    Each has as many batches as fit into *segment_bytes*.
    """
    directory.mkdir(parents=True)
    data = bytearray()
    positions: list[int] = []
    for batch in _batches(segment_bytes):
        positions.append(len(data))
        data += batch
    records = len(positions) * RECORDS_PER_BATCH
    logs = [
        _write_segment(directory, number * records, data=data, positions=positions)
        for number in range(segments)
    ]
    (directory / f"{segments * records:020d}.log").touch()
    return logs


@cache
def _batches(segment_bytes: int) -> list[bytes]:
    values = random.Random(20240229)
    batches: list[bytes] = []
    size_bytes = 0
    while True:
        offset = len(batches) * RECORDS_PER_BATCH
        records = [
            NewRecord(
                values.randbytes(_VALUE_BYTES),
                key=b"%016d" % (offset + at),
                timestamp_ms=_TIME_MS + offset + at,
            )
            for at in range(RECORDS_PER_BATCH)
        ]
        batch = encode_batch(offset, records)
        size_bytes += len(batch)
        if size_bytes > segment_bytes:
            return batches
        batches.append(batch)


def _write_segment(directory: Path, base_offset: int, *, data: bytearray, positions: list[int]) -> Path:
    last_offsets = []
    for number, position in enumerate(positions):
        first_offset = base_offset + number * RECORDS_PER_BATCH
        # A broker assigns the offsets of a batch; they stand outside the batch's checksum.
        _OFFSET.pack_into(data, position, first_offset)
        last_offsets.append(first_offset + RECORDS_PER_BATCH - 1)
    log = directory / f"{base_offset:020d}.log"
    log.write_bytes(data)
    # `index.interval.bytes` is 4096: a broker has an entry for each batch but the first.
    offsets = [OffsetEntry(last, at) for last, at in zip(last_offsets[1:], positions[1:], strict=True)]
    times = [TimeEntry(_TIME_MS + last - base_offset, last) for last in last_offsets[1:]]
    log.with_suffix(".index").write_bytes(encode_offset_index(offsets, base_offset=base_offset))
    log.with_suffix(".timeindex").write_bytes(encode_time_index(times, base_offset=base_offset))
    return log
