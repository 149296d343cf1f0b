"""
A spillover manifest as bytes: an envelope (`TRDS`) around the body of `formats.segment_columns`.

The same part is the same bytes, whoever writes it and whenever: nothing in it tells of the writer. So
its checksum, which is part of its name, stands for what it holds.
"""

from __future__ import annotations

from typing import Any

from crc32c import crc32c

from tieringd.errors import CorruptDataError
from tieringd.formats.envelope import seal, unseal
from tieringd.formats.segment_columns import UNREADABLE, pack_body, unpack_body, unpack_table
from tieringd.model.manifest_parts import Gap
from tieringd.model.partition import TopicIdPartition
from tieringd.model.spillover import SpilloverManifest, SpilloverName

SPILLOVER_MAGIC = b"TRDS"
SPILLOVER_VERSION = 1
_SPILLOVER_KIND = "spillover manifest"


def encode_spillover(part: SpilloverManifest) -> tuple[bytes, SpilloverName]:
    """
    Return *part* as bytes, and its name.

    Raises:
        ValueError: It breaks a rule, which is a fault of this program.
    """
    faults = part.faults()
    if faults:
        raise ValueError(f"refusing to write a spillover manifest that breaks its rules: {'; '.join(faults)}")
    # Only the writers of its own rows are named, in the order of the rows.
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
    Return the spillover manifest that *data* holds, which is the one of this name.

    Raises:
        CorruptDataError: The bytes are not a whole, sound one of a version we know, or of another name.
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
    """Return a name as it stands in heads."""
    return [name.base_offset, name.last_offset, name.base_timestamp_ms, name.max_timestamp_ms, name.crc32c]


def read_name(fields: Any) -> SpilloverName:
    """
    Return the name that stands in a head.

    Raises:
        TypeError: That is no name.
    """
    name = SpilloverName(*fields)
    if not all(isinstance(one, int) for one in fields):
        raise TypeError(f"{fields!r} is no name of a spillover manifest")
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
