"""
What is wrong with an archive, given what was seen of it: facts in, findings out.

A finding names one object, says in words what is wrong, and what an operator does about it. Nothing
here reads anything, and nothing decides whether a finding still holds: archives change while they are
looked at, and who looks sees to that (`housekeeping`).

`plan_orphans` decides which objects of a partition no manifest names and are old enough to go. An orphan is
what a crash, a lost election or a merge that was given up has left. Uncertainty keeps an object where it
is: a manifest that cannot be read, a spilled part that cannot be reached, an unknown topic. An operator
judges orphans of those topics. What the live manifest, its retired segments and its spilled parts name is
never an orphan. Records of rewritings count as named for as long as anything rewritten is: they tell of
each other what was made of what.

`first_due_ms` and `next_due_ms` say when a partition is scrubbed: at the original's intervals, with jitter,
so that not all come at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from tieringd.formats.object_keys import (
    data_key,
    index_key,
    manifest_key,
    parse_data_key,
    parse_joined_part_key,
    parse_rewriting_key,
    parse_spillover_key,
)
from tieringd.model.segment import NO_CRC, REWRITER_PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tieringd.formats.object_keys import DataKey
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.partition import TopicIdPartition
    from tieringd.model.segment import RemoteSegment
    from tieringd.model.segment_table import SegmentTable
    from tieringd.model.spillover import Spillover, SpilloverManifest, SpilloverName


INDEX_SUFFIX = ".index"


@dataclass(frozen=True, slots=True)
class ScrubPace:
    """How long to wait between two looks at one partition."""

    is_enabled: bool
    partial_interval_ms: int
    """After a look that did not come to the end."""
    full_interval_ms: int
    """After one that did."""
    jitter_ms: int
    """Up to this much more each time."""
    orphan_grace_ms: int
    """An object that no manifest names is no orphan before this."""
    quarantine_ms: int
    """What is in quarantine is deleted after this."""


def first_due_ms(pace: ScrubPace, *, now_ms: int, jitter: float) -> int:
    """Return when a partition that is new here is looked at first; *jitter* is from 0 to 1."""
    return now_ms + int(pace.jitter_ms * jitter)


def next_due_ms(pace: ScrubPace, *, now_ms: int, is_complete: bool, jitter: float) -> int:
    """Return when a partition is looked at after a look that has just ended."""
    interval_ms = pace.full_interval_ms if is_complete else pace.partial_interval_ms
    return now_ms + interval_ms + int(pace.jitter_ms * jitter)


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


class TopicState(StrEnum):
    """What the bucket says of a topic."""

    LIVE = "live"
    RESTORABLE = "restorable"
    """The cluster has deleted it, and its archive is all there still."""
    LEAVING = "leaving"
    """It was deleted, and its archive is going."""
    UNKNOWN = "unknown"
    """It has no topic manifest."""


class Keep(StrEnum):
    """Why an object stays where it is."""

    NAMED = "a manifest names it"
    YOUNG = "it is younger than the grace: it may be an upload under way"
    LATELY_REPLACED = "its offsets were replaced lately: readers may still have the manifest before"
    AT_THE_END = "it lies past the end of the archive, and its writer may yet name it"
    NO_MANIFEST = "the partition's manifest is missing: this may be all that is left of the partition"
    UNCERTAIN = "what the partition's manifests name is not known for certain"
    FOREIGN = "it is no object of this partition"


@dataclass(frozen=True, slots=True)
class Owner:
    """What is known of the partition that an object belongs to by its name."""

    partition: TopicIdPartition
    topic: TopicState
    manifest: PartitionManifest | None
    """None where the bucket has none."""
    parts: tuple[SpilloverManifest, ...] = ()
    """All that is spilled and not deleted yet, held or expired."""
    part_names: frozenset[SpilloverName] = frozenset()
    """The names of these."""
    uncertain: str = ""
    """Why it is not known for certain what its manifests name; empty when it is."""
    findings: tuple[Finding, ...] = ()
    """All that is wrong with the manifests themselves."""

    @property
    def held(self) -> tuple[SegmentTable, ...]:
        """Return the segments that readers may ask for, spilled ones first, newest part first."""
        if self.manifest is None:
            return ()
        start_offset = self.manifest.start_offset
        spilled = (part.segments for part in self.parts)
        return (
            *(table.without_head(table.row_at_or_after(start_offset)) for table in spilled),
            self.manifest.segments,
        )

    @property
    def is_manifest_missing(self) -> bool:
        """Say whether the partition has lost its manifest: where nobody deletes manifests, one should be."""
        return self.manifest is None and self.topic in {TopicState.LIVE, TopicState.RESTORABLE}


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object as the store lists it."""

    key: str
    size_bytes: int
    modified_ms: int
    """By the store's clock."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """An object that nobody needs."""

    stored: StoredObject
    partition: TopicIdPartition
    detail: str
    needs_operator: bool
    """Whether only an operator may have it moved."""


@dataclass(frozen=True, slots=True)
class OrphanPlan:
    """Which objects are orphans, and why the others are not."""

    orphans: tuple[Orphan, ...]
    kept: tuple[tuple[str, Keep], ...]
    """Keys and reasons, in the order of the objects."""


def plan_orphans(owner: Owner, objects: Iterable[StoredObject], *, grace_ms: int, now_ms: int) -> OrphanPlan:
    """Judge *objects*, which belong to *owner* by their names and were listed before it was looked at."""
    orphans: list[Orphan] = []
    kept: list[tuple[str, Keep]] = []
    for one in objects:
        reason = _reason_to_keep(owner, one, grace_ms=grace_ms, now_ms=now_ms)
        if reason is None:
            detail = "no manifest names it" if owner.manifest else "its partition has no manifest any more"
            if owner.topic is not TopicState.LIVE:
                detail += f", and its topic is {owner.topic.value}"
            orphans.append(Orphan(one, owner.partition, detail, owner.topic is not TopicState.LIVE))
        else:
            kept.append((one.key, reason))
    return OrphanPlan(tuple(orphans), tuple(kept))


def is_named(owner: Owner, key: str) -> bool:
    """Say whether one of the owner's manifests names the object."""
    if key == manifest_key(owner.partition):
        return True
    name = parse_spillover_key(owner.partition, key)
    if name is not None:
        spillover = owner.manifest.spillover if owner.manifest else None
        return name in owner.part_names or (spillover is not None and name == spillover.newest)
    if parse_rewriting_key(owner.partition, key) is not None:
        return any(has_rewritten(table) for table in tables_of(owner))
    found = parse_data_key(key.removesuffix(INDEX_SUFFIX))
    return found is not None and _is_segment_named(owner, found, key.removesuffix(INDEX_SUFFIX))


