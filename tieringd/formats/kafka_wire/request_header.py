"""
The head of a request: its API, version and correlation id.

The first eight bytes after the size field are the same in every version of the header, so a request can be
passed on without further knowledge. Only the APIs that the gateway inspects are named here.

`cap_versions` lowers the versions that the broker offers in an ApiVersions response to those that the
gateway knows. The response is changed in place, so its other fields stay the same. Only APIs that the
gateway inspects are lowered; a client may use any version of the others.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from tieringd.errors import ProtocolViolation
from tieringd.formats.kafka_wire.cursor import SIZE_BYTES, Cursor

HEAD: Final = struct.Struct(">ihhi")
"""Size, API key, API version and correlation id."""

UNSUPPORTED_VERSION: Final = 35
_RANGE: Final = struct.Struct(">hhh")
_MAX_VERSION: Final = struct.Struct(">h")
_UNSUPPORTED: Final = struct.Struct(">iihihhh")


class InspectedApi(IntEnum):
    """The APIs that the gateway inspects."""

    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    SASL_HANDSHAKE = 17
    API_VERSIONS = 18
    DELETE_RECORDS = 21
    OFFSET_FOR_LEADER_EPOCH = 23
    DESCRIBE_LOG_DIRS = 35
    SASL_AUTHENTICATE = 36


KNOWN_VERSIONS: Final[dict[int, range]] = {
    InspectedApi.PRODUCE: range(3, 14),
    InspectedApi.FETCH: range(4, 19),
    InspectedApi.LIST_OFFSETS: range(1, 12),
    InspectedApi.API_VERSIONS: range(5),
    InspectedApi.DELETE_RECORDS: range(3),
    InspectedApi.OFFSET_FOR_LEADER_EPOCH: range(2, 5),
    InspectedApi.DESCRIBE_LOG_DIRS: range(1, 6),
}
"""
The known versions.

Newer ones are hidden from clients (`cap_versions`). Older ones, of clients from before 2017, pass
without inspection.
"""

MAX_PARTITIONS: Final = 50_000
"""The most partitions, or entries of another array, in one message. Clients send fewer."""
_KIB, _MIB = 1 << 10, 1 << 20
REQUEST_BYTES_MAX: Final[dict[int, int]] = {
    InspectedApi.FETCH: 4 * _MIB,
    InspectedApi.LIST_OFFSETS: 4 * _MIB,
    InspectedApi.OFFSET_FOR_LEADER_EPOCH: 4 * _MIB,
    InspectedApi.DESCRIBE_LOG_DIRS: 4 * _MIB,
    # It is decoded before it is passed on.
    InspectedApi.DELETE_RECORDS: 256 * _KIB,
    InspectedApi.API_VERSIONS: 64 * _KIB,
    InspectedApi.SASL_HANDSHAKE: 64 * _KIB,
    InspectedApi.SASL_AUTHENTICATE: _MIB,
}
"""The largest request of each kind that the gateway inspects or that comes before a login."""

FIRST_FLEXIBLE: Final[dict[int, int]] = {
    InspectedApi.PRODUCE: 9,
    InspectedApi.FETCH: 12,
    InspectedApi.LIST_OFFSETS: 6,
    InspectedApi.API_VERSIONS: 3,
    InspectedApi.DELETE_RECORDS: 2,
    InspectedApi.OFFSET_FOR_LEADER_EPOCH: 4,
    InspectedApi.DESCRIBE_LOG_DIRS: 2,
}
"""The first version of each API with compact lengths and tagged fields."""


def is_flexible(api_key: int, version: int) -> bool:
    """Return whether a version has compact lengths and tagged fields."""
    return version >= FIRST_FLEXIBLE[api_key]


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The first fields of a request."""

    size: int
    """Size of the bytes after the size field."""
    api_key: int
    version: int
    correlation_id: int

    @classmethod
    def read(cls, view: memoryview, at: int = 0) -> RequestHead:
        """
        Read the head of a request that begins at *at*, with its size.

        Raises:
            IncompleteMessage: There are fewer than twelve bytes.
        """
        return cls(*Cursor(view, at).fixed(HEAD))

    def require_size(self, limit_bytes: int) -> None:
        """
        Check the announced size of the request.

        Raises:
            ProtocolViolation: It is smaller than a header, or larger than *limit_bytes*.
        """
        if not HEAD.size - SIZE_BYTES <= self.size <= limit_bytes:
            raise ProtocolViolation(
                f"a client sent a request of {self.size} bytes to API {self.api_key}",
                hint=f"Such requests may have at most {limit_bytes} bytes",
            )

    @property
    def is_known(self) -> bool:
        """Return whether the gateway knows this API and version."""
        return self.version in KNOWN_VERSIONS.get(self.api_key, ())

    @property
    def is_flexible(self) -> bool:
        """Return whether the request has compact lengths and tagged fields; it must be known."""
        return is_flexible(self.api_key, self.version)


def client_id_of(view: memoryview) -> bytes | None:
    """
    Return the client id in a request, whole and with its size.

    Raises:
        IncompleteMessage: The header does not end in *view*.
    """
    return Cursor(view, HEAD.size).string(compact=False)


def request_body(view: memoryview, head: RequestHead) -> int:
    """
    Return the position of the body in *view*, a known request with its size.

    Raises:
        IncompleteMessage: The header does not end in *view*.
    """
    cursor = Cursor(view, HEAD.size)
    cursor.string(compact=False)
    if head.is_flexible:
        cursor.skip_tags()
    return cursor.at


def cap_versions(response: memoryview, version: int) -> None:
    """
    Lower the versions in *response*, whole and with its size field, in place.

    A broker that does not know *version* responds in version 0, with an error.

    Raises:
        ProtocolViolation: It is no ApiVersions response.
    """
    # The header of this response is never flexible: a client reads it before it knows any version.
    cursor = Cursor(response, SIZE_BYTES + 4)
    compact = is_flexible(InspectedApi.API_VERSIONS, version) and cursor.int16() != UNSUPPORTED_VERSION
    cursor.at = SIZE_BYTES + 4 + 2
    for _ in range(cursor.length(compact=compact)):
        begin = cursor.at
        api_key, _, highest = cursor.fixed(_RANGE)
        known = KNOWN_VERSIONS.get(api_key)
        if known is not None and highest >= known.stop:
            _MAX_VERSION.pack_into(response, begin + 4, known.stop - 1)
        if compact:
            cursor.skip_tags()


def unsupported(correlation_id: int) -> bytes:
    """Return the response to a version of ApiVersions that the gateway does not know."""
    known = KNOWN_VERSIONS[InspectedApi.API_VERSIONS]
    return _UNSUPPORTED.pack(
        _UNSUPPORTED.size - SIZE_BYTES,
        correlation_id,
        UNSUPPORTED_VERSION,
        1,
        InspectedApi.API_VERSIONS,
        0,
        known.stop - 1,
    )
