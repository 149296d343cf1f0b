"""
The bytes of a file store's objects: copied and summed in small pieces, in a thread.

It knows descriptors, and neither keys nor paths.
"""

from __future__ import annotations

import os
from itertools import chain
from typing import TYPE_CHECKING

from crc32c import crc32c as crc32c_of

from tieringd.errors import StorageUnavailable
from tieringd.storage.base import FileSlice
from tieringd.storage.slices import truncated, unreadable

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Iterator

    from tieringd.storage.base import Body

_CHUNK_BYTES = 1 << 20


def copied(bodies: Iterable[Body], out: int, stop: threading.Event) -> int:
    """
    Write *bodies* to *out*, one after the other, and return the checksum of what was written.

    A kernel copy would save nothing: the bytes have to be read once more for the checksum.
    """
    checksum = 0
    for chunk in chain.from_iterable(map(_chunks, bodies)):
        if stop.is_set():
            raise StorageUnavailable("the put was cancelled")
        checksum = crc32c_of(chunk, checksum)
        left = chunk
        while left:
            left = left[os.write(out, left) :]
    return checksum


def _chunks(body: Body) -> Iterator[memoryview]:
    """Yield the body in pieces; each is valid until the next one is asked for."""
    if not isinstance(body, FileSlice):
        view = memoryview(body)
        yield from (view[start : start + _CHUNK_BYTES] for start in range(0, len(view), _CHUNK_BYTES))
        return
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, body.size_bytes)))
    position, end = body.position, body.position + body.size_bytes
    while position < end:
        try:
            size = os.preadv(body.fd, [buffer[: end - position]], position)
        except OSError as error:
            raise unreadable(body.fd, error) from error
        if size == 0:
            raise truncated(body, position)
        yield buffer[:size]
        position += size


def crc32c_of_file(fd: int) -> int:
    """Return the checksum of an open file, read through one small buffer."""
    checksum, position = 0, 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    while size := os.preadv(fd, [buffer], position):
        checksum = crc32c_of(buffer[:size], checksum)
        position += size
    return checksum
