"""
What is wrong with an archive, given what was seen of it: facts in, findings out.

A finding names one object, says in words what is wrong, and what an operator does about it. Nothing
here reads anything, and nothing decides whether a finding still holds: archives change while they are
looked at, and who looks sees to that (`housekeeping`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from tieringd.formats.object_keys import data_key, index_key, manifest_key
from tieringd.model.segment import NO_CRC

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.partition import TopicIdPartition
    from tieringd.model.segment import RemoteSegment
    from tieringd.model.spillover import Spillover, SpilloverManifest


class FaultKind(StrEnum):
    """The kinds of faults, as metrics and reports name them."""

    DATA_MISSING = "data_missing"
    DATA_SIZE = "data_size"
    DATA_CHECKSUM = "data_checksum"
    DATA_CONTENT = "data_content"
    """The batches inside are wrong, or not those of this segment."""
    INDEX_MISSING = "index_missing"
    INDEX_SIZE = "index_size"
    INDEX_CHECKSUM = "index_checksum"
    INDEX_CONTENT = "index_content"
    """It cannot be read, or tells other things than its data object."""
    MANIFEST_MISSING = "manifest_missing"
    MANIFEST_DAMAGED = "manifest_damaged"
    MANIFEST_RULES = "manifest_rules"
    """Gaps that are not recorded, overlaps, or another rule of manifests that is broken."""
    SPILLOVER_MISSING = "spillover_missing"
    SPILLOVER_DAMAGED = "spillover_damaged"
    SPILLOVER_DISAGREES = "spillover_disagrees"
    """The live manifest says other things of the spilled part than that itself."""
    TOPIC_MANIFEST_MISSING = "topic_manifest_missing"
    TOPIC_MANIFEST_DAMAGED = "topic_manifest_damaged"


DATA_FAULTS: Final = frozenset(
    {FaultKind.DATA_MISSING, FaultKind.DATA_SIZE, FaultKind.DATA_CHECKSUM, FaultKind.DATA_CONTENT}
)
INDEX_FAULTS: Final = frozenset(
    {FaultKind.INDEX_MISSING, FaultKind.INDEX_SIZE, FaultKind.INDEX_CHECKSUM, FaultKind.INDEX_CONTENT}
)

_FROM_VERSIONS = "Bring the object back from the bucket's older versions or a copy of the bucket"
_DATA_ACTION = (
    "Run `tieringd archive scrub --fix` on a broker that still holds these offsets. If none does: "
    f"{_FROM_VERSIONS[0].lower()}{_FROM_VERSIONS[1:]}"
)
_ACTIONS: Final = {
    **dict.fromkeys(DATA_FAULTS, _DATA_ACTION),
    **dict.fromkeys(
        INDEX_FAULTS,
        "Run `tieringd archive scrub --fix`, best on a broker that still holds these offsets: "
        "the index is built again",
    ),
    FaultKind.MANIFEST_MISSING: f"{_FROM_VERSIONS}, and until then delete nothing of this partition",
    FaultKind.MANIFEST_DAMAGED: _FROM_VERSIONS,
    FaultKind.MANIFEST_RULES: "Report it: no tieringd writes this. Bring back an older version of it",
    FaultKind.SPILLOVER_MISSING: _FROM_VERSIONS,
    FaultKind.SPILLOVER_DAMAGED: _FROM_VERSIONS,
    FaultKind.SPILLOVER_DISAGREES: "Report it: no tieringd writes this",
    FaultKind.TOPIC_MANIFEST_MISSING: (
        "A daemon that archives the topic writes it again; if none does, bring the object back, or let "
        "`tieringd archive scrub --fix` put what no manifest names into quarantine"
    ),
    FaultKind.TOPIC_MANIFEST_DAMAGED: _FROM_VERSIONS,
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with one object."""

    kind: FaultKind
    key: str
    detail: str
    partition: TopicIdPartition | None = None
    segment: RemoteSegment | None = None
    """Whose data or index it is, as the manifest has it."""

    @property
    def action(self) -> str:
        """Return what an operator does about it."""
        return _ACTIONS[self.kind]

    def __str__(self) -> str:
        offsets = (
            f", offsets {self.segment.base_offset} to {self.segment.last_offset}" if self.segment else ""
        )
        return f"{self.detail} (in {self.key}{offsets})"


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of one object after a look."""

    size_bytes: int | None
    """None: there is no such object."""
    crc32c: int | None = None
    """Of its bytes; None where neither the store told it nor anybody read them."""
    content_fault: str = ""
    """What reading it showed to be wrong, in words."""


def segment_findings(
    partition: TopicIdPartition, segment: RemoteSegment, *, data: Seen, index: Seen
) -> tuple[Finding, ...]:
    """Return what is wrong with a segment's objects: at most one finding for each of the two."""
    wrong_data = _object_fault(data, size_bytes=segment.size_bytes, crc32c=segment.crc32c, name="object")
    wrong_index = _object_fault(
        index, size_bytes=segment.index_size_bytes, crc32c=segment.index_crc32c, name="index"
    )
    found = []
    if wrong_data is not None:
        fault, detail = wrong_data
        key = data_key(partition, segment)
        found.append(Finding(FaultKind(f"data_{fault}"), key, detail, partition, segment))
    if wrong_index is not None:
        fault, detail = wrong_index
        key = index_key(partition, segment)
        found.append(Finding(FaultKind(f"index_{fault}"), key, detail, partition, segment))
    return tuple(found)


