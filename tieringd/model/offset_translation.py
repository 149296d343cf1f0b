"""
How a Redpanda log's own offsets relate to the offsets that Kafka clients see.

Redpanda gives every batch of its log an offset, including its own bookkeeping. Clients see offsets that
do not count the bookkeeping. The difference at a place in the log is the *delta*: how many offsets
before it are not Kafka's. It never falls along a log, and every replica of a partition has the same.

Only code that reads Redpanda's files handles raw offsets. All other offsets in this package are Kafka's.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class OffsetTranslation:
    """A known place of a log: of the offsets below *raw_offset*, *delta* are not Kafka's."""

    raw_offset: int
    delta: int

    def __post_init__(self) -> None:
        if not 0 <= self.delta <= self.raw_offset:
            raise ValueError(
                f"{self.delta} of the {self.raw_offset} offsets before it cannot be Redpanda's own"
            )

    @property
    def kafka_offset(self) -> int:
        """Return the first Kafka offset at or after this place."""
        return self.raw_offset - self.delta

    @classmethod
    def at(cls, *, raw_offset: int, kafka_offset: int) -> OffsetTranslation:
        """
        Return the translation of a place whose offset is known in both counts.

        Raises:
            ValueError: The Kafka offset is larger than the raw one, or negative.
        """
        return cls(raw_offset, raw_offset - kafka_offset)


LOG_BEGINNING = OffsetTranslation(0, 0)
"""The beginning of every log that was created empty."""
