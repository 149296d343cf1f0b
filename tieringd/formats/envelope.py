"""
The envelope of our own documents: kind, version, length and checksum.

    0  4 bytes  magic, names the kind of document
    4  u16      format version
    6  u16      zero
    8  u32      length of the body
    12 u32      CRC32C of bytes 0 to 11 and the body
    16 body

All integers are big endian. Nothing follows the body. A document is whole and right, or reading it raises a
`CorruptDataError`: there is no partial reading.
"""

from __future__ import annotations

import struct

from crc32c import crc32c

from tieringd.errors import CorruptDataError

_HEAD = struct.Struct(">4sHHI")
_CRC = struct.Struct(">I")
ENVELOPE_BYTES = _HEAD.size + _CRC.size


def seal(magic: bytes, version: int, body: bytes) -> bytes:
    """Return *body* in an envelope."""
    head = _HEAD.pack(magic, version, 0, len(body))
    return head + _CRC.pack(crc32c(body, crc32c(head))) + body


def unseal(data: bytes, magic: bytes, *, newest_version: int, kind: str) -> tuple[int, bytes]:
    """
    Return the version and the body of a document.

    Raises:
        CorruptDataError: It is not a document of this *kind*, is cut or altered, or was written
            by a newer release.
    """
    if len(data) < ENVELOPE_BYTES:
        raise CorruptDataError(f"{kind} is cut short: {len(data)} bytes")
    found_magic, version, _zero, length = _HEAD.unpack_from(data)
    if found_magic != magic:
        raise CorruptDataError(f"this is not a {kind}: it begins with {found_magic!r}", position=0)
    if len(data) != ENVELOPE_BYTES + length:
        raise CorruptDataError(
            f"{kind} should have {ENVELOPE_BYTES + length} bytes and has {len(data)}", position=len(data)
        )
    body = data[ENVELOPE_BYTES:]
    (expected,) = _CRC.unpack_from(data, _HEAD.size)
    if crc32c(body, crc32c(data[: _HEAD.size])) != expected:
        raise CorruptDataError(f"{kind} has a wrong checksum")
    if not 1 <= version <= newest_version:
        raise CorruptDataError(
            f"{kind} has format version {version}; this release reads 1 to {newest_version}",
            hint="Upgrade tieringd on this host",
        )
    return version, body
