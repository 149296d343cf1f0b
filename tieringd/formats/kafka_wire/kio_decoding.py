"""
Decode kio's messages safely, also those of peers that are newer than kio.

Kafka's protocol lets a newer peer add tagged fields to a version that is in use (KIP-482), and answer with
error codes that an older peer does not know. kio's reader refuses both. An entity that kio refuses is read
again here, field by field: unknown tagged fields are skipped, and an unknown code becomes a member of
`ErrorCode` that keeps its number. When such a message is encoded, it has that number, and lacks the skipped
fields.

kio's reader also reserves memory for as many entries as an array announces. One frame of 60 bytes that
announces 30 billion entries ends the process, and no exception can be caught. So arrays are read here,
and kio reads only what holds no array. The messages of the daemon's own broker are the exception
(`decoded_of_broker`): they are trusted, and large ones have to be fast. All messages that kio decodes for
this package go through these two functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, TypeAlias, Union, get_args, get_origin

from kio.schema.errors import ErrorCode
from kio.serial import entity_reader, readers
from kio.serial.errors import DecodeError, SerialError, UnexpectedNull

from tieringd.formats.kafka_wire.cursor import MAX_TAGS
from tieringd.formats.kafka_wire.request_header import MAX_PARTITIONS

UNREADABLE: Final = (SerialError, ValueError, TypeError, IndexError, OverflowError)
"""What `decoded` raises for bytes that are not a message of the schema."""

_Reader: TypeAlias = Callable[[bytes, int], tuple[Any, int]]
"""Reads a value at a position. Returns it, and its size in bytes."""

_NULL_ENTITY: Final = -1


def decoded(schema: Any, data: bytes) -> tuple[Any, int]:
    """
    Return the entity of kio's class *schema* at the beginning of *data*, and its size in bytes.

    Raises:
        SerialError, ValueError, TypeError, IndexError, OverflowError: The bytes are no such entity.
    """
    return _entity(schema)(data, 0)


def decoded_of_broker(schema: Any, data: bytes) -> tuple[Any, int]:
    """
    Return what `decoded` returns, faster. An array that announces too many entries may end the process.

    Raises:
        SerialError, ValueError, TypeError, IndexError, OverflowError: The bytes are no such entity.
    """
    return _lenient(entity_reader(schema), _entity(schema))(data, 0)


@cache
def error_code(number: int) -> ErrorCode:
    """Return the error code with this number. For an unknown number it is not retriable."""
    try:
        return ErrorCode(number)
    except ValueError:
        code = int.__new__(ErrorCode, number)
        code._name_, code._value_ = f"unknown_error_{number}", number
        code.retriable = False
        return code


def _error_code(data: bytes, at: int) -> tuple[ErrorCode, int]:
    number, size = readers.read_int16(data, at)
    return error_code(number), size


_FIXED: Final[dict[str, _Reader]] = {
    "bool": readers.read_boolean,
    "int8": readers.read_int8,
    "int16": readers.read_int16,
    "int32": readers.read_int32,
    "int64": readers.read_int64,
    "uint8": readers.read_uint8,
    "uint16": readers.read_uint16,
    "uint32": readers.read_uint32,
    "uint64": readers.read_uint64,
    "float64": readers.read_float64,
    "uuid": readers.read_uuid,
    "error_code": _error_code,
    "timedelta_i32": readers.read_timedelta_i32,
    "timedelta_i64": readers.read_timedelta_i64,
}
_COMPACT: Final[dict[tuple[str, bool], _Reader]] = {
    ("string", False): readers.read_compact_string,
    ("string", True): readers.read_compact_string_nullable,
    ("bytes", False): readers.read_compact_string_as_bytes,
    ("bytes", True): readers.read_compact_string_as_bytes_nullable,
}
_LEGACY: Final[dict[tuple[str, bool], _Reader]] = {
    ("string", False): readers.read_legacy_string,
    ("string", True): readers.read_nullable_legacy_string,
    ("bytes", False): readers.read_legacy_bytes,
    ("bytes", True): readers.read_nullable_legacy_bytes,
}
_TIMES: Final[dict[bool, _Reader]] = {
    False: readers.read_datetime_i64,
    True: readers.read_nullable_datetime_i64,
}


@cache
def _entity(schema: Any) -> _Reader:
    """Return the reader of an entity. kio reads it if it holds no array and nothing unknown."""
    return _by_field(schema) if _holds_array(schema) else _lenient(entity_reader(schema), _by_field(schema))


def _holds_array(schema: Any) -> bool:
    kinds = [_kind(one) for one in fields(schema)]
    return any(kind.is_array or (is_dataclass(kind.inner) and _holds_array(kind.inner)) for kind in kinds)


def _lenient(fast: _Reader, by_field: _Reader) -> _Reader:
    def read(data: bytes, at: int) -> tuple[Any, int]:
        try:
            return fast(data, at)
        except (KeyError, ValueError):
            # kio raises KeyError for an unknown tagged field, and ValueError for an unknown error code.
            return by_field(data, at)

    return read


@cache
def _by_field(schema: Any) -> _Reader:
    """Return a reader that is lenient. A tagged field that is absent has the default of kio's class."""
    plain = [(one.name, _field(one, schema)) for one in fields(schema) if "tag" not in one.metadata]
    tagged = {
        int(one.metadata["tag"]): (one.name, _field(one, schema))
        for one in fields(schema)
        if "tag" in one.metadata
    }

    def read(data: bytes, begin: int) -> tuple[Any, int]:
        at, values = begin, {}
        for name, reader in plain:
            values[name], size = reader(data, at)
            at += size
        if schema.__flexible__:
            found, size = _tagged_fields(data, at, tagged)
            values |= found
            at += size
        return schema(**values), at - begin

    return read


