"""
The promises of the README, checked from outside: bucket and log directories against what was written.

Each check reads bytes and offsets only. It asks no service of the daemon's, so that a fault
there cannot hide itself; the formats are shared, and have tests of their own.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from crc32c import crc32c

from tests.simulation.stored_manifests import StoredManifests
from tieringd.formats.object_keys import data_key, index_key, manifest_key
from tieringd.formats.sidecar import decode_sidecar

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fakes.log_writer import LogWriter
    from tests.fakes.memory_store import MemoryStore
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.segment import RemoteSegment


TURNS_MAX = 3
"""A daemon takes over one commit of another, and one of its own may arrive late."""


class Promises:
    """What must hold at every moment of *writers*' logs and of their archive in *store*."""

    def __init__(
        self,
        store: MemoryStore,
        writers: list[LogWriter],
        *,
        may_expire: Callable[[LogWriter, RemoteSegment], bool] = lambda *_: False,
        delete_delay_seconds: float = 0.0,
    ) -> None:
        """Take what is checked; *may_expire* says which segments total retention may take."""
        self._delete_delay_seconds = delete_delay_seconds
        self._gone_at: dict[str, float] = {}
        """When each data object left the manifest."""
        self._turns: dict[tuple[str, int], list[str]] = {}
        """The writers that committed under a partition's leader epoch, one after the other."""
        self._store = store
        self._manifests = StoredManifests(store)
        self._may_expire = may_expire
        self._writers = writers
        self._seen: dict[str, PartitionManifest] = {}
        self.checks = 0

    def check(self) -> None:
        """Check everything once."""
        self.checks += 1
        self._check_delay()
        for writer in self._writers:
            manifest = self.manifest_of(writer)
            if manifest is not None:
                self._check_manifest(writer, manifest)
            self._check_trimmed(writer, manifest)

    def manifest_of(self, writer: LogWriter) -> PartitionManifest | None:
        """Return the manifest that the bucket holds; it has to be a sound one."""
        return self._manifests.get(manifest_key(writer.identified))

    def _check_manifest(self, writer: LogWriter, manifest: PartitionManifest) -> None:
        name = str(writer.name)
        assert manifest.partition == writer.identified, name
        assert not manifest.faults(), (name, manifest.faults())
        assert manifest.next_offset <= writer.last_stable_offset, f"{name}: unstable offsets are archived"
        earlier = self._seen.get(name)
        if earlier != manifest:
            for gap in manifest.gaps:
                assert self._is_dropped(writer, gap.base_offset, gap.next_offset), f"{name}: {gap} never was"
            if earlier is not None:
                kept = self._check_expired(writer, manifest, earlier)
                self._check_kept(writer, manifest, kept)
                gaps = tuple(gap for gap in earlier.gaps if gap.base_offset >= manifest.start_offset)
                assert manifest.gaps[: len(gaps)] == gaps, f"{name}: history changed"
                assert manifest.leader_epoch >= earlier.leader_epoch, f"{name}: a deposed leader wrote"
            self._seen[name] = manifest
            self._check_writers(name, manifest)
        for segment in manifest.segments:
            data = self._object(data_key(manifest.partition, segment))
            assert data is not None, f"{name}: the object of {segment} is not in the bucket"
            assert (len(data), crc32c(data)) == (segment.size_bytes, segment.crc32c), f"{name}: {segment}"
            assert data == _written(writer, segment), f"{name}: {segment} holds other bytes"
            sidecar = self._object(index_key(manifest.partition, segment))
            assert sidecar is not None, f"{name}: the index of {segment} is not in the bucket"
            assert len(sidecar) == segment.index_size_bytes, f"{name}: {segment}"
            assert decode_sidecar(sidecar).crc32c == segment.crc32c, f"{name}: {segment}"

    def _check_expired(
        self, writer: LogWriter, manifest: PartitionManifest, earlier: PartitionManifest
    ) -> list[RemoteSegment]:
        """Return what *manifest* still has to hold of *earlier*: all but what was past its retention."""
        kept = [one for one in earlier.segments if one.base_offset >= manifest.start_offset]
        gone = [one for one in earlier.segments if one.base_offset < manifest.start_offset]
        for segment in gone:
            assert self._may_expire(writer, segment), f"{writer.name}: {segment} was within its retention"
            assert segment.last_offset < manifest.start_offset, f"{writer.name}: a part of {segment} is gone"
        retired = {_undated(segment) for one in manifest.retired for segment in one.segments}
        known = [segment for one in earlier.retired for segment in one.segments]
        for segment in gone:
            self._gone_at.setdefault(data_key(manifest.partition, segment), self._now_seconds())
        for segment in [*known, *gone]:
            is_there = self._object(data_key(manifest.partition, segment)) is not None
            is_known = _undated(segment) in retired
            assert is_known or not is_there, f"{writer.name}: no process will delete {segment}"
        return kept

    def _check_writers(self, name: str, manifest: PartitionManifest) -> None:
        """Assert that two daemons under one leader epoch do not take turns for ever."""
        turns = self._turns.setdefault((name, manifest.leader_epoch), [])
        if turns[-1:] != [manifest.writer_id]:
            turns.append(manifest.writer_id)
        assert turns.count(manifest.writer_id) <= TURNS_MAX, f"{name}: daemons take turns: {turns}"

    def _check_delay(self) -> None:
        """An object outlives what named it by the delete delay: readers may have the manifest of before."""
        for key in [one for one in self._gone_at if self._object(one) is None]:
            seconds = self._now_seconds() - self._gone_at.pop(key)
            assert seconds >= self._delete_delay_seconds, f"{key} was deleted after {seconds} s"

    def _now_seconds(self) -> float:
        return asyncio.get_running_loop().time() if self._delete_delay_seconds else 0.0

    def _check_kept(self, writer: LogWriter, manifest: PartitionManifest, kept: list[RemoteSegment]) -> None:
        """What was held is held as it was, or as a part of a merge, and then its objects go later."""
        retired = {_undated(segment) for one in manifest.retired for segment in one.segments}
        for segment in kept:
            found = manifest.segments.covering(segment.base_offset)
            if found is None or _undated(found) != _undated(segment):
                assert found is not None, f"{writer.name}: {segment} is gone"
                assert found.next_offset >= segment.next_offset, f"{writer.name}: history changed"
                is_there = self._object(data_key(manifest.partition, segment)) is not None
                is_known = _undated(segment) in retired
                assert is_known or not is_there, f"{writer.name}: no process will delete {segment}"

    def _check_trimmed(self, writer: LogWriter, manifest: PartitionManifest | None) -> None:
        """Every segment that is gone, and that the broker did not delete itself, is in the archive."""
        on_disk = set(writer.bases_on_disk)
        for base_offset in writer.bases:
            if base_offset in on_disk or base_offset in writer.dropped:
                continue
            if manifest is not None and manifest.expired_at_ms is not None:
                following = min((one for one in writer.bases if one > base_offset), default=base_offset)
                if following <= manifest.start_offset:
                    continue
            stored = manifest.segments.covering(base_offset) if manifest else None
            assert stored is not None, f"{writer.name}: segment {base_offset} was trimmed and is nowhere"
            is_merged = stored.base_offset in writer.bases
            assert stored.base_offset == base_offset or is_merged, f"{writer.name}: {base_offset} was trimmed"
            # That its object has the written bytes was just checked with the manifest.

    def _is_dropped(self, writer: LogWriter, base_offset: int, next_offset: int) -> bool:
        bases = [*writer.bases, writer.next_offset]
        lost = {
            offset
            for base, following in pairwise(bases)
            if base in writer.dropped
            for offset in range(base, following)
        }
        return lost.issuperset(range(base_offset, next_offset))

    def _object(self, key: str) -> bytes | None:
        found = self._store.objects.get(key)
        return None if found is None else found[0]


def _written(writer: LogWriter, segment: RemoteSegment) -> bytes:
    """Return what a stored segment has to hold: mostly of one local segment, of several once merged."""
    bases = [base for base in writer.bases if segment.base_offset <= base <= segment.last_offset]
    return b"".join(writer.data_of(base) for base in bases)


def _undated(segment: RemoteSegment) -> RemoteSegment:
    """Return *segment* without its upload time, which is corrected where a clock was wrong."""
    return replace(segment, uploaded_at_ms=0)
