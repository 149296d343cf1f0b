"""
The `base_index` that Redpanda keeps beside a segment, read for its bounds and for one time.

The file is one envelope of Redpanda's own serialisation, and the fields in it have a checksum:

     0  u8  version               1 u8 oldest version that its readers must know
     2  u32 length of the rest    6 u32 length of the fields
    10  fields                    after them u32 CRC32C of the fields

The fields are, in this order, one set more with each version:

     0  u32 flags, unused         4 i64 base offset              12 i64 maximum offset
    20  i64 base timestamp       28 i64 maximum timestamp
    36  three columns, each a u32 count and its entries: u32 offsets, u32 times, u64 positions
    since version 5: u8 times ascend, u8 times are biased, u8 no data yet
    since version 6: optional i64, when the broker appended clients' records last, by its own clock
    since version 7: optional u64, compactible records
    since version 8: optional i64, when it was compacted
    since version 9: u8 tombstones may be there

All integers are little endian, offsets are raw (see `model.offset_translation`), times are
milliseconds. An optional value is a u8, 1 or 0, and the value if it is 1. Versions 4 to 9 are
read to their last byte. A newer version whose readers need only a known version may have more
fields after these. The columns are skipped: they index other offsets and positions than ours.
Version 3 and older had no envelope, and no broker time.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from crc32c import crc32c

from tieringd.errors import CorruptDataError

OLDEST_VERSION: Final = 4
NEWEST_VERSION: Final = 9
"""The newest version with only known fields."""

_ENVELOPE = struct.Struct("<BBI")
_COUNT = struct.Struct("<I")
_HEAD = struct.Struct("<Iqqqq")
_FIELDS_START_AT = _ENVELOPE.size + _COUNT.size
_TIME = struct.Struct("<q")

_ENTRY_BYTES = (4, 4, 8)
"""The entry sizes of the three columns."""
_STATE_FLAGS = 3

_STATE_FLAGS_SINCE = 5
_BROKER_TIME_SINCE = 6
_COMPACTIBLE_RECORDS_SINCE = 7
_COMPACTION_TIME_SINCE = 8
_TOMBSTONES_SINCE = 9


@dataclass(frozen=True, slots=True)
class BaseIndex:
    """The content of an index about its segment. Offsets are raw."""

    base_offset: int
    max_offset: int
    """The last offset of the last batch; 0 if no batch was indexed yet."""
    base_timestamp_ms: int
    max_timestamp_ms: int
    broker_timestamp_ms: int | None
    """Time of the last append of clients' records in ms since the epoch; None if the index lacks it."""


def parse_base_index(data: bytes) -> BaseIndex:
    """
    Return the content of the whole file *data*.

    Raises:
        CorruptDataError: The file is cut or altered, or of a version that cannot be read.
    """
    version = _readable_version(data)
    fields = _Fields(_checked_fields(data, version))
    _, base_offset, max_offset, base_timestamp_ms, max_timestamp_ms = _HEAD.unpack(fields.take(_HEAD.size))
    _step_over_columns(fields)
    if version >= _STATE_FLAGS_SINCE:
        for _ in range(_STATE_FLAGS):
            fields.take_flag()
    broker_timestamp_ms = fields.take_optional() if version >= _BROKER_TIME_SINCE else None
    if version <= NEWEST_VERSION:
        _require_known_end(fields, version)
    if broker_timestamp_ms is not None and broker_timestamp_ms < 0:
        # Redpanda's "no timestamp" is -1, as Kafka's is.
        broker_timestamp_ms = None
    return BaseIndex(base_offset, max_offset, base_timestamp_ms, max_timestamp_ms, broker_timestamp_ms)


