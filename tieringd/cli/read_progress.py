"""How far a long read is, on standard error: a line every few seconds."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import typer

from tieringd.cli.human import human_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from tieringd.formats.records import Record

SECONDS_BETWEEN = 2.0
_LOOK_EVERY = 256
"""Records between two looks at the clock."""


class ReadProgress:
    """Count records and say so. Quiet unless *is_told*, and for a read that is over at once."""

    def __init__(self, *, is_told: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_told = is_told
        self._clock = clock
        self._began = self._said = clock()
        self._first_offset: int | None = None
        self._has_said = False
        self.records = 0
        self.size_bytes = 0
        """Of keys and values."""

    def note(self, record: Record, *, end_offset: int | None) -> None:
        """Count a record, and say how far it is of *end_offset* when that was not said for a while."""
        if not self._is_told:
            return
        if self._first_offset is None:
            self._first_offset = record.offset
        self.records += 1
        self.size_bytes += len(record.key or b"") + len(record.value or b"")
        if self.records % _LOOK_EVERY and end_offset is not None:
            return
        now = self._clock()
        if now - self._said >= SECONDS_BETWEEN:
            self._said = now
            self._has_said = True
            typer.echo(self._line(record.offset, end_offset, now - self._began), err=True)

    def end(self) -> None:
        """Say what was read in all, if anything was said before."""
        if self._has_said:
            seconds = max(1e-3, self._clock() - self._began)
            read = f"{self.records} records, {human_size(self.size_bytes)}"
            typer.echo(f"{read}, in {seconds:.0f} s", err=True)

    def _line(self, offset: int, end_offset: int | None, seconds: float) -> str:
        rate = f"{self.records} records, {human_size(round(self.size_bytes / seconds))}/s"
        if end_offset is None:
            return f"offset {offset}: {rate}"
        first = self._first_offset or 0
        share = (offset + 1 - first) / max(1, end_offset - first)
        left_seconds = seconds * (1 - share) / max(share, 1e-9)
        return f"offset {offset} of {end_offset} ({share:.0%}): {rate}, about {left_seconds:.0f} s left"
