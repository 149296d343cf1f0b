"""Sizes and times as text for people. Sizes have the form that `rpk` prints."""

from __future__ import annotations

from datetime import UTC, datetime

_STEP = 1000
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


def human_size(size_bytes: int) -> str:
    """Return a size in decimal units with at most four digits, such as `1.5MB`."""
    size = float(size_bytes)
    for unit in _UNITS[:-1]:
        if abs(size) < _STEP:
            return f"{size:.4g}{unit}"
        size /= _STEP
    return f"{size:.4g}{_UNITS[-1]}"


def time_text(milliseconds: int) -> str:
    """
    Return a time in milliseconds since the epoch as ISO 8601 in UTC.

    A negative time means that there is none, and gives `-`. One beyond the calendar is given in ms.
    """
    if milliseconds < 0:
        return "-"
    try:
        moment = datetime.fromtimestamp(milliseconds / 1000, tz=UTC)
    except (OverflowError, ValueError, OSError):
        return f"{milliseconds} ms"
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