class _Fields:
    """A reader that takes one field after the other, and raises where too few bytes are left."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._taken = 0

    @property
    def position(self) -> int:
        """Return the position of the next field in the file."""
        return _FIELDS_START_AT + self._taken

    @property
    def left_bytes(self) -> int:
        return len(self._view) - self._taken

    def take(self, size_bytes: int) -> memoryview:
        missing_bytes = size_bytes - self.left_bytes
        if missing_bytes > 0:
            raise CorruptDataError(
                f"the fields of the index end early, bytes missing: {missing_bytes}", position=self.position
            )
        taken = self._view[self._taken : self._taken + size_bytes]
        self._taken += size_bytes
        return taken

    def take_flag(self) -> bool:
        position = self.position
        value = self.take(1)[0]
        if value not in {0, 1}:
            raise CorruptDataError(f"a flag of the index is {value}", position=position)
        return value == 1

    def take_optional(self) -> int | None:
        """Return a value of eight bytes, or None."""
        if not self.take_flag():
            return None
        value: int = _TIME.unpack(self.take(_TIME.size))[0]
        return value


def _readable_version(data: bytes) -> int:
    if data and data[0] < OLDEST_VERSION:
        raise CorruptDataError(
            f"the index has version {data[0]}, and versions before {OLDEST_VERSION} are not read", position=0
        )
    if len(data) < _FIELDS_START_AT:
        raise CorruptDataError(f"the index is cut short: {len(data)} bytes", position=len(data))
    version, needed, _ = _ENVELOPE.unpack_from(data)
    if needed > version:
        raise CorruptDataError(f"the index has version {version} and needs a reader of {needed}", position=1)
    if needed > NEWEST_VERSION:
        raise CorruptDataError(
            f"the index needs a reader of version {needed}; this release reads {OLDEST_VERSION} to "
            f"{NEWEST_VERSION}",
            position=1,
            hint="Update tieringd: a newer Redpanda may have written the index",
        )
    return int(version)


def _checked_fields(data: bytes, version: int) -> memoryview:
    """Return the fields, after a check of the lengths around them and of their checksum."""
    _, _, length = _ENVELOPE.unpack_from(data)
    if length != len(data) - _ENVELOPE.size:
        raise CorruptDataError(
            f"the index should have {_ENVELOPE.size + length} bytes and has {len(data)}", position=2
        )
    (size_bytes,) = _COUNT.unpack_from(data, _ENVELOPE.size)
    crc_at = _FIELDS_START_AT + size_bytes
    behind = len(data) - crc_at - _COUNT.size
    if behind < 0 or (behind and version <= NEWEST_VERSION):
        raise CorruptDataError(
            f"the fields of the index cannot have {size_bytes} of its {len(data)} bytes",
            position=_ENVELOPE.size,
        )
    fields = memoryview(data)[_FIELDS_START_AT:crc_at]
    (expected,) = _COUNT.unpack_from(data, crc_at)
    found = crc32c(fields)
    if found != expected:
        raise CorruptDataError(f"index CRC is {found:08x} and should be {expected:08x}", position=crc_at)
    return fields


def _step_over_columns(fields: _Fields) -> None:
    counts: list[int] = []
    for entry_bytes in _ENTRY_BYTES:
        position = fields.position
        (count,) = _COUNT.unpack(fields.take(_COUNT.size))
        counts.append(count)
        if count != counts[0]:
            raise CorruptDataError(
                f"a column of the index has {count} entries, and the first has {counts[0]}", position=position
            )
        fields.take(count * entry_bytes)


def _require_known_end(fields: _Fields, version: int) -> None:
    """Take the fields that are not used here, and check that none is left."""
    if version >= _COMPACTIBLE_RECORDS_SINCE:
        fields.take_optional()
    if version >= _COMPACTION_TIME_SINCE:
        fields.take_optional()
    if version >= _TOMBSTONES_SINCE:
        fields.take_flag()
    if fields.left_bytes:
        raise CorruptDataError(
            f"the index has more fields than its version {version}, bytes left: {fields.left_bytes}",
            position=fields.position,
        )