def _tagged_fields(
    data: bytes, begin: int, known: dict[int, tuple[str, _Reader]]
) -> tuple[dict[str, Any], int]:
    """Read a section of tagged fields. Return the known values by name, and the section's size."""
    values = {}
    count, size = readers.read_unsigned_varint(data, begin)
    if count > MAX_TAGS:
        raise DecodeError(f"{count} tagged fields in one place, and at most {MAX_TAGS} are read")
    at = begin + size
    for _ in range(count):
        tag, size = readers.read_unsigned_varint(data, at)
        at += size
        length, size = readers.read_unsigned_varint(data, at)
        at += size
        if length > len(data) - at:
            raise DecodeError(f"a tagged field of {length} bytes, where {len(data) - at} are left")
        if tag in known:
            name, reader = known[tag]
            values[name], _ = reader(data, at)
        at += length
    return values, at - begin


@dataclass(frozen=True, slots=True)
class _Kind:
    """The type of a field, taken apart."""

    inner: Any
    """The class of the value, or of the array's entries."""
    is_array: bool
    is_nullable: bool


def _kind(field: Field[Any]) -> _Kind:
    is_nullable = get_origin(field.type) in (UnionType, Union)
    kind = next(one for one in get_args(field.type) if one is not NoneType) if is_nullable else field.type
    if get_origin(kind) is not tuple:
        return _Kind(kind, is_array=False, is_nullable=is_nullable)
    return _Kind(get_args(kind)[0], is_array=True, is_nullable=is_nullable)


def _field(field: Field[Any], schema: Any) -> _Reader:
    """Return the reader of a field's value; *schema* is the class that has the field."""
    kind = _kind(field)
    if kind.is_array:
        length = (
            readers.read_compact_array_length if schema.__flexible__ else readers.read_legacy_array_length
        )
        entry = _value(field, schema, kind.inner, may_be_null=False)
        return _array(entry, length, may_be_null=kind.is_nullable)
    # The absence of a tagged field is its null.
    may_be_null = kind.is_nullable and "tag" not in field.metadata
    return _value(field, schema, kind.inner, may_be_null=may_be_null)


def _array(entry: _Reader, read_length: _Reader, *, may_be_null: bool) -> _Reader:
    def read(data: bytes, begin: int) -> tuple[Any, int]:
        length, size = read_length(data, begin)
        if length is None or length < 0:
            if not may_be_null:
                raise UnexpectedNull("an array is null that may not be")
            return None, size
        at, entries = begin + size, []
        if length > len(data) - at:
            raise DecodeError(f"an array of {length} entries, where {len(data) - at} bytes are left")
        if length > MAX_PARTITIONS:
            raise DecodeError(f"an array of {length} entries, and at most {MAX_PARTITIONS} are read")
        for _ in range(length):
            one, size = entry(data, at)
            entries.append(one)
            at += size
        return tuple(entries), at - begin

    return read


def _value(field: Field[Any], schema: Any, kind: Any, *, may_be_null: bool) -> _Reader:
    if is_dataclass(kind):
        # Without the annotation mypy takes the class for an instance, which has no hash.
        schema_of_entity: Any = kind
        entity = _entity(schema_of_entity)
        return _nullable(entity) if may_be_null else entity
    kafka_type = str(field.metadata["kafka_type"])
    if kafka_type in _FIXED:
        return _FIXED[kafka_type]
    if kafka_type == "datetime_i64":
        return _TIMES[may_be_null]
    table = _COMPACT if schema.__flexible__ else _LEGACY
    # In a request header, the client id has its old form in every version.
    if field.name == "client_id" and schema.__name__ == "RequestHeader":
        table = _LEGACY
    return table["bytes" if kafka_type == "records" else kafka_type, may_be_null]


def _nullable(reader: _Reader) -> _Reader:
    """Return the reader of an entity that may be null (KIP-893)."""

    def read(data: bytes, at: int) -> tuple[Any, int]:
        marker, size = readers.read_int8(data, at)
        if marker == _NULL_ENTITY:
            return None, size
        entity, size_of_entity = reader(data, at + size)
        return entity, size + size_of_entity

    return read
