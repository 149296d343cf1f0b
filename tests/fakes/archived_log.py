"""
An archive for the gateway that is a copy of log files, with Kafka's own rules for the batches of a fetch.

Batches are slices of the copied file, as from a warm cache.
"""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self
from uuid import UUID

from tieringd.formats.kafka_wire.fetch import PartitionData
from tieringd.formats.kafka_wire.pieces import FileRegion
from tieringd.formats.record_batch import parse_header
from tieringd.formats.records import control_type
from tieringd.formats.transactions import TransactionTracker
from tieringd.gateway.archive_answers import (
    ArchivedFetch,
    EpochEnd,
    FetchQuestion,
    ListedOffset,
    RemoteLogDir,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from tieringd.errors import TieringError
    from tieringd.formats.kafka_wire.fetch import AskedPartition
    from tieringd.formats.record_batch import BatchHeader
    from tieringd.model.segment import AbortedTransaction

EARLIEST, MAX_TIMESTAMP, LATEST_TIERED = -2, -3, -5


@dataclass(eq=False)
class LogCopy:
    """The copied log of one partition."""

    topic: str
    topic_id: UUID
    partition: int
    path: Path
    descriptor: int
    batches: list[tuple[int, BatchHeader]] = field(default_factory=list)
    """The batches' positions in the file, and their headers."""
    aborted: list[AbortedTransaction] = field(default_factory=list)

    @classmethod
    def of(cls, log_dir: Path, topic: str, partition: int, copy: Path) -> Self:
        """Copy the whole log of a partition from a broker's *log_dir* to the file *copy*."""
        directory = log_dir / f"{topic}-{partition}"
        with copy.open("wb") as target:
            for path in sorted(directory.glob("*.log")):
                target.write(path.read_bytes())
        lines = (directory / "partition.metadata").read_text().splitlines()
        identity = next(line for line in lines if line.startswith("topic_id: ")).removeprefix("topic_id: ")
        topic_id = UUID(bytes=base64.urlsafe_b64decode(identity + "=="))
        made = cls(topic, topic_id, partition, copy, os.open(copy, os.O_RDONLY))
        made._scan(memoryview(copy.read_bytes()))
        return made

    def _scan(self, view: memoryview) -> None:
        tracker = TransactionTracker()
        position = 0
        # A preallocated segment, or one that is being written, may end in zeros.
        while position < len(view) and view[position + 16]:
            header = parse_header(view, position)
            self.batches.append((position, header))
            if header.is_control:
                batch = view[position : position + header.size_bytes]
                ended = tracker.note_marker(header, control_type(batch))
                self.aborted += [ended] if ended else []
            elif header.is_transactional:
                tracker.note_data(header)
            position += header.size_bytes

    @property
    def next_offset(self) -> int:
        """Return the offset after the last archived one."""
        return self.batches[-1][1].next_offset

    def answer(
        self, asked: AskedPartition, *, max_bytes: int, oversized: bool, committed: bool
    ) -> PartitionData | None:
        """Return batches from the requested offset on; None if the offset was not copied."""
        begin = next(
            (n for n, (_, header) in enumerate(self.batches) if header.last_offset >= asked.fetch_offset),
            None,
        )
        if begin is None or asked.fetch_offset < 0:
            return None
        limit = min(asked.max_bytes, max_bytes)
        first, size, last = self.batches[begin][0], 0, self.batches[begin][1]
        for _, header in self.batches[begin:]:
            if size + header.size_bytes > limit and not (oversized and not size):
                break
            size, last = size + header.size_bytes, header
        visible = [
            (each.producer_id, each.first_offset)
            for each in self.aborted
            if each.last_offset >= asked.fetch_offset and each.first_offset <= last.last_offset
        ]
        return PartitionData(
            high_watermark=self.next_offset,
            last_stable_offset=self.next_offset,
            log_start_offset=0,
            records=(FileRegion(self.descriptor, first, size),) if size else (),
            aborted=tuple(visible) if committed else None,
        )

    def close(self) -> None:
        """Close the copy."""
        os.close(self.descriptor)


class ArchivedLogs:
    """An archive of some partitions, which knows no others."""

    def __init__(self, *logs: LogCopy) -> None:
        self._logs = {(name, log.partition): log for log in logs for name in (log.topic, log.topic_id)}
        self.questions: list[FetchQuestion] = []
        self.served = 0
        self.released = 0
        self.is_writable = True
        self.fault: Exception | None = None
        """Every request raises this while it is set."""

    def may_produce(self) -> bool:
        """Return the test's setting."""
        return self.is_writable

    def may_have(self, topic: str | UUID, partition: int) -> bool:
        """Return whether the partition was copied."""
        return (topic, partition) in self._logs

    def log_start(self, topic: str | UUID, partition: int, broker_offset: int) -> int:
        """Return the copy's first offset, or the broker's if that is lower or nothing was copied."""
        log = self._logs.get((topic, partition))
        return broker_offset if log is None else min(log.batches[0][1].base_offset, broker_offset)

    def deleted_before(self, topic: str | UUID, partition: int) -> int:
        """Return 0: nothing is ever deleted."""
        return 0

    async def leader_epochs(
        self, asked: Collection[tuple[str | UUID, int]]
    ) -> Mapping[tuple[str | UUID, int], int | TieringError]:
        """Return the first leader epoch for each partition."""
        self._fail()
        return dict.fromkeys(asked, 0)

    async def delete_records(
        self,
        before: Mapping[tuple[str | UUID, int], int],
        leader_epochs: Mapping[tuple[str | UUID, int], int | TieringError],
    ) -> Mapping[tuple[str | UUID, int], int | TieringError]:
        """Delete nothing, and return the first offsets of the copies."""
        self._fail()
        return {key: self._logs[key].batches[0][1].base_offset for key in before}

    async def fetch(self, question: FetchQuestion) -> ArchivedFetch:
        """Return batches up to the request's limits."""
        self.questions.append(question)
        self._fail()
        left, oversized = question.max_bytes, question.needs_a_batch
        answers = {}
        for key, asked in question.partitions.items():
            found = self._logs[key].answer(
                asked, max_bytes=left, oversized=oversized, committed=question.read_committed
            )
            if found is not None:
                answers[key] = found
                size = sum(piece.length for piece in found.records if isinstance(piece, FileRegion))
                left, oversized = max(left - size, 0), oversized and not size
        self.served += 1
        return ArchivedFetch(answers, self._release)

    async def list_offsets(
        self, asked: Mapping[tuple[str | UUID, int], int], *, read_committed: bool
    ) -> Mapping[tuple[str | UUID, int], ListedOffset]:
        """Find offsets by the batches' maximum timestamps."""
        self._fail()
        return {key: found for key, at in asked.items() if (found := self._listed(self._logs[key], at))}

    def _listed(self, log: LogCopy, timestamp: int) -> ListedOffset | None:
        headers = [header for _, header in log.batches]
        if timestamp == EARLIEST:
            return ListedOffset(headers[0].base_offset, -1, headers[0].leader_epoch)
        if timestamp == LATEST_TIERED:
            return ListedOffset(headers[-1].last_offset, -1, headers[-1].leader_epoch)
        if timestamp == MAX_TIMESTAMP:
            latest = max(headers, key=lambda header: header.max_timestamp_ms)
            return ListedOffset(latest.last_offset, latest.max_timestamp_ms, latest.leader_epoch)
        for header in headers:
            if header.max_timestamp_ms >= timestamp:
                return ListedOffset(header.base_offset, header.max_timestamp_ms, header.leader_epoch)
        return None

    async def offset_for_leader_epoch(
        self, asked: Mapping[tuple[str | UUID, int], int]
    ) -> Mapping[tuple[str | UUID, int], EpochEnd]:
        """Return the end offset of each epoch that is followed by a later epoch in the copy."""
        self._fail()
        found = {}
        for key, epoch in asked.items():
            headers = [header for _, header in self._logs[key].batches]
            following = [header for header in headers if header.leader_epoch > epoch]
            before = [header for header in headers if header.leader_epoch <= epoch]
            if following and before:
                found[key] = EpochEnd(before[-1].leader_epoch, following[0].base_offset)
        return found

    async def describe_log_dirs(self) -> Sequence[RemoteLogDir]:
        """Return the sizes of the copies."""
        self._fail()
        sizes = {
            (log.topic, log.partition): log.path.stat().st_size for log in dict.fromkeys(self._logs.values())
        }
        return [RemoteLogDir("remote://copies", sizes)]

    def _release(self) -> None:
        self.released += 1

    def _fail(self) -> None:
        if self.fault is not None:
            raise self.fault
