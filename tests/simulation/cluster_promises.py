"""
The promises of the README on a cluster: the bucket and all brokers' logs against what was written.

Like `promises`, each check reads bytes and offsets only, and asks none of the daemons.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from crc32c import crc32c

from tests.simulation.stored_manifests import StoredManifests
from tieringd.formats.object_keys import data_key, index_key, manifest_key
from tieringd.formats.record_batch import parse_header

if TYPE_CHECKING:
    from tests.fakes.memory_store import MemoryStore
    from tests.simulation.node import Node
    from tests.simulation.replica import Replica
    from tests.simulation.replication import Replication
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.manifest_parts import Gap, Replacement
    from tieringd.model.segment import RemoteSegment

_FOLLOWED_MS = 90_000
"""How old a follower's manifest may be, and some."""


class ClusterPromises:
    """What must hold at every moment of *partitions* and of their archive in *store*."""

    def __init__(self, store: MemoryStore, partitions: list[Replication]) -> None:
        self._store = store
        self._manifests = StoredManifests(store)
        self._partitions = partitions
        self._seen: dict[str, PartitionManifest] = {}
        self._stored: dict[str, int] = {}
        self._unjudged: dict[str, set[RemoteSegment]] = {}
        self._cut_at: dict[tuple[str, int], float] = {}
        """When each archive was cut the nth time, in loop time."""
        self.checks = 0

    def check(self) -> None:
        """Check everything once."""
        self.checks += 1
        for partition in self._partitions:
            manifest = self.manifest_of(partition)
            if manifest is not None:
                self._check_objects(manifest)

    def check_put(self, key: str) -> None:
        """See that a segment's object, or its index, is not written over with other bytes."""
        data = self._object(key)
        if data is not None and key.endswith((".log", ".log.index")):
            assert self._stored.setdefault(key, crc32c(data)) == crc32c(data), f"{key} is written over"

    def check_commit(self, broker: int, key: str) -> None:
        """Check the manifest that a daemon beside *broker* has just stored under *key*."""
        for partition in self._partitions:
            if manifest_key(partition.log.identified) == key:
                manifest = self.manifest_of(partition)
                assert manifest is not None
                self._check_change(broker, partition, manifest)
                self._check_objects(manifest)
                self._seen[key] = manifest

    def check_trim(self, broker: int, partition: Replication, before_offset: int) -> None:
        """See that all that *broker* is about to let go is in the archive, unless others still hold it."""
        replica = partition.replicas[broker]
        manifest = self.manifest_of(partition)
        truth = {one.data for one in partition.log.batches}
        held = set() if broker == partition.leader else partition.log.held_offsets()
        for batch in replica.batches:
            is_let_go = replica.log_start_offset < batch.next_offset and batch.base_offset < before_offset
            is_users = (batch.next_offset - 1, batch.data) in partition.let_go
            if is_let_go and not is_users and batch.data in truth and batch.base_offset not in held:
                stored = manifest.segments.covering(batch.base_offset) if manifest else None
                what = f"{partition.name}: broker {broker} trims to {before_offset}"
                assert stored is not None, f"{what}, and {batch.base_offset} is not durable"
                assert batch.data in self._data(manifest, stored), f"{what}: {stored} holds other bytes"

    def check_pins(self, node: Node, now_ms: int) -> None:
        """See that what is closed and not durable is pinned, where the daemon had the time to see it."""
        for partition in self._partitions:
            replica, manifest = partition.replicas[node.number], self.manifest_of(partition)
            durable_to = self._durable_to(replica, manifest) if manifest else 0
            if manifest and any(now_ms - one.replaced_at_ms < _FOLLOWED_MS for one in manifest.replacements):
                # A follower does not know yet that less is durable than it was.
                continue
            pins = set(replica.pins())
            for base_offset, next_offset, closed_at in replica.closed_segments():
                if next_offset > durable_to and node.has_scanned_since(closed_at):
                    what = f"{partition.name}: {base_offset} is not pinned beside broker {node.number}"
                    assert (base_offset, next_offset) in pins, what

    def _durable_to(self, replica: Replica, manifest: PartitionManifest) -> int:
        """Return the offset below which the archive has what *replica* has."""
        del replica
        return manifest.next_offset

    def manifest_of(self, partition: Replication) -> PartitionManifest | None:
        """Return the manifest that the bucket holds; it has to be a sound one."""
        return self._manifests.get(manifest_key(partition.log.identified))

    def _check_objects(self, manifest: PartitionManifest) -> None:
        """Everything that is listed is there. That it is what was written was checked when it came."""
        assert not manifest.faults(), manifest.faults()
        for segment in manifest.segments:
            for key in (data_key(manifest.partition, segment), index_key(manifest.partition, segment)):
                assert self._object(key) is not None, f"{key} is listed and not in the bucket"

    def _check_change(self, broker: int, partition: Replication, manifest: PartitionManifest) -> None:
        name, key = str(partition.name), manifest_key(manifest.partition)
        earlier = self._seen.get(key)
        assert manifest.leader_epoch in partition.leaders, f"{name}: {manifest.leader_epoch} is no epoch"
        assert partition.leaders[manifest.leader_epoch] == broker, f"{name}: {broker} never led"
        known = list(earlier.segments) if earlier else []
        gaps = earlier.gaps if earlier else ()
        if earlier is not None:
            assert manifest.leader_epoch >= earlier.leader_epoch, f"{name}: a deposed leader wrote"
            count = len(earlier.replacements)
            # An impossible time of a cut, by a wrong clock, is corrected later.
            cuts = [[_undated(cut) for cut in one.replacements[:count]] for one in (manifest, earlier)]
            assert cuts[0] == cuts[1], f"{name}: history changed"
            assert len(manifest.replacements) - count in {0, 1}, f"{name}: several cuts at once"
            for number, cut in enumerate(manifest.replacements[count:], count):
                self._cut_at[name, number] = asyncio.get_running_loop().time()
                self._check_cut(partition, earlier, manifest, cut.base_offset)
                # Of a segment in which the archive begins, only what follows the start counts.
                start_offset = manifest.start_offset
                kept = [one for one in known if max(one.base_offset, start_offset) < cut.base_offset]
                # Pins may have a history that the log has forgotten. It keeps what is before the cut.
                shared = dict(earlier.epochs).keys() & dict(partition.log.epochs).keys()
                assert kept or shared or not known, f"{name}: all went for a log that began anew"
                known = kept
                gaps = tuple(one for one in gaps if one.base_offset < cut.base_offset)
            end = min(
                (one.base_offset for one in manifest.replacements[count:]), default=manifest.next_offset
            )
            known = [self._kept_of(one, manifest, end) for one in known]
        self._note_unjudged(partition, manifest, earlier)
        gaps = tuple(one for one in gaps if one.next_offset > manifest.start_offset)
        assert manifest.gaps[: len(gaps)] == gaps, f"{name}: history changed"
        for segment in self._check_history(partition, manifest, earlier, known):
            self._check_segment(partition, manifest, segment)
            if manifest.leader_epoch == partition.leader_epoch:
                wanted = partition.log.bytes_between(segment.base_offset, segment.next_offset)
                assert self._data(manifest, segment) == wanted, f"{name}: {segment} is not the leader's"
        for gap in manifest.gaps[len(gaps) :]:
            self._check_gap(broker, partition, manifest, gap)

    def _kept_of(self, known: RemoteSegment, manifest: PartitionManifest, end: int) -> RemoteSegment:
        """
        Return what stands for a *known* segment in an archive that was cut at *end*.

        It is the segment itself, or its part before the cut with the same bytes, stored by the new leader.
        """
        found = manifest.segments.covering(known.base_offset)
        if found is None or found == known or found.leader_epoch != manifest.leader_epoch:
            return known
        bounds = (known.base_offset, min(known.next_offset, end))
        if (found.base_offset, found.next_offset) != bounds:
            return known
        data = self._data(manifest, known)
        if self._data(manifest, found) != data[: found.size_bytes]:
            return known
        is_whole = found.size_bytes == len(data)
        assert is_whole or parse_header(data, found.size_bytes).base_offset >= end, f"{found} is too short"
        return found

    def _check_history(
        self,
        partition: Replication,
        manifest: PartitionManifest,
        earlier: PartitionManifest | None,
        known: list[RemoteSegment],
    ) -> list[RemoteSegment]:
        """See that *known* is all there as it was; return the segments that are new."""
        del earlier
        segments = list(manifest.segments)
        assert segments[: len(known)] == known, f"{partition.name}: history changed"
        return segments[len(known) :]

    def _note_unjudged(
        self, partition: Replication, manifest: PartitionManifest, earlier: PartitionManifest | None
    ) -> None:
        """
        Note what a new leader cannot compare: what others archived of offsets before its history begins.

        The leader's broker has deleted its own records there, and forgotten their epochs, so no
        broker can tell any more whether the archive holds the same.
        """
        if manifest.leader_epoch != partition.leader_epoch:
            return
        if earlier is not None and any(one.leader_epoch == manifest.leader_epoch for one in earlier.segments):
            return
        known_from = partition.log.epochs[0][1]
        self._unjudged[str(partition.name)] = {
            one for one in (earlier.segments if earlier else ()) if one.next_offset <= known_from
        }

    def unjudged_offsets(
        self, partition: Replication, manifest: PartitionManifest
    ) -> tuple[set[int], set[int]]:
        """Return the offsets of what the leader could not compare, and those of it that are another's."""
        unjudged: set[int] = set()
        others: set[int] = set()
        known = self._unjudged.get(str(partition.name), set())
        for segment in manifest.segments:
            # One may be merged of several by now.
            is_known = any(
                segment.base_offset <= one.base_offset and one.next_offset <= segment.next_offset
                for one in known
                if one == segment or one.size_bytes < segment.size_bytes
            )
            if not is_known:
                continue
            offsets = range(segment.base_offset, segment.next_offset)
            unjudged.update(offsets)
            wanted = partition.log.bytes_between(segment.base_offset, segment.next_offset)
            if self._data(manifest, segment) != wanted:
                others.update(offsets)
        return unjudged, others

    def _check_segment(
        self, partition: Replication, manifest: PartitionManifest, segment: RemoteSegment
    ) -> None:
        """A segment that comes holds batches that a leader wrote, whole, and that were stable then."""
        data = self._data(manifest, segment)
        assert (len(data), crc32c(data)) == (segment.size_bytes, segment.crc32c), segment
        bound = partition.stable_to[segment.leader_epoch]
        assert segment.next_offset <= bound, f"{segment} goes past the last stable offset {bound}"
        position, expected = 0, segment.base_offset
        while position < len(data):
            header = parse_header(data, position)
            batch = data[position : position + header.size_bytes]
            assert header.base_offset == expected, f"{segment} lacks {expected}"
            is_newer = header.leader_epoch > segment.leader_epoch
            assert not is_newer, f"{segment} has a batch of epoch {header.leader_epoch}"
            assert batch in partition.log._journal[expected], f"{segment}: {expected} was never written so"
            position, expected = position + len(batch), header.last_offset + 1
        assert expected == segment.next_offset, f"{segment} ends at {expected}"

    def _check_gap(self, broker: int, partition: Replication, manifest: PartitionManifest, gap: Gap) -> None:
        """What is recorded as lost is lost to the leader, and was not pinned when the broker deleted it."""
        if broker != partition.leader or manifest.leader_epoch != partition.leader_epoch:
            # What a deposed leader had is not known any more.
            return
        replica, name = partition.log, str(partition.name)
        # What users deleted is held by nothing.
        offsets = set(range(gap.base_offset, gap.next_offset)) - partition.let_go_offsets()
        held = offsets & replica.held_offsets()
        assert not held, f"{name}: {gap} is recorded, and {min(held)} is on the leader's disk"
        for one in replica.deletions:
            if any(
                cut.base_offset < one.next_offset
                and one.base_offset <= cut.last_offset
                and (one.pinned_at is None or one.pinned_at <= self._cut_at.get((name, number), math.inf))
                for number, cut in enumerate(manifest.replacements)
            ):
                # Durable then, and cut off by another leader since: an unclean election that brings
                # this log back cannot bring back what was trimmed of it. What was pinned after the cut
                # is not durable, and may not go.
                continue
            safe = offsets & set(range(one.base_offset, one.next_offset)) if one.is_safe else set()
            safe -= replica.unprovable_offsets()
            assert not safe, f"{name}: {gap} is recorded, and {one} was pinned or trimmed"

    def _check_cut(
        self, partition: Replication, earlier: PartitionManifest, manifest: PartitionManifest, offset: int
    ) -> None:
        """What is cut off diverges, and the good records that go with it are still with the leader."""
        if manifest.leader_epoch != partition.leader_epoch:
            return
        cut = [one for one in earlier.segments if one.base_offset >= offset]
        log = partition.log
        markers = {
            (one.base_offset, parse_header(one.data).leader_epoch)
            for one in log.batches
            if one.marker is not None
        }
        is_reopened = any(
            one.marker_offset >= earlier.next_offset and (one.marker_offset, one.leader_epoch) not in markers
            for one in earlier.crossing
        )
        if cut and not is_reopened:
            last = cut[-1]
            stored = self._data(manifest, last)
            assert stored != log.bytes_between(last.base_offset, last.next_offset), f"{last} was good"
        held = log.held_offsets()
        for segment in cut:
            stored = self._data(manifest, segment)
            for one in log.batches:
                if segment.base_offset <= one.base_offset < segment.next_offset and one.data in stored:
                    assert one.base_offset in held, f"{one.base_offset} was only archived, and is cut off"

    def expect_converged(self, partition: Replication) -> None:
        """All that is closed and stable is durable and right, and nothing durable is pinned."""
        manifest, log = self.manifest_of(partition), partition.log
        name = str(partition.name)
        assert manifest is not None, f"{name}: nothing is archived"
        closed = [one for one in log.bases_on_disk if one <= log.last_stable_offset]
        assert manifest.next_offset >= closed[-1], f"{name}: {manifest.next_offset} is not {closed[-1]}"
        _, others = self.unjudged_offsets(partition, manifest)
        for segment in (one for one in manifest.segments if one.base_offset not in others):
            stored = self._data(manifest, segment)
            wanted = log.bytes_between(segment.base_offset, segment.next_offset)
            assert stored == wanted, f"{name}: {segment} is not what the leader holds"
        self._expect_no_pins(partition, manifest)

    def _expect_no_pins(self, partition: Replication, manifest: PartitionManifest) -> None:
        for replica in partition.replicas:
            durable = [one for one in replica.pins() if one[1] <= manifest.next_offset]
            assert not durable, f"{partition.name}: pins are left in {replica.path}: {durable}"

    def expect_all_on_disk(self, partition: Replication, manifest: PartitionManifest) -> None:
        """What is acknowledged and not in the archive is in the leader's log."""
        wanted = set(range(manifest.next_offset, partition.log.next_offset)) - partition.let_go_offsets()
        missing = wanted - partition.log.held_offsets()
        assert not missing, f"{partition.name}: {min(missing)} is nowhere"

    def _data(self, manifest: PartitionManifest, segment: RemoteSegment) -> bytes:
        data = self._object(data_key(manifest.partition, segment))
        assert data is not None, f"the object of {segment} is not in the bucket"
        return data

    def _object(self, key: str) -> bytes | None:
        found = self._store.objects.get(key)
        return None if found is None else found[0]


def _undated(cut: Replacement) -> Replacement:
    return replace(cut, replaced_at_ms=0)


def offsets_of_gaps(manifest: PartitionManifest) -> set[int]:
    """Return every offset that is recorded as lost."""
    return {one for gap in manifest.gaps for one in range(gap.base_offset, gap.next_offset)}


def values_at(log: Replica, manifest: PartitionManifest, *, read_committed: bool) -> dict[int, bytes]:
    """Return the records that reading the archive has to give."""
    lost = offsets_of_gaps(manifest)
    return {
        offset: value
        for offset, value in log.values(read_committed=read_committed).items()
        if manifest.start_offset <= offset < manifest.next_offset and offset not in lost
    }


def cut_by_gaps(log: Replica, manifest: PartitionManifest) -> set[int]:
    """Return the offsets of transactions that a gap cuts off from their markers: they may not count."""
    cut: set[int] = set()
    for gap in manifest.gaps:
        opened = log._open_transactions(gap.base_offset)
        for one in log.batches:
            first_offset = opened.get(one.producer_id, gap.base_offset)
            if one.marker is None and first_offset <= one.base_offset < gap.base_offset:
                cut |= set(range(one.base_offset, one.next_offset))
    return cut
