"""How far a job is, on standard error: one line in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS_BETWEEN = 10.0
"""Of lines that stay, as in a log."""


class JobProgress:
    """Say what a job tells of itself. Quiet elsewhere than in a terminal for a job that is over at once."""

    def __init__(
        self, *, is_terminal: bool, is_quiet: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._is_terminal = is_terminal
        self._is_quiet = is_quiet
        self._clock = clock
        self._what = ""
        self._began = self._said = clock()
        self._width = 0

    def __call__(self, what: str, done: int, total: int, /) -> None:
        """Take that *done* of *total* tasks of *what* are done."""
        if self._is_quiet:
            return
        now = self._clock()
        if what != self._what:
            self.end()
            self._what, self._began = what, now
        line = self._line(done, total, now - self._began)
        if self._is_terminal:
            typer.echo(f"\r{line.ljust(self._width)}", err=True, nl=False)
            self._width = len(line)
        elif done and now - self._said >= SECONDS_BETWEEN:
            self._said = now
            typer.echo(line, err=True)

    def end(self) -> None:
        """Leave the line, if there is one."""
        if self._width:
            typer.echo(err=True)
        self._width = 0

    def _line(self, done: int, total: int, seconds: float) -> str:
        line = f"{self._what}: {done} of {total} tasks ({done / max(1, total):.0%})"
        if 0 < done < total:
            line += f", about {seconds * (total - done) / done:.0f} s left"
        return line
