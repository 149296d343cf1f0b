"""
Hold the batches of a run against what their segment's index says, before any of their records is read.

`formats.batch_offsets` has the rules. Here they are checked for all batches of a run at once. Only a run with
a fault is checked a second time, batch by batch.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import pyarrow as pa

from tieringd.errors import CorruptDataError
from tieringd.formats.batch_offsets import BatchPlace, ExpectedBatches, OffsetCheck, places_in
from tieringd.formats.record_batch import check_crc, parse_header
from tieringd.spark.decoder.kernel import kernel
from tieringd.spark.decoder.record_tables import PLACE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Places: TypeAlias = NDArray[np.void]
    """An array of type PLACE."""

_PLACES: Final = 4096
"""Batches that one call of the kernel finds at most."""


class RunCheck:
    """Checks the offsets of a segment's batches, run by run. Owned by one decoder."""

    def __init__(self, expected: ExpectedBatches) -> None:
        """Check against what is *expected*. Reading may begin at any batch."""
        self._is_dense = expected.is_dense
        self._check = OffsetCheck(expected)
        # Element i is for batches that have i entries of the index at or before them.
        self._entries = np.array([-1, *expected.positions], np.int64)
        self._lowest = np.array([expected.base_offset, *expected.offsets], np.int64)
        self._limits = np.array([*expected.offsets, expected.next_offset], np.int64)
        self._table = np.zeros(_PLACES, PLACE)
        self._find = kernel().place_batches

    def faults_of(self, data: memoryview, position: int) -> dict[int, str]:
        """Return what is wrong with offsets in the next run, by the position of the batch in the object."""
        places = self._places_of(data, position)
        if not len(places):
            return {}
        check = copy(self._check)
        first = BatchPlace(*(int(places[name][0]) for name in ("position", "base_offset", "next_offset")))
        if check.fault_of(first) is None and self._follow_one_another(places):
            check.go_on_at(int(places["next_offset"][-1]))
            self._check = check
            return {}
        return self._check.faults_of(list(places_in(data, position)), damaged=_damaged_in(data, position))

    def _places_of(self, data: memoryview, position: int) -> Places:
        parts: list[Places] = []
        start, at = pa.py_buffer(data).address, 0
        while found := self._find(start + at, start + len(data), self._table):
            part = self._table[:found].copy()
            part["position"] += at
            parts.append(part)
            at = int(self._table["end"][found - 1]) + at
            if found < _PLACES:
                break
        places = np.concatenate(parts) if parts else self._table[:0]
        places["position"] += position
        return places

    def _follow_one_another(self, places: Places) -> bool:
        """Return whether every batch after the first one has the offsets that it must have."""
        begins, ends, positions = places["base_offset"], places["next_offset"], places["position"]
        rows = np.searchsorted(self._entries, positions, side="right") - 1
        lowest = np.maximum(self._lowest[rows][1:], ends[:-1])
        is_exact = (self._entries[rows] == positions)[1:] | self._is_dense
        is_right = (begins[1:] >= lowest) & (ends <= self._limits[rows])[1:] & (begins < ends)[1:]
        # A dense segment's entries have the offset at which the batch before them ends.
        only = np.where(is_exact, np.where(self._is_dense, ends[:-1], self._lowest[rows][1:]), begins[1:])
        return bool(np.all(is_right & (begins[1:] == only)))


def _damaged_in(data: memoryview, position: int) -> frozenset[int]:
    """Return the positions of the batches with wrong checksums."""
    damaged = set()
    for place in places_in(data, position):
        at = place.position - position
        try:
            check_crc(data, parse_header(data, at), at)
        except CorruptDataError:
            damaged.add(place.position)
    return frozenset(damaged)
