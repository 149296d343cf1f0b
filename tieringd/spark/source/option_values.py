"""
Parse the values of options. Spark passes every value as text.

Names of options are case-insensitive. An error begins with the name of its option.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import TypeVar

from tieringd.config.units import DURATION, SIZE, Quantity, parse_quantity
from tieringd.errors import ConfigError
from tieringd.model.partition import TopicPartition

T = TypeVar("T")
_SPARK_UNITS = {
    "us": Fraction(1, 1000),
    "min": Fraction(60_000),
    **dict.fromkeys(("millisecond", "milliseconds"), Fraction(1)),
    **dict.fromkeys(("second", "seconds"), Fraction(1000)),
    **dict.fromkeys(("minute", "minutes"), Fraction(60_000)),
    **dict.fromkeys(("hour", "hours"), Fraction(3_600_000)),
    **dict.fromkeys(("day", "days"), Fraction(86_400_000)),
}
"""Units of Spark's durations and intervals that `units.DURATION` does not have, in milliseconds."""
_SPARK_DURATION = re.compile(rf"([0-9]{{1,19}})\s*({'|'.join(_SPARK_UNITS)})")
ASKED = re.compile(r"\$\{(\w+)\}")
"""A part of a value that stands for a variable of the environment."""
_SHOWN = {
    "cloud_storage_azure_shared_key": "Write ${NAME} for an environment variable, or use config",
    "cloud_storage_access_key": "Write accessKey instead, which Spark does not show, or ${NAME} for an "
    "environment variable, or use config",
}
"""
Options with credentials that Spark shows in plans of streams, because it chooses what to redact by the name.

Each has what to write instead.
"""
_FLAGS = {"true": True, "false": False}


class OptionValues:
    """The options that were given, by name. The value of an option that was not given is None."""

    def __init__(self, given: Mapping[str, str]) -> None:
        """Keep the options of *given*. Names are case-insensitive."""
        self._given = {name.lower(): value for name, value in given.items()}

    def has(self, name: str) -> bool:
        """Return whether an option was given."""
        return name.lower() in self._given

    def text(self, name: str) -> str | None:
        """Return an option's text without surrounding blanks."""
        value = self._given.get(name.lower())
        return None if value is None else value.strip()

    def flag(self, name: str, *, default: bool) -> bool:
        """
        Return an option that is true or false.

        Raises:
            ConfigError: The value is neither.
        """
        value = self.text(name)
        if value is None:
            return default
        if value.lower() not in _FLAGS:
            raise fault(name, f"must be true or false, not {value!r}")
        return _FLAGS[value.lower()]

    def choice(self, name: str, *choices: str) -> str:
        """
        Return an option that is one of *choices*, case-insensitive. The first choice is the default.

        Raises:
            ConfigError: The value is not a choice.
        """
        value = (self.text(name) or choices[0]).lower()
        if value not in choices:
            raise fault(name, f"must be one of {', '.join(choices)}, not {value!r}")
        return value

    def count(self, name: str) -> int | None:
        """
        Return an option that is a whole number above 0.

        Raises:
            ConfigError: The value is not such a number.
        """
        value = self.text(name)
        if value is None:
            return None
        if not value.isdecimal() or int(value) == 0:
            raise fault(name, f"must be a whole number above 0, not {value!r}")
        return int(value)

    def timestamp_ms(self, name: str) -> int | None:
        """
        Return an option that is a time in milliseconds since the epoch.

        Raises:
            ConfigError: The value is not a number of milliseconds.
        """
        value = self.text(name)
        if value is None:
            return None
        if not value.isdecimal():
            raise fault(name, f"must be milliseconds since the epoch, not {value!r}")
        return int(value)

    def size_bytes(self, name: str, *, default: int) -> int:
        """
        Return an option that is a size such as 64MiB, in bytes.

        Raises:
            ConfigError: The value is not a size above 0.
        """
        return self._quantity(name, SIZE, default)

    def duration_ms(self, name: str, *, default: int) -> int:
        """
        Return an option that is a duration such as 15m, in milliseconds.

        Spark's own words are taken as well: `15min`, `15 minutes`, `100us`.

        Raises:
            ConfigError: The value is not a duration above 0.
        """
        value = self.text(name)
        found = None if value is None else _SPARK_DURATION.fullmatch(value.lower())
        if found is None:
            return self._quantity(name, DURATION, default)
        number, unit = int(found[1]), _SPARK_UNITS[found[2]]
        if number * unit < 1:
            raise fault(name, f"must be a duration of a millisecond or more, not {value!r}")
        return int(number * unit)

    def by_partition(self, name: str, read: Callable[[object], T]) -> dict[TopicPartition, T] | None:
        """
        Return an option that is JSON such as `{"orders": {"0": 23}}`. *read* parses the innermost values.

        Raises:
            ConfigError: The value has another form, or *read* raises a ValueError.
        """
        document = self.json(name)
        if document is None:
            return None
        example = 'must be JSON such as {"orders": {"0": 23, "1": 42}}'
        if not isinstance(document, dict) or not document:
            raise fault(name, example)
        found: dict[TopicPartition, T] = {}
        for topic, partitions in document.items():
            if not isinstance(partitions, dict):
                raise fault(name, f"{example}; {topic!r} has no partitions")
            for number, value in partitions.items():
                if not number.isdecimal():
                    raise fault(name, f"{number!r} is not a partition of {topic}")
                partition = TopicPartition(topic, int(number))
                try:
                    found[partition] = read(value)
                except ValueError as error:
                    raise fault(name, f"{partition}: {error}") from error
        return found

    def json(self, name: str) -> object:
        """
        Return an option's value, parsed as JSON.

        Raises:
            ConfigError: The value is not JSON.
        """
        value = self.text(name)
        if value is None:
            return None
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            raise fault(name, f"is not JSON: {error}") from error

    def _quantity(self, name: str, quantity: Quantity, default: int) -> int:
        value = self.text(name)
        if value is None:
            return default
        try:
            found = parse_quantity(value, quantity)
        except ValueError as error:
            raise fault(name, str(error)) from error
        if found <= 0:
            raise fault(name, f"must be a {quantity.noun} above 0, not {value!r}")
        return found


def require_hidden(values: OptionValues) -> None:
    """
    Check that no option has a credential that Spark would show in a plan.

    Raises:
        ConfigError: One has.
    """
    for name, hint in _SHOWN.items():
        value = values.text(name)
        if value is not None and not ASKED.search(value):
            raise fault(
                name,
                "Spark shows the values of options of this name in plans, but this value is a credential",
                hint=hint,
            )


def fault(name: str, problem: str, *, hint: str | None = None) -> ConfigError:
    """Return an error about the option *name*."""
    return ConfigError(f"option {name}: {problem}", hint=hint)
