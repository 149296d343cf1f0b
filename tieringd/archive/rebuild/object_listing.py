"""
The objects of each partition in a bucket's listing: data objects, indexes, rewriting records, manifest.

The listing gives names and sizes only; no object is read.

`RecordedRewritings` holds the bucket's records of the segments of one partition that jobs rewrote.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from tieringd.archive.segment_swap import load_rewriting
from tieringd.errors import CorruptDataError, ObjectNotFound
from tieringd.formats.object_keys import DataKey, manifest_key, owner_of, parse_data_key, parse_rewriting_key
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import SegmentIdentity
from tieringd.policies.valid_rewritings import RecordedRewriting
from tieringd.storage.at_once import at_once
from tieringd.storage.base import ObjectInfo, ObjectStore
from tieringd.storage.listing import list_objects

INDEX_SUFFIX: Final = ".index"
PREFIXES: Final = tuple("0123456789abcdef")
"""Every key of a partition's object begins with one of these. Each prefix is listed separately."""

RECORDS_AT_ONCE: Final = 8
"""
How many records are read at a time.

Every merge of rewritten segments has one, so there may be thousands.
"""


@dataclass(frozen=True, slots=True)
class ListedSegment:
    """A data object and its index, as listed."""

    key: str
    size_bytes: int
    modified_ms: int
    index_size_bytes: int | None
    """None if there is no index."""


@dataclass(slots=True)
class ListedPartition:
    """All objects of one partition."""

    data: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Sizes and modification times, by key."""
    indexes: dict[str, int] = field(default_factory=dict)
    """Sizes of the indexes, by the keys of their data objects."""
    rewritings: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Sizes and modification times of the records of rewritings, by key."""
    has_manifest: bool = False

    @property
    def oldest_ms(self) -> int | None:
        """Return when the first of its data objects was stored, or None if there is none."""
        return min((modified_ms for _, modified_ms in self.data.values()), default=None)

    def segments(self) -> tuple[ListedSegment, ...]:
        """
        Return the data objects, without those that have no index and exist again with an index.

        A data object is stored again under a new name when its index is rebuilt.
        """
        indexed = {_identity(key) for key in self.data if key in self.indexes}
        return tuple(
            ListedSegment(key, size_bytes, modified_ms, self.indexes.get(key))
            for key, (size_bytes, modified_ms) in sorted(self.data.items())
            if key in self.indexes or _identity(key) not in indexed
        )


async def list_partitions(
    store: ObjectStore, is_wanted: Callable[[str], bool]
) -> dict[TopicIdPartition, ListedPartition]:
    """
    List the bucket, and return the partitions of the wanted topics.

    Raises:
        StorageUnavailable: The store does not answer.
    """
    found: defaultdict[TopicIdPartition, ListedPartition] = defaultdict(ListedPartition)

    async def list_prefix(prefix: str) -> None:
        async for info in list_objects(store, prefix):
            partition = owner_of(info.key)
            if partition is not None and is_wanted(partition.topic):
                _take(found[partition], partition, info)

    await at_once(PREFIXES, list_prefix, count=len(PREFIXES))
    return dict(found)


def _take(listed: ListedPartition, partition: TopicIdPartition, info: ObjectInfo) -> None:
    if info.key == manifest_key(partition):
        listed.has_manifest = True
    elif parse_rewriting_key(partition, info.key) is not None:
        listed.rewritings[info.key] = (info.size_bytes, info.modified_ms)
    elif parse_data_key(info.key) is not None:
        listed.data[info.key] = (info.size_bytes, info.modified_ms)
    elif info.key.endswith(INDEX_SUFFIX) and parse_data_key(info.key.removesuffix(INDEX_SUFFIX)) is not None:
        listed.indexes[info.key.removesuffix(INDEX_SUFFIX)] = info.size_bytes


def _identity(key: str) -> SegmentIdentity:
    """Return what a data object's name says of it, without its index."""
    return require_data_key(key).identity


def require_data_key(key: str) -> DataKey:
    """Return the parsed key of a data object. The caller knows that it is one."""
    parsed = parse_data_key(key)
    assert parsed is not None, "only data keys are asked for"
    return parsed


@dataclass(frozen=True, slots=True)
class RecordedRewritings:
    """The records that can be read, and the faults of the others."""

    found: tuple[RecordedRewriting, ...]
    faults: tuple[str, ...]


async def recorded_rewritings(
    store: ObjectStore, partition: TopicIdPartition, listed: ListedPartition
) -> RecordedRewritings:
    """
    Read the records of one partition.

    Raises:
        StorageUnavailable: The store does not answer; the records are unknown.
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
