"""
The partition manifest as bytes: an envelope (`TRDM`) around a compressed body.

In the body the live segments come first, and then the retired ones, batch by batch; the head has the numbers
of their rows.

`docs/formats.md` explains each field. A manifest that breaks a rule of `model.manifest` is refused both when
it is written and when it is read.

`encode_spillover` and `decode_spillover` do the same for a spillover manifest, in an envelope (`TRDS`). Equal
parts give equal bytes for every writer at every time: the document holds nothing about its writer. So its
checksum, which is part of its name, identifies its content.

The body of both is a head in JSON and segments in columns, compressed. Once inflated it is:

    u32         length of the head
    head        JSON: everything but the segments
    columns     each integer column as little-endian i64 differences to the row before,
                in the order of `model.segment_table.COLUMNS`; then the writers' numbers likewise
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, starmap
from operator import sub
from typing import Any

from crc32c import crc32c

from tieringd.errors import CorruptDataError
from tieringd.formats.envelope import seal, unseal
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Gap, RecordDeletion, Replacement, Retired, Unsettled
from tieringd.model.offset_translation import OffsetTranslation
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import NO_CRC, NO_TIMESTAMP, CrossingTransaction
from tieringd.model.segment_table import COLUMNS, SegmentTable
from tieringd.model.spillover import ExpiredSpillover, Spillover, SpilloverManifest, SpilloverName

BODY_BYTES_MAX = 1 << 30
"""An inflated body larger than this is an attack or a fault: a million rows take 80 MB."""
UNREADABLE = (ValueError, KeyError, TypeError, RecursionError, struct.error, zlib.error)
"""The errors that reading a malformed body may raise."""

_NEW_COLUMNS = {"broker_timestamp_ms": NO_TIMESTAMP, "index_crc32c": NO_CRC}
"""The columns that came with retention, and the value for rows from before."""
_LENGTH = struct.Struct(">I")
_VALUE_BYTES = 8

SPILLOVER_MAGIC = b"TRDS"
SPILLOVER_VERSION = 1
_SPILLOVER_KIND = "spillover manifest"

MAGIC = b"TRDM"
VERSION = 6
_SINCE_REPLACEMENTS = 2
"""The version that brought `began_at_ms`, `replacements` and `translation`."""
_SINCE_RETENTION = 3
"""The version that brought the fields below, the broker's timestamps and the indexes' checksums."""
_SINCE_SPILLOVER = 4
"""The version that brought `spillover` and `trimmed_offset`."""
_SINCE_WINNERS = 5
"""The version that brought `unsettled`, and `winners_end` of each retired batch."""
_SINCE_DELETION = 6
"""The version that brought `deletion`."""
_NEW_IN_RETENTION: dict[str, Any] = {
    "allowed_local_start_offset": None,
    "expired_at_ms": None,
    "retired": [],
    "crossing": [],
}


FIRST_COLUMNS = tuple(name for name in COLUMNS if name not in _NEW_COLUMNS)
"""The columns of the versions before retention."""


def pack_body(head: Mapping[str, Any], table: SegmentTable) -> bytes:
    """Return a body; *head* holds the table's number of rows and its writers."""
    text = json.dumps(head, sort_keys=True, separators=(",", ":")).encode()
    body = b"".join([_LENGTH.pack(len(text)), text, *_packed_columns(table)])
    return zlib.compress(body, level=6)


def unpack_body(packed: bytes) -> tuple[dict[str, Any], bytes]:
    """
    Return a body's head and the bytes of its columns.

    A malformed body raises one of `UNREADABLE`.
    """
    body = _inflate(packed)
    (head_bytes,) = _LENGTH.unpack_from(body)
    head = json.loads(body[_LENGTH.size : _LENGTH.size + head_bytes])
    if not isinstance(head, dict):
        raise TypeError("the head is not an object")
    return head, body[_LENGTH.size + head_bytes :]


def unpack_table(
    rows: int, columns: bytes, writers: Sequence[str], names: Sequence[str] = COLUMNS
) -> SegmentTable:
    """
    Return the table of *rows* rows. A column that the version did not have gets its default value.

    Raises:
        ValueError: The columns do not have that length, or hold impossible values.
    """
    width = rows * _VALUE_BYTES
    if len(columns) != width * (len(names) + 1):
        raise ValueError(f"{rows} rows do not have {len(columns)} bytes")
    view = memoryview(columns)
    values = [_sums(view[number * width : (number + 1) * width]) for number in range(len(names) + 1)]
    known: dict[str, Sequence[int]] = dict(zip(names, values[:-1], strict=True))
    for name, nothing in _NEW_COLUMNS.items():
        known.setdefault(name, [nothing] * rows)
    return SegmentTable.from_columns(known, values[-1], writers)


