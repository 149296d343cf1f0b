"""The value of one metric, read as a scrape reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge


def value_of(metric: Counter | Gauge) -> float:
    """Return the value of a counter or gauge without labels, or with all of them given."""
    (family,) = metric.collect()
    return family.samples[0].value
