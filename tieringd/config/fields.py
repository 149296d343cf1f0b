"""
The kinds of values that properties hold: one class each, used as `Annotated[type, Kind(...)]`.

A kind parses the value that YAML gave, describes a fault in words that follow the property's name, and
names itself for the reference page. `quoted` decides what a message may quote: never a value from the
environment, and never a secret.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from os.path import normpath
from pathlib import Path
from typing import Any, get_args

from pydantic import BeforeValidator, GetCoreSchemaHandler
from pydantic_core import core_schema

from tieringd.config.units import (
    DURATION,
    SECONDS,
    SIZE,
    Quantity,
    format_duration,
    format_seconds,
    format_size,
    parse_quantity,
)
from tieringd.config.yaml_source import EnvironmentText, resolve_plain

MAX_INT64 = 2**63 - 1
UNLIMITED = -1
AS_TOTAL = -2
"""Kafka's local.retention.*: keep on the broker for as long as total retention keeps."""

_MOST_QUOTED_CHARACTERS = 60


def described(value: object) -> str:
    """Return the kind of value that YAML gave, without its content."""
    names: dict[type, str] = {
        type(None): "null",
        bool: "true or false",
        int: "a whole number",
        float: "a decimal number",
        tuple: "a list",
        dict: "a section",
    }
    return names.get(type(value), "text")


def quoted(value: object) -> str:
    """Return *value* for a message. A value from the environment is not repeated."""
    if isinstance(value, EnvironmentText):
        return "the value from the environment"
    if isinstance(value, str) and len(value) <= _MOST_QUOTED_CHARACTERS:
        return repr(value)
    return str(value) if type(value) in (int, float) else described(value)


