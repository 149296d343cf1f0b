"""
One broker's copy of a partition: it is fetched, cut back, and deleted from on its own.

The bytes are those of the leader; where segments begin is each replica's own business. What
was deleted stays in memory, so that a check can ask later what the log held.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from tests.fakes.log_writer import LogWriter, _Segment, _Written
from tieringd.broker.log_dir import EPOCH_CHECKPOINT
from tieringd.formats.log_names import LogFileKind, encode_file_name
from tieringd.formats.record_batch import parse_header
from tieringd.policies.epoch_history import without_below

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from random import Random


@dataclass(frozen=True)
class Deletion:
    """A segment that left the log directory, and whether it may never be missed in the archive."""

    base_offset: int
    next_offset: int
    is_safe: bool
    """It was pinned then, or trimmed at the daemon's own request."""
    pinned_at: float | None = None
    """When it left, in loop time, if it was pinned then."""


class Replica(LogWriter):
    """
    The log of one partition on one broker, with *pin_root* beside it.

    *journal* is the partition's memory of every batch that any broker ever wrote, by offset.
    """

    def __init__(self, log_dir: Path, pin_root: Path, number: int, journal: dict[int, set[bytes]]) -> None:
        super().__init__(log_dir, "orders", number)
        self._pins = Path(pin_root) / f"{self.name}_{self.partition.topic_id}"
        self._journal = journal
        self.high_watermark = 0
        self.deletions: list[Deletion] = []
        self.notes_epochs_after: Random | None = None
        """Says how much later a new leader's epoch is in the file of epochs, up to its first record."""
        self.dated_by: Callable[[], int] | None = None
        """The clock that dates records; without one they are dated by their offsets."""
        self.counts_strays = True
        """Whether what is set aside counts as held, if it is of this log. Not where its note may be lost."""
        self._closed_at: dict[int, float] = {}

    def begin_epoch(self, leader_epoch: int) -> None:
        """Note a new leader epoch, at once or, as far as the file is concerned, a little later."""
        super().begin_epoch(leader_epoch)
        if self.notes_epochs_after is not None:
            seconds = self.notes_epochs_after.uniform(0, 6)
            asyncio.get_running_loop().call_later(seconds, self._write_epochs)
            self._write_epochs_before(leader_epoch)

    def _write_epochs_before(self, leader_epoch: int) -> None:
        known, self.epochs = self.epochs, [one for one in self.epochs if one[0] < leader_epoch]
        super()._write_epochs()
        self.epochs = known

    def _add(self, written: _Written) -> int:
        # The epoch is in the history before the first record under it.
        if self.notes_epochs_after is not None:
            self._write_epochs()
        self._journal.setdefault(written.base_offset, set()).add(written.data)
        return super()._add(written)

    def append(
        self,
        *values: bytes | None,
        keys: Sequence[bytes | None] | None = None,
        producer_id: int | None = None,
        timestamp_ms: int | None = None,
    ) -> int:
        """Append one batch, dated by the time if this log's records are."""
        if self.dated_by is not None and timestamp_ms is None:
            timestamp_ms = self.dated_by()
        return super().append(*values, keys=keys, producer_id=producer_id, timestamp_ms=timestamp_ms)

    def roll(self) -> int:
        """Close the active segment, and note when."""
        self._closed_at[self._segments[-1].base_offset] = asyncio.get_running_loop().time()
        return super().roll()

    def closed_segments(self) -> list[tuple[int, int, float]]:
        """Return the closed segments on disk: base, next offset, and since when in loop time."""
        return [(base, following, self._closed_at[base]) for base, following in pairwise(self.bases_on_disk)]

    @property
    def batches(self) -> list[_Written]:
        """Return every batch of the log, those included that are deleted by now."""
        return list(self._batches())

    @property
    def is_active_empty(self) -> bool:
        """Say whether there is nothing to roll."""
        return not self._segments[-1].batches

    def bytes_between(self, base_offset: int, next_offset: int) -> bytes:
        """Return what the log held of these offsets, deleted or not."""
        return b"".join(one.data for one in self._batches() if base_offset <= one.base_offset < next_offset)

    def held_offsets(self) -> set[int]:
        """Return the offsets that are on disk here: in the log, or in pins of what lies before it."""
        first = self.bases_on_disk[0]
        held = set(range(first, self.next_offset))
        for base_offset, next_offset in (*self._pinned("*.log"), *self._pinned("*.stray")):
            if next_offset <= first:
                held.update(range(base_offset, next_offset))
        return held - self.unprovable_offsets()

    def unprovable_offsets(self) -> set[int]:
        """
        Return the offsets of what is set aside although it is of this log, since nothing could show that.

        That may be only where the broker deleted what followed between two scans: it is lost as well.
        """
        unseen = {one.base_offset for one in self.deletions if not one.is_safe}
        strays = self._pinned("*.stray")
        found = [one for one in strays if one[1] in unseen or not self.counts_strays]
        first = self.bases_on_disk[0]
        if not self.counts_strays and any(
            one.next_offset == first and not one.is_safe for one in self.deletions
        ):
            # The daemon sets them aside at its next look.
            found += [one for one in self._pinned("*.log") if one[1] <= first]
        return {offset for base_offset, next_offset in found for offset in range(base_offset, next_offset)}

    def rewrite_file(self, base_offset: int) -> None:
        """Write a segment's file anew, as it was written first."""
        self.log_path(base_offset).write_bytes(self.data_of(base_offset))
        self._touch(self.log_path(base_offset))

    def lose_pins(self, random: Random) -> None:
        """Lose what of the pins was not forced onto the disk: some of them, and the note or a part of it."""
        lost = [path for path in sorted(self._pins.glob("*")) if random.random() < 0.5]
        for path in lost:
            if path.name == EPOCH_CHECKPOINT and random.random() < 0.5:
                path.write_bytes(path.read_bytes()[: random.randrange(20)])
            else:
                path.unlink()
        for base_offset, next_offset in ((int(a), int(b)) for a, b in _bounds(lost)):
            self.deletions = [
                replace(one, is_safe=False)
                if one.base_offset < next_offset and base_offset < one.next_offset
                else one
                for one in self.deletions
            ]

    def _pinned(self, pattern: str) -> list[tuple[int, int]]:
        """Return the bounds of the pinned segments that are of this log, and not of what it was before."""
        paths = [each for each in self._pins.glob(pattern) if "-" in each.stem]
        bounds = [(path, *(int(each) for each in path.stem.split("-")[:2])) for path in paths]
        return [
            (base_offset, next_offset)
            for path, base_offset, next_offset in bounds
            if path.read_bytes() == self.bytes_between(base_offset, next_offset)
        ]

    def pins(self) -> list[tuple[int, int]]:
        """Return the bounds of each pinned segment."""
        names = sorted(each.stem for each in self._pins.glob("*-*.log"))
        return [(int(base), int(following)) for base, following, *_ in (name.split("-") for name in names)]

    def fetch(self, leader: Replica, count: int) -> None:
        """Follow *leader*: give up what it does not hold, then take up to *count* batches from it."""
        theirs = leader.batches
        self._cut_to(_divergence(self.batches, theirs))
        missing = [one for one in theirs if one.base_offset >= self.next_offset]
        if self.next_offset < leader.log_start_offset:
            # The leader answers with whole batches, and a user may have deleted a part of the first one.
            before = [one for one in missing if one.next_offset <= leader.log_start_offset]
            missing = missing[len(before) :]
            self._start_at(missing[0].base_offset if missing else leader.log_start_offset, before)
        for one in missing[:count]:
            self._note_epoch(one)
            self._add(one)
        assert leader.high_watermark is not None
        self.high_watermark = min(leader.high_watermark, self.next_offset)
        self.log_start_offset = max(self.log_start_offset, min(leader.log_start_offset, self.high_watermark))
        self.delete_below_start(is_requested=False)

    def delete_oldest(self) -> bool:
        """Delete the oldest segment by the broker's own retention, if it is closed and replicated."""
        bases = self.bases_on_disk
        if len(bases) < 2 or bases[1] > self.stable_end:
            return False
        self.log_start_offset = max(self.log_start_offset, bases[1])
        self.delete_below_start(is_requested=False)
        return True

    def delete_below_start(self, *, is_requested: bool) -> None:
        """Delete the closed segments below the log start."""
        for base_offset, next_offset in pairwise(self.bases_on_disk):
            if next_offset <= self.log_start_offset:
                self._note_deletion(base_offset, next_offset, is_requested=is_requested)
                self._unlink(base_offset)
        # As Kafka does: what epochs the log had before it begins is forgotten.
        epochs = list(without_below(self.epochs, self.log_start_offset))
        if epochs != self.epochs:
            self.epochs = epochs
            self._write_epochs()

    def _note_deletion(self, base_offset: int, next_offset: int, *, is_requested: bool) -> None:
        # Of an active segment, the name may tell another end, and the pin holds all of the file.
        pins = [
            *self._pins.glob(f"{base_offset:020d}-{next_offset:020d}.log"),
            *self._pins.glob(f"{base_offset:020d}-*-open.log"),
        ]
        is_pinned = any(pin.samefile(self.log_path(base_offset)) for pin in pins)
        pinned_at = asyncio.get_running_loop().time() if is_pinned else None
        self.deletions.append(Deletion(base_offset, next_offset, is_pinned or is_requested, pinned_at))

    def _cut_to(self, offset: int) -> None:
        if offset < self.next_offset:
            self._cut_off(offset)
        # Even where no record goes: an epoch may have begun here under which nothing was written.
        self.epochs = [each for each in self.epochs if each[1] < offset]
        self._write_epochs()

    def _cut_off(self, offset: int) -> None:
        self.deletions = [one for one in self.deletions if one.next_offset <= offset]
        if offset >= self.bases_on_disk[0]:
            self.truncate(offset)
        else:
            # Everything on disk is off the leader's log.
            for base_offset in self.bases_on_disk:
                self._unlink(base_offset)
            kept = [_Segment(one.base_offset, list(one.batches)) for one in self._segments]
            for one in kept:
                one.batches = [each for each in one.batches if each.next_offset <= offset]
            self._segments = [one for one in kept if one.batches]
            self._begin_segment(offset)
        assert self.high_watermark is not None
        self.high_watermark = min(self.high_watermark, offset)
        self.log_start_offset = min(self.log_start_offset, offset)

    def _start_at(self, offset: int, before: list[_Written]) -> None:
        """Begin anew at *offset*, as a follower does that lags behind its leader's log start."""
        for base_offset, next_offset in pairwise([*self.bases_on_disk, self.next_offset]):
            self._note_deletion(base_offset, next_offset, is_requested=False)
            self._unlink(base_offset)
        self._segments = [one for one in self._segments if one.batches]
        self._segments.append(_Segment(self.next_offset, before))
        self.deletions.append(Deletion(self.next_offset, offset, is_safe=False))
        self._begin_segment(offset)
        # As Kafka does: the history is empty on disk as soon as the files are replaced.
        self.epochs = []
        self._write_epochs()
        self.log_start_offset = offset

    def _begin_segment(self, offset: int) -> None:
        self._segments.append(_Segment(offset))
        self._write_file(encode_file_name(offset, LogFileKind.LOG), b"")
        self.next_offset = offset

    def _note_epoch(self, batch: _Written) -> None:
        leader_epoch = parse_header(batch.data).leader_epoch
        if not self.epochs or leader_epoch > self.epochs[-1][0]:
            # As Kafka does: an epoch under which nothing was written gives way to the next.
            self.epochs = [each for each in self.epochs if each[1] < batch.base_offset]
            self.epochs.append((leader_epoch, batch.base_offset))
            self._write_epochs()


def _bounds(paths: Iterable[Path]) -> list[list[str]]:
    return [path.stem.split("-")[:2] for path in paths if path.suffix in {".log", ".stray"}]


def _divergence(ours: Iterable[_Written], theirs: Iterable[_Written]) -> int:
    """Return the first offset at which two logs differ, or where the shorter of them ends."""
    offset = 0
    ours = list(ours)
    for our, their in zip(ours, theirs, strict=False):
        if our.data != their.data:
            return offset
        offset = our.next_offset
    return offset
