"""
Stored batches in the form for the log of another cluster: other producer ids, and its first leader epoch.

Every cluster assigns producer ids from 0 on. Each replica of a log keeps sequences, epochs and transactions
by producer id, as it reads them in the batches. Under its old id, the last batch of an old producer would
make the first batch of a new one look like a repetition: the broker acknowledges a repetition and drops it.
So a restored log has other ids, in its batches, its markers and its indexes of aborted transactions. Each
restore adds 2**56 to an id:

    0 to 2**56 - 1                  ids that a cluster has assigned
    n * 2**56 to (n+1) * 2**56 - 1  the same ids, restored n times

A cluster that assigns a billion ids a second needs two years for 2**56 of them. Two ids never become one,
not even when a restored log was continued, archived again and is restored once more. The ids stay positive:
to Kafka and its clients a batch with a negative id has no producer, and belongs to no transaction.

A batch's checksum covers the id, and is computed anew. All other fields and the sizes stay the same, except
for the leader epoch.

`put_first_epoch` changes the leader epoch of stored batches. Each batch holds the epoch of the leader that
wrote it, outside of its checksum. Epochs count the leaders of one cluster, and begin at 0 in another one. A
client that read a record of epoch 37 there would ask its broker about a leader that the cluster never had,
and would reset its position or fail. So all batches that another cluster serves as its own have epoch 0.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

from crc32c import crc32c

from tieringd.formats.index_files import encode_transaction_index, parse_transaction_index
from tieringd.formats.record_batch import (
    CRC_STARTS_AT,
    HEADER_BYTES,
    LENGTH_STARTS_AT,
    MIN_LENGTH,
)
from tieringd.model.segment import SegmentIndex

FIRST_LEADER_EPOCH = 0
"""The first leader epoch of a topic in any cluster."""

_LENGTH = struct.Struct(">i")
_LENGTH_FIELD_STARTS_AT = 8
_EPOCH = struct.Struct(">i")
_EPOCH_STARTS_AT = LENGTH_STARTS_AT
"""The length counts from the leader epoch on."""

IDS_OF_A_CLUSTER = 1 << 56
"""More ids than any cluster assigns. A restore adds this number to an id."""
_MAX_ID = (1 << 63) - 1

_FIELDS = struct.Struct(">qiixI22xq")
"""Fields of a header: base offset, length, leader epoch, checksum and producer id."""
_CRC = struct.Struct(">I")
_CRC_FIELD_STARTS_AT = 17
_PRODUCER_ID = struct.Struct(">q")
_PRODUCER_ID_STARTS_AT = 43
_HEAD_BYTES = _PRODUCER_ID_STARTS_AT + _PRODUCER_ID.size
"""All bytes that change in a batch are in this head."""


def put_first_epoch(data: bytearray) -> None:
    """
    Put the first leader epoch into the whole batches at the front of *data*.

    It stops at the first bytes that are not a whole batch.
    """
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
    Return the producer id of a stored batch in the log of another cluster.

    A negative id means that there is no producer, and stays. An id too large to grow stays as well: it
    was restored 127 times, or no cluster assigned it.
    """
    return producer_id + IDS_OF_A_CLUSTER if 0 <= producer_id <= _MAX_ID - IDS_OF_A_CLUSTER else producer_id


def restored_batch(batch: memoryview) -> tuple[bytes, memoryview]:
    """Return one whole batch in its form for another cluster, in two pieces. Its checksum must be right."""
    head, rest = bytearray(batch[:_HEAD_BYTES]), batch[_HEAD_BYTES:]
    _EPOCH.pack_into(head, _EPOCH_STARTS_AT, FIRST_LEADER_EPOCH)
    (producer_id,) = _PRODUCER_ID.unpack_from(head, _PRODUCER_ID_STARTS_AT)
    if producer_id >= 0:
        _PRODUCER_ID.pack_into(head, _PRODUCER_ID_STARTS_AT, restored_producer_id(producer_id))
        _CRC.pack_into(head, _CRC_FIELD_STARTS_AT, crc32c(rest, crc32c(head[CRC_STARTS_AT:])))
    return bytes(head), rest


def turn_back(data: bytearray, stored_epoch: Callable[[int], int]) -> tuple[int, bool]:
    """
    Turn the whole restored batches at the front of *data* back into their archived form.

    *stored_epoch* gets each batch's base offset. Returns the size of these batches in bytes, and whether
    each of them can be a result of `restored_batch`. It ends at bytes that are no whole batch, and at a
    batch that was not restored: one with another leader epoch, a producer id of a cluster, or a wrong
    checksum.
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
    Return a segment's index with the restored log's producer ids, in our part and the broker's.

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
