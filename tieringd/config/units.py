"""
Parse sizes and durations as an operator writes them, and format them.

A size becomes bytes and a duration milliseconds, or seconds for a `_sec` property, always as an int:
"1.5GiB" is valid, "0.1B" is not. A bare number is in the property's own unit. A unit of the other kind
gets a message of its own, because "10MiB" for a timeout is a mix-up and not a typing error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,19}")
_PART = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,19})?)\s*([A-Za-z]+)\s*")


@dataclass(frozen=True, slots=True, eq=False)
class Quantity:
    """One kind of quantity: its units, largest first, each as a multiple of the property's unit."""

    noun: str
    example: str
    units: dict[str, int]
    may_be_compound: bool
    """Whether several units may be combined, as in "1h30m"."""


DURATION = Quantity(
    noun="duration",
    example="30s",
    units={"w": 604_800_000, "d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1},
    may_be_compound=True,
)
SECONDS = Quantity(
    noun="duration",
    example="10m",
    units={"w": 604_800, "d": 86_400, "h": 3_600, "m": 60, "s": 1},
    may_be_compound=True,
)
SIZE = Quantity(
    noun="size",
    example="512MiB",
    units={
        "PiB": 2**50,
        "PB": 10**15,
        "TiB": 2**40,
        "TB": 10**12,
        "GiB": 2**30,
        "GB": 10**9,
        "MiB": 2**20,
        "MB": 10**6,
        "KiB": 2**10,
        "KB": 10**3,
        "B": 1,
    },
    may_be_compound=False,
)
_SHOWN_SIZE_UNITS = ("PiB", "TiB", "GiB", "MiB", "KiB", "B")


def parse_quantity(text: str, quantity: Quantity) -> int:
    """
    Return *text* in the smallest unit of *quantity*.

    Raises:
        ValueError: The text is not valid. The message is for the operator, and follows the property's name.
    """
    text = text.strip()
    if _WHOLE_NUMBER.fullmatch(text):
        return int(text)
    parts = _PART.findall(text)
    if not parts or _PART.sub("", text):
        raise ValueError(f"{text!r} is not a {quantity.noun}; write for example {quantity.example}")
    if len(parts) > 1 and not quantity.may_be_compound:
        raise ValueError(f"{text!r} has more than one unit; write for example {quantity.example}")
    multiples = [_multiple(unit, text, quantity) for _, unit in parts]
    if any(later >= earlier for earlier, later in pairwise(multiples)):
        raise ValueError(f"{text!r}: write each unit once, the largest first")
    total = sum(Fraction(number) * multiple for (number, _), multiple in zip(parts, multiples, strict=True))
    if total != int(total):
        smallest = list(quantity.units)[-1]
        raise ValueError(f"{text!r} is not a whole number of {smallest}")
    return int(total)


def format_duration(value_ms: int) -> str:
    """Return milliseconds in the largest unit that divides them."""
    return _formatted(value_ms, DURATION.units, ("d", "h", "m", "s", "ms"))


def format_seconds(value: int) -> str:
    """Return seconds in the largest unit that divides them."""
    return _formatted(value, SECONDS.units, ("d", "h", "m", "s"))


def format_size(value_bytes: int) -> str:
    """Return bytes in the largest binary unit that divides them."""
    return _formatted(value_bytes, SIZE.units, _SHOWN_SIZE_UNITS)


def _multiple(unit: str, text: str, quantity: Quantity) -> int:
    if unit in quantity.units:
        return quantity.units[unit]
    other = DURATION if quantity is SIZE else SIZE
    if unit in other.units:
        raise ValueError(
            f"{text!r} is a {other.noun}, and this is a {quantity.noun}: write for example {quantity.example}"
        )
    nearest = [known for known in quantity.units if known.lower() in (unit.lower(), f"{unit}b".lower())]
    advice = f"did you mean {nearest[0]}" if nearest else f"use one of {', '.join(reversed(quantity.units))}"
    raise ValueError(f"{text!r}: {unit!r} is not a unit of {quantity.noun}; {advice}")


def _formatted(value: int, units: dict[str, int], shown: tuple[str, ...]) -> str:
    for unit in shown:
        if value and value % units[unit] == 0:
            return f"{value // units[unit]}{unit}"
    return f"{value}{shown[-1]}"
