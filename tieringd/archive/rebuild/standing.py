"""How a partition's manifest stands before a rebuild: whether there is one, and whether it can be read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from tieringd.model.spilling import with_parts
from tieringd.policies.scrub import FaultKind
from tieringd.policies.scrub_orphans import TopicState

if TYPE_CHECKING:
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.partition import TopicIdPartition
    from tieringd.policies.scrub_orphans import Owner

_OF_TOPICS = frozenset({FaultKind.TOPIC_MANIFEST_DAMAGED, FaultKind.TOPIC_MANIFEST_MISSING})


class Standing(StrEnum):
    """What is known of a partition's manifest."""

    ABSENT = "absent"
    DAMAGED = "damaged"
    """It cannot be read."""
    BROKEN = "broken"
    """It can, and breaks a rule, or what is spilled cannot be read."""
    SOUND = "sound"
    CLOSED = "closed"
    """The archive was moved to another bucket, or is being purged: nobody may write it."""
    LEAVING = "leaving"
    """Its topic was deleted, and its objects are going."""

    def may_be_written(self, *, replace: bool) -> bool:
        """Say whether a rebuild may write it; *replace* is what an operator says of readable ones."""
        if self in {Standing.ABSENT, Standing.DAMAGED}:
            return True
        return replace and self in {Standing.BROKEN, Standing.SOUND}


@dataclass(frozen=True, slots=True)
class PartitionStanding:
    """One partition before a rebuild."""

    partition: TopicIdPartition
    standing: Standing
    detail: str = ""
    """What is wrong."""
    stored: PartitionManifest | None = None
    """The live manifest as it is stored."""
    known: PartitionManifest | None = None
    """The same with all that is spilled, as far as that can be read."""


def standing_of(owner: Owner) -> PartitionStanding:
    """Return how the manifest of *owner* stands."""
    partition, manifest = owner.partition, owner.manifest
    faults = [one for one in owner.findings if one.kind not in _OF_TOPICS]
    detail = "; ".join(one.detail for one in faults)
    if owner.topic is TopicState.LEAVING:
        return PartitionStanding(partition, Standing.LEAVING)
    if manifest is None:
        standing = Standing.DAMAGED if faults else Standing.ABSENT
        return PartitionStanding(partition, standing, detail)
    if manifest.is_closed:
        return PartitionStanding(partition, Standing.CLOSED, stored=manifest, known=manifest)
    if faults:
        return PartitionStanding(partition, Standing.BROKEN, detail, manifest, manifest)
    known = with_parts(manifest, owner.parts[::-1])
    return PartitionStanding(partition, Standing.SOUND, stored=manifest, known=known)
