"""The daemon's own log, as a test listens to it: what was said, and waiting for a line."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import structlog

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping


class LogLines:
    """The events logged so far, in order. Lines are expected from the loop's thread."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._waiting: dict[str, asyncio.Event] = {}

    def __call__(self, _logger: Any, _method: str, entry: MutableMapping[str, Any]) -> Any:
        """Take in one line, as a structlog processor, and keep it from the output."""
        self.events.append(entry["event"])
        if (waiting := self._waiting.get(entry["event"])) is not None:
            waiting.set()
        raise structlog.DropEvent

    async def said(self, event: str) -> None:
        """Wait for a line, unless it has been said."""
        if event not in self.events:
            await self._waiting.setdefault(event, asyncio.Event()).wait()

    def forget(self) -> None:
        """Begin anew."""
        self.events.clear()
        self._waiting.clear()


@contextmanager
def listening() -> Iterator[LogLines]:
    """Collect the log for the time of the context."""
    lines = LogLines()
    processors = structlog.get_config()["processors"]
    before = processors.copy()
    # In place: loggers that were bound before hold this very list.
    processors[:] = [lines]
    try:
        yield lines
    finally:
        processors[:] = before
