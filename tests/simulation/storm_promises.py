"""The promises in a storm: segments may be merged, and users may have records deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.cluster_promises import ClusterPromises, offsets_of_gaps
from tieringd.formats.object_keys import topic_key, topic_manifest_key
from tieringd.formats.record_batch import parse_header

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tests.simulation.replica import Replica
    from tests.simulation.replication import Replication
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.segment import RemoteSegment


class StormPromises(ClusterPromises):
    """What must hold of an archive whose head users delete, or retention, and whose segments are merged."""

    old_before_ms: Callable[[], int] = staticmethod(lambda: 0)
    """Retention by age may take records that are dated before it."""

    compares_pinned = False
    """Whether what is not pinned has to be in the archive by its bytes, and not only by its offsets."""

    def _check_history(
        self,
        partition: Replication,
        manifest: PartitionManifest,
        earlier: PartitionManifest | None,
        known: list[RemoteSegment],
    ) -> list[RemoteSegment]:
        """See that what was archived still is, as it was or as a part of a merge; return what is new."""
        name = str(partition.name)
        if earlier is None and manifest.leader_epoch == partition.leader_epoch:
            log_start_offset = partition.log.log_start_offset
            assert manifest.start_offset <= log_start_offset, (
                f"{name}: the archive begins at {manifest.start_offset}, and the log at {log_start_offset}"
            )
        self._check_start(partition, manifest, earlier, known)
        kept = [one for one in known if one.next_offset > manifest.start_offset]
        merged: set[RemoteSegment] = set()
        for one in kept:
            found = manifest.segments.covering(one.base_offset)
            assert found is not None, f"{name}: {one} is gone"
            if found != one:
                assert found.next_offset >= one.next_offset, f"{name}: history changed"
                merged.add(found)
        for one in merged:
            parts = [each for each in kept if one.base_offset <= each.base_offset < one.next_offset]
            wanted = b"".join(self._data(manifest, each) for each in parts)
            assert self._data(manifest, one) == wanted, f"{name}: {one} is not what it was merged of"
        before = {*known, *merged}
        return [one for one in manifest.segments if one not in before]

    def _check_start(
        self,
        partition: Replication,
        manifest: PartitionManifest,
        earlier: PartitionManifest | None,
        known: list[RemoteSegment],
    ) -> None:
        """See that the archive lacks nothing at its head but what users deleted, and has nothing of that."""
        name, start_offset = str(partition.name), manifest.start_offset
        if earlier is not None and start_offset > earlier.start_offset:
            hidden = {*known, *manifest.segments.overlapping(0, start_offset)}
            for offset, data in self._records(manifest, hidden):
                if offset < start_offset and not partition.may_be_deleted(offset, data):
                    assert parse_header(data, 0).max_timestamp_ms < self.old_before_ms(), (
                        f"{name}: the archive begins at {start_offset}, and nothing deleted {offset}"
                    )
                    partition.let_go.add((offset, data))
        last_offset = max((offset for offset, _ in partition.deleted), default=-1)
        visible = manifest.segments.overlapping(start_offset, last_offset + 1)
        for offset, data in self._records(manifest, visible):
            assert offset < start_offset or (offset, data) not in partition.deleted, (
                f"{name}: {offset} is deleted, and can be read from {start_offset} on"
            )

    def expect_deleted(self, partition: Replication) -> None:
        """See that readers of the bucket, and of the broker through a gateway, get no deleted record."""
        manifest = self.manifest_of(partition)
        assert manifest is not None
        self._check_start(partition, manifest, None, [])
        for one in partition.log.batches:
            for offset in range(max(one.base_offset, manifest.deleted_before), one.next_offset):
                is_there = (
                    offset >= partition.log.log_start_offset and (offset, one.data) in partition.deleted
                )
                assert not is_there, f"{partition.name}: {offset} is deleted, and the broker has it again"

    def _records(
        self, manifest: PartitionManifest, segments: Iterable[RemoteSegment]
    ) -> Iterator[tuple[int, bytes]]:
        """Yield offset and batch of each record in *segments*."""
        for segment in segments:
            data, position = self._data(manifest, segment), 0
            while position < len(data):
                header = parse_header(data, position)
                batch = data[position : position + header.size_bytes]
                yield from ((offset, batch) for offset in range(header.base_offset, header.last_offset + 1))
                position += len(batch)

    def check_trim(self, broker: int, partition: Replication, before_offset: int) -> None:
        """See that a restore would find the topic, and that the archive is not another leader's by now."""
        super().check_trim(broker, partition, before_offset)
        key = topic_manifest_key(topic_key(partition.log.identified))
        assert self._object(key) is not None, f"{partition.name} is trimmed, and its topic has no manifest"

    def check_rested_trim(self, broker: int, partition: Replication, before_offset: int) -> None:
        """Check that what a broker deletes is in the archive as that broker has it, under any leader."""
        replica, manifest = partition.replicas[broker], self.manifest_of(partition)
        assert manifest is not None, f"{partition.name} is trimmed, and has no archive"
        for batch in replica.batches:
            if max(replica.log_start_offset, manifest.start_offset) <= batch.base_offset < before_offset:
                stored = manifest.segments.covering(batch.base_offset)
                is_there = stored is not None and batch.data in self._data(manifest, stored)
                what = f"{partition.name}: broker {broker} trims to {before_offset}"
                assert is_there, f"{what}, and {batch.base_offset} is not in the archive any more"

    def check_replicated(self, partition: Replication, before_offset: int) -> None:
        """Assert that every replica has, or had, the records that the leader is about to delete."""
        begin = partition.log.log_start_offset
        wanted = [one for one in partition.log.batches if begin <= one.base_offset < before_offset]
        for broker, replica in enumerate(partition.replicas):
            known = {one.data for one in replica.batches}
            lacks = [one.base_offset for one in wanted if one.data not in known]
            assert not lacks, f"{partition.name}: {lacks[0]} is trimmed, and broker {broker} never had it"

    def _durable_to(self, replica: Replica, manifest: PartitionManifest) -> int:
        """Compare bytes: another leader's records may be in the archive at the same offsets."""
        if not self.compares_pinned:
            return manifest.next_offset
        begin = max(manifest.start_offset, replica.bases_on_disk[0])
        stored = manifest.segments.overlapping(begin, manifest.next_offset)
        known = dict(self._records(manifest, stored))
        lost = offsets_of_gaps(manifest)
        wanted = (
            one
            for one in replica.batches
            if begin <= one.base_offset and one.next_offset <= manifest.next_offset
        )
        others = (
            one.base_offset
            for one in wanted
            if one.base_offset not in lost and known.get(one.base_offset) != one.data
        )
        return next(others, manifest.next_offset)

    def check_put(self, key: str) -> None:
        """See that no object is written over with other bytes; one that arrived damaged is sent again."""
        if key not in getattr(self._store, "damaged", ()):
            super().check_put(key)
