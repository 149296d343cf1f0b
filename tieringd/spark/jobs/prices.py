"""
An operator's own prices of an object store, and the number of requests of an upload.

Without a file of prices the list prices of `policies.prices` are used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from tieringd.errors import ConfigError
from tieringd.policies.prices import LIST_PRICES, Prices

if TYPE_CHECKING:
    # An ordinary import would load pydantic and xxhash into processes that do not need them.
    from tieringd.config import Config

_BESIDE_PARTS: Final = {"s3": 2, "azure": 1}
"""Requests of a multipart upload besides those of its parts: to begin and to complete it."""


def list_prices(config: Config) -> Prices | None:
    """Return the list prices of the configured store; None if none are known."""
    return LIST_PRICES.get(config.backend or "")


def read_prices(path: Path) -> Prices:
    """
    Return the prices in a YAML file.

    Raises:
        ConfigError: The file cannot be read, or is not a list of prices.
    """
    try:
        document = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return _prices(document, path)


def _prices(document: Any, path: Path) -> Prices:
    numbers = ("storage_gib_month", "writes_1000")
    texts = {"label": f"{path.name}", "currency": "USD"}
    if not isinstance(document, dict):
        raise ConfigError(f"{path} is no list of prices", hint=f"It must have {' and '.join(numbers)}")
    problems = [f"{key}: there is no such key" for key in document if key not in {*numbers, *texts}]
    problems += [
        f"{key}: expected a number that is not negative"
        for key in numbers
        if not _is_price(document.get(key))
    ]
    if problems:
        raise ConfigError(f"{path} is wrong", problems=tuple(problems))
    return Prices(
        str(document.get("label", texts["label"])),
        str(document.get("currency", texts["currency"])),
        float(document["storage_gib_month"]),
        float(document["writes_1000"]),
    )


def _is_price(value: Any) -> bool:
    # YAML's .nan and .inf are not prices.
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


@dataclass(frozen=True, slots=True)
class UploadRequests:
    """The number of writing requests that store an object, depending on its size."""

    parts_from_bytes: int | None
    """Objects of this size or more are uploaded in parts; None if all are uploaded in one piece."""
    part_bytes: int
    beside_parts: int

    @classmethod
    def of(cls, config: Config) -> UploadRequests:
        """Return the rules for the configured store."""
        beside = _BESIDE_PARTS.get(config.store_kind or "")
        threshold = config.cloud_storage_multipart_threshold_bytes if beside is not None else None
        return cls(threshold, config.cloud_storage_multipart_part_size_bytes, beside or 0)

    def of_object(self, size_bytes: int) -> int:
        """Return the requests of one object."""
        if self.parts_from_bytes is None or size_bytes < self.parts_from_bytes:
            return 1
        return -(-size_bytes // self.part_bytes) + self.beside_parts

    def of_segment(self, size_bytes: int) -> int:
        """Return the requests of a segment: its data, its index, and the commit that names it."""
        return self.of_object(size_bytes) + 2
