"""The arguments and results of a compiled walk over batches: plain values, so callers need no numba."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Scanned(NamedTuple):
    """Where a scan of plain batches is, and what it has found."""

    expected_offset: int
    """The lowest offset that the next batch may have."""
    leader_epoch: int
    """That of the batches until here; negative where none is known."""
    checksum: int
    """The CRC32C of all bytes until here."""
    base_timestamp_ms: int | None
    """The smallest timestamp; None before the first."""
    max_timestamp_ms: int
    """The greatest timestamp; negative before the first."""
    index_at: int
    """How many bytes from here on the next index entry is due."""
    size_bytes: int = 0
    """How many bytes the last walk passed over."""
    record_count: int = 0
    """The records of these."""
    batch_count: int = 0
    """The batches of these."""
    entries: Sequence[tuple[int, int, int]] = ()
    """Index entries of these: offset, position in the view, greatest timestamp until there."""


class Checked(NamedTuple):
    """Where a check of stored batches is. See `formats.batch_offsets.OffsetCheck`."""

    expected_offset: int
    is_exact: bool
    section_end: int
    limit_offset: int
    row: int
    size_bytes: int = 0
    """How many bytes the last walk passed over."""


class CheckWalk(Protocol):
    """A walk that checks stored batches whose index names some of them."""

    def walk(self, view: memoryview, start: int, at: Checked) -> Checked:
        """Go on at *at* over the right batches at the front of *view*, whose first byte is at *start*."""


class BatchWalk(Protocol):
    """Walks over plain batches. Each stops before a batch that is not plain and right, or not whole."""

    def scan(self, view: memoryview, at: Scanned, *, limit_offset: int, interval_bytes: int) -> Scanned:
        """Go on at *at* over the batches at the front of *view* that end below *limit_offset*."""

    def check_of(self, positions: Sequence[int], offsets: Sequence[int], *, is_dense: bool) -> CheckWalk:
        """Return a check of batches of which some are at *positions*, and have *offsets*."""
