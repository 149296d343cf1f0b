"""
Small messages, decoded and encoded whole by kio.

This is for requests and responses that must be read in full and that hold no records, of every API and
version that kio has, also those that the gateway does not inspect.
"""

from __future__ import annotations

import struct
from io import BytesIO
from types import ModuleType
from typing import Any, Final

from kio.index import load_payload_module, load_request_schema, load_response_schema
from kio.serial import entity_writer
from kio.static.constants import EntityType

from tieringd.errors import ProtocolViolation
from tieringd.formats.kafka_wire.cursor import SIZE_BYTES, Cursor
from tieringd.formats.kafka_wire.kio_decoding import UNREADABLE, decoded
from tieringd.formats.kafka_wire.request_header import HEAD, RequestHead

_SIZE: Final = struct.Struct(">i")
_FRAME: Final = struct.Struct(">ii")


def response_module(api_key: int, version: int) -> ModuleType:
    """Return kio's module with the classes of a response."""
    return load_payload_module(api_key, version, EntityType.response)


def decode_request(view: memoryview, head: RequestHead) -> Any:
    """
    Return kio's message of a request, whole and with its size, of an API and version that kio has.

    Bytes after the message are ignored, as a broker does: librdkafka sends three with a Metadata request for
    all topics, whose array has room for a count of four bytes and needs one.

    Raises:
        ProtocolViolation: kio cannot read it.
    """
    schema: Any = load_request_schema(head.api_key, head.version)
    cursor = Cursor(view, HEAD.size)
    cursor.string(compact=False)
    if schema.__header_schema__.__flexible__:
        cursor.skip_tags()
    message, _ = _decoded(view[cursor.at :], schema)
    return message


def made(schema: Any, **values: Any) -> Any:
    """Return a message of kio's class *schema*, without those of *values* that its version lacks."""
    fields = schema.__dataclass_fields__
    return schema(**{name: value for name, value in values.items() if name in fields})


def decode_response(view: memoryview, api_key: int, version: int) -> Any:
    """
    Return kio's message of a response, whole and with its size.

    Raises:
        ProtocolViolation: kio cannot read it, or bytes follow it.
    """
    schema: Any = load_response_schema(api_key, version)
    cursor = Cursor(view, SIZE_BYTES + 4)
    if schema.__header_schema__.__flexible__:
        cursor.skip_tags()
    message, left = _decoded(view[cursor.at :], schema)
    if left:
        raise ProtocolViolation(f"a {schema.__name__} is {left} bytes too long")
    return message


def encode_response(correlation_id: int, response: Any) -> bytes:
    """Return *response*, a message of kio, with its header and size."""
    buffer = BytesIO()
    buffer.write(_FRAME.pack(0, correlation_id))
    if response.__header_schema__.__flexible__:
        buffer.write(b"\x00")
    entity_writer(type(response))(buffer, response)
    encoded = bytearray(buffer.getvalue())
    _SIZE.pack_into(encoded, 0, len(encoded) - SIZE_BYTES)
    return bytes(encoded)


def _decoded(body: memoryview, schema: Any) -> tuple[Any, int]:
    """Return the message at the beginning of *body*, and the number of bytes after it."""
    try:
        message, size = decoded(schema, bytes(body))
    except UNREADABLE as error:
        raise ProtocolViolation(
            f"a {schema.__name__} of version {schema.__version__} cannot be read: {error!r}"
        ) from error
    return message, len(body) - size
