"""What the bucket's records say of the segments of one partition that jobs rewrote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tieringd.archive.rewriting_records import load_rewriting
from tieringd.errors import CorruptDataError, ObjectNotFound
from tieringd.policies.standing_rewritings import RecordedRewriting

if TYPE_CHECKING:
    from tieringd.archive.rebuild.object_listing import ListedPartition
    from tieringd.model.partition import TopicIdPartition
    from tieringd.storage.base import ObjectStore


@dataclass(frozen=True, slots=True)
class RecordedRewritings:
    """The records that can be read, and why others cannot."""

    found: tuple[RecordedRewriting, ...]
    faults: tuple[str, ...]


async def recorded_rewritings(
    store: ObjectStore, partition: TopicIdPartition, listed: ListedPartition
) -> RecordedRewritings:
    """
    Read the records of one partition.

    Raises:
        StorageUnavailable: The store does not answer; nothing is known.
    """
    found: list[RecordedRewriting] = []
    faults: list[str] = []
    for key, (size_bytes, stored_at_ms) in sorted(listed.rewritings.items()):
        try:
            rewriting = await load_rewriting(store, partition, key, size_bytes=size_bytes)
        except (CorruptDataError, ObjectNotFound) as error:
            faults.append(str(error))
        else:
            found.append(RecordedRewriting(rewriting, stored_at_ms))
    return RecordedRewritings(tuple(found), tuple(faults))
