"""The times in the responses of one store, passed on to listeners."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from functools import lru_cache


class StoreTimes:
    """Passes the time of a store's clock on to listeners. It is used on the loop's thread."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[int | None], None]] = []

    def listen(self, listener: Callable[[int | None], None]) -> None:
        """Call *listener* with each time from now on."""
        self._listeners.append(listener)

    def note(self, time_ms: int | None) -> None:
        """Pass on a time in milliseconds since the epoch; None for a response without a time."""
        for listener in self._listeners:
            listener(time_ms)

    def note_date(self, headers: Mapping[str, str]) -> None:
        """
        Pass on the Date header of an HTTP response; header names may be in lower case.

        None is passed on for a response without a readable date, and for one with an Age header: a cache
        on the way kept such a response for a while, so its date is old.
        """
        is_cached = "age" in headers or "Age" in headers
        self.note(None if is_cached else date_ms(headers.get("date") or headers.get("Date")))


@lru_cache(maxsize=16)  # A store sends the same date with each response of a second.
def date_ms(date: str | None) -> int | None:
    """Return a Date header in milliseconds since the epoch; None without a readable one."""
    try:
        moment = parsedate_to_datetime(date) if date else None
    except ValueError:
        return None
    # A date in GMT may come without a zone, and `timestamp` would read it as local time.
    return None if moment is None or moment.tzinfo is None else int(moment.timestamp() * 1000)