def has_rewritten(table: SegmentTable) -> bool:
    """Say whether a job took records out of a segment of a table, or did of one that the table had."""
    return any(writer.startswith(REWRITER_PREFIX) for writer in table.writers)


def tables_of(owner: Owner) -> Iterator[SegmentTable]:
    """Yield all segments that the owner's manifests name."""
    if owner.manifest is not None:
        yield owner.manifest.segments
        yield from (one.segments for one in owner.manifest.retired)
        yield from (part.segments for part in owner.parts)


def _is_segment_named(owner: Owner, found: DataKey, key: str) -> bool:
    return any(
        data_key(owner.partition, segment) == key
        for table in tables_of(owner)
        for segment in table.overlapping(found.base_offset, found.last_offset + 1)
    )


def _reason_to_keep(owner: Owner, one: StoredObject, *, grace_ms: int, now_ms: int) -> Keep | None:
    if is_named(owner, one.key):
        return Keep.NAMED
    found = parse_data_key(one.key.removesuffix(INDEX_SUFFIX))
    # What a join has left is never named, so its offsets say nothing: its age decides.
    whole = found or parse_joined_part_key(one.key)
    is_its_own = (
        parse_spillover_key(owner.partition, one.key) is not None
        or parse_rewriting_key(owner.partition, one.key) is not None
    )
    reasons = {
        Keep.FOREIGN: not is_its_own and (whole is None or whole.partition != owner.partition),
        Keep.UNCERTAIN: bool(owner.uncertain),
        Keep.NO_MANIFEST: owner.is_manifest_missing,
        Keep.YOUNG: one.modified_ms + grace_ms > now_ms,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is not None or owner.manifest is None or found is None:
        return reason
    return _reason_of_offsets(owner.manifest, found, grace_ms=grace_ms, now_ms=now_ms)


def _reason_of_offsets(
    manifest: PartitionManifest, found: DataKey, *, grace_ms: int, now_ms: int
) -> Keep | None:
    # An upload begins at the archive's end. So one that began earlier is over, and cannot come again;
    # one of a leader that was deposed is refused.
    if found.base_offset >= manifest.next_offset and found.leader_epoch >= manifest.leader_epoch:
        return Keep.AT_THE_END
    # These left the manifest at once, however old their objects are.
    if any(
        one.replaced_at_ms + grace_ms > now_ms
        and one.base_offset <= found.last_offset
        and found.base_offset <= one.last_offset
        for one in manifest.replacements
    ):
        return Keep.LATELY_REPLACED
    return None
