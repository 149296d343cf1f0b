"""The tasks of `usage` on executors: count partitions from their manifests, in rows by day."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Literal, TypeAlias

from tieringd.errors import CorruptDataError, ObjectNotFound
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import NO_TIMESTAMP, RemoteSegment
from tieringd.model.segment_table import SegmentTable
from tieringd.spark.bucket import Bucket, bucket_of
from tieringd.spark.jobs.prices import UploadRequests

if TYPE_CHECKING:
    # An ordinary import would load pydantic into processes that do not need it.
    from tieringd.config import Config

DayOf: TypeAlias = Literal["upload", "record"]
"""What decides about a segment's day: its upload, or its newest record."""

READ_ATTEMPTS = 3
"""Attempts to read one partition. If a spillover manifest is missing, the live manifest has changed."""
SCHEMA = (
    "topic string, partition int, day date, segments long, held_bytes long, retired_segments long, "
    "retired_bytes long, index_bytes long, write_requests long, fault string"
)


@dataclass(slots=True)
class PartitionDay:
    """A partition's counts of one day, with the columns of `SCHEMA`."""

    topic: str
    partition: int
    day: date | None
    """None for a partition that could not be counted."""
    segments: int = 0
    held_bytes: int = 0
    """Bytes of data objects."""
    retired_segments: int = 0
    """Segments that readers no longer see, but that are still in the bucket."""
    retired_bytes: int = 0
    index_bytes: int = 0
    """Bytes of the indexes of live and retired segments."""
    write_requests: int = 0
    """The estimated number of requests that stored all of these."""
    fault: str | None = None


def count_partitions(
    config: Config, day_of: DayOf, partitions: Iterable[TopicIdPartition]
) -> Iterator[tuple[object, ...]]:
    """
    Yield a row of `SCHEMA` for each day of each partition. Runs on an executor.

    A partition that cannot be read has one row, with a fault.
    """
    bucket = bucket_of(config)
    requests = UploadRequests.of(config)
    for partition in partitions:
        try:
            held, retired = bucket.run(_tables(bucket, partition))
        except (CorruptDataError, ObjectNotFound) as error:
            fault = f"{partition} cannot be counted: {error}"
            yield astuple(PartitionDay(partition.topic, partition.partition, None, fault=fault))
            continue
        for day in _days(partition, held, retired, day_of=day_of, requests=requests):
            yield astuple(day)


async def _tables(
    bucket: Bucket, partition: TopicIdPartition
) -> tuple[list[SegmentTable], list[SegmentTable]]:
    """
    Return the live segments and the retired segments of a partition; none without a manifest.

    Raises:
        CorruptDataError: A manifest is damaged.
        ObjectNotFound: A spillover manifest is missing in all attempts.
    """
    for attempt in range(READ_ATTEMPTS):
        manifest = (await bucket.manifests.load(partition)).manifest
        if manifest is None:
            return [], []
        try:
            return await _tables_of(bucket, manifest)
        except (CorruptDataError, ObjectNotFound):
            if attempt == READ_ATTEMPTS - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


async def _tables_of(
    bucket: Bucket, manifest: PartitionManifest
) -> tuple[list[SegmentTable], list[SegmentTable]]:
    held, retired = [manifest.segments], [one.segments for one in manifest.retired]
    spillover = manifest.spillover
    if spillover is not None:
        async for part in bucket.spillovers.parts(manifest, from_offset=spillover.begin_offset):
            left = part.segments.without_head(part.segments.row_at_or_after(spillover.begin_offset))
            first_held = left.row_at_or_after(manifest.start_offset) if spillover.segments else len(left)
            held.append(left.without_head(first_held))
            retired.append(left.head(first_held))
    return held, retired


def _days(
    partition: TopicIdPartition,
    held: Iterable[SegmentTable],
    retired: Iterable[SegmentTable],
    *,
    day_of: DayOf,
    requests: UploadRequests,
) -> Iterable[PartitionDay]:
    days: dict[date, PartitionDay] = {}
    for tables, is_held in ((held, True), (retired, False)):
        for table in tables:
            for segment in table:
                day = _day(segment, day_of)
                count = days.setdefault(day, PartitionDay(partition.topic, partition.partition, day))
                count.index_bytes += segment.index_size_bytes
                count.write_requests += requests.of_segment(segment.size_bytes)
                if is_held:
                    count.segments += 1
                    count.held_bytes += segment.size_bytes
                else:
                    count.retired_segments += 1
                    count.retired_bytes += segment.size_bytes
    return days.values()


def _day(segment: RemoteSegment, day_of: DayOf) -> date:
    """Return a segment's UTC day. Without a valid record timestamp the upload decides."""
    if day_of == "record" and segment.max_timestamp_ms != NO_TIMESTAMP:
        try:
            return datetime.fromtimestamp(segment.max_timestamp_ms / 1000, tz=UTC).date()
        except (OverflowError, ValueError, OSError):
            pass
    return datetime.fromtimestamp(segment.uploaded_at_ms / 1000, tz=UTC).date()
