"""
Whether the archive in a target goes on from the one in the source, or is another with a part missing.

A daemon that was restarted with the target's configuration before a move was over finds an archive there
that ends too early, or none. Where its log begins later, it records a gap, or begins anew; and the source
holds what is missing. Then the source must stay. No more than a comparison: who acts on it is the mover.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tieringd.model.manifest import PartitionManifest


def fault_of_takeover(there: PartitionManifest, source: PartitionManifest) -> str:
    """
    Return why *there*, which a daemon has written, does not go on from *source*; empty when it does.

    Both have to hold what they have spilled.
    """
    # It is copied with the manifest, and never changes.
    if there.began_at_ms != source.began_at_ms:
        return "a daemon began the archive in the target anew: what the source holds is not in it"
    for gap in there.gaps:
        base_offset = max(gap.base_offset, source.start_offset)
        lost = source.segments.overlapping(base_offset, min(gap.next_offset, source.next_offset))
        if lost:
            return (
                f"the target has a gap from offset {gap.base_offset} to {gap.last_offset}, and the source "
                f"holds records of it, from {max(base_offset, lost[0].base_offset)} on"
            )
    return ""
