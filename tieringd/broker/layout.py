"""
The layout seam: how one kind of broker lays its logs out on disk.

All higher layers work on Kafka's offsets and Kafka's batches. Kafka's own files have this form already;
Redpanda's are re-framed into a spool file first. Calls block; services make them in a thread.

`batch_start` finds where the batch around an offset begins. `open_transactions_at` finds the transactions
that are open at an offset of a log, and the offset where each began: a replay from there would undo them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Protocol

import structlog

from tieringd.broker.log_dir import ChangeReports, LogDirRescan, LogDirScan
from tieringd.broker.redpanda_log_dir import (
    RedpandaLogs,
    UnknownTranslationError,
    last_raw_offset,
    scan_redpanda_dirs,
)
from tieringd.broker.redpanda_segment_file import (
    read_broker_timestamp_ms,
    reframe_segment_file,
    scan_redpanda_transactions,
    translation_of,
)
from tieringd.broker.segment_file import (
    LogWalk,
    OpenSegment,
    batch_start_in,
    open_segment,
    position_of,
    read_broker_indexes,
    scan_transactions,
)
from tieringd.errors import CorruptDataError, LocalFileError
from tieringd.formats.segment_scan import EndedBy, HeaderWalk
from tieringd.formats.transactions import MarkerSearch, TransactionTracker
from tieringd.model.local_log import LocalLog, LocalPartition
from tieringd.model.offset_translation import OffsetTranslation
from tieringd.model.segment import BrokerIndexes, CrossingTransaction, LocalSegment

log = structlog.get_logger()


class Layout(Protocol):
    """
    The operations that differ between the brokers' files.

    Errors are those of the functions behind them.
    """

    def scan(self, paths: Sequence[str]) -> LogDirScan:
        """Find the partitions in the log directories *paths*."""

    def note_changes(self, reports: ChangeReports) -> None:
        """Ask *reports* what changed in the partitions' directories, before their logs are read."""

    def held(self) -> AbstractSet[str]:
        """
        Return the partitions' directories in which no name has changed since their logs were read.

        The changes are those of the last `note_changes`. A name is one of a file: a segment's, or that of a
        file that the broker replaces whole.
        """

    def still(self, asked: AbstractSet[str]) -> AbstractSet[str]:
        """
        Return those of the partitions' directories *asked* whose logs are as `read_log` returned them last.

        They count as read: the changes are those of the last `note_changes`, and this scan looks at none of
        them.
        """

    def read_log(self, partition: LocalPartition, known: Iterable[OffsetTranslation]) -> LocalLog:
        """Return the segments of a partition with Kafka's offsets; *known* are translations in its log."""

    def open(self, segment: LocalSegment) -> OpenSegment:
        """Open a segment's batches in Kafka's form; the caller closes the result."""

    def scan_transactions(
        self, segment: LocalSegment, tracker: TransactionTracker, *, position: int, next_offset: int
    ) -> LogWalk:
        """Add the transactions of a segment to *tracker*, from *position* and *next_offset* on."""

    def side_files(self, segment: LocalSegment) -> BrokerIndexes:
        """Return the broker's own side files of a segment; None for each that is missing."""

    def broker_timestamp_ms(self, segment: LocalSegment) -> int | None:
        """Return when the broker last appended to a closed segment, by its own clock; None if unknown."""

    def needs_archive(self, partition: LocalPartition) -> bool:
        """Return whether the last read of a partition failed because no offset translation is known."""

    def translation_at(self, log: LocalLog, offset: int) -> OffsetTranslation | None:
        """Return the translation to remember for *offset*, a segment's base; None if there is none."""


class KafkaLayout:
    """
    Kafka's own log directories.

    An instance remembers its earlier scans, so one instance serves one daemon, and one thread at a time.
    """

    def __init__(self) -> None:
        self._rescan = LogDirRescan()

    def scan(self, paths: Sequence[str]) -> LogDirScan:
        """See `Layout.scan`."""
        return self._rescan.scan(paths)

    def note_changes(self, reports: ChangeReports) -> None:
        """See `Layout.note_changes`."""
        self._rescan.note_changes(reports)

    def held(self) -> AbstractSet[str]:
        """See `Layout.held`."""
        return self._rescan.held()

    def still(self, asked: AbstractSet[str]) -> AbstractSet[str]:
        """See `Layout.still`."""
        return self._rescan.still(asked)

    def read_log(self, partition: LocalPartition, known: Iterable[OffsetTranslation]) -> LocalLog:
        """See `Layout.read_log`."""
        del known
        return self._rescan.read(partition)

    def open(self, segment: LocalSegment) -> OpenSegment:
        """See `Layout.open`."""
        return OpenSegment.open(segment)

    def scan_transactions(
        self, segment: LocalSegment, tracker: TransactionTracker, *, position: int, next_offset: int
    ) -> LogWalk:
        """See `Layout.scan_transactions`."""
        return scan_transactions(segment, tracker, position=position, next_offset=next_offset)

    def side_files(self, segment: LocalSegment) -> BrokerIndexes:
        """See `Layout.side_files`."""
        return read_broker_indexes(segment)

    def broker_timestamp_ms(self, segment: LocalSegment) -> int | None:
        """Return None: Kafka knows the times of the records only."""
        del segment
        return None

    def needs_archive(self, partition: LocalPartition) -> bool:
        """Return False: Kafka's offsets need no translation."""
        del partition
        return False

    def translation_at(self, log: LocalLog, offset: int) -> OffsetTranslation | None:
        """Return None: Kafka's offsets need no translation."""
        del log, offset
        return None