class Kind(ABC):
    """A kind of value. Its `read` runs before pydantic's own strict type check."""

    @property
    @abstractmethod
    def label(self) -> str:
        """Return the name of this kind on the reference page."""

    @abstractmethod
    def read(self, value: Any) -> object:
        """
        Return the value that the property holds, parsed from *value*.

        Raises:
            ValueError: The value is not of this kind. The message is for the operator.
        """

    def show(self, value: Any) -> str:
        """Return a held value as the reference page writes it."""
        return f"{value}"

    def __get_pydantic_core_schema__(
        self, source: type, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(self.read, handler(source))


class Flag(Kind):
    """True or false, and no other word for it."""

    @property
    def label(self) -> str:
        """Return the name of this kind on the reference page."""
        return "true or false"

    def read(self, value: Any) -> object:
        """Return the bool."""
        found = resolve_plain(value)
        if not isinstance(found, bool):
            raise ValueError(f"must be true or false, not {quoted(value)}")  # noqa: TRY004 pydantic's signal
        return found

    def show(self, value: Any) -> str:
        """Return YAML's word."""
        return "true" if value else "false"


@dataclass(frozen=True, slots=True)
class Number(Kind):
    """A whole number without a unit, from *low* to *high*."""

    low: int
    high: int

    @property
    def label(self) -> str:
        """Return the name of this kind on the reference page."""
        return f"number, {self.low} to {self.high}"

    def read(self, value: Any) -> object:
        """Return the int."""
        found = resolve_plain(value)
        if type(found) is not int:
            raise ValueError(f"must be a whole number from {self.low} to {self.high}, not {quoted(value)}")
        if not self.low <= found <= self.high:
            raise ValueError(f"must be from {self.low} to {self.high}, not {quoted(value)}")
        return found


@dataclass(frozen=True, slots=True)
class NumberOrWord(Kind):
    """A whole number without a unit, from *low* to *high*, or *word*."""

    low: int
    high: int
    word: str

    @property
    def label(self) -> str:
        """Return the name of this kind on the reference page."""
        return f"number, {self.low} to {self.high}, or {self.word}"

    def read(self, value: Any) -> object:
        """Return the int or the str."""
        if isinstance(value, str) and value == self.word:
            return self.word
        found = resolve_plain(value)
        if type(found) is not int or not self.low <= found <= self.high:
            raise ValueError(
                f"must be a whole number from {self.low} to {self.high}, or {self.word}, not {quoted(value)}"
            )
        return found


@dataclass(frozen=True, slots=True)
class Decimal(Kind):
    """A number without a unit that need not be whole, from *low* to *high*."""

    low: float
    high: float

    @property
    def label(self) -> str:
        """Return the name of this kind on the reference page."""
        return f"decimal number, {self.low:g} to {self.high:g}"

    def read(self, value: Any) -> object:
        """Return the float."""
        found = resolve_plain(value)
        if type(found) not in (int, float) or not self.low <= found <= self.high:
            raise ValueError(f"must be a number from {self.low:g} to {self.high:g}, not {quoted(value)}")
        return float(found)


@dataclass(frozen=True, slots=True)
class Amount(Kind):
    """A duration or a size. *special* are negative numbers with a meaning of their own."""

    quantity: Quantity
    low: int
    high: int
    special: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """Return the name of this kind on the reference page."""
        return f"{self.quantity.noun}, {self._bounds}"

    def read(self, value: Any) -> object:
        """Return the int in the property's own unit."""
        found = value if type(value) is int else self._parsed(value)
        if found in self.special or self.low <= found <= self.high:
            return found
        raise ValueError(f"must be {self._bounds}, not {quoted(value)}")

    def show(self, value: Any) -> str:
        """Return the amount with a unit."""
        return _FORMATS[self.quantity](value)

    @property
    def _bounds(self) -> str:
        low, high = self.show(self.low), self.show(self.high)
        bounds = f"at least {low}" if self.high == MAX_INT64 else f"from {low} to {high}"
        return bounds + "".join(f", or {number}" for number in self.special)

    def _parsed(self, value: Any) -> int:
        if not isinstance(value, str):
            raise ValueError(  # noqa: TRY004 pydantic's signal
                f"must be a {self.quantity.noun}, such as {self.quantity.example}, not {quoted(value)}"
            )
        try:
            return parse_quantity(value, self.quantity)
        except ValueError:
            if not isinstance(value, EnvironmentText):
                raise
        raise ValueError(
            f"{quoted(value)} is not a {self.quantity.noun}; it must be for example {self.quantity.example}"
        )


_FORMATS = {DURATION: format_duration, SECONDS: format_seconds, SIZE: format_size}


def duration(low: int, high: int, *special: int) -> Amount:
    """Return the kind of a `_ms` property with these bounds, in milliseconds."""
    return Amount(DURATION, low, high, special)


def seconds(low: int, high: int, *special: int) -> Amount:
    """Return the kind of a `_sec` property with these bounds, in seconds."""
    return Amount(SECONDS, low, high, special)


def size(low: int, high: int, *special: int) -> Amount:
    """Return the kind of a `_bytes` property with these bounds, in bytes."""
    return Amount(SIZE, low, high, special)


@dataclass(frozen=True, slots=True)
class Text(Kind):
    """Text that *pattern* must match as a whole. *rule* describes the pattern in words."""

    name: str = "text"
    pattern: str = r"(?s).+"
    rule: str = "must not be empty"

    @property
    def label(self) -> str:
        """Return the name of this kind on the reference page."""
        return self.name

    def read(self, value: Any) -> object:
        """Return the str."""
        if not isinstance(value, str):
            raise ValueError(  # noqa: TRY004 pydantic's signal
                f"must be text, not {described(value)}; put a number or a word like true in quotes"
            )
        if not re.fullmatch(self.pattern, value):
            raise ValueError(f"{self.rule}; {quoted(value)} is refused" if value else self.rule)
        return str(value)

    def show(self, value: Any) -> str:
        """Return the text. An empty one is written as in YAML."""
        return value or '""'


class SecretText(Kind):
    """A secret. No message, dump or repr contains it."""

    @property
    def label(self) -> str:
        """Return the name of this kind on the reference page."""
        return "secret text"

    def read(self, value: Any) -> object:
        """Return the str. pydantic wraps it in a `SecretStr`."""
        if not isinstance(value, str):
            raise ValueError(  # noqa: TRY004 pydantic's signal
                f"must be text, not {described(value)}; put it in quotes"
            )
        if not value:
            raise ValueError("must not be empty")
        return str(value)


class AbsolutePath(Kind):
    """A path from the root of the filesystem, without `..` in it."""

    @property
    def label(self) -> str:
        """Return the name of this kind on the reference page."""
        return "absolute path"

    def read(self, value: Any) -> object:
        """Return the Path."""
        if not isinstance(value, str):
            raise ValueError(f"must be an absolute path, not {described(value)}")  # noqa: TRY004 pydantic's signal
        if not value.startswith("/"):
            raise ValueError(f"must be an absolute path; {quoted(value)} does not begin with /")
        if "\0" in value:
            raise ValueError("must not hold a zero byte")
        return Path(normpath(value))


@dataclass(frozen=True, slots=True)
class Choice(Kind):
    """One of the words of a Literal."""

    @property
    def label(self) -> str:
        """Return the name of this kind on the reference page. The words come from the Literal."""
        return "one of"

    def read(self, value: Any) -> object:
        """Return the str."""
        return str(value) if isinstance(value, str) else value

    def show(self, value: Any) -> str:
        """Return the word; an empty one in quotes, because YAML reads nothing as null."""
        return str(value) or '""'

    def __get_pydantic_core_schema__(
        self, source: type, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        words: tuple[str, ...] = get_args(source)

        def read(value: Any) -> object:
            found = self.read(value)
            if found not in words:
                shown = ", ".join(map(self.show, words))
                raise ValueError(f"must be one of {shown}, not {quoted(value)}")
            return found

        return core_schema.no_info_before_validator_function(read, handler(source))


def _refuse_cleared(value: Any) -> Any:
    if value is None or value == "":
        raise ValueError("cannot be reset with an empty value or null; remove the line")
    return value


NEVER_CLEARED = BeforeValidator(_refuse_cleared)
"""
Refuses an empty text and null, which other tools take for "back to the default".

It runs before the property's own kind. A property that is not in the file stays unset.
"""


class Live:
    """Marks a property whose new value a running daemon applies. All others need a restart."""


LIVE = Live()
