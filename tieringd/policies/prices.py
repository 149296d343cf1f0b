"""
Public list prices of object stores, in US dollars.

They are for a region of the United States, of the year in their label, of the first tier and without a
discount: an estimate, not a bill.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_MONTH_DAYS: Final = 30


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices of one storage class."""

    label: str
    """The store, the region and the year of the prices."""
    currency: str
    storage_gib_month: float
    """The price of one GiB for one month; stores call the unit GB."""
    writes_1000: float
    """The price of 1000 writing requests, or listings."""
    reads_1000: float = 0.0
    """The price of 1000 reading requests."""

    def storage_cost(self, size_bytes: int) -> float:
        """Return the cost of storing *size_bytes* for a month."""
        return size_bytes / (1 << 30) * self.storage_gib_month

    def write_cost(self, requests: float) -> float:
        """Return the cost of a number of writing requests."""
        return requests / 1000 * self.writes_1000

    def read_cost(self, requests: float) -> float:
        """Return the cost of a number of reading requests."""
        return requests / 1000 * self.reads_1000

    def day_of_storage_cost(self, size_bytes: int) -> float:
        """Return the cost of storing *size_bytes* for a day."""
        return self.storage_cost(size_bytes) / _MONTH_DAYS


LIST_PRICES: Final[Mapping[str, Prices]] = {
    "aws": Prices("S3 Standard, us-east-1, list price of 2025", "USD", 0.023, 0.005, 0.0004),
    "google": Prices("Cloud Storage Standard, us-central1, list price of 2025", "USD", 0.020, 0.005, 0.0004),
    "azure": Prices("Blob Storage Hot LRS, East US, list price of 2025", "USD", 0.0184, 0.005, 0.0005),
}
"""List prices by backend."""