def _object_fault(seen: Seen, *, size_bytes: int, crc32c: int, name: str) -> tuple[str, str] | None:
    """Return what is wrong with an object: the fault, and in words."""
    if seen.size_bytes is None:
        return "missing", f"the {name} is missing"
    if seen.size_bytes != size_bytes:
        return "size", f"the {name} has {seen.size_bytes} bytes and the manifest says {size_bytes}"
    # What is wrong inside is more telling than that the checksum of the whole differs as well.
    if seen.content_fault:
        return "content", seen.content_fault
    if seen.crc32c is not None and crc32c not in {NO_CRC, seen.crc32c}:
        return "checksum", f"the {name} has checksum {seen.crc32c:08x} and the manifest says {crc32c:08x}"
    return None


def manifest_findings(manifest: PartitionManifest) -> tuple[Finding, ...]:
    """Return which rules of manifests a live one breaks: gaps, overlaps, and what is out of order."""
    key = manifest_key(manifest.partition)
    return tuple(
        Finding(FaultKind.MANIFEST_RULES, key, fault, manifest.partition) for fault in manifest.faults()
    )


def twice_named_findings(
    manifest: PartitionManifest, parts: Iterable[SpilloverManifest]
) -> tuple[Finding, ...]:
    """Return which segments are held in *parts*, and retired by the live manifest: they would be deleted."""
    retired = [one for group in manifest.retired for one in group.segments]
    return tuple(
        Finding(
            FaultKind.MANIFEST_RULES,
            manifest_key(manifest.partition),
            f"segment {one.base_offset} is both spilled and retired",
            manifest.partition,
        )
        for part in parts
        for one in retired
        if one.next_offset > manifest.start_offset and part.segments.covering(one.base_offset) == one
    )


def spillover_tally_finding(
    partition: TopicIdPartition, spillover: Spillover, *, segments: int, size_bytes: int
) -> Finding | None:
    """Compare what a live manifest says of its spilled part with *segments*, which were counted there."""
    if (spillover.segments, spillover.size_bytes) == (segments, size_bytes):
        return None
    return Finding(
        FaultKind.SPILLOVER_DISAGREES,
        manifest_key(partition),
        f"the manifest says that {spillover.segments} segments of {spillover.size_bytes} bytes are spilled, "
        f"and the spillover manifests hold {segments} of {size_bytes} bytes",
        partition,
    )
