"""What the answers of one store tell of its clock, for those who asked to hear it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime


class StoreTimes:
    """Pass the time of a store's clock on; used on the loop's thread."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[int | None], None]] = []

    def listen(self, listener: Callable[[int | None], None]) -> None:
        """Let *listener* hear of each time from now on."""
        self._listeners.append(listener)

    def note(self, time_ms: int | None) -> None:
        """Pass on a time in milliseconds since the epoch; None for an answer that tells none."""
        for listener in self._listeners:
            listener(time_ms)

    def note_date(self, headers: Mapping[str, str]) -> None:
        """
        Pass on the Date header of an HTTP answer; *headers* may have names in lower case.

        An answer that a cache on the way kept for a while (it has an Age header) tells an old time, and one
        without a readable date tells none.
        """
        is_cached = "age" in headers or "Age" in headers
        self.note(None if is_cached else _date_ms(headers.get("date") or headers.get("Date")))


def _date_ms(date: str | None) -> int | None:
    try:
        moment = parsedate_to_datetime(date) if date else None
    except ValueError:
        return None
    # A date in GMT may come without a zone; `timestamp` would take that for local time.
    return None if moment is None or moment.tzinfo is None else int(moment.timestamp() * 1000)
