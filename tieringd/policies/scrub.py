"""
What is wrong with an archive, given what a scrub read of it: facts in, findings out.

A finding names one object, says in words what is wrong, and what an operator can do about it. This module
reads nothing, and does not decide whether a finding still holds: archives change while they are scrubbed,
and the scrubbing job has to check again (`housekeeping_turns`).

`plan_orphans` decides which objects of a partition no manifest names and are old enough to go. An orphan
was left by a crash, a lost election or a merge that was given up. Uncertainty keeps an object where it
is: a manifest that cannot be read, a spilled part that cannot be reached, an unknown topic, an object that
is older than the manifest. Orphans of topics that are not live need an operator's decision. Objects that
the live manifest, its retired segments or its spilled parts name are never orphans. Records of rewritings
count as named as long as any rewritten segment is: together they tell what was made of what.

`first_due_ms` and `next_due_ms` say when a partition is scrubbed: at Redpanda's intervals, with jitter,
so that not all partitions are scrubbed at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tieringd.formats.object_keys import (
    DataKey,
    data_key,
    index_key,
    is_decision_key,
    manifest_key,
    parse_data_key,
    parse_joined_part_key,
    parse_rewriting_key,
    parse_spillover_key,
)
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import NO_CRC, REWRITER_PREFIX, RemoteSegment
from tieringd.model.segment_table import SegmentTable
from tieringd.model.spillover import Spillover, SpilloverManifest, SpilloverName
from tieringd.policies.retention_time import CLOCK_ERROR_MAX_MS, is_impossible

INDEX_SUFFIX = ".index"


@dataclass(frozen=True, slots=True)
class ScrubPace:
    """The intervals of scrubs of one partition."""

    is_enabled: bool
    partial_interval_ms: int
    """Pause after a scrub that did not reach the end."""
    full_interval_ms: int
    """Pause after a complete scrub."""
    jitter_ms: int
    """Maximum random addition to each interval."""
    orphan_grace_ms: int
    """Minimum age of an orphan."""
    quarantine_ms: int
    """Objects in quarantine are deleted after this time."""


def first_due_ms(pace: ScrubPace, *, now_ms: int, jitter: float) -> int:
    """Return when a new partition is scrubbed first; *jitter* is from 0 to 1."""
    return now_ms + int(pace.jitter_ms * jitter)


def next_due_ms(pace: ScrubPace, *, now_ms: int, is_complete: bool, jitter: float) -> int:
    """Return when a partition is scrubbed next, after a scrub that has just ended."""
    interval_ms = pace.full_interval_ms if is_complete else pace.partial_interval_ms
    return now_ms + interval_ms + int(pace.jitter_ms * jitter)


class FaultKind(StrEnum):
    """The kinds of faults, as metrics and reports name them."""

    DATA_MISSING = "data_missing"
    DATA_SIZE = "data_size"
    DATA_CHECKSUM = "data_checksum"
    DATA_CONTENT = "data_content"
    """The batches inside are wrong, or do not belong to this segment."""
    INDEX_MISSING = "index_missing"
    INDEX_SIZE = "index_size"
    INDEX_CHECKSUM = "index_checksum"
    INDEX_CONTENT = "index_content"
    """It cannot be read, or contradicts its data object."""
    MANIFEST_MISSING = "manifest_missing"
    MANIFEST_DAMAGED = "manifest_damaged"
    MANIFEST_RULES = "manifest_rules"
    """Unrecorded gaps, overlaps, or another broken rule of manifests."""
    SPILLOVER_MISSING = "spillover_missing"
    SPILLOVER_DAMAGED = "spillover_damaged"
    SPILLOVER_DISAGREES = "spillover_disagrees"
    """The live manifest and its spilled part contradict each other."""
    REWRITING_MISSING = "rewriting_missing"
    """No readable record names a segment that a job rewrote."""
    TOPIC_MANIFEST_MISSING = "topic_manifest_missing"
    TOPIC_MANIFEST_DAMAGED = "topic_manifest_damaged"


DATA_FAULTS: Final = frozenset(
    {FaultKind.DATA_MISSING, FaultKind.DATA_SIZE, FaultKind.DATA_CHECKSUM, FaultKind.DATA_CONTENT}
)
INDEX_FAULTS: Final = frozenset(
    {FaultKind.INDEX_MISSING, FaultKind.INDEX_SIZE, FaultKind.INDEX_CHECKSUM, FaultKind.INDEX_CONTENT}
)
SPILLOVER_FAULTS: Final = frozenset({FaultKind.SPILLOVER_MISSING, FaultKind.SPILLOVER_DAMAGED})

_FROM_VERSIONS = "Restore the object from an older version in the bucket, or from a copy of the bucket"
_DATA_ACTION = (
    "Run `tieringd archive scrub --fix` on a broker that still has these offsets. If no broker has them: "
    f"{_FROM_VERSIONS[0].lower()}{_FROM_VERSIONS[1:]}"
)
_ACTIONS: Final = {
    **dict.fromkeys(DATA_FAULTS, _DATA_ACTION),
    **dict.fromkeys(
        INDEX_FAULTS,
        "Run `tieringd archive scrub --fix`, preferably on a broker that still has these offsets: it "
        "rebuilds the index",
    ),
    FaultKind.MANIFEST_MISSING: f"{_FROM_VERSIONS}. Until then, delete nothing of this partition",
    FaultKind.MANIFEST_DAMAGED: _FROM_VERSIONS,
    FaultKind.MANIFEST_RULES: "Report this: no tieringd writes such a manifest. Restore an older version",
    **dict.fromkeys(
        SPILLOVER_FAULTS,
        "Run `tieringd archive scrub --fix`: it takes the copy in quarantine, if there is one. If there is "
        f"none: {_FROM_VERSIONS[0].lower()}{_FROM_VERSIONS[1:]}",
    ),
    FaultKind.SPILLOVER_DISAGREES: "Report this: no tieringd writes such a manifest",
    FaultKind.REWRITING_MISSING: "Run `tieringd archive scrub --fix`: it stores the record again",
    FaultKind.TOPIC_MANIFEST_MISSING: (
        "A daemon that archives the topic writes this manifest again. If no daemon does, restore the "
        "object, or let `tieringd archive scrub --fix` move the objects that no manifest names into "
        "quarantine"
    ),
    FaultKind.TOPIC_MANIFEST_DAMAGED: _FROM_VERSIONS,
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault of one object."""

    kind: FaultKind
    key: str
    detail: str
    partition: TopicIdPartition | None = None
    segment: RemoteSegment | None = None
    """The segment that the object belongs to, as in the manifest."""

    @property
    def action(self) -> str:
        """Return what an operator can do about it."""
        return _ACTIONS[self.kind]

    def __str__(self) -> str:
        offsets = (
            f", offsets {self.segment.base_offset} to {self.segment.last_offset}" if self.segment else ""
        )
        return f"{self.detail} (in {self.key}{offsets})"


