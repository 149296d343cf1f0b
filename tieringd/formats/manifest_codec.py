"""
The partition manifest as bytes: an envelope (`TRDM`) around a compressed body.

The body is that of `formats.segment_columns`. The live segments come first, and then the retired
ones, batch by batch; the head has the numbers of their rows.

`docs/formats.md` says what each field means. A manifest that breaks a rule of
`model.manifest` is refused both when it is written and when it is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tieringd.errors import CorruptDataError
from tieringd.formats.envelope import seal, unseal
from tieringd.formats.segment_columns import (
    FIRST_COLUMNS,
    UNREADABLE,
    pack_body,
    unpack_body,
    unpack_table,
)
from tieringd.formats.spillover_codec import name_fields, read_name
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Gap, Replacement, Retired, Unsettled
from tieringd.model.offset_translation import OffsetTranslation
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import CrossingTransaction
from tieringd.model.segment_table import COLUMNS, SegmentTable
from tieringd.model.spillover import ExpiredSpillover, Spillover

if TYPE_CHECKING:
    from collections.abc import Sequence

MAGIC = b"TRDM"
VERSION = 5
_SINCE_REPLACEMENTS = 2
"""The version that brought `began_at_ms`, `replacements` and `translation`."""
_SINCE_RETENTION = 3
"""The version that brought the fields below, the broker's timestamps and the indexes' checksums."""
_SINCE_SPILLOVER = 4
"""The version that brought `spillover` and `trimmed_offset`."""
_SINCE_WINNERS = 5
"""The version that brought `unsettled`, and the winners' end of what is retired."""
_NEW_IN_RETENTION: dict[str, Any] = {
    "allowed_local_start_offset": None,
    "expired_at_ms": None,
    "retired": [],
    "crossing": [],
}


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
    table = SegmentTable.joined([manifest.segments, *(one.segments for one in manifest.retired)])
    # Only those of them that a row still has: a writer is a process, and they come and go.
    table = table.with_writers([table.writers[number] for number in dict.fromkeys(table.writer_numbers)])
    return seal(MAGIC, VERSION, pack_body(_head(manifest, table.writers), table))


def decode_manifest(data: bytes) -> PartitionManifest:
    """
    Return the manifest that *data* holds.

    Raises:
        CorruptDataError: The bytes are not a whole, sound manifest of a version we know.
    """
    version, packed = unseal(data, MAGIC, newest_version=VERSION, kind="partition manifest")
    try:
        head, columns = unpack_body(packed)
        if version < _SINCE_REPLACEMENTS:
            head = {**head, "began_at_ms": 0, "replacements": [], "translation": None}
        if version < _SINCE_RETENTION:
            head = {**head, **_NEW_IN_RETENTION}
        if version < _SINCE_SPILLOVER:
            # Nobody noted our trims before: none went past what was stored.
            head = {**head, "spillover": None, "trimmed_offset": head["next_offset"]}
        if version < _SINCE_WINNERS:
            head = {**head, "retired": [[*fields, 0] for fields in head["retired"]], "unsettled": None}
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
    )


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
