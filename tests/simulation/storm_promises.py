"""The promises in a storm: segments may be merged, and users may have records deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.cluster_promises import ClusterPromises
from tieringd.formats.object_keys import topic_key, topic_manifest_key

if TYPE_CHECKING:
    from tests.simulation.replication import Replication
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.segment import RemoteSegment


class StormPromises(ClusterPromises):
    """What must hold of an archive whose head users delete, and whose segments are merged."""

    def _check_history(
        self,
        partition: Replication,
        manifest: PartitionManifest,
        earlier: PartitionManifest | None,
        known: list[RemoteSegment],
    ) -> list[RemoteSegment]:
        """See that what was archived still is, as it was or as a part of a merge; return what is new."""
        name = str(partition.name)
        if earlier is not None and manifest.start_offset > earlier.start_offset:
            assert manifest.start_offset <= partition.user_start, (
                f"{name}: the archive begins at {manifest.start_offset}, and users deleted up to "
                f"{partition.user_start} only"
            )
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

    def check_trim(self, broker: int, partition: Replication, before_offset: int) -> None:
        """See that a restore would find the topic, and that the archive is not another leader's by now."""
        super().check_trim(broker, partition, before_offset)
        key = topic_manifest_key(topic_key(partition.log.identified))
        assert self._object(key) is not None, f"{partition.name} is trimmed, and its topic has no manifest"

    def check_rested_trim(self, broker: int, partition: Replication, before_offset: int) -> None:
        """See that what a broker lets go of is in the archive as that broker has it, whoever leads."""
        replica, manifest = partition.replicas[broker], self.manifest_of(partition)
        assert manifest is not None, f"{partition.name} is trimmed, and has no archive"
        for batch in replica.batches:
            if max(replica.log_start_offset, manifest.start_offset) <= batch.base_offset < before_offset:
                stored = manifest.segments.covering(batch.base_offset)
                is_there = stored is not None and batch.data in self._data(manifest, stored)
                what = f"{partition.name}: broker {broker} trims to {before_offset}"
                assert is_there, f"{what}, and {batch.base_offset} is not in the archive any more"

    def check_put(self, key: str) -> None:
        """See that no object is written over with other bytes; one that arrived damaged is sent again."""
        if key not in getattr(self._store, "damaged", ()):
            super().check_put(key)
