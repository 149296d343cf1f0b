"""Sizes as people read them, in the form that `rpk` prints."""

from __future__ import annotations

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
