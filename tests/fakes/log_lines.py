"""The daemon's log for a test: the events so far, and a wait for an event."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import structlog

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping


class LogLines:
    """The events logged so far, in order. They must be logged in the loop's thread."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.entries: list[dict[str, Any]] = []
        """The same events with their fields."""
        self._waiting: dict[str, asyncio.Event] = {}

    def __call__(self, _logger: Any, _method: str, entry: MutableMapping[str, Any]) -> Any:
        """Record one event, as a structlog processor, and drop it from the output."""
        self.events.append(entry["event"])
        self.entries.append(dict(entry))
        if (waiting := self._waiting.get(entry["event"])) is not None:
            waiting.set()
        raise structlog.DropEvent

    async def said(self, event: str) -> None:
        """Wait for an event, unless it has been logged already."""
        if event not in self.events:
            await self._waiting.setdefault(event, asyncio.Event()).wait()

    def forget(self) -> None:
        """Forget all events so far."""
        self.events.clear()
        self.entries.clear()
        self._waiting.clear()


@contextmanager
def listening() -> Iterator[LogLines]:
    """Record the log in the context."""
    lines = LogLines()
    processors = structlog.get_config()["processors"]
    before = processors.copy()
    # The list is changed in place, as loggers that were bound before have a reference to it.
    processors[:] = [lines]
    try:
        yield lines
    finally:
        processors[:] = before
