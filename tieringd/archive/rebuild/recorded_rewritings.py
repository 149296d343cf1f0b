"""What the bucket's records say of the segments of one partition that jobs rewrote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tieringd.archive.rewriting_records import load_rewriting
from tieringd.errors import CorruptDataError, ObjectNotFound
from tieringd.policies.standing_rewritings import RecordedRewriting
from tieringd.storage.at_once import at_once

if TYPE_CHECKING:
    from tieringd.archive.rebuild.object_listing import ListedPartition
    from tieringd.model.partition import TopicIdPartition
    from tieringd.storage.base import ObjectStore

RECORDS_AT_ONCE: Final = 8
"""Every merge of rewritten segments has one, so a partition may have thousands."""


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

    async def loaded(key: str) -> RecordedRewriting | str:
        size_bytes, stored_at_ms = listed.rewritings[key]
        try:
            rewriting = await load_rewriting(store, partition, key, size_bytes=size_bytes)
        except (CorruptDataError, ObjectNotFound) as error:
            return str(error)
        return RecordedRewriting(rewriting, stored_at_ms)

    loads = await at_once(sorted(listed.rewritings), loaded, count=RECORDS_AT_ONCE)
    return RecordedRewritings(
        tuple(one for one in loads if isinstance(one, RecordedRewriting)),
        tuple(one for one in loads if isinstance(one, str)),
    )
