"""What an archiver's step did and left: what the reconciler goes on from."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did and what it left."""

    uploaded: int = 0
    trimmed: int = 0
    expired: int = 0
    """Stored segments that were let go by total retention, and those whose objects were deleted."""
    gaps: int = 0
    pending_segments: int = 0
    """Eligible segments that are still to be uploaded."""
    fault: str = ""
    """What holds the partition back until someone acts; empty when nothing does."""
    waits_because: str = field(default="", compare=False)
    """Why the first segment that is not eligible waits."""
    waits_for_lineage: bool = field(default=False, compare=False)
    """Nothing was done: the archive's tail is not known to be on the leader's lineage."""
    needs_another_look: bool = False
    """Offsets are missing on disk; the next observation decides whether they are a gap."""

    @property
    def made_progress(self) -> bool:
        """
        Say whether another step on the same observation may find more to do.

        A trim ends an observation: its files are not all there any more.
        """
        return (self.uploaded > 0 or self.expired > 0 or self.gaps > 0) and not self.trimmed
