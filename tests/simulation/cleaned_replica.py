"""
One broker's copy of a compacted partition: its log is rewritten by a model of Kafka's log cleaner.

The cleaner takes the closed segments below the last stable offset. Of each key it leaves the latest record
there. A tombstone stays for `delete.retention.ms` after the first cleaning that has seen it, and goes with a
later one. Neighbouring segments become one file. Batches keep their bounds; each broker cleans its own log.

What the log was before any cleaning stays in memory (`written`): followers and checks compare that.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from tests.simulation.replica import Replica, _divergence
from tieringd.formats.log_names import LogFileKind, encode_file_name
from tieringd.formats.record_batch import parse_header
from tieringd.formats.records import Record, batch_with, iter_records

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from tests.fakes.log_writer import _Segment, _Written


class CleanedReplica(Replica):
    """The log of one compacted partition on one broker. Its producers use no transactions."""

    def __init__(self, log_dir: Path, pin_root: Path, number: int, journal: dict[int, set[bytes]]) -> None:
        self.written: list[_Written] = []
        """Every batch of the log as it was before any cleaning, those included that are deleted by now."""
        self.cleanings = 0
        self._aged: set[int] = set()
        """Offsets of tombstones that went for their age, here or where this log was fetched from."""
        self._first_cleaned: dict[int, float] = {}
        """When a cleaning first saw the tombstone at an offset, in loop time."""
        super().__init__(log_dir, pin_root, number, journal)

    def _add(self, written: _Written) -> int:
        self.written.append(written)
        return super()._add(written)

    @property
    def dropped_tombstones(self) -> int:
        """Return how many tombstones this log lacks for their age."""
        return len(self._aged)

    def records_on_disk(self, from_offset: int = 0) -> Iterable[Record]:
        """Return what a client reads of this log from an offset on."""
        begin = max(from_offset, self.log_start_offset)
        return (one for one in records_of(self._batches_on_disk()) if one.offset >= begin)

    def lost_keys(self) -> set[bytes]:
        """
        Return the keys whose latest record should be on disk here, and is not.

        A broker loses it where its cleaner dropped a record for a later one that an election has cut off
        since, or where it fetched a cleaned log and not the later one. A clean election has none.
        """
        there = {one.offset for one in records_of(self._batches_on_disk())}
        latest = latest_records(records_of(self.written)).values()
        begin = max(self.log_start_offset, self.bases_on_disk[0])
        return {
            one.key
            for one in latest
            if one.key is not None and begin <= one.offset not in there and one.offset not in self._aged
        }

    def clean(self, *, delete_retention_seconds: float, file_bytes: int) -> None:
        """Clean the closed segments, and join neighbours as long as a file has at most *file_bytes*."""
        on_disk = set(self.bases_on_disk)
        segments = [one for one in self._segments if one.base_offset in on_disk]
        ends = [one.base_offset for one in segments[1:]]
        closed = [one for one, end in zip(segments, ends, strict=False) if end <= self.last_stable_offset]
        if not closed:
            return
        self.cleanings += 1
        latest = latest_records(records_of(batch for one in closed for batch in one.batches))
        now = asyncio.get_running_loop().time()

        def stays(record: Record) -> bool:
            if record.key is not None and latest[record.key].offset > record.offset:
                return False
            if record.value is not None:
                return True
            is_over = self._first_cleaned.setdefault(record.offset, now) + delete_retention_seconds <= now
            if is_over:
                self._aged.add(record.offset)
            return not is_over

        group: list[_Segment] = []
        for segment in closed:
            self._narrow(segment, stays)
            if group and sum(len(one.data) for one in (*group, segment)) > file_bytes:
                self.compact(*(one.base_offset for one in group))
                group = []
            group.append(segment)
        self.compact(*(one.base_offset for one in group))
        # Other files are there now, and daemons have to see them before they can pin them.
        self._closed_at |= dict.fromkeys((base for base, _ in pairwise(self.bases_on_disk)), now)

    def _narrow(self, segment: _Segment, stays: Callable[[Record], bool]) -> None:
        left = ((one, batch_with(memoryview(one.data), stays)) for one in segment.batches)
        segment.batches = [replace(one, data=bytes(data)) for one, data in left if data is not None]

    def fetch(self, leader: Replica, count: int) -> None:
        """Follow *leader*: give up what it never had, then take what its cleaner left of the rest."""
        assert isinstance(leader, CleanedReplica)
        self._cut_to(_divergence(self.written, leader.written))
        missing = [one for one in leader.written if one.base_offset >= self.next_offset]
        if self.next_offset < leader.log_start_offset:
            before = [one for one in missing if one.next_offset <= leader.log_start_offset]
            missing = missing[len(before) :]
            self._start_at(missing[0].base_offset if missing else leader.log_start_offset, [])
            self.written += before
        left = {one.base_offset: one for one in leader.batches}
        self._aged |= {one for one in leader._aged if one >= self.next_offset}
        for one in missing[:count]:
            found = left.get(one.base_offset)
            if found is None:
                self.written.append(one)
                self.next_offset = one.next_offset
                continue
            self._note_epoch(found)
            self._add(found)
            self.written[-1] = one
        assert leader.high_watermark is not None
        self.high_watermark = min(leader.high_watermark, self.next_offset)
        self.log_start_offset = max(self.log_start_offset, min(leader.log_start_offset, self.high_watermark))
        self.delete_below_start(is_requested=False)

    def truncate(self, offset: int) -> None:
        """Truncate the log to *offset*: to what a cleaner left before it, and its end is there."""
        while self._segments[-1].base_offset > offset:
            self._unlink(self._segments.pop().base_offset)
        last = self._segments[-1]
        last.batches = [each for each in last.batches if each.next_offset <= offset]
        self.next_offset = offset
        for kind in (LogFileKind.OFFSET_INDEX, LogFileKind.TIME_INDEX, LogFileKind.TRANSACTION_INDEX):
            (self.path / encode_file_name(last.base_offset, kind)).unlink(missing_ok=True)
        os.truncate(self.log_path(last.base_offset), len(last.data))
        self._touch(self.log_path(last.base_offset))

    def _cut_off(self, offset: int) -> None:
        self.written = [one for one in self.written if one.next_offset <= offset]
        self._aged = {one for one in self._aged if one < offset}
        self._first_cleaned = {one: at for one, at in self._first_cleaned.items() if one < offset}
        super()._cut_off(offset)

    def _batches_on_disk(self) -> list[_Written]:
        on_disk = set(self.bases_on_disk)
        return [batch for one in self._segments if one.base_offset in on_disk for batch in one.batches]


def records_of(batches: Iterable[_Written]) -> Iterable[Record]:
    """Return the records of *batches*."""
    return (record for one in batches for record in iter_records(memoryview(one.data)))


def records_in(data: bytes) -> Iterable[Record]:
    """Return the records of a stored segment's bytes."""
    position = 0
    while position < len(data):
        size_bytes = parse_header(data, position).size_bytes
        yield from iter_records(memoryview(data)[position : position + size_bytes])
        position += size_bytes


def latest_records(records: Iterable[Record]) -> dict[bytes, Record]:
    """Return the latest of *records* of each key, in the order of their offsets; tombstones are records."""
    return {one.key: one for one in sorted(records, key=lambda one: one.offset) if one.key is not None}
