"""What the answers of one store tell of its clock, for those who asked to hear it."""

from __future__ import annotations

from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class StoreTimes:
    """Pass the time of a store's clock on; used on the loop's thread."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[int], None]] = []

    def listen(self, listener: Callable[[int], None]) -> None:
        """Let *listener* hear of each time from now on."""
        self._listeners.append(listener)

    def note(self, time_ms: int) -> None:
        """Pass on a time in milliseconds since the epoch."""
        for listener in self._listeners:
            listener(time_ms)

    def note_date(self, headers: Mapping[str, str]) -> None:
        """
        Pass on the Date header of an HTTP answer; *headers* may have names in lower case.

        An answer that a cache on the way kept for a while (it has an Age header) tells an old time, and one
        without a readable date tells none.
        """
        date = headers.get("date") or headers.get("Date")
        if date is None or "age" in headers or "Age" in headers:
            return
        try:
            moment = parsedate_to_datetime(date)
        except ValueError:
            return
        # A date in GMT may come without a zone; `timestamp` would take that for local time.
        if moment.tzinfo is not None:
            self.note(int(moment.timestamp() * 1000))
