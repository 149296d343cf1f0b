"""Sizes as people read them, in the form that `rpk` prints; and times."""

from __future__ import annotations

from datetime import UTC, datetime

_STEP = 1000
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


def human_size(size_bytes: int) -> str:
    """Return a size in decimal units, with four digits at most: `1.5MB`."""
    size = float(size_bytes)
    for unit in _UNITS[:-1]:
        if abs(size) < _STEP:
            return f"{size:.4g}{unit}"
        size /= _STEP
    return f"{size:.4g}{_UNITS[-1]}"


def time_text(milliseconds: int) -> str:
    """Return a time since the epoch in UTC; `-` where there is none."""
    if milliseconds < 0:
        return "-"
    try:
        moment = datetime.fromtimestamp(milliseconds / 1000, tz=UTC)
    except (OverflowError, ValueError, OSError):
        return f"{milliseconds} ms"
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
