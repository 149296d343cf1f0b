"""
The journal: what the demo's writer wrote, kept in memory, where tieringd cannot touch it.

It has a digest of every record and, where the writer knows the bytes, of every closed segment.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from tieringd.model.partition import TopicPartition

Headers = tuple[tuple[str, bytes | None], ...]


def record_digest(timestamp_ms: int, key: bytes | None, value: bytes | None, headers: Headers) -> bytes:
    """Return a digest of 16 bytes, equal for two records only if the records are equal."""
    return blake2b(repr((timestamp_ms, key, value, headers)).encode(), digest_size=16).digest()


@dataclass(slots=True)
class PartitionJournal:
    """What was written to one partition."""

    records: dict[int, bytes] = field(default_factory=dict)
    """Digest of each record by offset, ascending."""
    segments: dict[int, bytes] = field(default_factory=dict)
    """SHA-256 of closed segments by base offset; empty where a real broker writes the segments."""

    @property
    def next_offset(self) -> int:
        """Return the offset after the last record."""
        return next(reversed(self.records), -1) + 1


class Journal:
    """What was written to each of the demo's partitions."""

    def __init__(self, partitions: Iterable[TopicPartition]) -> None:
        self.partitions = {one: PartitionJournal() for one in sorted(partitions)}

    def note(
        self,
        partition: TopicPartition,
        offset: int,
        *,
        timestamp_ms: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers = (),
    ) -> None:
        """Note one record that was written."""
        digest = record_digest(timestamp_ms, key, value, headers)
        self.partitions[partition].records[offset] = digest
