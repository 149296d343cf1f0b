"""
Tombstones and markers that a broker's cleaner has dropped, and that the archive still needs.

A cleaner drops a tombstone when the log below it has no older record of the key any more, and a
transaction's marker when the log has no record of the transaction any more. The archive may still have
such a record: in a segment that was trimmed before the cleaner ran, or in one whose compacted form is not
uploaded yet. So a cleaned segment is compared, batch by batch, with its archived form. Where tombstones or
such markers are missing, the archived segment is rewritten with the records that the cleaner left and all
of its tombstones and markers.

Only a producer's first marker in the compared segments can end a transaction that began before them. A
later one ends a transaction that began among them, and the cleaner has dropped all of its records there.

Batches that a cleaner left unchanged are compared by their headers; only others are decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from tieringd.archive.archive_reader import Batch
from tieringd.broker.layout import Layout
from tieringd.broker.segment_file import OpenSegment, position_of
from tieringd.errors import CorruptDataError
from tieringd.formats.record_batch import HEADER_BYTES, BatchHeader, parse_header
from tieringd.formats.records import Record, batch_with, iter_records
from tieringd.model.segment import LocalSegment, SegmentIndex


class LocalBatches:
    """
    The batches of neighbouring local segments between two offsets, read in ascending order.

    Holds the files open until it is closed. All methods block.
    """

    def __init__(self, files: Sequence[OpenSegment], *, base_offset: int, next_offset: int) -> None:
        self._files = files
        self._next_offset = next_offset
        self._file = 0
        first = files[0]
        is_inside = first.segment.base_offset < base_offset
        self._position = position_of(first.fd, first.segment, base_offset) if is_inside else 0

    @classmethod
    def opened(
        cls, layout: Layout, segments: Sequence[LocalSegment], *, base_offset: int, next_offset: int
    ) -> LocalBatches:
        """
        Open the files of *segments*; the caller closes them.

        Raises:
            CorruptDataError: An offset is inside a batch.
            LocalFileError: A file is gone, or may not be read.
        """
        with ExitStack() as opened:
            files: list[OpenSegment] = []
            for segment in segments:
                files.append(layout.open(segment))
                opened.callback(files[-1].close)
            batches = cls(files, base_offset=base_offset, next_offset=next_offset)
            opened.pop_all()
        return batches

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()

    def take(self, archived: BatchHeader) -> memoryview | None:
        """
        Return what the log still has of *archived*: None for nothing, an empty view for an unchanged batch.

        Raises:
            CorruptDataError: The log has a batch before it that the archive does not have.
            LocalFileError: A file changed while it was read.
        """
        header = self._next()
        if header is not None and header.base_offset < archived.base_offset:
            raise self._not_archived(header)
        if header is None or header.base_offset > archived.base_offset:
            return None
        position, file = self._position, self._files[self._file]
        self._position += header.size_bytes
        if (header.crc, header.size_bytes) == (archived.crc, archived.size_bytes):
            return memoryview(b"")
        return memoryview(file.read_at(position, header.size_bytes))

    def require_end(self) -> None:
        """
        Check that all batches were read, and that the files are those that were scanned.

        Raises:
            CorruptDataError: There is a batch that the archive does not have.
            LocalFileError: A file changed while it was read.
        """
        header = self._next()
        if header is not None:
            raise self._not_archived(header)
        for file in self._files:
            file.require_unchanged()

    def _next(self) -> BatchHeader | None:
        while self._position >= self._files[self._file].segment.size_bytes:
            if self._file + 1 == len(self._files):
                return None
            self._file, self._position = self._file + 1, 0
        header = parse_header(self._files[self._file].read_at(self._position, HEADER_BYTES))
        return header if header.base_offset < self._next_offset else None

    def _not_archived(self, header: BatchHeader) -> CorruptDataError:
        return CorruptDataError(
            "a compacted segment has records that the archive does not have",
            source=self._files[self._file].segment.path,
            position=self._position,
            offset=header.base_offset,
        )


class TombstoneCut:
    """
    Decides which records stay of archived segments that a cleaner has compacted.

    Implements `archive.segment_rewriter.Cut`. It keeps each record that the cleaner left, each tombstone,
    and each marker. Used once, for neighbouring segments.
    """

    keeps_aborted = True

    def __init__(self, local: LocalBatches) -> None:
        self._local = local
        self.removed_records = 0
        self.kept_tombstones = 0
        """Tombstones kept although the cleaner has dropped them."""
        self.kept_markers = 0
        """
        Markers kept although the cleaner has dropped them, if their transactions may have begun before the
        first of the segments.
        """
        self._ended: set[int] = set()
        """Producers with a marker so far."""

    def begin(self, index: SegmentIndex) -> None:
        """Take the index of the segment whose batches come next; it is not needed here."""

    def left_of(self, batch: Batch) -> bytes | memoryview | None:
        """Return what is left of a batch; None or empty when no record stays."""
        header, local = batch.header, self._local.take(batch.header)
        if header.is_control and header.record_count:
            self._note_marker(header, local)
        if header.is_control or not header.record_count or (local is not None and not local):
            return batch.data
        offsets = {record.offset for record in iter_records(local)} if local else set()
        found: set[int] = set()

        def stays(record: Record) -> bool:
            found.add(record.offset)
            if record.offset in offsets:
                return True
            is_tombstone = record.key is not None and record.value is None
            self.kept_tombstones += is_tombstone
            return is_tombstone

        left = batch_with(batch.data, stays)
        if not offsets <= found:
            raise CorruptDataError(
                "a compacted segment has records that the archive does not have", offset=min(offsets - found)
            )
        self.removed_records += header.record_count - (parse_header(left).record_count if left else 0)
        return left

    def _note_marker(self, header: BatchHeader, local: memoryview | None) -> None:
        """Count the marker of *header* if it is needed, and is not in *local*, what the log has of it."""
        is_first = header.producer_id not in self._ended
        self._ended.add(header.producer_id)
        # A cleaner may leave an empty batch in the place of a producer's last marker.
        is_dropped = local is None or bool(local and not parse_header(local).record_count)
        self.kept_markers += is_first and is_dropped
