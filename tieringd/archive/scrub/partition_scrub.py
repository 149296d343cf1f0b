"""
Scrub one partition: its manifests and every object that they name, newest first.

Uploads, merges, retention and spills go on meanwhile. So a fault counts only after it was seen twice,
and if a manifest that was read after that still names the object. Names are compared, not offsets, since
a merge or a compacted re-upload stores the same offsets under another name. A name that has left the
manifest does not come back.

A scrub may be interrupted after any number of requests, and resumes at its cursor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tieringd.archive.manifest_store import ManifestStore
from tieringd.archive.scrub.rewriting_records import unrecorded_findings
from tieringd.archive.scrub.segment_inspection import SegmentInspector
from tieringd.archive.scrub.spilled_chain import SpilledChain, SpilledTally
from tieringd.errors import CorruptDataError
from tieringd.formats.object_keys import data_key, manifest_key
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import RemoteSegment
from tieringd.model.segment_table import SegmentTable
from tieringd.model.spillover import SpilloverName
from tieringd.policies.scrub import FaultKind, Finding, manifest_findings
from tieringd.storage.base import ObjectStore


@dataclass(frozen=True, slots=True)
class ScrubCursor:
    """The place at which a scrub resumes. A scrub goes backwards."""

    before_offset: int
    """Segments that begin at this offset or later have been checked."""
    part: SpilloverName | None = None
    """The spilled part to resume in; None for the live manifest."""


@dataclass(slots=True)
class ScrubStretch:
    """The result of one call of a scrub."""

    partition: TopicIdPartition
    findings: tuple[Finding, ...] = ()
    """The confirmed findings."""
    segments: int = 0
    objects: int = 0
    inspected_bytes: int = 0
    """Size of the data objects that were checked."""
    records: int = 0
    """Counted by a deep scrub only."""
    requests: int = 0
    cursor: ScrubCursor | None = None
    """The place to resume at; None if the partition is done."""


class PartitionScrubber:
    """Scrub partitions of one bucket. Reads only, and keeps no state."""

    def __init__(
        self,
        store: ObjectStore,
        manifests: ManifestStore,
        *,
        on_segment: Callable[[ScrubStretch], None] = lambda _: None,
    ) -> None:
        """
        Keep the arguments.

        *on_segment* is called with the stretch after each segment, to show progress.
        """
        self._store = store
        self._manifests = manifests
        self._inspector = SegmentInspector(store)
        self._chain = SpilledChain(store)
        self._on_segment = on_segment

    async def scrub(
        self,
        partition: TopicIdPartition,
        *,
        deep: bool,
        requests_max: int | None = None,
        cursor: ScrubCursor | None = None,
    ) -> ScrubStretch:
        """
        Scrub the partition from *cursor* on, for about *requests_max* requests, but at least one segment.

        Raises:
            StorageUnavailable: The store does not answer; the state is unknown.
        """
        walk = _ScrubCall(ScrubStretch(partition), deep=deep, requests_max=requests_max)
        manifest = await self._load(walk)
        if manifest is None:
            walk.stretch.findings = tuple(walk.suspects)
            return walk.stretch
        rules = manifest_findings(manifest) if cursor is None else ()
        before_offset = manifest.next_offset if cursor is None else cursor.before_offset
        cut = await self._rows(walk, manifest.segments, before_offset)
        if cut is None:
            walk.stretch.cursor = await self._spilled(walk, manifest, cursor)
        else:
            walk.stretch.cursor = ScrubCursor(cut)
        walk.suspects += await self._unrecorded(walk, walk.rewritten)
        held = await self._held(walk) if walk.suspects else ()
        walk.stretch.findings = (*rules, *held)
        return walk.stretch

    async def confirmed(
        self, partition: TopicIdPartition, suspects: Iterable[Finding], *, deep: bool
    ) -> tuple[Finding, ...]:
        """
        Return the *suspects* in segments of the partition that a second check confirms.

        Raises:
            StorageUnavailable: The store does not answer; the state is unknown.
        """
        walk = _ScrubCall(ScrubStretch(partition), deep=deep, requests_max=None)
        walk.suspects = list(suspects)
        return await self._held(walk) if walk.suspects else ()

    async def _load(self, walk: _ScrubCall) -> PartitionManifest | None:
        """Return the live manifest; None if there is none, or if two reads found it damaged."""
        partition = walk.stretch.partition
        walk.stretch.requests += 1
        try:
            return (await self._manifests.load(partition)).manifest
        except CorruptDataError:
            walk.stretch.requests += 1
        try:
            return (await self._manifests.load(partition)).manifest
        except CorruptDataError as error:
            walk.suspects = [
                Finding(FaultKind.MANIFEST_DAMAGED, manifest_key(partition), error.message, partition)
            ]
            return None

    async def _rows(self, walk: _ScrubCall, table: SegmentTable, before_offset: int) -> int | None:
        """
        Check the rows that begin before an offset, newest first.

        Return where the check was cut off, if it was.
        """
        row = table.row_at_or_after(before_offset)
        if row < len(table) and table.column("base_offset")[row] < before_offset:
            # A merge has joined segments across the end of the last stretch.
            row += 1
        for at in range(row - 1, -1, -1):
            segment = table[at]
            if walk.is_spent:
                return segment.next_offset
            walk.rewritten += [segment] if segment.is_rewritten else []
            inspection = await self._inspector.inspect(walk.stretch.partition, segment, deep=walk.deep)
            walk.suspects += inspection.findings
            stretch = walk.stretch
            stretch.segments += 1
            stretch.objects += 2
            stretch.inspected_bytes += segment.size_bytes
            stretch.records += inspection.records
            stretch.requests += inspection.requests
            self._on_segment(stretch)
        return None

    async def _spilled(
        self, walk: _ScrubCall, manifest: PartitionManifest, cursor: ScrubCursor | None
    ) -> ScrubCursor | None:
        """Check the spilled part, newest first. Return where the check was cut off, if it was."""
        start = cursor.part if cursor else None
        tally = SpilledTally(manifest)
        async for link in self._chain.walk(manifest, start=start):
            if walk.is_spent:
                return ScrubCursor(link.name.next_offset, link.name)
            walk.stretch.requests += link.requests
            walk.stretch.objects += 1
            walk.suspects += [link.finding] if link.finding else []
            held = tally.take(link)
            is_resumed = cursor is not None and link.name == start
            before_offset = cursor.before_offset if cursor and is_resumed else link.name.next_offset
            cut = await self._rows(walk, held, before_offset)
            if cut is not None:
                return ScrubCursor(cut, link.name)
        if start is None:
            walk.suspects += tally.findings()
        return None

    async def _unrecorded(self, walk: _ScrubCall, segments: Iterable[RemoteSegment]) -> Sequence[Finding]:
        """Return a finding for each rewritten one of *segments* that no record names."""
        found, requests = await unrecorded_findings(self._store, walk.stretch.partition, segments)
        walk.stretch.requests += requests
        return found

    async def _held(self, walk: _ScrubCall) -> tuple[Finding, ...]:
        """Return the confirmed suspects: seen again, and named by a manifest that was read after that."""
        partition, stretch = walk.stretch.partition, walk.stretch
        of_segments: list[Finding] = []
        for segment in dict.fromkeys(one.segment for one in walk.suspects):
            if segment is not None:
                inspection = await self._inspector.inspect(partition, segment, deep=walk.deep)
                stretch.requests += inspection.requests
                of_segments += inspection.findings
        of_records = [one.segment for one in walk.suspects if one.kind is FaultKind.REWRITING_MISSING]
        of_segments += await self._unrecorded(walk, [one for one in of_records if one is not None])
        of_parts = [one for one in walk.suspects if one.segment is None]
        manifest = await self._load(walk)
        if manifest is None:
            return ()
        named = _names_at(manifest, manifest.segments, of_segments)
        found: list[Finding] = []
        if of_parts or any(_base(one) < manifest.live_offset for one in of_segments):
            tally = SpilledTally(manifest)
            async for link in self._chain.walk(manifest):
                stretch.requests += link.requests
                found += [link.finding] if link.finding else []
                named |= _names_at(manifest, tally.take(link), of_segments)
            found += tally.findings()
        return (
            *(one for one in of_segments if _name(one) in named),
            *(one for one in of_parts if one in found),
        )


class _ScrubCall:
    """The state of one call of `scrub`: its findings so far, and its budget of requests."""

    def __init__(self, stretch: ScrubStretch, *, deep: bool, requests_max: int | None) -> None:
        self.stretch = stretch
        self.deep = deep
        self.suspects: list[Finding] = []
        self.rewritten: list[RemoteSegment] = []
        """Checked segments that a job rewrote."""
        self._requests_max = requests_max

    @property
    def is_spent(self) -> bool:
        """Say whether to stop. At least one segment is checked, so that every call makes progress."""
        limit = self._requests_max
        return limit is not None and self.stretch.segments > 0 and self.stretch.requests >= limit


def _base(finding: Finding) -> int:
    assert finding.segment is not None, "asked of a segment's findings only"
    return finding.segment.base_offset


def _name(finding: Finding) -> str:
    assert finding.segment is not None, "asked of a segment's findings only"
    assert finding.partition is not None, "it is of a partition"
    return data_key(finding.partition, finding.segment)


def _names_at(manifest: PartitionManifest, table: SegmentTable, findings: Sequence[Finding]) -> set[str]:
    """Return the names of the data objects that *table* has at the offsets of *findings*."""
    return {
        data_key(manifest.partition, segment)
        for one in findings
        if one.segment is not None
        for segment in table.overlapping(one.segment.base_offset, one.segment.next_offset)
    }
