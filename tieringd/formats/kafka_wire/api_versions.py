"""
ApiVersions: what the broker offers, lowered to what the gateway understands.

The answer is changed in place, so everything else that it says stays as it was. Only APIs that
the gateway looks at are lowered; of the others a client may use any version.
"""

from __future__ import annotations

import struct
from typing import Final

from tieringd.formats.kafka_wire.cursor import Cursor
from tieringd.formats.kafka_wire.request_header import KNOWN_VERSIONS, SIZE_BYTES, Api, is_flexible

UNSUPPORTED_VERSION: Final = 35
_RANGE: Final = struct.Struct(">hhh")
_MAX_VERSION: Final = struct.Struct(">h")
_UNSUPPORTED: Final = struct.Struct(">iihihhh")


def cap_versions(response: memoryview, version: int) -> None:
    """
    Lower the versions in *response*, whole and with its size field, in place.

    A broker that does not know *version* answers in version 0, with an error.

    Raises:
        ProtocolViolation: It is no ApiVersions response.
    """
    # The header of this response is never flexible: a client reads it before it knows anything.
    cursor = Cursor(response, SIZE_BYTES + 4)
    compact = is_flexible(Api.API_VERSIONS, version) and cursor.int16() != UNSUPPORTED_VERSION
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
    """Return the answer to a version of ApiVersions that the gateway does not understand."""
    known = KNOWN_VERSIONS[Api.API_VERSIONS]
    return _UNSUPPORTED.pack(
        _UNSUPPORTED.size - SIZE_BYTES,
        correlation_id,
        UNSUPPORTED_VERSION,
        1,
        Api.API_VERSIONS,
        0,
        known.stop - 1,
    )
