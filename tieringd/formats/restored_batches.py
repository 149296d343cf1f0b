"""
Stored batches as the log of another cluster gets them: with other producer ids, and its first leader epoch.

Every cluster gives out producer ids from 0 on. Each replica of a log remembers sequences, epochs and
transactions by producer id, as it reads them in the batches. Under its old id, the last batch of an old
producer would make the first batch of a new one look like a repetition: the broker acknowledges a repetition
and drops it. So a restored log has other ids, in its batches, its markers and its indexes of aborted
transactions. Each restore adds 2**56 to an id:

    0 to 2**56 - 1                  ids that a cluster has given out
    n * 2**56 to (n+1) * 2**56 - 1  the same ids, restored n times

A cluster that gives out a billion ids a second needs two years for 2**56 of them. Two ids never become one,
also where a restored log went on, was archived again and is restored once more. The ids stay positive: to
Kafka and its clients a batch with a negative id has no producer, and belongs to no transaction.

A batch's checksum covers the id, and is computed anew. `put_first_epoch` says why the leader epoch
changes. All else stays as it is, and so do the sizes.

`put_first_epoch` changes the leader epoch of stored batches. Each batch names the epoch of the leader that
wrote it, outside of its checksum. Epochs count the leaders of one cluster: in another one they begin at 0.
A client that read a record of epoch 37 there would ask its broker about a leader that it never had, and go
back or fail. So what another cluster serves as its own has epoch 0 throughout.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import TYPE_CHECKING

from crc32c import crc32c

from tieringd.formats.index_files import encode_transaction_index, parse_transaction_index
from tieringd.formats.record_batch import (
    CRC_STARTS_AT,
    HEADER_BYTES,
    LENGTH_STARTS_AT,
    MIN_LENGTH,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tieringd.model.segment import SegmentIndex


FIRST_LEADER_EPOCH = 0
"""Of any cluster's any topic."""

_LENGTH = struct.Struct(">i")
_LENGTH_FIELD_STARTS_AT = 8
_EPOCH = struct.Struct(">i")
_EPOCH_STARTS_AT = LENGTH_STARTS_AT
"""The length counts from the leader epoch on."""

IDS_OF_A_CLUSTER = 1 << 56
"""More than any cluster gives out, and what a restore adds."""
_MAX_ID = (1 << 63) - 1

_FIELDS = struct.Struct(">qiixI22xq")
"""Of a header: base offset, length, leader epoch, checksum and producer id."""
_CRC = struct.Struct(">I")
_CRC_FIELD_STARTS_AT = 17
_PRODUCER_ID = struct.Struct(">q")
_PRODUCER_ID_STARTS_AT = 43
_HEAD_BYTES = _PRODUCER_ID_STARTS_AT + _PRODUCER_ID.size
"""What changes in a batch lies within this."""


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


def restored_producer_id(producer_id: int) -> int:
    """
    Return the id that a stored batch's producer gets in the log of another cluster.

    A negative id says that there is no producer, and stays. So does one that cannot grow: it has been
    restored 127 times, or no cluster gave it out.
    """
    return producer_id + IDS_OF_A_CLUSTER if 0 <= producer_id <= _MAX_ID - IDS_OF_A_CLUSTER else producer_id


def restored_batch(batch: memoryview) -> tuple[bytes, memoryview]:
    """Return the two pieces of one whole batch in the log of another cluster; its checksum was right."""
    head, rest = bytearray(batch[:_HEAD_BYTES]), batch[_HEAD_BYTES:]
    _EPOCH.pack_into(head, _EPOCH_STARTS_AT, FIRST_LEADER_EPOCH)
    (producer_id,) = _PRODUCER_ID.unpack_from(head, _PRODUCER_ID_STARTS_AT)
    if producer_id >= 0:
        _PRODUCER_ID.pack_into(head, _PRODUCER_ID_STARTS_AT, restored_producer_id(producer_id))
        _CRC.pack_into(head, _CRC_FIELD_STARTS_AT, crc32c(rest, crc32c(head[CRC_STARTS_AT:])))
    return bytes(head), rest


def turn_back(data: bytearray, stored_epoch: Callable[[int], int]) -> tuple[int, bool]:
    """
    Make the whole restored batches at the front of *data* what they were in the archive.

    *stored_epoch* gets each batch's base offset. Returns the bytes of these batches, and whether each of
    them can be what `restored_batch` made. Bytes that are no batch end it, and so does a batch that was
    not restored: another leader epoch, a producer id of a cluster, a wrong checksum.
    """
    at, last_header = 0, len(data) - HEADER_BYTES
    with memoryview(data) as view:
        while at <= last_header:
            base_offset, length, epoch, crc, producer_id = _FIELDS.unpack_from(view, at)
            end = at + LENGTH_STARTS_AT + length
            if length < MIN_LENGTH or end > len(view):
                break
            if epoch != FIRST_LEADER_EPOCH or 0 <= producer_id < IDS_OF_A_CLUSTER:
                return at, False
            if producer_id >= 0:
                covered = view[at + CRC_STARTS_AT : end]
                if crc32c(covered) != crc:
                    return at, False
                _PRODUCER_ID.pack_into(view, at + _PRODUCER_ID_STARTS_AT, producer_id - IDS_OF_A_CLUSTER)
                _CRC.pack_into(view, at + _CRC_FIELD_STARTS_AT, crc32c(covered))
            _EPOCH.pack_into(view, at + _EPOCH_STARTS_AT, stored_epoch(base_offset))
            at = end
    return at, True


def restored_index(index: SegmentIndex) -> SegmentIndex:
    """
    Return a segment's index with the producer ids of the restored log, ours and the broker's.

    Raises:
        CorruptDataError: The broker's index of aborted transactions is damaged.
    """
    aborted = tuple(replace(one, producer_id=restored_producer_id(one.producer_id)) for one in index.aborted)
    stored = index.broker.transaction_index
    if stored is None:
        return replace(index, aborted=aborted)
    entries = parse_transaction_index(stored)
    renamed = [one._replace(producer_id=restored_producer_id(one.producer_id)) for one in entries]
    broker = replace(index.broker, transaction_index=encode_transaction_index(renamed))
    return replace(index, aborted=aborted, broker=broker)
