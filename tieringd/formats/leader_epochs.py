"""
Leader epochs inside of stored batches, for a log that another cluster goes on with.

Each batch names the epoch of the leader that wrote it, outside of its checksum. Epochs count the leaders
of one cluster: in another one they begin at 0, and a client that read a record of epoch 37 there would
ask its broker about a leader that it never had, and go back or fail. So what another cluster serves as
its own has epoch 0 throughout. Nothing else of a batch is touched here.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from tieringd.formats.record_batch import HEADER_BYTES, LENGTH_STARTS_AT, MIN_LENGTH

if TYPE_CHECKING:
    from collections.abc import Callable

FIRST_LEADER_EPOCH = 0
"""Of any cluster's any topic."""

_FIELDS = struct.Struct(">qii")
"""Base offset, length and leader epoch."""
_EPOCH = struct.Struct(">i")
_EPOCH_STARTS_AT = LENGTH_STARTS_AT
"""The length counts from the leader epoch on."""
_EPOCH_ENDS_AT = _EPOCH_STARTS_AT + _EPOCH.size
_FIRST = _EPOCH.pack(FIRST_LEADER_EPOCH)


def pieces_under_first_epoch(batch: memoryview) -> tuple[memoryview, bytes, memoryview]:
    """Return the pieces of one whole batch, which together are that batch under the first leader epoch."""
    return batch[:_EPOCH_STARTS_AT], _FIRST, batch[_EPOCH_ENDS_AT:]


def exchange_epochs(data: bytearray, epoch_of: Callable[[int], int]) -> tuple[int, set[int]]:
    """
    Put other leader epochs into the whole batches at the front of *data*.

    *epoch_of* gets each batch's base offset. Returns how many bytes these batches have, and which epochs
    they had before. Bytes that are no batch end it.
    """
    before: set[int] = set()
    at, last_header = 0, len(data) - HEADER_BYTES
    while at <= last_header:
        base_offset, length, epoch = _FIELDS.unpack_from(data, at)
        end = at + LENGTH_STARTS_AT + length
        if length < MIN_LENGTH or end > len(data):
            break
        before.add(epoch)
        _EPOCH.pack_into(data, at + _EPOCH_STARTS_AT, epoch_of(base_offset))
        at = end
    return at, before