def _inflate(packed: bytes) -> bytes:
    inflater = zlib.decompressobj()
    body = inflater.decompress(packed, BODY_BYTES_MAX)
    if not inflater.eof or inflater.unused_data:
        raise ValueError("the compressed body is cut short, too long, or followed by other bytes")
    return body


def _packed_columns(table: SegmentTable) -> Iterator[bytes]:
    if len(table):  # The manifests of ten thousand first claims have no segment.
        yield from (_differences(table.column(name)) for name in COLUMNS)
        yield _differences(table.writer_numbers)


def _differences(column: Iterable[int]) -> bytes:
    values = list(column)
    return _little_endian(array("q", map(sub, values, [0, *values[:-1]]))).tobytes()


def _sums(data: memoryview) -> list[int]:
    differences = array("q")
    differences.frombytes(data)
    return list(accumulate(_little_endian(differences)))


def _little_endian(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values.byteswap()
    return values


def encode_spillover(part: SpilloverManifest) -> tuple[bytes, SpilloverName]:
    """
    Return *part* as bytes, and its name.

    Raises:
        ValueError: It breaks a rule, which is a fault of this program.
    """
    faults = part.faults()
    if faults:
        raise ValueError(f"refusing to write a spillover manifest that breaks its rules: {'; '.join(faults)}")
    # The head names only the writers of its own rows, in the order of the rows.
    numbers = dict.fromkeys(part.segments.writer_numbers)
    segments = part.segments.with_writers([part.segments.writers[number] for number in numbers])
    head = {
        "cluster": part.partition.cluster,
        "topic": part.partition.topic,
        "topic_id": part.partition.topic_id,
        "partition": part.partition.partition,
        "base_offset": part.base_offset,
        "next_offset": part.next_offset,
        "gaps": [[gap.base_offset, gap.last_offset, gap.reason, gap.recorded_at_ms] for gap in part.gaps],
        "previous": None if part.previous is None else name_fields(part.previous),
        "rows": len(segments),
        "writers": segments.writers,
    }
    data = seal(SPILLOVER_MAGIC, SPILLOVER_VERSION, pack_body(head, segments))
    return data, part.name(crc32c(data))


def decode_spillover(data: bytes, *, partition: TopicIdPartition, name: SpilloverName) -> SpilloverManifest:
    """
    Return the spillover manifest in *data*, which must have this partition and name.

    Raises:
        CorruptDataError: The bytes are not a whole, sound spillover manifest of a known version, or it
            has another name.
    """
    _version, packed = unseal(data, SPILLOVER_MAGIC, newest_version=SPILLOVER_VERSION, kind=_SPILLOVER_KIND)
    try:
        part = _part(*unpack_body(packed))
        faults = part.faults()
    except UNREADABLE as error:
        raise CorruptDataError(f"{_SPILLOVER_KIND} cannot be read: {error}") from error
    if faults:
        raise CorruptDataError(f"{_SPILLOVER_KIND} breaks its rules: {'; '.join(faults)}")
    if part.partition != partition or part.name(crc32c(data)) != name:
        raise CorruptDataError(
            f"{_SPILLOVER_KIND} of {part.partition} from {part.base_offset} has a wrong name"
        )
    return part


def name_fields(name: SpilloverName) -> list[int]:
    """Return a name in the form that heads hold."""
    return [name.base_offset, name.last_offset, name.base_timestamp_ms, name.max_timestamp_ms, name.crc32c]


def read_name(fields: Any) -> SpilloverName:
    """
    Return the name in a head's field.

    Raises:
        TypeError: The field is not a name.
    """
    name = SpilloverName(*fields)
    if not all(isinstance(one, int) for one in fields):
        raise TypeError(f"{fields!r} is not the name of a spillover manifest")
    return name


def _part(head: dict[str, Any], columns: bytes) -> SpilloverManifest:
    return SpilloverManifest(
        TopicIdPartition(head["cluster"], head["topic"], head["topic_id"], head["partition"]),
        base_offset=head["base_offset"],
        next_offset=head["next_offset"],
        segments=unpack_table(head["rows"], columns, head["writers"]),
        gaps=tuple(Gap(*fields) for fields in head["gaps"]),
        previous=None if head["previous"] is None else read_name(head["previous"]),
    )


def encode_manifest(manifest: PartitionManifest) -> bytes:
    """
    Return *manifest* as bytes.

    Raises:
        ValueError: It breaks a rule, which is a fault of this program.
    """
    faults = manifest.faults()
    if faults:
        raise ValueError(f"refusing to write a manifest that breaks its rules: {'; '.join(faults)}")
    # One table for all segments, so that each writer is named once.
    table = SegmentTable.joined([manifest.segments, *(one.segments for one in manifest.retired)])
    # The head keeps only writers of existing rows: a writer is a process, so there are ever new ones.
    table = table.with_writers([table.writers[number] for number in dict.fromkeys(table.writer_numbers)])
    return seal(MAGIC, VERSION, pack_body(_head(manifest, table.writers), table))


def decode_manifest(data: bytes) -> PartitionManifest:
    """
    Return the manifest in *data*.

    Raises:
        CorruptDataError: The bytes are not a whole, sound manifest of a known version.
    """
    version, packed = unseal(data, MAGIC, newest_version=VERSION, kind="partition manifest")
    try:
        head, columns = unpack_body(packed)
        if version < _SINCE_REPLACEMENTS:
            head = {**head, "began_at_ms": 0, "replacements": [], "translation": None}
        if version < _SINCE_RETENTION:
            head = {**head, **_NEW_IN_RETENTION}
        if version < _SINCE_SPILLOVER:
            # Earlier versions recorded no trims: no trim went past the stored offsets.
            head = {**head, "spillover": None, "trimmed_offset": head["next_offset"]}
        if version < _SINCE_WINNERS:
            head = {**head, "retired": [[*fields, 0] for fields in head["retired"]], "unsettled": None}
        if version < _SINCE_DELETION:
            head = {**head, "deletion": None}
        names = COLUMNS if version >= _SINCE_RETENTION else FIRST_COLUMNS
        manifest = _manifest(head, columns, names)
        faults = manifest.faults()
    except UNREADABLE as error:
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
        "retired": [[len(one.segments), one.retired_at_ms, one.winners_end] for one in manifest.retired],
        "writers": writers,
        "spillover": _spillover_head(manifest.spillover),
        "trimmed_offset": manifest.trimmed_offset,
        "unsettled": (
            [manifest.unsettled.base_offset, manifest.unsettled.winners_end] if manifest.unsettled else None
        ),
        "deletion": _deletions_head(manifest.deletions),
    }


