"""
A partition's log directory, written as a broker writes it: batches, rolls, side files, transactions.

The writer keeps every byte and every record that it wrote, so that a test can compare them with a log or an
archive. It parses nothing: all offsets are known from the writing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.builders import DEFAULT_TIME_MS, batch
from tieringd.broker.log_dir import read_local_log
from tieringd.formats.checkpoints import encode_epoch_checkpoint, encode_partition_metadata
from tieringd.formats.index_files import (
    OffsetEntry,
    TimeEntry,
    TransactionEntry,
    encode_offset_index,
    encode_time_index,
    encode_transaction_index,
)
from tieringd.formats.log_names import LogFileKind, encode_file_name
from tieringd.formats.record_batch import ABORT_MARKER, COMMIT_MARKER, encode_marker, parse_header, sealed
from tieringd.formats.records import NO_MARKER
from tieringd.model.local_log import LocalLog, LocalPartition
from tieringd.model.partition import LogBounds, TopicIdPartition, TopicPartition

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

TOPIC_ID = "W1xNUlUlTfigw_K-dvdxsA"
CLUSTER = "cluster"
_TICK_NS = 1_000_000


@dataclass(frozen=True)
class _Written:
    """A batch in the log."""

    base_offset: int
    next_offset: int
    data: bytes
    values: tuple[bytes | None, ...] = ()
    producer_id: int | None = None
    marker: int | None = None


@dataclass
class _Segment:
    base_offset: int
    batches: list[_Written] = field(default_factory=list)

    @property
    def data(self) -> bytes:
        return b"".join(each.data for each in self.batches)


class LogWriter:
    """
    The broker's side of one partition.

    A test may set *high_watermark*, which limits the last stable offset. Otherwise everything is replicated
    as soon as it is written. File times are steps of a counter, so that every change of a file changes its
    time.
    """

    def __init__(
        self,
        log_dir: Path,
        topic: str = "orders",
        partition: int = 0,
        *,
        first_offset: int = 0,
        topic_id: str = TOPIC_ID,
        cluster: str = CLUSTER,
    ) -> None:
        self.name = TopicPartition(topic, partition)
        self.identified = TopicIdPartition(cluster, topic, topic_id, partition)
        self.path = Path(log_dir) / str(self.name)
        self.partition = LocalPartition(self.name, topic_id, str(self.path), str(log_dir))
        self.next_offset = first_offset
        self.log_start_offset = first_offset
        self.high_watermark: int | None = None
        self.epochs = [(0, first_offset)]
        self.dropped: list[int] = []
        """Base offsets of the segments that the broker's own retention deleted."""
        self._segments = [_Segment(first_offset)]
        self._sequences: dict[int, int] = {}
        self._ticks = DEFAULT_TIME_MS * 1_000_000 // _TICK_NS
        self._changes = self._ticks
        self.path.mkdir(parents=True)
        (self.path / "partition.metadata").write_bytes(encode_partition_metadata(topic_id))
        self._write_epochs()
        self._write_file(encode_file_name(first_offset, LogFileKind.LOG), b"")

    def append(
        self,
        *values: bytes | None,
        keys: Sequence[bytes | None] | None = None,
        producer_id: int | None = None,
        timestamp_ms: int | None = None,
    ) -> int:
        """Append one batch of *values*, within *producer_id*'s transaction; return its base offset."""
        values = values or (b"a", b"b", b"c")
        options: dict[str, object] = {"leader_epoch": self.epochs[-1][0]}
        if producer_id is not None:
            sequence = self._sequences.get(producer_id, 0)
            self._sequences[producer_id] = sequence + len(values)
            options |= {
                "producer_id": producer_id,
                "producer_epoch": 0,
                "base_sequence": sequence,
                "is_transactional": True,
            }
        time_ms = DEFAULT_TIME_MS + self.next_offset if timestamp_ms is None else timestamp_ms
        data = batch(self.next_offset, values, keys=keys, timestamp_ms=time_ms, **options)
        return self._add(
            _Written(self.next_offset, self.next_offset + len(values), data, values, producer_id)
        )

    def commit(self, producer_id: int, *, timestamp_ms: int = 0) -> None:
        """Commit *producer_id*'s transaction. A broker's marker has the time of the commit."""
        self._end(producer_id, COMMIT_MARKER, timestamp_ms=timestamp_ms)

    def abort(self, producer_id: int) -> None:
        """Abort *producer_id*'s transaction. A read_committed reader never sees its records."""
        self._end(producer_id, ABORT_MARKER)

    def add_emptied_marker(self, producer_id: int) -> None:
        """Append what the cleaner leaves of a marker whose transaction has no records any more."""
        self._end(producer_id, NO_MARKER)

    def roll(self) -> int:
        """Close the active segment with its side files, begin a new one, and return its base offset."""
        closed = self._segments[-1]
        base_offset = closed.base_offset
        for kind, data in self._indexes(closed).items():
            self._write_file(encode_file_name(base_offset, kind), data)
        self._write_file(encode_file_name(self.next_offset, LogFileKind.PRODUCER_SNAPSHOT), b"producer state")
        self._segments.append(_Segment(self.next_offset))
        self._write_file(encode_file_name(self.next_offset, LogFileKind.LOG), b"")
        return self.next_offset

    def closed_segment(self, *values: bytes) -> int:
        """Append one batch, roll, and return the base offset of the closed segment."""
        base_offset = self._segments[-1].base_offset
        self.append(*values)
        self.roll()
        return base_offset

    def begin_epoch(self, leader_epoch: int) -> None:
        """Begin a new leader epoch for all later appends."""
        self.epochs = [each for each in self.epochs if each[1] < self.next_offset]
        self.epochs.append((leader_epoch, self.next_offset))
        self._write_epochs()

    def truncate(self, offset: int) -> None:
        """Truncate the log to *offset*, which must be a batch's base offset, in place as a follower does."""
        while self._segments[-1].base_offset > offset:
            self._unlink(self._segments.pop().base_offset)
        last = self._segments[-1]
        last.batches = [each for each in last.batches if each.next_offset <= offset]
        self.next_offset = last.batches[-1].next_offset if last.batches else last.base_offset
        assert self.next_offset == offset, f"{offset} is no batch's base"
        for kind in (LogFileKind.OFFSET_INDEX, LogFileKind.TIME_INDEX, LogFileKind.TRANSACTION_INDEX):
            (self.path / encode_file_name(last.base_offset, kind)).unlink(missing_ok=True)
        os.truncate(self.log_path(last.base_offset), len(last.data))
        self._touch(self.log_path(last.base_offset))
        self.epochs = [each for each in self.epochs if each[1] < offset] or self.epochs[:1]
        self._write_epochs()

    def compact(self, *bases: int, without: Collection[int] = ()) -> None:
        """
        Replace the closed segments with the base offsets *bases* by one file, as the broker's cleaner does.

        Batches with base offsets in *without* are left out, as if all their keys had later records.
        """
        group = [each for each in self._segments if each.base_offset in bases]
        assert [each.base_offset for each in group] == list(bases), "a cleaner takes neighbours, in order"
        assert group[-1] is not self._segments[-1], "a cleaner leaves the active segment alone"
        kept = [each for one in group for each in one.batches if each.base_offset not in without]
        cleaned = _Segment(bases[0], kept)
        place = self._segments.index(group[0])
        self._segments[place : place + len(group)] = [cleaned]
        path = self.log_path(bases[0])
        # The new file is written while the old one still exists, so that it has another inode.
        swap = path.with_suffix(".log.swap")
        swap.write_bytes(cleaned.data)
        self._touch(swap)
        for base_offset in bases:
            self._unlink(base_offset)
        for kind, data in self._indexes(cleaned).items():
            self._write_file(encode_file_name(bases[0], kind), data)
        swap.rename(path)
        self._date_directory()

    def drop_head(self) -> None:
        """Delete the oldest segment, as the broker's own retention does."""
        base_offset = self.bases_on_disk[0]
        assert base_offset != self._segments[-1].base_offset, "a broker keeps its active segment"
        self.dropped.append(base_offset)
        self._unlink(base_offset)
        self.log_start_offset = max(self.log_start_offset, self.bases_on_disk[0])

    def forget_epochs(self) -> None:
        """Let the epochs begin where the log does, as the broker does soon after it deleted its head."""
        gone = [epoch for epoch, start_offset in self.epochs if start_offset <= self.log_start_offset]
        self.epochs = [(gone[-1], self.log_start_offset), *self.epochs[len(gone) :]]
        self._write_epochs()

    def trim_file(self, base_offset: int) -> None:
        """Delete the files of a segment, as a trim does."""
        self._unlink(base_offset)

    def flip_byte(self, base_offset: int) -> None:
        """Flip the last byte of a segment's log, as a failing disk does. A second call repairs it."""
        path = self.log_path(base_offset)
        data = bytearray(path.read_bytes())
        data[-1] ^= 0xFF
        path.write_bytes(data)
        self._touch(path)

    def log_path(self, base_offset: int) -> Path:
        """Return the path of a segment's `.log`."""
        return self.path / encode_file_name(base_offset, LogFileKind.LOG)

    def data_of(self, base_offset: int) -> bytes:
        """Return every byte of a segment, even if it is no longer on disk."""
        return next(each.data for each in self._segments if each.base_offset == base_offset)

    def local_log(self) -> LocalLog:
        """Scan the log directory, and return the log."""
        return read_local_log(self.partition)

    def bounds(self) -> LogBounds:
        """Return the log start offset, the last stable offset and the high watermark."""
        return LogBounds(self.log_start_offset, self.last_stable_offset, self.stable_end)

    @property
    def stable_end(self) -> int:
        """Return the high watermark."""
        return self.next_offset if self.high_watermark is None else self.high_watermark

    @property
    def last_stable_offset(self) -> int:
        """Return the first offset of the oldest open transaction, or the high watermark."""
        # A marker above the high watermark may still be lost, so its transaction counts as open.
        return min([self.stable_end, *self._open_transactions(self.stable_end).values()])

    @property
    def open_producers(self) -> list[int]:
        """Return the producers with an open transaction."""
        return list(self._open_transactions(self.next_offset))

    @property
    def bases(self) -> list[int]:
        """Return the base offsets of all segments that were written and not truncated, oldest first."""
        return [each.base_offset for each in self._segments]

    @property
    def bases_on_disk(self) -> list[int]:
        """Return the base offsets of the segments whose `.log` file exists, oldest first."""
        # Simulations ask thousands of times, and a glob takes more than twice as long.
        names = os.listdir(self.path)  # noqa: PTH208 it makes no path of each name
        return sorted(int(name.removesuffix(".log")) for name in names if name.endswith(".log"))

    @property
    def batch_bases(self) -> list[int]:
        """Return the base offset of each batch, and the log's end: the offsets that `truncate` accepts."""
        return [*(each.base_offset for each in self._batches()), self.next_offset]

    def values(self, *, read_committed: bool = False) -> dict[int, bytes]:
        """
        Return the value of each record that clients wrote, by offset.

        With *read_committed* only records outside of transactions and of committed ones are returned.
        """
        found: dict[int, bytes] = {}
        pending: dict[int, dict[int, bytes]] = {}
        for each in self._batches():
            records = dict(enumerate(each.values, each.base_offset))
            if each.producer_id is None or not read_committed:
                found |= records
            elif each.marker is None:
                pending.setdefault(each.producer_id, {}).update(records)
            else:
                decided = pending.pop(each.producer_id, {})
                found |= decided if each.marker == COMMIT_MARKER else {}
        return dict(sorted(found.items()))

    def _end(self, producer_id: int, marker: int, *, timestamp_ms: int = 0) -> None:
        data = encode_marker(
            self.next_offset,
            producer_id=producer_id,
            marker=marker,
            timestamp_ms=timestamp_ms,
            leader_epoch=self.epochs[-1][0],
        )
        if marker == NO_MARKER:
            data = sealed(parse_header(data)._replace(record_count=0), b"")
        self._add(
            _Written(self.next_offset, self.next_offset + 1, data, producer_id=producer_id, marker=marker)
        )

    def _add(self, written: _Written) -> int:
        self._segments[-1].batches.append(written)
        path = self.log_path(self._segments[-1].base_offset)
        with path.open("ab") as file:
            file.write(written.data)
        self._touch(path)
        self.next_offset = written.next_offset
        return written.base_offset

    def _batches(self) -> Iterator[_Written]:
        for segment in self._segments:
            yield from segment.batches

    def _open_transactions(self, end_offset: int) -> dict[int, int]:
        """Return the first offset of each transaction without a marker below *end_offset*, by producer."""
        opened: dict[int, int] = {}
        for each in self._batches():
            if each.producer_id is not None and each.base_offset < end_offset:
                if each.marker is None:
                    opened.setdefault(each.producer_id, each.base_offset)
                else:
                    opened.pop(each.producer_id, None)
        return opened

    def _indexes(self, segment: _Segment) -> dict[LogFileKind, bytes]:
        """Return a closed segment's side files, with an entry for the last batch and aborted transactions."""
        if not segment.batches:
            return {LogFileKind.OFFSET_INDEX: b"", LogFileKind.TIME_INDEX: b""}
        last = segment.batches[-1]
        files = {
            LogFileKind.OFFSET_INDEX: encode_offset_index(
                [OffsetEntry(last.next_offset - 1, len(segment.data) - len(last.data))],
                base_offset=segment.base_offset,
            ),
            LogFileKind.TIME_INDEX: encode_time_index(
                [TimeEntry(0, last.next_offset - 1)], base_offset=segment.base_offset
            ),
        }
        opened: dict[int, int] = {}
        aborted: list[TransactionEntry] = []
        for each in self._batches():
            if each.producer_id is None:
                continue
            if each.marker is None:
                opened.setdefault(each.producer_id, each.base_offset)
                continue
            first_offset = opened.pop(each.producer_id, None)
            if (
                each.marker == ABORT_MARKER
                and first_offset is not None
                and each.base_offset >= segment.base_offset
            ):
                stable = min([each.next_offset, *opened.values()])
                aborted.append(TransactionEntry(each.producer_id, first_offset, each.base_offset, stable))
        if aborted:
            files[LogFileKind.TRANSACTION_INDEX] = encode_transaction_index(aborted)
        return files

    def _write_epochs(self) -> None:
        # A new file replaces the old one, as with a broker.
        written = self.path / "leader-epoch-checkpoint.tmp"
        written.write_bytes(encode_epoch_checkpoint(self.epochs))
        written.rename(written.with_suffix(""))
        self._date_directory()

    def _write_file(self, name: str, data: bytes) -> None:
        path = self.path / name
        is_new = not path.exists()
        path.write_bytes(data)
        self._touch(path)
        if is_new:
            self._date_directory()

    def _touch(self, path: Path) -> None:
        self._ticks += 1
        os.utime(path, ns=(self._ticks * _TICK_NS, self._ticks * _TICK_NS))

    def _unlink(self, base_offset: int) -> None:
        for kind in LogFileKind:
            (self.path / encode_file_name(base_offset, kind)).unlink(missing_ok=True)
        self._date_directory()

    def _date_directory(self) -> None:
        """
        Give the directory a time of its own after each change of its names.

        The system's own times are the real ones, also where the clock is virtual: whether two changes have
        different times, and how long ago they are, would be different in each run.
        """
        self._changes += 1
        os.utime(self.path, ns=(self._changes * _TICK_NS, self._changes * _TICK_NS))


def leads_from(writer: LogWriter, divergence: int) -> None:
    """The broker of *writer* leads, lacks what comes after *divergence*, and has deleted what is before."""
    writer.truncate(divergence)
    writer.begin_epoch(1)
    if writer.bases[-1] != divergence:
        writer.roll()
    while writer.bases_on_disk[0] != divergence:
        writer.drop_head()
