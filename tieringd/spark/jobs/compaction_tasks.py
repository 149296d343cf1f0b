"""The tasks of a compaction on Spark's executors: read the keys of segments, and rewrite runs of segments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from crc32c import crc32c

from tieringd.archive.archive_reader import Batch, checked_batches, require_checksum
from tieringd.archive.segment_swap import Successor
from tieringd.errors import CorruptDataError, ObjectNotFound
from tieringd.formats.object_keys import data_key
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import RemoteSegment
from tieringd.spark.bucket import Bucket, bucket_of
from tieringd.spark.jobs.chosen import SegmentShare, rewriter_of
from tieringd.spark.latest_records import CompactionRules, LatestCut, LatestKeys

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pyspark import Broadcast
    from pyspark.sql import Row

    # An ordinary import would load pydantic into processes that do not need it.
    from tieringd.config import Config


KEYS_HELD_MAX: Final = 500_000
"""Keys that a task holds in memory before it yields them. A segment seldom has more."""
KEY_SCHEMA: Final = (
    "partition int, summary_of int, key binary, offset bigint, row int, is_due boolean, records bigint, "
    "keyless bigint, fault string"
)
"""The Spark schema of `KeyRow`."""
BITMAP_OFFSETS: Final = 32_768
"""The number of values that one of Spark's bitmaps covers."""


def batches_of(bucket: Bucket, partition: TopicIdPartition, segment: RemoteSegment) -> Iterator[Batch]:
    """
    Yield all batches of a segment. The next bytes are fetched while the caller works.

    Raises:
        ObjectNotFound: The object is gone; the caller has to read the manifest again.
        CorruptDataError: A batch is damaged. Or, after the last batch, the object does not have the checksum
            in the manifest.
    """
    key, checksum = data_key(partition, segment), 0
    for run, position in bucket.runs(key, position=0, end=segment.size_bytes):
        checksum = crc32c(run, checksum)
        yield from checked_batches(run, position, key)
    require_checksum(segment, checksum, key)


class KeyRow(NamedTuple):
    """A key's latest record so far, or the summary of a segment."""

    partition: int
    """The partition's place in the job's list."""
    summary_of: int
    """The row of the segment that this row sums up; -1 for a key."""
    key: bytes | None
    offset: int
    row: int
    """The segment's row in its partition."""
    is_due: bool = False
    """Whether the key's record is a tombstone to remove."""
    records: int = 0
    keyless: int = 0
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class KeyReader:
    """Reads the keys of shares. Runs on an executor."""

    config: Config
    rules: Mapping[int, CompactionRules]
    """The rules of each partition, by its place in the job's list."""
    keys_held_max: int = KEYS_HELD_MAX

    def __call__(self, numbered: tuple[int, SegmentShare]) -> Iterator[KeyRow]:
        """Yield the rows of a share, which comes with its partition's number."""
        partition, share = numbered
        for row, segment in enumerate(share.segments, share.first_row):
            yield from self._segment(partition, share.partition, row, segment)

    def _segment(
        self, number: int, partition: TopicIdPartition, row: int, segment: RemoteSegment
    ) -> Iterator[KeyRow]:
        bucket, summary = bucket_of(self.config), KeyRow(number, row, None, -1, row)
        try:
            index = bucket.run(bucket.indexes.index_of(partition, segment))
            keys = LatestKeys(index, self.rules[number])
            for batch in batches_of(bucket, partition, segment):
                keys.note(batch)
                if len(keys.latest) >= self.keys_held_max:
                    yield from _key_rows(number, row, keys.latest)
                    keys.latest = {}
            yield from _key_rows(number, row, keys.latest)
        except (CorruptDataError, ObjectNotFound) as error:
            yield summary._replace(fault=str(error))
        else:
            yield summary._replace(records=keys.records, keyless=keys.keyless)


@dataclass(frozen=True, slots=True)
class CompactionRun:
    """Neighbouring segments that become one segment."""

    partition: TopicIdPartition
    parts: tuple[RemoteSegment, ...]
    rules: CompactionRules
    removed_records: int
    """The number of records to remove, as counted when the keys were read."""


@dataclass(frozen=True, slots=True)
class RunRewriter:
    """Rewrites runs. Runs on an executor."""

    config: Config
    runs: Broadcast[list[CompactionRun]]
    writer_id: str

    def __call__(self, rows: Iterable[Row]) -> Iterator[tuple[int, Successor | str]]:
        """
        Yield each run's number and its stored segment, or the reason why nothing was stored.

        *rows* are bitmaps, by run; a run without records to keep has one row without a bitmap.
        """
        for run, some in groupby(rows, key=attrgetter("run")):
            winners = offsets_in((row.bucket, row.bits) for row in some if row.bits is not None)
            yield run, self._rewritten(self.runs.value[run], winners)

    def _rewritten(self, run: CompactionRun, winners: NDArray[np.int64]) -> Successor | str:
        bucket = bucket_of(self.config)
        rewriter = rewriter_of(bucket, writer_id=self.writer_id)
        try:
            successor = bucket.run(rewriter.rewrite(run.partition, run.parts, LatestCut(winners, run.rules)))
        except (CorruptDataError, ObjectNotFound) as error:
            return str(error)
        if successor.removed_records != run.removed_records:
            # Spark computed lost keys again, and the result differs. An object may have been missing then.
            return (
                f"{successor.removed_records} records would be removed from the segments from offset "
                f"{run.parts[0].base_offset} on, instead of the planned {run.removed_records}. Run the job "
                "again"
            )
        return successor


def offsets_in(bitmaps: Iterable[tuple[int, bytes]]) -> NDArray[np.int64]:
    """
    Return the offsets in Spark's *bitmaps*, ascending. Each bitmap is a bucket number and its bits.

    Only one bitmap is held at a time: each has 4 KiB, and may stand for a single offset.
    """
    found = {
        bucket: np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little"))
        + (bucket - 1) * BITMAP_OFFSETS
        for bucket, bits in bitmaps
    }
    if not found:
        return np.empty(0, np.int64)
    return np.concatenate([found[bucket] for bucket in sorted(found)]).astype(np.int64)


def _key_rows(number: int, row: int, latest: Mapping[bytes, tuple[int, bool]]) -> Iterator[KeyRow]:
    for key, (offset, is_due) in latest.items():
        yield KeyRow(number, -1, key, offset, row, is_due)