def _manifest(head: dict[str, Any], columns: bytes, names: Sequence[str]) -> PartitionManifest:
    rows, retired = head["rows"], head["retired"]
    if min([rows, *(count for count, *_ in retired)]) < 0:
        raise ValueError("a number of rows is negative")
    segments = unpack_table(rows + sum(count for count, *_ in retired), columns, head["writers"], names)
    batches: list[Retired] = []
    left = segments.without_head(rows)
    for count, retired_at_ms, winners_end in retired:
        batches.append(Retired(left.head(count), int(retired_at_ms), int(winners_end)))
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
        spillover=_spillover(head["spillover"]),
        trimmed_offset=int(head["trimmed_offset"]),
        unsettled=None if head["unsettled"] is None else Unsettled(*map(int, head["unsettled"])),
        deletions=_deletions(head["deletion"]),
    )


def _deletions_head(deletions: tuple[RecordDeletion, ...]) -> list[int] | None:
    return [number for one in deletions for number in (one.before_offset, one.leader_epoch)] or None


def _deletions(head: list[int] | None) -> tuple[RecordDeletion, ...]:
    numbers = [] if head is None else [int(number) for number in head]
    return tuple(starmap(RecordDeletion, zip(numbers[::2], numbers[1::2], strict=True)))


def _spillover_head(spillover: Spillover | None) -> dict[str, Any] | None:
    if spillover is None:
        return None
    return {
        "begin_offset": spillover.begin_offset,
        "newest": name_fields(spillover.newest),
        "segments": spillover.segments,
        "size_bytes": spillover.size_bytes,
        "gap_offsets": spillover.gap_offsets,
        "retired": [[one.next_offset, one.retired_at_ms] for one in spillover.retired],
    }


def _spillover(head: dict[str, Any] | None) -> Spillover | None:
    if head is None:
        return None
    return Spillover(
        begin_offset=head["begin_offset"],
        newest=read_name(head["newest"]),
        segments=head["segments"],
        size_bytes=head["size_bytes"],
        gap_offsets=head["gap_offsets"],
        retired=tuple(ExpiredSpillover(*fields) for fields in head["retired"]),
    )


def _optional_int(value: Any) -> int | None:
    if value is not None and not isinstance(value, int):
        raise TypeError(f"{value!r} is not a number")
    return value
