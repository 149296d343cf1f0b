"""What a job says of the segments that it rewrote: which they are, and what they were made of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tieringd.model.segment import RemoteSegment


class RewritingKind(StrEnum):
    """Which of the new segments count together."""

    MERGED = "merged"
    """Each for itself; they hold all records of what they were made of."""
    REWRITTEN = "rewritten"
    """Each for itself."""
    COMPACTED = "compacted"
    """All together or not at all."""


@dataclass(frozen=True, slots=True)
class SegmentIdentity:
    """What the name of a stored segment says of it, but for its index, which may be made again."""

    base_offset: int
    last_offset: int
    size_bytes: int
    leader_epoch: int
    writer_id: str

    @classmethod
    def of(cls, segment: RemoteSegment) -> SegmentIdentity:
        """Return that of a segment."""
        return cls(
            segment.base_offset,
            segment.last_offset,
            segment.size_bytes,
            segment.leader_epoch,
            segment.writer_id,
        )

    def overlaps(self, other: SegmentIdentity) -> bool:
        """Say whether both have offsets in common."""
        return self.base_offset <= other.last_offset and other.base_offset <= self.last_offset


@dataclass(frozen=True, slots=True)
class Rewriting:
    """Segments of one partition that are all stored, and may take the places of what they were made of."""

    kind: RewritingKind
    replaced: tuple[SegmentIdentity, ...]
    """Of what they were made of, those that were rewritten themselves."""
    stored: tuple[SegmentIdentity, ...]
    """Ascending; at least one."""

    @classmethod
    def of(
        cls, kind: RewritingKind, parts: tuple[RemoteSegment, ...], segments: tuple[RemoteSegment, ...]
    ) -> Rewriting:
        """Return that of *segments*, which are made of *parts*."""
        return cls(
            kind,
            tuple(SegmentIdentity.of(part) for part in parts if part.is_rewritten),
            tuple(map(SegmentIdentity.of, segments)),
        )

    @property
    def writer_id(self) -> str:
        """Return whoever stored them."""
        return self.stored[0].writer_id