@dataclass(frozen=True, slots=True)
class SpooledSegment(OpenSegment):
    """A Redpanda segment's Kafka form in an unlinked file, together with the source file."""

    source_fd: int
    source: LocalSegment

    def close(self) -> None:
        """Close both files. That frees the spool's space."""
        os.close(self.fd)
        os.close(self.source_fd)

    def require_unchanged(self) -> None:
        """
        Compare Redpanda's file with the scan of its directory.

        Raises:
            LocalFileError: The file has changed, or its path belongs to another file.
        """
        OpenSegment(self.source_fd, self.source).require_unchanged()


class RedpandaLayout:
    """
    Redpanda's data directories; closed segments only.

    An instance remembers its counts for each file, so one instance serves one daemon. Each open segment
    takes as much space as its size in the spool directory.
    """

    def __init__(self, spool_directory: str) -> None:
        self._spool_directory = spool_directory
        self._logs = RedpandaLogs()
        self._untranslated: set[str] = set()
        self._untimed: dict[str, str] = {}

    def scan(self, paths: Sequence[str]) -> LogDirScan:
        """See `Layout.scan`. State of partitions that are gone is dropped."""
        found = scan_redpanda_dirs(paths)
        on_disk = {one.path for one in found.partitions}
        self._logs.forget_others(on_disk)
        self._untranslated &= on_disk
        for gone in [path for path in list(self._untimed) if path not in on_disk]:
            self._untimed.pop(gone, None)
        return found

    def note_changes(self, reports: ChangeReports) -> None:
        """Do nothing: every read lists the directory."""
        del reports

    def held(self) -> AbstractSet[str]:
        """Return no directory: every read lists them."""
        return frozenset()

    def still(self, asked: AbstractSet[str]) -> AbstractSet[str]:
        """Return no directory, as `held` does."""
        del asked
        return frozenset()

    def read_log(self, partition: LocalPartition, known: Iterable[OffsetTranslation]) -> LocalLog:
        """See `Layout.read_log`."""
        self._untranslated.discard(partition.path)
        try:
            return replace(self._logs.read_local_log(partition, known), is_reframed=True)
        except UnknownTranslationError:
            self._untranslated.add(partition.path)
            raise

    def open(self, segment: LocalSegment) -> OpenSegment:
        """See `Layout.open`; it writes the whole segment's Kafka form to the spool."""
        source_fd = open_segment(segment)
        try:
            spool_fd = self._spool()
            try:
                there = reframe_segment_file(source_fd, segment, spool_fd)
            except BaseException:
                os.close(spool_fd)
                raise
        except BaseException:
            os.close(source_fd)
            raise
        return SpooledSegment(spool_fd, there, source_fd, segment)

    def scan_transactions(
        self, segment: LocalSegment, tracker: TransactionTracker, *, position: int, next_offset: int
    ) -> LogWalk:
        """See `Layout.scan_transactions`. Walks always begin at the segment's beginning."""
        assert (position, next_offset) == (0, segment.base_offset), "parts of a segment are not uploaded"
        return scan_redpanda_transactions(segment, tracker)

    def side_files(self, segment: LocalSegment) -> BrokerIndexes:
        """Return none: Redpanda's indexes hold other offsets and positions."""
        del segment
        return BrokerIndexes()

    def broker_timestamp_ms(self, segment: LocalSegment) -> int | None:
        """
        See `Layout.broker_timestamp_ms`; also None if the index is missing, stale or damaged.

        The times of the records are used then, so no caller waits for a valid index. The reason is
        logged once. Redpanda writes the index some time after it has closed the segment, so call this late.
        """
        if segment.is_active:
            return None
        try:
            return read_broker_timestamp_ms(segment, last_raw_offset=last_raw_offset(segment))
        except (CorruptDataError, LocalFileError) as error:
            # Uploads go in order, so each directory's last reason is enough to log no reason twice.
            directory, _, _ = segment.path.rpartition("/")
            reason = str(error)
            if self._untimed.get(directory) != reason:
                self._untimed[directory] = reason
                log.warning("no broker timestamp for segment", segment=segment.path, error=reason)
            return None

    def needs_archive(self, partition: LocalPartition) -> bool:
        """See `Layout.needs_archive`."""
        return partition.path in self._untranslated

    def translation_at(self, log: LocalLog, offset: int) -> OffsetTranslation | None:
        """See `Layout.translation_at`."""
        for segment in log.segments:
            if segment.base_offset == offset:
                return translation_of(segment)
        return None

    def _spool(self) -> int:
        try:
            os.makedirs(self._spool_directory, exist_ok=True)  # noqa: PTH103 - paths are text throughout this layer
            fd, path = tempfile.mkstemp(dir=self._spool_directory)
            os.unlink(path)  # noqa: PTH108 - likewise
        except OSError as error:
            raise LocalFileError(
                f"no segment can be spooled in {self._spool_directory}: {error.strerror}",
                path=self._spool_directory,
            ) from error
        return fd


