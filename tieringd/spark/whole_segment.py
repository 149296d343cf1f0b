"""A stored segment from its first batch to its last, for a task that goes over all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crc32c import crc32c

from tieringd.archive.archive_reader import checked_batches, require_checksum
from tieringd.formats.object_keys import data_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tieringd.archive.archive_reader import Batch
    from tieringd.model.partition import TopicIdPartition
    from tieringd.model.segment import RemoteSegment
    from tieringd.spark.bucket import Bucket


def batches_of(bucket: Bucket, partition: TopicIdPartition, segment: RemoteSegment) -> Iterator[Batch]:
    """
    Yield all batches of a segment; what comes next is fetched meanwhile.

    Raises:
        ObjectNotFound: The object has gone: look at the manifest again.
        CorruptDataError: A batch is wrong; or, after the last one, the object is not the manifest's.
    """
    key, checksum = data_key(partition, segment), 0
    for run, position in bucket.runs(key, position=0, end=segment.size_bytes):
        checksum = crc32c(run, checksum)
        yield from checked_batches(run, position, key)
    require_checksum(segment, checksum, key)
