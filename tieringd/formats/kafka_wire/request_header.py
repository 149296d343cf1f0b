"""
The head of a request: which API, which version, whose answer it waits for.

The first eight bytes are the same in every version of the header, so a request can be passed on
without knowing more of it. Only the APIs that the gateway looks at are named here.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from tieringd.formats.kafka_wire.cursor import Cursor

SIZE_BYTES: Final = 4
"""Before every request and response: the size of what follows."""
HEAD: Final = struct.Struct(">ihhi")
"""Size, API key, API version and correlation id."""


class Api(IntEnum):
    """The APIs that the gateway looks at."""

    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    SASL_HANDSHAKE = 17
    API_VERSIONS = 18
    DELETE_RECORDS = 21
    OFFSET_FOR_LEADER_EPOCH = 23
    DESCRIBE_LOG_DIRS = 35


KNOWN_VERSIONS: Final[dict[int, range]] = {
    Api.PRODUCE: range(3, 14),
    Api.FETCH: range(4, 19),
    Api.LIST_OFFSETS: range(1, 12),
    Api.API_VERSIONS: range(5),
    Api.DELETE_RECORDS: range(3),
    Api.OFFSET_FOR_LEADER_EPOCH: range(2, 5),
    Api.DESCRIBE_LOG_DIRS: range(1, 6),
}
"""
The versions that are understood. Newer ones are kept from clients (`cap_versions`);
older ones, of clients from before 2017, pass without being looked at.
"""

FIRST_FLEXIBLE: Final[dict[int, int]] = {
    Api.PRODUCE: 9,
    Api.FETCH: 12,
    Api.LIST_OFFSETS: 6,
    Api.API_VERSIONS: 3,
    Api.DELETE_RECORDS: 2,
    Api.OFFSET_FOR_LEADER_EPOCH: 4,
    Api.DESCRIBE_LOG_DIRS: 2,
}
"""The first version of each API with compact lengths and tagged fields."""


def is_flexible(api_key: int, version: int) -> bool:
    """Say whether a version has compact lengths and tagged fields."""
    return version >= FIRST_FLEXIBLE[api_key]


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The first fields of a request."""

    size: int
    """Of what follows the size itself."""
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

    @property
    def is_known(self) -> bool:
        """Say whether the gateway understands this request."""
        return self.version in KNOWN_VERSIONS.get(self.api_key, ())

    @property
    def is_flexible(self) -> bool:
        """Say whether it has compact lengths and tagged fields; it must be known."""
        return is_flexible(self.api_key, self.version)


def client_id_of(view: memoryview) -> bytes | None:
    """
    Return what the client of a request, whole and with its size, calls itself.

    Raises:
        IncompleteMessage: The header does not end in *view*.
    """
    return Cursor(view, HEAD.size).string(compact=False)


def request_body(view: memoryview, head: RequestHead) -> int:
    """
    Return where the body begins in *view*, a known request with its size.

    Raises:
        IncompleteMessage: The header does not end in *view*.
    """
    cursor = Cursor(view, HEAD.size)
    cursor.string(compact=False)
    if head.is_flexible:
        cursor.skip_tags()
    return cursor.at
