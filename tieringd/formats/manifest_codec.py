"""
The partition manifest as bytes: an envelope (`TRDM`) around a compressed body.

The body, once inflated, is:

    u32         length of the head
    head        JSON: everything but the segments, and the number of rows
    columns     each integer column as little-endian i64 differences to the row before,
                in the order of `model.segment_table.COLUMNS`; then the writers' numbers likewise.
                The live segments come first, and then the retired ones, batch by batch

Differences of neighbouring rows are small and alike, which is what the compression lives on.
`docs/formats.md` says what each field means. A manifest that breaks a rule of
`model.manifest` is refused both when it is written and when it is read.
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from array import array
from itertools import accumulate
from operator import sub
from typing import TYPE_CHECKING, Any

from tieringd.errors import CorruptDataError
from tieringd.formats.envelope import seal, unseal
from tieringd.model.manifest import Gap, PartitionManifest, Replacement, Retired
from tieringd.model.offset_translation import OffsetTranslation
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import NO_CRC, NO_TIMESTAMP, CrossingTransaction
from tieringd.model.segment_table import COLUMNS, SegmentTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MAGIC = b"TRDM"
VERSION = 3
_SINCE_REPLACEMENTS = 2
"""The version that brought `began_at_ms`, `replacements` and `translation`."""
_SINCE_RETENTION = 3
"""The version that brought the fields below, the broker's timestamps and the indexes' checksums."""
_NEW_IN_RETENTION: dict[str, Any] = {
    "allowed_local_start_offset": None,
    "expired_at_ms": None,
    "retired": [],
    "crossing": [],
}
BODY_BYTES_MAX = 1 << 30
"""An inflated body larger than this is an attack or a fault: a million rows take 80 MB."""

_NEW_COLUMNS = {"broker_timestamp_ms": NO_TIMESTAMP, "index_crc32c": NO_CRC}
"""The columns that came with retention, and what stands in for a value where there was none."""
_LENGTH = struct.Struct(">I")
_VALUE_BYTES = 8


def encode_manifest(manifest: PartitionManifest) -> bytes:
    """
    Return *manifest* as bytes.

    Raises:
        ValueError: It breaks a rule, which is a fault of this program.
    """
    faults = manifest.faults()
    if faults:
        raise ValueError(f"refusing to write a manifest that breaks its rules: {'; '.join(faults)}")
    # One table for all, so that writers are named once.
    table = manifest.segments.appended(segment for one in manifest.retired for segment in one.segments)
    head = json.dumps(_head(manifest, table.writers), sort_keys=True, separators=(",", ":")).encode()
    columns = [table.column(name) for name in COLUMNS] + [table.writer_numbers]
    body = b"".join([_LENGTH.pack(len(head)), head, *(_differences(column) for column in columns)])
    return seal(MAGIC, VERSION, zlib.compress(body, level=6))


def decode_manifest(data: bytes) -> PartitionManifest:
    """
    Return the manifest that *data* holds.

    Raises:
        CorruptDataError: The bytes are not a whole, sound manifest of a version we know.
    """
    version, packed = unseal(data, MAGIC, newest_version=VERSION, kind="partition manifest")
    try:
        body = _inflate(packed)
        (head_bytes,) = _LENGTH.unpack_from(body)
        head = json.loads(body[_LENGTH.size : _LENGTH.size + head_bytes])
        if version < _SINCE_REPLACEMENTS:
            head = {**head, "began_at_ms": 0, "replacements": [], "translation": None}
        if version < _SINCE_RETENTION:
            head = {**head, **_NEW_IN_RETENTION}
        is_known = version >= _SINCE_RETENTION
        names = [name for name in COLUMNS if is_known or name not in _NEW_COLUMNS]
        manifest = _manifest(head, body[_LENGTH.size + head_bytes :], names)
        faults = manifest.faults()
    except (ValueError, KeyError, TypeError, RecursionError, struct.error, zlib.error) as error:
        raise CorruptDataError(f"partition manifest cannot be read: {error}") from error
    if faults:
        raise CorruptDataError(f"partition manifest breaks its rules: {'; '.join(faults)}")
    return manifest


def _head(manifest: PartitionManifest, writers: tuple[str, ...]) -> dict[str, Any]:
    partition = manifest.partition
    return {
        "cluster": partition.cluster,
        "topic": partition.topic,
        "topic_id": partition.topic_id,
        "partition": partition.partition,
        "start_offset": manifest.start_offset,
        "next_offset": manifest.next_offset,
        "leader_epoch": manifest.leader_epoch,
        "writer_id": manifest.writer_id,
        "commit_number": manifest.commit_number,
        "committed_at_ms": manifest.committed_at_ms,
        "began_at_ms": manifest.began_at_ms,
        "epochs": manifest.epochs,
        "gaps": [[gap.base_offset, gap.last_offset, gap.reason, gap.recorded_at_ms] for gap in manifest.gaps],
        "replacements": [
            [one.base_offset, one.last_offset, one.leader_epoch, one.replaced_at_ms]
            for one in manifest.replacements
        ],
        "translation": (
            [manifest.translation.raw_offset, manifest.translation.delta] if manifest.translation else None
        ),
        "allowed_local_start_offset": manifest.allowed_local_start_offset,
        "expired_at_ms": manifest.expired_at_ms,
        "crossing": [
            [one.producer_id, one.first_offset, one.marker_offset, one.leader_epoch]
            for one in manifest.crossing
        ],
        "rows": len(manifest.segments),
        "retired": [[len(one.segments), one.retired_at_ms] for one in manifest.retired],
        "writers": writers,
    }


def _manifest(head: dict[str, Any], columns: bytes, names: Sequence[str]) -> PartitionManifest:
    rows, retired = head["rows"], head["retired"]
    if min([rows, *(count for count, _ in retired)]) < 0:
        raise ValueError("a number of rows is negative")
    segments = _table(rows + sum(count for count, _ in retired), columns, names, head["writers"])
    batches: list[Retired] = []
    left = segments.without_head(rows)
    for count, retired_at_ms in retired:
        batches.append(Retired(left.head(count), int(retired_at_ms)))
        left = left.without_head(count)
    return PartitionManifest(
        partition=TopicIdPartition(head["cluster"], head["topic"], head["topic_id"], head["partition"]),
        start_offset=head["start_offset"],
        next_offset=head["next_offset"],
        leader_epoch=head["leader_epoch"],
        writer_id=head["writer_id"],
        commit_number=head["commit_number"],
        committed_at_ms=head["committed_at_ms"],
        began_at_ms=head["began_at_ms"],
        epochs=tuple((epoch, start) for epoch, start in head["epochs"]),
        segments=segments.head(rows),
        gaps=tuple(Gap(*fields) for fields in head["gaps"]),
        translation=None if head["translation"] is None else OffsetTranslation(*head["translation"]),
        replacements=tuple(Replacement(*fields) for fields in head["replacements"]),
        allowed_local_start_offset=_optional_int(head["allowed_local_start_offset"]),
        expired_at_ms=_optional_int(head["expired_at_ms"]),
        retired=tuple(batches),
        crossing=tuple(CrossingTransaction(*fields) for fields in head["crossing"]),
    )


def _table(rows: int, columns: bytes, names: Sequence[str], writers: Sequence[str]) -> SegmentTable:
    """Return the table of *rows* rows; a column that the version did not have holds nothing known."""
    width = rows * _VALUE_BYTES
    if len(columns) != width * (len(names) + 1):
        raise ValueError(f"{rows} rows do not take {len(columns)} bytes")
    values = [_sums(columns[number * width :][:width]) for number in range(len(names) + 1)]
    known: dict[str, Sequence[int]] = dict(zip(names, values[:-1], strict=True))
    for name, nothing in _NEW_COLUMNS.items():
        known.setdefault(name, [nothing] * rows)
    return SegmentTable.from_columns(known, values[-1], writers)


def _optional_int(value: Any) -> int | None:
    if value is not None and not isinstance(value, int):
        raise TypeError(f"{value!r} is not a number")
    return value


def _inflate(packed: bytes) -> bytes:
    inflater = zlib.decompressobj()
    body = inflater.decompress(packed, BODY_BYTES_MAX)
    if not inflater.eof or inflater.unused_data:
        raise ValueError("the compressed body is cut short, too long, or followed by other bytes")
    return body


def _differences(column: Iterable[int]) -> bytes:
    values = list(column)
    return _little_endian(array("q", map(sub, values, [0, *values[:-1]]))).tobytes()


def _sums(data: bytes) -> list[int]:
    differences = array("q")
    differences.frombytes(data)
    return list(accumulate(_little_endian(differences)))


def _little_endian(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values.byteswap()
    return values
