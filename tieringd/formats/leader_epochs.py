"""
Leader epochs inside of stored batches, for a log that another cluster goes on with.

Each batch names the epoch of the leader that wrote it, outside of its checksum. Epochs count the leaders
of one cluster: in another one they begin at 0, and a client that read a record of epoch 37 there would
ask its broker about a leader that it never had, and go back or fail. So what another cluster serves as
its own has epoch 0 throughout. Nothing else of a batch is touched here.
"""

from __future__ import annotations

import struct

from tieringd.formats.record_batch import HEADER_BYTES, LENGTH_STARTS_AT, MIN_LENGTH

FIRST_LEADER_EPOCH = 0
"""Of any cluster's any topic."""

_LENGTH = struct.Struct(">i")
_LENGTH_FIELD_STARTS_AT = 8
_EPOCH = struct.Struct(">i")
_EPOCH_STARTS_AT = LENGTH_STARTS_AT
"""The length counts from the leader epoch on."""


def put_first_epoch(data: bytearray) -> None:
    """Put the first leader epoch into the whole batches at the front of *data*, up to bytes that are none."""
    at, last_header = 0, len(data) - HEADER_BYTES
    while at <= last_header:
        (length,) = _LENGTH.unpack_from(data, at + _LENGTH_FIELD_STARTS_AT)
        end = at + LENGTH_STARTS_AT + length
        if length < MIN_LENGTH or end > len(data):
            break
        _EPOCH.pack_into(data, at + _EPOCH_STARTS_AT, FIRST_LEADER_EPOCH)
        at = end
