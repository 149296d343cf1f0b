"""
Turn a user's positions into offsets, and check that the archive has the offsets between them.

Manifests give the archive's ends, and check explicit offsets. A time becomes the exact offset of the first
record with that time or a later one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicPartition
from tieringd.spark.source.data_loss import Loss, OnLoss
from tieringd.spark.source.option_values import fault
from tieringd.spark.source.positions import (
    EARLIEST_OFFSET,
    LATEST_OFFSET,
    AtOffsets,
    AtTime,
    AtTimes,
    Edge,
    Position,
)
from tieringd.spark.source.subscribed_topics import SubscribedPartitions
from tieringd.storage.at_once import at_once

if TYPE_CHECKING:
    # An ordinary import would load numba and pyarrow into processes that do not need them.
    from tieringd.spark.bucket import Bucket
    from tieringd.spark.source.options import OnNoMatch

LOOKUPS_AT_ONCE: Final = 16
_NOTHING: Final = (0, 0)
"""The begin and end offset of a partition of which nothing is archived."""


class OffsetFinder:
    """Finds the offsets of positions in an archive."""

    def __init__(self, bucket: Bucket, archived: SubscribedPartitions) -> None:
        self._bucket = bucket
        self._archived = archived

    def starts(self, position: Position, *, on_no_match: OnNoMatch) -> dict[TopicPartition, int]:
        """
        Return the offset at which to begin, for each partition, archived or not.

        A partition without a record as late as the time begins at its end, if *on_no_match* is `latest`.

        Raises:
            ConfigError: The position leaves out a partition, or with *on_no_match* `error` no record is as
                late as its time.
        """
        found = self._found(position)
        for partition, offset in found.items():
            if offset is not None:
                continue
            if on_no_match == "error":
                raise fault(
                    _option(position),
                    f"no archived record of {partition} has a time of {_time_ms(position, partition)} or "
                    "later",
                    hint="With startingOffsetsByTimestampStrategy latest, such a partition begins at its end",
                )
        return self._or_latest(found)

    def ends(self, position: Position) -> dict[TopicPartition, int]:
        """
        Return the offset at which to end, exclusive, for each partition, archived or not.

        A partition without a record as late as the time ends at the archive's end.

        Raises:
            ConfigError: The position leaves out a partition.
        """
        return self._or_latest(self._found(position))

    def _or_latest(self, found: Mapping[TopicPartition, int | None]) -> dict[TopicPartition, int]:
        return {
            partition: self._bounds(partition)[1] if offset is None else offset
            for partition, offset in found.items()
        }

    def _found(self, position: Position) -> dict[TopicPartition, int | None]:
        """Return the position's offset for each partition; None if no record is as late as the time."""
        partitions = sorted(self._archived.partitions)
        match position:
            case Edge():
                side = 0 if position is Edge.EARLIEST else 1
                return {partition: self._bounds(partition)[side] for partition in partitions}
            case AtOffsets():
                return {
                    partition: self._explicit(partition, offset)
                    for partition, offset in self._named(position, position.offsets).items()
                }
            case AtTimes():
                return self._at_times(self._named(position, position.times_ms))
            case AtTime():
                return self._at_times(dict.fromkeys(partitions, position.timestamp_ms))

    def _explicit(self, partition: TopicPartition, offset: int) -> int:
        begin, end = self._bounds(partition)
        return {EARLIEST_OFFSET: begin, LATEST_OFFSET: end}.get(offset, offset)

    def _bounds(self, partition: TopicPartition) -> tuple[int, int]:
        manifest = self._archived.manifests.get(partition)
        return _NOTHING if manifest is None else (manifest.start_offset, manifest.next_offset)

    def _named(
        self, position: AtOffsets | AtTimes, given: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, int]:
        """
        Return *given* in order, after checking that it names every partition, and no other topic.

        Raises:
            ConfigError: A partition is left out, or another topic is named.
        """
        known = self._archived.partitions
        missing = sorted(known - given.keys())
        if missing:
            names = ", ".join(str(partition) for partition in missing)
            raise fault(
                position.option,
                f"does not name {names}: it must name every partition",
                hint="As offsets, -2 is the earliest and -1 the latest",
            )
        topics = {partition.topic for partition in known}
        others = sorted({partition.topic for partition in given} - topics)
        if others:
            raise fault(position.option, f"names {', '.join(others)}, which is not among the topics to read")
        return dict(sorted(given.items()))

    def _at_times(self, times_ms: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
        async def offset(asked: tuple[TopicPartition, int]) -> int | None:
            manifest = self._archived.manifests.get(asked[0])
            if manifest is None:
                return None
            return await self._bucket.records.first_offset_at(manifest, asked[1])

        asked = list(times_ms.items())
        found = self._bucket.run(at_once(asked, offset, count=LOOKUPS_AT_ONCE))
        return {partition: one for (partition, _), one in zip(asked, found, strict=True)}


def require_order(
    start: Position,
    end: Position,
    starts: Mapping[TopicPartition, int],
    ends: Mapping[TopicPartition, int],
) -> None:
    """
    Check that no partition has an explicit end offset before its explicit start offset.

    Times may end before they begin; such a partition is not read.

    Raises:
        ConfigError: The explicit end of a partition is before its start.
    """
    if not isinstance(start, AtOffsets) or not isinstance(end, AtOffsets):
        return
    for partition, offset in end.offsets.items():
        if offset >= 0 and start.offsets.get(partition, 0) >= 0 and ends[partition] < starts[partition]:
            raise fault(
                end.option,
                f"{partition} would end at {ends[partition]}, before it begins at {starts[partition]}",
            )


def readable_range(
    partition: TopicPartition,
    manifest: PartitionManifest | None,
    from_offset: int,
    next_offset: int,
    *,
    rule: OnLoss,
) -> tuple[int, int]:
    """
    Return the part of the offsets from *from_offset* to *next_offset*, exclusive, that the archive has.

    Offsets in recorded gaps are treated as archived: the search for segments finds the gaps later.

    Raises:
        DataLossError: Offsets are missing, and *rule* does not allow that.
    """
    begin, end = _NOTHING if manifest is None else (manifest.start_offset, manifest.next_offset)
    if from_offset < min(begin, next_offset):
        reason = f"the archive begins at offset {begin}; earlier offsets have expired or were deleted"
        rule.meet(Loss(partition, from_offset, min(begin, next_offset) - 1, reason))
        from_offset = begin
    # A request for no offsets that begins past the archive's end assumes archived offsets before its begin.
    # Those are missing.
    base_offset = max(from_offset, end) if next_offset > from_offset else end
    beyond_offset = max(from_offset, next_offset)
    if beyond_offset > end:
        reason = (
            f"the archive ends at offset {end}; later offsets have not been archived yet"
            if manifest
            else "the bucket has nothing of this partition"
        )
        rule.meet(Loss(partition, base_offset, beyond_offset - 1, reason))
        next_offset = min(next_offset, end)
    return from_offset, max(from_offset, next_offset)


def _option(position: Position) -> str:
    return "startingOffsets" if isinstance(position, Edge) else position.option


def _time_ms(position: Position, partition: TopicPartition) -> int | None:
    match position:
        case AtTime():
            return position.timestamp_ms
        case AtTimes():
            return position.times_ms.get(partition)
        case _:
            return None