@dataclass(frozen=True, slots=True)
class ObjectFacts:
    """What a scrub knows of one object."""

    size_bytes: int | None
    """None: there is no such object."""
    crc32c: int | None = None
    """CRC32C of its bytes; None where neither the store returned it nor the scrub computed it."""
    content_fault: str = ""
    """The fault that reading its content showed, in words."""


def segment_findings(
    partition: TopicIdPartition, segment: RemoteSegment, *, data: ObjectFacts, index: ObjectFacts
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


def _object_fault(seen: ObjectFacts, *, size_bytes: int, crc32c: int, name: str) -> tuple[str, str] | None:
    """Return what is wrong with an object, as a kind and in words; None for a sound one."""
    if seen.size_bytes is None:
        return "missing", f"the {name} is missing"
    if seen.size_bytes != size_bytes:
        return "size", f"the {name} has {seen.size_bytes} bytes and the manifest says {size_bytes}"
    # A fault of the content says more than a wrong checksum of the whole.
    if seen.content_fault:
        return "content", seen.content_fault
    if seen.crc32c is not None and crc32c not in {NO_CRC, seen.crc32c}:
        return "checksum", f"the {name} has checksum {seen.crc32c:08x} and the manifest says {crc32c:08x}"
    return None


def manifest_findings(manifest: PartitionManifest) -> tuple[Finding, ...]:
    """Return which rules of manifests a live manifest breaks: gaps, overlaps, and wrong order."""
    key = manifest_key(manifest.partition)
    return tuple(
        Finding(FaultKind.MANIFEST_RULES, key, fault, manifest.partition) for fault in manifest.faults()
    )


def twice_named_findings(
    manifest: PartitionManifest, parts: Iterable[SpilloverManifest]
) -> tuple[Finding, ...]:
    """
    Return the segments that are both in *parts* and retired by the live manifest.

    Their objects would be deleted although they are still held.
    """
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
    """Compare a live manifest's totals of its spilled part with the counted *segments* and *size_bytes*."""
    if (spillover.segments, spillover.size_bytes) == (segments, size_bytes):
        return None
    return Finding(
        FaultKind.SPILLOVER_DISAGREES,
        manifest_key(partition),
        f"the manifest counts {spillover.segments} spilled segments of {spillover.size_bytes} bytes, but "
        f"the spillover manifests have {segments} of {size_bytes} bytes",
        partition,
    )


class TopicState(StrEnum):
    """The state of a topic in the bucket."""

    LIVE = "live"
    RESTORABLE = "restorable"
    """The cluster has deleted it, but its archive is still complete."""
    LEAVING = "leaving"
    """It was deleted, and its archive is being deleted."""
    UNKNOWN = "unknown"
    """It has no topic manifest."""


class Keep(StrEnum):
    """Why an object stays where it is."""

    NAMED = "a manifest names it"
    YOUNG = "the object is younger than the grace period: it may belong to an upload in progress"
    LATELY_REPLACED = (
        "the offsets of the object were replaced recently: readers may still use the previous manifest"
    )
    AT_THE_END = "the object is past the end of the archive, and its writer may still commit it"
    NO_MANIFEST = "the partition's manifest is missing: this object may be all that is left of the partition"
    BEFORE_MANIFEST = (
        "the object is older than the partition's manifest: an earlier manifest that named it may be lost"
    )
    UNCERTAIN = "the objects that the partition's manifests name are not known for certain"
    FOREIGN = "the object does not belong to this partition"


@dataclass(frozen=True, slots=True)
class Owner:
    """What is known of the partition that an object belongs to by its name."""

    partition: TopicIdPartition
    topic: TopicState
    manifest: PartitionManifest | None
    """None where the bucket has none."""
    parts: tuple[SpilloverManifest, ...] = ()
    """All spilled parts that are not deleted yet, held or expired."""
    part_names: frozenset[SpilloverName] = frozenset()
    """The names of `parts`."""
    uncertain: str = ""
    """Why it is not certain what the partition's manifests name; empty when it is."""
    findings: tuple[Finding, ...] = ()
    """The faults of the manifests themselves."""

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
        """Say whether the partition has no manifest although its topic is live or restorable."""
        return self.manifest is None and self.topic in {TopicState.LIVE, TopicState.RESTORABLE}


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object as the store lists it."""

    key: str
    size_bytes: int
    modified_ms: int
    """Modification time by the store's clock."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """An object that is not needed."""

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
    """Judge *objects*, which belong to *owner* by their names and were listed before *owner* was read."""
    orphans: list[Orphan] = []
    kept: list[tuple[str, Keep]] = []
    for one in objects:
        reason = _reason_to_keep(owner, one, grace_ms=grace_ms, now_ms=now_ms)
        if reason is None:
            detail = "no manifest names it" if owner.manifest else "its partition no longer has a manifest"
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
    """Say whether a job rewrote a segment of a table, or one that the table had before."""
    return any(writer.startswith(REWRITER_PREFIX) for writer in table.writers)


def tables_of(owner: Owner) -> Iterator[SegmentTable]:
    """Yield the tables of all segments that the owner's manifests name."""
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
    # Leftovers of a join are never named, so their offsets decide nothing; their age does.
    whole = found or parse_joined_part_key(one.key)
    is_its_own = (
        parse_spillover_key(owner.partition, one.key) is not None
        or parse_rewriting_key(owner.partition, one.key) is not None
        or is_decision_key(owner.partition, one.key)
    )
    reasons = {
        Keep.FOREIGN: not is_its_own and (whole is None or whole.partition != owner.partition),
        Keep.UNCERTAIN: bool(owner.uncertain),
        Keep.NO_MANIFEST: owner.is_manifest_missing,
        Keep.BEFORE_MANIFEST: _is_older_than_manifest(owner, one, now_ms=now_ms),
        Keep.YOUNG: one.modified_ms + grace_ms > now_ms,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is not None or owner.manifest is None or found is None:
        return reason
    return _reason_of_offsets(owner.manifest, found, grace_ms=grace_ms, now_ms=now_ms)


def _is_older_than_manifest(owner: Owner, one: StoredObject, *, now_ms: int) -> bool:
    """
    Say whether *one* was stored before the first version of its partition's manifest.

    An archiver stores the manifest before anything else. So another manifest was there before, and is lost: a
    process that began after that has begun a new one.
    """
    if owner.manifest is None or owner.topic is TopicState.LEAVING:
        return False
    began_at_ms = owner.manifest.began_at_ms
    is_older = one.modified_ms + CLOCK_ERROR_MAX_MS < began_at_ms
    return is_older and not is_impossible(began_at_ms, now_ms=now_ms)


def _reason_of_offsets(
    manifest: PartitionManifest, found: DataKey, *, grace_ms: int, now_ms: int
) -> Keep | None:
    # An upload begins at the archive's end. So an upload that began earlier is over, and cannot complete
    # any more; a deposed leader's commit is refused.
    if found.base_offset >= manifest.next_offset and found.leader_epoch >= manifest.leader_epoch:
        return Keep.AT_THE_END
    # These segments left the manifest at once, however old their objects are.
    if any(
        one.replaced_at_ms + grace_ms > now_ms
        and one.base_offset <= found.last_offset
        and found.base_offset <= one.last_offset
        for one in manifest.replacements
    ):
        return Keep.LATELY_REPLACED
    return None
