"""
The records of a range of offsets, on an executor: a portion in, Arrow batches out.

Everything else of an export takes its records from `record_batches`.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Final

from tieringd.archive.archive_reader import floor_position
from tieringd.errors import ObjectNotFound, TieringError
from tieringd.formats.object_keys import data_key
from tieringd.spark.decoder import SegmentDecoder, Selection
from tieringd.spark.jobs.export.plan import Lost

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    import pyarrow as pa

    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.segment import RemoteSegment, SegmentIndex
    from tieringd.spark.bucket import Bucket
    from tieringd.spark.jobs.export.plan import Portion
    from tieringd.spark.jobs.export.state import Isolation

COLUMNS: Final = ("key", "value", "partition", "offset", "timestamp", "timestampType", "headers")
"""Those of a record, without the topic's name."""
EXPIRED_MEANWHILE: Final = "expired in the archive while they were being exported"
LOOKS_MAX: Final = 5
"""How often in a row an object of a fresh manifest may have gone: a merge takes hours to come again."""


def record_batches(
    bucket: Bucket,
    portion: Portion,
    *,
    isolation: Isolation,
    fails_on_gap: bool,
    miss: Callable[[Lost], None],
) -> Iterator[pa.RecordBatch]:
    """
    Yield the records of a portion under `COLUMNS`, ascending by offset.

    An object that was merged away or compacted meanwhile is found again through the manifest. *miss* hears
    of offsets that the archive has let go since the portion was planned.

    Raises:
        TieringError: The archive no longer reaches so far; or, with *fails_on_gap*, begins later by now.
        CorruptDataError: Stored bytes are wrong; the error names the object and position.
    """
    offset, looks = portion.from_offset, 0
    while offset < portion.next_offset:
        manifest = _manifest(bucket, portion)
        if manifest.start_offset > offset:
            lost = Lost(
                portion.partition, offset, min(manifest.start_offset, portion.next_offset), EXPIRED_MEANWHILE
            )
            if fails_on_gap:
                raise TieringError(str(lost), hint="Allow gaps (`--allow-gaps`) to export the rest")
            miss(lost)
            offset = lost.next_offset
            continue
        begin = offset
        try:
            with closing(_segments(bucket, manifest, offset, portion.next_offset)) as segments:
                for segment in segments:
                    for batch in _segment_batches(bucket, portion, segment, offset, isolation):
                        yield batch
                        offset = batch.column("offset")[-1].as_py() + 1
                    offset = segment.next_offset
        except ObjectNotFound:
            looks = looks + 1 if offset == begin else 0
            if looks == LOOKS_MAX:
                raise
            continue
        return


def _manifest(bucket: Bucket, portion: Portion) -> PartitionManifest:
    manifest = bucket.run(bucket.manifests.load(portion.partition)).manifest
    if manifest is None or manifest.next_offset < portion.next_offset:
        raise TieringError(
            f"the archive of {portion.partition} no longer reaches offset {portion.next_offset - 1}, as it "
            "did when the export was planned",
            hint="It was cut back, moved or deleted; `tieringd archive topics` shows what is left",
        )
    return manifest


def _segments(
    bucket: Bucket, manifest: PartitionManifest, from_offset: int, next_offset: int
) -> Generator[RemoteSegment]:
    with closing(bucket.iterate(bucket.spillovers.pieces(manifest, from_offset=from_offset))) as pieces:
        for piece in pieces:
            if piece.start_offset >= next_offset:
                return
            yield from piece.segments.overlapping(from_offset, next_offset)


def _segment_batches(
    bucket: Bucket, portion: Portion, segment: RemoteSegment, offset: int, isolation: Isolation
) -> Iterator[pa.RecordBatch]:
    index = bucket.run(bucket.indexes.index_of(portion.partition, segment))
    key = data_key(portion.partition, segment)
    decoder = SegmentDecoder(
        COLUMNS,
        topic=portion.partition.topic,
        partition=portion.partition.partition,
        selection=Selection(
            max(offset, segment.base_offset),
            min(portion.next_offset, segment.next_offset),
            index.aborted if isolation == "read_committed" else None,
        ),
        source=key,
    )
    end = _end_position(index, portion.next_offset)
    with closing(bucket.runs(key, position=floor_position(index, offset), end=end)) as runs:
        for data, position in runs:
            yield from decoder.decode(data, position)
    yield from decoder.finish()


def _end_position(index: SegmentIndex, next_offset: int) -> int:
    """Return where the first indexed batch begins that holds nothing below *next_offset*."""
    return next((entry.position for entry in index.entries if entry.offset >= next_offset), index.size_bytes)
