"""
Which file a record belongs to: a function of the hour of its timestamp, in UTC.

Hours are counted from the epoch. A record without a timestamp has -1 ms, as everywhere in Kafka, and belongs
to the last hour of 1969. One whose timestamp no microseconds can hold has none here, and no hour.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from numpy.typing import NDArray

HOUR_US: Final = 3_600_000_000
FIRST_US: Final = -62_135_596_800_000_000
"""The first microsecond of year 1, and ..."""
LAST_US: Final = 253_402_300_799_999_999
"""... the last one of year 9999: what calendars, and those who read tables, can name."""
NO_HOUR: Final = -(2**63)
"""Of a record without a time."""

Place = TypeVar("Place", bound="Hashable")


def split_by_place(
    batch: pa.RecordBatch, place_of: Callable[[int | None], Place]
) -> Iterator[tuple[Place, pa.RecordBatch]]:
    """
    Yield the rows of *batch*, which has a column `timestamp`, place by place; each in the order they had.

    *place_of* gives the place of an hour, and of records without one.
    """
    if not batch.num_rows:
        return
    hours = hours_of(batch.column("timestamp"))
    first, last = int(hours.min()), int(hours.max())
    if first == last:
        yield place_of(_hour(first)), batch
        return
    distinct, numbers = np.unique(hours, return_inverse=True)
    places: dict[Place, int] = {}
    place_numbers = np.array(
        [places.setdefault(place_of(_hour(one)), len(places)) for one in distinct.tolist()]
    )
    of_row = place_numbers[numbers]
    if len(places) == 1:
        yield next(iter(places)), batch
        return
    order = np.argsort(of_row, kind="stable")
    bounds = np.flatnonzero(np.diff(of_row[order])) + 1
    for rows in np.split(order, bounds):
        place = list(places)[of_row[rows[0]]]
        is_run = rows[-1] - rows[0] + 1 == len(rows)
        yield place, batch.slice(rows[0], len(rows)) if is_run else batch.take(pa.array(rows))


def hours_of(timestamps: pa.Array) -> NDArray[np.int64]:
    """
    Return the hours of a column of microseconds, NO_HOUR where there is none.

    Times that no calendar names count as the nearest one that it does.
    """
    micros: NDArray[np.int64] = timestamps.view(pa.int64()).fill_null(NO_HOUR).to_numpy()
    hours: NDArray[np.int64] = np.clip(micros, FIRST_US, LAST_US) // HOUR_US
    hours[micros == NO_HOUR] = NO_HOUR
    return hours


def _hour(number: int) -> int | None:
    return None if number == NO_HOUR else number


def utc(hour: int) -> datetime:
    """Return when an hour begins."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(hours=hour)
