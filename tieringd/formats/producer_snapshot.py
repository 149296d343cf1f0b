"""
A producer snapshot of Kafka that tells of no producer.

    i16 version 1, u32 CRC-32C of what follows, i32 number of producers
"""

from __future__ import annotations

import struct

from crc32c import crc32c

_VERSION = 1
_NO_PRODUCERS = bytes(4)

EMPTY_PRODUCER_SNAPSHOT = struct.pack(">hI", _VERSION, crc32c(_NO_PRODUCERS)) + _NO_PRODUCERS
