"""
The spilled part of an archive as the bucket has it now: part by part, from the newest back.

Each part names the one before it. If a part is missing or damaged, and the bucket has exactly one part that
ends where it begins, the walk goes on with that one. Its content can be checked, but it is not proved to
belong to the archive. Memory and cache are not used, because the stored objects are what is checked.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from tieringd.archive.scrub.segment_inspection import read_object
from tieringd.archive.spillover_manifests import SpilloverManifests
from tieringd.errors import CorruptDataError, ObjectNotFound
from tieringd.formats.manifest_codec import decode_spillover
from tieringd.formats.object_keys import spillover_key
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment_table import SegmentTable
from tieringd.model.spillover import SpilloverManifest, SpilloverName
from tieringd.policies.scrub import FaultKind, Finding, spillover_tally_finding
from tieringd.storage.base import ObjectStore
from tieringd.storage.threads import in_thread


@dataclass(frozen=True, slots=True)
class ChainLink:
    """One spillover manifest, or its fault."""

    name: SpilloverName
    part: SpilloverManifest | None
    finding: Finding | None
    previous: SpilloverName | None
    """The next part of the walk; None at the end, or if it cannot be determined."""
    requests: int


class SpilledChain:
    """Walk the spilled parts of one bucket's archives. Keeps no state."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def walk(
        self, manifest: PartitionManifest, *, start: SpilloverName | None = None
    ) -> AsyncGenerator[ChainLink]:
        """
        Yield the spilled parts, newest first, down to those already deleted. *start* is the first, if given.

        Raises:
            StorageUnavailable: The store does not answer; the rest is unknown.
        """
        spillover, partition = manifest.spillover, manifest.partition
        if spillover is None:
            return
        name: SpilloverName | None = start or spillover.newest
        while name is not None:
            link = await self._link(partition, name, begin_offset=spillover.begin_offset)
            yield link
            name = link.previous

    async def _link(
        self, partition: TopicIdPartition, name: SpilloverName, *, begin_offset: int
    ) -> ChainLink:
        part, finding, requests = await self._load(partition, name)
        if name.base_offset <= begin_offset:
            return ChainLink(name, part, finding, None, requests)
        if part is not None:
            if part.previous is None:
                finding = Finding(
                    FaultKind.SPILLOVER_DISAGREES,
                    spillover_key(partition, name),
                    f"this manifest names no spillover manifest for offsets {begin_offset} to "
                    f"{name.base_offset - 1}, which should be spilled",
                    partition,
                )
            return ChainLink(name, part, finding, part.previous, requests)
        listed = await SpilloverManifests(self._store).ending_before(partition, name.base_offset)
        before = [one for one in listed if one.next_offset == name.base_offset]
        previous = before[0] if len(before) == 1 else None
        return ChainLink(name, part, finding, previous, requests + 1)

    async def _load(
        self, partition: TopicIdPartition, name: SpilloverName
    ) -> tuple[SpilloverManifest | None, Finding | None, int]:
        key = spillover_key(partition, name)
        try:
            info = await self._store.head(key)
            data = await read_object(self._store, key, size_bytes=info.size_bytes)
        except ObjectNotFound:
            return None, Finding(FaultKind.SPILLOVER_MISSING, key, _missing(name), partition), 1
        try:
            part = await in_thread(decode_spillover, data, partition=partition, name=name)
        except CorruptDataError as error:
            return None, Finding(FaultKind.SPILLOVER_DAMAGED, key, error.message, partition), 2
        return part, None, 2


class SpilledTally:
    """The totals of the spilled parts, to compare with the live manifest's."""

    def __init__(self, manifest: PartitionManifest) -> None:
        self._manifest = manifest
        self._segments = 0
        self._size_bytes = 0
        self._is_whole = True

    def take(self, link: ChainLink) -> SegmentTable:
        """Count a part. Return its segments that have not expired: expired ones may be deleted already."""
        if link.part is None or link.finding is not None:
            self._is_whole = False
        if link.part is None:
            return self._manifest.segments.head(0)
        table = link.part.segments
        held = table.without_head(table.row_at_or_after(self._manifest.start_offset))
        self._segments += len(held)
        self._size_bytes += held.total_bytes
        return held

    def findings(self) -> list[Finding]:
        """Return a finding if the live manifest has other totals. Without all parts nothing is returned."""
        spillover = self._manifest.spillover
        if spillover is None or not self._is_whole:
            return []
        finding = spillover_tally_finding(
            self._manifest.partition, spillover, segments=self._segments, size_bytes=self._size_bytes
        )
        return [finding] if finding else []


def _missing(name: SpilloverName) -> str:
    return f"the spillover manifest of offsets {name.base_offset} to {name.last_offset} is missing"
