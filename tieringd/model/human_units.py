"""
Durations and sizes for people: on the status page, in `tieringd status`, in tasks and in reasons.

They are short, because they stand in tables and in sentences, and are read at night: a duration has two units
at most, a size four digits.
"""

from __future__ import annotations

from typing import Final

_STEP: Final = 1000
_UNITS: Final = ("B", "kB", "MB", "GB", "TB", "PB")
_DURATIONS: Final = (("d", 86400, 1_000_000), ("h", 3600, 24), ("min", 60, 60), ("s", 1, 60))
_SPANS: Final = (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1_000), ("ms", 1))


def duration(seconds: float) -> str:
    """Return a duration with at most two units."""
    whole = int(seconds)
    if not whole:
        return f"{seconds:.1f} s" if seconds else "0 s"
    parts = [f"{whole // unit % rest} {name}" for name, unit, rest in _DURATIONS if whole // unit % rest]
    return " ".join(parts[:2])


def span(milliseconds: int) -> str:
    """Return a duration in its largest unit and the next one; a negative one counts as zero."""
    left = max(0, milliseconds)
    for number, (unit, unit_ms) in enumerate(_SPANS):
        count, rest_ms = divmod(left, unit_ms)
        if count:
            smaller, smaller_ms = _SPANS[min(number + 1, len(_SPANS) - 1)]
            small_count = rest_ms // smaller_ms
            return f"{count} {unit} {small_count} {smaller}" if small_count else f"{count} {unit}"
    return "0 s"


def size(size_bytes: float) -> str:
    """Return a size in decimal units with at most four digits."""
    value = float(size_bytes)
    for unit in _UNITS[:-1]:
        if value < _STEP:
            return f"{value:.4g} {unit}"
        value /= _STEP
    return f"{value:.4g} {_UNITS[-1]}"