def batch_start(layout: Layout, log: LocalLog, offset: int) -> int:
    """
    Return the base offset of the batch of *log* that *offset* is inside of; *offset* if it is inside none.

    This reads the headers of one segment. Blocks.

    Raises:
        LocalFileError: The file cannot be read, or is gone.
        CorruptDataError: A header is impossible.
    """
    for segment in log.segments:
        if segment.base_offset < offset and (segment.next_offset is None or offset < segment.next_offset):
            file = layout.open(segment)
            try:
                return batch_start_in(file, segment, offset)
            finally:
                file.close()
    return offset


def open_transactions_at(layout: Layout, log: LocalLog, offset: int) -> Mapping[int, int]:
    """
    Return the first local offset of each producer's transaction that has no marker before *offset*.

    A transaction is missing from the result if the log holds none of its records any more. This reads
    every header below *offset*. Blocks.

    Raises:
        LocalFileError: A file cannot be read, or is gone.
        CorruptDataError: A header is impossible, or *offset* is inside a batch.
    """
    tracker = TransactionTracker(log.first_offset or 0)
    for segment in log.segments:
        if segment.base_offset >= offset:
            break
        file = layout.open(segment)
        try:
            size_bytes = file.segment.size_bytes
            if segment.next_offset is None or segment.next_offset > offset:
                size_bytes = position_of(file.fd, file.segment, offset)
            walk = HeaderWalk(
                file.read_at, size_bytes=size_bytes, base_offset=segment.base_offset, source=segment.path
            )
            walk.follow_transactions(tracker)
        finally:
            file.close()
    return dict(tracker.open_transactions)


@dataclass(frozen=True, slots=True)
class TransactionEnds:
    """How transactions that are open at some offset end in a log."""

    ended: tuple[CrossingTransaction, ...] = ()
    """Transactions with a marker in the log."""
    aborted: frozenset[int] = frozenset()
    """The producers of those whose marker is an abort."""
    lost: Mapping[int, int] = field(default_factory=dict)
    """First offset by producer of those whose marker may be in offsets that the log does not have."""
    awaited: Mapping[int, int] = field(default_factory=dict)
    """First offset by producer of those that have no marker up to the end of the log."""


def transaction_ends(
    layout: Layout, log: LocalLog, offset: int, first_offsets: Mapping[int, int]
) -> TransactionEnds:
    """
    Find the markers of the transactions *first_offsets*, by producer, that are open at *offset*.

    The walk ends at the first hole in the log: the next marker of a producer may be in the hole. This reads
    headers up to the last marker. Blocks.

    Raises:
        LocalFileError: A file cannot be read, or is gone.
        CorruptDataError: A header is impossible, or *offset* is inside a batch.
    """
    search = MarkerSearch(TransactionTracker.with_open(first_offsets))
    aborted: set[tuple[int, int]] = set()
    expected = offset
    is_lost = False
    for segment in log.segments:
        if not search.awaited:
            break
        if segment.next_offset is not None and segment.next_offset <= offset:
            continue
        if segment.base_offset > expected:
            is_lost = True
            break
        file = layout.open(segment)
        try:
            is_inside = segment.base_offset < offset
            walk = HeaderWalk(
                file.read_at,
                size_bytes=file.segment.size_bytes,
                base_offset=offset if is_inside else segment.base_offset,
                position=position_of(file.fd, file.segment, offset) if is_inside else 0,
                source=segment.path,
            )
            aborted.update((one.producer_id, one.last_offset) for one in walk.follow_transactions(search))
        finally:
            file.close()
        if segment.next_offset is None:
            break
        if walk.ended_by is not EndedBy.END_OF_FILE:
            raise CorruptDataError(
                f"a closed segment has a {walk.ended_by.value}", source=segment.path, position=walk.position
            )
        expected = segment.next_offset
    return TransactionEnds(
        search.found,
        frozenset(one.producer_id for one in search.found if (one.producer_id, one.marker_offset) in aborted),
        dict(search.awaited) if is_lost else {},
        {} if is_lost else dict(search.awaited),
    )
