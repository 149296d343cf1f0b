"""
The place, such as a directory, of each record: a function of the UTC hour of its timestamp.

Hours are counted from the epoch. A record without a timestamp has -1 ms, as everywhere in Kafka, and belongs
to the last hour of 1969. A timestamp beyond the range of microseconds is null here, and has no hour.
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
"""The first microsecond of year 1."""
LAST_US: Final = 253_402_300_799_999_999
"""The last microsecond of year 9999. Calendars and readers of tables accept nothing beyond these two."""
NO_HOUR: Final = -(2**63)
"""The hour of a record whose timestamp is null."""

Place = TypeVar("Place", bound="Hashable")


def split_by_place(
    batch: pa.RecordBatch, place_of: Callable[[int | None], Place]
) -> Iterator[tuple[Place, pa.RecordBatch]]:
    """
    Yield the rows of *batch*, which has a column `timestamp`, place by place, in their order.

    *place_of* returns the place of an hour; its argument is None for records without an hour.
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
    Return the hours of a column of microseconds; NO_HOUR for null.

    Timestamps are clipped to the range from FIRST_US to LAST_US before.
    """
    micros: NDArray[np.int64] = timestamps.view(pa.int64()).fill_null(NO_HOUR).to_numpy()
    hours: NDArray[np.int64] = np.clip(micros, FIRST_US, LAST_US) // HOUR_US
    hours[micros == NO_HOUR] = NO_HOUR
    return hours


def _hour(number: int) -> int | None:
    return None if number == NO_HOUR else number


def utc(hour: int) -> datetime:
    """Return the begin of an hour, which is counted from the epoch."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(hours=hour)
