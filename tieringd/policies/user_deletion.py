"""
A user's DeleteRecords, as far as the start of the broker's log tells of one: the archive follows it.

A log's start moves on for three reasons: we trimmed it, the broker's own retention took whole segments,
or a user had records deleted. Only of the last is the archive to let go as well, and nobody says which it
was. It is a user's for certain where all of this holds:

* it is past our own trims, of which the manifest has a record, and past where the log began when its leader
  claimed the manifest: replicas roll at different offsets, so what an earlier leader's retention cut may lie
  inside a segment of ours;
* it is inside a local segment: retention takes whole ones;
* no stored segment begins there, so that it is no end of a segment of an earlier leader either.

Everything else counts as not a user's: then the archive keeps more than it has to, until total retention.
A log whose offsets are translated (Redpanda's) tells nothing, as its own retention may cut a segment.

One look is never enough: a broker that crashed may show another start for a while. Who acts on this waits
for a second look that agrees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tieringd.model.local_log import LocalLog
    from tieringd.model.manifest import PartitionManifest


def users_start(log: LocalLog, manifest: PartitionManifest, *, log_start_offset: int) -> int | None:
    """
    Return the offset before which a user deleted the records; None where none did, or it is not certain.

    It is never past what is archived, and always past the archive's start.
    """
    start_offset = min(log_start_offset, manifest.next_offset)
    is_ours = log_start_offset <= manifest.trimmed_offset
    if is_ours or start_offset <= manifest.start_offset or log.is_reframed:
        return None
    is_inside = any(
        segment.base_offset < log_start_offset < (segment.next_offset or log_start_offset + 1)
        for segment in log.segments
    )
    stored = manifest.segments.covering(log_start_offset)
    is_stored_base = stored is not None and stored.base_offset == log_start_offset
    return start_offset if is_inside and not is_stored_base else None
