"""The promises in a storm: segments may be merged, and users may have records deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.cluster_promises import ClusterPromises

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

    def check_put(self, key: str) -> None:
        """See that no object is written over with other bytes; one that arrived damaged is sent again."""
        if key not in getattr(self._store, "damaged", ()):
            super().check_put(key)
