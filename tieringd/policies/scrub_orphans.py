"""
Which objects of a partition nobody needs: named by no manifest of it, and old enough.

An orphan is what a crash, a lost election or a merge that was given up has left. Whatever is not known
for certain keeps an object where it is: a manifest that cannot be read, a spilled part that cannot be
reached, a topic that is not known. Orphans of those topics are for an operator to judge.

What the live manifest, its retired segments and its spilled parts name is never an orphan, whatever
else is true. Records of rewritings count as named for as long as anything rewritten is: they tell of each
other what was made of what.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from tieringd.formats.object_keys import (
    data_key,
    manifest_key,
    parse_data_key,
    parse_joined_part_key,
    parse_rewriting_key,
    parse_spillover_key,
)
from tieringd.model.segment import REWRITER_PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tieringd.formats.object_keys import DataKey
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.partition import TopicIdPartition
    from tieringd.model.segment_table import SegmentTable
    from tieringd.model.spillover import SpilloverManifest, SpilloverName
    from tieringd.policies.scrub import Finding

INDEX_SUFFIX = ".index"


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
