"""
Which part of a partition's archive is restored: all of it, or its newest part.

Whole segments are restored, from the end backwards, without leaving one out. The newest segment is always
restored: a partition without a record would begin its offsets anew.

`Renaming` gives topics their names in a live target cluster. `target_fault` checks whether the settings
of a topic there would lose restored records. A broker deletes by the times of the records, and those are
as old as the archive. A topic with the cluster's ordinary retention would lose its restored records
within minutes.

`fault_of_takeover` tells whether the archive in a target continues the one in the source, or is another
one with a part missing. A daemon that was restarted with the target's configuration before a move was
over finds an archive there that ends too early, or none. Where its log begins later, it records a gap, or
begins a new archive; the missing records are then only in the source, which must stay. This policy only
compares; the mover acts on it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tieringd.model.human_units import span
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Gap
from tieringd.model.segment import RemoteSegment
from tieringd.policies.retention_time import retention_time_ms

KEEPING: Mapping[str, str] = {
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "message.timestamp.type": "CreateTime",
}
"""The settings a topic is created with: all that is written to it stays, and keeps its times."""

_UNLIMITED = -1
_LEGAL_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")


@dataclass(frozen=True, slots=True)
class Renaming:
    """How topics are renamed in the target cluster."""

    pattern: str | None = None
    """A regular expression that must match the whole name; other topics keep their name."""
    replacement: str = ""
    r"""May refer to groups of the pattern: `\1`."""
    prefix: str = ""
    suffix: str = ""

    def name_of(self, topic: str) -> str:
        """
        Return the name in the target cluster.

        Raises:
            ValueError: The result is not a legal topic name, or the replacement names no group of the
                pattern.
        """
        name = topic
        if self.pattern is not None:
            found = re.fullmatch(self.pattern, topic)
            try:
                name = topic if found is None else found.expand(self.replacement)
            except (re.error, IndexError) as error:
                raise ValueError(f"{self.replacement!r} cannot replace {self.pattern!r}: {error}") from error
        name = f"{self.prefix}{name}{self.suffix}"
        if not _LEGAL_NAME.fullmatch(name) or name in {".", ".."}:
            raise ValueError(f"topic {topic} would be named {name!r}, which is not a valid topic name")
        return name


@dataclass(frozen=True, slots=True)
class TargetFault:
    """Why a topic would not keep what is written to it, and what to do."""

    reason: str
    hint: str


def target_fault(
    settings: Mapping[str, str], *, oldest_ms: int, size_bytes: int, now_ms: int
) -> TargetFault | None:
    """
    Say why a topic with these *settings* would not keep what is written to it; None where it would.

    *oldest_ms* is the time of its oldest record, -1 where none has a time; *size_bytes* is the size of
    its largest partition.
    """
    if settings.get("message.timestamp.type") == "LogAppendTime":
        return TargetFault(
            "message.timestamp.type=LogAppendTime, which would replace the timestamps of the records",
            "Set it to CreateTime during the recovery",
        )
    if "delete" not in settings.get("cleanup.policy", "delete"):
        return None
    kept_ms = int(settings.get("retention.ms", _UNLIMITED))
    if kept_ms >= 0 and 0 <= oldest_ms < now_ms - kept_ms:
        return TargetFault(
            f"retention.ms={kept_ms}, but the oldest record is {span(now_ms - oldest_ms)} old: the broker "
            "would delete it within minutes",
            "Set retention.ms=-1 for the topic, or restore less with --last-ms",
        )
    kept_bytes = int(settings.get("retention.bytes", _UNLIMITED))
    if 0 <= kept_bytes < size_bytes:
        return TargetFault(
            f"retention.bytes={kept_bytes}, but {size_bytes} bytes of a partition are restored: the broker "
            "would delete the oldest within minutes",
            "Set retention.bytes=-1 for the topic, or restore less with --last-bytes",
        )
    return None


def fault_of_takeover(there: PartitionManifest, source: PartitionManifest) -> str:
    """
    Return why the daemon's archive *there* does not continue *source*; empty when it does.

    Both manifests must include their spilled segments.
    """
    # This time is copied with the manifest, and never changes.
    if there.began_at_ms != source.began_at_ms:
        return "a daemon has begun a new archive in the target, which lacks the segments of the source"
    for gap in there.gaps:
        base_offset = max(gap.base_offset, source.start_offset)
        lost = source.segments.overlapping(base_offset, min(gap.next_offset, source.next_offset))
        if lost:
            return (
                f"the target has a gap from offset {gap.base_offset} to {gap.last_offset}, although the "
                f"source has records in it, from offset {max(base_offset, lost[0].base_offset)} on"
            )
    return ""


@dataclass(frozen=True, slots=True)
class RestoreLimits:
    """How much of each partition to restore; None means no limit of that kind."""

    last_bytes: int | None = None
    last_ms: int | None = None
    """Counted back from the partition's newest record, because an archive may be years old."""


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """The segments to restore, and the gaps between them."""

    segments: tuple[RemoteSegment, ...]
    """Ascending, without a hole except for *gaps*."""
    gaps: tuple[Gap, ...]
    """Gaps within the restored range: offsets that no longer exist anywhere."""
    left_segments: int
    """The number of older segments that are not restored."""
    start_offset: int | None
    """
    The first readable offset; None when there is nothing.

    It is inside the first segment where a user deleted the records before it.
    """

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the segments."""
        return sum(segment.size_bytes for segment in self.segments)


def plan_restore(
    manifest: PartitionManifest, limits: RestoreLimits, *, older: Sequence[PartitionManifest] = ()
) -> RestorePlan:
    """
    Choose what to restore of *manifest*; of two limits the stricter one holds.

    *older* are the archives that it continues, oldest first, with their spilled segments. The limits count on
    into them.
    """
    archives = (*older, manifest)
    # The table of the only archive is used as it is: it makes its segments one by one.
    table = manifest.segments if not older else [one for part in archives for one in part.segments]
    newest_ms = max((retention_time_ms(segment) for segment in table), default=0)
    first, size_bytes = len(table), 0
    for row in range(len(table) - 1, -1, -1):
        segment = table[row]
        size_bytes += segment.size_bytes
        is_newest = row == len(table) - 1
        if not is_newest and limits.last_bytes is not None and size_bytes > limits.last_bytes:
            break
        is_old = limits.last_ms is not None and retention_time_ms(segment) < newest_ms - limits.last_ms
        if not is_newest and is_old:
            break
        first = row
    segments = tuple(table[row] for row in range(first, len(table)))
    start_offset = None
    if segments:
        base_offset = segments[0].base_offset
        holder = next((one for one in older if base_offset < one.next_offset), manifest)
        start_offset = max(holder.start_offset, base_offset)
    return RestorePlan(
        segments,
        gaps=tuple(
            gap
            for one in archives
            for gap in one.gaps
            if start_offset is not None and gap.base_offset >= start_offset
        ),
        left_segments=first,
        start_offset=start_offset,
    )
